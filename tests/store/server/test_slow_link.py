"""A link that carries little is no dead server: nothing is hung up, and no load waits for puts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvpool import open_store
from kvpool.errors import StoreUnavailable
from kvpool.store.store import Store
from tests.support.conformance import MIB, key, payload
from tests.support.deadlines import eventually
from tests.support.proxy import proxied
from tests.support.servers import ON_VALKEY, Server

LINK_NBYTES_PER_S = 8e6
VALUE_NBYTES = 256 << 10
PUT_S = 4.0  # a connection is silent after half of it: longer than a busy machine holds a process up


class Flood:
    """Puts without end, of which the link carries a part before their deadline."""

    def __init__(self, store: Store, *, value_nbytes: int) -> None:
        self._store, self._value = store, payload(7, value_nbytes)
        self._over = threading.Event()
        self.batches = 0  # written by its thread
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.is_set():
            first = 1000 + 256 * self.batches
            numbers = [key(number) for number in range(first, first + 256)]
            with contextlib.suppress(StoreUnavailable):  # more than the link carries in that time
                self._store.put_many(numbers, [self._value] * 256, timeout_s=PUT_S)
            self.batches += 1

    @contextmanager
    def flowing(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()


@ON_VALKEY
@pytest.mark.parametrize("value_nbytes", [VALUE_NBYTES, 4 * MIB])
def test_a_thin_link_full_of_puts_carries_loads_and_hangs_up_on_nobody(
    server: Server, value_nbytes: int
) -> None:
    wanted = [payload(number, VALUE_NBYTES) for number in range(4)]
    names = [key(number) for number in range(4)]
    with open_store(server.url) as direct:
        assert direct.put_many(names, wanted) == [True] * 4
    with (
        proxied(server.port, nbytes_per_s=LINK_NBYTES_PER_S) as proxy,
        open_store(f"valkey://127.0.0.1:{proxy.port}") as store,
    ):
        flood = Flood(store, value_nbytes=value_nbytes)
        with flood.flowing():
            assert eventually(lambda: flood.batches == 1)
            for _ in range(10):
                targets = [bytearray(VALUE_NBYTES) for _ in names]
                assert store.get_many_into(names, targets, timeout_s=60) == [True] * 4
                assert targets == wanted
            assert eventually(lambda: flood.batches >= 2)
        counters = store.counters()
        assert counters["timed_out"] > 0, "the link carried all: nothing was tried"
        assert (counters["disconnections"], counters["refused"], counters["damaged"]) == (0, 0, 0)
        assert counters["get_hits"] == 40
