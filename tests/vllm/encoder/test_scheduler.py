"""What of a request's items comes from the pool: only what is verified and held is promised, and each way ends."""

from __future__ import annotations

import random

import pytest
from vllm.v1.request import Request

from kvpool import _native
from kvpool.vllm.encoder.plan import EncoderWorkerMetadata
from tests.support.encoder import DTYPE, SIZE, Encoders, Picture, has, key, payload, ready, request
from tests.support.scheduler import planted
from tests.support.scripted_store import ScriptedStore

A, B = Picture("a" * 64, 10), Picture("b" * 64, 40)


def operations(store: ScriptedStore) -> list[int]:
    return [batch.operation for batch in store.under_way]


def test_what_the_pool_has_goes_to_the_workers_with_the_step(
    encoders: Encoders, store: ScriptedStore
) -> None:
    has(store, A)
    asked = request("r", A, B)
    encoders.half.seen(asked)
    assert operations(store) == [_native.TOUCH], "all items in one question, on arrival"
    assert not encoders.half.is_ready(asked, 0)
    store.end_all()
    assert not encoders.half.is_ready(asked, 0)
    assert operations(store) == [_native.GET], "of what the pool has"
    assert not encoders.half.has(A.identifier), "nothing is promised before its bytes are here"
    store.end_all()
    assert encoders.half.is_ready(asked, 0)
    assert encoders.schedule(asked) == [True, False]
    step = encoders.plan()
    assert step.loads[A.identifier].payload.tobytes() == payload(A.identifier, A.rows)
    assert step.loads[A.identifier].shape == (A.rows, 4, DTYPE)
    assert [step.stores[one].key for one in step.stores] == [key(B.identifier)]
    assert encoders.plan().loads == {}, "once"
    assert encoders.half._outputs.taken_nbytes == 0
    assert (encoders.count("outputs", "pool"), encoders.count("outputs", "computed")) == (1, 1)
    assert encoders.count("misses", "absent") == 1


def test_items_in_a_computed_prefix_are_not_fetched(encoders: Encoders, store: ScriptedStore) -> None:
    has(store, A, B)
    asked = request("r", A, B)
    encoders.half.seen(asked)
    store.end_all()
    assert not encoders.half.is_ready(asked, A.offset + A.rows)
    (get,) = store.under_way
    assert get.keys == [key(B.identifier)]
    store.end_all()
    assert encoders.half.is_ready(asked, A.offset + A.rows)
    assert encoders.half.is_ready(asked, 99), "behind all of them nothing is waited for"


def test_what_the_engine_has_is_not_asked_for(encoders: Encoders, store: ScriptedStore) -> None:
    encoders.cached.add(A.identifier)
    asked = request("r", A)
    encoders.half.seen(asked)
    assert encoders.half.is_ready(asked, 0)
    assert not store.under_way


def test_a_record_that_vanishes_between_the_answer_and_the_load_costs_a_run(
    encoders: Encoders, store: ScriptedStore
) -> None:
    has(store, A)
    asked = request("r", A)
    encoders.half.seen(asked)
    store.end_all()
    assert not encoders.half.is_ready(asked, 0)
    store.records.clear()
    store.end_all()
    assert encoders.half.is_ready(asked, 0)
    assert encoders.schedule(asked) == [False]
    assert A.identifier in encoders.plan().stores, "and it is stored again"


@pytest.mark.parametrize("answered", [False, True], ids=["the question", "the load"])
def test_a_pool_that_does_not_answer_is_not_waited_for(
    encoders: Encoders, store: ScriptedStore, answered: bool
) -> None:
    has(store, A)
    asked = request("r", A)
    encoders.half.seen(asked)
    if answered:
        store.end_all()
    assert not encoders.half.is_ready(asked, 0)
    encoders.clock.sleep(12)
    assert encoders.half.is_ready(asked, 0)
    assert encoders.schedule(asked) == [False]
    encoders.plan()
    assert encoders.count("misses", "too_slow") == 1
    encoders.half.finished(asked)
    assert store.under_way[0].cancelled
    store.end_all()
    encoders.half._outputs._reap()
    assert encoders.half._outputs.taken_nbytes == 0, "its memory is taken until nothing writes to it"


def test_a_fault_costs_a_run(encoders: Encoders, store: ScriptedStore) -> None:
    has(store, A)
    asked = request("r", A)
    encoders.half.seen(asked)
    store.end(fault=True)
    assert encoders.half.is_ready(asked, 0)
    assert encoders.schedule(asked) == [False]
    assert encoders.count("misses", "unavailable") == 1


