"""What requests hint at counts for the outputs of their items: kept, let go, and near before their turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import Request

from kvpool import metrics, open_store
from kvpool.store import Store
from kvpool.vllm.encoder.hints import MAX_ITEMS
from kvpool.vllm.save.retention import TOUCH_EVERY_S, Retention
from tests.support.deadlines import eventually
from tests.support.encoder import Encoders, Picture, key, payload, request
from tests.support.memory_store import MemoryStore
from tests.support.records import HEADER_NBYTES

pytestmark = pytest.mark.vllm

A, B, C = (Picture(letter * 64, 10) for letter in "abc")
RECORD_NBYTES = len(payload(A.identifier, A.rows)) + HEADER_NBYTES


def put(store: Store, *pictures: Picture) -> None:
    for one in pictures:
        assert store.put_many([key(one.identifier)], [payload(one.identifier, one.rows)]) == [True]


def have(store: Store, *pictures: Picture) -> list[bool]:
    return store.contains_many([key(one.identifier) for one in pictures])


def turned(encoders: Encoders) -> Retention:
    """Its thread never runs: the test takes its turns."""
    retention = encoders.half._hints._retention
    retention._send = lambda call: retention._waiting.append(call)  # type: ignore[method-assign]
    return retention


def live(encoders: Encoders, name: str, *pictures: Picture, params: Any = None) -> None:
    """A request, from its arrival to its end."""
    asked = request(name, *pictures, params=params)
    encoders.half.seen(asked)
    assert eventually(lambda: encoders.half.is_ready(asked, 0))
    encoders.schedule(asked)
    encoders.plan()
    encoders.half.finished(asked)


def test_a_kept_picture_outlives_others_and_a_use_starts_its_time_again() -> None:
    store = MemoryStore(4 * RECORD_NBYTES)
    encoders = Encoders(store, {"keep_share": 0.5})
    retention = turned(encoders)
    put(store, A, B)
    live(encoders, "1", A, params={"keep_s": 45})
    live(encoders, "2", B)
    for number in range(8):
        if number == 1:
            live(encoders, "3", A)
        encoders.clock.sleep(TOUCH_EVERY_S)
        retention.turn()
        put(store, Picture(f"{number:064}", 10))
        assert have(store, A, B)[0] is (number < 5), f"turn {number}"
    assert have(store, A, B) == [False, False]
    assert not retention.keeps


def test_a_picture_without_room_is_not_kept() -> None:
    store = MemoryStore(4 * RECORD_NBYTES)
    encoders = Encoders(store, {"keep_share": 0.25})
    retention = turned(encoders)
    live(encoders, "1", A, B, params={"keep_s": 300})
    retention.turn()
    assert retention.keeps
    assert encoders.half.stats()[metrics.KEEPS_REFUSED.name] == 1


def test_a_picture_that_a_request_is_done_with_is_let_go() -> None:
    store = MemoryStore(16 * RECORD_NBYTES)
    encoders = Encoders(store)
    retention = turned(encoders)
    put(store, A, B)
    live(encoders, "1", A, params={"done": True})
    live(encoders, "2", B)
    retention.turn()
    assert store.count()["expires"] == 1
    assert encoders.half.stats()[metrics.DONE_KEYS.name] == 1


def test_a_request_keeps_only_what_it_had_of_the_pool_or_gave_it() -> None:
    store = MemoryStore(64 * RECORD_NBYTES)
    encoders = Encoders(store, {"keep_share": 0.5})
    retention = turned(encoders)
    ended = request("1", A, params={"keep_s": 300})
    encoders.half.seen(ended)
    encoders.half.finished(ended)
    encoders.cached.add(B.identifier)
    live(encoders, "2", B, params={"keep_s": 300})
    retention.turn()
    assert not retention.keeps


def test_a_request_of_many_pictures_leaves_others_hints_a_place() -> None:
    encoders = Encoders(MemoryStore(1 << 20))
    retention = turned(encoders)
    pictures = [Picture(f"{number:064}", number * 8) for number in range(MAX_ITEMS + 50)]
    live(encoders, "1", *pictures, params={"done": True})
    assert len(retention._waiting) == MAX_ITEMS


def test_hints_of_a_kv_connector_are_counted_once() -> None:
    """It counts the same request's."""
    encoders = Encoders(MemoryStore(1 << 20), alone=False)
    live(encoders, "1", A, params={"keep_s": 300})
    assert not [name for name in encoders.half.stats() if name.startswith(metrics.HINTS.name)]
    encoders.half.close()


