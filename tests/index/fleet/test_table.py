"""PrefixIndex: named cases, a differential test against a plain model, batches that are damaged.

Over 400 lines because the table is tested as one thing, on golden events.
"""

from __future__ import annotations

import random
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool import ConfigError, MalformedEvents, PrefixIndex
from kvpool.index import Match
from kvpool.index.fleet.table import TIERS, Applied
from tests.support.oracle import Model
from tests.support.wire import GOLDEN, HASHES, Hash, batch, cleared, packed64, removed, steps, stored


def test_workers_that_share_a_pool_tell_one_holder() -> None:
    index = PrefixIndex()
    told = batch(stored([1, 2]), stored([1, 2, 3], medium="STORAGE", group_idx=1), stored([1], medium="CPU"))
    index.apply("a", told, dp_rank=5, pool="the pool")
    index.apply("b", batch(stored([1, 2, 3], medium="STORAGE"), dp_rank=4), pool="the pool")
    rows = {(row.worker, row.dp_rank): row for row in index.match(packed64([1, 2, 3]))}
    assert set(rows) == {("a", 5), ("the pool", 0)}
    assert (rows["a", 5].device_blocks, rows["a", 5].local_blocks, rows["a", 5].pool_blocks) == (2, 2, 0)
    assert rows["the pool", 0].pool_blocks == 3, "both groups hold all three"
    index.apply("b", batch(removed([2], medium="STORAGE"), cleared()), pool="the pool")
    rows = {(row.worker, row.dp_rank): row for row in index.match(packed64([1, 2, 3]))}
    assert rows["the pool", 0].pool_blocks == 1, "a miss that any worker tells ends it for all"
    assert rows["a", 5].device_blocks == 2
    index.apply("c", batch(cleared()), pool="another pool")
    assert "another pool" not in index.workers()
    index.remove_worker("a")
    assert index.workers() == ["b", "c", "the pool"]
    with pytest.raises(ConfigError, match="1 to 256 bytes"):
        index.apply("a", batch(stored([1], medium="STORAGE")), pool="")
    with pytest.raises(ConfigError, match="pool must be a str"):
        index.apply("a", batch(stored([1])), pool=3)  # type: ignore[arg-type]


# ---- the answer


def test_the_answer_is_columns() -> None:
    index = PrefixIndex()
    index.apply("a", batch(stored([1, 2, 3])))
    index.apply("b", batch(stored([1], medium="STORAGE"), dp_rank=3))
    matches = index.match(packed64([1, 2]))
    assert len(matches) == 2
    order = [matches.workers.index("a"), matches.workers.index("b")]
    columns = (matches.dp_ranks, matches.device_blocks, matches.host_blocks, matches.disk_blocks)
    columns += (matches.pool_blocks, matches.local_blocks, matches.any_blocks)
    assert [[column[row] for row in order] for column in columns] == [
        [0, 3], [2, 0], [0, 0], [0, 0], [0, 1], [2, 0], [2, 1],
    ]  # fmt: skip
    assert all(column.readonly and column.format == "I" and len(column) == 2 for column in columns)
    index.remove_worker("a")
    assert len(matches) == 2, "an answer does not follow the index"
    assert "Match(worker='a', dp_rank=0, device_blocks=2" in repr(matches)
    nothing = index.match(b"")
    assert list(nothing) == list(nothing.any_blocks) == nothing.workers == []


