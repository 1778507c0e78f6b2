"""Feeds of KV events: vLLM's own publisher, two that misbehave on purpose, and a sink that keeps what it was told."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import zmq

from demo.engine_process import free_ports
from kvpool.discovery.worker import Position, Publisher, Worker
from kvpool.errors import MalformedEvents
from kvpool.index.fleet.sequence import Sequence
from kvpool.index.follow.subscriber import END, Subscriber
from kvpool.key.hashing import seed_id
from tests.support.deadlines import eventually


def worker_of(publisher: Publisher, name: str = "w") -> Worker:
    return Worker(name, "m", 16, seed_id(None), (publisher,))


class Misbehaving:
    """A PUB and a ROUTER socket that do as they are told; one thread answers replays."""

    def __init__(
        self, ports: list[int] | None = None, *, replay: bool = True, host: str = "127.0.0.1"
    ) -> None:
        self.ports = ports or free_ports(2)
        self.kept: list[bytes] = []
        self.first = 0  # the number of kept[0]
        self.mute = False  # leaves questions for a replay unanswered
        self.owes_an_answer = False  # to the last question
        self.dropped_in_replays: set[int] = set()
        self.asked: list[int] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # From the first: what waits for a subscriber that died before close() would be waited for without end.
        self._context.linger = 0
        self._events = self._context.socket(zmq.PUB)
        self._events.bind(f"tcp://{host}:{self.ports[0]}")
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(f"tcp://{host}:{self.ports[1]}")
        self._replays = replay
        self._closing = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    @property
    def publisher(self) -> Publisher:
        replay = f"tcp://127.0.0.1:{self.ports[1]}" if self._replays else ""
        return Publisher(3, f"tcp://127.0.0.1:{self.ports[0]}", replay)

    def flag(self, name: str = "w", **more: str) -> str:
        """What ``--worker`` takes: model m, blocks of 16 tokens."""
        ends = self.publisher
        fields = {"model": "m", "block": "16", "replay": ends.replay, **more}
        return ",".join([f"{name}={ends.events}", *(f"{key}={value}" for key, value in fields.items())])

    def publish(self, payload: bytes, *, lost: bool = False, number: int | None = None) -> None:
        with self._lock:
            self.kept.append(payload)
            own = self.first + len(self.kept) - 1
        if not lost:
            number = own if number is None else number
            self._events.send_multipart([b"", number.to_bytes(8, "big"), payload])

    def send(self, *frames: bytes) -> None:
        self._events.send_multipart(list(frames))

    def forget(self, count: int) -> None:
        with self._lock:
            self.kept = self.kept[count:]
            self.first += count

    def close(self) -> None:
        self._closing = True
        self._thread.join(60)
        self._context.destroy()

    def _answer(self) -> None:
        while not self._closing:
            if not self._router.poll(20):
                continue
            who, empty, number = self._router.recv_multipart()
            wanted = int.from_bytes(number, "big")
            self.asked.append(wanted)
            self.owes_an_answer = self.mute
            if self.mute:
                continue
            with self._lock:
                kept = list(enumerate(self.kept, self.first))
            wanted_ones = [(one, payload) for one, payload in kept if one >= wanted]
            for at, (one, payload) in enumerate(wanted_ones):
                # A queue that is full drops what comes behind that which it holds: never the first.
                if at == 0 or one not in self.dropped_in_replays:
                    self._router.send_multipart([who, empty, b"", one.to_bytes(8, "big"), payload])
            self.dropped_in_replays = set()
            self._router.send_multipart([who, empty, b"", END.to_bytes(8, "big"), b""])


@contextlib.contextmanager
def misbehaving(
    ports: list[int] | None = None, *, replay: bool = True, host: str = "127.0.0.1"
) -> Iterator[Misbehaving]:
    one = Misbehaving(ports, replay=replay, host=host)
    try:
        yield one
    finally:
        one.close()


WITHIN_S = 60.0


def raw_publisher(say: Callable[[socket.socket], None]) -> contextlib.AbstractContextManager[Publisher]:
    """A PUB socket by hand: after its handshake it says what it is told to."""

    @contextlib.contextmanager
    def running() -> Iterator[Publisher]:
        closing_ = threading.Event()
        listener = socket.create_server(("127.0.0.1", 0))
        listener.settimeout(0.05)

        def serve() -> None:
            while not closing_.is_set():
                with contextlib.suppress(OSError):
                    connection = listener.accept()[0]
                    with connection:
                        connection.settimeout(0.5)
                        connection.sendall(GREETING)
                        connection.recv(4096)
                        say(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Publisher(0, f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        finally:
            closing_.set()
            thread.join(WITHIN_S)
            listener.close()

    return running()


GREETING = (
    b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32) + b"\x04\x19\x05READY"
    b"\x0bSocket-Type\x00\x00\x00\x03PUB"
)


def frames(*sizes: int) -> Callable[[socket.socket], None]:
    def say(connection: socket.socket) -> None:
        for size in sizes:
            connection.sendall(b"\x03" + size.to_bytes(8, "big") + bytes(min(size, 1 << 20)))
            for _ in range(size // (1 << 20) - 1):
                connection.sendall(bytes(1 << 20))

    return say


@dataclass
class Heard:
    """A sink that keeps what it was told."""

    applied: list[bytes] = field(default_factory=list)  # since the last reset
    numbers: list[int] = field(default_factory=list)
    stale: bool = True
    problems: list[str] = field(default_factory=list)
    anew: list[bool] = field(default_factory=list)  # of each reset, whether another life has begun
    proofs: int = 0
    gaps: int = 0
    closed: int = 0
    malformed: bytes | None = None

    def apply(self, worker_id: str, dp_rank: int, sequence: int, payload: bytes) -> None:
        assert (worker_id, dp_rank) == ("default/w", 3)
        if payload == self.malformed:
            raise MalformedEvents("a batch of KV events is malformed: byte 0")
        self.applied.append(payload)
        self.numbers.append(sequence)

    def heard(self, worker_id: str, dp_rank: int) -> None:
        self.proofs += 1

    def reset(self, worker_id: str, dp_rank: int, problem: str, *, anew: bool = False) -> None:
        assert problem
        self.anew.append(anew)
        assert "\n" not in problem
        self.problems.append(problem)
        self.applied, self.numbers = [], []

    def mark(self, worker_id: str, dp_rank: int, *, stale: bool, problem: str = "") -> None:
        assert bool(problem) == stale
        self.marked = (worker_id, problem)
        self.stale = stale

    def gap(self, worker_id: str, dp_rank: int, *, closed: bool) -> None:
        self.gaps += not closed
        self.closed += closed


class AmongOthers(Heard):
    """Listens to one worker, and why the others are stale. ``held``: batches of others are not done until it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[str] = []
        self.entered, self.held = threading.Event(), threading.Event()
        self.of_others = 0

    def mark(self, worker_id: str, dp_rank: int, *, stale: bool, problem: str = "") -> None:
        if worker_id == "default/w":
            super().mark(worker_id, dp_rank, stale=stale, problem=problem)
        else:
            self.others.append(problem)

    def apply(self, worker_id: str, dp_rank: int, sequence: int, payload: bytes) -> None:
        if worker_id == "default/w":
            super().apply(worker_id, dp_rank, sequence, payload)
            return
        self.entered.set()
        assert self.held.wait(WITHIN_S)
        self.of_others += 1

    def heard(self, worker_id: str, dp_rank: int) -> None:
        if worker_id == "default/w":
            super().heard(worker_id, dp_rank)

    def reset(self, worker_id: str, dp_rank: int, problem: str, *, anew: bool = False) -> None:
        if worker_id == "default/w":
            super().reset(worker_id, dp_rank, problem, anew=anew)


def followed(heard: Heard, numbers: list[int]) -> bool:
    return eventually(lambda: heard.numbers == numbers and not heard.stale)


@dataclass(eq=False)
class ToldRank:
    """A ``Rank`` that passes on what it is told to a sink like ``Heard``, with its worker's id; until it has left."""

    sink: Any
    worker: Worker
    publisher: Publisher
    position: Position | None = None
    gone: bool = False

    def __getattr__(self, name: str) -> Any:
        def told(*arguments: Any, **named: Any) -> None:
            if not self.gone:
                getattr(self.sink, name)(self.worker.id, self.publisher.dp_rank, *arguments, **named)

        return told


def follow(feed: Subscriber, sink: Any, worker: Worker) -> list[ToldRank]:
    ranks = [ToldRank(sink, worker, publisher) for publisher in worker.publishers]
    feed.follow(worker, ranks)  # type: ignore[arg-type]
    return ranks


def sequence(heard: Heard, *, can_replay: bool = True, position: Position | None = None) -> Sequence:
    rank = ToldRank(heard, worker_of(Publisher(3, "")), Publisher(3, ""), position)
    return Sequence(rank, can_replay=can_replay)  # type: ignore[arg-type]