@pytest.fixture
def near_far(tmp_path: Path) -> Iterator[tuple[Encoders, Store, Store]]:
    urls = [f"file://{tmp_path}/near?capacity=1MiB", f"file://{tmp_path}/far?capacity=64MiB"]
    with open_store(urls) as store, open_store(urls[0]) as near, open_store(urls[1]) as far:
        encoders = Encoders(store, {"pool": " ".join(urls)})
        yield encoders, near, far
        encoders.half.close()


def answered(encoders: Encoders, *asked: Request) -> Callable[[], bool]:
    """Whether the pool has said what it has of these requests' items."""

    def all_said() -> bool:
        followed = [
            output
            for one in asked
            for output in encoders.half._asked_for(one, encoders.half._requests[one.request_id])
        ]
        return all(output.state != "asked" for output in followed)

    return all_said


def test_what_a_waiting_request_needs_comes_near_before_its_turn(
    near_far: tuple[Encoders, Store, Store],
) -> None:
    encoders, near, far = near_far
    put(far, A, B)
    asked = request("r", A, B, C)
    encoders.half.seen(asked)
    assert eventually(answered(encoders, asked))
    encoders.plan()
    assert have(near, A, B) == [False, False], "the engine may ask for it in its next step"
    encoders.plan()
    assert eventually(lambda: have(near, A, B) == [True, True])
    assert eventually(lambda: encoders.half.is_ready(asked, 0))
    assert encoders.schedule(asked) == [True, True, False]
    for identifier, loaded in encoders.plan().loads.items():
        assert loaded.payload.tobytes() == payload(identifier, A.rows)
    encoders.half.finished(asked)
    counted = encoders.half.stats()[f"{metrics.PREFETCHED_NBYTES.name}/used"]
    assert counted == 2 * len(payload(A.identifier, A.rows))


def test_a_step_before_the_answer_gives_nothing_up(near_far: tuple[Encoders, Store, Store]) -> None:
    encoders, near, far = near_far
    put(far, A)
    asked = request("r", A)
    encoders.half.seen(asked)
    encoders.plan()

    def is_near() -> bool:
        encoders.plan()
        return have(near, A) == [True]

    assert eventually(is_near)
    encoders.half.finished(asked)


def test_a_request_that_asks_for_it_comes_first(near_far: tuple[Encoders, Store, Store]) -> None:
    encoders, near, far = near_far
    put(far, A, B)
    first, urgent = request("1", A), request("2", B, params={"prefetch": True})
    for asked in (first, urgent):
        encoders.half.seen(asked)
    assert eventually(answered(encoders, first, urgent))
    encoders.plan()
    assert eventually(lambda: have(near, A, B) == [False, True])
    for asked in (first, urgent):
        encoders.half.finished(asked)


def test_a_request_whose_turn_has_come_brings_nothing_near(near_far: tuple[Encoders, Store, Store]) -> None:
    encoders, near, far = near_far
    put(far, A)
    asked = request("r", A, params={"load": False})
    encoders.half.seen(asked)
    for _ in range(3):
        encoders.plan()
    assert encoders.half.is_ready(asked, 0)
    other = request("o", A)
    encoders.half.seen(other)
    encoders.half.finished(other)
    assert not encoders.half._hints._prefetches.waits("o")
    for _ in range(3):
        encoders.plan()
    assert have(near, A) == [False]
    assert not encoders.half._hints._prefetches._queue


def test_an_engine_that_only_encodes_brings_nothing_near(tmp_path: Path) -> None:
    urls = [f"file://{tmp_path}/near?capacity=1MiB", f"file://{tmp_path}/far?capacity=64MiB"]
    with open_store(urls) as store:
        encoders = Encoders(store, {"pool": " ".join(urls)}, needs_bytes=False)
        encoders.half.seen(request("r", A))
        assert not encoders.half._hints._prefetches.waits("r")
        encoders.half.close()
