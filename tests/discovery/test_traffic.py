"""What an engine was asked for: windows, documents, and their writer."""

from __future__ import annotations

import hashlib
import threading

import msgpack
import pytest

from kvpool.discovery import traffic
from kvpool.discovery.announcer import TrafficAnnouncer
from kvpool.discovery.sample import unpack_sample
from kvpool.discovery.traffic import Seen, TrafficDocument, unpack_traffic
from kvpool.discovery.traffic_slots import LONG_SLOTS, SLOTS, Traffic
from kvpool.errors import StoreUnavailable
from kvpool.key.key import is_engine_key, traffic_prefix
from tests.support.deadlines import eventually
from tests.support.memory_store import MemoryStore

BLOCK = 16


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0 * 3600

    def __call__(self) -> float:
        return self.now_s


def hashes(prompt: int, blocks: int) -> bytes:
    return b"".join(hashlib.sha256(f"{prompt} {i}".encode()).digest() for i in range(blocks))


def ask(to: Traffic, prompt: int, blocks: int, *, salt: int = 0, tail: int = 0) -> None:
    to.add(hashes(prompt, blocks), 32, salt=salt, block_tokens=BLOCK, prompt_tokens=blocks * BLOCK + tail)


def test_a_window_forgets_what_is_older() -> None:
    clock = Clock()
    seen_by = Traffic(clock)
    ask(seen_by, 1, 100)
    for after_s, known in (
        (600, ("15m", "1h", "24h")),
        (1300, ("1h", "24h")),
        (7200, ("24h",)),
        (95_000, ()),
    ):
        clock.now_s = 1000.0 * 3600 + after_s
        windows = seen_by.windows()
        assert [name for name, seen in windows.items() if seen.blocks] == list(known), after_s


def test_memory_is_bounded_over_a_week() -> None:
    clock = Clock()
    seen_by = Traffic(clock)
    for _ in range(7 * 24 * 12):
        clock.now_s += 300
        ask(seen_by, int(clock.now_s), 3)
    assert len(seen_by._short) <= SLOTS + 1
    assert len(seen_by._long) <= LONG_SLOTS + 1
    assert seen_by.windows()["24h"].blocks == pytest.approx(24 * 12 * 3, rel=0.05)


def test_a_block_has_the_same_number_in_each_engine_of_its_namespace() -> None:
    one, other, elsewhere = Traffic(), Traffic(), Traffic()
    for to, salt in ((one, 1), (other, 1), (elsewhere, 2)):
        ask(to, 7, 20, salt=salt)
    mine, same, apart = (to.sampled()[0].numbers.tolist() for to in (one, other, elsewhere))
    assert mine == same
    assert not set(mine) & set(apart)


def test_a_prompt_without_a_block_is_counted_and_not_sampled() -> None:
    seen_by = Traffic()
    ask(seen_by, 1, 0, tail=5)
    assert (seen_by.windows()["15m"].prompt_tokens, seen_by.sampled()) == (5, [])


def _spoilt() -> list[bytes]:
    good = {name: [1, 16, 16, 0] for name in traffic.WINDOWS}
    spoilt: list[object] = [
        {"version": 1, "windows": {name: [bytes(4096), 1, 16, 16, 0] for name in traffic.WINDOWS}},
        {"version": 3, "windows": good, "sample": None},
        {"version": 2, "windows": good},
        {"version": 2, "windows": {**good, "1h": [-1, 16, 16, 0]}, "sample": None},
        {"version": 2, "windows": {**good, "1h": [True, 16, 16, 0]}, "sample": None},
        {"version": 2, "windows": {**good, "1h": [1 << 60, 16, 16, 0]}, "sample": None},
        {"version": 2, "windows": {**good, "1h": [1, 16]}, "sample": None},
        {"version": 2, "windows": {**good, "1h": "1234"}, "sample": None},
        {"version": 2, "windows": {}, "sample": None},
        {"version": 2, "windows": 7, "sample": None},
        [1],
        None,
    ]
    assert unpack_traffic(msgpack.packb({"version": 2, "windows": good, "sample": None})) is not None
    return [msgpack.packb(one) for one in spoilt] + [b"", b"\xc1", bytes(traffic.MAX_DOCUMENT_NBYTES + 1)]


@pytest.mark.parametrize("document", _spoilt())
def test_a_document_that_makes_no_sense_is_passed_over(document: bytes) -> None:
    assert unpack_traffic(document) is None


def found(store: MemoryStore) -> TrafficDocument:
    ((key, raw),) = store.announcements(traffic_prefix("t")).items()
    assert is_engine_key(key)
    assert len(raw) < traffic.MAX_DOCUMENT_NBYTES
    document = unpack_traffic(raw)
    assert document is not None
    return document


def test_it_is_in_the_pool_while_the_engine_runs() -> None:
    with MemoryStore(1 << 20) as store:
        announcer = TrafficAnnouncer(store, "t", every_s=0.01)
        announcer.tell({name: Seen() for name in traffic.WINDOWS}, [])
        assert announcer._thread.ident is None, "nothing was asked for"
        seen_by = Traffic()
        ask(seen_by, 1, 10)
        announcer.tell(seen_by.windows(), seen_by.sampled())
        assert eventually(lambda: len(store.announcements(traffic_prefix("t"))) == 1)
        assert found(store).windows["24h"].blocks == 10
        sample, known = unpack_sample(found(store).sample, (0, 0))
        assert known == (1, 10)
        assert sample.numbers.tolist() == [
            int.from_bytes(hashes(1, 10)[32 * i + 24 :][:8], "little") for i in range(10)
        ]
        announcer.close()
        assert store.announcements(traffic_prefix("t")) == {}


def test_the_windows_of_an_engine_that_rests_end() -> None:
    clock = Clock()
    with MemoryStore(1 << 20) as store:
        announcer = TrafficAnnouncer(store, "t", every_s=0.01, clock=clock)
        seen_by = Traffic(clock)
        ask(seen_by, 1, 10)
        announcer.tell(seen_by.windows(), seen_by.sampled())

        def known() -> list[str]:
            return [name for name, seen in found(store).windows.items() if seen.blocks]

        assert eventually(lambda: store.announcements(traffic_prefix("t")))
        assert eventually(lambda: known() == ["15m", "1h", "24h"])
        clock.now_s += 1000
        assert eventually(lambda: known() == ["1h", "24h"])
        clock.now_s += 4000
        assert eventually(lambda: known() == ["24h"])
        announcer.close()


def test_a_pool_that_is_away_costs_the_caller_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = threading.Event()

    def away(*_: object, **__: object) -> None:
        tried.set()
        raise StoreUnavailable("away")

    with MemoryStore(1 << 20) as store:
        monkeypatch.setattr(store, "announce", away)
        announcer = TrafficAnnouncer(store, "t", every_s=0.01)
        seen_by = Traffic()
        ask(seen_by, 1, 10)
        announcer.tell(seen_by.windows(), seen_by.sampled())
        assert tried.wait(60)
        announcer.close()
