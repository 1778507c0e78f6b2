"""A device whose streams go on only when the test says so: events that are late, as an accelerator's are.

The memory is the host's, the order is that of streams: the engine's stream and each lane are queues; what stands behind
a wait for another queue's event is not done before that event is ready.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvpool.transfer.lane import Copy, Event


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


class SlowLane:
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
        self.lanes: list[SlowLane] = []

    def lane(self, scratch_nbytes: int) -> SlowLane:
        self.lanes.append(SlowLane(scratch_nbytes))
        return self.lanes[-1]

    def mark(self) -> Event:
        return self.engine.give(lambda: None)

    def follow(self, event: Any) -> None:
        self.engine.give(lambda: None, [event])

    def go_on(self) -> None:
        """Do everything that can be done."""
        streams = [self.engine, *(lane.stream for lane in self.lanes)]
        while sum(stream.go_on() for stream in streams):
            pass
