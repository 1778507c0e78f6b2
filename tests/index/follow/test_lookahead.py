"""Workers of vLLM 0.33 whose hashes cover tokens behind their block: no prompt matches them, and they are named."""

from __future__ import annotations

import logging

import pytest

from kvpool import IndexClient
from kvpool.index import Worker
from kvpool.index.fleet import Fleet
from kvpool.index.follow.subscriber import Subscriber
from kvpool.index.rank import LOOKAHEAD
from tests.support.deadlines import eventually
from tests.support.feeds import misbehaving
from tests.support.fleets import a_worker, say, serving
from tests.support.wire import batch, packed64, stored

pytestmark = pytest.mark.usefixtures("grpc_started")

AHEAD = batch(stored([1, 2], lookahead_token_ids=[[5], [6]]))


def test_a_worker_that_no_prompt_can_match_is_stale_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvpool.index")
    fleet = Fleet()
    with (
        misbehaving() as draft, misbehaving() as plain, serving(fleet, feed=Subscriber()) as served,
        IndexClient(served.target) as client,
    ):  # fmt: skip
        try:
            draft.publish(batch(stored([1, 2], lookahead_token_ids=[[5], [6]]), dp_rank=3))
            plain.publish(batch(stored([1, 2]), dp_rank=3))
            for name, publisher in (("draft", draft), ("plain", plain)):
                client.register(Worker(name, "m", 16, fleet.seed_id, (publisher.publisher,)))

            def problems() -> dict[str, tuple[bool, str]]:
                return {
                    status.worker.name: (rank.stale, rank.problem)
                    for status in client.workers()
                    for rank in status.publishers
                }

            expected = {"draft": (True, LOOKAHEAD), "plain": (False, "")}
            assert eventually(lambda: problems() == expected), problems()
            for number in range(3):  # and it stays so
                draft.publish(batch(stored([3 + number], parent=2, lookahead_token_ids=[[7]]), dp_rank=3))
            assert eventually(lambda: client.workers()[0].publishers[0].batches == 4)
            assert problems() == expected
            rows = {
                row.worker: (row.device_blocks, row.stale)
                for row in client.lookup("m", hashes64=packed64([1]))
            }
            assert rows == {"draft": (0, True), "plain": (1, False)}
        finally:
            served.fleet.close()
    said = [line for line in caplog.messages if "EAGLE" in line]
    assert said == [f"worker default/draft rank 3 is stale: {LOOKAHEAD}"], "once, and it names what to change"
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
