"""``Turns``: long texts are made into tokens in turns, a piece at a time, so that none holds up the others.

One is at work. The tenant that has had the fewest characters goes first; of its texts the one with the fewest left,
less what the tenant has had since it came. So a short one waits for a piece of a huge one, not for all of it, and a
huge one for about its own length of others.
"""

from __future__ import annotations

import threading

from kvpool.index.tokens.text_work import LongText

UNIT_CHARS = 16 << 10  # in which tenants are compared: threads change less often


class Turns:
    """Any thread. ``_lock`` guards the line and its texts. Each waits for itself: of 64 threads one is woken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: list[Turn] = []  # in work, or waiting in a thread
        self._at_work: Turn | None = None
        self._had: dict[str, int] = {}  # characters, by tenant in the line
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._line)

    def close(self) -> None:
        """All end at their next piece."""
        with self._lock:
            self._is_closed = True
            for turn in self._line:
                turn.woken.notify()

    def _join(self, turn: Turn) -> None:
        with self._lock:
            turn.came_at = self._had.setdefault(turn.tenant, min(self._had.values(), default=0))
            self._line.append(turn)
            try:
                self._wait(turn)
            except BaseException:
                self._end(turn)
                raise

    def _go_on(self, turn: Turn, left: int, cost: int) -> None:
        with self._lock:
            turn.left = left
            self._at_work = None
            self._wake()
            self._wait(turn)
            self._had[turn.tenant] += cost

    def _give_up(self, turn: Turn) -> None:
        with self._lock:
            turn.is_given_up = True
            turn.woken.notify()

    def _leave(self, turn: Turn) -> None:
        with self._lock:
            self._end(turn)

    def _wait(self, turn: Turn) -> None:
        """Until it is at work. Errors: ``LongText``."""
        while self._at_work is not None or self._first() is not turn:
            self._check(turn)
            turn.woken.wait()
        self._check(turn)
        self._at_work = turn

    def _check(self, turn: Turn) -> None:
        if self._is_closed or (turn.is_given_up and len(self._line) > 1):
            raise LongText("others are waited for whose tokens come sooner")

    def _first(self) -> Turn:
        def due(one: Turn) -> tuple[int, int]:
            had = self._had[one.tenant]
            return had // UNIT_CHARS, one.left - (had - one.came_at)

        return min(self._line, key=due)

    def _end(self, turn: Turn) -> None:
        self._line.remove(turn)
        if self._at_work is turn:
            self._at_work = None
        if all(one.tenant != turn.tenant for one in self._line):
            del self._had[turn.tenant]
        self._wake()

    def _wake(self) -> None:
        """The next one. If a shorter text comes before it wakes, that one works, and wakes it again."""
        if self._at_work is None and self._line:
            self._first().woken.notify()


class Turn:
    """Of one text: a context in its thread, which waits for the first. Errors of all: ``LongText``, once it is given
    up and others are in the line, or at the end of the process.
    """

    def __init__(self, turns: Turns, tenant: str, left: int = 0) -> None:
        """``left``: characters, as far as they are known."""
        self._turns, self.tenant = turns, tenant
        self.left = left  # characters; ``Turns`` guards all three
        self.came_at = 0  # that the tenant had
        self.is_given_up = False
        self.woken = threading.Condition(turns._lock)

    def __enter__(self) -> Turn:
        self._turns._join(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._turns._leave(self)

    def go_on(self, left: int, cost: int) -> None:
        """Before a piece of ``cost`` characters: waits while another text goes first."""
        self._turns._go_on(self, left, cost)

    def give_up(self) -> None:
        """Nobody waits for its tokens any more: it goes on while it is alone. Any thread."""
        self._turns._give_up(self)
