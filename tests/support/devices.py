"""Devices of tests: the accelerator that torch drives or the CPU, and one whose streams go on when the test says so.

On the CPU tests marked ``gpu`` are small, and a copy is over when it has been submitted: what comes too early or too
late is seen on an accelerator, and on ``SlowDevice``. Its memory is the host's, its order is that of streams: the
engine's stream and those of copies are queues; what stands behind a wait for another queue's event waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kvpool.metrics import Counters
from kvpool.store import Store
from kvpool.transfer import BlockCopier, KVCacheMover
from kvpool.transfer.device import Copy, CopyStream, Event, device_of
from tests.support.deadlines import eventually


def _device() -> torch.device:
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    driven = torch.accelerator.current_accelerator()
    assert driven is not None
    return torch.device(driven.type, torch.accelerator.current_device_index())


DEVICE = _device()
ACCELERATED = DEVICE.type != "cpu"
ON_CUDA = DEVICE.type == "cuda"

needs_cuda = pytest.mark.skipif(
    not ON_CUDA, reason=f"CUDA alone has what is looked at; gpu tests run on {DEVICE}"
)

if ACCELERATED:
    # Before any test: a context opens descriptors that the process keeps.
    torch.mm(torch.ones((2, 2), device=DEVICE), torch.empty((2, 2), pin_memory=True).to(DEVICE))

CLOCK_HZ = 2e9  # a little more than GPUs run at, so that no sleep is shorter than it should be
PRODUCT_SIZE = 2048
PRODUCT_S = 1e-3  # about what one takes on an accelerator that cannot sleep


def keep_busy(seconds: float) -> None:
    """Give the engine's stream about ``seconds`` of work that leaves copies room beside it; none on the CPU."""
    if ON_CUDA:
        torch.cuda._sleep(int(seconds * CLOCK_HZ))
    elif ACCELERATED:
        matrix = torch.ones((PRODUCT_SIZE, PRODUCT_SIZE), device=DEVICE)
        for _ in range(1 + int(seconds / PRODUCT_S)):
            torch.mm(matrix, matrix)


def wait_for_all() -> None:
    """Wait for everything that the device was given."""
    if ACCELERATED:
        torch.accelerator.synchronize(DEVICE)


def wait_for(event: Event) -> None:
    assert eventually(event.query)


BLOCKS = 128
LAYERS, NUMBERS = (8, 16 << 10) if ACCELERATED else (2, 64)  # elements of four bytes of a layer's block


class RunningDevice:
    """What the tests run on, with the face of ``SlowDevice``. Its streams go on by themselves."""

    def __init__(self, scratch_nbytes: int | None = None) -> None:
        self._device = device_of(DEVICE)
        self.pinned = self._device.pinned
        self.scratch_nbytes = scratch_nbytes or self._device.scratch_nbytes
        self.engine = RunningStream(self)
        self.streams: list[RunningCopies] = []

    def copy_stream(self, scratch_nbytes: int) -> RunningCopies:
        self.streams.append(RunningCopies(self, self._device.copy_stream(scratch_nbytes)))
        return self.streams[-1]

    def mark(self) -> Event:
        return self._device.mark()

    def follow(self, event: Any) -> None:
        self._device.follow(event)

    def go_on(self) -> None:
        wait_for_all()


class RunningCopies:
    def __init__(self, device: RunningDevice, stream: CopyStream) -> None:
        self._stream = stream
        self.scratch_nbytes = stream.scratch_nbytes
        self.stream = RunningStream(device)

    def submit(self, copy: Copy, after: Sequence[Event]) -> Event:
        return self._stream.submit(copy, after)


class RunningStream:
    """The engine's stream, or one of copies, which takes nothing else."""

    def __init__(self, device: RunningDevice) -> None:
        self._device = device

    def give(self, work: Callable[[], None], after: Sequence[Event] = ()) -> Event:
        for event in after:
            self._device.follow(event)
        work()
        return self._device.mark()

    def go_on(self, most: int = 1) -> int:
        """It goes on anyway: the engine's has ``most`` more to do."""
        if self is self._device.engine:
            keep_busy(most * 1e-4)
        return 0


class Engine:
    """An engine's KV cache and stream, and the mover beside it. A block's content is its number in every element."""

    def __init__(self, store: Store, device: torch.device) -> None:
        self.cache = torch.zeros((LAYERS, BLOCKS, NUMBERS), dtype=torch.int32, device=device)
        copier = BlockCopier(list(self.cache))
        self.mover = KVCacheMover(
            store,
            [copier],
            staging_nbytes=BLOCKS * copier.payload_nbytes,
            max_store_nbytes_per_s=0,
            counters=Counters(),
        )

    def compute(self, contents: dict[int, int]) -> None:
        """Have the engine's stream write ``contents`` by block."""
        for block, content in contents.items():
            self.cache[:, block].fill_(content)

    def read(self, blocks: list[int]) -> list[torch.Tensor]:
        """What the engine's stream finds in the blocks when it comes to here."""
        return [self.cache[:, block].clone() for block in blocks]

    def holds(self, contents: dict[int, int]) -> None:
        assert_contents(self.read(list(contents)), list(contents.values()))


def assert_contents(blocks: list[torch.Tensor], contents: list[int]) -> None:
    found = [block.unique().tolist() for block in blocks]
    assert found == [[content] for content in contents]


class LateEvent:
    def __init__(self) -> None:
        self.ready = False

    def query(self) -> bool:
        return self.ready


class Stream:
    """Work in order. An entry: what to wait for, what to do then, the event that is ready afterwards."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Sequence[Event], Callable[[], None], LateEvent]] = deque()

    def give(self, work: Callable[[], None], after: Sequence[Event] = ()) -> LateEvent:
        event = LateEvent()
        self._queue.append((list(after), work, event))
        return event

    def go_on(self, most: int = 1 << 30) -> int:
        """Do up to ``most`` entries; how many it were. Stops at one that has to wait."""
        done = 0
        while done < most and self._queue and all(event.query() for event in self._queue[0][0]):
            _, work, event = self._queue.popleft()
            work()
            event.ready = True
            done += 1
        return done

    def __len__(self) -> int:
        return len(self._queue)


class SlowCopies:
    def __init__(self, scratch_nbytes: int) -> None:
        self.scratch_nbytes = scratch_nbytes
        self.stream = Stream()
        self._scratch = torch.empty(scratch_nbytes, dtype=torch.uint8)

    def submit(self, copy: Copy, after: Sequence[Event]) -> Event:
        return self.stream.give(lambda: copy(self._scratch), after)


class SlowDevice:
    pinned = False

    def __init__(self, scratch_nbytes: int) -> None:
        self.scratch_nbytes = scratch_nbytes
        self.engine = Stream()
        self.streams: list[SlowCopies] = []

    def copy_stream(self, scratch_nbytes: int) -> SlowCopies:
        self.streams.append(SlowCopies(scratch_nbytes))
        return self.streams[-1]

    def mark(self) -> Event:
        return self.engine.give(lambda: None)

    def follow(self, event: Any) -> None:
        self.engine.give(lambda: None, [event])

    def go_on(self) -> None:
        """Do everything that can be done."""
        streams = [self.engine, *(stream.stream for stream in self.streams)]
        while sum(stream.go_on() for stream in streams):
            pass
