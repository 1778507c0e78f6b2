"""KV-event batches as vLLM's publisher sends them, written without vLLM, or made up by hypothesis."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
from hypothesis import strategies as st

Hash = int | bytes

# Fields that vLLM leaves out when they have their default.
_OPTIONAL = (
    "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership",
    "session_id", "lookahead_token_ids",
)  # fmt: skip


def stored(
    hashes: Sequence[Hash],
    *,
    parent: Hash | None = None,
    medium: str | None = "GPU",
    token_ids: Sequence[int] = (),
    block_size: int = 16,
    lora_id: int | None = None,
    lora_name: str | None = None,
    **optional: Any,
) -> dict[str, Any]:
    """A ``BlockStored``: in vLLM's order of fields, without those that have their default."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(token_ids),
        "block_size": block_size,
        "lora_id": lora_id,
        "medium": medium,
        "lora_name": lora_name,
        **{name: optional[name] for name in _OPTIONAL if optional.get(name) is not None},
    }


def removed(hashes: Sequence[Hash], *, medium: str | None = "GPU", **optional: Any) -> dict[str, Any]:
    """A ``BlockRemoved``."""
    return {
        "type": "BlockRemoved",
        "block_hashes": list(hashes),
        "medium": medium,
        **{name: optional[name] for name in _OPTIONAL if optional.get(name) is not None},
    }


def cleared(medium: str | None = None) -> dict[str, Any]:
    """An ``AllBlocksCleared``; with a medium, as kvpool's connector sends it."""
    return {"type": "AllBlocksCleared", **({} if medium is None else {"medium": medium})}


def batch(*events: dict[str, Any], dp_rank: int | None = None, at_s: float = 1.5) -> bytes:
    """The last frame of a message."""
    packed: bytes = msgpack.packb([at_s, list(events), dp_rank])
    return packed


def packed64(hashes: Sequence[int]) -> bytes:
    """What ``match`` takes."""
    return struct.pack(f"<{len(hashes)}Q", *hashes)


GOLDEN: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "golden" / "events.json").read_text())
HASHES = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 1 << 32, (1 << 63) + 1, (1 << 64) - 1])
WORKERS = st.sampled_from(["a", "b", "c"])
RANKS = st.sampled_from([0, 0, 0, 1])


@st.composite
def wire_hashes(draw: st.DrawFn) -> list[Hash]:
    as_bytes = draw(st.booleans())
    blocks = draw(st.lists(HASHES, max_size=6))
    if not as_bytes:
        return list(blocks)
    return [draw(st.sampled_from([b"", b"x" * 24])) + block.to_bytes(8, "big") for block in blocks]


@st.composite
def events(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["stored"] * 5 + ["removed"] * 4 + ["cleared"]))
    if kind == "cleared":
        return cleared(draw(st.sampled_from([None, None, "GPU", "GPU", "CPU", "STORAGE"])))
    fields: dict[str, Any] = {"medium": draw(st.sampled_from(["GPU", "GPU", None, "CPU", "DISK", "STORAGE"]))}
    fields["group_idx"] = draw(st.sampled_from([None, 0, 0, 0, 1]))
    if kind == "removed":
        return removed(draw(wire_hashes()), **fields)
    fields["kv_cache_spec_kind"] = draw(
        st.sampled_from(
            [None, None, "full_attention", "sliding_window", "sliding_window", "mamba", "new_kind",
             "chunked_local_attention"]
        )
    )  # fmt: skip
    fields["kv_cache_spec_sliding_window"] = draw(st.sampled_from([None, 1, 2, 17, 18, 40]))
    fields["block_size"] = draw(st.sampled_from([0, 8, 16, 16, 16, 16, 24, 32]))
    fields["parent"] = draw(st.sampled_from([None, 5, b"y" * 32]))
    fields["token_ids"] = draw(st.lists(st.integers(0, (1 << 32) - 1), max_size=4))
    fields["extra_keys"] = draw(st.sampled_from([None, [None, ["adapter", ["image", 3]]]]))
    return stored(draw(wire_hashes()), **fields)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Any, ...]:
    what = draw(st.sampled_from(["apply"] * 10 + ["remove", "clear"]))
    worker = draw(WORKERS)
    if what == "remove":
        return what, worker
    if what == "clear":
        tier = draw(st.sampled_from([None, "device", "host", "disk", "pool"]))
        return what, worker, draw(st.sampled_from([None, 0, 1])), tier
    return what, worker, draw(st.lists(events(), max_size=4)), draw(RANKS), draw(st.booleans())
