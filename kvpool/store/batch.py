"""A batch under way: what ``submit_*`` returns and what every blocking call waits for.

Ownership: the store's native threads read or write the buffers until ``done()`` is true; from then on nothing
touches them, nor keeps them exported. The batch itself holds them: dropping a transfer is safe.
Any thread may call any method.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import Protocol

from kvpool import _native
from kvpool.errors import ConfigError, StoreUnavailable

MAX_TIMEOUT_S = 3600.0
# A batch ends itself at its deadline; beyond it we wait this long for a thread that is inside a system call.
GRACE_S = 1.0


class Running(Protocol):
    """What a store's data path gives back for one submitted batch (``_native.Batch``)."""

    def done(self) -> bool: ...
    def wait(self, timeout_s: float) -> bool: ...
    def cancel(self) -> None: ...
    def results(self) -> bytes: ...
    def error(self) -> str | None: ...


class Batch:
    """One batch of puts, gets, existence checks or deletes that was submitted to a store."""

    def __init__(self, batch: Running, what: str, timeout_s: float) -> None:
        self._batch = batch
        self._what = what
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s

    def done(self) -> bool:
        """Whether the batch has ended; never blocks."""
        return self._batch.done()

    def cancel(self) -> None:
        """Give up what is not finished; never blocks. ``done()`` says when the buffers are free.

        What of a put was on its way to a server may still arrive there, whole, even after a later put of its key.
        """
        self._batch.cancel()

    def wait(self, timeout_s: float | None = None) -> list[bool]:
        """One answer per key, in order: put: the store holds the value now; get: the buffer does; contains, delete: it
        was there.

        ``timeout_s``: seconds to wait here; None: until the batch ends, which its own deadline bounds.
        Blocking, with the interpreter free. May be called again, and gives the same answer.
        Errors: ``StoreUnavailable`` naming the first fault, when the deadline came first, when the batch was
        cancelled, and when it has not ended within ``timeout_s``: then it is still under way and owns its
        buffers.
        """
        return [result in (_native.OK, _native.PRESENT) for result in self.results(timeout_s)]

    def results(self, timeout_s: float | None = None) -> bytes:
        """As ``wait``, with the status that ``_native`` has for each answer, a byte each. Errors: as there."""
        if timeout_s is None:
            end_s = self._deadline_s + GRACE_S
        else:
            end_s = time.monotonic() + check_timeout(timeout_s)
        while not self._batch.wait(min(max(end_s - time.monotonic(), 0.0), MAX_TIMEOUT_S)):
            if time.monotonic() >= end_s:
                raise StoreUnavailable(f"{self._what}: still under way; the store does not answer")
        results = self._batch.results()
        if _native.FAULT in results:
            raise StoreUnavailable(f"{self._what}: {self._batch.error() or 'the store failed'}")
        if _native.TIMED_OUT in results:
            raise StoreUnavailable(f"{self._what}: no answer within {self._timeout_s:g} s")
        if _native.CANCELLED in results:
            raise StoreUnavailable(f"{self._what}: cancelled")
        return results

    def settle(self, timeout_s: float) -> None:
        """Wait until the batch has ended, well or badly, for at most ``timeout_s`` seconds; no fault is raised."""
        with contextlib.suppress(StoreUnavailable):
            self.wait(timeout_s)

    def abandon(self) -> None:
        """Cancel, and wait until nothing uses the buffers any more; blocking, for at most a second."""
        if not self._batch.done():
            self._batch.cancel()
            self._batch.wait(GRACE_S)

    def __repr__(self) -> str:
        return f"<Batch {self._what}, {'done' if self.done() else 'under way'}>"


def check_timeout(timeout_s: float) -> float:
    """Return ``timeout_s`` if it is above 0 and at most 3,600 seconds. Errors: ``ConfigError``."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)):
        raise ConfigError(f"timeout_s is a number of seconds, not {timeout_s!r:.40}")
    if not math.isfinite(timeout_s) or not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ConfigError(f"timeout_s is above 0 and at most {MAX_TIMEOUT_S:g} seconds, not {timeout_s}")
    return float(timeout_s)
