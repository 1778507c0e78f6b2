"""Workers of vLLM 0.33 whose hashes cover tokens behind their block: no prompt matches them, and they are named."""

from __future__ import annotations

import logging

import pytest

from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.rank import LOOKAHEAD
from tests.support.fleets import a_worker, say
from tests.support.wire import batch, packed64, stored

AHEAD = batch(stored([1, 2], lookahead_token_ids=[[5], [6]]))


def test_a_worker_that_no_prompt_can_match_is_stale_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvpool.index")
    fleet = Fleet()
    for name, told in (("draft", AHEAD), ("plain", batch(stored([1, 2])))):
        fleet.add(a_worker(name), "call")
        say(fleet, f"default/{name}", 0, 0, told)
    for number in range(3):  # and it stays so
        assert [(one.publishers[0].stale, one.publishers[0].problem) for one in fleet.workers()] == [
            (True, LOOKAHEAD), (False, "")
        ]  # fmt: skip
        say(fleet, "default/draft", 0, 1 + number, batch(stored([3 + number], lookahead_token_ids=[[7]])))
    rows = fleet.lookup("m", hashes64=packed64([1]))
    assert (rows.device_blocks, rows.stale) == ((0, 1), (True, False))
    said = [line for line in caplog.messages if "EAGLE" in line]
    assert said == [f"worker default/draft rank 0 is stale: {LOOKAHEAD}"], "once, and it names what to change"
    assert "disable_lookahead_block_hashes" in LOOKAHEAD


def test_it_is_followed_when_it_starts_anew_without() -> None:
    fleet = Fleet()
    fleet.add(a_worker(), "flag")
    say(fleet, "default/w", 0, 0, AHEAD)
    fleet.rank("default/w", 0).reset("batches were missed")
    assert fleet.workers()[0].publishers[0].problem == LOOKAHEAD, "a gap says nothing of its hashes"
    fleet.rank("default/w", 0).reset("its publisher was started anew", anew=True)
    say(fleet, "default/w", 0, 0, batch(stored([1, 2])))
    (rank,) = fleet.workers()[0].publishers
    assert (rank.stale, rank.problem) == (False, "its publisher was started anew")
    assert next(iter(fleet.lookup("m", hashes64=packed64([1, 2])))).device_blocks == 2


def test_a_snapshot_takes_nothing_over_of_it() -> None:
    """What a restarted index is told from the first batch on names it again."""
    fleet = Fleet()
    fleet.add(a_worker(), "flag")
    say(fleet, "default/w", 0, 0, AHEAD)
    assert [
        rank.position for partition in fleet.snapshot() for one in partition.workers for rank in one.ranks
    ] == [None]
