"""Fleet: who is followed, what is answered, and that no answer says more than its sequence.

Over 400 lines because the fleet is tested as one thing, with one clock.
"""

from __future__ import annotations

import logging
import random
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool import BlockHasher, ConfigError, KVPoolError, UnknownModel
from kvpool.discovery.worker import check_worker
from kvpool.index import Lookup, Publisher, Row
from kvpool.index.fleet import partition, workers
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.table import PrefixIndex
from kvpool.key.hashing import seed_id
from tests.support.deadlines import eventually
from tests.support.fleets import Clock, a_worker, joined, say
from tests.support.media import follow_outputs
from tests.support.wire import batch, cleared, packed64, removed, stored

NAMESPACE, OTHER_NAMESPACE = "a" * 32, "b" * 32


def rows(answer: Lookup) -> dict[tuple[str, int], tuple[int, int, int]]:
    """(device, local, pool) blocks by worker and rank."""
    return {
        (row.worker, row.dp_rank): (row.device_blocks, row.local_blocks, row.pool_blocks) for row in answer
    }


def ask(fleet: Fleet, prompt: list[int], **options: Any) -> dict[tuple[str, int], tuple[int, int, int]]:
    return rows(fleet.lookup("m", hashes64=packed64(prompt), **options))


# ---- what is answered


def test_every_candidate_rank_has_a_row() -> None:
    clock = Clock()
    fleet = Fleet(clock=clock)
    assert fleet.add(a_worker("b", ranks=2), "flag") == "new"
    assert fleet.add(a_worker("a", address=""), "flag") == "new"
    say(fleet, "default/b", 1, 7, batch(stored([1, 2, 3]), stored([4], medium="CPU"), dp_rank=1))
    fleet.rank("default/a", 0).heard()
    clock.now_s += 1.5
    answer = fleet.lookup("m", hashes64=packed64([1, 2, 3, 4, 5]))
    assert list(answer) == [
        Row("a", 0, "", 16, 5, 0, 0, 0, 0, 1500, False, 0),
        Row("b", 0, "http://b:8000", 16, 5, 0, 0, 0, 0, 1500, True, 0),  # not heard from yet
        Row("b", 1, "http://b:8000", 16, 5, 3, 4, 0, 7, 1500, False, 4),
    ]
    assert answer.workers == ("a", "b", "b")
    assert len(answer) == 3
    assert list(ask(fleet, [1], workers=["b", "nobody"])) == [("b", 0), ("b", 1)]
    assert ask(fleet, [1], workers=[]) == {}


def test_a_rank_is_what_its_publisher_is_registered_as() -> None:
    """With vLLM's external load balancer each server is rank 0 to its operator, and has its own in its events."""
    fleet = Fleet()
    fleet.add(a_worker(), "flag")
    say(fleet, "default/w", 0, 1, batch(stored([1, 2]), dp_rank=3))
    assert ask(fleet, [1, 2]) == {("w", 0): (2, 2, 0)}
    fleet.rank("default/w", 0).reset("restarted")
    assert ask(fleet, [1, 2]) == {("w", 0): (0, 0, 0)}


@pytest.mark.parametrize(
    ("events", "replay"),
    [
        ("tcp://10.0.0.5:5557", ""),
        ("tcp://10.0.0.5:05557", ""),
        ("tcp://[::ffff:10.0.0.5]:5557", ""),
        ("tcp://WORKER.test:6000", ""),
        ("tcp://worker.test.:6000", ""),
        ("tcp://10.0.0.9:5557", "tcp://10.0.0.5:5558"),
        ("tcp://10.0.0.5:5558", ""),
        ("tcp://10.0.0.9:5557", "tcp://10.0.0.5:5557"),
    ],
)
def test_an_endpoint_is_followed_for_no_other_tenant_however_it_is_spelled(events: str, replay: str) -> None:
    """Else a tenant that names another one's endpoint is told what that one's prompts are."""
    fleet = Fleet()
    mine = (
        Publisher(0, "tcp://10.0.0.5:5557", "tcp://10.0.0.5:5558"),
        Publisher(1, "tcp://worker.test:6000"),
    )
    fleet.add(a_worker("mine", tenant="t", publishers=mine), "pool", 60)
    with pytest.raises(ConfigError, match=r"worker spy: .* is followed for another tenant"):
        fleet.add(a_worker("spy", tenant="u", publishers=(Publisher(0, events, replay),)), "call")
    fleet.add(a_worker("too", tenant="t", publishers=(Publisher(0, events, replay),)), "call")
    fleet.remove("t/too")
    fleet.remove("t/mine")
    fleet.add(a_worker("spy", tenant="u", publishers=(Publisher(0, events, replay),)), "call")
    for tenant in "tu":
        fleet.add(a_worker("silent", tenant=tenant, publishers=(Publisher(0, ""),)), "call")


def test_the_same_name_in_two_tenants_is_two_workers() -> None:
    fleet = Fleet()
    fleet.add(a_worker(), "flag")
    fleet.add(a_worker(tenant="other"), "flag")
    say(fleet, "default/w", 0, 1, batch(stored([1])))
    fleet.rank("other/w", 0).heard()
    assert ask(fleet, [1]) == {("w", 0): (1, 1, 0)}
    assert ask(fleet, [1], tenant="other") == {("w", 0): (0, 0, 0)}


@pytest.mark.parametrize("apart", [{"model": "n"}, {"block_tokens": 32}, {"hash_seed_id": seed_id("7")},
                                   {"hash_algorithm": "xxhash_cbor"}])  # fmt: skip
