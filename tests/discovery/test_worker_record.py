"""The record of a worker as bytes, and the ranks of one engine as one worker."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import ConfigError
from kvpool.discovery.worker_record import ENDED, WorkerRecord, merge_ranks, pack_worker, unpack_worker
from tests.support.announced_workers import FIELDS, KEY, worker


def test_golden_record() -> None:
    key, record = pack_worker(worker(), 10, 7)
    assert key == KEY
    assert msgpack.unpackb(record) == {**FIELDS, "renewal": 7}
    assert record.hex() == (
        "8ca776657273696f6e01ac626c6f636b5f746f6b656e7310a66576656e7473b37463703a2f2f31302e302e302e373a35353630"
        "a67265706c6179b37463703a2f2f31302e302e302e373a35363630a76c656173655f73cb4024000000000000a772656e6577616c07"
        "a56d6f64656ca1"
        "6dae686173685f616c676f726974686dab7368613235365f63626f72ac686173685f736565645f6964b0303132333435363738"
        "39616263646566a761646472657373b4687474703a2f2f31302e302e302e373a38303030ab696e6361726e6174696f6ea36f6e"
        "65a96e616d657370616365d9206162616261626162616261626162616261626162616261626162616261626162"
    )
    assert unpack_worker(key, record) == WorkerRecord(worker(), 10.0, 7)


def test_names_are_lines_of_one_text_for_indexes_that_read_no_lists() -> None:
    named = worker(names=("gpt-4", "org/model, the second"))
    key, record = pack_worker(named, 10)
    fields = msgpack.unpackb(record, max_map_len=64, max_array_len=0, max_ext_len=0)
    assert fields == {**FIELDS, "renewal": 0, "names": "gpt-4\norg/model, the second"}
    assert unpack_worker(key, record) == WorkerRecord(named, 10.0)
    full = worker(names=tuple(f"{number:0128}" for number in range(64)))
    assert unpack_worker(*pack_worker(full, 10)) == WorkerRecord(full, 10.0)


def test_ranks_of_which_one_names_less_are_one_worker() -> None:
    """As while an engine of an earlier version is replaced."""
    ranks = [WorkerRecord(worker(dp_rank=rank, names=names), 10) for rank, names in ((0, ("n",)), (1, ()))]
    workers, problems = merge_ranks(ranks)
    assert problems == []
    assert [(one.names, len(one.publishers)) for one in workers.values()] == [(("n",), 2)]


@pytest.mark.parametrize(
    "changed",
    [
        {"replay": ""},
        {"address": "", "namespace": ""},
        {"a_field_of_a_later_version": 3},
        {"events": "ipc:///run/events"},
        {"lease_s": 1.0},
        {"renewal": 3},
    ],
)
def test_a_record_may_say_less_or_more(changed: dict[str, Any]) -> None:
    assert unpack_worker(KEY, msgpack.packb({**FIELDS, **changed})) is not None


@pytest.mark.parametrize(
    "changed",
    [
        {"version": 2},
        {"version": "1"},
        {"block_tokens": 0},
        {"block_tokens": "16"},
        {"block_tokens": True},
        {"events": ""},
        {"events": "tcp://*:5557"},
        {"events": "tcp://host:0"},
        {"events": "inproc://x"},
        {"events": b"tcp://host:1"},
        {"replay": None},
        {"lease_s": 10},
        {"renewal": "3"},
        {"lease_s": 0.5},
        {"lease_s": float("nan")},
        {"lease_s": 1e9},
        {"model": ""},
        {"model": "m\n"},
        {"model": "m" * 2000},
        {"model": None},
        {"hash_algorithm": "sha256"},
        {"hash_algorithm": {}},
        {"hash_seed_id": "x"},
        {"hash_seed_id": 3},
        {"address": 3},
        {"incarnation": ""},
        {"namespace": "ab"},
        {"namespace": False},
        {"names": 3},
        {"names": "a\n\nb"},
        {"names": "a\tb"},
        {"names": "\n".join(map(str, range(65)))},
        {"names": "\n".join("x" * 1000 for _ in range(9))},
        {"more": [1]},
        {"more": msgpack.ExtType(1, b"x")},
        {"more": "x" * (16 << 10)},
    ],
)
def test_a_record_that_cannot_be_followed_is_none(changed: dict[str, Any]) -> None:
    assert unpack_worker(KEY, msgpack.packb({**FIELDS, **changed})) is None


def test_what_is_no_record_is_none() -> None:
    good = msgpack.packb(FIELDS)
    for at in range(len(good)):
        assert unpack_worker(KEY, good[:at]) is None, "truncated"
    for missing in FIELDS:
        assert unpack_worker(KEY, msgpack.packb({k: v for k, v in FIELDS.items() if k != missing})) is None
    for key in (
        "kvpool:default:worker:3",
        "kvpool:default:worker:03:w",
        "kvpool:default:worker:65536:w",
        "kvpool:default:worker:3:w w",
        "kvpool::worker:3:w",
        "kvpool:default:" + "ab" * 16 + ":facts",
    ):
        assert unpack_worker(key, good) is None
    assert unpack_worker(KEY, b"\xc1") is None
    assert unpack_worker(KEY, ENDED) is None
    assert unpack_worker(KEY, msgpack.packb([1])) is None


def test_ranks_of_one_engine_are_one_worker() -> None:
    ranks = [WorkerRecord(worker(incarnation=f"i{rank}", dp_rank=rank), 10.0) for rank in (1, 0, 2)]
    workers, problems = merge_ranks(ranks)
    assert problems == []
    (merged,) = workers.values()
    assert [publisher.dp_rank for publisher in merged.publishers] == [0, 1, 2]
    assert dataclasses.replace(merged, publishers=(), incarnation="") == worker(publishers=(), incarnation="")
    incarnations = {merged.incarnation}
    for fewer in (
        ranks[:2],
        ranks[:1],
        [*ranks[:2], WorkerRecord(worker(incarnation="new", dp_rank=2), 10.0)],
    ):
        workers, _ = merge_ranks(fewer)
        incarnations.add(workers["default/10.0.0.7:5557"].incarnation)
    assert len(incarnations) == 4, "a rank that comes, goes or starts anew is another start of the worker"
    assert merge_ranks(reversed(ranks))[0] == merge_ranks(ranks)[0]


def test_ranks_of_different_engines_are_told_apart() -> None:
    other = WorkerRecord(worker(dp_rank=4, model="n", block_tokens=32), 10.0)
    elsewhere = WorkerRecord(worker(tenant="u", dp_rank=4), 10.0)
    workers, problems = merge_ranks([other, WorkerRecord(worker(), 10.0), elsewhere])
    assert workers == {"default/10.0.0.7:5557": worker(), "u/10.0.0.7:5557": elsewhere.worker}
    (problem,) = problems
    assert "rank 4 is left out" in problem
    assert "block_tokens is 16 and 32, model is 'm' and 'n'" in problem


def test_ranks_that_are_each_in_a_namespace_of_their_own_are_one_worker_without_one() -> None:
    ranks = [WorkerRecord(worker(incarnation=f"i{rank}", dp_rank=rank), 10.0) for rank in (0, 1)]
    alone = WorkerRecord(worker(incarnation="i1", dp_rank=1, namespace="cd" * 16), 10.0)
    (before,), (after,) = (merge_ranks(some)[0].values() for some in (ranks, [ranks[0], alone]))
    assert (before.namespace, after.namespace) == ("ab" * 16, "")
    assert after.publishers == before.publishers
    assert after.incarnation == before.incarnation
    assert merge_ranks([ranks[0], alone])[1] == []


MEDIA = ("0f" * 16, "ab" * 16)


def test_namespaces_of_media_are_lines_of_one_text() -> None:
    one = worker(media_namespaces=MEDIA)
    key, record = pack_worker(one, 10)
    fields = msgpack.unpackb(record, max_map_len=64, max_array_len=0, max_ext_len=0)
    assert fields == {**FIELDS, "renewal": 0, "media_namespaces": "\n".join(MEDIA)}
    assert unpack_worker(key, record) == WorkerRecord(one, 10.0)
    for wrong in (("ab",), MEDIA * 2, [*MEDIA], (3,), tuple(f"{number:032x}" for number in range(9))):
        with pytest.raises(ConfigError, match="media_namespaces"):
            pack_worker(worker(media_namespaces=wrong), 10)


@given(
    st.text("0123456789abcdef\n", max_size=70)
    | st.lists(st.text("0123456789abcdef", min_size=32, max_size=32), max_size=12).map("\n".join)
    | st.none() | st.integers(0, 9) | st.floats() | st.binary()
)  # fmt: skip
def test_a_worker_loses_nothing_by_what_it_says_of_media(said: object) -> None:
    """Of a later version it may be anything; of an earlier one there is nothing."""
    found = unpack_worker(KEY, msgpack.packb({**FIELDS, "media_namespaces": said}))
    assert found is not None
    assert dataclasses.replace(found.worker, media_namespaces=()) == worker()
    lines = said.split("\n") if isinstance(said, str) else []
    are_good = len({*lines}) == len(lines) <= 8 and all(re.fullmatch("[0-9a-f]{32}", one) for one in lines)
    assert found.worker.media_namespaces == (tuple(lines) if are_good else ())


def test_ranks_of_which_one_says_nothing_of_media_are_one_worker() -> None:
    ranks = [
        WorkerRecord(worker(dp_rank=rank, media_namespaces=media), 10)
        for rank, media in ((0, MEDIA), (1, ()))
    ]
    workers, problems = merge_ranks(ranks)
    assert problems == []
    assert [(one.media_namespaces, len(one.publishers)) for one in workers.values()] == [(MEDIA, 2)]
