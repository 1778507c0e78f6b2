"""Gather and scatter of every layout against plain indexing: groups of any sizes, types, strides and places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpool.transfer import BlockCopier
from kvpool.transfer.device import device_of
from kvpool.transfer.memory import Staging
from tests.support.block_copies import check, storage
from tests.support.devices import ACCELERATED

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8)


@st.composite
def groups(draw: Any, device: torch.device) -> list[torch.Tensor]:
    """The layers of one group on ``device``, as views ``[num_blocks, ...]`` of one dtype, as engines lay them out."""
    dtype = draw(st.sampled_from(DTYPES))
    blocks = draw(st.integers(2, 9))
    layers = draw(st.integers(1, 5))
    tokens, heads, size = draw(st.integers(1, 8)), draw(st.integers(1, 4)), draw(st.integers(1, 12))
    if ACCELERATED and draw(st.booleans()):  # as large as models have them: kernels copy these otherwise
        tokens, size = draw(st.sampled_from((16, 64, 128))), draw(st.sampled_from((128, 576)))
    kind = draw(st.sampled_from(("joined", "split", "mla", "kernel blocks")))
    # In memory: which of (layer, K or V, block, token, head) is outermost, and so on; elements of a head are together,
    # unless keys are packed for a kernel.
    inner = ["token", "head"] if draw(st.booleans()) else ["head", "token"]
    if draw(st.booleans()):
        inner.append("element")
    else:
        inner.insert(draw(st.integers(0, 2)), "element")
    sizes = {"layer": layers, "block": blocks, "token": tokens, "head": heads, "element": size}
    if kind == "mla":
        sizes["head"] = 1
    outer = ["layer", "block"] if draw(st.booleans()) else ["block", "layer"]
    if kind in ("joined", "split"):
        sizes["kv"] = 2
        outer.insert(len(outer) if kind == "joined" else draw(st.integers(0, 1)), "kv")
    if kind == "kernel blocks":  # the kernel's blocks are smaller than the engine's
        sizes["part"] = draw(st.integers(1, 3))
        outer.insert(outer.index("block") + 1, "part")
    order = [*outer, *inner]
    apart = draw(st.booleans())  # each layer in an allocation of its own
    gap = draw(
        st.integers(0, 3)
    )  # elements behind a block, and behind all blocks, of none or of another group
    inside = order[order.index("block") + 1]
    strides: dict[str, int] = {}
    step = 1
    for name in reversed(order):
        strides[name] = step
        step = step * sizes[name] + (gap if name in ("block", inside) else 0)
    logical = ["block", *(name for name in ("kv", "part", "token", "head", "element") if name in sizes)]
    nbytes = (step + gap + 16) * dtype.itemsize
    shared = storage(draw, nbytes, device)
    views = []
    for layer in range(layers):
        whole = (storage(draw, nbytes, device) if apart else shared).view(dtype)
        views.append(
            whole.as_strided(
                [sizes[name] for name in logical],
                [strides[name] for name in logical],
                layer * strides["layer"] + draw(st.integers(0, 0 if not apart else 3)),
            )
        )
    if layers > 2 and draw(st.booleans()):
        del views[draw(st.integers(1, layers - 2))]  # of another group
    return views


@pytest.mark.gpu
@given(st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_gather_and_scatter_are_indexing(device: torch.device, data: st.DataObject) -> None:
    """Two groups of different sizes through one staging; a window's tail or holes are just other block ids.

    A slot holds one block or several, of which a scatter may leave some out.
    """
    both = [data.draw(groups(device)) for _ in range(2)]
    per_record = data.draw(st.integers(1, min(3, *(len(layers[0]) - 1 for layers in both))))
    copiers = [BlockCopier(layers, per_record) for layers in both]
    staging = Staging(max(copier.payload_nbytes for copier in copiers), 24, device_of(device).pinned)
    busy = data.draw(st.sets(st.integers(0, 23), max_size=8))  # so that neighbours are interrupted
    staging.release([slot for slot in staging.acquire(24) if slot not in busy])
    for layers, copier in zip(both, copiers, strict=True):
        assert 1 <= copier.launches <= len(layers)
        ids = data.draw(st.permutations(range(1, copier.num_blocks)))
        ids = ids[: per_record * data.draw(st.integers(1, len(ids) // per_record))]
        slots = staging.acquire(len(ids) // per_record)
        if data.draw(st.booleans()):
            slots = data.draw(st.permutations(slots))
        left_out = data.draw(st.sets(st.sampled_from(ids), max_size=len(ids) - 1))
        places = [0 if place in left_out else place for place in data.draw(st.permutations(ids))]
        check(layers, staging, ids, slots, places)


def stacked(layers: int, split: bool, block_outermost: bool) -> list[torch.Tensor]:
    shape = (2, 8, 16, 64) if split else (8, 2, 16, 64)
    if block_outermost:
        whole = torch.zeros((8, layers, 2, 16, 64), dtype=torch.bfloat16)
        return [whole[:, layer] for layer in range(layers)]
    whole = torch.zeros((layers, *shape), dtype=torch.bfloat16)
    return [whole[layer].transpose(0, 1) if split else whole[layer] for layer in range(layers)]


def test_layers_of_one_allocation_are_one_launch() -> None:
    for split, outermost in ((False, False), (True, False), (False, True)):
        assert BlockCopier(stacked(32, split, outermost)).launches == 1
    apart = [layer for _ in range(4) for layer in stacked(1, False, False)]
    assert BlockCopier(apart).launches == 4
    holes = stacked(8, False, False)
    del holes[3]
    assert BlockCopier(holes).launches == 2, "one before the hole, one behind it"
