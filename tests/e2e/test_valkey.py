"""Engines that share through a real server: exact hits, and a server that stops or dies in the middle."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import EngineProcess
from tests.support.deadlines import Stopwatch, eventually
from tests.support.engines import (
    BLOCK_TOKENS,
    GENERATED_TOKENS,
    call,
    engine_options,
    held_worker,
    passing,
    prompt,
    rests,
    started,
)
from tests.support.servers import Server, running

pytestmark = [pytest.mark.e2e, pytest.mark.smoke, pytest.mark.timeout(1800)]

PROMPTS = {name: prompt(40 + i, 2200) for i, name in enumerate(["hit", "stopped", "killed", "loading"])}
BUDGET_S = 0.5
# A stalled pool may delay a request by the budget; more is for a busy machine. What waits for a core is not counted.
MARGIN_S = 20.0


@dataclass
class Pair:
    """Two engines on one server; ``cold`` is what the first one said when it computed."""

    server: Server
    second: EngineProcess
    cold: dict[str, dict[str, Any]]
    reference: dict[str, dict[str, Any]]

    def ask(self, name: str) -> dict[str, Any]:
        watch = Stopwatch()
        answer = self.second.generate(PROMPTS[name], GENERATED_TOKENS)
        answer["first_token_s"] -= watch.waited_s()
        assert answer["tokens"] == self.reference[name]["tokens"]
        return answer


@pytest.fixture(scope="module")
def pair(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("valkey")
    with running("valkey-server", folder) as server:
        options = engine_options(llama, server.url, settings={"lookup_timeout_s": BUDGET_S})
        with started("first", folder, options) as first:
            cold = {name: first.generate(tokens, GENERATED_TOKENS) for name, tokens in PROMPTS.items()}
            again = {name: first.generate(tokens, GENERATED_TOKENS) for name, tokens in PROMPTS.items()}
        with passing("second", folder, options) as second:
            yield Pair(server, second, cold, again)


def test_second_engine_loads_from_the_server(pair: Pair) -> None:
    whole = (len(PROMPTS["hit"]) - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    def loads_all() -> bool:
        """A busy machine may take longer than the budget; then it computes, and is asked again."""
        return call(pair.second, "reset_prefix_cache") and pair.ask("hit")["pool_tokens"] == whole

    assert eventually(loads_all)


def test_a_stopped_server_costs_a_recompute_and_the_budget(pair: Pair) -> None:
    pair.server.stop()
    try:
        answer = pair.ask("stopped")
    finally:
        pair.server.go_on()
    assert answer["pool_tokens"] == 0
    assert answer["first_token_s"] < pair.cold["stopped"]["first_token_s"] + BUDGET_S + MARGIN_S


def touch_calls(pair: Pair) -> int:
    """How often the server was asked for keys."""
    stats: dict[str, Any] = pair.server.client.info("commandstats")
    return int(stats.get("cmdstat_touch", {}).get("calls", 0))


def test_a_server_that_stops_during_a_load_costs_a_recompute_and_the_budget(pair: Pair) -> None:
    """The server says what it holds, and stops before a block of it is read: the worker is held for that."""
    failed = "kvpool_load_requests_total/store_unavailable"
    before = pair.second.ask({"do": "metrics"}).get(failed, 0)
    # What found no server in the last test is stored meanwhile; an idle engine steps on for that, with its worker.
    with held_worker(pair.second) as core:
        asked = touch_calls(pair)
        pair.second.send({"do": "generate", "tokens": PROMPTS["loading"], "max_tokens": 1})
        was_asked = eventually(lambda: touch_calls(pair) > asked and rests(core))
        pair.server.stop()
    watch = Stopwatch()
    try:
        answer = pair.second.receive(60)  # one token, so it is the first
    finally:
        waited_s = watch.ran_s()
        pair.server.go_on()
    assert was_asked, "no lookup while the worker was held"
    assert answer["tokens"] == pair.reference["loading"]["tokens"][:1]
    assert waited_s < pair.cold["loading"]["first_token_s"] + BUDGET_S + MARGIN_S
    pair.second.generate(prompt(990, 60), 1)  # an idle engine does not report
    assert pair.second.ask({"do": "metrics"})[failed] == before + 1, "the load was not under way"


@pytest.mark.allow_leaks("the server that is started again ends with the module")
def test_a_killed_server_costs_a_recompute_and_comes_back(pair: Pair) -> None:
    pair.server.kill()
    answer = pair.ask("killed")
    assert answer["pool_tokens"] == 0
    assert answer["first_token_s"] < pair.cold["killed"]["first_token_s"] + BUDGET_S + MARGIN_S
    pair.server.start()  # empty, as a cache is after a crash
    seeds = itertools.count(900)

    def stored() -> bool:
        pair.second.generate(prompt(next(seeds), 3 * BLOCK_TOKENS), 2)
        return bool(pair.server.client.dbsize())

    assert eventually(stored), "what is computed goes to the pool again"
