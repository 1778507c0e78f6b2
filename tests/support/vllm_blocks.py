"""Blocks of the installed vLLM: hashes by its own hasher, and its block pool under random requests."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

from kvpool import PrefixIndex
from tests.support.wire import packed64


def init_none_hash(algorithm: str, seed: str | None) -> None:
    """What an engine does when it starts, with ``PYTHONHASHSEED`` set to ``seed`` or not set."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    with mock.patch.dict(os.environ):
        os.environ.pop("PYTHONHASHSEED", None)
        if seed is not None:
            os.environ["PYTHONHASHSEED"] = seed
        kv_cache_utils.init_none_hash(get_hash_fn_by_name(algorithm))


def request_hashes(
    token_ids: Sequence[int],
    *,
    block_tokens: int,
    algorithm: str,
    lora: tuple[str, str] | None,
    cache_salt: str | None,
    multimodal: Sequence[tuple[str, int, int]],
    first_tokens: int | None = None,
) -> list[bytes]:
    """The hashes of one request; with ``first_tokens``, only so many are its prompt, the others generated."""
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    prompt = list(token_ids)
    given = len(prompt) if first_tokens is None else first_tokens
    features = [
        MultiModalFeatureSpec(
            data=None, modality="image", identifier=identifier, mm_position=PlaceholderRange(offset, length)
        )
        for identifier, offset, length in multimodal
    ]
    request: Any = Request(
        request_id="r",
        prompt_token_ids=prompt[:given],
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=features,
        lora_request=LoRARequest(lora[0], 1, lora[1]) if lora else None,
        cache_salt=cache_salt,
        block_hasher=get_request_block_hasher(block_tokens, get_hash_fn_by_name(algorithm)),
    )
    if given < len(prompt):
        request.append_output_token_ids(prompt[given:])
    return [bytes(block_hash) for block_hash in request.block_hashes]


def vllm_hashes(token_ids: Sequence[int], *, algorithm: str, seed: str | None, **request: Any) -> list[bytes]:
    init_none_hash(algorithm, seed)
    return request_hashes(token_ids, algorithm=algorithm, **request)


def encoded(events: list[Any], dp_rank: int | None = None) -> bytes:
    import msgspec
    from vllm.distributed.kv_events import KVEventBatch

    return msgspec.msgpack.encode(KVEventBatch(ts=1.5, events=events, data_parallel_rank=dp_rank))


class RandomEngine:
    """vLLM's own block pool and block hashes under random requests; and what it really holds."""

    BLOCK = 4

    def __init__(self, chance: random.Random, *, report_mode: str) -> None:
        from vllm.v1.core.block_pool import BlockPool

        self.chance, self.report_mode = chance, report_mode
        self.pool = BlockPool(60, True, self.BLOCK, enable_kv_cache_events=True)
        self.running: list[list[Any]] = []
        self.known: set[int] = set()

    def step(self) -> bytes:
        self.act()
        return encoded(self.pool.take_events(), 0)

    def act(self) -> None:
        what = self.chance.random()
        if what < 0.6:
            self._start()
        elif what < 0.9 and self.running:
            self.pool.free_blocks(reversed(self.running.pop(self.chance.randrange(len(self.running)))))
        elif what < 0.97:
            self.pool.evict_blocks(set(self.chance.sample(range(1, 60), 3)))
        elif not self.running:
            self.pool.reset_prefix_cache()

    def _start(self) -> None:
        """A request: reuses the cached prefix, or, as after an asynchronous load, only a part of it or none."""

        root = self.chance.randrange(4)
        tokens = [root] * (self.BLOCK * self.chance.randrange(1, 9))
        if self.chance.random() < 0.3:
            tokens[self.chance.randrange(len(tokens))] = 9
        hashes: Any = request_hashes(
            tokens, block_tokens=self.BLOCK, algorithm="sha256_cbor", lora=None, cache_salt=None, multimodal=(),
        )  # fmt: skip
        self.known.update(int.from_bytes(block_hash[-8:], "big") for block_hash in hashes)
        reused: list[Any] = []
        for block_hash in hashes[:-1]:
            found = self.pool.get_cached_block(block_hash, [0])
            if not found:
                break
            reused += found
        if self.chance.random() < 0.3:
            del reused[self.chance.randrange(len(reused) + 1) :]
        if len(hashes) - len(reused) > self.pool.get_num_free_blocks() - len(reused):
            return
        from types import SimpleNamespace

        request: Any = SimpleNamespace(
            block_hashes=hashes, all_token_ids=tokens, lora_request=None, session_id=None, mm_features=[],
            cache_salt=None, prompt_embeds=None,
        )  # fmt: skip
        if self.report_mode == "full":
            self.pool.emit_cached_block_events(request, len(reused), self.BLOCK, 0)
        self.pool.touch(reused)
        blocks = reused + self.pool.get_new_blocks(len(hashes) - len(reused))
        self.pool.cache_full_blocks(request, blocks, len(reused), len(hashes), self.BLOCK, 0)
        self.running.append(blocks)

    def holds(self) -> set[int]:
        from vllm.v1.core.kv_cache_utils import get_block_hash

        cache = self.pool.cached_block_hash_to_block._cache
        return {int.from_bytes(get_block_hash(key)[-8:], "big") for key in cache}


def blocks_credited(index: PrefixIndex, known: set[int]) -> set[int]:
    return {block for block in known if len(index.match(packed64([block])))}
