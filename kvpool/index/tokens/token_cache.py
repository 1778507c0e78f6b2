"""``TokenCache``: the tokens of long texts, made piece by piece; known pieces are looked up.

Prompts grow: a conversation's next turn repeats the last. Encoding takes 0.3 us a byte, a lookup a hundredth of that.
Texts are cut where tokenizers cut regardless of context: at special tokens, and after ``PIECE_CHARS`` between words.
What has no such place, as digits, is one piece. All searches go by steps of a few thousand characters: they hold the
interpreter's lock.
Each tokenizer is probed when loaded; one that fails gets whole texts. Each piece knows which one came behind it last:
where the text goes on with that one, it is neither searched for an end nor hashed.
"""

from __future__ import annotations

import re
import threading
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Any

from kvpool.index.tokens.text_work import TextWork

PIECE_CHARS = 4096  # at least, of a piece that does not end at a special token
SPECIAL_CHARS = 256  # at least, of one that does: a lookup takes as long as 10 characters
GROWTH = 8  # times that, the further in a text the more: a chat may have a thousand messages
GROWN_AT = 16 << 10  # characters from the beginning
MAX_PIECE_CHARS = 256 << 10  # of a remembered piece
MAX_NBYTES = 128 << 20
ENTRY_NBYTES = 512  # of memory beside text and tokens

# Before a space between letters, and before a mark of Chinese or Japanese text between them. The patterns of
# GPT-2, Llama 3, Qwen, DeepSeek and gpt-oss all begin a new piece there. No digits: some count them from the left.
# The mark comes first: it is searched for 50 times as fast as letters.
_BETWEEN_WORDS = re.compile(r"[ 。，、！？；：](?<=[^\W\d_].)(?=[^\W\d_])")  # noqa: RUF001
_PROBES = (
    "The quick brown fox jumps over the lazy dog, doesn't it?  Two spaces, three   spaces\tand a tab. ",
    "Numbers 1234567890 3.14 and_under_scores camelCase HTTPServer\n\n  def f(x):\n    return x ** 2\r\n",
    "Grüße aus Köln — naïve café 你好，世界。これはテストです、はい！ Привет мир هذا نص 안녕 하세요 🙂 ok ",  # noqa: RUF001
    " leading space, trailing space and ALL CAPS WORDS I'll they've \u00a0 no-break e\u0301 combined ",
)


class _Piece:
    """``following``: the piece that came behind it last, while it is remembered."""

    __slots__ = ("__weakref__", "following", "text", "tokens")

    def __init__(self, text: str, tokens: array[int]) -> None:
        self.text, self.tokens = text, tokens
        self.following: weakref.ref[_Piece] | None = None