def test_blocks_of_another_partition_are_not_credited(apart: dict[str, Any]) -> None:
    fleet = Fleet()
    fleet.add(a_worker("a"), "flag")
    fleet.add(a_worker("b", **apart), "flag")
    say(fleet, "default/a", 0, 1, batch(stored([1])))
    fleet.rank("default/b", 0).heard()
    found = ask(fleet, [1])
    assert found[("a", 0)] == (1, 1, 0)
    assert found.get(("b", 0), (0, 0, 0)) == (0, 0, 0)


def test_tokens_are_hashed_for_each_block_size() -> None:
    fleet = Fleet(seed="5", clock=Clock())
    tokens = list(range(100, 200))
    more = {"lora": ("l", "/l"), "cache_salt": "s", "multimodal": [("i", 20, 30)]}
    for name, block_tokens, algorithm in [
        ("a", 16, "sha256_cbor"),
        ("b", 32, "sha256_cbor"),
        ("c", 16, "xxhash_cbor"),
    ]:
        seed = seed_id("5")
        fleet.add(
            a_worker(name, block_tokens=block_tokens, hash_algorithm=algorithm, hash_seed_id=seed), "flag"
        )
        hashes = BlockHasher(block_tokens, algorithm, "5").hashes(tokens, **more)[: 64 // block_tokens]
        say(fleet, f"default/{name}", 0, 1, batch(stored(hashes)))
    fleet.add(a_worker("d", hash_seed_id=seed_id("6")), "flag")
    answer = fleet.lookup("m", token_ids=tokens, **more)
    assert [(row.worker, row.block_tokens, row.prompt_blocks, row.device_blocks) for row in answer] == [
        ("a", 16, 6, 4), ("b", 32, 3, 2), ("c", 16, 6, 4),
    ]  # fmt: skip
    assert set(fleet.lookup("m", token_ids=tokens).device_blocks) == {0}
    packed = memoryview(b"".join(token.to_bytes(4, "little") for token in tokens)).cast("I")
    assert list(fleet.lookup("m", token_ids=packed, **more)) == list(answer)
    assert fleet.lookup("m", token_ids=[1] * 15).prompt_blocks == (0, 0, 0)


def test_tokens_that_nobody_hashes_in_a_known_way_are_an_error() -> None:
    fleet = Fleet()
    fleet.add(a_worker(hash_seed_id=seed_id("6")), "flag")
    with pytest.raises(
        UnknownModel, match="PYTHONHASHSEED for all workers and the index, or send block hashes"
    ):
        fleet.lookup("m", token_ids=[1, 2])
    fleet.add(a_worker("x", model="x", hash_algorithm="xxhash_cbor"), "flag")
    with pytest.raises(
        UnknownModel, match="xxhash_cbor, which needs a seed: set the same PYTHONHASHSEED for all"
    ):
        fleet.lookup("x", token_ids=[1, 2])
    assert len(fleet.lookup("x", hashes64=packed64([1]))) == 1


def test_a_rank_says_what_it_holds() -> None:
    fleet = Fleet()
    fleet.add(a_worker("a", ranks=2, namespace=NAMESPACE), "flag")
    events = [stored([1, 2, 3]), stored([3, 4], medium="CPU"), stored([1], medium="DISK")]
    say(fleet, "default/a", 1, 1, batch(*events, stored([1, 9], medium="STORAGE"), dp_rank=1))

    def held() -> list[tuple[int, int, int]]:
        (status,) = fleet.workers()
        return [(one.device_blocks, one.host_blocks, one.disk_blocks) for one in status.publishers]

    assert held() == [(0, 0, 0), (3, 2, 1)]
    totals = fleet.totals()
    assert (totals.device_blocks, totals.host_blocks, totals.disk_blocks, totals.pool_blocks) == (3, 2, 1, 2)
    fleet.rank("default/a", 1).reset("x")
    assert held() == [(0, 0, 0), (0, 0, 0)]
    assert fleet.totals().pool_blocks == 2


def test_groups_are_scored_by_the_workers_block_size() -> None:

    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 33, "group_idx": 1}
    told = batch(stored([1, 2, 3, 4], group_idx=0), stored([2, 4], **window, block_size=32))
    for reuse_reports, blocks in ((True, 0), (False, 4)):
        fleet = Fleet(reuse_reports=reuse_reports)
        fleet.add(a_worker(), "flag")
        say(fleet, "default/w", 0, 1, told)
        assert ask(fleet, [1, 2, 3, 4, 5]) == {("w", 0): (blocks, blocks, 0)}


# ---- the pool


def test_the_pool_is_of_a_namespace() -> None:
    fleet = Fleet()
    fleet.add(a_worker("a", namespace=NAMESPACE), "pool")
    fleet.add(a_worker("b", namespace=NAMESPACE, ranks=2), "pool")
    fleet.add(a_worker("c", namespace=OTHER_NAMESPACE), "pool")
    fleet.add(a_worker("d"), "pool")
    for name in "abcd":
        fleet.rank(f"default/{name}", 0).heard()
    say(fleet, "default/a", 0, 1, batch(stored([1, 2]), stored([1, 2, 3], medium="STORAGE")))
    expected = {
        ("a", 0): (2, 2, 3), ("b", 0): (0, 0, 3), ("b", 1): (0, 0, 3), ("c", 0): (0, 0, 0), ("d", 0): (0, 0, 0),
    }  # fmt: skip
    assert ask(fleet, [1, 2, 3]) == expected
    assert ask(fleet, [1, 2, 3], workers=["b"]) == {key: expected[key] for key in [("b", 0), ("b", 1)]}
    say(fleet, "default/b", 1, 1, batch(removed([3], medium="STORAGE"), dp_rank=1))
    say(fleet, "default/a", 0, 2, batch(cleared()))
    assert ask(fleet, [1, 2, 3])[("a", 0)] == (0, 0, 2)


