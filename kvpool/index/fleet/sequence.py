"""One publisher's batches in order, each once: applies batches, requests replays, detects restarts.

vLLM numbers its batches from 0 at every start, keeps the last 10,000 and sends them again on request
(``vllm/distributed/kv_events.py``). A number alone does not show a restart. So each replay starts at the last
applied batch, and that batch must come back byte by byte: batches carry their time, so no two are alike.
Applied batches are kept as digests.

No I/O and no clock; ``Subscriber`` has both.
"""

from __future__ import annotations

from array import array
from collections import deque
from enum import Enum

from kvpool.errors import MalformedEvents
from kvpool.index.fleet.rank import Rank, batch_digest
from kvpool.index.limits import Limits

REMEMBERED = 1 << 14  # batches kept as digests, to recognize duplicates
CHUNK = 1 << 10  # digests per allocation; the first are in RANK_NBYTES
MAX_WAITING = 1 << 14  # batches that arrive during a replay
MAX_WAITING_NBYTES = 64 << 20
MAX_ROUNDS = 8  # replays in a row without news


class _State(Enum):
    LIVE = "live"
    # A replay is under way, or wanted:
    JOINING = "joining"  # nothing is known yet
    CHECKING = "checking"  # is the known state still true?
    CLOSING = "closing"  # a gap


