"""``Subscriber``: subscribes to the KV events of workers and hands each batch on, in order, once.

The protocol is that of vLLM's ZMQ publisher (``vllm/distributed/kv_events.py``): a PUB socket sends ``[topic,
number as 8 bytes big-endian, payload]``; a ROUTER socket answers ``[b"", number]`` with ``[b"", topic, number,
payload]`` for each batch that it keeps from that number on, and ends with number -1.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvpool.discovery.worker import PUSHED, EventSink, Position, Publisher, Worker
from kvpool.errors import KVPoolError
from kvpool.index.sequence import Sequence

PROBE_S = 1.0  # an idle publisher is asked that often whether there is anything later
ANSWER_S = 2.0  # how long a replay may bring nothing
MAX_BACKOFF_S = 10.0
STUCK_S = 5.0
TURN = 256  # batches of one socket in a row
TURN_NBYTES = 4 << 20
HIGH_WATER = 10_000  # batches that wait in a socket
MAX_FRAME_NBYTES = 64 << 20
LOOK_S = 0.05  # how late the end of a wait may be noticed
END = (1 << 64) - 1  # -1


class SubscriberStuck(KVPoolError):
    """The feed's own thread does not go on: a fault of ours."""


@dataclass(eq=False)
class _Link:
    """The sockets of one publisher."""

    worker_id: str
    publisher: Publisher
    sequence: Sequence
    events: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    replay: zmq.Socket[bytes] | None = None
    asked: bool = False
    answer_by: float = 0.0
    ask_at: float = 0.0  # not before
    backoff_s: float = 0.25
    probe_at: float = 0.0

    @property
    def due_at(self) -> float:
        """When it has to be looked at, if nothing comes before."""
        if self.asked:
            return self.answer_by
        return self.probe_at if self.sequence.is_live else self.ask_at


