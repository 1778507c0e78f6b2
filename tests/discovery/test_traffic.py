"""How much of what was asked for had been asked for before: estimates beside exact counts, windows, documents."""

from __future__ import annotations

import hashlib
import random
import threading

import msgpack
import pytest

from kvpool.discovery import traffic
from kvpool.discovery.announcer import TrafficAnnouncer
from kvpool.discovery.traffic import Seen, Traffic, pack_traffic, together, unpack_traffic
from kvpool.errors import StoreUnavailable
from kvpool.key.key import is_traffic_key, traffic_prefix
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


@pytest.mark.parametrize("distinct", [1, 100, 5000, 20_000, 100_000])
def test_distinct_blocks_are_counted_closely(distinct: int) -> None:
    seen_by = Traffic()
    for first in range(0, distinct, 1000):
        ask(seen_by, first, min(1000, distinct - first))
    assert seen_by.windows()["15m"].distinct == pytest.approx(distinct, rel=0.06)


def test_the_ceiling_is_what_a_perfect_cache_would_spare() -> None:
    draw, seen_by = random.Random(3), Traffic()
    asked_before: set[int] = set()
    tokens = spared = 0
    for _ in range(400):
        prompt, tail = draw.randrange(60), draw.randrange(BLOCK)
        ask(seen_by, prompt, 40, tail=tail)
        tokens += 40 * BLOCK + tail
        spared += 40 * BLOCK * (prompt in asked_before)
        asked_before.add(prompt)
    assert seen_by.windows()["1h"].ceiling == pytest.approx(spared / tokens, abs=0.02)


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
    assert len(seen_by._short) <= traffic.SLOTS + 1
    assert len(seen_by._long) <= traffic.LONG_SLOTS + 1
    assert seen_by.windows()["24h"].blocks == pytest.approx(24 * 12 * 3, rel=0.05)


def test_other_namespaces_are_other_blocks() -> None:
    seen_by = Traffic()
    ask(seen_by, 1, 500, salt=1)
    ask(seen_by, 1, 500, salt=2)
    assert seen_by.windows()["15m"].ceiling < 0.05


def test_engines_together_count_a_block_once() -> None:
    one, other = Traffic(), Traffic()
    ask(one, 1, 1000)
    ask(other, 1, 1000)
    one.spare(50 * BLOCK)
    assert one.windows()["1h"].ceiling < 0.05
    both = together([pack_traffic(one.windows()), pack_traffic(other.windows()), b"no document"])["1h"]
    assert both.ceiling == pytest.approx(0.5, abs=0.03)
    assert both.hit_ratio == pytest.approx(50 / 2000)


def test_a_prompt_without_a_block_is_no_repeat() -> None:
    seen_by = Traffic()
    ask(seen_by, 1, 0, tail=5)
    assert (seen_by.windows()["15m"].prompt_tokens, seen_by.windows()["15m"].ceiling) == (5, 0.0)


def _spoilt() -> list[bytes]:
    good = {name: [bytes(traffic.REGISTERS), 1, 16, 16, 0] for name in traffic.WINDOWS}
    spoilt: list[object] = [
        {"version": 2, "windows": good},
        {"version": 1, "windows": {**good, "1h": [bytes(10), 1, 16, 16, 0]}},
        {"version": 1, "windows": {**good, "1h": [b"\xff" * traffic.REGISTERS, 1, 16, 16, 0]}},
        {"version": 1, "windows": {**good, "1h": [bytes(traffic.REGISTERS), -1, 16, 16, 0]}},
        {"version": 1, "windows": {**good, "1h": [bytes(traffic.REGISTERS), True, 16, 16, 0]}},
        {"version": 1, "windows": {**good, "1h": [bytes(traffic.REGISTERS), 1]}},
        {"version": 1, "windows": {**good, "1h": ["text", 1, 16, 16, 0]}},
        {"version": 1, "windows": {}},
        {"version": 1, "windows": 7},
        [1],
        None,
    ]
    assert unpack_traffic(msgpack.packb({"version": 1, "windows": good})) is not None
    return [msgpack.packb(one) for one in spoilt] + [b"", b"\xc1", bytes(traffic.MAX_DOCUMENT_NBYTES + 1)]


@pytest.mark.parametrize("document", _spoilt())
def test_a_document_that_makes_no_sense_is_passed_over(document: bytes) -> None:
    assert unpack_traffic(document) is None
    assert together([document])["1h"].prompt_tokens == 0


def test_it_is_in_the_pool_while_the_engine_runs() -> None:
    with MemoryStore(1 << 20) as store:
        announcer = TrafficAnnouncer(store, "t", every_s=0.01)
        announcer.tell({name: Seen() for name in traffic.WINDOWS})
        assert announcer._thread.ident is None, "nothing was asked for"
        seen_by = Traffic()
        ask(seen_by, 1, 10)
        announcer.tell(seen_by.windows())
        assert eventually(lambda: len(store.announcements(traffic_prefix("t"))) == 1)
        ((key, document),) = store.announcements(traffic_prefix("t")).items()
        assert is_traffic_key(key)
        assert len(document) < traffic.MAX_DOCUMENT_NBYTES
        assert together([document])["24h"].blocks == 10
        announcer.close()
        assert store.announcements(traffic_prefix("t")) == {}


def test_the_windows_of_an_engine_that_rests_end() -> None:
    clock = Clock()
    with MemoryStore(1 << 20) as store:
        announcer = TrafficAnnouncer(store, "t", every_s=0.01, clock=clock)
        seen_by = Traffic(clock)
        ask(seen_by, 1, 10)
        announcer.tell(seen_by.windows())

        def known() -> list[str]:
            windows = together(store.announcements(traffic_prefix("t")).values())
            return [name for name, seen in windows.items() if seen.blocks]

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
        announcer.tell(seen_by.windows())
        assert tried.wait(60)
        announcer.close()
