"""``TextWork``: what is made of one prompt's text, counted before it is made.

Callers choose texts, and values that a template repeats. A text may take as long as its ``Bounds`` allow, and takes
its memory from the limits. ``active``: the work of the thread's template.
"""

from __future__ import annotations

import string
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from kvpool.errors import ConfigError, KVPoolError
from kvpool.index.limits import TEXTS, Limits

MAX_RENDERED_CHARS = 8 << 20  # of a chat: twice the longest request
MADE = 4  # times that with what expressions of its template make on the way
CHAR_NBYTES = 4
UNIT_CHARS = 64 << 10  # that are counted in the memory at a time
# Of memory for a piece that is made into tokens: for a character (30 to 105 measured), and more for each that is no
# letter, as many tokenizers split there (350 for digits).
ENCODED_NBYTES, SPLIT_NBYTES = 96, 256
_LETTERS = string.ascii_letters.encode()


class Bounds(NamedTuple):
    """``chars``: of unknown text, which are made into tokens. ``steps``: values that a template reads, and messages.
    ``piece_chars``: of a text that cannot be cut.
    """

    chars: int
    steps: int
    piece_chars: int


INLINE = Bounds(16 << 10, 16 << 10, 16 << 10)  # in the event loop: 10 ms
SHORT = Bounds(64 << 10, 64 << 10, 64 << 10)  # 50 ms
MAX_STEPS = 4 << 20  # of any template: 2 s
WHOLE = Bounds(MAX_RENDERED_CHARS, MAX_STEPS, MAX_RENDERED_CHARS)


class LongText(KVPoolError):
    """Its work is beyond its bounds: it needs larger ones."""


class TooMuchText(ConfigError):
    """No bounds allow it."""


class Goes(Protocol):
    def go_on(self, left: int, cost: int) -> None:
        """Before work of ``cost`` characters or steps; ``left``: with what comes behind it."""


class TextWork:
    """Of one text, in one thread; ``close`` gives its memory back. ``limits``: None: without a bound on memory.
    ``turn``: is asked before each piece, and each ``SHORT.steps``; None: it goes on.
    """

    def __init__(
        self, bounds: Bounds = WHOLE, limits: Limits | None = None, turn: Goes | None = None
    ) -> None:
        self._bounds, self._limits, self._turn = bounds, limits, turn
        self._chars = bounds.chars
        self.left = 0  # characters of the text from the next piece on
        self.steps = min(bounds.steps, SHORT.steps)  # before the next stop
        self._later_steps = bounds.steps - self.steps
        owner_chars = MAX_RENDERED_CHARS if limits is None else limits.limit_of_owner_nbytes // CHAR_NBYTES
        self._most_made = MADE * min(MAX_RENDERED_CHARS, owner_chars)
        self._made = self._taken_nbytes = 0

    def close(self) -> None:
        if self._limits is not None:
            self._limits.give(self._taken_nbytes, TEXTS)
        self._taken_nbytes = 0

    def step(self, steps: int = 1) -> None:
        """Errors: ``LongText``, ``TooMuchText``."""
        self.steps -= steps
        while self.steps < 0:
            self.stop()

    def stop(self) -> None:
        """Takes more steps. Errors: ``LongText``, ``TooMuchText``: there are none left; those of the turn."""
        if (more := min(self._later_steps, SHORT.steps)) > 0:
            self._later_steps -= more
            self.steps += more
            if self._turn is not None:  # how many there will be is not known: who had more goes later
                self._turn.go_on(self._bounds.steps - self._later_steps, more)
            return
        if self._bounds.steps < MAX_STEPS:
            raise LongText("the chat takes its template long")
        raise TooMuchText(f"the chat takes its template more than {MAX_STEPS} steps")

    def make(self, chars: int) -> None:
        """A template makes a text of them now. Errors: ``TooMuchText``; ``KVPoolError`` without room."""
        self._made += chars
        if self._made > self._most_made:
            raise TooMuchText(f"the chat template makes more than {self._most_made} characters of this chat")
        if (lacking := CHAR_NBYTES * self._made - self._taken_nbytes) > 0:
            unit_nbytes = CHAR_NBYTES * UNIT_CHARS
            self._take(-(-lacking // unit_nbytes) * unit_nbytes)

    @contextmanager
    def encoding(self, piece: str) -> Iterator[None]:
        """It is made into tokens in the block. Errors: ``LongText``, also the turn's; ``KVPoolError`` without room."""
        chars = len(piece)
        self._chars -= chars
        if self._chars < 0 or chars > self._bounds.piece_chars:
            raise LongText(f"{chars} characters are made into tokens in one piece")
        if self._turn is not None:
            self._turn.go_on(max(chars, self.left), chars)
        if chars <= UNIT_CHARS:
            yield
            return
        splits = min(chars, len(piece.encode("utf-8", "surrogatepass").translate(None, _LETTERS)))
        nbytes = ENCODED_NBYTES * chars + SPLIT_NBYTES * splits
        self._take(nbytes)
        try:
            yield
        finally:
            self._give(nbytes)

    def _take(self, nbytes: int) -> None:
        if self._limits is not None and not self._limits.take(nbytes, TEXTS):
            raise KVPoolError(
                f"there is no room to make tokens of this text, {nbytes} bytes: send it again later, send token ids, "
                "or raise --max-memory"
            )
        self._taken_nbytes += nbytes

    def _give(self, nbytes: int) -> None:
        if self._limits is not None:
            self._limits.give(nbytes, TEXTS)
        self._taken_nbytes -= nbytes


class _Active(threading.local):
    work: TextWork | None = None  # None: nothing is counted


active = _Active()


@contextmanager
def working(work: TextWork) -> Iterator[None]:
    """The thread's templates count in it, in the block."""
    before, active.work = active.work, work
    try:
        yield
    finally:
        active.work = before
