"""What many prompts share stays in a small pool, and comes back to one that was emptied; two pools fill each other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import EngineProcess, connector_config, small_engine
from kvpool import BlockHasher
from tests.support.deadlines import eventually
from tests.support.engines import PATIENT, engine_options, passing, prompt, records
from tests.support.servers import Server, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

BLOCK_TOKENS = 32  # of 128 KiB
POOL = "16mb"  # 122 blocks
PREFIX_BLOCKS = 28
PREFIX = prompt(300, PREFIX_BLOCKS * BLOCK_TOKENS)
PROMPTS = 100  # each with four blocks of its own
# A server counts the age of its keys in whole seconds, and to it all keys of one second are equally old. So the pool
# must not turn over within a second or two, as it did on a fast machine: it does in 23 prompts.
S_A_PROMPT = 0.15


def asks(engine: EngineProcess, tokens: list[int]) -> int:
    """Have an engine answer a prompt; how many of its tokens came from a pool."""
    answer: dict[str, Any] = engine.generate(tokens, 2)
    return int(answer["pool_tokens"])


def held(server: Server, tokens: list[int]) -> int:
    """How many of a prompt's blocks a server has."""
    keys = set(server.client.keys("kvpool:*"))
    hashes = BlockHasher(BLOCK_TOKENS).hashes(tokens)
    return sum(any(block_hash.hex().encode() in key for key in keys) for block_hash in hashes)


@dataclass
class Pools:
    far: Server
    near: Path
    first: EngineProcess
    second: EngineProcess
    came_back: int  # blocks of a prompt that the first engine had, after the far pool was emptied
    held_blocks: int  # of the prefix, in the far pool after many other prompts
    prefix_tokens: int  # that the second engine got from it then


@pytest.fixture(scope="module")
def pools(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    folder = tmp_path_factory.mktemp("hot")
    near = folder / "near"
    shape = small_engine(llama, block_tokens=BLOCK_TOKENS, longest_tokens=2048, kv_cache_nbytes=96 << 20)
    lru = ("--maxmemory", POOL, "--maxmemory-policy", "allkeys-lru")
    with running("valkey-server", folder, *lru) as far:
        options = engine_options(llama, far.url) | shape
        both = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "connectors": [connector_config(url, PATIENT) for url in (f"file://{near}", far.url)]
            },
        }
        with passing("first", folder, options) as first:
            whole = PREFIX + prompt(301, 3 * BLOCK_TOKENS + 8)
            asks(first, whole)
            assert eventually(lambda: held(far, whole) == 31)
            far.client.execute_command("FLUSHALL", "SYNC")  # not while new records come
            assert asks(first, whole) == 0, "the engine has it"
            eventually(lambda: held(far, whole) == 31)
            came_back = held(far, whole)
            began_s = time.monotonic()
            for seed in range(PROMPTS):
                asks(first, PREFIX + prompt(400 + seed, 4 * BLOCK_TOKENS + 8))
                time.sleep(max(0.0, began_s + (seed + 1) * S_A_PROMPT - time.monotonic()))
            with passing("second", folder, options | {"kv_transfer_config": both}) as second:
                # What the last prompts made the server evict is stored again with the next.
                for seed in range(3):
                    if eventually(lambda: held(far, PREFIX) == PREFIX_BLOCKS):
                        break
                    asks(first, PREFIX + prompt(600 + seed, 8))
                held_blocks = held(far, PREFIX)
                prefix_tokens = asks(second, [*PREFIX, 7, 8, 9])
                yield Pools(far, near, first, second, came_back, held_blocks, prefix_tokens)


def test_a_pool_that_was_emptied_gets_what_the_engine_has_when_it_is_asked_for(pools: Pools) -> None:
    assert pools.came_back == 31


def test_a_prefix_of_many_prompts_stays_in_a_small_pool(pools: Pools) -> None:
    assert pools.held_blocks == PREFIX_BLOCKS
    assert pools.prefix_tokens == PREFIX_BLOCKS * BLOCK_TOKENS


def test_what_came_from_the_far_pool_gets_into_the_near_one_and_the_other_way_round(pools: Pools) -> None:
    assert eventually(lambda: len(records(pools.near, PREFIX, BLOCK_TOKENS)) == PREFIX_BLOCKS)
    pools.far.client.execute_command("FLUSHALL", "SYNC")  # not while new records come
    assert asks(pools.second, [*PREFIX, 10, 11, 12]) == 0, "the engine has it"
    assert eventually(lambda: held(pools.far, PREFIX) == PREFIX_BLOCKS)