class TokenCache:
    """``encode``: the tokens of a text, without a tokenizer's own at the ends; it leaves the interpreter's lock to
    others. Any thread; ``_lock`` guards ``_known`` and ``_nbytes``.

    ``added_tokens``: matched verbatim in a text. ``cuts``: whether texts are cut.
    """

    def __init__(self, encode: Callable[[str], list[int]], added_tokens: Iterable[Any]) -> None:
        self._encode = encode
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Piece] = OrderedDict()
        self._nbytes = 0
        self._start = _Piece("", array("I"))  # before each text
        added = list(added_tokens)
        special = [one.content for one in added if not one.normalized]
        self._special = _pattern(special)
        self._longest = max(map(len, special), default=0)
        # Else what comes behind a piece could move its end.
        self._follows = not _overlap(frozenset(special))
        # Tokens that absorb neighbouring spaces, or match only whole words, depend on their context.
        plain = not any(one.lstrip or one.rstrip or one.single_word for one in added)
        spaced = any(_BETWEEN_WORDS.search(one.content) for one in added)
        self._piece_chars, self._special_chars = PIECE_CHARS, SPECIAL_CHARS
        self.cuts = plain and not spaced and self._is_exact([one.content for one in added][:8])

    def tokens(self, text: str, work: TextWork | None = None) -> array[int]:
        """``work``: in which unknown pieces count; None: unbounded. Errors: those of ``TextWork.encoding``."""
        work = TextWork() if work is None else work
        if not self.cuts or len(text) <= self._special_chars:
            return self._encoded(text, work)
        pieces: list[_Piece] = []
        before, begin = self._start, 0
        while begin < len(text):
            piece = self._following(before, text, begin)
            if piece is None:
                work.left = len(text) - begin
                piece = self._piece(text[begin : self._end(text, begin)], work)
                before.following = weakref.ref(piece)
            pieces.append(piece)
            before, begin = piece, begin + len(piece.text)
        with self._lock:
            for piece in pieces:
                if piece.text in self._known:
                    self._known.move_to_end(piece.text)
        return array("I", b"".join([piece.tokens for piece in pieces]))

    def _following(self, before: _Piece, text: str, begin: int) -> _Piece | None:
        """The piece that came behind this one last, if the text goes on with it and can be cut behind it."""
        piece = before.following() if before.following is not None and self._follows else None
        if piece is None or not text.startswith(piece.text, begin):
            return None
        end = begin + len(piece.text)
        at_special = self._special is not None and self._special.match(text, end)
        return piece if at_special or end == len(text) or _BETWEEN_WORDS.match(text, end) else None

    def _encoded(self, text: str, work: TextWork) -> array[int]:
        with work.encoding(text):
            return array("I", self._encode(text))

    def _piece(self, text: str, work: TextWork) -> _Piece:
        with self._lock:
            known = self._known.get(text)
        if known is not None:
            return known
        piece = _Piece(text, self._encoded(text, work))
        if len(text) > MAX_PIECE_CHARS:
            return piece
        with self._lock:
            known = self._known.setdefault(text, piece)
            if known is piece:
                self._nbytes += _nbytes(piece)
            while self._nbytes > MAX_NBYTES:
                self._nbytes -= _nbytes(self._known.popitem(last=False)[1])
        return known

    def _end(self, text: str, begin: int) -> int:
        """Of the piece that begins here."""
        least = begin + self._special_chars * max(1, min(GROWTH, GROWTH * begin // GROWN_AT))
        last = begin + self._piece_chars
        end, searched = self._special_from(text, begin, least, last)
        while end is None and last < len(text):
            at, last = last, last + PIECE_CHARS
            if (cut := _BETWEEN_WORDS.search(text, at, last + 1)) is not None:
                last = cut.start()
            end, searched = self._special_from(text, searched, least, last)
            if end is None and cut is not None:
                return last
        return len(text) if end is None else end

    def _special_from(self, text: str, begin: int, least: int, last: int) -> tuple[int | None, int]:
        """Where a special token begins that ends a piece, from ``least`` to ``last``; and where to search on."""
        searched = begin
        for found in self._special.finditer(text, begin, last + self._longest) if self._special else ():
            if found.start() > last:
                break
            if found.start() >= least:
                return found.start(), found.start()
            searched = found.end()
        return None, max(searched, last + 1)

    def _is_exact(self, special: list[str]) -> bool:
        """Whether pieces give the tokens of the whole text, wherever it is cut."""
        mixed = "".join(probe + one for probe, one in zip(_PROBES * 2, [*special, *[""] * 8], strict=False))
        self._piece_chars = self._special_chars = 1
        try:
            for probe in (*_PROBES, mixed, mixed * 3):
                parts: list[int] = []
                begin = 0
                while begin < len(probe):
                    end = self._end(probe, begin)
                    parts += self._encode(probe[begin:end])
                    begin = end
                if parts != self._encode(probe):
                    return False
        finally:
            self._piece_chars, self._special_chars = PIECE_CHARS, SPECIAL_CHARS
        return True


def _pattern(contents: list[str]) -> re.Pattern[str] | None:
    if not contents:
        return None
    letters = _Letters()
    for one in contents:
        at = letters
        for letter in one:
            at = at.setdefault(letter, _Letters())
        at[""] = _Letters()
    return re.compile(_alternatives(letters))


class _Letters(dict[str, "_Letters"]):
    """The contents by their next letter; "": one ends."""


def _alternatives(letters: _Letters) -> str:
    """The longest token at a place, as in the library. By letters: of 800 tokens that begin alike each was compared."""
    only = ""
    while len(letters) == 1 and "" not in letters:
        ((letter, letters),) = letters.items()
        only += re.escape(letter)
    further = [re.escape(letter) + _alternatives(rest) for letter, rest in letters.items() if letter]
    if not further:
        return only
    return f"{only}(?:{'|'.join(further)})" + ("?" if "" in letters else "")


def _overlap(contents: Collection[str]) -> bool:
    """Whether one may begin within another."""
    beginnings = {one[:end] for one in contents for end in range(1, len(one) + 1)}
    rests = {one[begin:] for one in contents for begin in range(1, len(one))}
    return any(
        rest in beginnings or any(rest[:end] in contents for end in range(1, len(rest))) for rest in rests
    )


def _nbytes(piece: _Piece) -> int:
    return ENTRY_NBYTES + len(piece.text.encode("utf-8", "surrogatepass")) + 4 * len(piece.tokens)
