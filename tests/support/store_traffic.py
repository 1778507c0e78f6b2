"""What a test does with a store while its server, or the way there, is in trouble."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

from kvpool.errors import StoreUnavailable
from kvpool.store.store import Store
from tests.support.conformance import key, keys, payload
from tests.support.deadlines import Stopwatch, eventually


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
