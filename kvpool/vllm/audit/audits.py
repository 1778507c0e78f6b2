"""``Audits``: of some hits the last block is withheld, computed, and compared with what the pool has.

One block audits the prefix in front of it: attention mixes that into its keys and values, from the second layer on.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput

from kvpool import metrics
from kvpool.metrics import Counters
from kvpool.vllm.audit.floor import EXPERTS, STATES, Floor, Judged
from kvpool.vllm.engine import internals
from kvpool.vllm.geometry import Geometry
from kvpool.vllm.plan import AuditedPart, BlockRef, PoolMetadata, PoolWorkerMetadata
from kvpool.vllm.requests import Asked

logger = init_logger("vllm.kvpool")

LEAST_PAUSE_S = 1.0  # between two audits, unless every hit is to be audited
WHILE_LEARNING = 16  # times as many audits, until the floor is known
MAX_OPEN = 8


class Audited(NamedTuple):
    """An ended audit. ``writers``: of the compared record, and of what the request loaded if that may be wrong, too."""

    number: int
    asked: Asked
    judged: Judged
    writers: frozenset[bytes]
    seconds: float


@dataclass
class _Audit:
    asked: Asked
    end_tokens: int  # of the hit as it was found: of the withheld block
    began_s: float
    writers: set[bytes] = field(default_factory=set)  # of what it loads
    blocks: list[int] = field(default_factory=list)  # held, by the engine's ids
    unstaged: int = 0  # ranks that may still read them
    is_outdated: bool = False  # of other weights
    open: int = 0  # ranks that have not said what they found; 0: it is not planned yet
    parts: list[AuditedPart] = field(default_factory=list)


class Audits:
    """``share``: of hits; 0: none. ``random``: from 0 to 1. ``writer``: this engine's name in what it ``stores``."""

    def __init__(
        self,
        geometry: Geometry,
        *,
        share: float,
        writer: bytes,
        stores: bool,
        counters: Counters,
        clock: Callable[[], float],
        random: Callable[[], float],
    ) -> None:
        self._geometry, self._share, self._counters = geometry, share, counters
        self._clock, self._random = clock, random
        self.counts: Counter[str] = Counter()  # by verdict
        width = STATES if any(group.state for group in geometry.groups) else 1.0
        width = EXPERTS if geometry.has_experts else width
        self._floor = Floor(writer if stores else None, width=width)
        self._audits: dict[int, _Audit] = {}
        self._of_request: dict[str, int] = {}
        self._number = 0
        self._last_at = -LEAST_PAUSE_S
        self._block_pool: BlockPool | None = None
        self._groups = [
            index for index, group in enumerate(geometry.groups) if not (group.scratch or group.state)
        ]

    def bind(self, block_pool: BlockPool) -> None:
        self._block_pool = block_pool

    def shortened(self, present: Sequence[bytes], local_tokens: int, hit_tokens: int) -> int:
        """Where to end a hit: before its last block, if it is to be audited."""
        if (
            not self._share
            or not self._groups
            or len(self._audits) >= MAX_OPEN
            or hit_tokens % self._geometry.align_tokens
            or (self._share < 1 and self._clock() < self._last_at + LEAST_PAUSE_S)
            or self._random() >= self._share * (1 if self._floor.is_known else WHILE_LEARNING)
        ):
            return hit_tokens
        shorter = self._geometry.longest_hit(present, local_tokens=local_tokens, max_tokens=hit_tokens - 1)
        # States may be rarer than blocks: a request computes one block more, or none.
        loads = shorter > local_tokens and shorter >= hit_tokens - self._geometry.align_tokens
        return shorter if loads else hit_tokens

    def begin(self, asked: Asked, end_tokens: int) -> None:
        """A request loads what is in front of the block that ends there, computes it, and the pool has it."""
        self._number += 1
        self._last_at = self._clock()
        self._audits[self._number] = _Audit(asked, end_tokens, self._last_at)
        self._of_request[asked.request.request_id] = self._number

    def end(self, request_id: str) -> None:
        """A request is gone, or begins anew. What its workers already have goes on."""
        if (number := self._of_request.pop(request_id, None)) is not None and not self._audits[number].open:
            del self._audits[number]
            self._count("gone")

    @property
    def waiting(self) -> int:
        """Requests that have not computed their blocks."""
        return len(self._of_request)

    def waits_for(self, request_id: str) -> bool:
        return request_id in self._of_request

    def is_open(self, request_id: str) -> bool:
        """Whether what a request computes may prove wrong."""
        return any(audit.asked.request.request_id == request_id for audit in self._audits.values())

    def wants_steps(self) -> bool:
        """Whether an idle engine should step: a step reports what its workers found, and frees the blocks."""
        return any(audit.open for audit in self._audits.values())

    def plan(
        self,
        step: PoolMetadata,
        output: SchedulerOutput,
        asked: Asked,
        computed_tokens: int,
        proven_tokens: int,
    ) -> None:
        """Send the block with this step, if a request has computed it by its end."""
        number = self._of_request.get(asked.request.request_id)
        if number is None or computed_tokens < (audit := self._audits[number]).end_tokens:
            return
        del self._of_request[asked.request.request_id]
        tables = internals.block_tables(output, asked.request.request_id)
        refs = self._refs(asked, audit, tables) if proven_tokens >= audit.end_tokens else []
        if not refs or self._block_pool is None:
            del self._audits[number]
            self._count("gone")
            return
        audit.blocks = [block for ref in refs for block in ref.block_ids]
        audit.open = audit.unstaged = self._geometry.ranks
        internals.hold(self._block_pool, audit.blocks)
        step.audits[number] = refs

    def _refs(self, asked: Asked, audit: _Audit, tables: Sequence[Sequence[int]] | None) -> list[BlockRef]:
        refs: list[BlockRef] = []
        if tables is None or asked.pool_hash is None:
            return refs
        for index in self._groups:
            group = self._geometry.groups[index]
            record = audit.end_tokens // group.record_tokens - 1
            hashes = self._geometry.record_hashes(asked.request.block_hashes, group)
            if (ids := group.blocks_held(tables[index], record)) is not None:
                refs.append(BlockRef(asked.pool_hash(hashes[record]), index, ids, asked.adapter_weights))
        return refs

    def update(self, report: PoolWorkerMetadata) -> list[Audited]:
        """Take what the workers found. Returns what has ended with it and says something."""
        for name, writers in report.load_writers.items():
            if (number := self._of_request.get(name)) is not None:
                self._audits[number].writers |= writers
        for number, ranks in report.audit_staged.items():
            if (audit := self._audits.get(number)) is not None:
                audit.unstaged -= ranks
                if audit.unstaged == 0 and self._block_pool is not None:
                    blocks, audit.blocks = audit.blocks, []
                    internals.release(self._block_pool, blocks)
        for number, parts in report.audited.items():
            if (audit := self._audits.get(number)) is not None:
                audit.parts += parts
        ended: list[Audited] = []
        for number, ranks in report.audit_ended.items():
            if (audit := self._audits.get(number)) is not None:
                audit.open -= ranks
                if audit.open == 0:
                    del self._audits[number]
                    was_known = self._floor.is_known
                    judged = Judged("gone") if audit.is_outdated else self._floor.judge(audit.parts)
                    if self._floor.is_known and not was_known:
                        logger.info(
                            "kvpool: audits are judged from now on: the same block, computed twice, differs by up to "
                            "%.2g of its norm here (%s)",
                            *self._floor.largest[::-1],
                        )
                    self._count(judged.verdict)
                    if judged.layers:
                        ended.append(self._said(number, audit, judged))
        return ended

    def _said(self, number: int, audit: _Audit, judged: Judged) -> Audited:
        self._counters.observe(metrics.AUDIT_DISTANCE, judged.distance)
        seconds = self._clock() - audit.began_s
        prefix = set() if judged.what == "record" else audit.writers  # then nothing is known of it
        return Audited(number, audit.asked, judged, judged.writers | prefix, seconds)

    def leave(self) -> None:
        """What is under way is of other weights than what comes next, and so is the floor."""
        for audit in self._audits.values():
            audit.is_outdated = True
        self._floor.forget()

    def _count(self, verdict: str) -> None:
        self._counters.add(metrics.AUDITS, 1, verdict)
        self.counts[verdict] += 1
