"""What the index must answer, in plain Python: dictionaries of counters, and no cleverness."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from kvpool.index import Match

TIER = {None: "device", "GPU": "device", "CPU": "host", "DISK": "disk", "STORAGE": "pool"}
COLUMNS = (
    ("device",), ("host",), ("disk",), ("pool",), ("device", "host", "disk"), ("device", "host", "disk", "pool"),
)  # fmt: skip
IN_PART = ("sliding_window", "sliding_window_mla", "chunked_local_attention", "mamba")


def number(block_hash: int | bytes) -> int:
    return block_hash if isinstance(block_hash, int) else int.from_bytes(block_hash[-8:], "big")


class Group:
    """What one rank of one worker holds of one KV-cache group."""

    def __init__(self) -> None:
        self.whole = True
        self.copies: dict[str, Counter[int]] = defaultdict(Counter)  # by tier

    def holds(self, block: int, tiers: Sequence[str]) -> bool:
        return any(self.copies[tier][block] for tier in tiers)


class Model:
    def __init__(self, *, reuse_reports: bool) -> None:
        self.reuse_reports = reuse_reports
        self.workers: dict[str, dict[int, dict[int, Group]]] = {}

    def apply(self, worker: str, rank: int, events: Sequence[dict[str, Any]]) -> None:
        ranks = self.workers.setdefault(worker, {})
        for event in events:
            groups = ranks.setdefault(rank, {})
            if event["type"] == "AllBlocksCleared":
                medium = event.get("medium")
                if medium in (None, "GPU"):
                    self.clear(worker, rank, ("device",) if medium else ("device", "host", "disk"))
                continue
            blocks = [number(block_hash) for block_hash in event["block_hashes"]]
            tier = TIER[event.get("medium")]
            index = event.get("group_idx") or 0
            if event["type"] == "BlockRemoved":
                copies = groups[index].copies[tier] if index in groups else Counter()
                for block in blocks:
                    copies[block] = max(0, copies[block] - 1)
                continue
            group = groups.setdefault(index, Group())
            kind = event.get("kv_cache_spec_kind")
            if kind is not None:
                group.whole = kind not in IN_PART
            if not group.whole:
                group.copies.clear()
                continue
            copies = group.copies[tier]
            from_root = self.reuse_reports and event.get("parent_block_hash") is None
            for block in blocks:
                adds_copies = tier == "device" and not from_root
                copies[block] = copies[block] + 1 if adds_copies else max(1, copies[block])

    def clear(self, worker: str, rank: int | None, tiers: Sequence[str]) -> None:
        for number_, groups in self.workers.get(worker, {}).items():
            for group in groups.values() if rank in (None, number_) else ():
                for tier in tiers:
                    group.copies[tier].clear()

    def remove_worker(self, worker: str) -> None:
        self.workers.pop(worker, None)

    def blocks(self) -> int:
        return len(
            {
                block
                for ranks in self.workers.values()
                for groups in ranks.values()
                for group in groups.values()
                for copies in group.copies.values()
                for block, count in copies.items()
                if count
            }
        )

    def match(self, prompt: Sequence[int], workers: Sequence[str] | None = None) -> set[Match]:
        rows = set()
        for worker, ranks in self.workers.items():
            if workers is not None and worker not in workers:
                continue
            for rank, groups in ranks.items():
                whole = [group for group in groups.values() if group.whole]
                counts = [
                    min((_leading(group, prompt, tiers) for group in whole), default=0) for tiers in COLUMNS
                ]
                if counts[-1]:
                    rows.add(Match(worker, rank, *counts))
        return rows


def _leading(group: Group, prompt: Sequence[int], tiers: Sequence[str]) -> int:
    for count, block in enumerate(prompt):
        if not group.holds(block, tiers):
            return count
    return len(prompt)
