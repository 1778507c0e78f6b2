"""What the index must answer: dictionaries of counters, no cleverness, and the history of each publisher."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpool import PrefixIndex
from kvpool.index import Match, Row
from tests.support.feeds import Misbehaving
from tests.support.wire import batch, cleared, packed64, removed, stored

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


def device_blocks(index: PrefixIndex, prompt: list[int], worker: str = "w") -> int:
    return max(
        (row.device_blocks for row in index.match(packed64(prompt)) if row.worker == worker), default=0
    )


PROMPTS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [9, 10], [4, 5]]
Events = list[dict[str, Any]]


def stores(chance: random.Random, hybrid: bool) -> Events:
    prompt = chance.choice(PROMPTS)
    begin = chance.choice([0, chance.randrange(len(prompt))])
    blocks = prompt[begin : chance.choice([len(prompt), chance.randint(begin + 1, len(prompt))])]
    fields: dict[str, Any] = {
        "parent": prompt[begin - 1] if begin else chance.choice([None, 99]),
        "medium": chance.choice(["GPU", "GPU", "GPU", None, "CPU", "DISK"]),
        "token_ids": list(range(16 * len(blocks))) if chance.random() < 0.5 else [],
    }
    if not hybrid:
        return [stored(blocks, **fields)]
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 33, "group_idx": 1}
    seen = chance.choice([0, chance.randrange(len(blocks))])
    return [
        stored(blocks, group_idx=0, kv_cache_spec_kind="full_attention", **fields),
        stored(blocks[seen:], **fields | window | {"parent": blocks[seen - 1] if seen else fields["parent"]}),
    ]


def removals(chance: random.Random, hybrid: bool) -> Events:
    """Of the end of a prompt, as engines do; or of anything."""
    prompt = chance.choice(PROMPTS)
    blocks = chance.choice([prompt[chance.randrange(len(prompt)) :], chance.sample(prompt, 1)])
    group = chance.choice([0, 1]) if hybrid else None
    return [removed(blocks, medium=chance.choice(["GPU", "GPU", "GPU", "CPU"]), group_idx=group)]


def telling(chance: random.Random, hybrid: bool) -> Events:
    """The events of one batch."""
    told: Events = []
    for _ in range(chance.randint(1, 3)):
        what = chance.random()
        if what < 0.55:
            told += stores(chance, hybrid)
        else:
            told += removals(chance, hybrid) if what < 0.95 else [cleared()]
    return told


@dataclass
class Life:
    """One start of a publisher: what it has told, by number. None: a batch that nobody can read."""

    told: list[Events | None] = field(default_factory=list)
    forgot: bool = False  # it has dropped batches, so an index may have had to begin in the middle
    _states: dict[tuple[int, int], Model] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """The number that a row names when it knows everything."""
        return 0 if not self.told or self.told[-1] is None else len(self.told) - 1

    def whole_from(self, number: int) -> int:
        """Where a state as of ``number`` begins that lacks nothing: behind the last batch that is not one."""
        return max((at + 1 for at, events in enumerate(self.told[: number + 1]) if events is None), default=0)

    def credit(self, first: int, number: int, prompt: Sequence[int]) -> tuple[int, int]:
        """(device, local) blocks after the batches from ``first`` to ``number``."""
        state = self._states.get((first, number))
        if state is None:
            state = self._states[first, number] = Model(reuse_reports=True, block_tokens=16)
            for events in self.told[first : number + 1]:
                state.apply("w", 0, events or [])
        return next(((row.device_blocks, row.local_blocks) for row in state.match(prompt)), (0, 0))

    def allows(self, row: Row, prompt: Sequence[int]) -> bool:
        """Whether a row that is not stale is what was held after the batch that it names."""
        said = (row.device_blocks, row.local_blocks)
        if row.sequence == 0 and said == (0, 0):
            return True  # before the first batch
        if row.sequence >= len(self.told):
            return False
        whole = self.whole_from(row.sequence)
        firsts = range(whole, row.sequence + 1) if self.forgot else (whole,)
        return any(self.credit(first, row.sequence, prompt) == said for first in firsts)

    def is_known_to_the_end(self, row: Row, prompt: Sequence[int], kept_from: int) -> bool:
        """Whether a row says what is held now; the publisher has kept its batches from ``kept_from`` on."""
        whole = self.whole_from(len(self.told) - 1)
        firsts = range(whole, max(whole, kept_from) + 1) if self.forgot else (whole,)
        said = (row.device_blocks, row.local_blocks)
        return row.sequence == self.last and any(
            self.credit(first, len(self.told) - 1, prompt) == said for first in firsts
        )


class Source:
    """A rank of a worker with its publisher, and all that it ever told."""

    def __init__(self, worker: str, rank: int) -> None:
        self.worker, self.rank = worker, rank
        self.hybrid = worker == "hybrid"
        self.publisher = Misbehaving()
        self.lives = [Life()]
        self.late: list[tuple[int, bytes]] = []  # sent by and by
        # By replica: the life that it is known to speak of by now, so that no answer may be of one before.
        self.lives_seen: dict[int, int] = {}
        self._told = 0

    @property
    def life(self) -> Life:
        return self.lives[-1]

    def tell(self, events: Events | None, *, fate: str) -> None:
        self._told += 1
        number = len(self.life.told)
        payload = (
            batch(*(events or []), dp_rank=self.rank, at_s=self._told) if events is not None else b"\x92\x00"
        )
        if events is None:
            payload += self._told.to_bytes(4, "big")  # no two batches are alike
        self.life.told.append(events)
        self.publisher.publish(payload, lost=fate != "heard" and fate != "twice")
        if fate == "twice":
            self.again(number, payload)
        elif fate == "late":
            self.late.append((number, payload))

    def again(self, number: int, payload: bytes) -> None:
        self.publisher.send(b"", number.to_bytes(8, "big"), payload)

    def restart(self) -> None:
        """A process ends and another one takes its place."""
        self.publisher.close()
        self.publisher = Misbehaving(self.publisher.ports)
        self.lives.append(Life())
        self.late.clear()

    def check(self, replica: int, row: Row, prompt: Sequence[int]) -> None:
        if row.stale:
            assert (row.device_blocks, row.local_blocks) == (0, 0), f"credited while stale: {row}"
            return
        seen = self.lives_seen.get(replica, 0)
        allowed = [at for at in range(seen, len(self.lives)) if self.lives[at].allows(row, prompt)]
        assert allowed, f"replica {replica} answers {row} of {prompt}; told since: {self.lives[seen:]}"
        self.lives_seen[replica] = allowed[0]
