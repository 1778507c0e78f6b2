"""``Geometry``: how an engine's KV cache is cut into groups, blocks and records, and what follows from it.

The connector makes it once, and both halves get it. Pure functions over block indices: nothing here uses a store, a
tensor or a clock.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class Group:
    """A group of layers with a common block table.

    ``window``: tokens that a query sees, including itself. ``chunk``: a query sees the tokens of its own chunk of
    so many. None of them: all tokens before it. The pool stores ``blocks_per_record`` neighbouring blocks as a
    record, under the last one's hash. ``latent``: MLA, with a latent vector per token. ``state``: recurrent layers,
    whose block holds all that they keep of the tokens up to its end: a window of two tokens, so that only a prefix's
    last block is needed. ``copies``: number of neighbouring ranks with equal bytes; with MLA, a whole pipeline stage.
    ``parts``: that a rank makes of its heads in each record, one key each (``kvpool.vllm.engine.parts``).
    ``reads_ahead``: drafts' layers compute a token with the next one, which a block's hash does not cover. So a block
    is stored, and a hit ends in front of it, when the token behind it is known. ``scratch``: its blocks are one
    request's alone: a ring, or a window that the engine fills again behind each hit. Never stored.
    """

    block_tokens: int
    window: int | None = None
    blocks_per_record: int = 1
    latent: bool = False
    state: bool = False
    copies: int = 1
    parts: int = 1
    chunk: int | None = None
    reads_ahead: bool = False
    scratch: bool = False

    @property
    def record_tokens(self) -> int:
        return self.block_tokens * self.blocks_per_record

    @property
    def needs_all(self) -> bool:
        """Whether a query sees every token before it."""
        return self.window is None and self.chunk is None and not self.scratch

    @property
    def is_ring(self) -> bool:
        """Whether a request has a single block, which it writes in circles."""
        return self.scratch and self.window is None

    def first_seen(self, tokens: int) -> int:
        """The first token that the query behind ``tokens`` tokens sees."""
        if self.window is not None:
            return max(0, tokens - self.window + 1)
        return 0 if self.chunk is None else tokens // self.chunk * self.chunk

    def most_seen(self, tokens: int) -> int:
        """The most of ``tokens`` tokens before it that any query sees."""
        return min(tokens, (self.window or self.chunk or tokens + 1) - 1)

    def own_parts(self, rank: int) -> range:
        """The numbers, in pool keys, of the parts of a record that ``rank`` holds."""
        first = rank // self.copies * self.parts
        return range(first, first + self.parts)

    def stored_by(self, rank: int) -> bool:
        """Whether ``rank`` stores its parts: the first of the ranks with equal bytes does."""
        return rank % self.copies == 0

    def all_parts(self, ranks: int) -> range:
        """The numbers of all parts of a record, for an engine of ``ranks`` ranks."""
        return range(ranks // self.copies * self.parts)

    def records_to_load(self, local_tokens: int, hit_tokens: int) -> range:
        """Indices of the records that it lacks to resume at ``hit_tokens``, given ``local_tokens`` computed.

        Those of the tokens that the next query sees (``first_seen``). ``local_tokens`` is a multiple of the block
        size, maybe inside a record; a part of a record behind ``hit_tokens`` is left out.
        """
        if self.scratch:
            return range(0)
        first = max(local_tokens, self.first_seen(hit_tokens)) // self.record_tokens
        return range(first, hit_tokens // self.record_tokens)

    def records_to_store(self, already: int, computed_tokens: int, hashed_records: int) -> range:
        """Indices of the records that a step completes and no earlier plan covers.

        ``already``: leading records planned before, or from a cache. ``computed_tokens`` may include drafts that
        will be rejected. A record is stored once its hash is known: hashes cover accepted tokens only, so no
        rejected draft is in it. Under asynchronous scheduling that may be a step later.
        """
        return range(already, max(already, min(computed_tokens // self.record_tokens, hashed_records)))

    def blocks_lacking(self, table: Sequence[int], record: int, local_tokens: int) -> tuple[int, ...]:
        """A record's target blocks, given ``local_tokens``; 0: the engine has the block, or keeps none here."""
        start = record * self.blocks_per_record
        ids = tuple(table[start : start + self.blocks_per_record])
        held = local_tokens // self.block_tokens - start
        return ids if held <= 0 else (0,) * held + ids[held:]

    def blocks_held(self, table: Sequence[int], record: int) -> tuple[int, ...] | None:
        """A record's blocks in a block table; None unless the engine keeps all of them."""
        start = record * self.blocks_per_record
        ids = tuple(table[start : start + self.blocks_per_record])
        return ids if len(ids) == self.blocks_per_record and all(ids) else None

    def is_resumed_at(self, tokens: int, prompt_tokens: int, stop_tokens: int) -> bool:
        """Whether requests are likely to resume at ``tokens``, where a request has a state, which is large.

        They do at the end of its prompt, or one token before it, behind its answer, and where prompts part
        (``stop_tokens``); not at the other ends of steps, which depend on what else was computed. A hit leaves a
        token to compute: of whole blocks all but the last. With drafts that read ahead it ends a block earlier.
        """
        behind = self.block_tokens * (2 if self.reads_ahead else 1)
        return tokens >= prompt_tokens - behind or tokens == stop_tokens

    def usable_tokens(self, there: bytes, local_tokens: int, hit_tokens: int) -> int:
        """The longest hit up to ``hit_tokens`` that the group allows, ignoring alignment; ``there``: its records."""
        if self.scratch:
            return hit_tokens
        hit_tokens = min(hit_tokens, len(there) * self.record_tokens)
        if self.reads_ahead and not self.state:
            hit_tokens = max(0, there.rfind(1, 0, hit_tokens // self.record_tokens + 1)) * self.record_tokens
        needed = self.records_to_load(local_tokens, hit_tokens)
        first = local_tokens // self.record_tokens
        if not needed or there.find(0, needed.start, needed.stop) < 0:
            return hit_tokens
        # Either everything after the local tokens is there, or a full window, or a chunk's beginning, further on.
        end = there.find(0, needed.start if self.chunk is not None else first, needed.stop)
        if self.window is not None:
            window_records = -(-(self.window - 1) // self.record_tokens)
            start = there.rfind(b"\1" * window_records, first, needed.stop)
            end = max(end, start + window_records if start >= 0 else 0)
        return end * self.record_tokens


class Room(NamedTuple):
    """Blocks of a request with a load. ``behind``: that it takes besides, to be computed from nothing."""

    loaded: int  # with the local blocks before them, which might be free
    behind: int


@dataclass(frozen=True)
class Geometry:
    """Of one engine, over its ``ranks`` in ``pipeline_parallel`` stages.

    ``align_tokens``: hits end at multiples of it; given the engine's own, it becomes a multiple of every group's
    records, too. ``hash_block_tokens``: tokens of a block hash, which ``hash_algorithm`` makes. ``match_tokens``: of
    hits that end inside of a block; 0: none does. ``step_tokens``: most tokens of a step. ``has_experts``: the model
    chooses them for each token.
    """

    groups: tuple[Group, ...]
    ranks: int = 1
    pipeline_parallel: int = 1
    align_tokens: int = 1
    hash_algorithm: str = ""
    hash_block_tokens: int = 1
    match_tokens: int = 0
    step_tokens: int = 0
    has_experts: bool = False

    def __post_init__(self) -> None:
        align_tokens = math.lcm(self.align_tokens, *(group.record_tokens for group in self.groups))
        object.__setattr__(self, "groups", tuple(self.groups))
        object.__setattr__(self, "align_tokens", align_tokens)
        object.__setattr__(self, "match_tokens", self.match_tokens if self._has_tails() else 0)

    def _has_tails(self) -> bool:
        """Whether hits that end at multiples of ``match_tokens`` may end inside of a block.

        Such a tail is a record, too: the block that holds it, under the hash of its end. What a block holds behind it
        is computed again. For states beside full attention, with blocks of one size, as in vLLM's own offloading.
        Where the engine fills a window again behind a hit, it cuts hits to whole blocks.
        """
        groups = [group for group in self.groups if not group.scratch]
        sizes = {group.block_tokens for group in groups}
        return (
            not self.refilled_tokens
            and len(sizes) == 1
            and 0 < self.match_tokens < min(sizes)
            and any(group.state for group in groups)
            and all(
                (group.state or group.needs_all) and group.blocks_per_record == 1 and not group.reads_ahead
                for group in groups
            )
        )

    @property
    def has_tails(self) -> bool:
        return self.match_tokens > 0

    @property
    def least_tokens(self) -> int:
        """Of a hit."""
        return self.match_tokens or self.align_tokens

    @property
    def first(self) -> Group:
        """The first group in the pool."""
        return next(group for group in self.groups if not group.scratch)

    @property
    def refilled_tokens(self) -> int:
        """That the engine computes again behind a hit, to fill a window."""
        return max((group.window or 0 for group in self.groups if group.scratch), default=0)

    @functools.cached_property
    def reached(self) -> tuple[bytes, ...]:
        """By group, which records hits may need, for the records of every ``align_tokens`` tokens: 1 or 0.

        Hits end at multiples of ``align_tokens``, so a window sees the last records in front of them only; which is
        what vLLM keeps itself (``SlidingWindowManager.reachable_block_mask``).
        """
        return tuple(map(self._reached, self.groups))

    def _reached(self, group: Group) -> bytes:
        records = self.align_tokens // group.record_tokens
        if group.scratch:
            return bytes(records)
        if group.window is None:  # chunks may begin anywhere
            return b"\1" * records
        first = max(0, self.align_tokens - group.window + 1) // group.record_tokens
        behind = group.reads_ahead and not group.state
        return bytes(record >= first or (behind and record == 0) for record in range(records))

    def with_parts(self, parts: Mapping[int, int]) -> Geometry:
        """With so many parts of a rank's records, by group."""
        groups = (replace(one, parts=parts.get(at, one.parts)) for at, one in enumerate(self.groups))
        return replace(self, groups=tuple(groups))

    def aligned(self, tokens: int) -> int:
        """The last place up to ``tokens`` where a hit of whole blocks may end."""
        return tokens // self.align_tokens * self.align_tokens

    def record_hashes(self, block_hashes: Sequence[bytes], group: Group) -> Sequence[bytes]:
        """The hashes of a request's records in a group: each record's last block hash; none of scratch."""
        if group.scratch:
            return ()
        step = group.record_tokens // self.hash_block_tokens
        return block_hashes if step == 1 else block_hashes[step - 1 :: step]

    def longest_hit(self, present: Sequence[bytes], *, local_tokens: int, max_tokens: int) -> int:
        """The most leading tokens after which the engine can resume, from its own cache and the pool.

        ``present[g][i]``: 1: every part of record ``i`` of group ``g`` is in the pool, else 0. Returns a multiple of
        ``align_tokens`` up to ``max_tokens``, or else ``local_tokens``. Searches for zeros make a million tokens take
        microseconds.
        """
        return self._longest_hit(list(zip(self.groups, present, strict=True)), local_tokens, max_tokens)

    def _longest_hit(self, groups: Sequence[tuple[Group, bytes]], local_tokens: int, max_tokens: int) -> int:
        hit = max_tokens
        while True:
            hit = self.aligned(hit)
            if hit <= local_tokens:
                return local_tokens
            usable = min(group.usable_tokens(there, local_tokens, hit) for group, there in groups)
            if usable == hit:
                return hit
            hit = usable

    def junction(self, present: Sequence[bytes], max_tokens: int) -> int:
        """Where prompts part whose blocks are in the pool and whose states may not be; 0 without states."""
        kept = [one for one in zip(self.groups, present, strict=True) if not one[0].state]
        return 0 if len(kept) == len(self.groups) else self._longest_hit(kept, 0, max_tokens)

    def blocks_of(self, tokens: int) -> int:
        """The blocks that so many tokens fill, over all groups."""
        return sum(-(-tokens // group.block_tokens) for group in self.groups if not group.is_ring)

    def room_of_load(self, hit_tokens: int, tokens: int) -> Room:
        """The blocks that a prompt of ``tokens`` takes with a load up to ``hit_tokens``."""
        loaded = needed = 0
        for group in self.groups:
            if group.is_ring:
                loaded, needed = loaded + 1, needed + 1
                continue
            first, most = group.first_seen(hit_tokens) // group.block_tokens, -(-tokens // group.block_tokens)
            if not group.needs_all:
                most = min(most, -(-(group.most_seen(tokens) + self.step_tokens) // group.block_tokens) + 1)
            loaded += (held := -(-hit_tokens // group.block_tokens) - first)
            needed += max(held, most)
        return Room(loaded, needed - loaded)
