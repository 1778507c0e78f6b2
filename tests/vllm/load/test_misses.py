"""Why prompts were computed, in metrics and spans: what the pool lacked, or what kept the engine from it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import Request

from kvpool import metrics
from kvpool.store import Store
from kvpool.tracing import Tracing, Value
from kvpool.vllm.geometry import Group
from kvpool.vllm.plan import Measured, PoolWorkerMetadata
from kvpool.vllm.scheduler import LOAD_REASONS, SchedulerHalf
from tests.support.clock import Clock
from tests.support.scheduler import (
    BLOCK_TOKENS,
    FACTS,
    NAMESPACE,
    TABLE,
    answer,
    half,
    hold,
    output,
    planted,
    put,
    request,
    request_with,
)
from tests.support.scripted_store import ScriptedStore

pytestmark = [pytest.mark.vllm]
USABLE = 96  # tokens of a request of 100, in blocks of 16
TTL_S = 100.0


def reasons(scheduler: SchedulerHalf) -> dict[str, float]:
    name = f"{metrics.MISSED_TOKENS.name}/"
    samples: dict[str, Any] = scheduler.counters.take()
    return {key.removeprefix(name): value for key, value in samples.items() if key.startswith(name)}


def missed(scheduler: SchedulerHalf, asked: Request, local_tokens: int = 0) -> dict[str, float]:
    """The tokens of a request that is computed, by why."""
    scheduler.counters.take()
    scheduler.seen(asked)
    assert answer(scheduler, asked, local_tokens) == 0
    scheduler.allocated(asked, TABLE, 0)
    return reasons(scheduler)


def stored(scheduler: SchedulerHalf, asked: Request, store: Store) -> None:
    step = scheduler.plan(output(asked, 100, TABLE))
    put(store, [block.block_hash for block in step.stores])
    everywhere = dict.fromkeys(step.tags, 1)
    scheduler.update(PoolWorkerMetadata(staged=everywhere, stored=everywhere), (), ())


def lose(store: Store, asked: Request, first: int = 0) -> None:
    store.delete_many(NAMESPACE.keys(asked.block_hashes[first:], 0, 0))


def test_new_not_stored_and_evicted_in_the_life_of_a_prompt(store: Store) -> None:
    scheduler = half(store)
    assert missed(scheduler, request("a")) == {"new": USABLE}
    again = request("b")
    assert missed(scheduler, again) == {"not_stored": USABLE}
    stored(scheduler, again, store)
    lose(store, again)
    assert missed(scheduler, request("c")) == {"evicted": USABLE}
    assert missed(scheduler, request("d", first=7)) == {"new": USABLE}


def test_what_others_stored_is_known_once_it_was_found(store: Store) -> None:
    scheduler, asked = half(store), request("a")
    put(store, asked.block_hashes[:3])
    scheduler.seen(asked)
    assert answer(scheduler, asked) == 48
    scheduler.allocated(asked, TABLE, 48)
    assert reasons(scheduler) == {}, "it is counted when it is loaded"
    scheduler.update(None, {"a"}, ())
    assert reasons(scheduler) == {"new": USABLE - 48}, "the pool had the others never"
    scheduler.finished(asked)
    lose(store, asked, 1)
    behind = request("b")
    scheduler.seen(behind)
    assert answer(scheduler, behind) == 16
    scheduler.allocated(behind, TABLE, 16)
    scheduler.update(None, {"b"}, ())
    assert reasons(scheduler) == {"evicted": USABLE - 16}


def test_the_engines_own_blocks_are_not_missed(store: Store) -> None:
    scheduler = half(store)
    assert missed(scheduler, request("a"), local_tokens=USABLE) == {}
    assert missed(scheduler, request("b"), local_tokens=32) == {"not_stored": USABLE - 32}
    assert missed(scheduler, request("c", tokens=16)) == {}, "less than a block"


def test_an_unused_record_expires(store: Store) -> None:
    clock = Clock()
    scheduler, asked = half(store, clock=clock, pool=f"valkey://unused?ttl={TTL_S:.0f}s"), request("a")
    missed(scheduler, asked)
    stored(scheduler, asked, store)
    lose(store, asked)
    clock.sleep(TTL_S)
    assert missed(scheduler, request("b")) == {"expired": USABLE}


@pytest.mark.parametrize(
    ("first", "then", "why"),
    [("", "", "other_namespace"), ("one", "other", "other_namespace"), ("one", "one", "evicted")],
    ids=["not measured", "other weights", "the same weights"],
)
def test_an_engine_that_left_its_namespace_misses_what_it_has_there(
    store: Store, first: str, then: str, why: str
) -> None:
    scheduler, asked = half(store, heard=False), request("a")
    at_start = Measured(first, why="" if first else "no model is shown")
    scheduler.update(PoolWorkerMetadata(facts={0: FACTS}, measured={(0, 0): at_start}), (), ())
    missed(scheduler, asked)
    stored(scheduler, asked, store)
    scheduler.finished(asked)
    scheduler.reset()
    if first:
        scheduler.seen(waits := request("b"))
        assert scheduler.matched_tokens(waits, 0)[0] is None, "it does not know where to look"
        scheduler.update(PoolWorkerMetadata(measured={(0, 1): Measured(then)}), (), ())
    lose(store, asked)
    assert missed(scheduler, request("c")) == {why: USABLE}


@pytest.mark.parametrize(
    ("params", "settings", "why"),
    [
        ({"kvpool": {"load": False}}, {}, "opted_out"),
        ({"kvpool": {"laod": False}}, {}, "opted_out"),
        (None, {"loads": False}, "role"),
        (None, {"heard": False, "lookup_timeout_s": 0.05}, "unavailable"),
    ],
    ids=["a wish", "a misspelt wish", "a worker that only writes", "ranks that did not report"],
)
def test_who_asks_for_nothing(store: Store, params: object, settings: dict[str, Any], why: str) -> None:
    assert missed(half(store, **settings), request("a", transfer_params=params)) == {why: USABLE}


def test_who_only_writes_is_not_taken_for_one_who_missed(store: Store) -> None:
    """It asks what the pool lacks of the engine's own blocks."""
    scheduler = half(store, loads=False)
    assert missed(scheduler, request("a"), local_tokens=32) == {"role": USABLE - 32}


