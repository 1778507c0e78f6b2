"""``KVPoolTier`` on real engines: what one engine's tier stored, another one's loads, with the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import EngineProcess
from kvpool import BlockHasher, metrics
from tests.support.deadlines import eventually
from tests.support.engines import BLOCK_TOKENS, GENERATED_TOKENS, engine_options, prompt, started
from tests.support.servers import SERVERS, Server, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

NAMES = ("hit", "flipped", "away")
PROMPTS = {name: prompt(500 + seed, 1500 + 97 * seed) for seed, name in enumerate(NAMES)}


def tier_options(model: Path, server: Server, blocks_per_chunk: int = 1) -> dict[str, Any]:
    """Options of an engine whose blocks go to main memory and from there to the pool."""
    options = engine_options(model, server.url)
    options["kv_transfer_config"] = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tests.support.cpu_tiering",
            "cpu_bytes_to_use": 128 << 20,
            "block_size": 128 * blocks_per_chunk,
            "secondary_tiers": [
                {
                    "type": "KVPoolTier",
                    "module_path": "kvpool.vllm",
                    "pool": server.url,
                    "model_id": "tiny",
                    "lookup_timeout_s": 5.0,
                }
            ],
        },
    }
    return options


@dataclass
class Pair:
    server: Server
    second: EngineProcess
    reference: dict[str, dict[str, Any]]

    def ask(self, name: str) -> dict[str, Any]:
        return self.second.generate(PROMPTS[name], GENERATED_TOKENS)

    def metrics(self) -> dict[str, float]:
        self.second.generate(prompt(998, 60), 1)  # an idle engine does not report
        return self.second.ask({"do": "metrics"})

    def keys(self, name: str) -> list[bytes]:
        """The records of a prompt's full blocks, in their order."""
        found: list[bytes] = []
        for block_hash in BlockHasher(BLOCK_TOKENS).hashes(PROMPTS[name]):
            found += self.server.client.keys(f"kvpool:*:{block_hash.hex()}:0:0")
        return found

    def flip(self, key: bytes) -> bytes:
        """Change a byte of a record's payload; what it was before."""
        before: bytes = self.server.client.hget(key, "b")
        body = bytearray(before)
        body[len(body) // 2] ^= 0x11
        self.server.client.hset(key, "b", bytes(body))
        return before


@pytest.fixture(scope="module")
def pair(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("tier")
    (folder / "server").mkdir()
    with running(SERVERS[1], folder / "server") as server:
        options = tier_options(llama, server)
        reference = {}
        with started("first", folder, options) as first:
            for name, tokens in PROMPTS.items():
                reference[name] = first.generate(tokens, GENERATED_TOKENS)
            blocks = sum(len(tokens) // 128 for tokens in PROMPTS.values())
            assert eventually(
                lambda: (
                    len(server.client.keys("kvpool:*:0:0")) >= blocks
                    or first.generate(prompt(999, 200), 2) is None
                )
            )
        with started("second", folder, options) as second:
            yield Pair(server, second, reference)


def test_another_engine_loads_what_one_has_stored(pair: Pair) -> None:
    answer = pair.ask("hit")
    assert answer["tokens"] == pair.reference["hit"]["tokens"]
    assert answer["cached_tokens"] == len(PROMPTS["hit"]) // 128 * 128


def test_a_changed_record_is_a_miss_and_the_blocks_before_it_are_loaded(pair: Pair) -> None:
    keys = pair.keys("flipped")
    assert len(keys) == len(PROMPTS["flipped"]) // BLOCK_TOKENS
    whole = pair.flip(keys[4])
    before = pair.metrics()
    answer = pair.ask("flipped")
    assert answer["tokens"] == pair.reference["flipped"]["tokens"]
    assert answer["cached_tokens"] == 4 * BLOCK_TOKENS
    assert eventually(lambda: pair.server.client.hget(keys[4], "b") == whole), "computed and stored again"
    after = pair.metrics()
    counted = {
        metric.name + label: after.get(metric.name + label, 0) - before.get(metric.name + label, 0)
        for metric, label in (
            (metrics.LOADED_BLOCKS, ""),
            (metrics.LOAD_REQUESTS, "/ok"),
            (metrics.LOAD_REQUESTS, "/missing"),
            (metrics.STORED_BLOCKS, ""),
        )
    }
    assert list(counted.values()) == [len(keys) - 1, 0, 1, 1], counted


def test_a_server_that_is_stopped_costs_a_recompute(pair: Pair) -> None:
    pair.server.stop()
    try:
        answer = pair.ask("away")
    finally:
        pair.server.go_on()
    assert answer["tokens"] == pair.reference["away"]["tokens"]
    assert answer["cached_tokens"] == 0
