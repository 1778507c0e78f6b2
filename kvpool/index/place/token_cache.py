"""``TokenCache``: the tokens of long texts, made piece by piece; pieces that were seen before are looked up.

Prompts grow: the next turn of a conversation repeats all of the last one. Making tokens takes 0.3 us a byte, a lookup a
hundredth of that. A text is cut where the tokenizer cuts it whatever stands around: at special tokens, and behind
``PIECE_CHARS`` between words. Whether a tokenizer does is tried out when it is loaded; where it does not, its texts are
not cut.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

PIECE_CHARS = 4096  # at least, of a piece that does not end at a special token
MAX_PIECE_CHARS = 4 * PIECE_CHARS  # of one that is remembered
MAX_NBYTES = 128 << 20
ENTRY_NBYTES = 256  # of memory beside text and tokens

# Before a space between letters, and before a mark of Chinese or Japanese text between them. The patterns by which
# tokenizers of GPT-2, Llama 3, Qwen, DeepSeek and gpt-oss cut text all begin a new piece there. No digits: some count
# them from the left.
_BETWEEN_WORDS = re.compile(r"(?<=[^\W\d_])(?=[ 。，、！？；：][^\W\d_])")  # noqa: RUF001
_PROBES = (
    "The quick brown fox jumps over the lazy dog, doesn't it?  Two spaces, three   spaces\tand a tab. ",
    "Numbers 1234567890 3.14 and_under_scores camelCase HTTPServer\n\n  def f(x):\n    return x ** 2\r\n",
    "Grüße aus Köln — naïve café 你好，世界。これはテストです、はい！ Привет мир هذا نص 안녕 하세요 🙂 ok ",  # noqa: RUF001
    " leading space, trailing space and ALL CAPS WORDS I'll they've \u00a0 no-break e\u0301 combined ",
)


class TokenCache:
    """``encode``: the tokens of a text, without those that a tokenizer adds at its ends. Any thread may call anything.

    ``added_tokens``: those that stand in a text for themselves. ``cuts``: whether texts are cut.
    """

    def __init__(self, encode: Callable[[str], list[int]], added_tokens: Iterable[Any]) -> None:
        self._encode = encode
        self._lock = threading.Lock()
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._nbytes = 0
        added = list(added_tokens)
        self._special = _pattern([one.content for one in added if not one.normalized])
        # Tokens that take the spaces beside them, or only stand as a word, depend on what stands around.
        plain = not any(one.lstrip or one.rstrip or one.single_word for one in added)
        spaced = any(_BETWEEN_WORDS.search(one.content) for one in added)
        self._piece_chars = PIECE_CHARS
        self.cuts = plain and not spaced and self._is_exact([one.content for one in added][:8])

    def tokens(self, text: str) -> array[int]:
        """Of ``text``, as ``encode`` makes them."""
        if not self.cuts or len(text) <= self._piece_chars:
            return array("I", self._encode(text))
        made = array("I")
        for piece in self._pieces(text):
            made += self._of_piece(piece)
        return made

    def _pieces(self, text: str) -> Iterator[str]:
        begins = [0, *(found.start() for found in self._special.finditer(text))] if self._special else [0]
        for begin, end in zip(begins, [*begins[1:], len(text)], strict=True):
            while end - begin > self._piece_chars:
                cut = _BETWEEN_WORDS.search(text, begin + self._piece_chars, end)
                if cut is None:
                    break
                yield text[begin : cut.start()]
                begin = cut.start()
            if end > begin:
                yield text[begin:end]

    def _of_piece(self, piece: str) -> array[int]:
        with self._lock:
            known = self._known.get(piece)
            if known is not None:
                self._known.move_to_end(piece)
                return known
        made = array("I", self._encode(piece))
        if len(piece) <= MAX_PIECE_CHARS:
            with self._lock:
                if piece not in self._known:
                    self._known[piece] = made
                    self._nbytes += _nbytes(piece, made)
                while self._nbytes > MAX_NBYTES:
                    self._nbytes -= _nbytes(*self._known.popitem(last=False))
        return made

    def _is_exact(self, special: list[str]) -> bool:
        """Whether the tokens of texts that are cut, wherever that is allowed, are those of the whole."""
        mixed = "".join(probe + one for probe, one in zip(_PROBES * 2, [*special, *[""] * 8], strict=False))
        self._piece_chars = 1
        try:
            for probe in (*_PROBES, mixed, mixed * 3):
                parts = [token for piece in self._pieces(probe) for token in self._encode(piece)]
                if parts != self._encode(probe):
                    return False
        finally:
            self._piece_chars = PIECE_CHARS
        return True


def _pattern(contents: list[str]) -> re.Pattern[str] | None:
    if not contents:
        return None
    # The longest of those that begin at a place, as the library has it.
    return re.compile("|".join(re.escape(one) for one in sorted(contents, key=len, reverse=True)))


def _nbytes(piece: str, tokens: array[int]) -> int:
    return ENTRY_NBYTES + len(piece.encode("utf-8", "surrogatepass")) + 4 * len(tokens)
