"""What the native table refuses, as errors of ours. Threads: any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvpool import _native
from kvpool.errors import ConfigError, KVPoolError

REFUSED = (_native.TooMuchWork, ValueError, TypeError, BufferError)


def refusal(error: Exception) -> KVPoolError:
    """Of one of ``REFUSED``: ``KVPoolError`` where a limit was met, else ``ConfigError``."""
    return KVPoolError(str(error)) if isinstance(error, _native.TooMuchWork) else ConfigError(str(error))


@contextmanager
def refusals() -> Iterator[None]:
    """Raise ``REFUSED`` as ``refusal``s."""
    try:
        yield
    except REFUSED as error:
        raise refusal(error) from error
