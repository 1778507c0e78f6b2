"""What every secondary tier of vLLM's ``TieringOffloadingSpec`` must do, one test a promise; subclassed per tier.

Written from the contract of ``vllm/v1/kv_offload/tiering/base.py``. A tier is driven here as the manager of tiers does
it, over a view of plain memory. It runs against vLLM's own file tier, too, so it asks for nothing that is ours alone.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from tests.support.deadlines import eventually

CHUNKS = 32
CHUNK_NBYTES = 64 << 10
END_OF_STEP = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


class Spec(OffloadingSpec):
    """An offloading spec that only describes an engine."""

    def get_manager(self) -> Any:
        raise NotImplementedError

    def get_worker(self, kv_caches: Any) -> Any:
        raise NotImplementedError


def spec(
    *,
    events: bool = True,
    blocks_per_chunk: int = 1,
    tp_size: int = 1,
    model: str = "model",
    kv_dtype: str = "float16",
    chunk_nbytes: int = CHUNK_NBYTES,
    layout: str | None = None,
    agnostic: bool = False,
    **more: bool,
) -> Spec:
    """``chunk_nbytes``: of all ranks together, or of the one copy. ``more``: of ``OffloadingConfig``."""
    copies = 1 if more.get("replicated_layout") else tp_size
    return Spec(
        OffloadingConfig(
            groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("layer.0",), group_id=0),),
            worker_kv_bytes_per_block=chunk_nbytes // blocks_per_chunk // copies,
            enable_kv_cache_events=events,
            extra_config={},
            engine_id="engine",
            model=OffloadingModelConfig(name=model, dtype=kv_dtype),
            cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=blocks_per_chunk),
            parallel=OffloadingParallelConfig(
                rank=0, world_size=tp_size, tp_size=tp_size, pp_size=1, pcp_size=1, dcp_size=1,
                data_parallel_index=0, data_parallel_size=1, data_parallel_rank_local=None,
                is_parallelism_agnostic=agnostic,
            ),
            kv_cache_layout=layout,
            **more,
        )
    )  # fmt: skip


def key(number: int, group: int = 0) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"), group)


PLAIN = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float16)


def create_tier(
    entry: dict[str, Any],
    view: memoryview,
    described: OffloadingSpec,
    layer: KVCacheSpec = PLAIN,
    speculation: object = None,
    engine: VllmConfig | None = None,
) -> SecondaryTierManager:
    """As an engine's connector makes it, which has these locals; all layers of the engine are like ``layer``."""
    kv_cache_config = KVCacheConfig(  # noqa: F841
        num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer.0"], layer)]
    )
    vllm_config = copy.copy(engine or _engine())
    vllm_config.speculative_config = speculation  # type: ignore[assignment]
    return SecondaryTierFactory.create_secondary_tier(entry, view, described)


@functools.cache
def _engine() -> VllmConfig:
    return VllmConfig()


class Driven:
    """A tier, and the memory whose rows it moves."""

    def __init__(self, tier: SecondaryTierManager, rows: np.ndarray) -> None:
        self.tier, self.rows = tier, rows
        self._next_job = itertools.count()
        self.results: dict[int, JobResult] = {}
        self.reported: list[int] = []

    def fill(self, rows: Sequence[int]) -> dict[int, bytes]:
        """Random bytes in these rows; what they are."""
        for row in rows:
            self.rows[row] = np.frombuffer(os.urandom(CHUNK_NBYTES), np.uint8)
        return {row: self.rows[row].tobytes() for row in rows}

    def submit(
        self, keys: Sequence[OffloadKey], rows: Sequence[int], *, load: bool, request: str = "r"
    ) -> int:
        job = TransferJob(
            next(self._next_job), list(keys), np.array(rows, np.int32), load, ReqContext(request)
        )
        if load:
            self.tier.submit_load(job)
        else:
            self.tier.submit_store(job)
        return job.job_id

    def poll(self) -> None:
        self.tier.on_schedule_end(END_OF_STEP)
        for result in self.tier.get_finished_jobs():
            self.reported.append(result.job_id)
            self.results[result.job_id] = result

    def ended(self, job: int, within_s: float = 60.0) -> JobResult:
        def polled() -> bool:
            self.poll()
            return job in self.results

        assert eventually(polled, within_s=within_s), f"job {job} does not end"
        return self.results[job]

    def look_up(self, keys: Sequence[OffloadKey], request: str = "r") -> list[LookupResult]:
        """What the tier says of the keys once it knows."""
        context = ReqContext(request)
        self.tier.on_new_request(context)
        found: list[LookupResult] = []

        def known() -> bool:
            found[:] = [self.tier.lookup(one, context) for one in keys]
            self.poll()
            return LookupResult.RETRY not in found

        assert eventually(known)
        self.tier.on_request_finished(context)
        return found


OpenTier = Callable[[], Driven]
HIT, MISS = LookupResult.HIT, LookupResult.MISS


