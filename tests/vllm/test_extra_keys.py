"""What a block's hash holds besides tokens (adapter, salt, images), from the request to the pool and to the events."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockStored
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvpool import BlockHasher
from kvpool.store import Store, open_store
from kvpool.vllm.plan import PoolWorkerMetadata
from tests.conftest import eventually
from tests.vllm.test_scheduler import BLOCK_TOKENS, NAMESPACE, TABLE, answer, half, output

pytestmark = [pytest.mark.vllm]

TOKENS = list(range(100))
BLOCKS = len(TOKENS) // BLOCK_TOKENS
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "adapter": {"lora": ("adapter", "one")},
    "adapter at another path": {"lora": ("adapter", "other")},
    "other adapter": {"lora": ("other", "one")},
    "salt": {"cache_salt": "tenant"},
    "other salt": {"cache_salt": "tenant 2"},
    "image": {"multimodal": [("one", 40, 30)]},
    "other image": {"multimodal": [("other", 40, 30)]},
    "image elsewhere": {"multimodal": [("one", 41, 30)]},
    "two images": {"multimodal": [("one", 40, 30), ("other", 75, 10)]},
    "everything": {"lora": ("adapter", "one"), "cache_salt": "tenant", "multimodal": [("one", 40, 30)]},
}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.chdir(tmp_path)
    for adapter in ("one", "other"):
        (tmp_path / adapter).mkdir()
        (tmp_path / adapter / "adapter_config.json").write_text("{}")
        (tmp_path / adapter / "adapter_model.bin").write_bytes(adapter.encode())
    with open_store(f"file://{tmp_path}/pool") as store:
        yield store


def request(
    name: str,
    lora: tuple[str, str] | None = None,
    cache_salt: str | None = None,
    multimodal: list[tuple[str, int, int]] | None = None,
    **of_adapter: Any,
) -> Request:
    init_none_hash(sha256_cbor)
    return Request(
        name,
        list(TOKENS),
        SamplingParams(max_tokens=8),
        None,
        lora_request=LoRARequest(lora[0], 1, lora[1], **of_adapter) if lora else None,
        cache_salt=cache_salt,
        mm_features=[
            MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, length))
            for identifier, offset, length in multimodal or ()
        ],
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256_cbor),
    )


def computed(asked: Request, store: Store) -> list[BlockStored]:
    """Let a request be computed and stored; what is announced of it."""
    scheduler = half(store)
    scheduler.seen(asked)
    assert eventually(lambda: scheduler._requests[asked.request_id].checked)
    scheduler.allocated(asked, TABLE, 0)
    step = scheduler.plan(output(asked, len(TOKENS), TABLE))
    keys = NAMESPACE.keys([block.block_hash for block in step.stores], 0, 0)
    assert all(store.put_many(keys, [b"x"] * len(keys)))
    everywhere = dict.fromkeys(step.tags, 1)
    scheduler.update(PoolWorkerMetadata(staged=everywhere, stored=everywhere), (), ())
    return [event for event in scheduler.take_events() if isinstance(event, BlockStored)]


@pytest.mark.parametrize("stored", FEATURES)
def test_a_request_is_offered_what_was_computed_with_the_same_features_and_no_more(
    store: Store, stored: str
) -> None:
    """What is in front of an image is shared; the client library says how much that is."""
    computed(request("stored", **FEATURES[stored]), store)
    there = BlockHasher(BLOCK_TOKENS).hashes(TOKENS, **FEATURES[stored])
    hits = {}
    for name, features in FEATURES.items():
        wanted = BlockHasher(BLOCK_TOKENS).hashes(TOKENS, **features)
        common = [one == other for one, other in zip(wanted, there, strict=True)]
        hits[name] = answer(half(store), request(name, **features))
        assert hits[name] == BLOCK_TOKENS * (common.index(False) if False in common else BLOCKS), name
    assert hits[stored] == BLOCK_TOKENS * BLOCKS
    assert min(hits.values()) == 0


@pytest.mark.parametrize("name", FEATURES)
def test_events_of_the_pool_say_what_the_engines_own_say(store: Store, name: str) -> None:
    asked = request("a", **FEATURES[name])
    told = computed(asked, store)
    block_pool = BlockPool(16, True, BLOCK_TOKENS, enable_kv_cache_events=True)
    blocks = block_pool.get_new_blocks(BLOCKS)
    block_pool.cache_full_blocks(asked, blocks, 0, BLOCKS, BLOCK_TOKENS, 0)
    (engines,) = block_pool.take_events()
    assert [event.block_hashes[0] for event in told] == engines.block_hashes
    assert [token for event in told for token in event.token_ids] == engines.token_ids
    extra_keys = [event.extra_keys[0] if event.extra_keys else None for event in told]
    assert extra_keys == list(engines.extra_keys or [None] * BLOCKS)
    for event in told:
        assert (event.lora_id, event.lora_name) == (engines.lora_id, engines.lora_name)


def test_an_adapter_that_was_changed_in_place_goes_without_the_pool(store: Store) -> None:
    """Its hashes are those of the one before."""
    adapter = {"lora": ("adapter", "one")}
    computed(request("before", **adapter), store)
    assert answer(half(store), request("same", **adapter)) == BLOCK_TOKENS * BLOCKS
    scheduler, changed = half(store), request("changed", load_inplace=True, **adapter)
    assert answer(scheduler, changed) == 0
    assert scheduler.plan(output(changed, len(TOKENS), TABLE)).stores == []
