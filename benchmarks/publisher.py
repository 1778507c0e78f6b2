"""``Publishers``: KV event publishers for the benchmarks, by the protocol of vLLM's ZMQ publisher.

``kvpool.index.follow.subscriber`` documents it. Unlike vLLM's, this publisher waits for a slow reader instead
of dropping batches: the benchmark measures speed, not the repair of losses.

Threads: ``_replays`` answers on the ROUTER sockets and owns them; the caller of ``publish`` owns the PUB
sockets. ``_lock`` guards ``_kept``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from types import TracebackType

import zmq

from kvpool.discovery.worker import Publisher
from kvpool.errors import KVPoolError
from kvpool.index.follow.subscriber import END

KEPT = 10_000  # batches for replay, as in vLLM
WAITING = 1_000  # batches of a publisher in flight
TIMEOUT_S = 60.0
LOOK_S = 0.1


class Publishers:
    """``count`` publishers, for one thread and ``with``. ``ports``: of events and replays; default: any."""

    def __init__(self, count: int, ports: Sequence[tuple[int, int]] | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._kept: list[deque[tuple[bytes, bytes]]] = [deque(maxlen=KEPT) for _ in range(count)]
        self._next = [0] * count
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._events = [self._socket(zmq.XPUB) for _ in range(count)]
        self._routers = [self._socket(zmq.ROUTER) for _ in range(count)]
        self.endpoints = [
            Publisher(0, _bound(events, at[0]), _bound(router, at[1]))
            for events, router, at in zip(self._events, self._routers, ports or [(0, 0)] * count, strict=True)
        ]
        self._replays = threading.Thread(target=self._answer, name="kvpool-bench-replays", daemon=True)
        self._replays.start()

    def publish(self, number: int, payload: bytes) -> None:
        """Publish a batch of publisher ``number``. Blocks while its reader lags. Errors: ``KVPoolError``."""
        sequence = self._next[number].to_bytes(8, "big")
        self._next[number] += 1
        with self._lock:
            self._kept[number].append((sequence, payload))
        try:
            self._events[number].send_multipart((b"", sequence, payload))
        except zmq.Again as error:
            raise KVPoolError(f"no subscriber took a batch of KV events for {TIMEOUT_S:g} s") from error

    def published(self, number: int) -> int:
        return self._next[number]

    def wait_subscribed(self) -> None:
        """Wait until each has a reader. Errors: ``KVPoolError`` after a minute without."""
        for events in self._events:
            if not events.poll(int(TIMEOUT_S * 1e3)):
                raise KVPoolError(f"there was no subscriber to KV events within {TIMEOUT_S:g} s")
            events.recv()

    def close(self) -> None:
        """Blocks for a moment."""
        self._closing.set()
        self._replays.join()
        self._context.destroy(linger=0)

    def __enter__(self) -> Publishers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        one = self._context.socket(kind)
        one.setsockopt(zmq.LINGER, 0)
        if kind == zmq.XPUB:
            one.setsockopt(zmq.XPUB_NODROP, 1)
            one.setsockopt(zmq.SNDHWM, WAITING)
            one.setsockopt(zmq.SNDTIMEO, int(TIMEOUT_S * 1e3))
        else:
            one.setsockopt(zmq.SNDHWM, 0)
        return one

    def _answer(self) -> None:
        poller = zmq.Poller()
        for router in self._routers:
            poller.register(router, zmq.POLLIN)
        number_of = {router: number for number, router in enumerate(self._routers)}
        while not self._closing.is_set():
            for router, _ in poller.poll(int(LOOK_S * 1e3)):
                who, empty, wanted = router.recv_multipart()
                with self._lock:
                    kept = [each for each in self._kept[number_of[router]] if each[0] >= wanted]
                for sequence, payload in kept:
                    router.send_multipart((who, empty, b"", sequence, payload))
                router.send_multipart((who, empty, b"", END.to_bytes(8, "big"), b""))


def _bound(one: zmq.Socket[bytes], port: int) -> str:
    one.bind(f"tcp://127.0.0.1:{port or '*'}")
    return one.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]
