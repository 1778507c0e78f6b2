"""``benchmarks.measure``: layouts against vLLM's own, bytes, what a figure is made of, and counting calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.measure import (
    BLOCK_TOKENS,
    CACHES,
    Arena,
    Cache,
    copies,
    engine,
    measure_calls,
    measure_copies,
    measure_engine,
)
from benchmarks.measure.calls import ALLOCATING, SYNCHRONIZING, count_calls, of_kind
from kvpool.cli.model import kv_cache_of
from kvpool.transfer import BlockCopier
from tests.support.model_configs import CONFIGS

SMALL = Cache("small", "LBNHC", (3,), 2, 32)
HYBRID = Cache("hybrid", "LBHNC", (3, 2, 2), 2, 32)


class PlayedArena(Arena):
    """The CPU under an accelerator's name, so that what is only measured on one is computed here."""

    def __init__(self) -> None:
        super().__init__()
        self.accelerator = "played"

    @property
    def name(self) -> str:
        return "a played device"

    def take(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def wait(self) -> None: ...

    def wait_for_engine(self) -> None: ...


@pytest.fixture
def arena() -> Arena:
    return Arena()


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Arena:
    monkeypatch.setattr(engine, "SHAPE", engine.HOST_SHAPE)
    monkeypatch.setattr(engine, "PRODUCTS", engine.HOST_PRODUCTS)
    return PlayedArena()


@pytest.mark.vllm
@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: f"{cache.model}-{cache.layout}")
def test_caches_are_laid_out_as_vllm_does_it(cache: Cache) -> None:
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheTensor,
        MLAAttentionSpec,
        compute_layout_strides,
        create_kv_cache_views,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout

    for tokens in BLOCK_TOKENS:
        size = cache.content if cache.heads == 1 else cache.content // 2
        spec = (MLAAttentionSpec if cache.heads == 1 else FullAttentionSpec)(
            block_size=tokens, num_kv_heads=cache.heads, head_size=size, dtype=torch.bfloat16
        )
        layout, blocks, most = KVCacheLayout[cache.layout], 5, max(cache.layers)
        assert cache.block_nbytes(tokens) == most * spec.page_size_bytes
        raw = torch.empty(blocks * cache.block_nbytes(tokens) + 6, dtype=torch.uint8)  # some bytes are left
        fixed = cache.block_nbytes(tokens) if layout.is_block_outermost else None
        for layers, ours in zip(cache.layers, cache.views(raw, tokens), strict=True):
            layer_stride, block_stride, *_ = compute_layout_strides(
                spec, blocks, layers, layout, fixed_strides=(None, fixed, None, None, None)
            )
            names = [str(layer) for layer in range(layers)]
            place = KVCacheTensor(raw.numel(), names, layer_stride, block_stride)
            theirs = create_kv_cache_views(raw.view(torch.int8), spec, blocks, layout, place)
            assert [(view.shape, view.stride(), view.data_ptr()) for view in ours] == [
                (view.shape, view.stride(), view.data_ptr()) for view in theirs
            ]


def test_the_caches_are_of_the_models_that_are_named() -> None:
    named = {
        "Llama-3-8B": "meta-llama/Llama-3.1-8B-Instruct",
        "Qwen3-32B": "Qwen/Qwen3-32B",
        "DeepSeek-V3": "deepseek-ai/DeepSeek-V3.1",
        "Gemma-3-27B": "google/gemma-3-27b-it",
        "gpt-oss-120b": "openai/gpt-oss-120b",
    }
    for cache in CACHES:
        token_nbytes = sum(cache.layers) * cache.heads * cache.content * 2
        assert kv_cache_of(CONFIGS[named[cache.model]]).token_nbytes[0] == token_nbytes
    assert {cache.model for cache in CACHES if len(cache.layers) > 1} == {"Gemma-3-27B", "gpt-oss-120b"}
    assert sum(next(cache for cache in CACHES if cache.model == "Gemma-3-27B").layers) == 62


@pytest.mark.parametrize("cache", [SMALL, HYBRID])
@pytest.mark.parametrize("blocks", [1, 9])
def test_copies_are_measured_with_equal_bytes_and_have_no_target_on_the_cpu(
    arena: Arena, cache: Cache, blocks: int
) -> None:
    advanced = []
    row = measure_copies(arena, cache, 16, blocks=blocks, rounds=2, advance=lambda: advanced.append(1))
    assert len(advanced) == 6
    assert row.bytes_equal is True
    assert row.blocks == max(blocks, len(cache.layers))
    assert row.block_nbytes == min(cache.layers) * 2 * 16 * 32 * 2
    assert row.target is None
    for speed in (row.store, row.load, row.both):
        assert min(speed.gb_per_s, speed.plain_gb_per_s, speed.over_plain) > 0


