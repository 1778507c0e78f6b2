"""Requests whose hits are audited, as vLLM's scheduler hands them to the scheduler half."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvpool import metrics
from kvpool.key.key import writer_name
from kvpool.store import Store
from kvpool.vllm.audit.findings import PUT_AWAY_S
from kvpool.vllm.audit.floor import LEAST_PAIRS
from kvpool.vllm.engine import internals
from kvpool.vllm.plan import AuditedPart, BlockRef, LayerDistance, Measured, PoolMetadata, PoolWorkerMetadata
from kvpool.vllm.save.store_queue import Wanted
from kvpool.vllm.scheduler import SchedulerHalf
from tests.support.clock import Clock
from tests.support.scheduler import BLOCK_TOKENS, FACTS, TABLE, answer, half, output, put, request

pytestmark = [pytest.mark.vllm]


def loaded(store: Store) -> tuple[SchedulerHalf, Request]:
    """A request whose load has ended: of a hit of six blocks the last one is to be computed."""
    scheduler, asked = half(store, audit_share=1.0), request("a")
    put(store, asked.block_hashes)
    scheduler.seen(asked)
    assert answer(scheduler, asked) == 80
    scheduler.allocated(asked, TABLE, 80)
    scheduler.plan(SchedulerOutput.make_empty())
    scheduler.update(None, finished_loads=["a"], failed_loads=[])
    return scheduler, asked


def computed(scheduler: SchedulerHalf, asked: Request) -> PoolMetadata:
    asked.num_computed_tokens = 80
    return scheduler.plan(output(asked, 20, TABLE))


def test_the_withheld_block_is_audited_when_it_is_computed(store: Store) -> None:
    scheduler, asked = loaded(store)
    scheduler.allocated(asked, TABLE, 0)  # vLLM says so again when a load has ended
    ((ref,),) = computed(scheduler, asked).audits.values()
    assert (ref.block_hash, ref.block_ids) == (asked.block_hashes[5], (12,))


def test_a_request_that_begins_anew_is_not_audited_for_what_it_was_offered_before(store: Store) -> None:
    scheduler, asked = loaded(store)
    assert answer(scheduler, asked, local_tokens=80) == 16
    scheduler.allocated(asked, TABLE, 16)
    assert computed(scheduler, asked).audits == {}
    assert scheduler.counters.take()[f"{metrics.AUDITS.name}/gone"] == 1


def test_all_ranks_are_told_the_engines_name_whatever_host_they_are_on(store: Store) -> None:
    scheduler = half(store, ranks=2, writer=OWN)
    assert [scheduler.plan(SchedulerOutput.make_empty()).writer for _ in range(2)] == [OWN, b""]


LONG = (list(range(7, 17)),)
OWN, OTHER, THIRD, FOURTH = (writer_name(name) for name in ("own", "other", "third", "fourth"))


class Audited:
    """A scheduler that knows its floor, and audits that end as the test says."""

    def __init__(self, store: Store) -> None:
        self.clock = Clock()
        self.scheduler = half(store, audit_share=1.0, clock=self.clock, writer=OWN, heard=False)
        self.store, self.number = store, 0
        self.scheduler.update(
            PoolWorkerMetadata(measured={(0, 0): Measured("at the start")}, facts={0: FACTS}), (), ()
        )
        for _ in range(LEAST_PAIRS):
            self.end(self.begin(), OWN, 0.0)

    def begin(self) -> Request:
        """A request that has computed its withheld block, and two more."""
        self.number += 1
        asked = request(f"request {self.number}", tokens=160, first=1000 * self.number)
        put(self.store, asked.block_hashes[:6])
        self.scheduler.seen(asked)
        assert answer(self.scheduler, asked) == 80
        self.scheduler.allocated(asked, LONG, 80)
        (load,) = self.scheduler.plan(SchedulerOutput.make_empty()).loads
        assert load.audited
        self.scheduler.update(None, finished_loads=[asked.request_id], failed_loads=[])
        asked.num_computed_tokens = 80
        (self.audit,) = self.scheduler.plan(output(asked, 32, LONG)).audits
        return asked

    def end(
        self, asked: Request, writer: bytes, difference: float, *, loads: set[bytes] | None = None
    ) -> PoolMetadata:
        """The next plan behind the verdict; ``loads``: who wrote what it loaded."""
        layers = [LayerDistance(f"layers.{place}", "float32", difference * place, 1.0) for place in range(2)]
        self.scheduler.update(
            PoolWorkerMetadata(
                audit_staged={self.audit: 1} if self.scheduler._audits._audits[self.audit].unstaged else {},
                audited={self.audit: [AuditedPart("", writer, layers)]},
                audit_ended={self.audit: 1},
                load_writers={asked.request_id: loads or set()},
            ),
            (),
            (),
        )
        return self.scheduler.plan(SchedulerOutput.make_empty())


@pytest.fixture
def audited(store: Store) -> Iterator[Audited]:
    audited = Audited(store)
    yield audited
    audited.scheduler.close()


def test_a_finding_has_all_records_of_its_request_deleted(audited: Audited) -> None:
    asked = audited.begin()
    step = audited.end(asked, OTHER, 1.0)
    assert [ref.block_hash for ref in step.wrong] == asked.block_hashes
    assert "layers.1 is 1 away" in step.found[audited.audit]
    removed = [event.block_hashes for event in audited.scheduler.take_events()]
    assert removed == [[internals.event_hash(one)] for one in asked.block_hashes]
    assert audited.end(audited.begin(), OTHER, 0.0).wrong == []


def test_what_follows_an_audited_hit_is_stored_after_the_verdict(audited: Audited) -> None:
    asked = audited.begin()
    assert audited.scheduler.plan(output(asked, 0, LONG)).stores == []
    audited.end(asked, OTHER, 0.0)
    asked.num_computed_tokens = 112
    (stored,) = audited.scheduler.plan(output(asked, 0, LONG)).stores
    assert stored.block_hash == asked.block_hashes[6]


@pytest.mark.parametrize(("difference", "stored"), [(0.0, 3), (1.0, 0)])
def test_nothing_of_a_request_on_a_wrong_hit_is_stored(
    audited: Audited, difference: float, stored: int
) -> None:
    asked = audited.begin()
    audited.end(asked, OTHER, difference)
    asked.num_computed_tokens = 112
    assert len(audited.scheduler.plan(output(asked, 32, LONG)).stores) == stored


def test_nothing_is_stored_of_a_request_that_has_its_blocks_and_was_not_scheduled_before_a_finding(
    audited: Audited,
) -> None:
    asked = audited.begin()
    behind = request("behind", tokens=160, first=1000 * audited.number)
    audited.scheduler.seen(behind)
    assert answer(audited.scheduler, behind, local_tokens=80) == 16
    audited.scheduler.allocated(behind, LONG, 16)
    audited.end(asked, OTHER, 1.0)
    audited.scheduler.update(None, finished_loads=["behind"], failed_loads=[])
    behind.num_computed_tokens = 96
    assert audited.scheduler.plan(output(behind, 32, LONG)).stores == []


def test_blocks_that_a_request_on_a_wrong_hit_computes_after_the_finding_are_nobody_elses(
    audited: Audited,
) -> None:
    asked = audited.begin()
    audited.end(asked, OTHER, 1.0)
    pool = audited.scheduler._block_pool
    assert pool is not None
    cached = internals.cached_blocks(pool)
    pool.cache_full_blocks(asked, [pool.blocks[one] for one in LONG[0]], 0, 8, BLOCK_TOKENS, 0)
    assert cached
    asked.num_computed_tokens = 112
    audited.scheduler.plan(output(asked, 16, LONG))
    assert cached.keys().isdisjoint({internals.cache_key(one, 0) for one in asked.block_hashes[6:8]})
    step = output(asked, 16, LONG)
    step.scheduled_cached_reqs.resumed_req_ids.add(asked.request_id)
    audited.scheduler.plan(step)
    assert not cached


def test_what_write_back_keeps_at_a_finding_is_not_stored(audited: Audited) -> None:
    asked = audited.begin()
    kept = audited.scheduler._store_planner._write_back
    block = BlockRef(b"computed by a request that has ended", 0, (20,))
    kept.keep(Wanted(block, None, (None,), 0, None))
    audited.end(asked, OTHER, 1.0)
    assert not kept._kept


def test_two_findings_put_a_writer_away_until_its_time_is_over(audited: Audited) -> None:
    assert audited.end(audited.begin(), OTHER, 1.0).put_away is None
    assert audited.end(audited.begin(), OTHER, 1.0).put_away == {OTHER}
    assert audited.scheduler.plan(SchedulerOutput.make_empty()).put_away is None, "it is told once"
    audited.clock.now_s += PUT_AWAY_S
    assert audited.scheduler.plan(SchedulerOutput.make_empty()).put_away == frozenset()


def test_an_engine_that_finds_three_writers_wrong_leaves_the_pool_until_a_reset(audited: Audited) -> None:
    for writer in (OTHER, THIRD):
        assert not audited.end(audited.begin(), writer, 1.0).off
    assert audited.end(audited.begin(), FOURTH, 1.0).off
    asked = request("behind", first=90_000)
    put(audited.store, asked.block_hashes)
    audited.scheduler.seen(asked)
    assert audited.scheduler.matched_tokens(asked, 0) == (0, False)
    audited.scheduler.reset()
    assert not audited.scheduler.plan(SchedulerOutput.make_empty()).off


def doubting(audited: Audited) -> SchedulerHalf:
    for writer in (OTHER, THIRD, FOURTH):
        step = audited.end(audited.begin(), writer, 1.0)
    assert step.off
    assert step.wrong == [], "one that doubts itself deletes nothing of others"
    return audited.scheduler


def told(scheduler: SchedulerHalf) -> str:
    news = scheduler._traffic._audits
    assert news is not None
    return news.doubts


def answers(scheduler: SchedulerHalf, digest: str) -> PoolMetadata:
    """The workers say what weights they hold."""
    number = scheduler.plan(SchedulerOutput.make_empty()).measure
    scheduler.update(PoolWorkerMetadata(measured={(0, number): Measured(digest)}), (), ())
    return scheduler.plan(SchedulerOutput.make_empty())


def test_a_call_that_changes_no_weights_ends_no_doubt(audited: Audited) -> None:
    scheduler = doubting(audited)
    start = scheduler._namespace._now
    scheduler.called("some_call")
    step = answers(scheduler, "at the start")
    assert scheduler._namespace._now == start
    assert (scheduler._is_off, step.off) == (True, True)
    assert told(scheduler)


def test_other_weights_end_doubt_and_what_was_found_before(audited: Audited) -> None:
    scheduler = doubting(audited)
    scheduler.called("update_weights")
    answers(scheduler, "others")
    assert not scheduler._namespace.is_doubted
    assert (told(scheduler), scheduler._findings.put_away(), scheduler._findings.doubts) == (
        "",
        frozenset(),
        "",
    )


def test_a_reset_while_the_engine_has_requests_ends_no_doubt(audited: Audited) -> None:
    scheduler = doubting(audited)
    pool = scheduler._block_pool
    assert pool is not None
    held = pool.get_new_blocks(1)
    scheduler.reset()
    assert told(scheduler)
    answers(scheduler, "at the start")
    assert scheduler._is_off
    pool.free_blocks(held)
    scheduler.reset()
    assert not told(scheduler)


def test_a_doubt_while_the_workers_are_asked_counts_when_they_have_answered(audited: Audited) -> None:
    audited.begin()
    audited.scheduler.called("some_call")
    audited.scheduler._namespace.doubt("planted")
    answers(audited.scheduler, "at the start")
    assert audited.scheduler._is_off


def test_records_are_deleted_in_the_namespace_where_they_were_found_wrong(audited: Audited) -> None:
    asked = audited.begin()
    audited.scheduler.called("some_call")
    number = audited.scheduler.plan(SchedulerOutput.make_empty()).measure
    assert audited.end(asked, OTHER, 1.0).wrong == [], "the workers have no namespace"
    audited.scheduler.update(PoolWorkerMetadata(measured={(0, number): Measured("at the start")}), (), ())
    assert audited.scheduler.wants_steps()
    step = audited.scheduler.plan(SchedulerOutput.make_empty())
    assert [ref.block_hash for ref in step.wrong] == asked.block_hashes


def test_records_are_not_deleted_in_the_namespace_of_other_weights(audited: Audited) -> None:
    asked = audited.begin()
    audited.scheduler.update(PoolWorkerMetadata(audit_staged={audited.audit: 1}), (), ())
    audited.scheduler.reset()
    number = audited.scheduler.plan(SchedulerOutput.make_empty()).measure
    audited.end(asked, OTHER, 1.0)
    audited.scheduler.update(PoolWorkerMetadata(measured={(0, number): Measured("others")}), (), ())
    step = audited.scheduler.plan(SchedulerOutput.make_empty())
    assert step.weights
    assert step.wrong == []
