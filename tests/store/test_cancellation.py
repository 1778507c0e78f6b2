"""Batches that are cancelled at any point: their buffers are the caller's again, and nothing else suffers.

The server is good, slow and misbehaving by turns. Under the sanitizers: tests/native/store/resp_test.cpp.
"""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import weakref
from collections.abc import Iterator, Sequence

import pytest

from kvpool import open_store
from kvpool.errors import StoreUnavailable
from kvpool.store.clients import executor
from kvpool.store.store import Store
from tests.support.conformance import Buffer, keys, payload
from tests.support.deadlines import MARGIN_S, Stopwatch, eventually
from tests.support.misbehaving import HungUp, Misbehaving, Peer, misbehaving
from tests.support.servers import CLIENTS, with_client
from tests.support.store_traffic import serves

NBYTES = 100_000
KEYS = keys(8)
VALUES = [payload(number, NBYTES) for number in range(len(KEYS))]
DEADLINE_S = 0.5
ROUNDS = 60


@pytest.fixture
def server() -> Iterator[Misbehaving]:
    with misbehaving() as server:
        yield server


class Moody:
    """A harm that is none, most of the time."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._lock = threading.Lock()  # guards _chance

    def __call__(self, peer: Peer, words: Sequence[bytes], good: bytes) -> None:
        with self._lock:
            mood = self._chance.randrange(100)
            cut = self._chance.randrange(len(good))
        if mood < 2:
            raise HungUp
        if mood < 3:
            peer.send(good[:cut])
            peer.fall_silent()
        if mood < 4:
            peer.send(good[:cut] + b"?\r\n")
        elif mood < 20:
            for piece in (good[:cut], good[cut:]):
                peer.send(piece)
                threading.Event().wait(0.002)
        else:
            peer.send(good)


class Canceller:
    """One thread that submits, cancels and overwrites; what went wrong is in ``wrong``."""

    def __init__(self, store: Store, seed: int) -> None:
        self._store, self._chance = store, random.Random(seed)
        self.hits = self.cancelled = 0
        self.wrong: list[str] = []
        self.given: list[weakref.ref[Buffer]] = []
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        for _ in range(ROUNDS):
            puts = self._chance.random() < 0.4
            buffers = [Buffer(value if puts else bytes(NBYTES)) for value in VALUES]
            self.given += [weakref.ref(buffer) for buffer in buffers]
            begin = self._store.submit_put if puts else self._store.submit_get
            try:
                transfer = begin(KEYS, buffers, timeout_s=DEADLINE_S)
            except StoreUnavailable as error:
                self.wrong.append(str(error))
                return
            if self._chance.random() < 0.8:
                threading.Event().wait(self._chance.random() * 0.01)
                transfer.cancel()
                self.cancelled += 1
            watch = Stopwatch()
            found: list[bool] = []
            with contextlib.suppress(StoreUnavailable):
                found = transfer.wait()
            if watch.ran_s() > DEADLINE_S + 2 * MARGIN_S:
                self.wrong.append("a batch went on beyond its deadline")
            if not transfer.done():
                self.wrong.append("a batch is still under way")
                return
            for place, hit in enumerate(found):
                self.hits += hit and not puts
                if hit and buffers[place] != VALUES[place]:
                    self.wrong.append("a hit of other bytes")
            for buffer in buffers:
                buffer[:] = b"\xee" * NBYTES
                buffer.extend(b"!")  # refused while somebody holds it


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("seed", [1, 2])
def test_batches_are_cancelled_at_any_point(
    server: Misbehaving, client: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "MAX_CALL_S", DEADLINE_S)
    with open_store(with_client(f"{server.url}?connections=3", client)) as store:
        assert all(store.put_many(KEYS, VALUES))
        server.misbehave(Moody(seed))
        cancellers = [Canceller(store, seed * 10 + number) for number in range(3)]
        for canceller in cancellers:
            canceller.thread.join()
        assert [canceller.wrong for canceller in cancellers] == [[]] * 3
        assert sum(canceller.cancelled for canceller in cancellers) > ROUNDS
        assert sum(canceller.hits for canceller in cancellers) > 0
        server.behave()
        monkeypatch.undo()  # a busy machine may be late
        assert eventually(lambda: serves(store, 20))
        # What was put, and overwritten afterwards, is whole or not there.
        for text, value in zip(KEYS, VALUES, strict=True):
            target = bytearray(NBYTES)
            if store.get_many_into([text], [target]) == [True]:
                assert target == value
        assert all(server.holds(text, value) for text, value in zip(KEYS, VALUES, strict=True))
        assert store.counters()["queued"] == 0

        def nothing_is_held() -> bool:
            gc.collect()
            return not any(ref() for canceller in cancellers for ref in canceller.given)

        assert eventually(nothing_is_held)
