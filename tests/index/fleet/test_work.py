"""What one prompt or one batch may cost: it is refused, or done in a thread, before others would wait for it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvpool import ConfigError, KVPoolError, PrefixIndex
from kvpool.errors import MalformedEvents
from kvpool.index.fleet import partition as module
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.table import ClearedTooOften
from kvpool.index.limits import NotAtOnce
from tests.support.fleets import a_worker, joined, say
from tests.support.wire import batch, cleared, packed64, stored

BLOCKS = list(range(1, 4097))
WINDOW = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 33}


@pytest.mark.parametrize("circle", [[1], [1, 2], [1, 2, 3], [*range(1, 100)], [2, *range(500, 700)]])
def test_hashes_that_go_in_circles_are_refused(circle: list[int]) -> None:
    fleet = Fleet()
    for place in range(40):
        fleet.add(a_worker(f"w{place}", port=5000 + place), "flag")
        say(fleet, f"default/w{place}", 0, 0, batch(stored([1, 2] if place % 2 else [1])))
    prompt = packed64((circle * 1000)[:1000])
    with pytest.raises(
        ConfigError, match="a prompt's block hashes are all different: that of block"
    ) as caught:
        fleet.lookup("m", hashes64=prompt)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="comes again"):
        fleet.ask("m", hashes64=prompt)
    assert fleet.lookup("m", hashes64=packed64(BLOCKS)).device_blocks[:2] == (1, 2)


def test_a_match_that_others_would_wait_for_too_long_is_refused() -> None:
    """A worker that holds every other block changes the set at each; windows are looked for at each change."""
    index = PrefixIndex(reuse_reports=False, block_tokens=16)
    both = batch(stored(BLOCKS, group_idx=0), stored(BLOCKS, group_idx=1, **WINDOW))
    for place in range(600):
        index.apply(f"w{place}", both)
    assert len(index.match(packed64(BLOCKS))) == 600
    index.apply("half", batch(stored(BLOCKS[::2])))
    with pytest.raises(KVPoolError, match="name candidates, or ask for a shorter part of it") as caught:
        index.match(packed64(BLOCKS))
    assert not isinstance(caught.value, ConfigError), "the request is well-formed: it is a limit"
    assert len(index.match(packed64(BLOCKS[:100]))) == 601
    (row,) = index.match(packed64(BLOCKS), workers=["w7"])
    assert row.device_blocks == 4096


def in_turns(turns: int, *between: dict[str, Any]) -> bytes:
    """A block is stored, and what is stored is taken away, again and again."""
    return batch(*(event for turn in range(turns) for event in (stored([1000 + turn]), *between)))


def test_a_batch_that_stores_and_clears_in_turns_costs_its_own_rank_what_it_holds() -> None:
    """Each clear is a walk over the table: a million of them held the lock for minutes."""
    fleet = Fleet()
    for name in ("w", "other"):
        joined(fleet, a_worker(name, port=5000 + 200 * len(name)), stored(BLOCKS))
    say(fleet, "default/w", 0, 1, in_turns(16, cleared()))
    say(fleet, "default/w", 0, 2, batch(cleared(), stored(BLOCKS), *[cleared()] * 1000, stored(BLOCKS)))
    assert fleet.lookup("m", hashes64=packed64(BLOCKS)).device_blocks == (4096, 4096), "it was idle meanwhile"
    with pytest.raises(MalformedEvents, match="stores and clears in turns, more than 16 times") as caught:
        say(fleet, "default/w", 0, 3, in_turns(100_000, cleared()))
    assert isinstance(caught.value, ClearedTooOften)
    rows = fleet.lookup("m", hashes64=packed64(BLOCKS))
    assert rows.device_blocks == (4096, 0)
    assert rows.sequences == (0, 0), "of none of its batches"
    (status,) = fleet.workers(["default/w"])
    assert status.publishers[0].blocks == 0
    assert fleet.totals().malformed_batches == 1


def a_crowd(workers: int = 300) -> Fleet:
    """Each holds other halves of a prompt: the holders change at each block."""
    fleet = Fleet()
    for place in range(workers):
        fleet.add(a_worker(f"w{place}", port=5000 + 200 * place), "flag")
        window = [block for block in BLOCKS if block * 2654435761 >> place % 28 & 1]
        both = batch(stored(BLOCKS, group_idx=0), stored(window, parent=1, group_idx=1, **WINDOW))
        say(fleet, f"default/w{place}", 0, 0, both)
    return fleet


def test_a_prompt_of_more_work_than_others_should_wait_for_is_not_answered_at_once() -> None:
    fleet = a_crowd()
    prompt = packed64(BLOCKS)
    with pytest.raises(NotAtOnce):
        fleet.ask("m", hashes64=prompt, at_once=True)
    (answer,) = fleet.ask("m", hashes64=prompt)
    assert len(answer.members) == 300
    (answer,) = fleet.ask("m", hashes64=prompt[:80], at_once=True)
    assert len(answer.members) == 300


def test_an_answer_at_once_waits_for_no_rank_to_which_a_batch_is_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet()
    for place in range(3):
        fleet.add(a_worker(f"w{place}", port=5000 + 200 * place), "flag")
        say(fleet, f"default/w{place}", 0, 0, batch(stored(BLOCKS)))
    ranks = [fleet._ranks[f"default/w{place}", 0] for place in range(3)]
    ranks[1].version += 1  # a change is under way
    (answer,) = fleet.ask("m", hashes64=packed64(BLOCKS), at_once=True)
    assert answer.lookup().device_blocks == (4096,) * 3, "the rank was free"
    with ranks[1].lock, pytest.raises(NotAtOnce, match="a batch is being applied"):
        fleet.ask("m", hashes64=packed64(BLOCKS), at_once=True)
    monkeypatch.setattr(module, "MOVED_AT_ONCE", 1)
    ranks[2].version += 1
    with pytest.raises(NotAtOnce, match="batches of 2 ranks came meanwhile"):
        fleet.ask("m", hashes64=packed64(BLOCKS), at_once=True)


def test_an_answer_at_once_waits_for_no_table_that_takes_a_batch() -> None:
    fleet = Fleet()
    joined(fleet, a_worker(), stored(BLOCKS))
    (partition,) = fleet._models["default", "m"]
    large = batch(stored(list(range(1 << 32, (1 << 32) + (1 << 20)))))
    applied = threading.Event()

    def apply() -> None:
        for _ in range(20):  # none of them belongs to a rank that is asked about
            partition.index.apply("of nobody", large)
            partition.index.remove_worker("of nobody")
        applied.set()

    applying = threading.Thread(target=apply)
    applying.start()
    refused = 0
    try:
        while not applied.is_set() and not refused:
            try:
                fleet.ask("m", hashes64=packed64(BLOCKS[:8]), at_once=True)
            except NotAtOnce:
                refused += 1
    finally:
        applying.join()
    assert refused
    fleet.ask("m", hashes64=packed64(BLOCKS[:8]), at_once=True)
