"""The caller's buffers as flat bytes, checked and cast once, at the store's boundary.

A client that trusts ``len`` of a float16 view writes half of it; only ``nbytes`` counts here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvpool.errors import ConfigError


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
