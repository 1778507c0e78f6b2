"""Engines of two hosts with a near pool each and one far pool: who loads from where, and what a dead far pool costs."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import EngineProcess, free_ports
from kvpool import open_store
from tests.support.deadlines import eventually
from tests.support.engines import (
    BLOCK_TOKENS,
    GENERATED_TOKENS,
    WITHIN_S,
    Index,
    call,
    corrupt,
    engine_options,
    passing,
    prompt,
    publishing,
    records,
)
from tests.support.file_user import record_files
from tests.support.records import records_on
from tests.support.servers import Server, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

PROMPT, OTHER = prompt(90, 1500), prompt(91, 1500)
WHOLE = (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
BLOCKS = len(PROMPT) // BLOCK_TOKENS
DECODED_TOKENS = 600  # of the request that is computed meanwhile, on a busy machine, too


def test_a_near_pool_serves_its_host_and_the_far_one_the_fleet(llama: Path, tmp_path: Path) -> None:
    with running("valkey-server", tmp_path) as server:

        def options(host: str, **more: Any) -> dict[str, Any]:
            # A silent far pool is asked for the whole budget by what near has not.
            near = f"file://{tmp_path}/{host}?capacity=256MiB"
            # On a busy machine a short lease may end between two renewals.
            settings = {"lookup_timeout_s": 2.0, "advertise_host": "127.0.0.1", "lease_s": 600.0}
            return engine_options(llama, near, settings={**settings, "pool": [near, server.url]}, **more)

        def generate(engine: EngineProcess, tokens: list[int]) -> dict[str, Any]:
            return engine.generate(tokens, GENERATED_TOKENS)

        with passing("first", tmp_path, options("host-1")) as first:
            cold = generate(first, PROMPT)
            assert first.wait_quiet()
            assert eventually(lambda: all_is_far(server, tmp_path / "host-1")), (
                "behind the puts it all goes far"
            )
            other = generate(first, OTHER)
        assert (cold["pool_tokens"], other["pool_tokens"]) == (0, 0)

        with passing("second", tmp_path, options("host-1")) as second:
            server.stop()
            assert eventually(lambda: loads(second, PROMPT, cold)), (
                "near has it all, and far is asked nothing"
            )
        server.go_on()

        ports = free_ports(2)
        with (
            open_store(server.url) as store,
            closing(Index(store)) as index,
            passing("third", tmp_path, options("host-2", kv_events_config=publishing(ports))) as third,
        ):
            assert eventually(lambda: loads(third, PROMPT, cold)), "another host loads from far"
            assert eventually(lambda: len(records(tmp_path / "host-2", PROMPT)) >= BLOCKS), (
                "and has it near then"
            )

            name = f"127.0.0.1:{ports[0]}"
            assert eventually(lambda: index.knows(name), within_s=WITHIN_S)

            def credited() -> tuple[int, int]:
                generate(third, prompt(93, BLOCK_TOKENS // 2))  # an engine tells in its steps
                row = index.row(str(llama), PROMPT, name)
                return row.device_blocks, row.local_blocks

            call(third, "reset_prefix_cache")
            assert eventually(lambda: credited() == (0, BLOCKS), within_s=WITHIN_S), credited()
            server.kill()
            assert eventually(lambda: loads(third, PROMPT, cold))
            # What is loaded near is used, and verified.
            for record in records(tmp_path / "host-2", PROMPT):
                corrupt(record, keep_checksum=False)
            call(third, "reset_prefix_cache")
            assert generate(third, PROMPT)["tokens"] != cold["tokens"]
            for record in records(tmp_path / "host-2", PROMPT):
                corrupt(record, keep_checksum=True)
            call(third, "reset_prefix_cache")
            assert generate(third, PROMPT)["tokens"] == cold["tokens"], (
                "damaged near, and far is dead: computed"
            )


@pytest.mark.rare  # tests/vllm/load/test_prefetch.py has the scheduler's half and real stores
def test_what_waits_in_the_engines_queue_comes_near(llama: Path, tmp_path: Path) -> None:
    """An engine that computes one request at a time brings the blocks of the next one near meanwhile."""
    with running("valkey-server", tmp_path) as server:

        def options(host: str) -> dict[str, Any]:
            near = f"file://{tmp_path}/{host}?capacity=256MiB"
            settings = {"lookup_timeout_s": 5.0, "pool": [near, server.url]}
            return engine_options(llama, near, settings=settings, max_num_seqs=1)

        with passing("first", tmp_path, options("host-1")) as first:
            cold = first.generate(PROMPT, GENERATED_TOKENS)
            assert first.wait_quiet()
            assert eventually(lambda: all_is_far(server, tmp_path / "host-1"))
        with passing("second", tmp_path, options("host-2")) as second:
            answer = second.ask({"do": "burst", "prompts": [OTHER, PROMPT], "max_tokens": DECODED_TOKENS})
            assert answer["answers"][1][:GENERATED_TOKENS] == cold["tokens"]
            found = second.ask({"do": "metrics"})
        assert found["kvpool_filled_records_total/prefetched"] == WHOLE // BLOCK_TOKENS
        assert found["kvpool_near_far_hits_total/near"] == WHOLE // BLOCK_TOKENS
        assert found.get("kvpool_filled_records_total/filled", 0) == 0, "its load asked far nothing"
        assert found["kvpool_prefetched_bytes_total/used"] > 0


def all_is_far(server: Server, near: Path) -> bool:
    there = len(record_files(near))
    return there >= BLOCKS and records_on(server.client) >= there


def loads(engine: EngineProcess, tokens: list[int], cold: dict[str, Any]) -> bool:
    """Whether the prompt comes from the pool; a busy machine may take longer than the budget, and is asked again."""
    call(engine, "reset_prefix_cache")
    answer = engine.generate(tokens, GENERATED_TOKENS)
    assert answer["tokens"] == cold["tokens"]
    return bool(answer["pool_tokens"] == WHOLE)
