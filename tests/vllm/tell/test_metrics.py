"""What is counted of requests: what the pool was to each, where its tokens came from, and how long it was held back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvpool import metrics
from kvpool.metrics import Counters, Samples
from kvpool.tracing import Tracing
from kvpool.vllm.load.state import RequestState
from kvpool.vllm.requests import WITHOUT_POOL, Asked
from kvpool.vllm.scheduler import SchedulerHalf
from kvpool.vllm.tell.metrics import AGED_S, Outcomes, PoolPromMetrics, PoolStats
from tests.support.lifecycle import BLOCK_TOKENS, ScriptedEngine, World

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("quiet")]
PROMPT = [index * 5 % 43 for index in range(6 * BLOCK_TOKENS + 1)]
WHOLE = 6 * BLOCK_TOKENS


def asked(engine: ScriptedEngine, name: str, prompt: list[int]) -> Samples:
    """What the engine tells of one request from its arrival to its end."""
    engine.planner.counters.take()
    engine.add(name, prompt, 2)
    engine.drain()
    return SchedulerHalf.stats(engine.planner)


def by_label(metric: metrics.Metric, samples: Samples) -> dict[str, Any]:
    name = f"{metric.name}/"
    return {key.removeprefix(name): value for key, value in samples.items() if key.startswith(name)}


results, sources = partial(by_label, metrics.REQUESTS), partial(by_label, metrics.PROMPT_TOKENS)


def test_a_hit_is_counted_when_it_is_loaded(engine: Callable[..., ScriptedEngine]) -> None:
    first, second = engine(), engine()
    computed = asked(first, "a", PROMPT)
    assert results(computed) == {"miss": 1}
    assert sources(computed) == {"computed": len(PROMPT)}
    assert len(computed["kvpool_lookup_wait_seconds/answered"]) == 1  # type: ignore[arg-type]

    again = asked(first, "b", PROMPT)
    assert results(again) == {"engine_cache": 1}
    assert sources(again) == {"engine_cache": WHOLE, "computed": 1}

    loaded = asked(second, "c", PROMPT)
    assert results(loaded) == {"hit": 1}
    assert sources(loaded) == {"pool": WHOLE, "computed": 1}
    assert loaded[metrics.LOADED_TOKENS.name] == WHOLE
    assert loaded[metrics.ENABLED.name] == 1.0


def test_requests_before_a_rest_are_told(engine: Callable[..., ScriptedEngine]) -> None:
    """The first step only asks the pool; an engine that is idle after the last one tells nothing any more."""
    one = engine()
    ratio = f"{metrics.HIT_RATIO.name}/1h"
    assert ratio not in SchedulerHalf.stats(one.planner)
    assert asked(one, "a", PROMPT)[ratio] == 0.0


def test_the_one_hit_before_a_rest_is_told() -> None:
    """A step in which a load begins is already looked at; the load ends some milliseconds later."""
    told: list[Any] = []
    outcomes = Outcomes(
        Counters(),
        record_tokens=BLOCK_TOKENS,
        tell=lambda windows, sampled: told.append((windows, sampled)),
        clock=lambda: 2 * AGED_S,
        tracing=Tracing.of_process(),
    )
    state = RequestState(Asked(SimpleNamespace(num_prompt_tokens=len(PROMPT)), WITHOUT_POOL))  # type: ignore[arg-type]
    namespace: Any = SimpleNamespace(hex="ab" * 16)
    outcomes.admitted(
        state, [bytes([number]) * 32 for number in range(6)], namespace, usable_tokens=WHOLE, loads=True
    )
    outcomes._told_at_s -= AGED_S
    outcomes.tell_ratios()
    state.load.tokens = WHOLE
    outcomes.loaded(state, ok=True)
    outcomes.tell_ratios()
    assert [windows["1h"].spared_tokens for windows, _ in told] == [0, WHOLE]
    assert [[len(one.numbers) for one in sampled] for _, sampled in told] == [[6], []]


def test_what_was_asked_for_ages_while_an_engine_only_goes_on(engine: Callable[..., ScriptedEngine]) -> None:
    one = engine()
    asked(one, "a", PROMPT)
    outcomes = one.planner._outcomes
    told: list[Any] = []
    now_s = outcomes._clock()
    outcomes._clock = lambda: now_s
    outcomes._tell = lambda windows, sampled: told.append(windows)
    for _ in range(3):
        outcomes.tell_ratios()
    count = len(told)
    assert count <= 1, "no request was counted since"
    now_s += AGED_S
    for _ in range(3):
        outcomes.tell_ratios()
    assert len(told) == count + 1


def test_a_load_that_fails_is_no_hit(world: World, engine: Callable[..., ScriptedEngine]) -> None:
    first, second = engine(), engine()
    asked(first, "a", PROMPT)
    ask = second.planner.matched_tokens

    def gone_after_the_answer(request: Any, local_tokens: int) -> Any:
        answer = ask(request, local_tokens)
        if answer[0]:
            world.records.delete_many(list(world.records._records))
        return answer

    second.planner.matched_tokens = gone_after_the_answer  # type: ignore[method-assign]
    failed = asked(second, "b", PROMPT)
    assert results(failed) == {"load_failed": 1}
    assert sources(failed) == {"computed": len(PROMPT)}
    assert by_label(metrics.MISSED_TOKENS, failed) == {"evicted": WHOLE}
    assert metrics.LOADED_TOKENS.name not in failed


def test_a_pool_that_is_switched_off_shows(engine: Callable[..., ScriptedEngine]) -> None:
    one = engine()
    one.planner.switch_off("as a test wants it")
    off = asked(one, "b", PROMPT)
    assert off[metrics.ENABLED.name] == 0.0
    assert results(off) == {"switched_off": 1}


@pytest.fixture
def page() -> tuple[PoolPromMetrics, CollectorRegistry]:
    registry = CollectorRegistry()
    kinds: Any = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config: Any = type("Config", (), {"kv_transfer_config": None})()
    engines: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
    return PoolPromMetrics(config, kinds, ["model_name", "engine"], engines), registry


def value(registry: CollectorRegistry, name: str, engine: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"model_name": "m", "engine": engine, **labels})


def test_what_can_be_counted_is_there_from_the_start(page: tuple[Any, CollectorRegistry]) -> None:
    """``rate()`` does not see a series' first value."""
    _, registry = page
    for result in metrics.REQUEST_RESULTS:
        assert value(registry, "kvpool_requests_total", "1", result=result) == 0.0
    assert value(registry, "kvpool_disconnections_total", "0") == 0.0
    assert value(registry, "kvpool_enabled", "0") is None, "not known yet"


def test_each_kind_of_sample(page: tuple[Any, CollectorRegistry]) -> None:
    shown, registry = page
    stats = PoolStats({"kvpool_enabled": 0.0, "kvpool_requests_total/hit": 2, "kvpool_hit_ratio/1h": 0.25})
    stats.aggregate(PoolStats({"kvpool_lookup_wait_seconds/answered": [0.0, 0.3], "kvpool_of_later": 1}))
    shown.observe(stats.to_dict(), 1)
    assert value(registry, "kvpool_enabled", "1") == 0.0
    assert value(registry, "kvpool_requests_total", "1", result="hit") == 2.0
    assert value(registry, "kvpool_requests_total", "0", result="hit") == 0.0
    assert value(registry, "kvpool_hit_ratio", "1", window="1h") == 0.25
    waited = partial(value, registry, engine="1", result="answered")
    assert waited("kvpool_lookup_wait_seconds_count") == 2.0
    assert waited("kvpool_lookup_wait_seconds_bucket", le="0.0") == 1.0
    assert waited("kvpool_lookup_wait_seconds_sum") == 0.3
    assert stats.reduce()["lookup_wait_seconds/answered_mean"] == 0.15
