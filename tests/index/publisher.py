"""Publishers of KV events for tests: vLLM's own, and one that misbehaves on purpose."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import zmq

from demo.engine_process import free_ports
from kvpool.discovery.worker import Publisher, Worker
from kvpool.index.follow.subscriber import END
from kvpool.key.hashing import seed_id


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
        self._thread.join(10)
        self._context.destroy(linger=0)

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
