"""Block hashes as the installed vLLM computes them: its own hasher on its own request objects."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from unittest import mock


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
