"""What a test does with a store while its server, or the way there, is in trouble."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TypeVar

import redis

from kvpool import _native, open_store
from kvpool.errors import StoreUnavailable
from kvpool.store.store import Store
from tests.support.conformance import key, keys, opened, payload
from tests.support.deadlines import Stopwatch, eventually
from tests.support.proxy import Proxy, Way
from tests.support.records import fields_of


def serves(store: Store, number: int = 1) -> bool:
    """Whether a round trip works now; a wrong byte fails the test."""
    value = payload(number, 100_000)
    target = bytearray(len(value))
    try:
        if store.put_many([key(number)], [value], timeout_s=2) != [True]:
            return False
        if store.get_many_into([key(number)], [target], timeout_s=2) != [True]:
            return False
    except StoreUnavailable:
        return False
    assert target == value
    return True


class Traffic:
    """Puts and gets in a thread, until told to end: every hit is compared, every call is timed by a ``Stopwatch``.

    A fault is followed by a millisecond's rest, as a caller would have other things to do: one that asks again without
    end holds the interpreter, which a client in Python needs to dial.
    """

    def __init__(self, store: Store, timeout_s: float) -> None:
        self.store, self.timeout_s = store, timeout_s
        self.hits = self.faults = 0
        self.longest_s = 0.0
        self.wrong: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Traffic:
        self._thread.start()
        assert eventually(lambda: self.hits > 20)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        assert self.wrong == []

    def _run(self) -> None:
        values = [payload(number, 300_000 + number) for number in range(8)]
        while not self._stop.is_set():
            self._timed(lambda: self.store.put_many(keys(8), values, timeout_s=self.timeout_s))
            targets = [bytearray(len(value)) for value in values]
            get = functools.partial(self.store.get_many_into, keys(8), targets, timeout_s=self.timeout_s)
            found = self._timed(get)
            for number, hit in enumerate(found):
                self.hits += hit
                if hit and targets[number] != values[number]:
                    self.wrong.append(f"{number} holds something else")

    def _timed(self, call: Callable[[], list[bool]]) -> list[bool]:
        watch = Stopwatch()
        try:
            return call()
        except StoreUnavailable:
            self.faults += 1
            self._stop.wait(0.001)
            return []
        finally:
            self.longest_s = max(self.longest_s, watch.ran_s())


# ---- one batch of each kind


OLD = [payload(number, 17_000) for number in (1, 2)]
NEW = [payload(number, 17_000) for number in (3, 4)]
ANOTHER = 9  # the number of a key that the exchange leaves alone
TIMEOUT_S = 5.0
_Answer = TypeVar("_Answer")


def on_the_server(number: int, value: bytes) -> dict[bytes, bytes]:
    return fields_of(key(number), value)


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
        with store if store is not None else opened(self._url) as store:
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

        targets = [bytearray(17_000) for _ in range(3)]
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


def said_undisturbed(url: str, direct: redis.Redis, proxy: Proxy, way: Way) -> bytes:
    """What passes that way in an exchange without a fault: on a busy machine a dial may take longer than calls wait."""
    said = b""

    def meets_none() -> bool:
        nonlocal said
        before = len(proxy.passed(way))
        faults = Exchange(url, direct).run()
        said = proxy.passed(way)[before:]
        return not faults

    assert eventually(meets_none)
    return said