def test_host_memory_is_bounded(store: ScriptedStore) -> None:
    large = [Picture(name * 64, 20 * place, rows=40_000) for place, name in enumerate("abc")]
    encoders = Encoders(store, {"staging_nbytes": 1 << 20})  # 640,000 bytes each
    has(store, *large)
    asked = request("r", *large)
    encoders.half.seen(asked)
    ready(encoders, store, asked)
    assert encoders.schedule(asked) == [True, False, False]
    assert encoders.count("misses", "no_room") == 2
    assert encoders.plan().stores == {}, "the pool has them"
    assert encoders.half._outputs.taken_nbytes == 0


def test_a_request_that_ends_leaves_nothing(encoders: Encoders, store: ScriptedStore) -> None:
    has(store, A, B)
    first, second = request("1", A, B), request("2", B)
    for one in (first, second):
        encoders.half.seen(one)
    store.end_all()
    assert not encoders.half.is_ready(first, 0)
    encoders.half.finished(first)
    assert encoders.half._outputs.of(A.identifier) is None
    store.end_all()
    assert encoders.half.is_ready(second, 0), "what another request wants, too, goes on"
    encoders.half.finished(second)
    encoders.half._outputs._reap()
    assert len(encoders.half._outputs) == 0
    assert encoders.half._outputs.taken_nbytes == 0
    assert encoders.half._requests == {}


def test_an_evicted_output_is_fetched_again(encoders: Encoders, store: ScriptedStore) -> None:
    """As of a request that was preempted: the engine's cache has lost it since."""
    has(store, A)
    asked = request("r", A)
    encoders.half.seen(asked)
    for _ in range(2):
        ready(encoders, store, asked)
        assert encoders.schedule(asked) == [True]
        assert list(encoders.plan().loads) == [A.identifier]
        encoders.cached.clear()


def test_what_is_evicted_before_the_step_is_planned_is_not_sent(
    encoders: Encoders, store: ScriptedStore
) -> None:
    has(store, A, B)
    asked = request("r", A, B)
    encoders.half.seen(asked)
    ready(encoders, store, asked)
    encoders.schedule(asked)
    encoders.cached.discard(A.identifier)
    assert list(encoders.plan().loads) == [B.identifier], (
        "else nobody would ever take it away from the workers"
    )


def test_a_step_without_tokens_keeps_its_outputs_for_the_next_one(
    encoders: Encoders, store: ScriptedStore
) -> None:
    """vLLM shows such a step to no worker that computes, and takes the output for cached."""
    has(store, A)
    asked = request("r", A)
    encoders.half.seen(asked)
    ready(encoders, store, asked)
    encoders.schedule(asked)
    encoders.plan(tokens=0)
    assert list(encoders.plan().loads) == [A.identifier]