@pytest.mark.parametrize("reuse_reports", [True, False])
@pytest.mark.parametrize("window", [None, 65])
def test_records_of_several_blocks_are_credited_whole_and_nothing_else_by_them(
    reuse_reports: bool, window: int | None
) -> None:
    """A record is known by the hash of its last block; a worker without a namespace may say so in its own name."""
    kind = {
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention" if window is None else "sliding_window",
        "kv_cache_spec_sliding_window": window,
    }
    fleet = Fleet(reuse_reports=reuse_reports)
    for name, namespace in (("a", NAMESPACE), ("d", "")):
        fleet.add(a_worker(name, namespace=namespace), "flag")
    for number in range(1, 4):
        for name in "ad":
            told = batch(
                stored([10 * number + at for at in range(1, 7)], **kind),
                stored([10 * number + 4], medium="STORAGE", block_size=64, **kind),
            )
            say(fleet, f"default/{name}", 0, number, told)
    for number in range(1, 4):
        prompt = [10 * number + at for at in range(1, 7)]
        held = {length: ask(fleet, prompt[:length]) for length in (3, 4, 5, 6)}
        assert [held[length]["a", 0][2] for length in held] == [0, 4, 4, 4]
        assert [held[length]["d", 0][:2] for length in held] == [held[length]["a", 0][:2] for length in held]
        assert [held[length]["d", 0][:2] for length in held][-1] == (6, 6)
        assert all(held[length]["d", 0][2] in (0, 4) for length in held)


def test_the_pool_outlives_whoever_announced_it() -> None:
    fleet = Fleet()
    fleet.add(a_worker("a", namespace=NAMESPACE), "pool")
    say(fleet, "default/a", 0, 1, batch(stored([1], medium="STORAGE")))
    fleet.rank("default/a", 0).reset("restarted")
    assert fleet.remove("default/a")
    assert ask(fleet, [1]) == {}
    fleet.add(a_worker("b", namespace=NAMESPACE), "pool")
    assert ask(fleet, [1]) == {("b", 0): (0, 0, 1)}, "a stale rank can load from the pool all the same"
    assert fleet.add(a_worker("b", namespace=OTHER_NAMESPACE), "pool") == "renewed"
    assert ask(fleet, [1]) == {("b", 0): (0, 0, 0)}
    fleet.add(a_worker("b", namespace=NAMESPACE), "pool")
    assert ask(fleet, [1]) == {("b", 0): (0, 0, 1)}
    fleet.forget_pool()
    assert ask(fleet, [1]) == {("b", 0): (0, 0, 0)}
    say(fleet, "default/b", 0, 1, batch(stored([1], medium="STORAGE")))
    assert ask(fleet, [1]) == {("b", 0): (0, 0, 1)}


def test_a_worker_without_events_can_load_from_the_pool() -> None:
    fleet = Fleet()
    fleet.add(a_worker("a", namespace=NAMESPACE), "pool")
    fleet.add(a_worker("b", namespace=NAMESPACE, publishers=(Publisher(0, ""),)), "pool")
    say(fleet, "default/a", 0, 1, batch(stored([1]), stored([1, 2], medium="STORAGE")))
    assert ask(fleet, [1, 2]) == {("a", 0): (1, 1, 2), ("b", 0): (0, 0, 2)}
    assert fleet.lookup("m", hashes64=packed64([1])).stale == (False, True)
    assert fleet.workers()[1].publishers[0].problem == "it publishes no KV events"


def test_no_worker_can_be_taken_for_a_pool() -> None:
    fleet = Fleet()
    fleet.add(a_worker(f"pool/{NAMESPACE}"), "flag")
    fleet.add(a_worker("rank/0"), "flag")
    fleet.add(a_worker("w", namespace=NAMESPACE), "flag")
    say(fleet, f"default/pool/{NAMESPACE}", 0, 1, batch(stored([1]), stored([1], medium="STORAGE")))
    say(fleet, "default/rank/0", 0, 1, batch(stored([1, 2], medium="DISK")))
    fleet.rank("default/w", 0).heard()
    assert ask(fleet, [1, 2]) == {
        (f"pool/{NAMESPACE}", 0): (1, 1, 0), ("rank/0", 0): (0, 2, 0), ("w", 0): (0, 0, 0),
    }  # fmt: skip


# ---- who is trusted


def test_a_stale_rank_is_not_credited() -> None:
    clock = Clock()
    fleet = Fleet(clock=clock)
    fleet.add(a_worker(), "flag")
    say(fleet, "default/w", 0, 0, batch())
    say(fleet, "default/w", 0, 3, batch(stored([1])))
    fleet.rank("default/w", 0).gap(closed=False)
    fleet.rank("default/w", 0).mark(stale=True, problem="batches 4 to 6 are missing")
    clock.now_s += 2
    (row,) = fleet.lookup("m", hashes64=packed64([1]))
    assert (row.device_blocks, row.local_blocks, row.stale) == (0, 0, True)
    assert (row.sequence, row.staleness_ms) == (3, 2000)
    (status,) = fleet.workers()[0].publishers
    assert (status.gaps, status.replays, status.stale) == (1, 0, True)
    assert status.problem == "batches 4 to 6 are missing"
    fleet.rank("default/w", 0).gap(closed=True)
    fleet.rank("default/w", 0).mark(stale=False)
    assert ask(fleet, [1]) == {("w", 0): (1, 1, 0)}
    (status,) = fleet.workers()[0].publishers
    assert (status.replays, status.stale, status.problem) == (1, False, "")


