from __future__ import annotations

from kvpool.vllm.plan import PoolWorkerMetadata


def test_reports_of_ranks_add_up() -> None:
    ours = PoolWorkerMetadata(facts={0: {"a": 1}}, stored={1: 1, 2: 1}, missing={(b"h", 0)})
    theirs = PoolWorkerMetadata(facts={1: {"a": 1}}, stored={2: 1}, dropped={1: 1}, broken={1: "disk"})
    both = ours.aggregate(theirs)
    assert both.facts == {0: {"a": 1}, 1: {"a": 1}}
    assert both.stored == {1: 1, 2: 2}
    assert both.dropped == {1: 1}
    assert both.broken == {1: "disk"}
    assert both.missing == {(b"h", 0)}
    assert not both.asked
    timed = PoolWorkerMetadata(timed=3, load_s={"a": 1.0, "b": 2.0})
    slower = timed.aggregate(PoolWorkerMetadata(load_s={"b": 3.0, "c": 4.0}))
    assert (slower.timed, slower.load_s) == (3, {"a": 1.0, "b": 3.0, "c": 4.0})
    assert not timed.is_empty()
    assert both.aggregate(PoolWorkerMetadata(asked=True)).asked
    assert PoolWorkerMetadata().is_empty()
    assert not PoolWorkerMetadata(asked=True).is_empty()
    assert not both.is_empty()
