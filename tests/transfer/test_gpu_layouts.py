"""Layouts of vLLM's attention backends by name, in blocks of 16, 64 and 128 tokens, against plain indexing."""

from __future__ import annotations

import random

import pytest
import torch

from kvpool.transfer import BlockCopier
from kvpool.transfer.device import device_of
from kvpool.transfer.memory import Staging
from tests.support.block_copies import check
from tests.support.devices import ACCELERATED

pytestmark = pytest.mark.gpu

LAYERS, BLOCKS, HEADS, SIZE = (4, 24, 8, 128) if ACCELERATED else (3, 9, 2, 16)
LATENT = 576 if ACCELERATED else 36  # of MLA: 512 + 64
SEED = 5


def allocation(nbytes: int, device: torch.device, seed: int = SEED) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).to(device)


def flash_attention(tokens: int, whole: torch.Tensor) -> torch.Tensor:
    """K of all blocks, then V: ``(2, blocks, tokens, heads, size)``."""
    return whole.view(2, BLOCKS, tokens, HEADS, SIZE).transpose(0, 1)


def flash_attention_joined(tokens: int, whole: torch.Tensor) -> torch.Tensor:
    return whole.view(BLOCKS, 2, tokens, HEADS, SIZE)


def flashinfer_nhd(tokens: int, whole: torch.Tensor) -> torch.Tensor:
    return whole.view(BLOCKS, 2, tokens, HEADS, SIZE)


def flashinfer_hnd(tokens: int, whole: torch.Tensor) -> torch.Tensor:
    """Heads lie outside of tokens, and the view says tokens first."""
    return whole.view(BLOCKS, 2, HEADS, tokens, SIZE).transpose(2, 3)


def mla(tokens: int, whole: torch.Tensor) -> torch.Tensor:
    return whole.view(BLOCKS, tokens, LATENT)


VIEWS = (flash_attention, flash_attention_joined, flashinfer_nhd, flashinfer_hnd, mla)


def shuffled(count: int, seed: int = SEED) -> list[int]:
    """``count`` blocks, in an order that no copy would choose; not 0, which is vLLM's null block."""
    return random.Random(seed).sample(range(1, BLOCKS), count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("tokens", [16, 64, 128])
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_a_layout_is_copied_like_plain_indexing(
    device: torch.device, view: object, tokens: int, dtype: torch.dtype
) -> None:
    """Layers one after the other in one allocation, and each in its own."""
    assert callable(view)
    elements = BLOCKS * tokens * (LATENT if view is mla else 2 * HEADS * SIZE)
    nbytes = elements * dtype.itemsize
    joined = allocation(LAYERS * nbytes, device)
    apart = [allocation(nbytes, device, seed) for seed in range(LAYERS)]
    of_one = [view(tokens, joined[at * nbytes : (at + 1) * nbytes].view(dtype)) for at in range(LAYERS)]
    of_many = [view(tokens, whole.view(dtype)) for whole in apart]
    assert (BlockCopier(of_one).launches, BlockCopier(of_many).launches) == (1, LAYERS)
    count = BLOCKS // 3
    for layers in (of_one, of_many):
        staging = Staging(BlockCopier(layers).payload_nbytes, count + 2, device_of(device).pinned)
        order = shuffled(2 * count)
        for slots, places in (
            (list(range(count)), order[count:]),
            (random.Random(SEED).sample(range(count + 2), count), [0, *order[: count - 1]]),
            ([*range(count - 1), count + 1], [*order[1:count], 0]),
        ):
            check(layers, staging, order[:count], slots, places)


@pytest.mark.parametrize("tokens", [16, 64, 128])
def test_hybrid_groups_of_one_allocation_leave_each_others_blocks_alone(
    device: torch.device, tokens: int
) -> None:
    """Attention, a sliding window and a state of another type take pages of one allocation, as vLLM's hybrid models do.

    A page is as large as a block of attention; the state fills a part of it.
    """
    page = 2 * tokens * HEADS * SIZE  # elements of two bytes
    whole = allocation(LAYERS * BLOCKS * page * 2, device).view(torch.bfloat16).view(LAYERS, BLOCKS, page)
    attention = [layer.view(BLOCKS, 2, tokens, HEADS, SIZE) for layer in whole]
    window = [layer.view(BLOCKS, 2, 2 * tokens, HEADS // 2, SIZE) for layer in whole]
    state = [layer.view(torch.float32)[:, : page // 4 - 3] for layer in whole]
    count = BLOCKS // 4
    order = shuffled(3 * count)
    sizes = [BlockCopier(layers).payload_nbytes for layers in (attention, window, state)]
    staging = Staging(max(sizes), count, device_of(device).pinned)
    slots = random.Random(SEED).sample(range(count), count)
    for group, layers in enumerate((attention, window, state)):
        own = order[group * count : (group + 1) * count]
        check(layers, staging, own, slots, [*own[1:], own[0]])
