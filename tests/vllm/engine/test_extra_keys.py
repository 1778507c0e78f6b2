"""What a block's hash holds besides tokens (adapter, salt, images), from the request to the pool and to the events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from kvpool import BlockHasher, metrics
from kvpool.store import Store, open_store
from kvpool.vllm.scheduler import SchedulerHalf
from tests.support.scheduler import (
    BLOCK_TOKENS,
    BLOCKS,
    TABLE,
    TOKENS,
    answer,
    computed,
    half,
    hold,
    output,
    put,
    request,
    request_with,
)

pytestmark = [pytest.mark.vllm]

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
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"file://{tmp_path}/pool") as store:
        yield store


def path_of(features: dict[str, Any]) -> str:
    """Of its adapter, whose weights are others at another path."""
    return str(features.get("lora", ("", "one"))[1])


def holding(store: Store, digest: str = "one") -> SchedulerHalf:
    """An engine whose workers have an adapter of this digest."""
    scheduler = half(store)
    hold(scheduler, digest)
    return scheduler


@pytest.mark.parametrize("stored", FEATURES)
def test_a_request_is_offered_what_was_computed_with_the_same_features_and_no_more(
    store: Store, stored: str
) -> None:
    """What is in front of an image is shared; the client library says how much that is."""
    computed(request_with("stored", **FEATURES[stored]), store, path_of(FEATURES[stored]))
    there = BlockHasher(BLOCK_TOKENS).hashes(TOKENS, **FEATURES[stored])
    hits = {}
    for name, features in FEATURES.items():
        wanted = BlockHasher(BLOCK_TOKENS).hashes(TOKENS, **features)
        common = [one == other for one, other in zip(wanted, there, strict=True)]
        hits[name] = answer(holding(store, path_of(features)), request_with(name, **features))
        assert hits[name] == BLOCK_TOKENS * (common.index(False) if False in common else BLOCKS), name
    assert hits[stored] == BLOCK_TOKENS * BLOCKS
    assert min(hits.values()) == 0


@pytest.mark.parametrize("name", FEATURES)
def test_events_of_the_pool_say_what_the_engines_own_say(store: Store, name: str) -> None:
    asked = request_with("a", **FEATURES[name])
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


def test_an_adapter_that_was_changed_in_place_goes_without_the_pool(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Its hashes are those of the one before."""
    adapter = {"lora": ("adapter", "one")}
    computed(request_with("before", **adapter), store)
    assert answer(holding(store), request_with("same", **adapter)) == BLOCK_TOKENS * BLOCKS
    scheduler, changed = holding(store), request_with("changed", load_inplace=True, **adapter)
    assert answer(scheduler, changed) == 0
    assert scheduler.plan(output(changed, len(TOKENS), TABLE)).stores == []
    assert answer(scheduler, request_with("again", load_inplace=True, **adapter)) == 0
    assert scheduler.counters.take()[f"{metrics.ADAPTER_REQUESTS.name}/in_place"] == 2
    (said,) = caplog.messages
    assert (
        "adapter adapter goes without the pool in requests that say load_inplace, as before vLLM 0.33 all do"
        in said
    )


# What the hashes leave out.


def _mixed(first: int, token: int = 0) -> Request:
    """Embeddings, and from ``first`` on this token."""
    plain, are_tokens = request("mixed"), [at >= first for at in range(len(TOKENS))]
    return Request(
        "mixed", [token] * len(TOKENS), plain.sampling_params, None, prompt_embeds=torch.ones(len(TOKENS), 8),
        prompt_is_token_ids=are_tokens, block_hasher=plain._block_hasher,
    )  # fmt: skip


def _video(sound: str) -> Request:
    """A video and the sound in it have the same place."""
    return request_with("video", multimodal=[("video", 40, 50), (sound, 40, 50)])


def _encoded_with_an_adapter() -> Request:
    """As ``--enable-tower-connector-lora`` names an image: vLLM's cache of encoders knows the adapter's name alone."""
    asked = request_with("image", lora=("adapter", "one"), multimodal=[("adapter:one", 40, 30)])
    asked.mm_features[0].mm_hash = "one"
    return asked


LESS: dict[str, Callable[[], tuple[Request, Request]]] = {
    "a token 0 among embeddings": lambda: (_mixed(40), _mixed(41)),
    "sound inside of a video": lambda: (_video("one"), _video("other")),
    "an adapter of encoders": lambda: (_encoded_with_an_adapter(), _encoded_with_an_adapter()),
}


@pytest.mark.parametrize("name", LESS)
def test_of_a_hash_that_leaves_out_what_kv_depends_on_nothing_is_stored_or_offered(
    store: Store, name: str
) -> None:
    asked, other = LESS[name]()
    assert asked.block_hashes[:5] == other.block_hashes[:5], "though what is computed differs"
    assert [one.block_hashes for one in computed(asked, store)] == [[one] for one in _told(asked)[:2]]
    put(store, list(asked.block_hashes))
    assert answer(holding(store), other) == 2 * BLOCK_TOKENS, "an engine of another version has stored more"


@pytest.mark.parametrize("token", [0, 7])
def test_embeddings_are_shared_and_so_are_tokens_beside_them(store: Store, token: int) -> None:
    """An embedding's place has a 0 in the hash, so any other token says what it is."""
    asked = _mixed(40 if token else len(TOKENS), token)
    assert len(computed(asked, store)) == BLOCKS
    assert answer(holding(store), asked) == BLOCKS * BLOCK_TOKENS


def _told(asked: Request) -> list[int]:
    """Its hashes as events have them."""
    return [int.from_bytes(one[-8:], "big") for one in asked.block_hashes]
