"""The index against vLLM's own event classes and its own block pool."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvpool import PrefixIndex
from tests.support.vllm_blocks import RandomEngine, blocks_credited, encoded
from tests.support.wire import batch, cleared, packed64, removed, stored

pytestmark = pytest.mark.vllm


def test_our_batches_are_the_bytes_that_vllm_sends() -> None:
    from vllm.distributed import kv_events

    told = [
        stored([1, (1 << 64) - 1], parent=7, token_ids=[1, 70_000], lora_id=3, lora_name="l", session_id="s"),
        stored([b"x" * 32], medium=None, group_idx=2, kv_cache_spec_kind="sliding_window", block_size=0),
        stored([], kv_cache_spec_sliding_window=128, extra_keys=[None], locality="LOCAL", ownership="o"),
        removed([1, b"y" * 16], medium="CPU", group_idx=0, locality="REMOTE", ownership="kvpool"),
        removed([], medium=None),
        cleared(),
    ]
    made = [
        getattr(kv_events, event["type"])(**{k: v for k, v in event.items() if k != "type"}) for event in told
    ]
    assert batch(*told) == encoded(made)
    assert batch(*told, dp_rank=3) == encoded(made, 3)


@pytest.mark.parametrize(
    "fields", [0, 1, 3, 7]
)  # vLLM 0.9, 0.11, 0.17 and 0.23 on: those of before have fewer
def test_events_of_before_maps_are_read(fields: int) -> None:
    """vLLM to 0.23 packs an event as an array; msgspec makes it here of today's classes."""
    import msgspec
    from vllm.distributed import kv_events

    def as_array(event: Any, most: int) -> Any:
        kind = type(event)
        names = [field.name for field in msgspec.structs.fields(kind)][:most]
        old = msgspec.defstruct(kind.__name__, names, array_like=True, tag=True)
        return old(*(getattr(event, name) for name in names))

    told = [
        kv_events.BlockStored([1, 2, b"x" * 24 + (3).to_bytes(8, "big")], 9, [1, 2], 16, None, "CPU", "l", [None], 0),
        kv_events.BlockRemoved([2], "CPU", 0),
    ]  # fmt: skip
    index = PrefixIndex(reuse_reports=False)
    applied = index.apply("w", encoded([as_array(told[0], 5 + fields), as_array(told[1], 1 + fields)], 3))
    assert (applied.stored, applied.removed, applied.skipped_events) == (3, 1, 0)
    (row,) = index.match(packed64([1, 2, 3]))
    assert (row.dp_rank, row.device_blocks, row.host_blocks) == ((3, 0, 1) if fields else (3, 1, 0))
    assert len(index) == 2
    cleared_as_array = as_array(kv_events.AllBlocksCleared(), 0)
    assert index.apply("w", encoded([cleared_as_array], 3)).cleared_events == 1
    assert len(index) == 0


def test_the_golden_batches_are_what_vllm_packs_today() -> None:
    from tests.golden.make import make_events
    from tests.support.wire import GOLDEN

    assert make_events() == GOLDEN


def test_the_pools_events_are_of_the_pool_tier() -> None:
    """What kvpool's own connector publishes."""
    from types import SimpleNamespace

    from kvpool.vllm.geometry import Group
    from kvpool.vllm.tell.events import removed_event, stored_event

    request: Any = SimpleNamespace(
        lora_request=None, all_token_ids=list(range(64)), mm_features=[], cache_salt=None, prompt_embeds=None
    )
    hashes = [bytes([i]) * 32 for i in range(2)]
    numbers = [int.from_bytes(block_hash[-8:], "big") for block_hash in hashes]
    index = PrefixIndex()
    told = [stored_event(request, 0, Group(32), i, hashes) for i in range(2)]
    assert index.apply("w", encoded(told)).stored == 2
    assert list(index.match(packed64(numbers)).pool_blocks) == [2]
    assert index.apply("w", encoded([removed_event(hashes[1], 0)])).removed == 1
    assert list(index.match(packed64(numbers)).pool_blocks) == [1]


@pytest.fixture(autouse=True)
def _none_hash() -> None:
    from tests.support.vllm_blocks import init_none_hash

    init_none_hash("sha256_cbor", None)


@pytest.mark.parametrize("seed", range(5))
def test_the_index_knows_what_the_engines_pool_holds(seed: int) -> None:
    """Exactly, where no request asks for reports of reused blocks: copies, evictions and resets among it."""
    engine = RandomEngine(random.Random(seed), report_mode="incremental")
    index = PrefixIndex(reuse_reports=False)
    copied = 0
    for _ in range(400):
        copied += index.apply("w", engine.step()).copied
        assert blocks_credited(index, engine.known) == engine.holds()
    assert copied > 20, "a test without copies proves nothing"


@pytest.mark.parametrize("report_mode", ["incremental", "full"])
@pytest.mark.parametrize("seed", range(5))
def test_the_index_never_credits_more_than_the_pool_holds(seed: int, report_mode: str) -> None:
    """Whatever the report mode; what it credits too little is little."""
    engine = RandomEngine(random.Random(seed), report_mode=report_mode)
    index = PrefixIndex()
    repeated = missed = held = 0
    for _ in range(400):
        repeated += index.apply("w", engine.step()).repeated
        credited, truth = blocks_credited(index, engine.known), engine.holds()
        assert credited <= truth
        missed, held = missed + len(truth - credited), held + len(truth)
    assert repeated > 10
    assert missed < 0.25 * held


