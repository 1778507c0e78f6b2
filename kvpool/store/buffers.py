"""Buffers that a caller hands over, as flat bytes: checked and cast once, at the store's boundary.

A client that trusts ``len`` of a float16 view writes half of it; here only ``nbytes`` counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvpool.errors import ConfigError


class Destination(NamedTuple):
    """Where a batch writes one value, and where that is copied to when it is a hit."""

    view: memoryview  # contiguous, writable
    copy_to: memoryview | None  # the caller's own memory, when that is not contiguous


def source(buffer: Any, position: int) -> memoryview:
    """A contiguous view of what ``buffer`` holds; one that is not contiguous is copied, in C order.

    ``position``: of the buffer in its batch, for the error. Errors: ``ConfigError``.
    """
    view = _view(buffer, position)
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())


def destination(buffer: Any, position: int) -> Destination:
    """A contiguous writable view for a value, which is a temporary one where ``buffer`` is not contiguous.

    ``position``: of the buffer in its batch, for the error. Errors: ``ConfigError``.
    """
    view = _view(buffer, position)
    if view.readonly:
        raise ConfigError(f"buffers[{position}] is read-only: a value cannot be read into it")
    if view.c_contiguous:
        return Destination(view.cast("B"), None)
    return Destination(memoryview(bytearray(view.nbytes)), view)


def copy_back(destinations: Sequence[Destination], found: Sequence[bool]) -> None:
    """Copy every hit that went to a temporary view into the caller's own memory."""
    for (view, copy_to), hit in zip(destinations, found, strict=True):
        if hit and copy_to is not None:
            import numpy  # only here: such buffers are made by numpy, so it is installed

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
