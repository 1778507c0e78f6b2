"""``TokenCache``: the tokens of long texts, made piece by piece; known pieces are looked up.

Prompts grow: a conversation's next turn repeats the last. Encoding takes 0.3 us a byte, a lookup a hundredth of that.
Texts are cut where tokenizers cut regardless of context: at special tokens, and after ``PIECE_CHARS`` between words.
Each tokenizer is probed when loaded; one that fails gets whole texts. Runs of ``RUN_CHARS`` and more between special
tokens are remembered whole, too: a chat of 220,000 characters is 27 lookups of runs, and those of the last pieces.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

PIECE_CHARS = 4096  # at least, of a piece that does not end at a special token
SPECIAL_CHARS = 256  # at least, of one that does: a lookup takes as long as 10 characters
RUN_CHARS = 2 * PIECE_CHARS
MAX_PIECE_CHARS = 4 * PIECE_CHARS  # of a remembered piece or run
MAX_NBYTES = 128 << 20
ENTRY_NBYTES = 256  # of memory beside text and tokens

# Before a space between letters, and before a mark of Chinese or Japanese text between them. The patterns of
# GPT-2, Llama 3, Qwen, DeepSeek and gpt-oss all begin a new piece there. No digits: some count them from the left.
_BETWEEN_WORDS = re.compile(r"(?<=[^\W\d_])(?=[ 。，、！？；：][^\W\d_])")  # noqa: RUF001
_PROBES = (
    "The quick brown fox jumps over the lazy dog, doesn't it?  Two spaces, three   spaces\tand a tab. ",
    "Numbers 1234567890 3.14 and_under_scores camelCase HTTPServer\n\n  def f(x):\n    return x ** 2\r\n",
    "Grüße aus Köln — naïve café 你好，世界。これはテストです、はい！ Привет мир هذا نص 안녕 하세요 🙂 ok ",  # noqa: RUF001
    " leading space, trailing space and ALL CAPS WORDS I'll they've \u00a0 no-break e\u0301 combined ",
)


class TokenCache:
    """``encode``: the tokens of a text, without a tokenizer's own at the ends. Any thread.

    ``added_tokens``: matched verbatim in a text. ``cuts``: whether texts are cut.
    """

    def __init__(self, encode: Callable[[str], list[int]], added_tokens: Iterable[Any]) -> None:
        self._encode = encode
        self._lock = threading.Lock()
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._nbytes = 0
        added = list(added_tokens)
        self._special = _pattern([one.content for one in added if not one.normalized])
        # Tokens that absorb neighbouring spaces, or match only whole words, depend on their context.
        plain = not any(one.lstrip or one.rstrip or one.single_word for one in added)
        spaced = any(_BETWEEN_WORDS.search(one.content) for one in added)
        self._piece_chars, self._special_chars, self._run_chars = PIECE_CHARS, SPECIAL_CHARS, RUN_CHARS
        self.cuts = plain and not spaced and self._is_exact([one.content for one in added][:8])

    def tokens(self, text: str) -> array[int]:
        if not self.cuts or len(text) <= self._special_chars:
            return array("I", self._encode(text))
        made = array("I")
        begin = 0
        for end in self._run_ends(text):
            run = text[begin:end]
            if (known := self._find(run)) is None:
                self._keep(run, known := self._by_piece(run))
            made += known
            begin = end
        return made + self._by_piece(text[begin:])

    def _run_ends(self, text: str) -> Iterator[int]:
        begin = 0
        for found in self._special.finditer(text) if self._special else ():
            if found.start() - begin >= self._run_chars:
                yield (begin := found.start())

    def _by_piece(self, text: str) -> array[int]:
        made = array("I")
        for piece in self._pieces(text):
            if (known := self._find(piece)) is None:
                self._keep(piece, known := array("I", self._encode(piece)))
            made += known
        return made

    def _pieces(self, text: str) -> Iterator[str]:
        for begin, end in self._between_special(text):
            while end - begin > self._piece_chars:
                cut = _BETWEEN_WORDS.search(text, begin + self._piece_chars, end)
                if cut is None:
                    break
                yield text[begin : cut.start()]
                begin = cut.start()
            if end > begin:
                yield text[begin:end]

    def _between_special(self, text: str) -> Iterator[tuple[int, int]]:
        begin = 0
        for found in self._special.finditer(text) if self._special else ():
            if found.start() - begin >= self._special_chars:
                yield begin, found.start()
                begin = found.start()
        yield begin, len(text)

    def _find(self, text: str) -> array[int] | None:
        with self._lock:
            known = self._known.get(text)
            if known is not None:
                self._known.move_to_end(text)
            return known

    def _keep(self, text: str, made: array[int]) -> None:
        if len(text) > MAX_PIECE_CHARS:
            return
        with self._lock:
            if text not in self._known:
                self._known[text] = made
                self._nbytes += _nbytes(text, made)
            while self._nbytes > MAX_NBYTES:
                self._nbytes -= _nbytes(*self._known.popitem(last=False))

    def _is_exact(self, special: list[str]) -> bool:
        """Whether pieces give the tokens of the whole text, wherever it is cut."""
        mixed = "".join(probe + one for probe, one in zip(_PROBES * 2, [*special, *[""] * 8], strict=False))
        self._piece_chars = self._special_chars = 1
        try:
            for probe in (*_PROBES, mixed, mixed * 3):
                parts = [token for piece in self._pieces(probe) for token in self._encode(piece)]
                if parts != self._encode(probe):
                    return False
        finally:
            self._piece_chars, self._special_chars = PIECE_CHARS, SPECIAL_CHARS
        return True


def _pattern(contents: list[str]) -> re.Pattern[str] | None:
    if not contents:
        return None
    # The longest token at a place, as in the library.
    return re.compile("|".join(re.escape(one) for one in sorted(contents, key=len, reverse=True)))


def _nbytes(piece: str, tokens: array[int]) -> int:
    return ENTRY_NBYTES + len(piece.encode("utf-8", "surrogatepass")) + 4 * len(tokens)