# ---- several KV-cache groups


def _full(block_tokens: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float32)


def _window(block_tokens: int, window: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return SlidingWindowSpec(
        block_size=block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=window
    )


def _state(block_tokens: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(
        block_size=block_tokens, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="all"
    )  # fmt: skip


GROUPS: dict[str, Any] = {
    "a window": lambda: [_full(4), _window(4, 9)],
    "two windows before full attention": lambda: [_window(4, 9), _window(4, 14), _full(4)],
    "windows only": lambda: [_window(4, 11)],
    "larger blocks of full attention": lambda: [_full(8), _window(4, 9)],
    "larger blocks of a window": lambda: [_full(4), _window(8, 19)],
    "a state": lambda: [_full(4), _state(4)],
}


class _HybridEngine:
    """vLLM's own KV-cache manager under random requests, some computed in several steps."""

    BLOCK = 4

    def __init__(self, chance: random.Random, specs: list[Any], *, full_reports: bool) -> None:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

        self.chance, self.full_reports = chance, full_reports
        groups = [KVCacheGroupSpec([f"layer {at}"], spec) for at, spec in enumerate(specs)]
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks=70, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=4096,
            scheduler_block_size=max(spec.block_size for spec in specs),
            hash_block_size=self.BLOCK,
            enable_kv_cache_events=True,
        )
        self.hasher = get_request_block_hasher(self.BLOCK, get_hash_fn_by_name("sha256_cbor"))
        self.running: list[Any] = []
        self.prompts: list[list[Any]] = []  # hashes
        self.started = 0

    def step(self) -> bytes:
        what = self.chance.random()
        if what < 0.6:
            self._start()
        elif what < 0.93 and self.running:
            self.manager.free(self.running.pop(self.chance.randrange(len(self.running))))
        elif what < 0.98:
            self.manager.evict_blocks(set(self.chance.sample(range(1, 70), 4)))
        elif not self.running:
            self.manager.reset_prefix_cache()
        return encoded(self.manager.take_events(), 0)

    def _start(self) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        # Prompts that are alike for a while.
        tokens = [self.chance.randrange(3)] * self.chance.randrange(1, 30)
        tokens += [self.chance.randrange(3) for _ in range(self.chance.randrange(0, 20))]
        mode = "full" if self.full_reports and self.chance.random() < 0.7 else "incremental"
        self.started += 1
        request: Any = Request(
            request_id=str(self.started),
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1, extra_args={"kv_cache_report_mode": mode}),
            pooling_params=None,
            block_hasher=self.hasher,
        )
        self.prompts = [*self.prompts[-40:], list(request.block_hashes)]
        blocks, computed, _ = self.manager.get_computed_blocks(request)
        at_once = self.chance.choice([8, 16, 1000])
        first = True
        while request.num_computed_tokens < len(tokens):
            known = computed if first else 0
            count = min(at_once, len(tokens) - request.num_computed_tokens - known)
            given = self.manager.allocate_slots(request, count, known, blocks if first else None)
            if given is None:
                self.manager.free(request)
                return
            request.num_computed_tokens += known + count
            first = False
        self.running.append(request)

    def usable(self, hashes: list[Any]) -> int:
        """Blocks from which the engine itself would go on."""
        return (
            int(self.manager.coordinator.find_longest_cache_hit(hashes, len(hashes) * self.BLOCK)[1])
            // self.BLOCK
        )


def _credited(index: PrefixIndex, hashes: list[Any]) -> int:
    prompt = packed64([int.from_bytes(block_hash[-8:], "big") for block_hash in hashes])
    return max(index.match(prompt).device_blocks, default=0)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("seed", range(2))
def test_groups_are_scored_as_the_engine_would(seed: int, groups: str) -> None:
    """Exactly what its own search for a hit finds, where no request asks for reports of reused blocks."""
    engine = _HybridEngine(random.Random(seed), GROUPS[groups](), full_reports=False)
    index = PrefixIndex(reuse_reports=False, block_tokens=engine.BLOCK)
    hits = cut = 0
    for _ in range(180):
        index.apply("w", engine.step())
        for hashes in engine.prompts:
            usable = engine.usable(hashes)
            assert _credited(index, hashes) == usable
            hits += usable > 0
            cut += 0 < usable < len(hashes)
    assert hits > 500
    assert cut > 100, "a test without partial hits proves nothing"


@pytest.mark.parametrize("full_reports", [False, True])
@pytest.mark.parametrize("groups", GROUPS)
def test_groups_are_never_credited_with_more_than_the_engine_could_use(
    groups: str, full_reports: bool
) -> None:
    """Whatever the report mode. What is told from the root of a prompt is believed as far as a report would be true."""
    engine = _HybridEngine(random.Random(7), GROUPS[groups](), full_reports=full_reports)
    index = PrefixIndex(block_tokens=engine.BLOCK)
    credited = usable = 0
    for _ in range(180):
        index.apply("w", engine.step())
        for hashes in engine.prompts:
            ours, theirs = _credited(index, hashes), engine.usable(hashes)
            assert ours <= theirs
            credited, usable = credited + ours, usable + theirs
    assert "larger" in groups or credited > 0.2 * usable