def test_a_rank_that_joins_is_stale_until_nothing_is_missing() -> None:
    """What a replay brings is of long ago."""
    clock = Clock()
    fleet = Fleet(clock=clock)
    fleet.add(a_worker(ranks=2), "flag")
    clock.now_s += 3
    for rank in range(2):
        fleet.rank("default/w", rank).apply(1, batch(stored([1]), dp_rank=rank))
    answer = fleet.lookup("m", hashes64=packed64([1]))
    assert list(zip(answer.device_blocks, answer.sequences, answer.stale, answer.staleness_ms, strict=True)) == [
        (0, 1, True, 3000), (0, 1, True, 3000),
    ]  # fmt: skip
    fleet.rank("default/w", 0).heard()
    fleet.rank("default/w", 1).mark(stale=False)
    answer = fleet.lookup("m", hashes64=packed64([1]))
    assert answer.device_blocks == (1, 1)
    assert answer.staleness_ms == (0, 3000)
    fleet.rank("default/w", 1).apply(2, batch(stored([2]), dp_rank=1))
    assert fleet.lookup("m", hashes64=packed64([1])).staleness_ms == (0, 0)


def _incomplete(fleet: Fleet) -> tuple[str, list[tuple[str, int]]]:
    return fleet.workers()[0].publishers[0].problem, fleet.incomplete()


def test_a_rank_that_was_heard_late_is_incomplete_until_it_tells_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvpool.index")
    clock = Clock()
    fleet = Fleet(clock=clock)
    fleet.add(a_worker(), "pool")
    fleet.rank("default/w", 0).apply(3, batch(stored([1])))
    assert _incomplete(fleet) == ("not heard from yet", []), "a replay may be under way"
    fleet.rank("default/w", 0).heard()
    clock.now_s += 7
    assert _incomplete(fleet) == (
        "incomplete for 7 s: its first 3 batches were not heard",
        [("default/w", 0)],
    )
    assert fleet.totals().incomplete_ranks == 1
    row = fleet.lookup("m", hashes64=packed64([1]))
    assert (row.device_blocks, row.stale) == ((1,), (False,)), "what it has told since is credited"
    fleet.rank("default/w", 0).ask()
    fleet.rank("default/w", 0).ask()
    assert "incomplete for 7 s and asked for all it holds: " in _incomplete(fleet)[0]
    fleet.rank("default/w", 0).mark(stale=True, problem="no answer")
    assert _incomplete(fleet) == ("no answer", []), "who does not answer is not asked"
    fleet.rank("default/w", 0).mark(stale=False)
    say(fleet, "default/w", 0, 4, batch(stored([2])))
    assert fleet.incomplete() == [("default/w", 0)]
    say(fleet, "default/w", 0, 5, batch(cleared("GPU"), stored([1, 2, 3])))
    assert _incomplete(fleet) == ("", [])
    assert fleet.totals().incomplete_ranks == 0
    assert [text for text in caplog.messages if "all it holds" in text] == [
        "worker default/w rank 0 is asked for all it holds: its first 3 batches were not heard",
        "worker default/w rank 0: all it holds is known again",
    ]


def test_what_was_lost_is_lost_until_all_is_told() -> None:
    fleet = Fleet()
    joined(fleet, a_worker())
    assert _incomplete(fleet) == ("", []), "it has told nothing, and nothing was missed"
    say(fleet, "default/w", 0, 0, batch(stored([1])))
    assert _incomplete(fleet) == ("", [])
    for loss, told in enumerate((cleared(), cleared("GPU"))):
        fleet.rank("default/w", 0).reset("3 batches were missed")
        say(fleet, "default/w", 0, 8 + loss, batch(stored([2])))
        assert _incomplete(fleet) == ("incomplete for 0 s: 3 batches were missed", [("default/w", 0)])
        say(fleet, "default/w", 0, 9 + loss, batch(told))
        assert _incomplete(fleet) == ("", [])
    fleet.rank("default/w", 0).reset("3 batches were missed")
    say(fleet, "default/w", 0, 0, batch(stored([2])))
    assert fleet.incomplete() == [], "the first batch of another life"


def test_a_restart_is_complete_when_it_is_told_from_the_start() -> None:
    fleet = Fleet()
    joined(fleet, a_worker(), stored([1]), sequence=4)
    assert fleet.incomplete() == [("default/w", 0)]
    fleet.rank("default/w", 0).reset("its publisher was started anew", anew=True)
    assert fleet.incomplete() == []
    say(fleet, "default/w", 0, 0, batch(stored([1])))
    assert fleet.incomplete() == []
    fleet.rank("default/w", 0).reset("its publisher was started anew", anew=True)
    say(fleet, "default/w", 0, 2, batch(stored([1])))
    assert fleet.incomplete() == [("default/w", 0)], "it no longer keeps its first batches"


def test_a_rank_that_has_left_changes_nothing_and_a_stranger_has_none() -> None:
    fleet = Fleet()
    fleet.add(a_worker(), "flag")
    left = fleet.rank("default/w", 0)
    fleet.add(a_worker(incarnation="2"), "flag")
    left.apply(1, batch(stored([1])))
    left.heard()
    left.reset("x")
    left.mark(stale=True)
    left.ask()
    left.empty(0)
    assert fleet.totals()._replace(memory_nbytes=0) == (1, 1, 1, *[0] * 16)
    assert fleet.rank("default/x", 0) is fleet.rank("default/w", 1) is fleet.rank("w", 0) is None


