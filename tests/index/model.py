"""What the index must answer, in plain Python: dictionaries of counters, and no cleverness."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from kvpool.index import Match

TIER = {None: "device", "GPU": "device", "CPU": "host", "DISK": "disk", "STORAGE": "pool"}
COLUMNS = (
    ("device",), ("host",), ("disk",), ("pool",), ("device", "host", "disk"), ("device", "host", "disk", "pool"),
    ("device", "host"),
)  # fmt: skip
ANY = 5
WINDOWS = ("sliding_window", "sliding_window_mla")
IN_PART = (*WINDOWS, "chunked_local_attention", "mamba")


def number(block_hash: int | bytes) -> int:
    return block_hash if isinstance(block_hash, int) else int.from_bytes(block_hash[-8:], "big")


class Group:
    """What one rank of one worker holds of one KV-cache group."""

    def __init__(self) -> None:
        self.in_part = False
        self.last: int | None = None  # blocks at the end of a prefix that it needs; None: all
        self.stride = 1  # hashed blocks in one of its own
        self.copies: dict[str, Counter[int]] = defaultdict(Counter)  # by tier

    def holds(self, block: int, tiers: Sequence[str]) -> bool:
        return any(self.copies[tier][block] for tier in tiers)

    def learn(self, event: dict[str, Any], block_tokens: int | None) -> None:
        size = event.get("block_size") or 0
        if block_tokens is not None and size % block_tokens == 0:
            self.stride = max(self.stride, size // block_tokens)
        kind = event.get("kv_cache_spec_kind")
        if kind is None:
            return
        last = 1 if kind == "mamba" else None
        if kind in WINDOWS:
            window = event.get("kv_cache_spec_sliding_window")
            last = max(1, math.ceil((window - 1) / size)) if window and size else self.last
        if (kind in IN_PART, last) != (self.in_part, self.last):
            self.in_part, self.last = kind in IN_PART, last
            self.copies["device"].clear()

    def can_go_on(self, prompt: Sequence[int], tiers: Sequence[str]) -> bool:
        """Whether an engine could go on behind this prefix, as far as the group is concerned."""
        blocks = prompt[self.stride - 1 :: self.stride]
        needed = blocks if self.last is None else blocks[-self.last :]
        return len(prompt) % self.stride == 0 and all(self.holds(block, tiers) for block in needed)

    def continues(self, prompt: Sequence[int], local: int) -> bool:
        """Whether an engine that has the first ``local`` blocks could load the others of the prompt from here."""
        blocks = prompt[self.stride - 1 :: self.stride]
        begin = local // self.stride
        if self.last is not None:
            begin = max(begin, len(blocks) - self.last)
        return len(prompt) % self.stride == 0 and all(self.holds(one, ("pool",)) for one in blocks[begin:])


class Model:
    def __init__(self, *, reuse_reports: bool, block_tokens: int | None = None) -> None:
        self.reuse_reports = reuse_reports
        self.block_tokens = block_tokens
        self.workers: dict[str, dict[int, dict[int, Group]]] = {}

    def apply(
        self, worker: str, rank: int, events: Sequence[dict[str, Any]], pool: str | None = None
    ) -> None:
        """``pool``: who holds what is said of the pool; None: the worker."""
        self.workers.setdefault(worker, {})
        for event in events:
            elsewhere = pool is not None and TIER.get(event.get("medium")) == "pool"
            holder, its_rank = (pool, 0) if elsewhere and pool is not None else (worker, rank)
            groups = self.workers.setdefault(holder, {}).setdefault(its_rank, {})
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
            if (
                tier != "pool" or elsewhere
            ):  # in a worker's own name its blocks may be larger than the engine's
                group.learn(event, self.block_tokens)
            copies = group.copies[tier]
            may_report = self.reuse_reports and tier == "device" and event.get("parent_block_hash") is None
            if may_report and (group.in_part or group.stride > 1):
                sure = (group.last or 0) if group.stride == 1 else 0
                blocks = blocks[max(0, len(blocks) - sure) :]
            for block in blocks:
                adds_copies = tier == "device" and not may_report
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

    def held_by(self, worker: str) -> dict[str, int]:
        groups = [group for ranks in self.workers.get(worker, {}).values() for group in ranks.values()]
        return {
            tier: sum(1 for group in groups for count in group.copies[tier].values() if count)
            for tier in ("device", "host", "disk", "pool")
        }

    def match(self, prompt: Sequence[int], workers: Sequence[str] | None = None) -> set[Match]:
        rows = set()
        for worker, ranks in self.workers.items():
            if workers is not None and worker not in workers:
                continue
            for rank, groups in ranks.items():
                counts = [_usable(list(groups.values()), prompt, tiers) for tiers in COLUMNS]
                if counts[ANY]:
                    rows.add(Match(worker, rank, *counts))
        return rows

    def loadable(self, worker: str, rank: int, pool: str, prompt: Sequence[int]) -> int:
        """Leading blocks that a rank need not compute: what it holds itself, and from there on what the pool does."""
        local = _usable(list(self.workers.get(worker, {}).get(rank, {}).values()), prompt, COLUMNS[4])
        parts = self.workers.get(pool, {}).get(0, {}).values()
        for count in range(len(prompt), local, -1):
            if parts and all(part.continues(prompt[:count], local) for part in parts):
                return count
        return local


def _usable(groups: Sequence[Group], prompt: Sequence[int], tiers: Sequence[str]) -> int:
    for count in range(len(prompt), 0, -1):
        if groups and all(group.can_go_on(prompt[:count], tiers) for group in groups):
            return count
    return 0
