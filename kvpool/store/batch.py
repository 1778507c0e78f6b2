"""A submitted batch, the lookup among them, its buffers, and the data path (``DataPath``) that runs it.

The caller's buffers are cast to flat bytes once, at the store's boundary: a client that trusts ``len`` of a
float16 view writes half of it.

Ownership: the engine's threads own the buffers until ``done()``; afterwards nothing touches or exports them.
The batch keeps them alive, so dropping it is safe. Any thread may call any method.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from kvpool import _native
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.key.key import MAX_HASH_NBYTES, MAX_INDEX, MIN_HASH_NBYTES
from kvpool.store.advice import block_advice

MAX_TIMEOUT_S = 3600.0
WRITER_NBYTES = 16
END_OF_ALL = 1 << 63  # tokens; beyond every prompt
# A batch ends itself at its deadline; a caller waits this much longer for a thread inside a system call.
GRACE_S = 1.0
FOUND = (_native.OK, _native.NEAR, _native.PRESENT)
BROKEN = (_native.FAULT, _native.TIMED_OUT, _native.CANCELLED)  # not for the key's own sake
# Of results: 1: found; 1: found near.
_IS_FOUND = bytes(status in FOUND for status in range(256))
_IS_NEAR = bytes(status == _native.NEAR for status in range(256))


class Running(Protocol):
    """A batch inside an engine; see ``_native.Batch``."""

    def done(self) -> bool: ...
    def wait(self, timeout_s: float) -> bool: ...
    def cancel(self) -> None: ...
    def given_up(self) -> bool: ...
    def results(self) -> bytes: ...
    def writers(self) -> bytes: ...
    def error(self) -> str | None: ...


class DataPath(Protocol):
    """The data path of a store; see ``_native.IoExecutor``."""

    def submit(
        self,
        op: int,
        keys: Sequence[str],
        buffers: Sequence[Any] | None,
        timeout_s: float,
        max_s: float,
        writer: bytes = b"",
    ) -> Running: ...
    def lookup(self, prefix: str, groups: Sequence[LookupGroup], timeout_s: float) -> Running: ...
    def counters(self) -> dict[str, int]: ...
    def close(self, timeout_s: float) -> bool: ...


class LookupGroup(NamedTuple):
    """Consecutive records of a prompt in one KV-cache group, from its first token on.

    ``hashes``: packed block hashes of ``hash_nbytes`` each. ``ranks``: a record is present when its parts of
    ranks 0 to ``ranks`` - 1 are. ``sliding_window``: records after a missing one are useful. ``prefetch_nbytes``: of
    each part: copy it near, where only a far pool has it; 0: only ask.
    """

    hashes: bytes
    hash_nbytes: int
    group: int
    ranks: int
    record_tokens: int
    sliding_window: bool = False
    prefetch_nbytes: int = 0

    @property
    def records(self) -> int:
        return len(self.hashes) // self.hash_nbytes

    def check(self) -> None:
        """Errors: ``ConfigError``."""
        if not isinstance(self.hashes, bytes):
            raise ConfigError(f"packed hashes are bytes, not {type(self.hashes).__name__}")
        for name, low, high in (
            ("group", 0, MAX_INDEX),
            ("hash_nbytes", MIN_HASH_NBYTES, MAX_HASH_NBYTES),
            ("ranks", 1, MAX_INDEX + 1),
            ("record_tokens", 1, END_OF_ALL - 1),
            ("prefetch_nbytes", 0, END_OF_ALL - 1),
        ):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ConfigError(f"{name} is a whole number from {low} to {high}, not {value!r:.40}")
        if len(self.hashes) % self.hash_nbytes:
            raise ConfigError(f"{len(self.hashes)} bytes are no hashes of {self.hash_nbytes} bytes each")


class Batch:
    """Submitted puts, gets, existence checks or deletes. ``name``: for errors."""

    def __init__(
        self,
        running: Running,
        name: str,
        timeout_s: float,
        max_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._running, self._name, self._timeout_s, self._clock = running, name, timeout_s, clock
        self._deadline_s = clock() + (timeout_s if max_s is None else max_s)

    def done(self) -> bool:
        """Whether the batch has ended; never blocks."""
        return self._running.done()

    def cancel(self) -> None:
        """Give up the unfinished keys; never blocks. ``done()`` says when the buffers are free.

        A put in flight may still reach the server, whole, even after a later put of its key.
        """
        self._running.cancel()

    def given_up(self) -> bool:
        """Whether it was cancelled or is out of time, and ends once no thread uses its buffers."""
        return self._running.given_up()

    def wait(self, timeout_s: float | None = None) -> list[bool]:
        """An answer per key, in order: put: stored; get: read; contains, delete: it was present.

        ``timeout_s``: seconds to wait here; None: until the batch's own deadline. Blocks without the GIL.
        Repeated calls return the same answer. Errors: ``StoreUnavailable`` naming the first fault, past the
        deadline, after a cancel, or after ``timeout_s``: then the batch still owns its buffers.
        """
        return [result in FOUND for result in self.results(timeout_s)]

    def results(self, timeout_s: float | None = None) -> bytes:
        """As ``wait``, with ``_native``'s status byte per answer."""
        results = self.statuses(timeout_s)
        if _native.FAULT in results or _native.REFUSED in results:
            why = self._running.error() or "the store failed"
            raise StoreUnavailable(f"{self._name}: {why}{block_advice(why)}")
        if _native.TIMED_OUT in results:
            raise StoreUnavailable(f"{self._name}: no answer within {self._timeout_s:g} s")
        if _native.CANCELLED in results:
            raise StoreUnavailable(f"{self._name}: cancelled")
        return results

    def writers(self) -> list[bytes]:
        """Who wrote each value that a ``done()`` get read (``Store.writer``); zeros: not read, or not named."""
        packed = self._running.writers()
        return [packed[at : at + WRITER_NBYTES] for at in range(0, len(packed), WRITER_NBYTES)]

    def statuses(self, timeout_s: float | None = None) -> bytes:
        """As ``results``, but a fault is a status of its key: errors only while it is under way."""
        if timeout_s is None:
            end_s = self._deadline_s + GRACE_S
        else:
            end_s = self._clock() + check_timeout(timeout_s)
        while not self._running.wait(min(max(end_s - self._clock(), 0.0), MAX_TIMEOUT_S)):
            if self._clock() >= end_s:
                raise StoreUnavailable(f"{self._name}: still under way; the store does not answer")
        return self._running.results()

    def settle(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` seconds for the end of the batch; raises no fault."""
        with contextlib.suppress(StoreUnavailable):
            self.wait(timeout_s)

    def abandon(self) -> None:
        """Cancel, and wait until nothing uses the buffers; blocks for at most a second."""
        if not self._running.done():
            self._running.cancel()
            self._running.wait(GRACE_S)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name}, {'done' if self.done() else 'under way'}>"


class LookupBatch(Batch):
    """A submitted lookup. ``order``: the sent ``groups``' places in the caller's order."""

    def __init__(
        self,
        running: Running,
        name: str,
        timeout_s: float,
        groups: Sequence[LookupGroup],
        order: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(running, name, timeout_s, clock=clock)
        self._groups, self._order = groups, order

    def records(self, timeout_s: float | None = None) -> list[bytes]:
        """Per group, in the given order, a byte per record: 1: all its parts are present, else 0.

        A 0 is unknown after a group's first miss, unless it has a sliding window. It is unknown, too, beyond
        the last token that groups without one can serve. ``timeout_s``, blocking and errors: as ``wait``.
        """
        return self._by_group(self.results(timeout_s).translate(_IS_FOUND))

    def near(self) -> list[bytes]:
        """As ``records`` of a ``done()`` batch: 1: the nearer of two pools has all parts."""
        return self._by_group(self.results().translate(_IS_NEAR))

    def prefetched(self) -> list[int]:
        """Per group, in the given order, how many records a ``done()`` batch copied near, even if it was given up."""
        return [results.count(_native.OK) for results in self._by_group(self._running.results())]

    def _by_group(self, results: bytes) -> list[bytes]:
        found: list[bytes] = [b""] * len(self._order)
        start = 0
        for place, group in zip(self._order, self._groups, strict=True):
            found[place] = results[start : start + group.records]
            start += group.records
        return found


def check_timeout(timeout_s: float) -> float:
    """Return ``timeout_s`` if above 0 and at most 3,600 seconds. Errors: ``ConfigError``."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)):
        raise ConfigError(f"timeout_s is a number of seconds, not {timeout_s!r:.40}")
    if not math.isfinite(timeout_s) or not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ConfigError(f"timeout_s is above 0 and at most {MAX_TIMEOUT_S:g} seconds, not {timeout_s}")
    return float(timeout_s)


class Destination(NamedTuple):
    """Target of one value, and where a hit is copied afterwards."""

    view: memoryview  # contiguous, writable
    copy_to: memoryview | None  # the caller's memory, if not contiguous


def source(buffer: Any, position: int) -> memoryview:
    """``buffer`` (in its batch at ``position``) as contiguous bytes, or a copy. Errors: ``ConfigError``."""
    view = _view(buffer, position)
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())


def destination(buffer: Any, position: int) -> Destination:
    """``buffer`` as contiguous writable bytes, or temporary ones. Errors: ``ConfigError``."""
    view = _view(buffer, position)
    if view.readonly:
        raise ConfigError(f"buffers[{position}] is read-only: a value cannot be read into it")
    if view.c_contiguous:
        return Destination(view.cast("B"), None)
    return Destination(memoryview(bytearray(view.nbytes)), view)


def copy_back(destinations: Sequence[Destination], found: Sequence[bool]) -> None:
    """Copy hits from temporary views into the caller's memory."""
    for (view, copy_to), hit in zip(destinations, found, strict=True):
        if hit and copy_to is not None:
            import numpy  # lazily: only numpy makes such buffers, so it is installed

            target = numpy.asarray(copy_to)
            target[...] = numpy.frombuffer(view, dtype=target.dtype).reshape(target.shape)


def _view(buffer: Any, position: int) -> memoryview:
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError, BufferError) as error:
        raise ConfigError(f"buffers[{position}] is no buffer: {error}") from error
    if view.nbytes == 0:
        raise ConfigError(f"buffers[{position}] is empty: a value has at least one byte")
    return view
