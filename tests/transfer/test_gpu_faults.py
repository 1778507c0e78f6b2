"""Ends in the middle of copies: what is given back is not written any more, and nothing is kept."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from kvpool.transfer import BlockCopier
from kvpool.transfer.kv_memory import ABANDON_AFTER_S
from tests.support.deadlines import ends_within
from tests.support.devices import ACCELERATED, ON_CUDA, RunningDevice, keep_busy, wait_for_all
from tests.support.mover import BLOCKS, Bench, block

pytestmark = pytest.mark.gpu

BUSY_S = 0.5
LONGER_THAN_CLOSE_WAITS_S = ABANDON_AFTER_S + 0.75
CONTENTS = range(1, 7)
PLACES = range(11, 17)


def under_way(at: Bench, busy_s: float = BUSY_S) -> None:
    """A store of blocks 1 to 6 and a load of their contents into 11 to 16, both behind what the engine computes."""
    at.put(*CONTENTS)
    keep_busy(busy_s)
    for content in CONTENTS:
        at.compute(content, 100 + content)
    at.engine.stage([block(100 + content, content) for content in CONTENTS], list(CONTENTS))
    pairs = zip(CONTENTS, PLACES, strict=True)
    at.engine.load("job", [block(content, place) for content, place in pairs], timeout_s=60, max_s=60)


def end_all(at: Bench) -> None:
    """The store ends what it has, and the mover copies it on."""
    at.store.end_all()
    at.engine._advance()


def write_over(at: Bench) -> None:
    """The engine has the blocks of both again, and computes at once."""
    for place in [*CONTENTS, *PLACES]:
        at.compute(place, -place)


def assert_written_over(at: Bench) -> None:
    wait_for_all()
    for place in [*CONTENTS, *PLACES]:
        assert at.holds(place, -place), f"block {place} was written after it was given back"


@pytest.mark.parametrize("busy_s", [BUSY_S, LONGER_THAN_CLOSE_WAITS_S])
def test_what_an_engine_computes_after_close_comes_behind_copies_under_way(busy_s: float) -> None:
    at = Bench(slots=32, scratch_blocks=4, device=RunningDevice)
    under_way(at, busy_s)
    end_all(at)
    with ends_within(ABANDON_AFTER_S):
        at.engine.close()
    write_over(at)
    assert_written_over(at)
    at.engine._reap()
    assert at.engine.slots_in_use == 0
    assert not any(at.kept(100 + content) for content in CONTENTS if ACCELERATED), (
        "nothing is sent after close"
    )


def test_a_copy_that_fails_half_way_writes_nothing_after_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two layers is copied, and the second one fails, as when a launch is refused."""
    at = Bench(slots=32, scratch_blocks=8, device=RunningDevice)
    under_way(at, LONGER_THAN_CLOSE_WAITS_S)
    launched = []

    def part(self: BlockCopier, *arguments: Any) -> torch.Tensor:
        launched.append(None)
        if len(launched) > 1:
            raise RuntimeError("planted")
        return whole(*arguments)

    whole = BlockCopier._part
    assert at.engine._memory._copiers[0].launches == 2
    with monkeypatch.context() as broken:
        broken.setattr(BlockCopier, "_part", part)
        with pytest.raises(RuntimeError, match="planted"):
            end_all(at)
    at.engine.close()
    write_over(at)
    assert_written_over(at)
    at.engine._reap()
    assert at.engine.slots_in_use == 0


def pinned_nbytes() -> int:
    """Of host memory, in use: torch before 2.12 has the one name for it, or the other."""
    stats = torch.cuda.host_memory_stats() if ON_CUDA else {}
    return int(stats.get("active_bytes.current", stats.get("allocated_bytes.current", 0)))


def device_nbytes() -> int:
    return torch.accelerator.memory_allocated() if ACCELERATED else 0


@pytest.mark.parametrize("busy_s", [0.0, LONGER_THAN_CLOSE_WAITS_S])
def test_nothing_is_kept_of_a_mover_that_is_closed_in_the_middle(busy_s: float) -> None:
    gc.collect()
    pinned, allocated = pinned_nbytes(), device_nbytes()
    at = Bench(slots=4 * BLOCKS, scratch_blocks=8, device=RunningDevice)
    staging, scratch = weakref.ref(at.engine.staging), weakref.ref(at.device.streams[0]._stream._scratch)
    under_way(at, busy_s)
    end_all(at)
    at.engine.close()
    del at
    gc.collect()
    assert staging() is None
    assert scratch() is None
    wait_for_all()
    torch.empty(1, pin_memory=ON_CUDA)  # torch looks through what was given back when it is asked for more
    assert pinned_nbytes() <= pinned + 512
    assert device_nbytes() <= allocated