# ---- who is there


def test_a_new_start_holds_nothing_of_the_old_one() -> None:
    fleet = Fleet()
    fleet.add(a_worker(incarnation="1"), "call")
    say(fleet, "default/w", 0, 5, batch(stored([1])))
    assert fleet.add(a_worker(incarnation="1"), "call") == "renewed"
    assert ask(fleet, [1]) == {("w", 0): (1, 1, 0)}
    for changed in ({"incarnation": "2"}, {"port": 6000}, {"ranks": 2}, {"block_tokens": 32}, {"model": "n"}):
        fleet.add(a_worker(incarnation="1"), "call")
        say(fleet, "default/w", 0, 5, batch(stored([1])))
        assert fleet.add(a_worker(**{"incarnation": "1", **changed}), "call") == "replaced"
        answer = fleet.lookup(changed.get("model", "m"), hashes64=packed64([1]))
        assert set(answer.sequences) == {0}
        assert set(answer.device_blocks) == {0}
        assert all(answer.stale)
    assert len(fleet.workers()) == 1


def test_a_renewal_moves_the_address() -> None:
    fleet = Fleet()
    fleet.add(a_worker(), "call", lease_s=5)
    say(fleet, "default/w", 0, 5, batch(stored([1])))
    assert fleet.add(a_worker(address="http://other:1"), "call", lease_s=9) == "renewed"
    assert fleet.lookup("m", hashes64=packed64([1])).addresses == ("http://other:1",)
    assert fleet.workers()[0].worker.address == "http://other:1"


def test_what_an_operator_named_stands() -> None:
    fleet = Fleet()
    joined(fleet, a_worker(), stored([1]), sequence=5)
    assert fleet.add(a_worker(port=7000), "pool") == "kept"
    assert not fleet.remove("default/w", "pool")
    assert ask(fleet, [1]) == {("w", 0): (1, 1, 0)}
    assert fleet.add(a_worker(), "call") == "renewed"
    assert [status.source for status in fleet.workers()] == ["call"]


def test_a_lease_that_ends_takes_the_worker_along() -> None:
    clock = Clock()
    fleet = Fleet(clock=clock)
    fleet.add(a_worker("a"), "call", lease_s=10)
    fleet.add(a_worker("b"), "call", lease_s=20)
    fleet.add(a_worker("c"), "flag")
    clock.now_s += 9
    assert fleet.add(a_worker("b"), "call", lease_s=20) == "renewed"
    assert [status.lease_left_ms for status in fleet.workers()] == [1000, 20000, 0]
    assert fleet.expire() == []
    clock.now_s += 1
    assert fleet.expire() == ["default/a"]
    assert [row.worker for row in fleet.lookup("m", hashes64=packed64([1]))] == ["b", "c"]
    say(fleet, "default/a", 0, 1, batch(stored([1])))
    assert fleet.totals().blocks == 0


def test_a_model_stays_known_when_its_workers_go() -> None:
    fleet = Fleet()
    fleet.add(a_worker(), "flag")
    assert fleet.remove("default/w")
    assert not fleet.remove("default/w")
    assert len(fleet.lookup("m", hashes64=packed64([1]))) == 0
    assert len(fleet.lookup("m", token_ids=[1])) == 0
    assert fleet.totals().memory_nbytes == 0


def test_who_is_listed() -> None:
    fleet = Fleet()
    fleet.add(a_worker("b"), "flag")
    fleet.add(a_worker("a", tenant="z"), "call")
    fleet.add(a_worker("a", model="n"), "pool")
    assert [status.worker.id for status in fleet.workers()] == ["default/a", "default/b", "z/a"]
    assert [status.worker.id for status in fleet.workers(tenant="z")] == ["z/a"]
    assert [status.worker.id for status in fleet.workers(model="m")] == ["default/b", "z/a"]
    assert fleet.workers(tenant="z", model="n") == []
    (status,) = fleet.workers(tenant="z")
    assert (status.source, status.lease_left_ms) == ("call", 0)
    assert status.publishers[0].problem == "not heard from yet"


