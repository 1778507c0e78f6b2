"""Arena: the measured device, and memory for its KV caches."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from kvpool.errors import ConfigError
from kvpool.text import format_nbytes
from kvpool.transfer.device import Device, device_of

# An engine's KV cache has tens of gigabytes, and torch's kernels split tensors above 2^31 bytes or elements.
# So caches are that large here, although the copied blocks take little.
MOST_NBYTES = 32 << 30
SHARE = 0.5  # of free memory
BATCH_NBYTES = 256 << 20  # 4.7 ms over a bus of 55 GB/s
HOST_MOST_NBYTES = 2 << 30
HOST_BATCH_NBYTES = 4 << 20


def accelerator() -> str | None:
    """The kind of accelerator found by torch; None: only the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if found is None else found.type


class Arena:
    """On torch's accelerator, else on the CPU. Errors: ``ConfigError`` without enough memory.

    Threads: one, whose current stream is the engine's.
    """

    def __init__(self) -> None:
        self.accelerator = accelerator()
        self.torch_device = torch.empty(0, device=self.accelerator or "cpu").device  # with its number
        self.device: Device = device_of(self.torch_device)
        self.batch_nbytes = BATCH_NBYTES if self.accelerator else HOST_BATCH_NBYTES
        self._memory: torch.Tensor | None = None
        if self.accelerator:
            free, _ = torch.get_device_module(self.torch_device).mem_get_info()
            self._memory = self._allocated(min(MOST_NBYTES, int(SHARE * free)))

    @property
    def name(self) -> str:
        if not self.accelerator:
            return "CPU"
        return str(torch.get_device_module(self.torch_device).get_device_name())

    def take(self, nbytes: int) -> torch.Tensor:
        """Memory for one KV cache, at least ``nbytes``; on an accelerator always the same."""
        if self._memory is None:
            return self._allocated(nbytes)
        if nbytes > self._memory.numel():
            raise self._too_small(nbytes)
        return self._memory

    def timed(self, work: Callable[[], object]) -> float:
        """Seconds until all that ``work`` starts has ended."""
        self.wait()
        started = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - started

    def wait(self) -> None:
        if self.accelerator:
            torch.accelerator.synchronize()

    def wait_for_engine(self) -> None:
        if self.accelerator:
            torch.accelerator.current_stream().synchronize()

    def _allocated(self, nbytes: int) -> torch.Tensor:
        if not self.accelerator and nbytes > HOST_MOST_NBYTES:
            raise self._too_small(nbytes)
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        except RuntimeError as error:
            raise self._too_small(nbytes) from error

    def _too_small(self, nbytes: int) -> ConfigError:
        return ConfigError(
            f"{self.name} has no {format_nbytes(nbytes)} for a KV cache: lower --blocks, leave out large --tokens, or "
            "end what else uses the device"
        )
