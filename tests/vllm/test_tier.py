"""``KVPoolTier``: the kit of secondary tiers, which vLLM's own file tier passes too, and what is ours alone."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, get_offload_block_hash
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvpool import open_store
from kvpool.errors import EngineRefused, KVPoolError
from kvpool.stores.facts import announced_namespaces
from kvpool.vllm import KVPoolTier
from tests.conftest import eventually
from tests.stores.servers import SERVERS, Server, running
from tests.vllm.secondary_tier import (
    CHUNK_NBYTES,
    CHUNKS,
    HIT,
    MISS,
    Driven,
    OpenTier,
    SecondaryTierConformance,
    Spec,
    key,
    spec,
)

MARGIN_S = 2.0


def made(config: dict[str, Any], described: Spec | None = None, nbytes: int = CHUNK_NBYTES) -> Driven:
    """A tier as ``TieringOffloadingSpec`` makes it, from its entry in ``secondary_tiers``."""
    # On pages of its own, as the region that engines share: vLLM's file tier writes past the page cache.
    rows = np.frombuffer(mmap.mmap(-1, CHUNKS * nbytes), np.uint8).reshape(CHUNKS, nbytes)
    tier: SecondaryTierManager = SecondaryTierFactory.create_secondary_tier(
        config, memoryview(rows), described or spec()
    )
    return Driven(tier, rows)


def entry(pool: str, **more: Any) -> dict[str, Any]:
    return {"type": "KVPoolTier", "module_path": "kvpool.vllm", "pool": pool, "model_id": "tiny", **more}


@pytest.fixture
def opened() -> Iterator[Callable[[Driven], Driven]]:
    with ExitStack() as stack:

        def keep(driven: Driven) -> Driven:
            def end() -> None:
                with suppress(KVPoolError, RuntimeError):
                    driven.tier.shutdown()

            stack.callback(end)
            return driven

        yield keep


@pytest.fixture(params=SERVERS, scope="module")
def server_of_module(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with running(request.param, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def server(server_of_module: Server) -> Server:
    server_of_module.client.flushall()
    return server_of_module


class TestTierOnServer(SecondaryTierConformance):
    @pytest.fixture
    def open_tier(self, server: Server, opened: Callable[[Driven], Driven]) -> OpenTier:
        self._server = server
        return lambda: opened(made(entry(server.url)))

    def lose(self, one: OffloadKey) -> None:
        (name,) = self._server.client.keys(f"kvpool:default:*:{get_offload_block_hash(one).hex()}:0:0")
        assert self._server.client.delete(name) == 1


class TestTierOnFiles(SecondaryTierConformance):
    @pytest.fixture
    def open_tier(self, tmp_path: Path, opened: Callable[[Driven], Driven]) -> OpenTier:
        self._folder = tmp_path / "pool"
        return lambda: opened(made(entry(f"file://{self._folder}")))

    def lose(self, one: OffloadKey) -> None:
        (record,) = (self._folder / "blocks").glob(f"*/*/*/{get_offload_block_hash(one).hex()}.0.0")
        record.unlink()


class TestFileTierOfVllm(SecondaryTierConformance):
    @pytest.fixture
    def open_tier(self, tmp_path: Path, opened: Callable[[Driven], Driven]) -> OpenTier:
        self._folder = tmp_path / "fs"
        return lambda: opened(made({"type": "fs", "root_dir": str(self._folder)}))

    def lose(self, one: OffloadKey) -> None:
        (record,) = self._folder.rglob(f"{get_offload_block_hash(one).hex()}.bin")
        record.unlink()


def test_a_byte_that_was_changed_is_a_miss(server: Server, opened: Callable[[Driven], Driven]) -> None:
    driven = opened(made(entry(server.url)))
    driven.fill([0])
    assert driven.ended(driven.submit([key(1)], [0], load=False)).success
    (name,) = list(server.client.keys("kvpool:default:*:0:0"))
    body = bytearray(server.client.hget(name, "b"))
    body[1000] ^= 1
    server.client.hset(name, "b", bytes(body))
    result = driven.ended(driven.submit([key(1)], [1], load=True))
    assert not result.success
    assert not result.successful_keys
    assert not server.client.exists(name)


def test_what_is_there_is_not_sent_again(server: Server, opened: Callable[[Driven], Driven]) -> None:
    driven = opened(made(entry(server.url)))
    driven.fill(range(4))
    assert driven.ended(driven.submit([key(1), key(2)], [0, 1], load=False)).success
    assert driven.ended(driven.submit([key(1), key(2), key(3)], [0, 1, 2], load=False)).success
    stats = driven.tier.get_stats()
    assert stats is not None
    counted = stats.reduce()
    assert counted["kvpool_stored_blocks_total"] == 3
    assert counted["kvpool_store_skipped_blocks_total:('already_there',)"] == 2
    assert set(stats.data["data"]) <= set(KVPoolTier.build_metric_definitions({}))


@pytest.mark.parametrize("harm", ["killed", "stopped"])
def test_a_server_that_is_away_costs_the_budget_and_no_more(
    harm: str, tmp_path: Path, opened: Callable[[Driven], Driven]
) -> None:
    with running(SERVERS[1], tmp_path) as server:
        driven = opened(made(entry(server.url, budget_s=0.5)))
        driven.fill(range(8))
        keys = [key(number) for number in range(8)]
        assert driven.ended(driven.submit(keys, range(8), load=False)).success
        if harm == "killed":
            server.kill()
        else:
            server.stop()
        load = driven.submit(keys, range(8, 16), load=True)
        result = driven.ended(load, within_s=0.5 + MARGIN_S)
        assert not result.success
        assert not result.successful_keys
        context = ReqContext("r")
        driven.tier.on_new_request(context)

        def missed() -> bool:
            driven.poll()
            return driven.tier.lookup(key(1), context) is MISS

        assert eventually(missed, within_s=0.5 + MARGIN_S)
        driven.tier.on_request_finished(context)
        driven.tier.drain_jobs()
        if harm == "killed":
            server.start()
        else:
            server.go_on()
        attempts = count()

        def serves() -> bool:
            """A server that was killed comes back empty, and takes what is stored from then on."""
            if harm == "killed" and not driven.ended(driven.submit([key(1)], [0], load=False)).success:
                return False
            return driven.look_up(keys, f"later{next(attempts)}") == there

        there = [HIT] * 8 if harm == "stopped" else [MISS, HIT, *[MISS] * 6]
        assert eventually(serves)
        if harm == "stopped":
            assert driven.ended(driven.submit(keys, range(8, 16), load=True)).success
            assert (driven.rows[8:16] == driven.rows[:8]).all()


def test_events_say_what_is_in_the_pool(server: Server, opened: Callable[[Driven], Driven]) -> None:
    driven = opened(made(entry(server.url)))
    driven.fill(range(2))
    driven.ended(driven.submit([key(1), key(2)], [0, 1], load=False))
    (stored,) = driven.tier.take_events()
    assert (stored.keys, stored.removed, stored.medium.value) == ([key(1), key(2)], False, "STORAGE")
    server.client.flushall()
    driven.ended(driven.submit([key(2)], [0], load=True))
    (removed,) = driven.tier.take_events()
    assert (removed.keys, removed.removed) == ([key(2)], True)
    silent = opened(made(entry(server.url), spec(events=False)))
    silent.ended(silent.submit([key(3)], [0], load=False))
    assert list(silent.tier.take_events()) == []


@pytest.mark.parametrize(
    ("described", "model_id"),
    [
        (spec(tp_size=2), "tiny"),
        (spec(blocks_per_chunk=2), "tiny"),
        (spec(kv_dtype="fp8"), "tiny"),
        (spec(), "other"),
    ],
    ids=["tensor parallel", "blocks per chunk", "kv type", "model"],
)
def test_engines_that_differ_share_nothing(
    described: Spec, model_id: str, server: Server, opened: Callable[[Driven], Driven]
) -> None:
    driven = opened(made(entry(server.url)))
    driven.fill([0])
    assert driven.ended(driven.submit([key(1)], [0], load=False)).success
    other = opened(made(entry(server.url, model_id=model_id), described))
    assert other.look_up([key(1)]) == [MISS]
    with open_store(server.url) as store:
        assert sum(map(len, announced_namespaces(store, "default").values())) == 2


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"pool": "memory://"}, "memory:// pool is this process's own"),
        ({"pool": "valkey://127.0.0.1:1"}, "kvpool refuses to start: .*127.0.0.1:1"),
        ({"poll": "x"}, 'unknown setting "poll"; did you mean "pool"'),
        ({"model_id": None}, "model_id"),
        ({"budget_s": 0}, "budget_s"),
    ],
)
def test_it_refuses_to_start_in_one_line(more: dict[str, Any], words: str, server: Server) -> None:
    with pytest.raises(EngineRefused, match=words) as caught:
        made(entry(server.url) | more)
    assert "\n" not in str(caught.value)


def test_a_missing_name_of_the_model_is_asked_for(server: Server) -> None:
    config = entry(server.url)
    del config["model_id"]
    with pytest.raises(EngineRefused, match=r'"model_id" is missing: .*secondary_tiers.*attention backend'):
        made(config)


def test_a_fault_of_ours_switches_it_off(
    server: Server, opened: Callable[[Driven], Driven], monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = opened(made(entry(server.url)))
    driven.fill([0])
    assert driven.ended(driven.submit([key(1)], [0], load=False)).success
    assert isinstance(driven.tier, KVPoolTier)
    monkeypatch.setattr(driven.tier, "_collect", lambda: 1 / 0)
    assert driven.tier.lookup(key(1), ReqContext("r")) is LookupResult.MISS
    assert not driven.ended(driven.submit([key(1)], [1], load=True)).success
