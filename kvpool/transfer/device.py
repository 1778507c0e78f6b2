"""Devices, and their streams of copies between a KV cache and staging, beside the engine's own stream.

Copies of a stream go one after the other. On an accelerator a copy begins when the engine's stream has come to the
marks that it waits for, and its event is ready when it has ended. Only ``torch.accelerator``, ``torch.Stream`` and
``torch.Event`` are used: what holds for one kind of device holds for the next. On the CPU ``submit`` ends the copy.

While a CUDA graph is captured nothing here may be called, by any thread: torch captures in a mode in which the query
of an event, or pinning memory, ends the capture. vLLM captures in this same thread, before its first step. Copies that
were submitted before go on beside a capture, and beside replays.

Threads: the worker's model thread only. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from kvpool.errors import ConfigError
from kvpool.text import format_nbytes

# Of a device's memory, for each stream: so much is copied by one launch and one transfer. More of it makes the time
# between two transfers matter less; on the CPU it should stay in the cache.
ACCELERATOR_SCRATCH_NBYTES = 64 << 20
HOST_SCRATCH_NBYTES = 4 << 20

Copy = Callable[[torch.Tensor], None]


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether the stream has come there; never waits. Raises what the device failed with."""
        ...


class CopyStream(Protocol):
    """A queue of copies, done in order, that all go through one piece of the device's memory."""

    scratch_nbytes: int

    def submit(self, copy: Copy, after: Sequence[Event]) -> Event:
        """Do ``copy(scratch)`` when all of ``after`` are ready and what was submitted before is done.

        ``scratch``: bytes, one dimension. The event that is returned is ready when the copy is done.
        """
        ...


class Device(Protocol):
    """Where a KV cache lies, and the stream on which the engine computes."""

    pinned: bool  # whether host memory must be pinned to be copied from and to beside the engine
    scratch_nbytes: int

    def copy_stream(self, scratch_nbytes: int) -> CopyStream:
        """A new stream of copies. Errors: ``ConfigError`` when there is no memory for its scratch."""
        ...

    def mark(self) -> Event:
        """Ready when the engine's stream has done all that it was given until now."""
        ...

    def follow(self, event: Any) -> None:
        """Have what the engine's stream is given from now on come after ``event``; does not wait."""
        ...


class Done:
    """The event of what is over."""

    def query(self) -> bool:
        return True


DONE = Done()


class Host:
    """The CPU: no stream, no waiting."""

    pinned = False
    scratch_nbytes = HOST_SCRATCH_NBYTES

    def copy_stream(self, scratch_nbytes: int) -> CopyStream:
        return _HostCopyStream(scratch_nbytes)

    def mark(self) -> Event:
        return DONE

    def follow(self, event: Any) -> None:
        """Everything is over already."""


class _HostCopyStream:
    def __init__(self, scratch_nbytes: int) -> None:
        self.scratch_nbytes = scratch_nbytes
        self._scratch = _scratch(scratch_nbytes, torch.device("cpu"))

    def submit(self, copy: Copy, after: Sequence[Event]) -> Event:
        assert all(event.query() for event in after)
        copy(self._scratch)
        return DONE


class Accelerator:
    """What ``torch.accelerator`` drives. Not tried on a real one so far."""

    pinned = True
    scratch_nbytes = ACCELERATOR_SCRATCH_NBYTES

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def copy_stream(self, scratch_nbytes: int) -> CopyStream:
        return _DeviceCopyStream(self._device, scratch_nbytes)

    def mark(self) -> Event:
        return torch.accelerator.current_stream(self._device).record_event()

    def follow(self, event: Any) -> None:
        torch.accelerator.current_stream(self._device).wait_event(event)


class _DeviceCopyStream:
    def __init__(self, device: torch.device, scratch_nbytes: int) -> None:
        self.scratch_nbytes = scratch_nbytes
        self._stream = torch.Stream(device)
        # Made on its own stream, so that the allocator knows who uses it.
        with self._stream:
            self._scratch = _scratch(scratch_nbytes, device)

    def submit(self, copy: Copy, after: Sequence[Event]) -> Event:
        for event in after:
            assert isinstance(event, torch.Event), "of the same device as the stream"
            self._stream.wait_event(event)
        with self._stream:
            copy(self._scratch)
        return self._stream.record_event()


def _scratch(nbytes: int, device: torch.device) -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        raise ConfigError(
            f"{device} has no {format_nbytes(nbytes)} left for copies of KV blocks; lower "
            "--gpu-memory-utilization a little, or VLLM_CPU_KVCACHE_SPACE on a CPU"
        ) from error


def device_of(device: torch.device) -> Device:
    """What copies from and to a KV cache on ``device`` go by."""
    return Host() if device.type == "cpu" else Accelerator(device)