def test_a_promise_survives_a_fault_of_ours(
    encoders: Encoders, store: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    has(store, A)
    asked = request("r", A)
    encoders.half.seen(asked)
    ready(encoders, store, asked)
    monkeypatch.setattr(encoders.half._outputs, "take", planted)
    assert encoders.schedule(asked) == [True]
    assert list(encoders.plan().loads) == [A.identifier], "without it the engine would end"


def test_two_items_of_one_name_are_not_taken_from_the_pool(encoders: Encoders, store: ScriptedStore) -> None:
    """Callers may name items: other rows under the same name would end the engine."""
    has(store, A)
    first, other = request("1", A), request("2", Picture(A.name, 10, rows=A.rows + 1))
    encoders.half.seen(first)
    ready(encoders, store, first)
    encoders.half.seen(other)
    assert encoders.half.is_ready(other, 0)
    assert not encoders.half.has(A.identifier)


@pytest.mark.parametrize(
    ("picture", "params", "reason", "stores"),
    [
        (A, {"load": False}, "opted_out", True),
        (A, {"store": False}, "absent", False),
        (Picture("c" * 64, 5, adapter="mine"), None, "adapter", False),
    ],
    ids=["load", "store", "adapter"],
)
def test_requests_without_the_pool(
    encoders: Encoders, store: ScriptedStore, picture: Picture, params: object, reason: str, stores: bool
) -> None:
    asked = request("r", picture, params=params)
    if reason != "absent":
        has(store, picture)
    encoders.half.seen(asked)
    ready(encoders, store, asked)
    assert encoders.schedule(asked) == [False]
    assert bool(encoders.plan().stores) is stores
    assert encoders.count("misses", reason) == 1


def test_over_its_quota_a_tenant_stores_nothing(
    encoders: Encoders, store: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoders.half._quota, "is_over", lambda: True)
    asked = request("r", A)
    encoders.half.seen(asked)
    ready(encoders, store, asked)
    encoders.schedule(asked)
    assert encoders.plan().stores == {}
    assert encoders.count("store_skipped_outputs", "quota") == 1


def test_items_without_rows_are_left_alone(encoders: Encoders, store: ScriptedStore) -> None:
    asked = request("r", Picture("d" * 64, 3, rows=0), A)
    encoders.half.seen(asked)
    assert [batch.keys for batch in store.under_way] == [[key(A.identifier)]]


def test_a_hundred_items_are_one_question(encoders: Encoders, store: ScriptedStore) -> None:
    pictures = [Picture(f"{number:064}", number * 8) for number in range(100)]
    has(store, *pictures)
    asked = request("r", *pictures, tokens=1000)
    encoders.half.seen(asked)
    assert len(store.under_way) == 1
    ready(encoders, store, asked)
    assert encoders.schedule(asked) == [True] * 100
    assert len(encoders.plan().loads) == 100


def test_the_width_of_outputs_is_learnt(encoders: Encoders, store: ScriptedStore) -> None:
    """Of models whose outputs are wider than their words, where vLLM has not measured them."""
    asked = request("1", A)
    encoders.half.seen(asked)
    ready(encoders, store, asked)
    encoders.schedule(asked)
    assert encoders.plan().stores[A.identifier].shape.width == 4
    encoders.half.update(EncoderWorkerMetadata(forms={A.identifier: (16, "bfloat16")}))
    later = request("2", B)
    encoders.half.seen(later)
    ready(encoders, store, later)
    encoders.schedule(later)
    assert encoders.plan().stores[B.identifier].shape == (B.rows, 16, "bfloat16")


def test_an_encoder_of_its_own_needs_no_bytes(store: ScriptedStore) -> None:
    encoders = Encoders(store, needs_bytes=False)
    has(store, A)
    asked = request("r", A, B)
    encoders.half.seen(asked)
    assert not encoders.half.is_ready(asked, 0)
    store.end_all()
    assert encoders.half.is_ready(asked, 0)
    assert encoders.schedule(asked) == [True, False]
    step = encoders.plan()
    assert step.loads == {}
    assert list(step.stores) == [B.identifier]


def test_a_random_life_keeps_each_promise_and_leaves_nothing() -> None:
    """Questions and loads end in any order, late, with faults or never; requests end at any time."""
    count = 0
    for seed in range(12):
        draw, store = random.Random(seed), ScriptedStore()
        encoders = Encoders(store, {"staging_nbytes": 1 << 20})
        pictures = [
            Picture(f"{number:064}", 10, draw.choice((1, 8, 30_000)), fields=(SIZE,) if number > 8 else ())
            for number in range(12)
        ]
        living: list[Request] = []
        for turn in range(120):
            has(store, *draw.sample(pictures, 2))
            if draw.random() < 0.3:
                asked = request(f"r{turn}", *draw.sample(pictures, draw.randrange(1, 5)))
                encoders.half.seen(asked)
                living.append(asked)
            while store.under_way and draw.random() < 0.5:
                store.end(draw.randrange(len(store.under_way)), fault=draw.random() < 0.1)
            if draw.random() < 0.1:
                store.records.clear()
            encoders.clock.sleep(draw.choice((0.0, 0.01, 3.0)))
            for one in draw.sample(living, min(len(living), 2)):
                if encoders.half.is_ready(one, 0):
                    encoders.schedule(one)
            for name in encoders.half.unavailable():
                (failed,) = [one for one in living if one.request_id == name]
                living.remove(failed)
                encoders.half.finished(failed)
                count += 1
            step = encoders.plan(tokens=draw.choice((0, 5)))
            for identifier, loaded in step.loads.items():
                assert loaded.payload.tobytes() == payload(identifier, loaded.shape.rows)
                assert identifier in encoders.cached
            for identifier in [one for one in sorted(encoders.cached) if draw.random() < 0.1]:
                if identifier not in encoders.half._step.loads:
                    encoders.cached.discard(identifier)
            if draw.random() < 0.05:
                encoders.half.called("collective_rpc")
            if living and draw.random() < 0.3:
                encoders.half.finished(living.pop(draw.randrange(len(living))))
        for one in living:
            encoders.half.finished(one)
        store.end_all()
        encoders.half._outputs._reap()
        assert encoders.half._outputs.taken_nbytes == 0
        assert len(encoders.half._outputs) == 0
        assert encoders.half._requests == {}
        assert not encoders.half._broken
    assert count > 20, "requests failed that nothing had an item of"
