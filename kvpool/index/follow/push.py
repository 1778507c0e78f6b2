"""``PushReceiver``: batches of events that publishers push to the index, where it cannot reach their sockets.

The rules are those of ``Sequence``, as for ``Subscriber``, but a replay is asked of the publisher, in the stream on
which it pushes (``protos/kvpool/v1/index.proto``, ``EventBatch``). A question has a number and is answered once, so a
late answer is never taken for that of the next question. While one is open, new batches are not
kept here: they are part of the answer, or are asked for with the next one.

A rank is pushed by one stream at a time, the one that spoke of it last. When that ends, the rank is stale until
another one has shown that nothing is missing.

Threads: any may call anything; of one ``PushStream`` one at a time. ``PushReceiver._lock`` guards ``_links``;
``_Link.lock`` guards a link's fields and is held while a batch is applied. Roster's lock comes before both.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvpool.discovery.worker import PUSHED, EventSink, Position, Worker
from kvpool.errors import KVPoolError
from kvpool.index.buffer_budget import BufferBudget
from kvpool.index.sequence import Sequence

PROBE_S = 2.0  # an idle publisher is asked that often whether there is anything later
ANSWER_S = 2.0  # how long an answer may bring nothing
MAX_BACKOFF_S = 10.0

NO_STREAM = "no stream pushes its events"


class NotRegistered(KVPoolError):
    """A batch of a worker, rank or start that the index does not expect batches of."""


class Pushed(NamedTuple):
    """One message of a publisher. ``answers``: the question that it is part of the answer to; 0: a new batch.

    ``last``: the end of that answer, without a batch.
    """

    worker_id: str
    dp_rank: int
    incarnation: str
    sequence: int
    payload: bytes
    answers: int = 0
    last: bool = False


class Ack(NamedTuple):
    """What a publisher is told: all up to ``sequence`` was taken; 0 also before the first.

    ``question``: not 0: send all that is kept from batch ``start`` on again, as the answer to this.
    """

    worker_id: str
    dp_rank: int
    sequence: int
    question: int = 0
    start: int = 0


@dataclass(eq=False)
class _Link:
    """One rank that is pushed."""

    worker_id: str
    dp_rank: int
    incarnation: str
    sequence: Sequence
    lock: threading.Lock = field(default_factory=threading.Lock)
    gone: bool = False
    stream: PushStream | None = None
    question: int = 0  # the latest
    asked: bool = False  # and it has not been answered
    answer_by: float = 0.0
    ask_at: float = 0.0  # not before
    probe_at: float = 0.0
    backoff_s: float = 0.25

    @property
    def due_at(self) -> float:
        if self.asked:
            return self.answer_by
        return self.probe_at if self.sequence.is_live else self.ask_at


class PushReceiver:
    """Tells ``sink`` what is pushed of the workers that it follows; only of publishers whose events are ``PUSHED``.

    When ``unfollow`` has returned, nothing more is told of that start of the worker; it may wait for a batch that is
    being applied. ``budget``: of batches on their way, and of what is remembered of them. ``clock``: seconds that only
    go up.
    """

    is_alive = True

    def __init__(
        self,
        sink: EventSink,
        *,
        budget: BufferBudget | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sink = sink
        self.budget = budget or BufferBudget()
        self._clock = clock
        self._lock = threading.Lock()
        self._links: dict[tuple[str, int], _Link] = {}

    def follow(self, worker: Worker, positions: Mapping[int, Position] | None = None) -> None:
        """Expect batches of a worker (one that ``check_worker`` has passed), from the first one: nobody could prove
        ``positions`` to it.
        """
        for publisher in worker.publishers:
            if publisher.events != PUSHED:
                continue
            rank = publisher.dp_rank
            sequence = Sequence(self._sink, worker.id, rank, can_replay=True, budget=self.budget)
            link = _Link(worker.id, rank, worker.incarnation, sequence)
            self._sink.mark(worker.id, rank, stale=True, problem=NO_STREAM)
            with self._lock:
                self._links[worker.id, rank] = link

    def unfollow(self, worker_id: str) -> None:
        """Expect none of it any more."""
        with self._lock:
            left = [self._links.pop(name) for name in list(self._links) if name[0] == worker_id]
        for link in left:
            with link.lock:
                link.gone = True
                link.sequence.close()

    def close(self) -> None:
        """Expect nothing any more."""
        with self._lock:
            worker_ids = {worker_id for worker_id, _ in self._links}
        for worker_id in worker_ids:
            self.unfollow(worker_id)

    def open(self) -> PushStream:
        """For one caller."""
        return PushStream(self, self._sink, self._clock)

    def link_of(self, pushed: Pushed) -> _Link:
        """Errors: ``NotRegistered``."""
        with self._lock:
            link = self._links.get((pushed.worker_id, pushed.dp_rank))
        if link is None:
            raise NotRegistered(
                f'rank {pushed.dp_rank} of worker {pushed.worker_id!r:.300} is not registered with events "{PUSHED}": '
                "call RegisterWorker first"
            )
        if link.incarnation != pushed.incarnation:
            raise NotRegistered(
                f"worker {pushed.worker_id} is registered with another incarnation: call RegisterWorker again"
            )
        return link


class PushStream:
    """One caller's stream of batches. Close it, whatever happens."""

    def __init__(self, receiver: PushReceiver, sink: EventSink, clock: Callable[[], float]) -> None:
        self._receiver, self._sink, self._clock = receiver, sink, clock
        self._links: dict[tuple[str, int], _Link] = {}
        self._due_at = clock() + PROBE_S  # not later than the first of theirs

    def take(self, pushed: Pushed) -> list[Ack]:
        """One message; what to tell its publisher. Blocking, while the batch is applied. Errors: ``NotRegistered``."""
        link = self._receiver.link_of(pushed)
        with link.lock:
            if link.gone:
                raise NotRegistered(f"worker {pushed.worker_id} was removed: call RegisterWorker again")
            now = self._clock()
            if link.stream is not self:
                self._enter(link, now)
            if not pushed.answers:
                self._new(link, pushed, now)
            elif link.asked and pushed.answers == link.question:
                self._answered(link, pushed, now)
            acks = self._ask(link, now) or [Ack(link.worker_id, link.dp_rank, link.sequence.applied)]
            self._due_at = min(self._due_at, link.due_at)
        return acks + (self.remind() if self.wait_s() == 0 else [])

    def remind(self) -> list[Ack]:
        """What to ask publishers that have said nothing for a while. Blocking and errors: none."""
        acks: list[Ack] = []
        for name, link in list(self._links.items()):
            with link.lock:
                if link.gone or link.stream is not self:
                    del self._links[name]  # another stream pushes its events now
                    continue
                now = self._clock()
                if link.asked and now >= link.answer_by:
                    link.asked = False
                    link.ask_at = now + link.backoff_s
                    link.backoff_s = min(2 * link.backoff_s, MAX_BACKOFF_S)
                    link.sequence.replay_failed("its publisher does not answer")
                elif link.sequence.is_live and now >= link.probe_at:
                    link.probe_at = now + PROBE_S
                    link.sequence.check()
                acks += self._ask(link, now)
        self._due_at = min((link.due_at for link in self._links.values()), default=self._clock() + PROBE_S)
        return acks

    def wait_s(self) -> float:
        """When ``remind`` is due; 0: now."""
        return max(0.0, self._due_at - self._clock())

    def close(self) -> None:
        """Nothing more comes on this stream: what it pushed is stale from now on."""
        for link in self._links.values():
            with link.lock:
                if link.stream is self and not link.gone:
                    self._leave(link)
        self._links = {}

    def _enter(self, link: _Link, now: float) -> None:
        """From now on it is this stream that speaks for the rank."""
        if link.stream is not None:
            self._leave(link)
        link.stream = self
        link.asked, link.ask_at, link.backoff_s = False, now, 0.25
        self._links[link.worker_id, link.dp_rank] = link

    @staticmethod
    def _leave(link: _Link) -> None:
        """What comes next may be of another life of the publisher: it is asked before anything is credited."""
        link.stream = None
        link.sequence.disconnected()
        link.sequence.replay_failed(NO_STREAM)

    def _new(self, link: _Link, pushed: Pushed, now: float) -> None:
        if not pushed.last and link.sequence.is_live:
            link.probe_at = now + PROBE_S
            link.sequence.live(pushed.sequence, pushed.payload)

    def _answered(self, link: _Link, pushed: Pushed, now: float) -> None:
        link.answer_by = now + ANSWER_S
        if not pushed.last:
            link.sequence.replayed(pushed.sequence, pushed.payload)
            return
        link.asked, link.ask_at, link.probe_at, link.backoff_s = False, now, now + PROBE_S, 0.25
        link.sequence.replay_ended()

    def _ask(self, link: _Link, now: float) -> list[Ack]:
        wanted = link.sequence.wanted
        if wanted is None or link.asked or now < link.ask_at:
            return []
        link.question += 1
        link.asked, link.answer_by = True, now + ANSWER_S
        return [Ack(link.worker_id, link.dp_rank, link.sequence.applied, link.question, wanted)]
