"""``Rank``: one data-parallel rank of one start of a worker, as an index follows it.

A writer of the rank's blocks makes ``version`` odd, changes, and makes it even, under the rank's lock. A
reader without the lock sees by it whether its reads belong together: see ``Partition.answer``.

Threads: any. Fields are read without the lock, singly, and written under it.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

from kvpool import _native
from kvpool.discovery.worker import Position, Publisher, Worker
from kvpool.index.answer import PublisherStatus
from kvpool.index.fleet.table import ClearedTooOften, Content, PrefixIndex

# vLLM 0.33 hashes a block of such an engine with the tokens behind it (vllm/config/vllm.py,
# num_hash_lookahead_tokens), and its events name them.
LOOKAHEAD_OFF = 'add "disable_lookahead_block_hashes": true to --speculative-config, or a connector'
LOOKAHEAD = (
    f"its hashes cover tokens behind their blocks (EAGLE or MTP), so no prompt matches: {LOOKAHEAD_OFF}"
)

ONE_SEED = "set the same PYTHONHASHSEED for all workers and the index"
ASLEEP = "asleep, or no event since it woke"
UNHASHED = "no prompt in tokens or text matches its blocks"

MAX_PROBLEM_CHARS = 300
MAX_STALENESS_MS = (1 << 32) - 1

logger = logging.getLogger("kvpool.index")

_starts = itertools.count(1)


class RankKey(NamedTuple):
    """One start of a rank. ``start``: of this process alone, never used again."""

    worker_id: str
    dp_rank: int
    start: int


def batch_digest(payload: bytes) -> int:
    """Identifies a batch: never 0, equal in every process."""
    return _native.checksum(payload) or 1


class Rank(_native.RankState):
    """``holder``: its name in the table. Native, for answers: ``version``, ``sequence``, ``stale`` (not
    trusted now) and ``heard_at_ms`` (when it last was known to have every batch). ``clock``: monotonic
    seconds. ``no_hasher``: as in its ``Partition``. ``key``: of its present start; another once its publisher is seen
    to have started anew under the same record.

    After ``leave`` no call changes anything: a late batch does not count for the next start.
    """

    __slots__ = (
        "asked", "awaiting_first_batch", "batch_digest", "batches", "clock", "emptied_at", "gaps", "gone", "holder",
        "incomplete_reason", "incomplete_since_s", "index", "joining", "key", "lock", "malformed", "marked",
        "near", "no_hasher", "pool", "problem", "publisher", "replays", "resets", "unmatchable", "worker",
    )  # fmt: skip

    def __init__(
        self,
        worker: Worker,
        publisher: Publisher,
        index: PrefixIndex,
        holder: str,
        clock: Callable[[], float],
        no_hasher: str = "",
    ) -> None:
        super().__init__()
        self.worker = worker
        self.publisher = publisher
        self.key = RankKey(worker.id, publisher.dp_rank, next(_starts))
        self.index = index
        self.holder = holder
        self.clock = clock
        self.pool, self.near = pool_holder(worker.namespace), near_holder(worker)
        self.no_hasher = no_hasher
        self.lock = threading.Lock()
        self.batch_digest = 0  # of the batch of that number; 0: none
        self.batches = self.gaps = self.replays = self.resets = self.malformed = 0
        self.joining = True  # until the rank is first known to have every batch
        self.heard_at_ms = int(clock() * 1000)
        self.has_feed = bool(publisher.events)
        self.marked = False  # marked stale by the feed
        self.emptied_at = -1  # batches after which it was seen asleep; a later batch ends that
        self.problem = ""
        # Why its blocks are known only in part; empty: complete, once batch 0 or AllBlocksCleared was seen.
        self.incomplete_reason = ""
        self.incomplete_since_s = 0.0
        self.asked = False  # for all its blocks, while some are unknown
        self.awaiting_first_batch = True  # no batch of this incarnation of its publisher was applied
        self.unmatchable = ""  # why no prompt can match its blocks, until its publisher restarts
        self.gone = False

    # ---- state

    @property
    def position(self) -> Position | None:
        """From where another index could go on; None: it needs every batch, or could not recognize the publisher."""
        if not self.batch_digest or not self.publisher.replay or self.unmatchable:
            return None
        return Position(self.sequence, self.batch_digest)

    def status(self, now_s: float) -> PublisherStatus:
        with self.lock:
            sequence, content = self.sequence, self.index.content(self.holder) or Content(0, 0)
            held, evicted = self.index.held_by(self.holder), self.index.evicted(self.holder)
        return PublisherStatus(
            dp_rank=self.publisher.dp_rank,
            sequence=sequence,
            digest=content.digest,
            blocks=content.blocks,
            batches=self.batches,
            gaps=self.gaps,
            replays=self.replays,
            resets=self.resets,
            staleness_ms=staleness_ms(now_s, self.heard_at_ms),
            stale=self.stale,
            problem=self._problem(now_s, evicted),
            device_blocks=held["device"],
            host_blocks=held["host"],
            disk_blocks=held["disk"],
            evicted_blocks=evicted,
        )

    def _problem(self, now_s: float, evicted: int) -> str:
        if self.unmatchable:
            return self.unmatchable
        passing = self._passing_problem(now_s, evicted)
        if self.no_hasher:  # prompts in hashes match, so it is not stale
            return _one_line("; ".join(filter(None, (unhashed(self.no_hasher), passing))))
        return passing

    def _passing_problem(self, now_s: float, evicted: int) -> str:
        if self.incomplete_reason and not self.stale:
            asked = " and asked for all it holds" if self.asked else ""
            return _one_line(
                f"incomplete for {now_s - self.incomplete_since_s:.0f} s{asked}: {self.incomplete_reason}"
            )
        return self.problem or self._why_stale() or _why_less(evicted)

    def _why_stale(self) -> str:
        if self.joining:
            return "not heard from yet" if self.publisher.events else "it publishes no KV events"
        return ASLEEP if self.batches <= self.emptied_at else ""

    @property
    def sleeps(self) -> bool:
        """Whether it is stale for nothing else than its sleep, or that no event came since."""
        why = self.gone or self.marked or self.joining or self.unmatchable
        return not why and self.batches <= self.emptied_at

    # ---- its publisher's reports, through ``Sequence``; any thread, no I/O but a line to the log

    def apply(self, sequence: int, payload: bytes) -> None:
        """Each batch once, in order. Errors: ``MalformedEvents``, with nothing applied; ``ClearedTooOften``."""
        now_s = self.clock()
        completed = found_unmatchable = False
        with self.lock:
            if self.gone:
                return
            self._change_begins()
            try:
                applied = self.index.apply(
                    self.holder, payload, dp_rank=self.publisher.dp_rank, pool=self.pool or None,
                    near=self.near or None,
                )  # fmt: skip
                self.sequence, self.batch_digest = sequence, batch_digest(payload)
                self.batches += 1
                found_unmatchable = bool(applied.lookahead_events) and not self.unmatchable
                if found_unmatchable:
                    self.unmatchable = LOOKAHEAD
                if sequence == 0 or applied.cleared_events:
                    completed = self._complete()
                elif self.awaiting_first_batch:
                    self._set_incomplete(f"its first {sequence} batches were not heard", now_s)
                self.awaiting_first_batch = False
                if not self.joining:  # joining replays old batches
                    self.heard_at_ms = int(now_s * 1000)
            except BaseException as error:
                self.malformed += 1
                if isinstance(error, ClearedTooOften):
                    self._forget()
                raise
            finally:
                self._change_ends()
        if completed:
            logger.info("%s: all it holds is known again", self)
        if found_unmatchable:
            logger.warning("%s is stale: %s", self, self.unmatchable)

    def heard(self) -> None:
        """The publisher reports no batch after the last one applied.

        Until the first call, or ``mark`` with ``stale=False``, the rank is stale.
        """
        self.heard_at_ms = int(self.clock() * 1000)
        self._joined()

    def reset(self, problem: str, *, anew: bool = False) -> None:
        """Forget its blocks, but for the pool's; after a gap also those of its near pool, which it tells again.

        ``anew``: another incarnation of its publisher, which announces all its blocks. Otherwise (a gap that
        nothing closed) the rank still holds blocks and is incomplete.
        """
        with self.lock:
            if self.gone:
                return
            self._change_begins()
            self._forget()
            self.resets += 1
            if anew:
                self.key = self.key._replace(start=next(_starts))
                self.awaiting_first_batch = True
                self.unmatchable = ""
                self._complete()
            else:
                if self.near:
                    self.index.clear(self.near)
                self._set_incomplete(problem, self.clock())
            self.problem = _one_line(problem)
            self._change_ends()
        logger.info("%s: what it held is forgotten: %s", self, self.problem)

    def mark(self, *, stale: bool, problem: str = "") -> None:
        with self.lock:
            if self.gone:
                return
            changed = self.marked != stale
            self._change_begins()
            self.marked = stale
            self.problem = _one_line(problem)
            self._change_ends()
        if not stale:
            self._joined()
        if changed and stale:
            logger.info("%s is stale: %s", self, self.problem)
        elif changed:
            logger.info("%s is followed again", self)

    def gap(self, *, closed: bool) -> None:
        """Batches are missing; or a replay has closed the gap."""
        with self.lock:
            if closed:
                self.replays += 1
            else:
                self.gaps += 1

    def ask(self) -> None:
        with self.lock:
            news = bool(self.incomplete_reason) and not self.asked
            self.asked |= news
        if news:
            logger.info("%s is asked for all it holds: %s", self, self.incomplete_reason)

    def empty(self, batches: int) -> None:
        """Asleep, and stale until a batch after ``batches``: waking engines report the emptied cache."""
        with self.lock:
            if self.gone:
                return
            was_stale = self.stale
            self._change_begins()
            self.emptied_at = batches
            self._change_ends()
            became_stale = self.stale and not was_stale
        if became_stale:
            logger.info("%s is stale: it is asleep", self)

    # ---- its worker

    def restore(self, position: Position, incomplete_reason: str) -> None:
        """From a snapshot of this position; before another thread has the rank."""
        self.sequence, self.batch_digest = position
        self.awaiting_first_batch = False
        if incomplete_reason:
            self._set_incomplete(incomplete_reason, self.clock())

    def rename(self, worker: Worker) -> None:
        with self.lock:
            self.worker, self.pool = worker, pool_holder(worker.namespace)
            self.near = near_holder(worker)

    def leave(self) -> None:
        """Forget its blocks, for good."""
        with self.lock:
            self._change_begins()
            self.gone = True
            self.index.remove_worker(self.holder)
            self._change_ends()

    # ---- under its lock

    def _forget(self) -> None:
        """Forget its blocks, but for the pool's, and the batch of them."""
        self.index.clear(self.holder)
        self.sequence = self.batch_digest = 0

    def _change_begins(self) -> None:
        self.version += 1

    def _change_ends(self) -> None:
        self.stale = (
            self.gone
            or self.marked
            or self.joining
            or self.batches <= self.emptied_at
            or bool(self.unmatchable)
        )
        self.version += 1

    def _set_incomplete(self, reason: str, now_s: float) -> None:
        """From now on only newly reported blocks are known."""
        if not self.incomplete_reason:
            self.incomplete_since_s = now_s
        self.incomplete_reason = reason

    def _complete(self) -> bool:
        """All its blocks are known; returns whether that is news."""
        if not self.incomplete_reason:
            return False
        self.incomplete_reason, self.asked = "", False
        if not self.marked:
            self.problem = ""
        return True

    def _joined(self) -> None:
        with self.lock:
            joined = self.joining and not self.gone
            if joined:
                self._change_begins()
                self.joining = False
                self._change_ends()
        if joined:
            logger.info("%s is followed", self)

    def __str__(self) -> str:
        return f"worker {self.worker.id} rank {self.publisher.dp_rank}"


def unhashed(no_hasher: str) -> str:
    return f"{UNHASHED}, for such workers {no_hasher}"


def pool_holder(namespace: str) -> str:
    """Holder of a namespace's pool blocks, in a table of one tenant; empty: no namespace."""
    return f"pool/{namespace}" if namespace else ""


def near_holder(worker: Worker) -> str:
    """Holder of what the near pool of this worker's host has of its namespace; empty: there is none."""
    return f"near/{worker.namespace}/{worker.near}" if worker.namespace and worker.near else ""


def staleness_ms(now_s: float, heard_at_ms: int) -> int:
    """Time since then, within a u32."""
    return min(max(0, int(now_s * 1000) - heard_at_ms), MAX_STALENESS_MS)


def _why_less(evicted: int) -> str:
    return f"{evicted} of its blocks were forgotten to make room: it may be credited less" if evicted else ""


def _one_line(problem: str) -> str:
    line = " ".join(problem.split())
    return line if len(line) <= MAX_PROBLEM_CHARS else line[: MAX_PROBLEM_CHARS - 1] + "\u2026"