def test_the_list_of_workers_waits_for_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event loop reads it, while a worker that leaves waits for a batch of a million blocks."""
    fleet, begun, goes_on = Fleet(), threading.Event(), threading.Event()
    for name in ("busy", "idle"):
        fleet.add(a_worker(name), "call")
    apply = PrefixIndex.apply

    def slowly(table: PrefixIndex, *told: Any, **how: Any) -> Any:
        begun.set()
        assert goes_on.wait(60)
        return apply(table, *told, **how)

    monkeypatch.setattr(PrefixIndex, "apply", slowly)
    applying = threading.Thread(target=fleet.rank("default/busy", 0).apply, args=(0, batch(stored([1]))))
    leaving = threading.Thread(target=fleet.remove, args=("default/busy",))
    readers = [threading.Thread(target=read) for read in (fleet.followed, fleet.incomplete)]
    try:
        applying.start()
        assert begun.wait(60)
        leaving.start()
        assert eventually(lambda: {one.name for one in fleet.followed()} == {"idle"})
        for reader in readers:
            reader.start()
        assert eventually(lambda: not any(reader.is_alive() for reader in readers))
        assert leaving.is_alive()
    finally:
        goes_on.set()
        for thread in (applying, leaving, *readers):
            if thread.ident:
                thread.join(60)
    assert not leaving.is_alive()
    assert [status.worker.name for status in fleet.workers()] == ["idle"]


def test_totals_outlive_workers() -> None:
    fleet = Fleet(max_blocks=1)
    joined(fleet, a_worker(ranks=2), stored([1, 2]), sequence=1)
    fleet.rank("default/w", 0).gap(closed=False)
    fleet.rank("default/w", 0).reset("x")
    before = fleet.totals()
    assert (before.batches, before.gaps, before.resets, before.evicted_blocks) == (1, 1, 1, 1)
    assert (before.ranks, before.stale_ranks) == (2, 1)
    fleet.remove("default/w")
    after = fleet.totals()
    assert (after.batches, after.gaps, after.resets, after.evicted_blocks) == (1, 1, 1, 1)
    assert (after.workers, after.ranks) == (0, 0)


def test_one_line_is_logged_for_what_happens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvpool.index")
    clock = Clock()
    fleet = Fleet(clock=clock)
    fleet.add(a_worker(ranks=2), "call", lease_s=1)
    fleet.add(a_worker(ranks=2), "call", lease_s=1)
    fleet.rank("default/w", 1).heard()
    fleet.rank("default/w", 1).mark(stale=True, problem="no answer\nfrom tcp://h:1")
    fleet.rank("default/w", 1).mark(stale=True, problem="still none")
    fleet.rank("default/w", 1).mark(stale=False)
    fleet.rank("default/w", 0).reset("it started again")
    fleet.add(a_worker(), "flag")
    fleet.remove("default/w")
    assert [record.getMessage() for record in caplog.records] == [
        'worker default/w joins: model "m", 2 ranks, by call',
        "worker default/w rank 1 is followed",
        "worker default/w rank 1 is stale: no answer from tcp://h:1",
        "worker default/w rank 1 is followed again",
        "worker default/w rank 0: what it held is forgotten: it started again",
        "worker default/w starts again: what it held is forgotten; 1 rank, by flag",
        "worker default/w is gone",
    ]


# ---- wrong use


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"name": ""}, "a worker's name has 1 to 256 bytes, not 0"),
        ({"name": "é" * 129}, "a worker's name has 1 to 256 bytes, not 258"),
        ({"name": "a\nb"}, "cannot be printed"),
        ({"name": "\ud800"}, "not Unicode"),
        ({"name": 5}, "a worker's name is text, not int"),
        ({"tenant": "a b"}, "tenant 'a b' is not allowed"),
        ({"model": ""}, "worker w: model has 1 to 1024 bytes"),
        ({"address": "http://x\x1b[0m"}, "worker w: address holds characters"),
        ({"address": "x" * 1025}, "address has 0 to 1024 bytes"),
        ({"incarnation": "\0"}, "incarnation"),
        ({"block_tokens": 0}, "the engine's --block-size, not 0"),
        ({"block_tokens": True}, "the engine's --block-size"),
        ({"hash_algorithm": "sha256"}, "--prefix-caching-hash-algo sha256_cbor"),
        ({"hash_algorithm": "sha256_cbr"}, 'did you mean "sha256_cbor"'),
        ({"hash_seed_id": "XYZ"}, "hash_seed_id is 16 hex digits"),
        ({"namespace": "abc"}, "namespace is 32 hex digits or nothing"),
        ({"publishers": ()}, "0 publishers: name 1 to 1024"),
        ({"publishers": tuple(Publisher(i, "tcp://h:1") for i in range(1025))}, "1025 publishers"),
        ({"publishers": (Publisher(0, "tcp://h:1"), Publisher(0, "tcp://h:2"))}, "the same dp_rank"),
        ({"publishers": (Publisher(-1, "tcp://h:1"),)}, "dp_rank is a whole number from 0"),
        ({"publishers": (Publisher(0, "push"),)}, "events are no longer pushed"),
        ({"publishers": (Publisher(0, "h:1"),)}, "events: write tcp://HOST:PORT, not 'h:1'"),
        ({"publishers": (Publisher(0, "tcp://h:0"),)}, "events: write tcp://HOST:PORT"),
        ({"publishers": (Publisher(0, "tcp://h:70000"),)}, "events: write tcp://HOST:PORT"),
        ({"publishers": (Publisher(0, "inproc://x"),)}, "events: write tcp://HOST:PORT"),
        ({"publishers": (Publisher(0, "tcp://*:5557"),)}, "is where the worker listens"),
        ({"publishers": (Publisher(0, "tcp://h:1", "tcp://0.0.0.0:1"),)}, "replay: tcp://0.0.0.0:1 is where"),
    ],
)
def test_who_cannot_be_a_worker(fields: dict[str, Any], says: str) -> None:
    fleet = Fleet()
    with pytest.raises(ConfigError) as caught:
        fleet.add(replace(a_worker(), **fields), "call")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert fleet.workers() == []


@pytest.mark.parametrize(
    "endpoint", ["tcp://10.0.0.7:5557", "tcp://[::1]:1", "tcp://h-1.x_y:65535", "ipc:///tmp/x"]
)
def test_endpoints(endpoint: str) -> None:
    worker = a_worker(publishers=(Publisher(0, endpoint, endpoint),))
    assert check_worker(worker) is worker


@pytest.mark.parametrize("lease_s", [0, -1, 86401, float("nan"), float("inf")])
def test_a_lease_is_bounded(lease_s: float) -> None:
    with pytest.raises(ConfigError, match="a lease is more than 0"):
        Fleet().add(a_worker(), "call", lease_s=lease_s)


@pytest.mark.parametrize(
    ("question", "says"),
    [
        ({}, "as token_ids, hashes64, text or chat"),
        ({"token_ids": [1], "hashes64": bytes(8)}, "only once"),
        ({"text": "x"}, "make tokens of a text"),
        ({"token_ids": [1], "workers": "w"}, "a list of names"),
        ({"hashes64": b""}, "1 to 4194304 blocks, not 0"),
        ({"hashes64": bytes(9)}, "9 bytes are not"),
        ({"hashes64": bytes(8 * (1 << 22) + 8)}, "1 to 4194304 blocks"),
        ({"token_ids": []}, "1 to 4194304 tokens, not 0"),
        ({"token_ids": 7}, "sequence of ints"),
        ({"token_ids": [-1]}, "token"),
        ({"token_ids": ["x"]}, "integer"),
        ({"token_ids": [1], "multimodal": [("i", 5)]}, "multimodal[0]"),
        ({"token_ids": [1], "multimodal": [("i", 0, 1)] * 65537}, "at most 65536 multimodal"),
        ({"hashes64": bytes(8), "tenant": "a b"}, "tenant"),
        ({"hashes64": bytes(8), "workers": ["w"] * 16385}, "at most 16384 candidates"),
    ],
)  # fmt: skip
def test_wrong_questions(question: dict[str, Any], says: str) -> None:
    fleet = Fleet()
    fleet.add(a_worker(block_tokens=1), "flag")
    with pytest.raises(ConfigError) as caught:
        fleet.lookup("m", **question)
    assert says in str(caught.value)
    with pytest.raises(ConfigError, match="name the model"):
        fleet.lookup("", hashes64=bytes(8))


def test_an_unknown_model_names_those_that_are_known() -> None:
    fleet = Fleet()
    with pytest.raises(UnknownModel, match='this index follows no worker of tenant "default"; kvpool top'):
        fleet.lookup("llama", hashes64=bytes(8))
    fleet.add(a_worker(model="llama-3"), "flag")
    fleet.add(a_worker("x", model="qwen", tenant="acme"), "flag")
    with pytest.raises(UnknownModel, match='did you mean "llama-3"'):
        fleet.lookup("llama-4", hashes64=bytes(8))
    with pytest.raises(UnknownModel, match=r'unknown model "qwen"; known are llama-3$'):
        fleet.lookup("qwen", hashes64=bytes(8))
    with pytest.raises(UnknownModel) as caught:
        fleet.lookup("qwen", hashes64=bytes(8), tenant="acne")
    assert str(caught.value).startswith(
        'unknown model "qwen": this index follows no worker of tenant "acne"; kvpool top shows'
    )
    for number in range(20):
        fleet.add(a_worker(f"w{number}", model=f"xxxx{number}"), "flag")
    with pytest.raises(UnknownModel, match="21 are known, among them"):
        fleet.lookup("ZZZZZZZZZZ", hashes64=bytes(8))
    with pytest.raises(
        UnknownModel, match="21 are known, among them"
    ):  # comparing takes time, as with a long name
        fleet.lookup("xxxx", hashes64=bytes(8))
    with pytest.raises(UnknownModel, match='x"; known are qwen'):
        fleet.lookup("qwen" + "x" * 129, hashes64=bytes(8), tenant="acme")
    assert isinstance(UnknownModel("x"), LookupError)


def test_namespaces_of_outputs_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of their own; those that no worker names make room, and their outputs are forgotten."""
    monkeypatch.setattr(partition, "MAX_NAMESPACES", 2)
    one, two, three = (f"{number:032x}" for number in range(3))
    fleet = Fleet()
    fleet.add(a_worker("a", namespace=NAMESPACE, media_namespaces=(one, two)), "pool")
    follow_outputs(fleet, ["x", "y"], one)
    assert (fleet.totals().pool_media, fleet.totals().pool_blocks) == (2, 0)
    with pytest.raises(KVPoolError, match="more than 2 namespaces"):
        fleet.add(a_worker("b", port=6000, media_namespaces=(three,)), "pool")
    assert fleet.add(a_worker("a", namespace=NAMESPACE, media_namespaces=(two,)), "pool") == "renewed"
    assert fleet.totals().pool_media == 2, "a worker may name them again"
    with pytest.raises(KVPoolError, match="more than 2 namespaces"):
        fleet.add(a_worker("b", port=6000, media_namespaces=(one, three)), "pool")
    assert fleet.totals().pool_media == 2
    fleet.add(a_worker("b", port=6000, media_namespaces=(two, three)), "pool")
    assert fleet.totals().pool_media == 0
    assert {pool.namespace for pool in fleet.pools() if pool.is_media} == {two, three}
    follow_outputs(fleet, ["x"], three)
    fleet.forget_pool("another tenant")
    assert fleet.totals().pool_media == 1
    fleet.forget_pool("default")
    assert fleet.totals().pool_media == 0


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in [
        ("MAX_WORKERS", 3),
        ("MAX_RANKS", 4),
        ("MAX_MODELS", 2),
        ("MAX_PARTITIONS", 2),
    ]:
        monkeypatch.setattr(workers, name, most)
    monkeypatch.setattr(partition, "MAX_NAMESPACES", 1)
    fleet = Fleet()
    fleet.add(a_worker("a"), "flag")
    fleet.add(a_worker("b", block_tokens=32), "flag")
    with pytest.raises(KVPoolError, match="2 hash schemes and block sizes"):
        fleet.add(a_worker("c", block_tokens=64), "flag")
    with pytest.raises(KVPoolError, match="more than 4 ranks"):
        fleet.add(a_worker("c", ranks=3), "flag")
    fleet.add(a_worker("c"), "flag")
    with pytest.raises(KVPoolError, match="3 workers already"):
        fleet.add(a_worker("d"), "flag")
    assert fleet.add(a_worker("c"), "flag") == "renewed"
    fleet.remove("default/b")
    fleet.remove("default/c")
    fleet.add(a_worker("b", model="n", namespace=NAMESPACE), "flag")
    with pytest.raises(KVPoolError, match="more than 1 namespaces"):
        fleet.add(a_worker("c", model="n", namespace=OTHER_NAMESPACE), "flag")
    with pytest.raises(KVPoolError, match="follows 2 models"):
        fleet.add(a_worker("c", model="o"), "flag")
    fleet.remove("default/b")
    assert fleet.add(a_worker("c", model="o"), "flag") == "new", "a model without workers makes room"
    fleet.remove("default/c")
    fleet.add(a_worker("b", model="n", namespace=NAMESPACE), "flag")
    fleet.remove("default/b")
    assert fleet.add(a_worker("b", model="n", namespace=OTHER_NAMESPACE), "flag") == "new"