class SecondaryTierConformance:
    @pytest.fixture
    def rows(self) -> np.ndarray:
        return np.zeros((CHUNKS, CHUNK_NBYTES), np.uint8)

    @pytest.fixture
    def open_tier(self) -> Iterator[OpenTier]:
        """A function that opens one more tier on the same storage, with memory of its own; a subclass adds it."""
        raise NotImplementedError

    @pytest.fixture
    def driven(self, open_tier: OpenTier) -> Driven:
        return open_tier()

    def lose(self, one: OffloadKey) -> None:
        """Take a chunk out of the storage, behind the tier's back; a subclass adds it."""
        raise NotImplementedError

    def test_what_was_stored_is_loaded_byte_by_byte(self, driven: Driven, open_tier: OpenTier) -> None:
        bytes_of = driven.fill(range(8))
        keys = [key(number) for number in range(8)]
        assert driven.ended(driven.submit(keys, range(8), load=False)).success
        other = open_tier()
        assert other.look_up(keys) == [HIT] * 8
        places = [20, 3, 31, 0, 7, 8, 12, 5]
        assert other.ended(other.submit(keys, places, load=True)).success
        assert [other.rows[place].tobytes() for place in places] == [bytes_of[row] for row in range(8)]
        untouched = sorted(set(range(CHUNKS)) - set(places))
        assert not other.rows[untouched].any(), "a row of nobody's was written"

    def test_groups_are_told_apart(self, driven: Driven) -> None:
        driven.fill([0])
        assert driven.ended(driven.submit([key(1, group=0)], [0], load=False)).success
        assert driven.look_up([key(1, group=0), key(1, group=1)]) == [HIT, MISS]

    def test_what_is_not_there_is_a_miss(self, driven: Driven) -> None:
        assert driven.look_up([key(900), key(901)]) == [MISS, MISS]

    def test_a_lookup_never_blocks_and_is_answered_by_a_later_step(self, driven: Driven) -> None:
        context = ReqContext("r")
        driven.tier.on_new_request(context)
        assert driven.tier.lookup(key(900), context) in (LookupResult.RETRY, MISS)
        driven.tier.on_request_finished(context)

    def test_a_chunk_that_is_lost_fails_its_load_and_is_not_offered_again(self, driven: Driven) -> None:
        bytes_of = driven.fill(range(4))
        keys = [key(number) for number in range(4)]
        assert driven.ended(driven.submit(keys, range(4), load=False)).success
        context = ReqContext("r")
        driven.tier.on_new_request(context)

        def known() -> bool:
            found = [driven.tier.lookup(one, context) for one in keys]
            driven.poll()
            return found == [HIT] * 4

        assert eventually(known)
        self.lose(keys[2])
        result = driven.ended(driven.submit(keys, range(10, 14), load=True))
        assert not result.success
        kept = list(result.successful_keys or ())
        assert keys[2] not in kept
        assert set(kept) <= set(keys)
        for one in kept:
            place = keys.index(one)
            assert driven.rows[10 + place].tobytes() == bytes_of[place]
        assert driven.tier.lookup(keys[2], context) is MISS, "it would be loaded again and again"
        driven.tier.on_request_finished(context)

    def test_a_job_of_no_chunk_is_reported(self, driven: Driven) -> None:
        assert driven.ended(driven.submit([], [], load=False)).success
        assert driven.ended(driven.submit([], [], load=True)).success

    def test_jobs_are_independent_and_each_is_reported_once(self, driven: Driven) -> None:
        bytes_of = driven.fill(range(6))
        stores = [driven.submit([key(number)], [number], load=False) for number in range(6)]
        assert all(driven.ended(job).success for job in stores)
        loads = [driven.submit([key(number)], [20 + number], load=True) for number in range(6)]
        lost = driven.submit([key(999)], [30], load=True)
        assert all(driven.ended(job).success for job in loads)
        assert not driven.ended(lost).success
        assert [driven.rows[20 + number].tobytes() for number in range(6)] == list(bytes_of.values())
        driven.poll()
        assert sorted(driven.reported) == sorted([*stores, *loads, lost])

    def test_after_a_drain_nothing_touches_the_memory(self, driven: Driven) -> None:
        driven.fill(range(16))
        keys = [key(number) for number in range(16)]
        assert driven.ended(driven.submit(keys, range(16), load=False)).success
        jobs = [driven.submit([one], [16 + number], load=True) for number, one in enumerate(keys)]
        driven.tier.drain_jobs()
        driven.rows[16:] = 0xAA  # the engine's again
        driven.poll()
        assert set(jobs) <= set(driven.results), "a drained tier has all results at hand"
        assert (driven.rows[16:] == 0xAA).all()
        driven.tier.drain_jobs()

    def test_it_serves_on_after_a_drain(self, driven: Driven) -> None:
        driven.tier.drain_jobs()
        driven.fill([0])
        assert driven.ended(driven.submit([key(5)], [0], load=False)).success
        assert driven.look_up([key(5)]) == [HIT]

    def test_shutdown_with_jobs_under_way_lets_go_of_the_memory(self, open_tier: OpenTier) -> None:
        driven = open_tier()
        driven.fill(range(16))
        for number in range(16):
            driven.submit([key(number)], [number], load=False)
        driven.tier.shutdown()
        driven.rows[:] = 0x55
        assert (driven.rows == 0x55).all()

    def test_requests_that_end_leave_nothing(self, driven: Driven) -> None:
        for number in range(50):
            assert driven.look_up([key(800 + number)], request=f"r{number}") == [MISS]
        context = ReqContext("abandoned")
        driven.tier.on_new_request(context)
        driven.tier.lookup(key(700), context)
        driven.tier.on_request_finished(context)  # before anything was answered
        driven.poll()
        assert driven.look_up([key(700)]) == [MISS]