def test_counters_say_what_happened() -> None:
    index = PrefixIndex(max_blocks=3)
    applied = index.apply(
        "w", batch(stored([1, 2, 3, 4]), stored([4], parent=9), removed([8]), {"type": "X"})
    )
    assert applied == (4, 1, 0, 0, 0, 1, 0, 0, 0, 1, 1, 0)
    with pytest.raises(MalformedEvents):
        index.apply("w", b"\x90")
    counters = index.counters()
    assert applied._asdict().items() <= counters.items()
    assert counters["batches"] == counters["malformed_batches"] == 1
    assert counters["blocks"] == len(index) == 3
    assert counters["copied_blocks"] == counters["workers"] == counters["holders"] == 1
    assert counters["memory_nbytes"] == index.memory_nbytes > 0
    assert index.workers() == ["w"]
    assert repr(index) == "<PrefixIndex of 3 blocks at 1 workers>"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda i: i.apply("", batch()), "1 to 256 bytes"),
        (lambda i: i.apply("x" * 257, batch()), "1 to 256 bytes"),
        (lambda i: i.apply("\ud800", batch()), "not Unicode"),
        (lambda i: i.apply(7, batch()), "worker must be a str"),
        (lambda i: i.apply("w", "text"), "bytes-like"),
        (lambda i: i.apply("w", batch(), dp_rank=-1), "dp_rank"),
        (lambda i: i.apply("w", batch(), dp_rank=True), "dp_rank"),
        (lambda i: i.apply("w", batch(), dp_rank=1 << 16), "dp_rank"),
        (lambda i: i.match(b"1234567"), "multiple of 8"),
        (lambda i: i.match([1, 2]), "bytes-like"),
        (lambda i: i.match(b"", workers="w"), "not one str"),
        (lambda i: i.match(b"", workers=[1]), "sequence of str"),
        (lambda i: i.match(b"", workers=3), "iterable"),
        (lambda i: i.match(bytes(8 * ((1 << 22) + 1))), "at most"),
        (lambda i: i.remove_worker(None), "worker must be a str"),
        (lambda i: i.clear("w", tier="devise"), 'did you mean "device"'),
        (lambda i: i.clear("w", dp_rank=1.0), "dp_rank"),
        (lambda i: i.clear(b"w"), "worker must be a str"),
        (lambda i: PrefixIndex(max_blocks=0), "max_blocks"),
        (lambda i: PrefixIndex(max_blocks=(1 << 32) + 1), "max_blocks"),
        (lambda i: PrefixIndex(reuse_reports=1), "reuse_reports"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_clear_line(call: Any, says: str) -> None:
    index = PrefixIndex()
    with pytest.raises(ConfigError, match=says) as raised:
        call(index)
    assert "\n" not in str(raised.value)
    assert len(index) == 0


def test_a_clear_may_be_of_the_device_alone() -> None:
    index = PrefixIndex(reuse_reports=False)
    told = [stored([1], medium=medium) for medium in ("GPU", "GPU", "CPU", "DISK", "STORAGE")]
    index.apply("w", batch(*told))
    assert index.apply("w", batch(cleared("GPU"))) == Applied(*[0] * 8, 1, 0, 0, 0)
    assert list(index.match(packed64([1]))) == [Match("w", 0, 0, 1, 1, 1, 1, 1, 1)]
    index.apply("w", batch(stored([1])))
    assert index.apply("w", batch(removed([1]))).removed == 1, "no copy of before the clear is left"
    for other in ("CPU", "DISK", "STORAGE", "a new one"):
        assert index.apply("w", batch(cleared(other))) == Applied(*[0] * 9, 1, 0, 0)
    assert list(index.match(packed64([1]))) == [Match("w", 0, 0, 1, 1, 1, 1, 1, 1)]
    index.apply("w", batch(cleared()))
    assert list(index.match(packed64([1]))) == [Match("w", 0, 0, 0, 0, 1, 0, 1, 0)]


# ---- against the model


@settings(max_examples=400, deadline=None)
@given(
    plan=st.lists(steps(), max_size=25),
    prompts=st.lists(st.lists(HASHES, max_size=8, unique=True), min_size=3, max_size=6),
    known=st.fixed_dictionaries(
        {"reuse_reports": st.booleans(), "block_tokens": st.sampled_from([None, 8, 16])}
    ),
    only=st.sampled_from([None, ["a"], ["b", "nobody"]]),
)
def test_it_does_what_a_plain_model_does(
    plan: list[tuple[Any, ...]], prompts: list[list[int]], known: dict[str, Any], only: list[str] | None
) -> None:
    index, model = PrefixIndex(**known), Model(**known)
    for what, worker, *rest in plan:
        if what == "remove":
            assert index.remove_worker(worker) == (worker in model.workers)
            model.remove_worker(worker)
        elif what == "clear":
            rank, tier = rest
            index.clear(worker, dp_rank=rank, tier=tier)
            model.clear(worker, rank, ("device", "host", "disk", "pool") if tier is None else (tier,))
        else:
            told, rank, in_payload = rest
            payload = batch(*told, dp_rank=rank if in_payload else None)
            index.apply(worker, payload, dp_rank=0 if in_payload else rank)
            model.apply(worker, rank, told)
        assert len(index) == model.blocks()
        assert index.workers() == sorted(model.workers)
        held = {name: index.held_by(name) for name in ("a", "b", "nobody")}
        assert held == {name: model.held_by(name) for name in held}
        counters = index.counters()
        assert all(
            counters[f"{tier}_blocks"] == sum(model.held_by(name)[tier] for name in model.workers)
            for tier in TIERS
        )
        for prompt in prompts:
            assert sorted(index.match(packed64(prompt), workers=only)) == sorted(model.match(prompt, only))


# ---- damage


def _state(index: PrefixIndex) -> tuple[Any, ...]:
    counters = index.counters()
    del counters["malformed_batches"]
    return counters, sorted(index.match(packed64([1, 2, 3]))), index.workers()


DAMAGED = batch(
    removed([1]),
    stored([7, b"z" * 32], parent=6, token_ids=[1, 300, 70_000], extra_keys=[["a", 1], None], group_idx=1),
    cleared(),
    dp_rank=2,
)


def test_a_batch_cut_anywhere_changes_nothing() -> None:
    index = PrefixIndex()
    index.apply("w", batch(stored([1, 2, 3])))
    before = _state(index)
    for nbytes in range(len(DAMAGED)):
        with pytest.raises(MalformedEvents, match="at byte"):
            index.apply("new", DAMAGED[:nbytes])
        assert _state(index) == before
    with pytest.raises(MalformedEvents):
        index.apply("new", DAMAGED + b"\xc0")
    assert _state(index) == before
    assert index.counters()["malformed_batches"] == len(DAMAGED) + 1
    index.apply("w", DAMAGED)
    assert _state(index) != before


@settings(max_examples=500, deadline=None)
@given(noise=st.binary(max_size=200), flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255))))
def test_noise_is_refused_or_applied_whole(noise: bytes, flips: list[tuple[int, int]]) -> None:
    index = PrefixIndex()
    index.apply("w", batch(stored([1, 2, 3])))
    flipped = bytearray(DAMAGED)
    for position, value in flips:
        flipped[position % len(flipped)] = value
    for payload in (noise, b"\x92\x00" + noise, bytes(flipped)):
        before = _state(index)
        try:
            index.apply("w", payload)
        except MalformedEvents:
            assert _state(index) == before


