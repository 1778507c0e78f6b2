"""Devices, and their streams of copies between a KV cache and staging, beside the engine's own stream.

A stream runs its copies in order. On an accelerator a copy begins after the engine's stream reached the marks
it waits for; its event is ready at its end. Only ``torch.accelerator``, ``torch.Stream`` and ``torch.Event``
are used, so that every kind of device behaves alike. On the CPU ``submit`` completes the copy.

During the capture of a CUDA graph no thread may call this module: torch's capture mode aborts when a thread
queries an event or pins memory. vLLM captures in this same thread, before its first step. Submitted copies
continue beside captures and replays.

Threads: the worker's model thread only. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from kvpool.errors import ConfigError
from kvpool.text import format_nbytes

# Device memory per stream, and bytes per launch and transfer. A larger scratch amortizes the time between
# transfers; on the CPU it should fit the cache.
ACCELERATOR_SCRATCH_NBYTES = 64 << 20
HOST_SCRATCH_NBYTES = 4 << 20

Copy = Callable[[torch.Tensor], None]


class Event(Protocol):
    def query(self) -> bool:
        """Whether the stream has reached this point; never waits. Raises the device's errors."""
        ...


class Done:
    def query(self) -> bool:
        return True


DONE = Done()


class CopyStream:
    """A queue of copies, run in order through one piece of device memory. Here of the CPU: at once."""

    def __init__(self, scratch_nbytes: int) -> None:
        self.scratch_nbytes = scratch_nbytes
        self._scratch = _scratch(scratch_nbytes, torch.device("cpu"))

    def submit(self, copy: Copy, after: Sequence[Event]) -> Event:
        """Run ``copy(scratch)`` (bytes) after ``after`` and earlier copies; returns the event of its end."""
        assert all(event.query() for event in after)
        copy(self._scratch)
        return DONE


class Device:
    """The device of a KV cache, and the engine's stream on it. Here the CPU: no stream, no waiting."""

    pinned = False  # asynchronous copies need pinned host memory
    scratch_nbytes = HOST_SCRATCH_NBYTES

    def copy_stream(self, scratch_nbytes: int) -> CopyStream:
        """A new stream of copies. Errors: ``ConfigError`` without memory for its scratch."""
        return CopyStream(scratch_nbytes)

    def mark(self) -> Event:
        """Ready when the engine's stream has finished its work so far."""
        return DONE

    def follow(self, event: Any) -> None:
        """Order the engine's further work after ``event``; does not wait."""


class _Accelerator(Device):
    """The device of ``torch.accelerator``. Untested on real hardware so far."""

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


class _DeviceCopyStream(CopyStream):
    def __init__(self, device: torch.device, scratch_nbytes: int) -> None:
        self.scratch_nbytes = scratch_nbytes
        self._stream = torch.Stream(device)
        # On its own stream, so that the allocator knows the user.
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
    except RuntimeError as error:  # includes torch.OutOfMemoryError
        raise ConfigError(
            f"{device} has no {format_nbytes(nbytes)} left for copies of KV blocks; lower "
            "--gpu-memory-utilization a little, or VLLM_CPU_KVCACHE_SPACE on a CPU"
        ) from error


def device_of(device: torch.device) -> Device:
    """The ``Device`` for a KV cache on ``device``."""
    return Device() if device.type == "cpu" else _Accelerator(device)
