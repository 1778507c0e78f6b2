"""Which hits are audited, what is held meanwhile, and that every audit ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from vllm.v1.core.block_pool import BlockPool

from kvpool import metrics
from kvpool.key.key import writer_name
from kvpool.metrics import Counters
from kvpool.vllm.audit.audits import LEAST_PAUSE_S, MAX_OPEN, WHILE_LEARNING, Audits
from kvpool.vllm.audit.floor import EXPERTS, LEAST, LEAST_PAIRS, STATES, Floor
from kvpool.vllm.geometry import Geometry, Group
from kvpool.vllm.plan import AuditedPart, LayerDistance, PoolMetadata, PoolWorkerMetadata
from kvpool.vllm.requests import Asked, RequestParams
from tests.support.clock import Clock
from tests.support.scheduler import TABLE, output, request

pytestmark = [pytest.mark.vllm]

FULL, STATE = Group(16), Group(16, state=True, window=2)
ALL = b"\1" * 8
HIT = 128


def audits(
    *groups: Group,
    share: float = 1.0,
    clock: Clock | None = None,
    random: Callable[[], float] = lambda: 0.0,
    align_tokens: int = 16,
) -> Audits:
    return Audits(
        Geometry(groups or (FULL,), align_tokens=align_tokens, hash_block_tokens=16),
        share=share,
        writer=writer_name("this"),
        stores=True,
        counters=Counters(),
        clock=(clock or Clock()).monotonic,
        random=random,
    )


@pytest.mark.parametrize(
    ("geometry", "width"),
    [
        (Geometry((FULL,)), 1.0),
        (Geometry((FULL, STATE)), STATES),
        (Geometry((FULL,), has_experts=True), EXPERTS),
    ],
)
def test_floors_are_wider_in_models_with_states_or_experts(geometry: Geometry, width: float) -> None:
    found = Audits(
        geometry, share=1.0, writer=writer_name("this"), stores=True, counters=Counters(), clock=Clock().monotonic,
        random=lambda: 0.0,
    )  # fmt: skip
    least = LayerDistance("model.layers.0.attn", "bfloat16", 0.0, 1.0)
    assert found._floor._least(least) == width * LEAST["bfloat16"]


def test_the_last_block_of_a_hit_is_withheld() -> None:
    assert audits().shortened([ALL], 0, HIT) == HIT - 16


def test_a_hit_is_withheld_by_a_record_at_most() -> None:
    three = audits(Group(16, blocks_per_record=3))
    assert three.shortened([b"\1\1\1"], 0, 144) == 96
    assert audits(FULL, align_tokens=32).shortened([ALL], 0, HIT) == HIT - 32, "where the engine's hits end"


@pytest.mark.parametrize(("local_tokens", "end"), [(96, 112), (112, 128), (120, 128)])
def test_something_is_loaded_in_front_of_the_withheld_block(local_tokens: int, end: int) -> None:
    assert audits().shortened([ALL], local_tokens, HIT) == end


def test_a_hit_that_ends_inside_of_a_block_is_not_audited() -> None:
    assert audits().shortened([ALL], 0, HIT - 3) == HIT - 3


@pytest.mark.parametrize(
    ("states", "end"),
    [
        (b"\0\1\0\0\0\0\0\1", HIT),  # 96 tokens more would be computed
        (b"\1\1\1\1\1\1\0\1", HIT),
        (b"\0\0\0\0\0\0\1\1", HIT - 16),
    ],
)
def test_where_states_are_rarer_than_blocks_a_hit_is_audited_if_it_costs_one_block(
    states: bytes, end: int
) -> None:
    assert audits(FULL, STATE).shortened([ALL, states], 0, HIT) == end


@pytest.mark.parametrize("window", [9, 17, 40])
def test_hits_of_windows_end_a_block_earlier_if_the_window_in_front_of_it_is_there(window: int) -> None:
    windowed = audits(FULL, Group(16, window=window))
    needed = -(-(window - 1) // 16)
    there = b"\0" * (8 - 1 - needed) + b"\1" * (needed + 1)
    assert windowed.shortened([ALL, there], 0, HIT) == HIT - 16
    rare = b"\0" * (8 - needed) + b"\1" * needed
    assert windowed.shortened([ALL, rare], 0, HIT) == HIT


@pytest.mark.parametrize(
    "groups",
    [(STATE,), (STATE, Group(16, scratch=True, window=16))],
)
def test_what_has_no_block_to_compare_is_not_audited(groups: tuple[Group, ...]) -> None:
    assert audits(*groups).shortened([ALL] * len(groups), 0, HIT) == HIT


def test_beside_drafts_a_hit_ends_where_the_block_behind_is_known() -> None:
    ahead = audits(Group(16, reads_ahead=True))
    assert ahead.shortened([ALL], 0, HIT) == HIT - 16


@pytest.mark.parametrize(
    ("drawn", "is_known", "end"),
    [
        (0.0, True, HIT - 16),
        (0.0099, True, HIT - 16),
        (0.01, True, HIT),
        (0.01 * WHILE_LEARNING - 0.001, False, HIT - 16),
        (0.01 * WHILE_LEARNING, False, HIT),
    ],
)
def test_a_share_of_hits_is_audited_and_more_until_the_floor_is_known(
    monkeypatch: pytest.MonkeyPatch, drawn: float, is_known: bool, end: int
) -> None:
    monkeypatch.setattr(Floor, "is_known", is_known)
    assert audits(share=0.01, random=lambda: drawn).shortened([ALL], 0, HIT) == end


def test_without_a_share_no_hit_is_audited() -> None:
    assert audits(share=0.0).shortened([ALL], 0, HIT) == HIT


def asked(name: str = "a") -> Asked:
    """Of a prompt of six whole blocks."""
    return Asked(request(name), RequestParams())


def test_below_a_share_of_all_there_is_a_pause_between_two_audits() -> None:
    clock = Clock()
    some, every = audits(share=0.99, clock=clock), audits(clock=clock)
    for one in (some, every):
        assert one.shortened([ALL], 0, HIT) < HIT
        one.begin(asked(), HIT)
    clock.now_s += 0.9 * LEAST_PAUSE_S
    assert (some.shortened([ALL], 0, HIT), every.shortened([ALL], 0, HIT)) == (HIT, HIT - 16)
    clock.now_s += 0.1 * LEAST_PAUSE_S
    assert some.shortened([ALL], 0, HIT) == HIT - 16


def test_no_more_are_open_than_so_many() -> None:
    one = audits()
    for number in range(MAX_OPEN):
        assert one.shortened([ALL], 0, HIT) < HIT
        one.begin(asked(f"r{number}"), HIT)
    assert one.shortened([ALL], 0, HIT) == HIT
    one.end("r3")
    assert one.shortened([ALL], 0, HIT) < HIT


END = 96  # of the withheld block, which is 12 of ``TABLE``
BLOCK = TABLE[0][END // 16 - 1]


class Life:
    """Audits of an engine of some ranks, with its block pool."""

    def __init__(self, *groups: Group, ranks: int = 1, stages: int = 1) -> None:
        self.counters = Counters()
        self.pool = BlockPool(32, True, 16)
        self.audits = Audits(
            Geometry(
                groups or (FULL,),
                ranks=ranks,
                pipeline_parallel=stages,
                align_tokens=16,
                hash_block_tokens=16,
            ),
            share=1.0,
            writer=writer_name("this"),
            stores=True,
            counters=self.counters,
            clock=Clock().monotonic,
            random=lambda: 0.0,
        )
        self.audits.bind(self.pool)

    def plan(
        self, one: Asked, computed: int = END, proven: int = END, tables: tuple[list[int], ...] = TABLE
    ) -> PoolMetadata:
        step = PoolMetadata()
        self.audits.plan(step, output(one.request, 16, tables), one, computed, proven)
        return step

    def begun(self, one: Asked) -> int:
        """An audit whose block is on its way to the workers; its number."""
        self.audits.begin(one, END)
        (number,) = self.plan(one).audits
        return number

    def held(self, block: int = BLOCK) -> int:
        return int(self.pool.blocks[block].ref_cnt)

    def counted(self) -> dict[str, float]:
        return {
            name.partition("/")[2]: amount
            for name, amount in self.counters.take().items()
            if name.startswith(metrics.AUDITS.name) and isinstance(amount, int | float)
        }


def test_the_block_is_sent_with_the_step_that_computes_it() -> None:
    life, one = Life(), asked()
    life.audits.begin(one, END)
    assert life.audits.waits_for("a")
    assert life.plan(one, computed=END - 1).audits == {}
    assert life.audits.waits_for("a")
    ((ref,),) = life.plan(one).audits.values()
    assert (ref.block_hash, ref.group, ref.block_ids) == (one.request.block_hashes[5], 0, (BLOCK,))
    assert not life.audits.waits_for("a")
    assert life.plan(one).audits == {}, "once"


def test_the_whole_record_is_sent_and_of_groups_those_that_keep_it() -> None:
    life, one = Life(FULL, Group(16, window=9), STATE, Group(16, reads_ahead=True)), asked()
    life.audits.begin(one, END)
    other = [0] * 6
    tables = (TABLE[0], [*other[:5], 20], [*other[:5], 21], [*other[:5], 22])
    (refs,) = life.plan(one, tables=tables).audits.values()
    assert [(ref.group, ref.block_ids) for ref in refs] == [(0, (BLOCK,)), (1, (20,)), (3, (22,))]
    three = Life(Group(16, blocks_per_record=3))
    three.audits.begin(one, END)
    ((ref,),) = three.plan(one).audits.values()
    assert ref.block_ids == tuple(TABLE[0][3:6])
    assert [three.held(block) for block in ref.block_ids] == [1, 1, 1]


def test_a_block_whose_hash_is_not_that_of_its_tokens_is_not_compared() -> None:
    life, one = Life(), asked()
    life.audits.begin(one, END)
    assert life.plan(one, proven=END - 16).audits == {}
    assert (life.held(), life.counted()) == (0, {"gone": 1})
    assert not life.audits.wants_steps()


def test_a_block_that_the_engine_does_not_keep_is_not_compared() -> None:
    life, one = Life(), asked()
    life.audits.begin(one, END)
    assert life.plan(one, tables=([*TABLE[0][:5], 0],)).audits == {}
    assert life.counted() == {"gone": 1}


def test_a_block_is_held_until_no_rank_reads_it_any_more() -> None:
    life = Life(ranks=3)
    number = life.begun(asked())
    assert life.held() == 1
    life.audits.end("a")
    for ranks, held in ((1, 1), (1, 1), (1, 0)):
        life.audits.update(PoolWorkerMetadata(audit_staged={number: ranks}))
        assert life.held() == held
    assert life.audits.wants_steps(), "for the verdict"
    life.audits.update(PoolWorkerMetadata(audit_ended={number: 2}))
    assert (life.audits.wants_steps(), life.counted()) == (True, {})
    life.audits.update(PoolWorkerMetadata(audit_ended={number: 1}))
    assert (life.audits.wants_steps(), life.counted()) == (False, {"gone": 1})


def test_ranks_that_report_at_once_are_counted_each() -> None:
    life = Life(ranks=2)
    number = life.begun(asked())
    one = PoolWorkerMetadata(audit_staged={number: 1}, audit_ended={number: 1})
    life.audits.update(one.aggregate(one))
    assert (life.held(), life.audits.wants_steps()) == (0, False)


def test_what_all_ranks_found_is_judged_together_and_once() -> None:
    life = Life(ranks=2)
    number = life.begun(asked())
    part = AuditedPart("", writer_name("other"), [LayerDistance("layers.0", "float32", 0.0, 1.0)])
    first = PoolWorkerMetadata(audit_staged={number: 1}, audited={number: [part]}, audit_ended={number: 1})
    assert life.audits.update(first) == []
    second = PoolWorkerMetadata(
        audit_staged={number: 1}, audited={number: [AuditedPart("missing")]}, audit_ended={number: 1}
    )
    life.audits.update(second)
    assert life.counted() == {"missing": 1}
    life.audits.update(second)
    life.audits.update(first)
    assert (life.counted(), life.held()) == ({}, 0), "a number that has ended is nobody's"


def test_a_request_that_ends_before_it_computes_the_block_holds_nothing() -> None:
    life, one = Life(), asked()
    life.audits.begin(one, END)
    life.audits.end("a")
    assert life.plan(one).audits == {}
    assert (life.held(), life.counted()) == (0, {"gone": 1})
    life.audits.end("a")
    assert life.counted() == {}


def test_an_audit_goes_on_when_its_request_has_ended() -> None:
    life = Life()
    number = life.begun(asked())
    life.audits.end("a")
    assert life.held() == 1
    life.audits.update(PoolWorkerMetadata(audit_staged={number: 1}, audit_ended={number: 1}))
    assert life.counted() == {"gone": 1}, "nobody has said anything of it"


def test_a_request_that_begins_anew_is_audited_anew() -> None:
    life, one = Life(), asked()
    life.audits.begin(one, END)
    life.audits.end("a")  # preempted, and offered the same again
    life.audits.begin(one, END)
    assert len(life.plan(one).audits) == 1
    assert life.counted() == {"gone": 1}


def test_of_weights_before_a_change_nothing_is_judged_and_blocks_stay_held_until_they_are_staged() -> None:
    life, one, late = Life(), asked(), asked("late")
    number = life.begun(one)
    life.audits.begin(late, END)
    life.audits.leave()
    assert life.held() == 1
    part = AuditedPart("", writer_name("this"), [LayerDistance("layers.0", "float32", 9.0, 1.0)])
    report = PoolWorkerMetadata(audit_staged={number: 1}, audited={number: [part]}, audit_ended={number: 1})
    assert life.audits.update(report) == []
    assert (life.held(), life.counted()) == (0, {"gone": 1})
    (after,) = life.plan(late).audits
    assert (
        life.audits.update(
            PoolWorkerMetadata(audit_staged={after: 1}, audited={after: [part]}, audit_ended={after: 1})
        )
        == []
    ), "it was offered of what was before, too"
    assert life.counted() == {"gone": 1}


def test_after_a_change_of_weights_nothing_is_judged_by_what_was_learnt_before() -> None:
    life = Life()

    def judged(writer: str, difference: float) -> dict[str, float]:
        number = life.begun(asked())
        part = AuditedPart("", writer_name(writer), [LayerDistance("layers.0", "float32", difference, 1.0)])
        life.audits.update(
            PoolWorkerMetadata(audit_staged={number: 1}, audited={number: [part]}, audit_ended={number: 1})
        )
        return life.counted()

    for _ in range(LEAST_PAIRS):
        assert judged("this", 0.0) == {"no_floor": 1}
    assert judged("other", 1.0) == {"differs": 1}
    life.audits.leave()
    assert judged("other", 1.0) == {"no_floor": 1}


@pytest.mark.parametrize("name", ["audit_staged", "audit_ended"])
def test_reports_of_audits_add_up(name: str) -> None:
    ours, theirs = PoolWorkerMetadata(**{name: {1: 1, 2: 2}}), PoolWorkerMetadata(**{name: {2: 1, 3: 1}})
    assert getattr(ours.aggregate(theirs), name) == {1: 1, 2: 3, 3: 1}
    assert not ours.is_empty()


def test_what_ranks_found_is_put_together_and_so_are_the_writers_of_a_load() -> None:
    one, other = AuditedPart("missing"), AuditedPart("", b"w")
    ours = PoolWorkerMetadata(audited={1: [one], 2: [one]}, load_writers={"a": {b"1"}, "b": {b"1"}})
    theirs = PoolWorkerMetadata(audited={2: [other]}, load_writers={"a": {b"2"}, "c": {b"3"}})
    both = ours.aggregate(theirs)
    assert both.audited == {1: [one], 2: [one, other]}
    assert both.load_writers == {"a": {b"1", b"2"}, "b": {b"1"}, "c": {b"3"}}
    assert not PoolWorkerMetadata(audited={1: [one]}).is_empty()


@pytest.mark.parametrize(("far", "named"), [(0, {"of the record"}), (1, {"of the record", "of the prefix"})])
def test_of_a_record_that_is_wrong_itself_the_prefix_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch, far: int, named: set[str]
) -> None:
    monkeypatch.setattr(Floor, "is_known", True)
    life, one = Life(), asked()
    life.audits.begin(one, END)
    life.audits.update(PoolWorkerMetadata(load_writers={"a": {writer_name("of the prefix")}}))
    (number,) = life.plan(one).audits
    layers = [LayerDistance(f"layers.{place}", "float32", float(place >= far), 1.0) for place in range(2)]
    part = AuditedPart("", writer_name("of the record"), layers)
    report = PoolWorkerMetadata(audit_staged={number: 1}, audited={number: [part]}, audit_ended={number: 1})
    (audited,) = life.audits.update(report)
    assert audited.writers == set(map(writer_name, named))