@settings(max_examples=200, deadline=None)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
        max_leaves=12,
    )
)  # fmt: skip
def test_fields_that_are_not_ours_may_hold_anything(value: Any) -> None:
    index = PrefixIndex()
    event = stored([1]) | {"added_in_some_later_version": value}
    payload: bytes = msgpack.packb([value, [event], None, value])
    assert index.apply("w", payload).stored == 1


def test_a_changing_payload_is_no_payload() -> None:
    index = PrefixIndex()
    payload = bytearray(batch(stored([1])))
    assert index.apply("w", payload).stored == 1
    assert index.apply("w", memoryview(payload)).repeated == 1
    payload.clear()  # not held any longer


# ---- golden batches


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: row["name"])
def test_golden_batches(row: dict[str, Any]) -> None:
    index = PrefixIndex()
    for payload in row["payloads"]:
        index.apply("w", bytes.fromhex(payload))
    assert len(index) == row["blocks"]
    for question in row["questions"]:
        # memory_blocks came later than these vectors, and is in none.
        answers = [list(answer[1:8]) for answer in index.match(bytes.fromhex(question["hashes64"]))]
        assert sorted(answers) == question["rows"]


# ---- what a worker has in the pool is settled


def a_round(index: PrefixIndex, worker: str, *listed: Hash) -> int:
    """Mark, list, sweep; how many blocks went."""
    cursor = index.mark(worker)
    while cursor:
        cursor = index.mark(worker, cursor)
    index.apply(worker, batch(stored(listed, medium="STORAGE")))
    went, left = index.sweep(worker)
    while left:
        more, left = index.sweep(worker)
        went += more
    return went


