"""``Subscriber``: subscribes to the KV events of workers and hands each batch on, in order, once.

The protocol is that of vLLM's ZMQ publisher (``vllm/distributed/kv_events.py``): a PUB socket sends ``[topic,
number as 8 bytes big-endian, payload]``; a ROUTER socket answers ``[b"", number]`` with ``[b"", topic, number,
payload]`` for each batch that it keeps from that number on, and ends with number -1.

One thread with an event loop has all connections: for each publisher one task reads its events, and one asks for
replays. What does not come to its turn stays with the publishers: a feed that is behind is late, and fails nothing.

Threads: ``_lock`` guards ``_gates``. A ``_Gate`` has a lock of its own, held while one batch of its worker is applied.
All else belongs to the loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio

from kvpool.discovery.worker import EventSink, Position, Publisher, Worker
from kvpool.index.follow.dialler import Dialler, Line, OfAnotherTenant
from kvpool.index.follow.zmtp import Connection, Lost, Silent
from kvpool.index.limits import Limits
from kvpool.index.resolver import Resolver
from kvpool.index.sequence import Sequence

PROBE_S = 1.0  # an idle publisher is asked that often whether there is anything later
ANSWER_S = 2.0  # how long a replay may bring nothing
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.25, 10.0  # of questions
MIN_RETRY_S, MAX_RETRY_S = 0.1, 4.0  # of connections
CLOSE_S = 10.0
TURN_S = 0.005  # of one publisher's batches in a row, or one batch: then others get their turn
END = (1 << 64) - 1  # -1

logger = logging.getLogger("kvpool.index")


class _Gate:
    """What is told of one start of a worker goes through here, until it is closed."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._lock = threading.Lock()
        self._open = True

    def close(self) -> None:
        """Blocking, while a batch of this worker is applied."""
        with self._lock:
            self._open = False

    def apply(self, worker_id: str, dp_rank: int, sequence: int, payload: bytes) -> None:
        with self._lock:
            if self._open:
                self._sink.apply(worker_id, dp_rank, sequence, payload)

    def heard(self, worker_id: str, dp_rank: int) -> None:
        with self._lock:
            if self._open:
                self._sink.heard(worker_id, dp_rank)

    def reset(self, worker_id: str, dp_rank: int, problem: str, *, anew: bool = False) -> None:
        with self._lock:
            if self._open:
                self._sink.reset(worker_id, dp_rank, problem, anew=anew)

    def mark(self, worker_id: str, dp_rank: int, *, stale: bool, problem: str = "") -> None:
        with self._lock:
            if self._open:
                self._sink.mark(worker_id, dp_rank, stale=stale, problem=problem)

    def gap(self, worker_id: str, dp_rank: int, *, closed: bool) -> None:
        with self._lock:
            if self._open:
                self._sink.gap(worker_id, dp_rank, closed=closed)


@dataclass(eq=False)
class _Link:
    """One publisher. ``changed``: there may be something to ask."""

    worker: Worker
    publisher: Publisher
    gate: _Gate
    sequence: Sequence
    line: Line
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    replay: Connection | None = None
    asked: bool = False
    ask_at: float = 0.0  # not before
    probe_at: float = 0.0
    backoff_s: float = MIN_BACKOFF_S
    attempt: int = 0  # of connections for replays
    interrupted: bool = False  # whom the question went to may be gone
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def mark_stale(self, problem: str) -> None:
        self.gate.mark(self.worker.id, self.publisher.dp_rank, stale=True, problem=problem)


