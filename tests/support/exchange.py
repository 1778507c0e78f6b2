"""One batch of each kind through a store whose connection may be harmed, and a judge of the answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import redis

from kvpool import _native, open_store
from kvpool.errors import StoreUnavailable
from kvpool.key.record import pack_header
from kvpool.store.store import Store
from tests.support.conformance import key, keys, payload
from tests.support.deadlines import Stopwatch, eventually
from tests.support.store_traffic import serves

OLD = [payload(number, 5000) for number in (1, 2)]


NEW = [payload(number, 5000) for number in (3, 4)]


ANOTHER = 9  # the number of a key that the exchange leaves alone


TIMEOUT_S = 5.0


_Answer = TypeVar("_Answer")


def on_the_server(number: int, value: bytes) -> dict[bytes, bytes]:
    return {b"h": pack_header(key(number), value) + value[-128:], b"b": value[:-128]}


class Exchange:
    """A store is opened, and asked for one batch of each kind; every answer is judged.

    Before it, keys 0 and 1 hold ``OLD``, and key 2 nothing.
    """

    def __init__(self, url: str, direct: redis.Redis) -> None:
        self._url, self._direct = url, direct
        self._faults: list[str] = []

    def run(self) -> list[str]:
        """The words of the calls that met a fault; what the others answer has to be right."""
        self._direct.flushdb()
        for number, value in enumerate(OLD):
            self._direct.hset(key(number), mapping=on_the_server(number, value))
        store = self._try(lambda: open_store(self._url))
        with store if store is not None else open_store(self._url) as store:
            self._ask(store, self._direct)
            assert eventually(lambda: serves(store, ANOTHER)), "it does not recover"
            assert store.counters()["damaged"] == 0
        assert not any("hunter" in words for words in self._faults)
        return self._faults

    def _ask(self, store: Store, direct: redis.Redis) -> None:
        kept = self._try(lambda: store.put_many(keys(2), NEW, timeout_s=TIMEOUT_S))
        assert kept in (None, [True, True])
        candidates = [NEW] if kept else [OLD, NEW]
        for number in (0, 1):
            allowed = [on_the_server(number, values[number]) for values in candidates]
            assert direct.hgetall(key(number)) in allowed, "torn, or another value than the one that was put"
            assert not kept or direct.pttl(key(number)) > 0

        targets = [bytearray(5000) for _ in range(3)]
        found = self._try(lambda: store.get_many_into(keys(3), targets, timeout_s=TIMEOUT_S))
        assert found in (None, [True, True, False])
        for number in (0, 1) if found else ():
            assert targets[number] in [values[number] for values in candidates], "a hit of other bytes"

        there = self._try(lambda: store.contains_many(keys(3), timeout_s=TIMEOUT_S))
        assert there in (None, [True, True, False])
        absent = self._try(
            lambda: store.submit_put_absent([key(1), key(3)], NEW, timeout_s=TIMEOUT_S).results()
        )
        assert absent is None or list(absent) == [_native.PRESENT, _native.OK]
        put = on_the_server(3, NEW[1])
        assert direct.hgetall(key(3)) in ([put] if absent else [{}, put])
        assert not direct.exists(key(3)) or direct.pttl(key(3)) > 0
        deleted = self._try(lambda: store.delete_many([key(0), key(2)], timeout_s=TIMEOUT_S))
        assert deleted in (None, 1)
        if deleted:
            assert not direct.exists(key(0))
        assert direct.exists(key(1))

    def _try(self, call: Callable[[], _Answer]) -> _Answer | None:
        watch = Stopwatch()
        try:
            return call()
        except StoreUnavailable as error:
            self._faults.append(str(error))
            return None
        finally:
            assert watch.ran_s() < TIMEOUT_S, "the deadline was waited for"