def test_figures_are_bytes_over_medians_and_the_target_is_met_by_all_three(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock that says what each copy took: of the round's plain copy and ours, in milliseconds."""
    plain_ms, ours_ms = [4.0, 9.0, 4.0], [5.0, 9.0, 4.0]

    def row(load_factor: float, limit: int) -> copies.CopiesMeasured:
        def script() -> Iterator[float]:
            yield 0.0  # random bytes for the plain copies
            for factor in (1.0, load_factor, 1.0):
                yield 0.0  # a warm-up
                for plain, ours in zip(plain_ms, ours_ms, strict=True):
                    yield from (plain / 1e3, factor * ours / 1e3)

        clock = script()
        arena = PlayedArena()
        monkeypatch.setattr(arena, "timed", lambda work: (work(), next(clock))[1])
        monkeypatch.setattr(copies, "TARGET_FROM_NBYTES", limit)
        return measure_copies(arena, SMALL, 16, blocks=4, rounds=3, advance=lambda: None)

    good = row(1.0, limit=6144)
    assert good.block_nbytes == 6144
    assert good.store.over_plain == 1.0, "the median of 0.8, 1 and 1"
    assert good.store.gb_per_s == pytest.approx(4 * 6144 / 5e-3 / 1e9)
    assert good.store.plain_gb_per_s == pytest.approx(4 * 6144 / 4e-3 / 1e9)
    assert good.both.gb_per_s == pytest.approx(2 * good.store.gb_per_s), "as long, for twice the bytes"
    assert good.target == "met"
    assert row(1.05, limit=6144).target == "met"
    assert row(1.2, limit=6144).target == "missed"
    assert row(1.2, limit=6145).target is None, "a block is smaller than what the target is for"


@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_wrong_bytes_are_seen(arena: Arena, monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    right = getattr(BlockCopier, direction)

    def wrong(self: BlockCopier, block_ids: list[int], *others: Any) -> None:
        right(self, [*block_ids[1:], block_ids[0]], *others)

    batch = copies.Copies(arena, HYBRID, 16, 9)
    assert batch.bytes_equal(batch.both)
    monkeypatch.setattr(BlockCopier, direction, wrong)
    assert not batch.bytes_equal(batch.both)
    monkeypatch.undo()
    assert batch.bytes_equal(batch.both)
    assert not batch.bytes_equal(batch.store), "nothing was loaded"


def test_what_an_engine_pays_is_not_measured_on_the_cpu(arena: Arena) -> None:
    measured = measure_engine(arena, blocks=None, rounds=1, advance=lambda: None)
    assert (measured.step_tokens, measured.step_nbytes, measured.bytes_equal) == (32, 4 << 20, True)
    assert {
        measured.step_ms, measured.store_slower, measured.store_call_ms, measured.load_slower,
        measured.load_call_ms, measured.graph_slower, measured.target,
    } == {None}  # fmt: skip


@pytest.mark.parametrize(("store_s", "target"), [(2.01, "met"), (2.03, "missed")])
def test_what_an_engine_pays_is_told_against_the_same_round(
    played: Arena, monkeypatch: pytest.MonkeyPatch, store_s: float, target: str
) -> None:
    def steps(self: Any, beside: Any) -> engine._Taken:
        if beside is None:
            return engine._Taken(2.0, 0.0)
        beside()
        return engine._Taken(*((store_s, 0.006) if beside.__name__ == "store" else (2.2, 0.008)))

    monkeypatch.setattr(engine._Engine, "steps", steps)
    measured = measure_engine(played, blocks=3, rounds=2, advance=lambda: None)
    assert (measured.step_tokens, measured.step_nbytes) == (48, 6 << 20)
    assert measured.step_ms == 1e3
    assert measured.store_slower == pytest.approx(store_s / 2 - 1)
    assert measured.load_slower == pytest.approx(0.1)
    assert (measured.store_call_ms, measured.load_call_ms) == (pytest.approx(3), pytest.approx(4))
    assert measured.graph_slower is None, "the played device has no CUDA"
    assert measured.target == target


def test_steps_and_replays_take_time_and_move_blocks(played: Arena) -> None:
    batch = copies.Copies(played, SMALL, 16, 4)
    worker = engine._Engine(played, 32)
    assert worker.steps(None).call_seconds == 0
    taken: list[engine._Taken] = []
    assert batch.bytes_equal(lambda: taken.append(worker.steps(batch.both)))
    assert 0 < taken[0].call_seconds < taken[0].seconds
    assert batch.bytes_equal(lambda: worker.replayed(worker.graph(), 2, batch.load) and None)


def event(category: str, name: str, ts: float, dur: float = 1.0, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "tid": tid}


def test_calls_are_counted_within_ours_only() -> None:
    events = [
        {"ph": "M", "name": "process_name", "tid": 1},
        event("user_annotation", "kvpool: stage", 10, 10),
        event("gpu_user_annotation", "kvpool: stage", 100, 50),  # when the device came to it
        event("user_annotation", "step", 30, 20),
        event("user_annotation", "kvpool: poll", 60, 10),
        event("cuda_runtime", "cudaDeviceSynchronize", 5),  # before
        event("cuda_runtime", "cudaLaunchKernel", 11),
        event("cuda_runtime", "cudaStreamSynchronize_v3020", 12),
        event("cuda_runtime", "cudaLaunchKernel", 13, tid=2),  # another thread
        event("cuda_runtime", "cudaMemcpyAsync", 14),
        event("cpu_op", "aten::index_select", 11, 5),
        event("cuda_runtime", "cudaEventSynchronize", 35),  # the caller's own
        event("cuda_driver", "cuLaunchKernel", 61),
        event("cuda_runtime", "cudaHostAlloc", 62),
        event("cuda_runtime", "cudaLaunchKernel", 63),
        event("cuda_runtime", "cudaDeviceSynchronize", 110),
    ]
    counted = count_calls(events)
    assert counted == {
        "cudaLaunchKernel": 2,
        "cudaStreamSynchronize_v3020": 1,
        "cudaMemcpyAsync": 1,
        "cuLaunchKernel": 1,
        "cudaHostAlloc": 1,
    }
    assert (of_kind(SYNCHRONIZING, counted), of_kind(ALLOCATING, counted)) == (1, 1)


def test_a_trace_without_runtime_calls_is_no_proof() -> None:
    events = [event("user_annotation", "kvpool: stage", 10, 10), event("cuda_runtime", "cudaMalloc", 50)]
    assert count_calls(events) == {}
    assert of_kind(SYNCHRONIZING, {}) is None
    assert of_kind(SYNCHRONIZING, {"cudaLaunchKernel": 1}) == 0


WAIT = (
    "cudaDeviceSynchronize cudaStreamSynchronize cudaEventSynchronize cudaMemcpy cudaMemcpy2D cudaMemcpyToSymbol \
    cuCtxSynchronize cuStreamSynchronize_ptsz cuMemcpyDtoH_v2 hipDeviceSynchronize hipMemcpy"
)
ALLOCATE = (
    "cudaMalloc cudaFree cudaHostAlloc cudaMallocHost cudaFreeHost cudaHostRegister cuMemAlloc_v2 cuMemFree_v2 \
    cuMemHostAlloc hipMalloc hipHostMalloc"
)
NEITHER = (
    "cudaLaunchKernel cudaMemcpyAsync cudaMemcpyAsync_v3020 cudaMemcpy2DAsync cuMemcpyHtoDAsync_v2 cudaEventQuery \
    cudaEventRecord cudaStreamWaitEvent cudaMallocAsync cudaFreeAsync cudaMemsetAsync cudaStreamIsCapturing"
)


@pytest.mark.parametrize(
    ("names", "kinds"),
    [(WAIT, (1, 0)), (ALLOCATE, (0, 1)), (NEITHER, (0, 0))],
    ids=["wait", "allocate", "neither"],
)
def test_names_of_runtime_calls(names: str, kinds: tuple[int, int]) -> None:
    for name in names.split():
        assert (of_kind(SYNCHRONIZING, {name: 1}), of_kind(ALLOCATING, {name: 1})) == kinds, name


def test_blocks_go_through_a_pool_under_the_profiler(arena: Arena, tmp_path: Path) -> None:
    measured = measure_calls(arena, blocks=3, trace=tmp_path / "trace.json")
    assert measured.bytes_equal is True
    assert measured.blocks == 3
    assert (measured.runtime, measured.synchronizing, measured.allocating) == ({}, None, None)
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    names = [one["name"] for one in events if one.get("cat") == "user_annotation"]
    assert {"kvpool: stage", "kvpool: load", "kvpool: poll"} <= set(names)
    ops = [one for one in events if one.get("cat") == "cpu_op"]
    (stage,) = (one for one in events if one.get("name") == "kvpool: stage")
    assert any(
        one["name"] == "aten::index_select" and one["tid"] == stage["tid"]
        and stage["ts"] <= one["ts"] <= stage["ts"] + stage["dur"]
        for one in ops
    ), "calls are found in ours by thread and time"  # fmt: skip