class Sequence:
    """The order of one rank's batches. One thread.

    ``can_replay``: the publisher has a replay endpoint. The socket's reader calls the methods below;
    ``wanted`` is the first number of the wanted replay. A requested replay ends with ``replay_ended``, after
    ``replayed`` for each batch, or with ``replay_failed``. ``position``: where a former index stopped; the
    first replay proves the same incarnation; needs a replay endpoint. ``limits``: count digests and waiting
    batches; without room there are fewer. ``close`` returns it.
    """

    def __init__(
        self,
        rank: Rank,
        *,
        can_replay: bool,
        limits: Limits | None = None,
    ) -> None:
        self._limits, self._owner = limits or Limits(), rank.worker.tenant
        self._rank = rank
        self._can_replay = can_replay
        self._last: int | None = None  # applied
        self._digests = array("Q")  # of consecutive batches
        self._first = 0  # number of the first digest
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._waiting_nbytes = 0
        self._state = _State.JOINING if can_replay else _State.LIVE
        self._verified = False  # in a replay: the last applied batch came back unchanged
        # In a replay: it has a gap itself, or is not of this publisher's present incarnation.
        self._broken = False
        self._outdated = False  # in a replay: it may be of an ended incarnation
        self._rounds = 0
        if (position := rank.position) is not None:
            assert can_replay
            self._last = position.sequence
            self._remember(position.sequence, position.batch_digest)
            self._state = _State.CHECKING

    def close(self) -> None:
        """Return its memory to the budget; the last call."""
        self._drop_waiting()
        self._forget_digests()

    # Published events.

    def live(self, sequence: int, payload: bytes) -> None:
        if self._state is not _State.LIVE:
            self._wait(sequence, payload)
        elif self._last is None and not self._can_replay:
            self._apply(sequence, payload)
            self._rank.mark(stale=False)
        elif sequence == self._next:
            self._apply(sequence, payload)
        elif sequence > self._next:
            self._gap(sequence, payload)
        elif not self._is_known(sequence, payload):
            self._started_anew()
            if not self._can_replay:
                self._apply(sequence, payload)

    def disconnected(self) -> None:
        """The connection was lost: the next batch may be of another incarnation.

        Drop batches that arrived earlier and were not handed over.
        """
        self._drop_waiting()
        if self._can_replay:
            if self._state is _State.LIVE:
                self._ask(_State.CHECKING)
            else:
                self._outdated = True
        elif self._last is not None:
            self._last = None
            self._rank.reset("its connection was lost, and it has no replay endpoint to ask what was missed")

    def check(self) -> None:
        """Request any batches after the last applied."""
        if self._can_replay and self._state is _State.LIVE:
            self._ask(_State.CHECKING)

    # Replays.

    def replayed(self, sequence: int, payload: bytes) -> None:
        if self._broken:
            return
        if self._last is None:
            self._apply(sequence, payload)
            self._verified = True
        elif not self._verified:
            if sequence == self._last and self._is_known(sequence, payload):
                self._verified = True
            elif sequence > self._last:
                # The publisher keeps the newest consecutive batches: it has dropped the last applied.
                self._rank.reset("more batches were missed than its publisher keeps")
                self._apply(sequence, payload)
                self._verified = True
            else:
                self._broken = True
        elif sequence == self._next:
            self._apply(sequence, payload)
        elif sequence > self._next:
            self._broken = True  # some were dropped on the way: requested again at the end

    def replay_ended(self) -> None:
        if self._outdated:
            self._ask(self._state)
            return
        if self._last is not None and not self._verified:
            self._started_anew()
            return
        if not self._broken:
            self._apply_waiting()
        if self._broken:
            self._ask_again()
            return
        if self._state is _State.CLOSING:
            self._rank.gap(closed=True)
        self._state, self._rounds = _State.LIVE, 0
        self._rank.heard()
        self._rank.mark(stale=False)

    def replay_failed(self, problem: str) -> None:
        """No answer, for this reason: request again."""
        self._rank.mark(stale=True, problem=problem)
        self._ask(self._state)

    @property
    def _next(self) -> int:
        """The number of the next batch; 0 for a publisher without batches."""
        return 0 if self._last is None else self._last + 1

    @property
    def applied(self) -> int:
        """The number of the last batch applied; 0 also when none."""
        return self._last or 0

    @property
    def is_live(self) -> bool:
        """No replay is wanted or under way."""
        return self._state is _State.LIVE

    @property
    def wanted(self) -> int | None:
        """The first number of the wanted replay; None: no replay."""
        return None if self.is_live else self._last or 0

    # Transitions.

    def _gap(self, sequence: int, payload: bytes) -> None:
        missing = f"{sequence - self._next} batches were missed"
        self._rank.gap(closed=False)
        if self._can_replay:
            self._rank.mark(stale=True, problem=missing)
            self._ask(_State.CLOSING)
            self._wait(sequence, payload)
        else:
            self._rank.reset(f"{missing}, and it has no replay endpoint")
            self._apply(sequence, payload)

    def _started_anew(self) -> None:
        """The publisher's incarnation has ended; the next replay brings all of the new one."""
        self._last = None
        self._forget_digests()
        self._drop_waiting()
        self._rank.reset("its publisher was started anew", anew=True)
        if self._can_replay:
            self._ask(_State.JOINING)

    def _ask(self, state: _State) -> None:
        self._state, self._verified, self._broken, self._outdated = state, False, False, False

    def _ask_again(self) -> None:
        self._rounds += 1
        if self._rounds > MAX_ROUNDS:
            self._rounds = 0
            self._last = None
            self._rank.reset(f"{MAX_ROUNDS} replays in a row were not whole")
        state = _State.CLOSING if self._last is not None else _State.JOINING
        self._ask(state)

    def _wait(self, sequence: int, payload: bytes) -> None:
        """Keep a batch until the replay is over; a batch without room becomes a gap."""
        if (
            len(self._waiting) < MAX_WAITING
            and self._waiting_nbytes + len(payload) <= MAX_WAITING_NBYTES
            and self._limits.take(len(payload), self._owner)
        ):
            self._waiting.append((sequence, payload))
            self._waiting_nbytes += len(payload)

    def _drop_waiting(self) -> None:
        self._limits.give(self._waiting_nbytes, self._owner)
        self._waiting, self._waiting_nbytes = deque(), 0

    def _apply_waiting(self) -> None:
        waiting = self._waiting
        self._drop_waiting()
        for sequence, payload in waiting:
            if sequence == self._next:
                self._apply(sequence, payload)
            elif not self._is_known(sequence, payload):
                self._broken = True  # a gap behind the replay, or another incarnation: the next replay shows
                return

    def _apply(self, sequence: int, payload: bytes) -> None:
        self._last = sequence
        self._rounds = 0
        self._remember(sequence, batch_digest(payload))
        try:
            self._rank.apply(sequence, payload)
        except MalformedEvents as error:
            self._rank.reset(f"batch {sequence}: {error}")

    def _is_known(self, sequence: int, payload: bytes) -> bool:
        """Whether this very batch was applied before."""
        if self._last is None:
            return False
        at = sequence - self._first
        return 0 <= at < len(self._digests) and self._digests[at] == batch_digest(payload)

    def _remember(self, sequence: int, digest: int) -> None:
        if sequence != self._first + len(self._digests):
            self._forget_digests()
            self._first = sequence
        count = len(self._digests)
        if (
            count
            and count % CHUNK == 0
            and (count >= REMEMBERED or not self._limits.take(CHUNK * 8, self._owner, optional=True))
        ):
            del self._digests[:CHUNK]
            self._first += CHUNK
        self._digests.append(digest)

    def _forget_digests(self) -> None:
        chunks = -(-len(self._digests) // CHUNK)
        self._limits.give(max(0, chunks - 1) * CHUNK * 8, self._owner)
        self._digests, self._first = array("Q"), 0
