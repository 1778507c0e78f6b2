"""What the native table refuses, as errors of ours. Threads: any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvpool import _native
from kvpool.errors import ConfigError, KVPoolError, MalformedEvents

REFUSED = (_native.TooMuchWork, _native.NotAtOnce, ValueError, TypeError, BufferError)


class ClearedTooOften(MalformedEvents):
    """A batch stores and clears in turns, a walk over the table each time: its worker holds nothing any more."""


class NotAtOnce(KVPoolError):
    """An answer waits for a batch, or takes longer than an event loop may be held up: ask again in a thread."""


def malformed(error: _native.MalformedEvents) -> MalformedEvents:
    """It as one of ours."""
    kind = ClearedTooOften if isinstance(error, _native.ClearedTooOften) else MalformedEvents
    return kind(f"a batch of KV events is malformed: {error}")


def refusal(error: Exception) -> KVPoolError:
    """Of one of ``REFUSED``: ``KVPoolError`` where a limit was met, else ``ConfigError``; or ``NotAtOnce``."""
    if isinstance(error, _native.NotAtOnce):
        return NotAtOnce(str(error))
    return KVPoolError(str(error)) if isinstance(error, _native.TooMuchWork) else ConfigError(str(error))


@contextmanager
def refusals() -> Iterator[None]:
    """Raise ``REFUSED`` as ``refusal``s."""
    try:
        yield
    except REFUSED as error:
        raise refusal(error) from error