class Subscriber:
    """Follows the publishers of workers and tells ``sink`` what they say, from one thread of its own.

    Any thread but the feed's own may call the methods. When ``unfollow`` or ``close`` has returned, nothing more is
    told of that worker, or of any. ``limits``: of what is read and not applied yet.
    """

    def __init__(
        self, sink: EventSink, *, limits: Limits | None = None, resolver: Resolver | None = None
    ) -> None:
        self._sink = sink
        self._limits = limits or Limits()
        self._dialler = Dialler(self._limits, resolver or Resolver())
        self._lock = threading.Lock()
        self._gates: dict[str, _Gate] = {}  # by worker
        self._links: dict[str, list[_Link]] = {}  # by worker
        self._leaving: set[asyncio.Task[None]] = set()
        self._closing = False
        self.ignored_messages = 0  # that are no batch
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kvpool-subscriber", daemon=True)
        self._thread.start()

    def follow(self, worker: Worker, positions: Mapping[int, Position] | None = None) -> None:
        """Subscribe to all publishers of a worker (one that ``check_worker`` has passed); returns at once.

        One with the same id that is followed already is left first. ``positions``: by rank, where the sink has what
        came up to there; see ``Sequence``.
        """
        self.unfollow(worker.id)
        gate = _Gate(self._sink)
        with self._lock:
            self._gates[worker.id] = gate
        self._order(lambda: self._follow(worker, positions or {}, gate))

    def unfollow(self, worker_id: str) -> None:
        """Leave a worker; nothing happens if it is not followed. Blocking, while a batch of this worker is applied."""
        with self._lock:
            gate = self._gates.pop(worker_id, None)
        if gate is not None:
            gate.close()
            self._order(lambda: self._unfollow(worker_id))

    def close(self) -> None:
        """Leave all and end the thread; again does nothing. Blocking, while a batch is applied."""
        if self._closing:
            return
        self._closing = True
        with self._lock:
            gates = list(self._gates.values())
        for gate in gates:
            gate.close()
        self._order(self._loop.stop)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("the thread that reads events has not ended within %g s", CLOSE_S)

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs: without it nothing that is known stays true."""
        return self._thread.is_alive()

    def _order(self, order: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(order)
        except RuntimeError:  # the thread has ended: see is_alive
            if not self._loop.is_closed():
                raise

    # In the thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            for worker_id in list(self._links):
                self._unfollow(worker_id)
            self._loop.run_until_complete(self._left())
            self._loop.close()

    async def _left(self) -> None:
        await asyncio.gather(*self._leaving, return_exceptions=True)

    def _follow(self, worker: Worker, positions: Mapping[int, Position], gate: _Gate) -> None:
        links = self._links[worker.id] = []
        for publisher in worker.publishers:
            rank = publisher.dp_rank
            if not publisher.events:
                gate.mark(worker.id, rank, stale=True, problem="it publishes no KV events")
                continue
            sequence = Sequence(
                gate,
                worker.id,
                rank,
                can_replay=bool(publisher.replay),
                position=positions.get(rank),
                limits=self._limits,
            )
            link = _Link(worker, publisher, gate, sequence, self._dialler.line(worker.tenant))
            links.append(link)
            # Batches that are published before the subscription stands are in the replay, or are a gap.
            self._start(link, self._read_events(link))
            if publisher.replay:
                self._start(link, self._ask_for_replays(link))

    def _unfollow(self, worker_id: str) -> None:
        for link in self._links.pop(worker_id, ()):
            for task in link.tasks:
                task.cancel()
                self._leaving.add(task)
            link.sequence.close()
            link.line.close()

    def _start(self, link: _Link, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        link.tasks.append(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._leaving.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("reading events has failed", exc_info=error)
            self._loop.stop()  # a fault of ours: see is_alive

    async def _read_events(self, link: _Link) -> None:
        """One connection after the other, for as long as the worker is followed."""
        attempt, retry_s = 0, MIN_RETRY_S
        while True:
            try:
                connection = await link.line.connect(link.publisher.events, b"SUB", attempt)
            except Lost as error:
                self._lost(link, str(error))
                if isinstance(error, OfAnotherTenant):  # then replays are not asked for either
                    self._interrupt(link)
            else:
                retry_s = MIN_RETRY_S
                try:
                    await self._read_batches(link, connection)
                except Lost as error:
                    connection.close()
                    link.sequence.disconnected()
                    self._lost(link, str(error))
                    self._interrupt(link)
                finally:
                    connection.close()
            await asyncio.sleep(retry_s)
            attempt, retry_s = attempt + 1, min(2 * retry_s, MAX_RETRY_S)

    def _interrupt(self, link: _Link) -> None:
        """The publisher that was asked may be gone: ask the present one, without waiting for an answer."""
        if not link.asked:
            self._close_replay(link)
        elif link.replay is not None:
            link.interrupted = True
            link.replay.abort("its connection was lost")
        link.changed.set()

    @staticmethod
    def _lost(link: _Link, problem: str) -> None:
        if not link.publisher.replay:  # of one that has it, replays tell whether it is followed
            link.mark_stale(problem)

    async def _read_batches(self, link: _Link, connection: Connection) -> None:
        ends_s = time.monotonic() + TURN_S
        while True:
            frames = await connection.receive()
            if len(frames) == 3 and len(frames[1]) == 8:
                link.probe_at = time.monotonic() + PROBE_S
                link.sequence.live(int.from_bytes(frames[1], "big"), frames[2])
                if not link.sequence.is_live:
                    link.changed.set()
            else:
                self.ignored_messages += 1
            del frames
            if time.monotonic() >= ends_s:
                await asyncio.sleep(0)
                ends_s = time.monotonic() + TURN_S

    async def _ask_for_replays(self, link: _Link) -> None:
        """Ask whenever one is wanted; one that brings nothing is given up and asked for again, later each time."""
        try:
            while True:
                await self._until_one_is_wanted(link)
                link.asked = True
                try:
                    await self._replay(link)
                except Lost as error:
                    self._close_replay(link)  # a late answer must not be taken for that of the next question
                    link.attempt += 1
                    if not link.interrupted:
                        link.ask_at = time.monotonic() + link.backoff_s
                        link.backoff_s = min(2 * link.backoff_s, MAX_BACKOFF_S)
                    link.sequence.replay_failed(str(error))
                else:
                    link.probe_at, link.backoff_s = time.monotonic() + PROBE_S, MIN_BACKOFF_S
                    link.sequence.replay_ended()
                finally:
                    link.asked = link.interrupted = False
        finally:
            self._close_replay(link)

    @staticmethod
    async def _until_one_is_wanted(link: _Link) -> None:
        while True:
            now = time.monotonic()
            if not link.sequence.is_live:
                if now >= link.ask_at:
                    return
                await asyncio.sleep(link.ask_at - now)
            elif now >= link.probe_at:
                link.probe_at = now + PROBE_S
                link.sequence.check()
            else:
                link.changed.clear()
                with anyio.move_on_after(link.probe_at - now):
                    await link.changed.wait()

    async def _replay(self, link: _Link) -> None:
        """Ask, and hand on what is answered. Errors: ``Lost``."""
        wanted = link.sequence.wanted
        assert wanted is not None
        replay, frames = link.replay, None
        if replay is not None:
            frames = await self._first_answer(replay, wanted, link)
        if replay is None or frames is None:
            self._close_replay(link)
            replay = link.replay = await link.line.connect(
                link.publisher.replay, b"DEALER", link.attempt, silence_s=ANSWER_S
            )
            replay.send(b"", wanted.to_bytes(8, "big"))
            frames = await replay.receive()
        ends_s = time.monotonic() + TURN_S
        while True:
            if len(frames) not in (4, 5):
                self.ignored_messages += 1
            elif len(frames[-2]) == 8:
                number = int.from_bytes(frames[-2], "big")
                if number == END:
                    return
                link.sequence.replayed(number, frames[-1])
            frames = []
            if time.monotonic() >= ends_s:
                await asyncio.sleep(0)
                ends_s = time.monotonic() + TURN_S
            frames = await replay.receive()

    @staticmethod
    async def _first_answer(replay: Connection, wanted: int, link: _Link) -> list[bytes] | None:
        """On a connection that was used before; None when it was closed meanwhile. Errors: ``Lost``."""
        try:
            replay.send(b"", wanted.to_bytes(8, "big"))
            return await replay.receive()
        except Lost as error:
            if isinstance(error, Silent) or link.interrupted:
                raise
            return None

    def _close_replay(self, link: _Link) -> None:
        if link.replay is not None:
            link.replay.close()
            link.replay = None