class Subscriber:
    """Follows the publishers of workers and tells ``sink`` what they say, from one thread of its own.

    Any thread but the feed's own may call the methods. When ``unfollow`` or ``close`` has returned, nothing more is
    told of that worker, or of any.
    """

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # A publisher takes four sockets, and ZMQ stops at 1,023 by itself: at 256 workers.
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._orders: deque[Callable[[], None]] = deque()
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._followed: dict[str, list[_Link]] = {}  # by worker
        self._sockets: dict[int, tuple[_Link, zmq.Socket[bytes]]] = {}  # by descriptor
        # A descriptor of ZMQ's becomes readable when something happens to its socket, not while something is there to
        # be read: a reader that stopped before the end has to come back by itself.
        self._unread: set[int] = set()
        self._due_at = time.monotonic()  # some link's, or earlier
        # Not ZMQ's own poll, which asks every socket each time: 0.5 ms for 240 workers, and each batch may be a turn.
        self._epoll = select.epoll()
        self._epoll.register(self._woken, select.EPOLLIN)
        self.ignored_messages = 0  # that are no batch
        self._thread = threading.Thread(target=self._run, name="kvpool-subscriber", daemon=True)
        self._thread.start()

    def follow(self, worker: Worker, positions: Mapping[int, Position] | None = None) -> None:
        """Subscribe to all publishers of a worker (one that ``check_worker`` has passed); returns at once.

        One with the same id that is followed already is left first. ``positions``: by rank, where the sink has what
        came up to there; see ``Sequence``.
        """
        self._order(lambda: self._follow(worker, positions or {}))

    def unfollow(self, worker_id: str) -> None:
        """Leave a worker; nothing happens if it is not followed.

        Blocking, while a batch is applied. Errors: ``SubscriberStuck`` when the feed does not come to it.
        """
        done = threading.Event()

        def leave() -> None:
            self._unfollow(worker_id)
            done.set()

        self._order(leave)
        if not done.wait(STUCK_S):
            raise SubscriberStuck(f"the feed's thread has not answered for {STUCK_S:g} s")

    def close(self) -> None:
        """Leave all and end the thread; again does nothing. Blocking and errors: as ``unfollow``."""
        if self._closing:
            return
        self._closing = True
        self._order(lambda: None)
        self._thread.join(STUCK_S)
        if self._thread.is_alive():
            raise SubscriberStuck(f"the feed's thread has not ended within {STUCK_S:g} s")
        self._epoll.close()
        os.close(self._woken)

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs: without it nothing that is known stays true."""
        return self._thread.is_alive()

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        os.eventfd_write(self._woken, 1)

    # In the thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        finally:
            for worker_id in list(self._followed):
                self._unfollow(worker_id)
            self._context.destroy(linger=0)

    def _turn(self) -> None:
        wait_s = 0.0 if self._unread else max(0.0, self._due_at - time.monotonic())
        ready = {descriptor for descriptor, _ in self._epoll.poll(wait_s)} | self._unread
        self._unread = set()
        if self._woken in ready:
            os.eventfd_read(self._woken)
        while self._orders:
            self._orders.popleft()()
        touched: list[_Link] = []
        for descriptor in ready:
            if descriptor not in self._sockets:  # the one that wakes; or it was closed in this turn
                continue
            link, one = self._sockets[descriptor]
            touched.append(link)
            if not (self._read_replay(link) if one is link.replay else self._read_events(link)):
                self._unread.add(descriptor)
        self._keep_asking(touched)

    def _keep_asking(self, touched: Iterable[_Link]) -> None:
        """Ask whom it is time to ask: of those that have said something, and of all when a wait is over."""
        now = time.monotonic()
        if now >= self._due_at:
            self._due_at = now + PROBE_S
            touched = [link for links in self._followed.values() for link in links]
        for link in touched:
            self._keep_asking_one(link, now)
            self._due_at = min(self._due_at, max(link.due_at, now + LOOK_S))

    def _follow(self, worker: Worker, positions: Mapping[int, Position]) -> None:
        self._unfollow(worker.id)
        links = self._followed[worker.id] = []
        for publisher in worker.publishers:
            if publisher.events == PUSHED:  # it comes to us: see PushReceiver
                continue
            if not publisher.events:
                self._sink.mark(worker.id, publisher.dp_rank, stale=True, problem="it publishes no KV events")
                continue
            try:
                events, monitor = self._monitored()
            except zmq.ZMQError as error:
                self._sink.mark(worker.id, publisher.dp_rank, stale=True, problem=_no_socket(error))
                continue
            sequence = Sequence(
                self._sink,
                worker.id,
                publisher.dp_rank,
                can_replay=bool(publisher.replay),
                position=positions.get(publisher.dp_rank),
            )
            events.subscribe(b"")
            self._connect(events, publisher.events, worker.id, publisher.dp_rank)
            link = _Link(worker.id, publisher, sequence, events, monitor)
            links.append(link)
            for one in (events, monitor):
                self._watch(link, one)
            # Batches that are published before the subscription stands are in the replay, or are a gap.
        self._due_at = time.monotonic()  # they are new

    def _unfollow(self, worker_id: str) -> None:
        for link in self._followed.pop(worker_id, ()):
            self._close_replay(link)
            link.events.disable_monitor()
            for one in (link.events, link.monitor):
                self._drop(one)

    def _monitored(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """A SUB socket, and one that tells of lost connections."""
        events = self._socket(zmq.SUB)
        try:
            return events, events.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        except zmq.ZMQError:
            events.close(linger=0)
            raise

    def _watch(self, link: _Link, one: zmq.Socket[bytes]) -> None:
        self._sockets[one.fileno()] = (link, one)
        self._unread.add(one.fileno())
        self._epoll.register(one.fileno(), select.EPOLLIN)

    def _drop(self, one: zmq.Socket[bytes]) -> None:
        self._epoll.unregister(one.fileno())
        self._unread.discard(one.fileno())
        del self._sockets[one.fileno()]
        one.close(linger=0)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        one = self._context.socket(kind)
        one.set_hwm(HIGH_WATER)
        one.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_NBYTES)
        one.setsockopt(zmq.LINGER, 0)
        one.setsockopt(zmq.IPV6, 1)
        one.setsockopt(zmq.RECONNECT_IVL, 100)
        one.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        return one

    def _connect(self, one: zmq.Socket[bytes], endpoint: str, worker_id: str, dp_rank: int) -> None:
        try:
            one.connect(endpoint)
        except zmq.ZMQError as error:
            problem = f"cannot connect to {endpoint}: {zmq.strerror(error.errno or 0)}"
            self._sink.mark(worker_id, dp_rank, stale=True, problem=problem)

    def _read_events(self, link: _Link) -> bool:
        """Hand on what has come, unless the connection was lost meanwhile. False: there may be more.

        The monitor tells of a lost connection before anything can come over the next one. So it is asked after
        the batches were taken and before any of them is applied.
        """
        taken: list[list[bytes]] = []
        nbytes, all_taken = 0, False
        try:
            while len(taken) < TURN and nbytes < TURN_NBYTES:
                taken.append(link.events.recv_multipart(zmq.NOBLOCK))
                nbytes += sum(map(len, taken[-1]))
        except zmq.Again:
            all_taken = True
        if int(link.monitor.get(zmq.EVENTS)) & zmq.POLLIN and self._was_lost(link):
            with contextlib.suppress(zmq.Again):
                for _ in range(HIGH_WATER):  # a replay brings what is still true of it
                    link.events.recv_multipart(zmq.NOBLOCK)
            link.sequence.disconnected()
            # The publisher that was asked may be gone: ask the present one, without waiting for an answer.
            was_asked = link.asked
            self._close_replay(link)
            if was_asked:
                link.ask_at = time.monotonic()
                link.sequence.replay_failed("its connection was lost")
            return False
        if taken:
            link.probe_at = time.monotonic() + PROBE_S
        for frames in taken:
            if len(frames) == 3 and len(frames[1]) == 8:
                link.sequence.live(int.from_bytes(frames[1], "big"), frames[2])
            else:
                self.ignored_messages += 1
        return all_taken

    @staticmethod
    def _was_lost(link: _Link) -> bool:
        lost = False
        with contextlib.suppress(zmq.Again):
            while True:
                lost |= recv_monitor_message(link.monitor, zmq.NOBLOCK)["event"] == zmq.EVENT_DISCONNECTED
        return lost

    def _read_replay(self, link: _Link) -> bool:
        """Hand on what was asked for. False: there may be more."""
        assert link.replay is not None
        for _ in range(TURN):
            try:
                frames = link.replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            now = time.monotonic()
            if len(frames) != 5 and len(frames) != 4:
                self.ignored_messages += 1
            elif len(frames[-2]) == 8 and link.asked:
                link.answer_by = now + ANSWER_S
                number = int.from_bytes(frames[-2], "big")
                if number == END:
                    link.asked, link.backoff_s = False, 0.25
                    link.probe_at, link.ask_at = now + PROBE_S, now
                    link.sequence.replay_ended()
                else:
                    link.sequence.replayed(number, frames[-1])
        return False

    def _keep_asking_one(self, link: _Link, now: float) -> None:
        """Ask for a replay when one is due; give one up that brings nothing."""
        if link.asked:
            if now >= link.answer_by:
                self._close_replay(link)  # a late answer must not be taken for that of the next question
                link.ask_at, link.backoff_s = now + link.backoff_s, min(2 * link.backoff_s, MAX_BACKOFF_S)
                link.sequence.replay_failed(f"no answer from {link.publisher.replay}")
            return
        if link.sequence.is_live and now >= link.probe_at:
            link.probe_at = now + PROBE_S
            link.sequence.check()
        wanted = link.sequence.wanted
        if wanted is None or now < link.ask_at:
            return
        if link.replay is None:
            try:
                link.replay = self._socket(zmq.DEALER)
            except zmq.ZMQError as error:
                link.ask_at = now + MAX_BACKOFF_S
                link.sequence.replay_failed(_no_socket(error))
                return
            self._connect(link.replay, link.publisher.replay, link.worker_id, link.publisher.dp_rank)
            self._watch(link, link.replay)
        link.asked, link.answer_by = True, now + ANSWER_S
        try:
            link.replay.send_multipart([b"", wanted.to_bytes(8, "big")], zmq.NOBLOCK)
        except zmq.Again:
            link.answer_by = now
        self._unread.add(link.replay.fileno())  # to send is something that happens to it

    def _close_replay(self, link: _Link) -> None:
        link.asked = False
        if link.replay is not None:
            self._drop(link.replay)
            link.replay = None


def _no_socket(error: zmq.ZMQError) -> str:
    return f"the index has no socket left for it: {zmq.strerror(error.errno or 0)}"
