"""``Auditor``: compares records of the pool with the same blocks as this engine has computed them.

An audit takes two staging slots: one for the blocks of the KV cache, one for the record. What they differ by, a thread
of its own computes, off the engine's steps. Nothing reaches the KV cache. Another thread deletes what is found wrong:
nothing waits for it, for a store may hang. A fault of an audit ends it, and no more.

Threads: the worker's model thread; ``kvpool-audit`` reads slots in use.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvpool import _native
from kvpool.clock import REAL, Clock
from kvpool.errors import KVPoolError, StoreUnavailable
from kvpool.store import Batch, Store
from kvpool.store.batch import GRACE_S
from kvpool.transfer.device import Event
from kvpool.transfer.kv_memory import Block, KVCacheMemory

NUMBERS = frozenset(("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"))
GET_TIMEOUT_S = 5.0  # nothing waits for an audit
MIN_WAIT_S = 1e-3
MAX_DELETED = 1 << 16  # records that wait to be deleted

logger = logging.getLogger(__name__)

Pieces = Sequence[tuple[str, int]]


class Compared(NamedTuple):
    """An ended audit. ``why``: it says nothing: of ``metrics.AUDITS``.

    ``distances``: by layer, its elements as torch calls them, and the sums of ``_native.distances``.
    """

    tag: int
    why: str
    writer: bytes = b""
    distances: Sequence[tuple[str, float, float]] = ()
    payloads: tuple[bytes, ...] = ()  # the engine's and the pool's, where they are wanted


class _Found(NamedTuple):
    distances: Sequence[tuple[float, float]] = ()
    payloads: tuple[bytes, ...] = ()


NOTHING = _Found()


@dataclass(eq=False)
class _Audit:
    tag: int
    block: Block
    ours: int  # slot
    theirs: int
    copy: Event | None  # to ours
    get: Batch | None = None
    result: Future[_Found] | None = None
    writer: bytes = b""
    gives_up_s: float = 0.0  # on a read that does not end at its deadline


@dataclass
class Ended:
    """Since the last poll. ``staged``: tags whose blocks are no longer read; each precedes its ``compared``."""

    staged: list[int] = field(default_factory=list)
    compared: list[Compared] = field(default_factory=list)


class Auditor:
    """``pieces``: by place of ``Block.group``, of a block's payload: elements as torch calls them, and bytes."""

    def __init__(
        self, store: Store, memory: KVCacheMemory, pieces: Sequence[Pieces], clock: Clock = REAL
    ) -> None:
        self._store, self._memory, self._pieces, self._clock = store, memory, pieces, clock
        self.wants_payloads = False  # in what ``poll`` returns
        self._audits: list[_Audit] = []
        self._stuck: list[_Audit] = []  # ended, but that their reads may still write to their slots
        self._ended = Ended()
        self._deletes: dict[Future[None], int] = {}  # records
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="kvpool-audit")
        self._behind = ThreadPoolExecutor(1, thread_name_prefix="kvpool-audit-delete")

    @property
    def copies(self) -> list[Event]:
        """Those under way, from the KV cache."""
        return [audit.copy for audit in self._audits if audit.copy is not None]

    def begin(self, blocks: Sequence[Block], tags: Sequence[int], free: int, computed: Event) -> None:
        """Copy ``blocks``, as the engine's stream leaves them, and compare them. ``free``: slots that it may take."""
        for block, tag in zip(blocks, tags, strict=True):
            has_numbers = all(element in NUMBERS for element, _ in self._pieces[block.group])
            if not has_numbers or free < 2:
                self._ended.staged.append(tag)
                self._ended.compared.append(Compared(tag, "no_room" if has_numbers else "no_numbers"))
                continue
            free -= 2
            for _, (ours,), copy in self._memory.gather(block.group, [block], computed):
                (theirs,) = self._memory.staging.acquire(1)
                self._audits.append(_Audit(tag, block, ours, theirs, copy))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete records of the pool, soon. Those behind too many are left to be found again."""
        self._deletes = {delete: count for delete, count in self._deletes.items() if not delete.done()}
        keys = keys[: MAX_DELETED - sum(self._deletes.values())]
        if keys:
            with contextlib.suppress(RuntimeError):  # no thread can be started: the next one takes them
                self._deletes[self.later(self._delete, list(keys))] = len(keys)

    def later(self, call: Callable[..., None], *arguments: Any) -> Future[None]:
        """Call it behind all deletes so far; it raises nothing. Errors: ``RuntimeError``: no thread starts."""
        return self._behind.submit(call, *arguments)

    def _delete(self, keys: Sequence[str]) -> None:
        try:
            self._store.delete_many(keys)
        except KVPoolError as error:
            logger.warning(
                "kvpool could not delete %d records that an audit found wrong: %s", len(keys), error
            )

    def advance(self) -> None:
        for audit in list(self._audits):
            self._advance(audit)
        for audit in [one for one in self._stuck if one.get is None or one.get.done()]:
            self._stuck.remove(audit)
            self._memory.release([audit.ours, audit.theirs])

    def poll(self) -> Ended:
        self.advance()
        ended, self._ended = self._ended, Ended()
        return ended

    def _advance(self, audit: _Audit) -> None:
        if audit.copy is not None and audit.copy.query():
            audit.copy = None
            self._ended.staged.append(audit.tag)
            audit.gives_up_s = self._clock.monotonic() + GET_TIMEOUT_S + GRACE_S
            try:
                audit.get = self._store.submit_get(
                    [audit.block.key], [self._view(audit, audit.theirs)], timeout_s=GET_TIMEOUT_S
                )
            except StoreUnavailable:
                self._end(audit, "store_unavailable")
        if audit.get is not None and audit.get.done():
            get, audit.get = audit.get, None
            try:
                found = get.wait()[0]
            except StoreUnavailable:
                self._end(audit, "store_unavailable")
                return
            if not found:
                self._end(audit, "missing")
                return
            (audit.writer,) = get.writers()
            ours, theirs = (self._view(audit, slot) for slot in (audit.ours, audit.theirs))
            pieces = self._pieces[audit.block.group]
            try:
                audit.result = self._threads.submit(self._compare, ours, theirs, pieces)
            except RuntimeError:  # no thread can be started
                self._end(audit, "no_room")
        elif audit.get is not None and self._clock.monotonic() > audit.gives_up_s:
            audit.get.cancel()
            self._end(audit, "store_unavailable")
        if audit.result is not None and audit.result.done():
            if (error := audit.result.exception()) is not None:
                logger.warning("kvpool could not compare an audited block", exc_info=error)
                self._end(audit, "no_room")
            else:
                self._end(audit, "", audit.result.result())

    def _compare(self, ours: memoryview, theirs: memoryview, pieces: Pieces) -> _Found:
        distances = _native.distances(ours, theirs, pieces)
        return _Found(distances, (bytes(ours), bytes(theirs)) if self.wants_payloads else ())

    def _view(self, audit: _Audit, slot: int) -> memoryview:
        return self._memory.staging.view(slot, self._memory.nbytes(audit.block))

    def _end(self, audit: _Audit, why: str, found: _Found = NOTHING) -> None:
        self._audits.remove(audit)
        if audit.get is None:
            self._memory.release([audit.ours, audit.theirs])
        else:
            self._stuck.append(audit)
        elements = [element for element, _ in self._pieces[audit.block.group]]
        by_layer = [(element, *sums) for element, sums in zip(elements, found.distances, strict=False)]
        self._ended.compared.append(Compared(audit.tag, why, audit.writer, by_layer, found.payloads))

    def close(self) -> None:
        """Give up all audits, within ``GRACE_S``. The slots of a copy or read that has not ended stay taken."""
        reads = [audit.get for audit in self._audits if audit.get is not None]
        for read in reads:
            read.cancel()
        until = self._clock.monotonic() + GRACE_S
        for read in reads:
            if not read.done():
                read.settle(max(MIN_WAIT_S, until - self._clock.monotonic()))
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._behind.shutdown(wait=False, cancel_futures=True)
        for audit in [*self._audits, *self._stuck]:
            if audit.copy is None and (audit.get is None or audit.get.done()):
                self._memory.release([audit.ours, audit.theirs])
        self._audits.clear()
        self._stuck.clear()
