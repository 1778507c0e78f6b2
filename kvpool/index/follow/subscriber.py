"""``Subscriber``: subscribes to the KV events of workers and hands each batch on, in order, once.

The protocol is that of vLLM's ZMQ publisher (``vllm/distributed/kv_events.py``): a PUB socket sends ``[topic,
number as 8 bytes big-endian, payload]``; a ROUTER socket answers ``[b"", number]`` with ``[b"", topic,
number, payload]`` for each kept batch from that number on, and ends with number -1.

One thread with an event loop has all connections: per publisher one task reads events and one requests
replays. Unread batches wait at the publisher: a slow index lags, it drops nothing.

Threads: the loop owns all fields; other threads send it commands.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any

import anyio

from kvpool.discovery.worker import Publisher, Worker
from kvpool.index.fleet.rank import Rank
from kvpool.index.fleet.sequence import Sequence
from kvpool.index.limits import Limits
from kvpool.index.net.dialler import Dialler, Line, OfAnotherTenant
from kvpool.index.net.resolver import Resolver
from kvpool.index.net.zmtp import Connection, Lost, Silent
from kvpool.threads import start_thread

PROBE_S = 1.0  # period of replay requests to an idle publisher
ANSWER_S = 2.0  # longest silence within a replay
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.25, 10.0  # of replay requests
MIN_RETRY_S, MAX_RETRY_S = 0.1, 4.0  # of connections
CLOSE_S = 10.0
END = (1 << 64) - 1

logger = logging.getLogger("kvpool.index")


@dataclass(eq=False)
class _Followed:
    """One publisher. ``changed``: a replay may be wanted."""

    rank: Rank
    publisher: Publisher
    sequence: Sequence
    line: Line
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    replay: Connection | None = None
    asked: bool = False
    ask_at: float = 0.0
    probe_at: float = 0.0
    backoff_s: float = MIN_BACKOFF_S
    attempt: int = 0  # of replay connections
    interrupted: bool = False  # the requested publisher may be gone
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Subscriber:
    """A ``Feed``: has a ``Sequence`` for each rank, from one thread of its own.

    ``limits``: for received batches that are not applied yet. Any thread; only ``close`` blocks.
    """

    def __init__(self, *, limits: Limits | None = None, resolver: Resolver | None = None) -> None:
        self._limits = limits or Limits()
        self._dialler = Dialler(self._limits, resolver or Resolver())
        self._links: dict[str, list[_Followed]] = {}  # by worker
        self._leaving: set[asyncio.Task[None]] = set()
        self._closing = False
        self.ignored_messages = 0  # not a batch
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kvpool-subscriber", daemon=True)
        start_thread(self._thread)

    def follow(self, worker: Worker, ranks: Collection[Rank]) -> None:
        """Subscribe to a worker's publishers, from each rank's position; replaces those of the same id."""
        self._order(lambda: self._follow(worker, ranks))

    def unfollow(self, worker_id: str) -> None:
        """Idempotent."""
        self._order(lambda: self._unfollow(worker_id))

    def close(self) -> None:
        """End all connections and the thread. Idempotent. Blocks while a batch is applied."""
        if self._closing:
            return
        self._closing = True
        self._order(self._loop.stop)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("the thread that reads events has not ended within %g s", CLOSE_S)

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs; without it the index goes out of date."""
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

    def _follow(self, worker: Worker, ranks: Collection[Rank]) -> None:
        self._unfollow(worker.id)
        links = self._links[worker.id] = []
        for rank in ranks:
            publisher = rank.publisher
            if not publisher.events:
                rank.mark(stale=True, problem="it publishes no KV events")
                continue
            sequence = Sequence(rank, can_replay=bool(publisher.replay), limits=self._limits)
            link = _Followed(rank, publisher, sequence, Line(self._dialler, worker.tenant))
            links.append(link)
            # Batches published before the subscription are in the replay, or are a gap.
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

    def _start(self, link: _Followed, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        link.tasks.append(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._leaving.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("reading events has failed", exc_info=error)
            self._loop.stop()  # a fault of ours: see is_alive

    async def _read_events(self, link: _Followed) -> None:
        attempt, retry_s = 0, MIN_RETRY_S
        while True:
            try:
                connection = await link.line.connect(link.publisher.events, b"SUB", attempt)
            except Lost as error:
                self._lost(link, str(error))
                if isinstance(error, OfAnotherTenant):  # then no replays are requested either
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

    def _interrupt(self, link: _Followed) -> None:
        """The requested publisher may be gone: request from the present one, without waiting for a reply."""
        if not link.asked:
            self._close_replay(link)
        elif link.replay is not None:
            link.interrupted = True
            link.replay.abort("its connection was lost")
        link.changed.set()

    @staticmethod
    def _lost(link: _Followed, problem: str) -> None:
        if not link.publisher.replay:  # with replay, replays tell whether it is followed
            link.rank.mark(stale=True, problem=problem)

    async def _read_batches(self, link: _Followed, connection: Connection) -> None:
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

    async def _ask_for_replays(self, link: _Followed) -> None:
        """Request wanted replays; an empty one is dropped and requested again, with backoff."""
        try:
            while True:
                await self._until_one_is_wanted(link)
                link.asked = True
                try:
                    await self._replay(link)
                except Lost as error:
                    self._close_replay(link)  # a late reply must not count for the next request
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
    async def _until_one_is_wanted(link: _Followed) -> None:
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

    async def _replay(self, link: _Followed) -> None:
        """Request a replay and hand on its batches. Errors: ``Lost``."""
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
        while True:
            if len(frames) not in (4, 5):
                self.ignored_messages += 1
            elif len(frames[-2]) == 8:
                number = int.from_bytes(frames[-2], "big")
                if number == END:
                    return
                link.sequence.replayed(number, frames[-1])
            frames = []
            frames = await replay.receive()

    @staticmethod
    async def _first_answer(replay: Connection, wanted: int, link: _Followed) -> list[bytes] | None:
        """On a reused connection; None: it was closed meanwhile. Errors: ``Lost``."""
        try:
            replay.send(b"", wanted.to_bytes(8, "big"))
            return await replay.receive()
        except Lost as error:
            if isinstance(error, Silent) or link.interrupted:
                raise
            return None

    def _close_replay(self, link: _Followed) -> None:
        if link.replay is not None:
            link.replay.close()
            link.replay = None