# ---- threads


def test_an_answer_is_true_as_of_its_sequence() -> None:
    """After batch n a rank holds exactly (n % 64) + 1 blocks of the prompt; every answer must say so."""
    prompt = list(range(1, 65))
    question = packed64(prompt)
    fleet = Fleet()
    fleet.add(a_worker(ranks=2), "flag")
    payloads = [batch(removed(prompt), stored(prompt[: number % 64 + 1], parent=9)) for number in range(64)]
    done = threading.Event()
    wrong: list[Row] = []
    asked = [0, 0]

    def read(number: int) -> None:
        while not done.is_set():
            for row in fleet.lookup("m", hashes64=question):
                if not row.stale and row.device_blocks != row.sequence % 64 + 1:
                    wrong.append(row)
            asked[number] += 1

    def write(rank: int) -> None:
        for sequence in range(3000):
            say(fleet, "default/w", rank, sequence, payloads[sequence % 64])

    readers = [threading.Thread(target=read, args=[number]) for number in range(2)]
    writers = [threading.Thread(target=write, args=[rank]) for rank in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in (*readers, *writers):
            thread.start()
        for thread in writers:
            thread.join(120)
    finally:
        done.set()
        for thread in readers:
            thread.join(60)
        sys.setswitchinterval(interval)
    assert wrong == []
    assert min(asked) > 10
    assert fleet.totals().batches == 6000


def test_nothing_of_a_start_survives_it() -> None:
    """Starts and batches race; whoever is credited at the end has been told of by the last start."""
    fleet = Fleet()
    done = threading.Event()

    def publish() -> None:
        while not done.is_set():
            say(fleet, "default/w", 0, 1, batch(stored([1, 2, 3])))

    publishers = [threading.Thread(target=publish) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for publisher in publishers:
            publisher.start()
        for number in range(300):
            fleet.add(a_worker(incarnation=str(number)), "call")
            fleet.lookup("m", hashes64=packed64([1, 2, 3]))
    finally:
        done.set()
        for publisher in publishers:
            publisher.join(60)
        sys.setswitchinterval(interval)
    fleet.add(a_worker(incarnation="last"), "call")
    assert fleet.totals().blocks == 0
    fleet.remove("default/w")
    assert fleet.totals() == (0, 0, 0, 0, 0, 0, fleet.totals().batches, *[0] * 12)


# ---- against a plain model


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_against_a_plain_model(chance: random.Random) -> None:
    fleet = Fleet()
    prompt = list(range(1, 7))
    held: dict[tuple[str, int], set[int]] = {}  # by worker and rank
    starts: dict[str, str] = {}
    for step in range(40):
        name = chance.choice("abc")
        worker = a_worker(name, ranks=2, incarnation=chance.choice("xy"))
        what = chance.choice(["add", "remove", "reset", "store", "store", "drop"])
        rank = chance.randrange(2)
        if what == "add":
            known = starts.get(name)
            expected = "new" if known is None else "renewed" if known == worker.incarnation else "replaced"
            assert fleet.add(worker, "call") == expected
            if expected != "renewed":
                starts[name] = worker.incarnation
                held.update({(name, number): set() for number in range(2)})
        elif what == "remove":
            assert fleet.remove(f"default/{name}") == (name in starts)
            starts.pop(name, None)
            held = {key: blocks for key, blocks in held.items() if key[0] != name}
        elif what == "reset":
            if (one := fleet.rank(f"default/{name}", rank)) is not None:
                one.reset("x")
            held.get((name, rank), set()).clear()
        else:
            blocks = chance.sample(prompt, chance.randint(1, 6))
            events = stored(blocks) if what == "store" else removed(blocks)
            say(fleet, f"default/{name}", rank, step, batch(events, dp_rank=rank))
            if (name, rank) in held:
                held[name, rank] = (
                    held[name, rank] | set(blocks) if what == "store" else held[name, rank] - set(blocks)
                )
        if starts:
            leading = {
                key: next((count for count, block in enumerate(prompt) if block not in blocks), len(prompt))
                for key, blocks in held.items()
            }
            answer = fleet.lookup("m", hashes64=packed64(prompt))
            assert {(row.worker, row.dp_rank): row.device_blocks for row in answer} == leading
    assert fleet.totals().blocks == len(set().union(*held.values()))
