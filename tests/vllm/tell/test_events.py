"""All that an engine holds, told in one piece: by vLLM's own block pool, to an index, against what the pool holds."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from vllm.distributed.kv_events import AllBlocksCleared, KVEventBatch
from vllm.v1.core.block_pool import BlockPool

from kvpool import PrefixIndex
from kvpool.vllm.geometry import Group
from kvpool.vllm.tell import events as module
from kvpool.vllm.tell.events import INTERVAL_S, CacheResync
from tests.support.vllm_blocks import RandomEngine, blocks_credited, encoded, init_none_hash, request_hashes
from tests.support.wire import batch, packed64, stored

pytestmark = [pytest.mark.vllm]

BLOCK = 4


@pytest.fixture(autouse=True)
def _none_hash() -> None:
    init_none_hash("sha256_cbor", None)


def request(tokens: list[int]) -> Any:
    hashes = request_hashes(
        tokens, block_tokens=BLOCK, algorithm="sha256_cbor", lora=None, cache_salt=None, multimodal=()
    )
    return SimpleNamespace(
        block_hashes=hashes, all_token_ids=tokens, lora_request=None, session_id=None, mm_features=[],
        cache_salt=None, prompt_embeds=None,
    )  # fmt: skip


def fill(block_pool: BlockPool, one: Any, group: int = 0) -> list[Any]:
    """The full blocks of a request in the cache, once more."""
    blocks = block_pool.get_new_blocks(len(one.block_hashes))
    block_pool.cache_full_blocks(one, blocks, 0, len(blocks), BLOCK, group)
    return blocks


def numbers(one: Any) -> list[int]:
    return [int.from_bytes(block_hash[-8:], "big") for block_hash in one.block_hashes]


def resync(block_pool: Any, *groups: Group) -> CacheResync:
    one = CacheResync(groups or [Group(BLOCK)], clock=lambda: 0.0)
    one.bind(block_pool)
    return one


@pytest.mark.parametrize("reuse_reports", [True, False])
@pytest.mark.parametrize("as_integers", ["1", "0"])
def test_copies_are_told_one_by_one(
    monkeypatch: pytest.MonkeyPatch, reuse_reports: bool, as_integers: str
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", as_integers)
    block_pool = BlockPool(32, True, BLOCK, enable_kv_cache_events=True)
    long, short = request([1] * 12), request([1] * 8)
    copies = [fill(block_pool, one) for one in (long, short, short)]
    block_pool.take_events()
    index = PrefixIndex(reuse_reports=reuse_reports)
    applied = index.apply("w", encoded(resync(block_pool).events()))
    assert (applied.cleared_events, applied.stored, applied.copied) == (1, 3, 4)
    for left, blocks in zip([2, 2, 0], copies, strict=True):
        block_pool.evict_blocks({block.block_id for block in blocks})
        index.apply("w", encoded(block_pool.take_events()))
        assert len(index) == left


def test_other_tiers_stay() -> None:
    block_pool = BlockPool(16, True, BLOCK, enable_kv_cache_events=True)
    one = request([1] * 8)
    fill(block_pool, one)
    index = PrefixIndex()
    index.apply("w", batch(*(stored(numbers(one), medium=medium) for medium in ("CPU", "DISK", "STORAGE"))))
    index.apply("w", encoded(resync(block_pool).events()))
    assert [list(row[2:6]) for row in index.match(packed64(numbers(one)))] == [[2, 2, 2, 2]]


def test_every_group_is_told_by_its_number_and_kind() -> None:
    block_pool = BlockPool(32, True, BLOCK, enable_kv_cache_events=True)
    one, other = request([1] * 8), request([2] * 12)
    fill(block_pool, one, group=0)
    fill(block_pool, other, group=1)
    fill(block_pool, other, group=1)
    told: list[Any] = resync(block_pool, Group(BLOCK), Group(BLOCK, 8), Group(BLOCK)).events()
    cleared, *held = told
    assert isinstance(cleared, AllBlocksCleared)
    assert [
        (event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window, event.block_hashes)
        for event in held
    ] == [
        (0, "full_attention", None, numbers(one)),
        (1, "sliding_window", 8, numbers(other) * 2),
        (2, "full_attention", None, []),
    ]
    assert [event.parent_block_hash is None for event in held] == [False, False, True]
    index = PrefixIndex()
    index.apply("w", encoded(told))
    assert len(index.match(packed64(numbers(one)))) == 0, (
        "the third group holds nothing, and needs everything"
    )


def test_who_knows_vllms_events_reads_these() -> None:
    import msgspec

    block_pool = BlockPool(16, True, BLOCK, enable_kv_cache_events=True)
    fill(block_pool, request([1] * 8))
    payload = encoded(resync(block_pool).events())
    cleared, held = msgspec.msgpack.decode(payload, type=KVEventBatch).events
    assert cleared == AllBlocksCleared()
    assert (held.medium, held.token_ids, held.lora_name) == ("GPU", [], None)


def test_an_empty_cache_is_told_too() -> None:
    block_pool = BlockPool(16, True, BLOCK, enable_kv_cache_events=True)
    index = PrefixIndex()
    index.apply("w", batch(stored([1, 2])))
    index.apply("w", encoded(resync(block_pool).events()))
    assert len(index) == 0


def test_it_is_told_at_most_every_ten_seconds() -> None:
    now_s = 100.0
    one = CacheResync([Group(BLOCK)], clock=lambda: now_s)
    one.bind(BlockPool(16, True, BLOCK, enable_kv_cache_events=True))
    assert one.events()
    now_s += INTERVAL_S - 0.1
    assert one.events() == []
    now_s += 0.1
    assert one.events()
    assert one.events() == []


@pytest.mark.parametrize("shown", [None, SimpleNamespace(cached_block_hash_to_block={})])
def test_an_engine_that_does_not_show_its_cache_says_so_once(
    monkeypatch: pytest.MonkeyPatch, shown: Any
) -> None:
    said: list[str] = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *of: said.append(text % of))
    now_s = 0.0
    one = CacheResync([Group(BLOCK)], clock=lambda: now_s)
    if shown is not None:
        one.bind(shown)
    for _ in range(3):
        assert one.events() == []
        now_s += INTERVAL_S
    (sentence,) = said
    assert "does not show its cache to connectors" in sentence


def test_what_no_index_could_take_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BLOCKS", 3)
    block_pool = BlockPool(16, True, BLOCK, enable_kv_cache_events=True)
    fill(block_pool, request([1] * 8))
    assert resync(block_pool).events()
    fill(block_pool, request([1] * 8))
    assert resync(block_pool).events() == []


class Telling(RuleBasedStateMachine):
    """vLLM's block pool under random requests, batches that are lost, and tellings in between.

    ``whole``: all that it holds was told since the last loss.
    """

    now_s = 0.0

    @initialize(report_mode=st.sampled_from(["incremental", "full"]))
    def start(self, report_mode: str) -> None:
        init_none_hash("sha256_cbor", None)
        # Without reports of reused blocks copies are counted exactly, and so is all that is compared.
        self.exact = report_mode == "incremental"
        self.engine = RandomEngine(random.Random(0), report_mode=report_mode)
        self.index = PrefixIndex(reuse_reports=not self.exact)
        self.resync = CacheResync([Group(BLOCK)], clock=lambda: self.now_s)
        self.resync.bind(self.engine.pool)
        self.whole = True

    @rule(seed=st.integers(0, 1 << 32), steps=st.integers(1, 6), lost=st.booleans())
    def go_on(self, seed: int, steps: int, lost: bool) -> None:
        self.engine.chance.seed(seed)
        for step in range(steps):
            payload = self.engine.step()
            if not (lost and step == 0):
                self.index.apply("w", payload)
                continue
            self.index.clear("w", tier="device")  # as the service does when nothing closes the gap
            self.whole = False

    @rule(seed=st.integers(0, 1 << 32))
    def tell(self, seed: int) -> None:
        """Behind the engine's own events of a step, in one batch."""
        self.engine.chance.seed(seed)
        self.engine.act()
        self.now_s += INTERVAL_S
        self.index.apply("w", encoded([*self.engine.pool.take_events(), *self.resync.events()], 0))
        self.whole = True
        assert blocks_credited(self.index, self.engine.known) == self.engine.holds()

    @invariant()
    def never_more_than_is_there(self) -> None:
        if not hasattr(self, "engine"):
            return
        credited, truth = blocks_credited(self.index, self.engine.known), self.engine.holds()
        assert credited <= truth
        if self.whole and self.exact:
            assert credited == truth

    def teardown(self) -> None:
        """After a telling copies are counted as they are: it stays exact until the last one has gone."""
        if not hasattr(self, "engine"):
            return
        self.tell(0)
        for block_id in range(1, 60):
            self.engine.pool.evict_blocks({block_id})
            self.index.apply("w", encoded(self.engine.pool.take_events(), 0))
            assert blocks_credited(self.index, self.engine.known) == self.engine.holds()
        assert len(self.index) == self.index.counters()["copied_blocks"] == 0


TestTelling = Telling.TestCase
TestTelling.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
