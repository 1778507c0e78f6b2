"""``Ejections``: workers whose engines fail, which get no requests for a while.

Engines are judged, not requests. Only a generation that was served proves an engine. One that failed counts once,
however often it comes, and not at all once it has failed at a second worker: then the fault is its own. A worker that
is full has not failed. All of it is of one start of a worker.

One thread at a time.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvpool.index.cost.load import EJECTED, KEEP_FAILED_S, Reservations
from kvpool.index.fleet.rank import RankKey
from kvpool.index.fleet.start import Start

# Of a request at a worker. begun: the first of a good answer has come. served: a generation, to its end. failed: the
# worker has answered, with a fault of its engine. refused: with one of the caller's. unreached: it has not answered, or
# nobody knows how.
Judged = Literal["begun", "served", "failed", "refused", "unreached"]

FAILURES = 3  # requests in a row eject a worker
FORGET_S = 60.0  # after which the last failure no longer counts
EJECT_S, MAX_EJECT_S = 1.0, 60.0  # each failed trial doubles it
TRIAL_S = 5.0  # for a trial to end, before the next one
MAX_FAILING = 4096  # workers
MAX_MARKS, MARK_S = 4096, 600.0  # requests that have failed, and for how long they are known
_EJECTIONS = ""  # in the place of a tenant's name

logger = logging.getLogger("kvpool.index")


@dataclass
class _Failing:
    """Since the last request that was served: ``failed`` ones, by their marks; ``proven``: number of those that another
    worker has served; ``unreached``: times.
    ``until_s``: of its ejection, or trial. ``names``: of its reservations. ``is_ill``: says its health check.
    """

    start: Start
    failed: set[bytes] = field(default_factory=set)
    proven: int = 0
    unreached: int = 0
    last_s: float = 0.0  # of its failures
    seconds: float = field(default_factory=lambda: EJECT_S)
    until_s: float = 0.0
    names: Sequence[str] = ()
    is_on_trial: bool = False
    is_ill: bool = False

    @property
    def fails(self) -> bool:
        return max(len(self.failed) + self.proven, self.unreached) >= FAILURES


class Ejections:
    """Each worker is ejected by a reservation of ``EJECTED`` on its ranks.

    After its time one request is its trial. Once that begins to answer others go there, too: it may take minutes. A
    served one ends the ejection, a failure doubles its time. A good health check ends one for want of an answer. A
    failed health check ejects at once, until the next good one or for ``KEEP_FAILED_S``. Of a model's workers that
    answer and are well, requests that failed eject half at most.

    ``ranks``, ``start``, ``peers``: of a worker by its id; ``peers``: of its model's workers.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        reservations: Reservations,
        ranks: Callable[[str], Iterable[RankKey]],
        start: Callable[[str], Start],
        peers: Callable[[str], Collection[Start]],
    ) -> None:
        self._clock, self._reservations = clock, reservations
        self._ranks, self._start, self._peers = ranks, start, peers
        self._failing: OrderedDict[str, _Failing] = OrderedDict()  # by worker's id
        # By mark: where it failed first, and when. None: at two workers, so by its own fault.
        self._marks: OrderedDict[bytes, tuple[Start | None, float]] = OrderedDict()

    def record(self, start: Start, mark: bytes, judged: Judged) -> None:
        """A request's outcome. ``mark``: of requests that fail together; empty: no engine computes its answer."""
        now_s = self._clock()
        if not start.is_same(self._start(start.worker_id)) or not (mark or judged == "unreached"):
            return
        one = self._of(start)
        if judged == "begun":
            if one.is_on_trial:
                self._release(one)
            return
        if judged == "refused":
            self._try_next(one)
            return
        if judged == "served":
            if (first := self._first(mark)) is not None and (other := self._failing.get(first.worker_id)):
                other.proven += mark in other.failed
                other.failed.discard(mark)
            self._marks.pop(mark, None)
            if not one.is_ill:
                self._end(start.worker_id)
            return
        if one.is_ill or (now_s < one.until_s and not one.is_on_trial):  # it was sent before
            return
        if judged == "unreached":
            one.unreached += 1
        elif self._counts(mark, start):
            if not one.fails:  # more would say no more
                one.failed.add(mark)
        else:
            self._try_next(one)
            return
        one.last_s = now_s
        self._remember(one)
        if (one.fails or one.is_on_trial) and self._may_eject(one):
            logger.warning(
                "worker %s fails: it gets no requests for %g s, then one as a trial",
                start.worker_id, one.seconds,
            )  # fmt: skip
            self._eject(one, one.seconds)
            one.seconds = min(2 * one.seconds, MAX_EJECT_S)

    def failed_at(self, mark: bytes) -> str | None:
        """The worker at which a request has failed: another one may serve it. None: none, or two."""
        first = self._first(mark)
        return None if first is None else first.worker_id

    def check(self, start: Start, *, failed: bool) -> None:
        """The outcome of a health check."""
        if not start.is_same(self._start(start.worker_id)):
            return
        one = self._of(start)
        if failed:
            if not one.is_ill:
                logger.warning("worker %s fails its health check: it gets no requests", start.worker_id)
            one.is_ill = True
            self._remember(one)
            self._eject(one, KEEP_FAILED_S)
            return
        if one.is_ill:
            logger.info("worker %s passes its health check again", start.worker_id)
        was_away, one.is_ill, one.unreached = one.is_ill or one.unreached > 0, False, 0
        if was_away and not one.fails:
            self._release(one)

    def try_at(self, worker_id: str) -> None:
        """A request goes there whose outcome will be recorded: as a trial, if its time is over."""
        one = self._failing.get(worker_id)
        if one is not None and one.names and self._clock() >= one.until_s:
            self._eject(one, TRIAL_S)
            one.is_on_trial, one.is_ill = True, False

    def renew(self) -> None:
        """Forget what is of former starts."""
        for worker_id, one in list(self._failing.items()):
            if not one.start.is_same(self._start(worker_id)):
                self._end(worker_id)

    def _of(self, start: Start) -> _Failing:
        """Of a worker's present start."""
        one = self._failing.get(start.worker_id)
        ends_s = math.inf if one is None or one.is_ill else max(one.last_s, one.until_s) + FORGET_S
        if one is not None and one.start.is_same(start) and self._clock() <= ends_s:
            return one
        self._end(start.worker_id)
        return _Failing(start)

    def _counts(self, mark: bytes, start: Start) -> bool:
        """Whether a failure is its worker's. The second worker at which a request fails acquits the first."""
        first = self._first(mark)
        if first is None and mark in self._marks:
            return False
        if first is None:
            self._marks[mark] = (start, self._clock())
            if len(self._marks) > MAX_MARKS:
                self._marks.popitem(last=False)
            return True
        if first.worker_id != start.worker_id:
            self._marks[mark] = (None, self._clock())
            other = self._failing.get(first.worker_id) or _Failing(first)
            other.failed.discard(mark)
            if not other.fails and not other.is_ill:
                self._release(other)
        return False

    def _first(self, mark: bytes) -> Start | None:
        """Where a request has failed, if there only. What is over is forgotten."""
        first, since_s = self._marks.get(mark, (None, math.inf))
        is_over = first is not None and not first.is_same(self._start(first.worker_id))
        if is_over or self._clock() - since_s > MARK_S:
            del self._marks[mark]
            return None
        return first

    def _may_eject(self, one: _Failing) -> bool:
        if one.unreached >= FAILURES or one.is_on_trial:
            return True
        peers = self._peers(one.start.worker_id)
        others = [self._of(start) for start in peers if start.worker_id != one.start.worker_id]
        here = [other for other in others if not other.is_ill and other.unreached < FAILURES]
        return 2 * (sum(other.fails and bool(other.names) for other in here) + 1) <= len(here) + 1

    def _remember(self, one: _Failing) -> None:
        self._failing[one.start.worker_id] = one
        if len(self._failing) > MAX_FAILING:
            self._end(next(iter(self._failing)))

    def _eject(self, one: _Failing, seconds: float) -> None:
        self._release(one)
        one.until_s, one.is_on_trial = self._clock() + seconds, False
        one.names = [
            self._reservations.add(_EJECTIONS, rank, EJECTED, seconds)
            for rank in self._ranks(one.start.worker_id)
        ]

    def _try_next(self, one: _Failing) -> None:
        """A trial said nothing: the next request is another one."""
        if one.is_on_trial:
            self._eject(one, 0.0)

    def _end(self, worker_id: str) -> None:
        if (one := self._failing.pop(worker_id, None)) is not None:
            self._release(one)

    def _release(self, one: _Failing) -> None:
        for name in one.names:
            self._reservations.release(_EJECTIONS, name)
        one.names, one.until_s, one.is_on_trial = (), 0.0, False
