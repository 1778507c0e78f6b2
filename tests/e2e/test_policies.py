"""Policies on one real engine: connectors of different settings, side by side under vLLM's MultiConnector.

``reads`` (a consumer) and ``evicted`` (a producer that writes back) share a real
server; ``often`` (a producer of prompts that came twice) and ``written`` (a producer) have a directory each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import EngineProcess, connector_config
from kvpool import BlockHasher
from tests.support.deadlines import eventually
from tests.support.engines import (
    BLOCK_TOKENS,
    GENERATED_TOKENS,
    PATIENT,
    engine_options,
    passing,
    prompt,
    records,
)
from tests.support.servers import Server, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

PROMPT_TOKENS = 1100
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
GENERATED = 60  # fills one more block
KV_NBYTES = 24 << 20  # 48 blocks, five prompts
NAMES = ["twice", "shy", "odd", "private", "unread", "back"]
PROMPTS = {name: prompt(700 + i, PROMPT_TOKENS) for i, name in enumerate(NAMES)}
PARAMS: dict[str, Any] = {
    "shy": {"store": False},
    "odd": {"stor": False},
    "private": {"store": True, "priority": -1},
}
TTL_S = 3600


@dataclass
class Policies:
    engine: EngineProcess
    server: Server
    often: Path
    written: Path
    first: dict[str, dict[str, Any]]

    def ask(self, name: str, **params: Any) -> dict[str, Any]:
        answer = _ask(self.engine, PROMPTS[name], GENERATED_TOKENS, params)
        assert answer["tokens"] == self.first[name]["tokens"][:GENERATED_TOKENS]
        return answer

    def evicted(self, name: str) -> list[bytes]:
        """The keys of a prompt's blocks that were written back."""
        return _on(self.server, PROMPTS[name])


def _ask(engine: EngineProcess, tokens: list[int], count: int, params: Any) -> dict[str, Any]:
    command = {"do": "generate", "tokens": tokens, "max_tokens": count}
    return engine.ask({**command, "transfer_params": {"kvpool": params}} if params else command)


def _on(server: Server, tokens: list[int]) -> list[bytes]:
    found: list[bytes] = []
    for block_hash in BlockHasher(BLOCK_TOKENS).hashes(tokens):
        found += server.client.keys(f"*:{block_hash.hex()}:*")
    return found


def _child(name: str, pool: str, role: str, **settings: Any) -> dict[str, Any]:
    settings = {**PATIENT, "worker": name, **settings}
    return {**connector_config(pool, settings), "kv_role": role}


@pytest.fixture(scope="module")
def policies(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policies]:
    folder = tmp_path_factory.mktemp("policies")
    often, written = folder / "often", folder / "written"
    with running("valkey-server", folder) as server:
        url = f"{server.url}?ttl={TTL_S}s"  # of both: what is done expires by the ttl of who says so last
        children = [
            _child("reads", url, "kv_consumer"),
            _child("evicted", url, "kv_producer", store_policy="write_back"),
            _child("often", f"file://{often}", "kv_producer", min_requests_to_store=2, store_decode=False),
            _child("written", f"file://{written}", "kv_producer"),
        ]
        options = engine_options(
            llama,
            "file:///unused",
            max_model_len=1536,
            max_num_batched_tokens=1536,
            kv_cache_memory_bytes=KV_NBYTES,
        )
        options["kv_transfer_config"] = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": children},
        }
        with passing("policies", folder, options) as engine:
            first = {}
            for name, tokens in PROMPTS.items():
                count = GENERATED if name == "twice" else GENERATED_TOKENS
                first[name] = _ask(engine, tokens, count, PARAMS.get(name))
                if name == "twice":
                    again = _ask(engine, tokens, GENERATED, None)
                    assert again["cached_tokens"] == PROMPT_BLOCKS * BLOCK_TOKENS
                    assert again["tokens"] == first[name]["tokens"]
                    assert _on(server, tokens) == [], "nobody wants its memory yet"
            for seed in range(5):  # so that all of them are evicted
                _ask(engine, prompt(800 + seed, PROMPT_TOKENS), 2, None)
            assert eventually(lambda: len(_on(server, PROMPTS[NAMES[-1]])) >= PROMPT_BLOCKS)
            yield Policies(engine, server, often, written, first)


def test_only_prompts_that_came_twice_are_stored_where_that_is_asked_for(policies: Policies) -> None:
    assert len(records(policies.often, PROMPTS["twice"])) == PROMPT_BLOCKS
    everything = PROMPTS["twice"] + policies.first["twice"]["tokens"]
    assert len(records(policies.often, everything)) == PROMPT_BLOCKS, "what it generated is not there"
    assert len(records(policies.written, everything)) == PROMPT_BLOCKS + 1, "but here it is"
    assert records(policies.often, PROMPTS["back"]) == []


@pytest.mark.parametrize("name", ["shy", "odd"])
def test_a_request_that_opts_out_is_in_no_pool(policies: Policies, name: str) -> None:
    """Also when it said so in words that are not understood; and when the engine evicts it."""
    assert records(policies.written, PROMPTS[name]) == []
    assert policies.evicted(name) == []
    assert len(records(policies.written, PROMPTS["private"])) == PROMPT_BLOCKS
    assert policies.engine.log.read_text().count("a request goes without the pool") == 4, "once a connector"


def test_a_request_that_opts_out_of_loads_is_computed(policies: Policies) -> None:
    assert len(policies.evicted("unread")) >= PROMPT_BLOCKS
    answer = policies.ask("unread", load=False)
    assert (answer["pool_tokens"], answer["cached_tokens"]) == (0, 0)


def test_a_producer_does_not_load(policies: Policies) -> None:
    """``written`` has it still, and the one that may load has not."""
    policies.server.client.delete(*policies.evicted("private"))
    assert len(records(policies.written, PROMPTS["private"])) == PROMPT_BLOCKS
    assert policies.ask("private")["pool_tokens"] == 0


def test_what_was_evicted_comes_back_and_lives_as_long_as_the_url_says(policies: Policies) -> None:
    keys = policies.evicted("back")
    assert len(keys) == PROMPT_BLOCKS
    for key in keys:
        assert (TTL_S - 600) * 1000 < policies.server.client.pttl(key) <= TTL_S * 1000
    answer = policies.ask("back")
    assert answer["pool_tokens"] == PROMPT_BLOCKS * BLOCK_TOKENS


def test_a_request_that_is_done_lets_its_blocks_go_and_one_that_keeps_is_counted(policies: Policies) -> None:
    names = policies.evicted("back")
    assert len(names) >= PROMPT_BLOCKS
    policies.ask("back", done=True)
    assert eventually(
        lambda: all(
            0 < policies.server.client.pttl(name) <= TTL_S * 1000 // 48 for name in names[:PROMPT_BLOCKS]
        )
    )
    assert len(policies.evicted("back")) == len(names), "they are still there"
    policies.ask("back", keep_s=60)
    assert eventually(lambda: policies.server.client.keys("*:keeper:*"))
