"""Batches waiting for a store's threads, which take them in slices; and a breaker for an unreachable server.

A slice is consecutive keys of one batch up to at least 1 MiB of values. Threads take slices of the oldest
batch first, puts last. So a batch uses all connections, and in-flight bytes are bounded. A cancelled or late
batch ends at once for untaken keys. Taken ones end when their calls return, within ``MAX_CALL_S``.

A silent or undialable link opens the breaker: every key is a fault at once, in the submitting thread. One
thread dials again after pauses; a successful dial closes the breaker.

Threads: any thread may call any method. ``_changed`` (a condition) guards all fields and those of every
``QueuedBatch``; no call to a server is made under it. The thread that holds a slice owns its buffers.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from kvpool import _native, metrics
from kvpool.store.batch import WRITER_NBYTES
from kvpool.store.clients.link import LinkFault
from kvpool.store.clients.lookup_keys import LookupKeys

SLICE_NBYTES = 1 << 20  # of values; a slice that reaches this is full
SLICE_KEYS = 256
MAX_QUEUED_KEYS = 1 << 20
# Pauses between dials of an unreachable server. With a probe below 1 s in all: the delay of a recovery.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.4

_COUNTERS = (
    "puts", "put_nbytes", "present_puts", "get_hits", "get_misses", "get_nbytes", "contains_hits",
    "contains_misses", "deletes", "delete_misses", "expires", "expire_misses",
    "no_room", "faults", "cancelled", "timed_out", "damaged", "evicted",
    "connections", "disconnections", "failed_dials", "refused", "up_connections", "queued",
    *(f"damaged_{cause}" for cause in metrics.DAMAGES),
)  # fmt: skip
_COUNTED = {
    (_native.PUT, _native.OK): "puts",
    (_native.PUT_ABSENT, _native.OK): "puts",
    (_native.PUT_ABSENT, _native.PRESENT): "present_puts",
    (_native.GET, _native.OK): "get_hits",
    (_native.GET, _native.MISS): "get_misses",
    (_native.CONTAINS, _native.OK): "contains_hits",
    (_native.CONTAINS, _native.MISS): "contains_misses",
    (_native.TOUCH, _native.OK): "contains_hits",
    (_native.TOUCH, _native.MISS): "contains_misses",
    (_native.DELETE, _native.OK): "deletes",
    (_native.DELETE, _native.MISS): "delete_misses",
    (_native.EXPIRE, _native.OK): "expires",
    (_native.EXPIRE, _native.MISS): "expire_misses",
}
_COUNTED_ALWAYS = {
    _native.NO_ROOM: "no_room",
    _native.FAULT: "faults",
    _native.REFUSED: "faults",
    _native.CANCELLED: "cancelled",
    _native.TIMED_OUT: "timed_out",
}
_COUNTED_NBYTES = {_native.PUT: "put_nbytes", _native.PUT_ABSENT: "put_nbytes", _native.GET: "get_nbytes"}
_MOVED = frozenset((_native.OK, _native.PRESENT, _native.MISS, _native.NO_ROOM))  # the server answered
_PUTS = (_native.PUT, _native.PUT_ABSENT)


class _Breaker(NamedTuple):
    """The reason and the next dial of an open breaker; an empty ``why``: closed."""

    why: str = ""
    pause_s: float = 0.0
    next_dial_s: float = 0.0  # monotonic


class QueuedBatch:
    """A batch in the queue; see ``_native.Batch``. ``lookup``: its keys are spelled when taken."""

    def __init__(
        self,
        queue: BatchQueue,
        operation: int,
        keys: Sequence[str] | LookupKeys,
        views: Sequence[memoryview] | None,
        timeout_s: float,
        max_s: float,
        writer: bytes = b"",
    ) -> None:
        self.writer = writer  # of a put
        self.writers_of: dict[bytes, bytes] = {}  # by key, of what a get has read
        self.operation, self.keys, self.views = operation, keys, views
        self.lookup = keys if isinstance(keys, LookupKeys) else None
        self._submitted_s, self._timeout_s = time.monotonic(), timeout_s
        self._last_s = self._submitted_s + max_s
        self.statuses = bytearray([_native.CANCELLED]) * len(keys)
        self.next = 0  # first untaken key
        # Keys that count against the queue's limit.
        self.weight = min(1, len(keys)) if self.lookup is not None else len(keys)
        self.slices = 0  # in flight
        self.cancelled = False
        self.fault: str | None = None
        self.ended = threading.Event()
        self._queue = queue

    @property
    def deadline_s(self) -> float:
        """``timeout_s`` after the last value that any thread moved, or ``max_s`` after it was submitted."""
        return min(self._last_s, max(self._submitted_s, self._queue.moved_s) + self._timeout_s)

    def done(self) -> bool:
        if not self.ended.is_set() and time.monotonic() >= self.deadline_s:
            self._queue.give_up(self, _native.TIMED_OUT)
        return self.ended.is_set()

    def wait(self, timeout_s: float) -> bool:
        until_s = time.monotonic() + timeout_s
        while not self.done():
            now_s, deadline_s = time.monotonic(), self.deadline_s
            if now_s >= until_s:
                return False
            # Behind its deadline it waits for calls in flight.
            self.ended.wait(min(until_s, deadline_s if deadline_s > now_s else until_s) - now_s)
        return True

    def cancel(self) -> None:
        self._queue.give_up(self, _native.CANCELLED)

    def given_up(self) -> bool:
        return self.cancelled or time.monotonic() >= self.deadline_s

    def results(self) -> bytes:
        assert self.ended.is_set()
        statuses = bytes(self.statuses)
        return self.lookup.records(statuses) if self.lookup is not None else statuses

    def writers(self) -> bytes:
        assert self.ended.is_set()
        if self.operation != _native.GET or isinstance(self.keys, LookupKeys):
            return b""
        nobody = bytes(WRITER_NBYTES)
        return b"".join(self.writers_of.get(key.encode("ascii"), nobody) for key in self.keys)

    def error(self) -> str | None:
        return self.fault


class Slice(NamedTuple):
    """Keys ``start`` to ``end`` of a batch, taken by one thread."""

    batch: QueuedBatch
    start: int
    end: int


class Probe(NamedTuple):
    """An order to dial an unreachable server."""


class BatchQueue:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[QueuedBatch] = deque()
        self._closing = False
        self._failures = 0
        self.puts_refused, self.gets_refused = _native.RefusedSize(), _native.RefusedSize()
        self._breaker = _Breaker()
        self._probing = False  # a thread dials to close the breaker
        self._counters: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))
        self.moved_s = 0.0  # monotonic: the end of the last slice that moved values

    # ------------------------------------------------------------------ for callers of the store

    def submit(self, batch: QueuedBatch) -> QueuedBatch:
        """Errors: ``RuntimeError`` when it is closed or full."""
        with self._changed:
            if self._closing:
                raise RuntimeError("the store is closed")
            waiting = self._counters["queued"]
            if batch.weight > MAX_QUEUED_KEYS - waiting:
                raise RuntimeError(f"queue full: {waiting} keys are waiting, at most {MAX_QUEUED_KEYS} may")
            self._counters["queued"] += batch.weight
            if len(batch.keys):
                self._queue.append(batch)
                if self._breaker.why:
                    self._refuse_queued()
                self._changed.notify_all()
            else:
                self._end_if_over(batch)
        return batch

    def give_up(self, batch: QueuedBatch, status: int) -> None:
        """End untaken keys with ``status``; slices in flight end by themselves."""
        with self._changed:
            if not batch.ended.is_set():
                batch.cancelled = batch.cancelled or status == _native.CANCELLED
                self._drop_rest(batch, status)

    def counters(self) -> dict[str, int]:
        with self._changed:
            counters = dict(self._counters)
            if self._breaker.why:
                counters["up_connections"] = 0
            return counters

    def close(self) -> None:
        """Cancel waiting batches; ``take`` returns None from now on."""
        with self._changed:
            self._closing = True
            for batch in list(self._queue):
                batch.cancelled = True
                self._drop_rest(batch, _native.CANCELLED)
            self._changed.notify_all()

    # ------------------------------------------------------------------ for the store's threads

    def take(self) -> Slice | Probe | None:
        """The next task of a thread; blocks until one exists. None: the store closes."""
        with self._changed:
            while True:
                if not self._queue:
                    if self._closing:
                        return None
                    pause_s: float | None = None
                    if self._breaker.why and not self._probing:
                        pause_s = self._breaker.next_dial_s - time.monotonic()
                        if pause_s <= 0:
                            self._probing = True
                            return Probe()
                    self._changed.wait(pause_s)
                    continue
                # Requests wait for lookups and loads, not for puts.
                batch = next((one for one in self._queue if one.operation not in _PUTS), self._queue[0])
                if time.monotonic() >= batch.deadline_s:
                    self._drop_rest(batch, _native.TIMED_OUT)
                    continue
                if batch.lookup is not None:
                    self._skip_unwanted(batch, batch.lookup)
                    if batch.next == len(batch.keys):
                        continue
                start, end = batch.next, _slice_end(batch)
                batch.next = end
                batch.slices += 1
                if batch.lookup is None:
                    self._weigh(batch, batch.weight - (end - start))
                if end == len(batch.keys):
                    self._weigh(batch, 0)
                    self._queue.remove(batch)
                return Slice(batch, start, end)

    def put_down(self, batch: QueuedBatch, start: int, statuses: Sequence[int], fault: str | None) -> None:
        """Results of one slice, whose buffers are free from now on."""
        with self._changed:
            batch.statuses[start : start + len(statuses)] = bytes(statuses)
            batch.fault = batch.fault or fault
            batch.slices -= 1
            if batch.views is not None and not _MOVED.isdisjoint(statuses):
                self.moved_s = time.monotonic()
            if batch.lookup is not None:
                batch.lookup.take(start, statuses)
            for status, times in Counter(statuses).items():
                self._count_status(batch.operation, status, times)
            if batch.views is not None:
                self._counters[_COUNTED_NBYTES[batch.operation]] += sum(
                    batch.views[start + place].nbytes
                    for place, status in enumerate(statuses)
                    if status == _native.OK
                )
            self._end_if_over(batch)

    def count(self, name: str, times: int = 1) -> None:
        with self._changed:
            self._counters[name] += times

    def failures(self) -> int:
        """Number of link failures: a thread that sees it change checks its own link."""
        with self._changed:
            return self._failures

    def failed(self) -> None:
        with self._changed:
            self._failures += 1

    def fell_silent(self, why: str) -> None:
        with self._changed:
            if not self._breaker.why:
                self._open_breaker(_Breaker(why))

    def check_not_away(self) -> None:
        """Errors: ``LinkFault`` with the reason while the breaker is open."""
        with self._changed:
            if self._breaker.why:
                raise LinkFault(self._breaker.why)

    def dialled(self, failure: str | None) -> None:
        """Result of a dial; ``failure``: its reason, or None."""
        with self._changed:
            self._probing = False
            if failure is None:
                self._breaker = _Breaker()
                return
            self._counters["failed_dials"] += 1
            self.puts_refused.forget()
            self.gets_refused.forget()
            pause_s = min(max(2 * self._breaker.pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            self._open_breaker(_Breaker(failure, pause_s, time.monotonic() + pause_s))

    # ------------------------------------------------------------------ the caller holds the lock

    def _drop_rest(self, batch: QueuedBatch, status: int) -> None:
        """End every untaken key with ``status``."""
        rest = len(batch.keys) - batch.next
        if rest:
            batch.statuses[batch.next :] = bytes([status]) * rest
            batch.next = len(batch.keys)
            self._queue.remove(batch)
            self._weigh(batch, 0)
            self._count_status(batch.operation, status, rest)
        self._end_if_over(batch)

    def _skip_unwanted(self, batch: QueuedBatch, lookup: LookupKeys) -> None:
        """Record lookup keys no longer worth asking as misses."""
        wanted = lookup.next_wanted(batch.next)
        batch.statuses[batch.next : wanted] = bytes([_native.MISS]) * (wanted - batch.next)
        batch.next = wanted
        if wanted == len(lookup):
            self._queue.remove(batch)
            self._weigh(batch, 0)
            self._end_if_over(batch)

    def _weigh(self, batch: QueuedBatch, weight: int) -> None:
        self._counters["queued"] -= batch.weight - weight
        batch.weight = weight

    def _end_if_over(self, batch: QueuedBatch) -> None:
        """Release the buffers and set ``ended`` once all keys have results."""
        if batch.slices or batch.next < len(batch.keys) or batch.ended.is_set():
            return
        batch.views = None
        batch.ended.set()

    def _count_status(self, operation: int, status: int, times: int) -> None:
        self._counters[_COUNTED_ALWAYS.get(status) or _COUNTED[operation, status]] += times

    def _refuse_queued(self) -> None:
        """Fail every waiting key, because the server is unreachable."""
        for batch in list(self._queue):
            batch.fault = batch.fault or self._breaker.why
            self._counters["refused"] += len(batch.keys) - batch.next
            self._drop_rest(batch, _native.FAULT)

    def _open_breaker(self, breaker: _Breaker) -> None:
        self._breaker = breaker
        self._refuse_queued()
        self._changed.notify_all()


def _slice_end(batch: QueuedBatch) -> int:
    end = min(batch.next + SLICE_KEYS, len(batch.keys))
    if batch.views is None:
        return end
    nbytes = 0
    for index in range(batch.next, end):
        nbytes += batch.views[index].nbytes
        if nbytes >= SLICE_NBYTES:
            return index + 1
    return end