def test_an_adapter_of_unknown_weights_goes_without(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.vllm.engine.internals.adapter_changed_in_place", lambda request: True)
    asked = request("a")
    asked.lora_request = SimpleNamespace(lora_name="of a trainer", lora_path="", lora_int_id=1)
    assert missed(half(store), asked) == {"adapter": USABLE}


def test_of_other_weights_of_an_adapter_the_pool_has_lost_nothing(store: Store) -> None:
    scheduler, adapter = half(store), ("adapter", "path")
    hold(scheduler, "one")
    asked = request_with("a", lora=adapter)
    assert missed(scheduler, asked) == {"new": USABLE}
    stored(scheduler, asked, store)
    scheduler.reset()
    hold(scheduler, "other")
    scheduler.update(PoolWorkerMetadata(measured={(0, 1): Measured()}), (), ())
    assert missed(scheduler, request_with("b", lora=adapter)) == {"new": USABLE}


def test_a_slow_pool_is_told_from_one_that_is_away() -> None:
    with ScriptedStore() as stalling:
        scheduler = half(stalling, lookup_timeout_s=0.05)
        assert missed(scheduler, request("a")) == {"too_slow": USABLE}
        stalling.end_all()
        scheduler, asked = half(stalling), request("b")
        scheduler.seen(asked)
        stalling.end(fault=True)
        assert answer(scheduler, asked) == 0
        scheduler.allocated(asked, TABLE, 0)
        assert reasons(scheduler) == {"unavailable": USABLE}


def test_a_fault_of_ours_is_no_miss_of_the_pool(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = half(store)
    monkeypatch.setattr(scheduler._lookups, "start", planted)
    assert missed(scheduler, request("a")) == {"fault": USABLE}


def test_the_gate_and_a_switch(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, asked = half(store, cost_gate=True), request("a")
    put(store, asked.block_hashes)
    assert scheduler._gate is not None
    monkeypatch.setattr(scheduler._gate, "admits", lambda source: False)
    assert missed(scheduler, asked) == {"gate": USABLE}
    scheduler.switch_off("as a test wants it")
    assert missed(scheduler, request("b")) == {"switched_off": USABLE}


@pytest.mark.parametrize(
    ("cause", "why"),
    [("missing", "evicted"), ("too_slow", "too_slow"), ("store_unavailable", "unavailable"), (None, "fault")],
)
def test_a_failed_load_says_why(store: Store, cause: str | None, why: str) -> None:
    scheduler, asked = half(store), request("a")
    put(store, asked.block_hashes)
    scheduler.seen(asked)
    assert answer(scheduler, asked) == USABLE
    scheduler.allocated(asked, TABLE, USABLE)
    report = PoolWorkerMetadata(load_causes={"a": cause}) if cause else None
    scheduler.update(report, {"a"}, {"a"})
    assert reasons(scheduler) == {why: USABLE}


def test_the_causes_of_failed_loads_are_those_that_workers_count() -> None:
    assert set(LOAD_REASONS) - {"adapter"} < set(metrics.LOAD_REQUESTS.values), (
        "of other files no load begins"
    )


def test_each_request_counts_once(store: Store) -> None:
    scheduler, asked = half(store), request("a")
    assert missed(scheduler, asked) == {"new": USABLE}
    asked.num_preemptions = 1
    assert missed(scheduler, asked) == {}


# Spans.


class Recorder(Tracing):
    def __init__(self) -> None:
        super().__init__()
        self.spans: list[tuple[str, dict[str, Value]]] = []

    def record(self, name: str, headers: Any, seconds: float, **attributes: Value) -> None:
        assert seconds >= 0
        if headers:
            self.spans.append((name, attributes))


@pytest.fixture
def traced(store: Store) -> Callable[..., tuple[SchedulerHalf, Recorder]]:
    def make(**settings: Any) -> tuple[SchedulerHalf, Recorder]:
        scheduler, recorder = half(store, **settings), Recorder()
        scheduler._outcomes._tracing = recorder
        return scheduler, recorder

    return make


def test_the_span_of_a_prompt_says_what_the_pool_was_to_it(
    store: Store, traced: Callable[..., tuple[SchedulerHalf, Recorder]]
) -> None:
    scheduler, recorder = traced()
    asked = request("a")
    put(store, asked.block_hashes[:3])
    asked.trace_headers = {"traceparent": "of a test"}
    scheduler.seen(asked)
    assert answer(scheduler, asked, 16) == 32
    scheduler.allocated(asked, TABLE, 32)
    assert "kvpool.prompt" not in dict(recorder.spans), "not before it is loaded"
    scheduler.update(None, {"a"}, ())
    assert dict(recorder.spans)["kvpool.prompt"] == {
        "result": "hit", "engine_cache_tokens": 16, "pool_tokens": 32, "missed_tokens": 48, "miss_reason": "new",
        "input_tokens": 100, "cache_read_tokens": 48,
    }  # fmt: skip


def test_the_span_of_a_prompt_says_why_it_missed(
    traced: Callable[..., tuple[SchedulerHalf, Recorder]],
) -> None:
    scheduler, recorder = traced()
    for name, params in (("a", {"kvpool": {"load": False}}), ("b", None)):
        asked = request(name, transfer_params=params)
        asked.trace_headers = {"traceparent": "of a test"}
        missed(scheduler, asked)
    missed(scheduler, request("untraced"))
    whole = request("c")
    whole.trace_headers = {"traceparent": "of a test"}
    missed(scheduler, whole, local_tokens=USABLE)
    spans = [attributes for name, attributes in recorder.spans if name == "kvpool.prompt"]
    assert [(one["result"], one["miss_reason"]) for one in spans] == [
        ("without", "opted_out"),
        ("miss", "new"),
        ("engine_cache", ""),
    ]
    assert [one["cache_read_tokens"] for one in spans] == [0, 0, USABLE]


def test_a_worker_reports_why_its_load_failed() -> None:
    one = PoolWorkerMetadata(load_causes={"a": "missing"})
    both = one.aggregate(PoolWorkerMetadata(load_causes={"b": "too_slow"}))
    assert both.load_causes == {"a": "missing", "b": "too_slow"}
    assert not both.is_empty()


def test_a_group_of_states_that_is_lacking_is_told_from_a_prompt_that_is_new(store: Store) -> None:
    """Attention's blocks are there, and the state behind them is gone."""
    groups = (Group(BLOCK_TOKENS), Group(BLOCK_TOKENS, window=2, state=True))
    scheduler, asked = half(store, groups=groups), request("a")
    put(store, asked.block_hashes)
    state = NAMESPACE.keys(asked.block_hashes[3:4], 1, 0)
    assert all(store.put_many(state, [b"x"]))
    scheduler.seen(asked)
    assert answer(scheduler, asked) == 64
    scheduler.allocated(asked, TABLE * 2, 64)
    scheduler.update(None, {"a"}, ())
    assert reasons(scheduler) == {"new": USABLE - 64}, "later states were never stored"
    store.delete_many(state)
    assert missed(scheduler, request("b")) == {"evicted": USABLE}
