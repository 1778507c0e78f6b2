"""``StoreClient``: batches of random values, timed on their way into a store and back; no other run has their keys."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.key.key import Namespace
from kvpool.store import Store, StoreURL
from kvpool.store.server.connection import connect
from kvpool.store.url import SERVER_SCHEMES

VALUE_NBYTES = (64 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20)
EXISTS_KEYS = 1024
TENANT = "bench"
TIMEOUT_S = 120.0  # of one batch
ROOM = 1.3  # of what is put: free memory that a server must have, so that the benchmark evicts nothing

Views = list[memoryview]


class Values:
    """As many values of one size as a batch has: what is put, and where it is got to."""

    def __init__(self, nbytes: int, count: int) -> None:
        self.nbytes, self.count = nbytes, count
        self.sources: Views = [memoryview(os.urandom(nbytes)) for _ in range(count)]
        self.targets: Views = [memoryview(bytearray(nbytes)) for _ in range(count)]


class TimedClient(ABC):
    """A client in this process. What it got is compared with what was put, outside the time that is measured.

    Every call blocks; times are seconds. Errors: ``KVPoolError``, ``RuntimeError``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._values = Values(0, 0)

    def fill(self, values: Values) -> None:
        """Put all of ``values``, each under a key of its own, which the calls below then use."""
        self._values = values
        self._put(values.sources)

    def put(self, count: int) -> float:
        return timed(lambda: self._put(self._values.sources[:count]))

    def get(self, count: int) -> float:
        targets = self._values.targets[:count]
        nothing = bytes(self._values.nbytes)
        for target in targets:
            target[:] = nothing
        taken_s = timed(lambda: self._get(targets))
        if targets != self._values.sources[:count]:
            raise RuntimeError(f"{self.name} gave other bytes than it took")
        return taken_s

    @abstractmethod
    def empty(self) -> None:
        """Delete what ``fill`` put."""

    @abstractmethod
    def _put(self, sources: Views) -> None: ...

    @abstractmethod
    def _get(self, targets: Views) -> None: ...


class StoreClient(TimedClient):
    """A store of kvpool: one batch, one return into Python."""

    def __init__(self, name: str, store: Store) -> None:
        super().__init__(name)
        self._store = store
        self._namespace = Namespace(TENANT, {"bench": name, "run": secrets.token_hex(16)})

    def exists(self, count: int) -> float:
        """How long the question takes which of the first ``count`` are there."""
        keys = self.keys(count)
        return timed(lambda: check_all(self._store.contains_many(keys, timeout_s=TIMEOUT_S)))

    def empty(self) -> None:
        self._store.delete_many(self.keys(self._values.count), timeout_s=TIMEOUT_S)

    def keys(self, count: int) -> list[str]:
        return [self._namespace.key(index.to_bytes(32, "big"), 0, 0) for index in range(count)]

    def _put(self, sources: Views) -> None:
        check_all(self._store.put_many(self.keys(len(sources)), sources, timeout_s=TIMEOUT_S))

    def _get(self, targets: Views) -> None:
        check_all(self._store.get_many_into(self.keys(len(targets)), targets, timeout_s=TIMEOUT_S))


def check_all(found: Sequence[bool]) -> None:
    """Errors: ``ConfigError`` when one is not there."""
    if not all(found):
        raise ConfigError("the pool did not keep a whole batch: raise its capacity, or lower --batch-bytes")


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@contextlib.contextmanager
def server_memory(url: StoreURL, wanted_nbytes: int) -> Iterator[Callable[[str], int] | None]:
    """Asks a server how much memory a key has there; refuses one that would evict for us. None where there is not one.

    Not the difference of its memory in use: that has its clients' buffers in it, and what it frees in the background.
    ``wanted_nbytes``: put there at a time. Errors: ``KVPoolError``.
    """
    if url.scheme not in SERVER_SCHEMES or url.nodes:
        yield None
        return
    with connect(url, timeout_s=TIMEOUT_S, role="bench") as server:
        memory = _answer(lambda: server.info("memory"), "+info")
        room_nbytes = memory["maxmemory"] - memory["used_memory"]
        needed_nbytes = ROOM * max(wanted_nbytes, max(VALUE_NBYTES))
        if memory["maxmemory"] and room_nbytes < needed_nbytes:
            raise ConfigError(
                f"the server has {max(0, room_nbytes) >> 20} MiB before it evicts, and the clients' batches need "
                f"{int(needed_nbytes) >> 20}: raise maxmemory, or lower --batch-bytes"
            )
        yield lambda key: int(_answer(lambda: server.memory_usage(key), "+memory|usage"))


def _answer(ask: Callable[[], Any], needed: str) -> Any:
    import redis

    try:
        return ask()
    except redis.RedisError as error:
        raise StoreUnavailable(
            f"the server does not tell of its memory: {error}; use a user that may {needed}"
        ) from error
