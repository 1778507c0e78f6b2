"""``KVPoolTier`` on real engines: what one engine's tier stored, another one's loads, with the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvpool.cli.engine_process import EngineProcess
from tests.conftest import eventually
from tests.e2e.harness import GENERATED_TOKENS, ask, engine_options, prompt, started
from tests.stores.servers import SERVERS, Server, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

NAMES = ("hit", "flipped", "deleted", "away", "salted")
PROMPTS = {name: prompt(500 + seed, 1500 + 97 * seed) for seed, name in enumerate(NAMES)}
ROOT = Path(__file__).parents[2]


def tier_options(model: Path, server: Server, blocks_per_chunk: int = 1) -> dict[str, Any]:
    """Options of an engine whose blocks go to main memory and from there to the pool."""
    options = engine_options(model, server.url)
    options["kv_transfer_config"] = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tests.e2e.cpu_tiering",
            "cpu_bytes_to_use": 128 << 20,
            "block_size": 128 * blocks_per_chunk,
            "secondary_tiers": [
                {"type": "KVPoolTier", "module_path": "kvpool.vllm", "pool": server.url, "model_id": "tiny"}
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


@pytest.fixture(scope="module")
def pair(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("tier")
    (folder / "server").mkdir()
    with running(SERVERS[1], folder / "server") as server:
        options = tier_options(llama, server)
        reference = {}
        with started("first", folder, options, PYTHONPATH=str(ROOT)) as first:
            for name, tokens in PROMPTS.items():
                reference[name] = ask(first, tokens, "mine" if name == "salted" else None)
            blocks = sum(len(tokens) // 128 for tokens in PROMPTS.values())
            assert eventually(
                lambda: (
                    len(server.client.keys("kvpool:*:0:0")) >= blocks
                    or first.generate(prompt(999, 200), 2) is None
                ),
                within_s=30,
            )
        with started("second", folder, options, PYTHONPATH=str(ROOT)) as second:
            yield Pair(server, second, reference)


def test_another_engine_loads_what_one_has_stored(pair: Pair) -> None:
    answer = pair.ask("hit")
    assert answer["tokens"] == pair.reference["hit"]["tokens"]
    assert answer["cached_tokens"] == len(PROMPTS["hit"]) // 128 * 128


def test_a_salt_keeps_prompts_apart(pair: Pair) -> None:
    tokens = PROMPTS["salted"]
    assert ask(pair.second, tokens)["cached_tokens"] == 0
    assert ask(pair.second, tokens, "of another")["cached_tokens"] == 0
    answer = ask(pair.second, tokens, "mine")
    assert answer["cached_tokens"] == len(tokens) // 128 * 128
    assert answer["tokens"] == pair.reference["salted"]["tokens"]


def test_changed_bytes_are_recomputed(pair: Pair) -> None:
    client = pair.server.client
    for name in client.keys("kvpool:*:0:0"):
        body = bytearray(client.hget(name, "b"))
        body[len(body) // 2] ^= 0x11
        client.hset(name, "b", bytes(body))
    answer = pair.ask("flipped")
    assert answer["tokens"] == pair.reference["flipped"]["tokens"]
    assert answer["cached_tokens"] < 128 * (len(PROMPTS["flipped"]) // 128)


def test_deleted_blocks_are_recomputed(pair: Pair) -> None:
    pair.server.client.flushall()
    answer = pair.ask("deleted")
    assert answer["tokens"] == pair.reference["deleted"]["tokens"]
    assert answer["cached_tokens"] == 0


def test_a_server_that_is_stopped_costs_a_recompute(pair: Pair) -> None:
    pair.server.stop()
    try:
        answer = pair.ask("away")
    finally:
        pair.server.go_on()
    assert answer["tokens"] == pair.reference["away"]["tokens"]