def pool_blocks(index: PrefixIndex, worker: str, blocks: range) -> set[int]:
    return {block for block in blocks if any(index.match(packed64([block]), workers=[worker]).pool_blocks)}


def test_what_is_not_listed_goes_and_nothing_else() -> None:
    index = PrefixIndex()
    everywhere = [stored([1, 2, 3], medium=medium) for medium in ("GPU", "CPU", "STORAGE")]
    for worker in ("w", "other"):
        index.apply(worker, batch(*everywhere))
    assert a_round(index, "w", 2, 4) == 2
    assert pool_blocks(index, "w", range(6)) == {2, 4}
    assert pool_blocks(index, "other", range(6)) == {1, 2, 3}
    (row,) = index.match(packed64([1, 2, 3]), workers=["w"])
    assert (row.device_blocks, row.host_blocks) == (3, 3)
    assert a_round(index, "w") == 2
    assert a_round(index, "w") == 0
    assert index.sweep("w") == (0, 0), "no round goes on"
    assert (index.mark("nobody"), index.sweep("nobody")) == (0, (0, 0))
    for wrong in ("mark", "sweep"):
        with pytest.raises(ConfigError, match="worker must be a str"):
            getattr(index, wrong)(3)


@given(*(st.sets(st.integers(0, 30)) for _ in range(5)), st.booleans())
def test_any_event_ends_a_mark(
    before: set[int], told: set[int], gone: set[int], again: set[int], listed: set[int], cleared_: bool
) -> None:
    """``told``, ``gone`` and ``again`` are stored, removed and stored while a round goes on."""
    index = PrefixIndex()
    index.apply("w", batch(stored(sorted(before), medium="STORAGE"), stored(range(40), medium="CPU")))
    assert index.mark("w") == 0, "so few are seen at once"
    if cleared_:
        index.clear("w", tier="pool")
    for event in (stored(sorted(told)), removed(sorted(gone)), stored(sorted(again)), stored(sorted(listed))):
        index.apply("w", batch({**event, "medium": "STORAGE"}))
    index.sweep("w")
    assert pool_blocks(index, "w", range(31)) == ((told - gone) | again | listed)
    assert list(index.match(packed64(range(40))).host_blocks) == [40]


def test_a_round_in_many_steps_among_events() -> None:
    """What is stored once all is marked stays, whether that was before or after the sweep began."""
    chance = random.Random(7)
    index = PrefixIndex()
    blocks = range(40_000)
    index.apply("w", batch(stored(blocks, medium="STORAGE")))
    told: set[int] = set()
    steps, cursor = 1, index.mark("w")
    while cursor:
        some = chance.sample(blocks, 50)
        index.apply("w", batch(stored(some[:25], medium="STORAGE"), stored(some[25:], medium="GPU")))
        told.update(some[:25])
        cursor, steps = index.mark("w", cursor), steps + 1
    assert steps > 10
    listed = chance.sample(blocks, 5000)
    index.apply("w", batch(stored(listed, medium="STORAGE")))
    went, left, steps = 0, 1, 0
    late: set[int] = set()
    while left:
        more, left = index.sweep("w")
        went, steps = went + more, steps + 1
        some = chance.sample(blocks, 50)
        index.apply("w", batch(stored(some, medium="STORAGE")))
        late.update(some)
    assert steps > 10
    # What was stored before all was marked may be marked itself: list only after that.
    kept = pool_blocks(index, "w", blocks)
    assert kept >= {*listed, *late}
    assert kept <= {*listed, *late, *told}
    assert went >= 40_000 - len(kept)
