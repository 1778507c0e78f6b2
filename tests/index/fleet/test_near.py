"""A near pool in the index: every worker of its host is credited with it, and no other.

Any of them tells what came and what went; it is forgotten with the last one, and when one may have lost an event.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvpool import ConfigError
from kvpool.discovery.worker import check_worker
from kvpool.discovery.worker_record import merge_ranks, pack_worker, unpack_worker
from kvpool.index.cost.router import LOCAL, POOL, Costs, Router
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.snapshot import Snapshot, pack, unpack
from tests.support.fleets import Clock, a_worker, joined, say
from tests.support.placing import COSTS
from tests.support.wire import batch, cleared, packed64, removed, stored

NAMESPACE, NEAR, OTHER = "a" * 32, "1" * 32, "2" * 32
PROMPT = list(range(1, 11))


def came(hashes: list[int], medium: str = "CPU", **fields: Any) -> dict[str, Any]:
    return stored(hashes, parent=9, medium=medium, ownership="kvpool", locality="LOCAL", **fields)


def went(hashes: list[int], medium: str = "CPU") -> dict[str, Any]:
    return removed(hashes, medium=medium, ownership="kvpool", locality="LOCAL")


def a_host(*names: str, near: str = NEAR, fleet: Fleet | None = None, port: int = 5000) -> Fleet:
    """Workers of one host, which hold nothing."""
    fleet = fleet or Fleet(clock=Clock())
    for place, name in enumerate(names):
        joined(fleet, a_worker(name, port=port + 2 * place, namespace=NAMESPACE, near=near))
    return fleet


def row_of(fleet: Fleet, worker: str) -> tuple[int, int, int, int]:
    """(device, local, pool, loadable) blocks."""
    row = next(one for one in fleet.lookup("m", hashes64=packed64(PROMPT)) if one.worker == worker)
    (alone,) = fleet.lookup("m", hashes64=packed64(PROMPT), workers=[worker])
    assert row == alone, "one candidate is answered as all are"
    return row.device_blocks, row.local_blocks, row.pool_blocks, row.loadable_blocks


@pytest.mark.parametrize("medium", ["CPU", "DISK"])
def test_what_one_worker_tells_all_of_its_host_have(medium: str) -> None:
    fleet = a_host("x", near=OTHER, fleet=a_host("a", "b"), port=6000)
    say(fleet, "default/a", 0, 0, batch(came(PROMPT[:6], medium), stored(PROMPT[:2])))
    assert row_of(fleet, "a") == (2, 6, 0, 6)
    assert row_of(fleet, "b") == (0, 6, 0, 6)
    assert row_of(fleet, "x") == (0, 0, 0, 0)
    say(fleet, "default/b", 0, 0, batch(went(PROMPT[3:4], medium)))
    assert row_of(fleet, "a") == (2, 3, 0, 3)
    assert row_of(fleet, "b") == (0, 3, 0, 3)


def test_near_goes_on_from_the_device_and_the_pool_from_near() -> None:
    fleet = a_host("a")
    held = stored(PROMPT[:3]), came(PROMPT[3:6]), stored(PROMPT[6:], medium="STORAGE", parent=9)
    say(fleet, "default/a", 0, 0, batch(*held))
    assert row_of(fleet, "a")[:3] == (3, 6, 0)
    say(fleet, "default/a", 0, 1, batch(stored(PROMPT, medium="STORAGE")))
    assert row_of(fleet, "a") == (3, 6, 10, 10)


def test_a_sliding_window_goes_on_from_its_last_blocks_near() -> None:
    fleet = a_host("a", "b")
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 33, "group_idx": 1}
    say(fleet, "default/a", 0, 0, batch(came(PROMPT[:8]), came(PROMPT[4:6], **window)))
    assert row_of(fleet, "b") == (0, 6, 0, 6)


def test_of_a_worker_that_is_stale_near_is_not_credited() -> None:
    fleet = a_host("a", "b")
    say(fleet, "default/a", 0, 0, batch(came(PROMPT)))
    fleet.rank("default/b", 0).mark(stale=True, problem="x")
    assert row_of(fleet, "b") == (0, 0, 0, 0)
    assert row_of(fleet, "a") == (0, 10, 0, 10)


def test_without_a_near_pool_it_is_the_engines_own_tier() -> None:
    fleet = a_host("a", near="")
    say(fleet, "default/a", 0, 0, batch(came(PROMPT)))
    assert row_of(fleet, "a") == (0, 10, 0, 10)


def test_engines_own_tiers_stay_their_own() -> None:
    fleet = a_host("a", "b")
    say(fleet, "default/a", 0, 0, batch(stored(PROMPT, medium="CPU"), went(PROMPT[:5])))
    assert row_of(fleet, "a") == (0, 10, 0, 10)
    assert row_of(fleet, "b") == (0, 0, 0, 0)


def test_a_request_goes_to_the_host_that_has_it_near() -> None:
    fleet = a_host("y", near=OTHER, fleet=a_host("a", "b"), port=6000)
    say(fleet, "default/a", 0, 0, batch(came(PROMPT), stored(PROMPT, medium="STORAGE")))
    say(fleet, "default/y", 0, 0, batch(stored(PROMPT, medium="STORAGE")))
    picks = Router(fleet, costs=COSTS, clock=Clock()).route("m", hashes64=packed64(PROMPT)).picks
    costs = {pick.row.worker: (pick.prefill_cost, pick.fetch_cost) for pick in picks}
    assert costs["a"] == costs["b"] == (0, round(160 * COSTS.local))
    assert costs["y"] == (0, round(160 * COSTS.pool))
    assert picks[-1].row.worker == "y"


def test_near_costs_what_each_worker_measured() -> None:
    fleet = a_host("a", "b", "c")
    say(fleet, "default/a", 0, 0, batch(came(PROMPT[:5]), stored(PROMPT, medium="STORAGE")))
    router = Router(fleet, clock=Clock())
    router.loads.measure("default/a", 0, 0.5, 0.1)
    router.loads.measure("default/b", 0, None, 0.4)
    fetched = {pick.worker: pick.fetch_cost for pick in router.route("m", hashes64=packed64(PROMPT)).picks}
    assert fetched == {
        "a": round(80 * 0.1 + 80 * 0.5), "b": round(80 * 0.4 + 80 * POOL), "c": round(80 * LOCAL + 80 * POOL)
    }  # fmt: skip
    set_for_all = Router(fleet, costs=Costs(local=0.2), clock=Clock())
    set_for_all.loads.measure("default/a", 0, 0.5, 0.1)
    picks = set_for_all.route("m", hashes64=packed64(PROMPT)).picks
    assert {pick.worker: pick.fetch_cost for pick in picks}["a"] == round(80 * 0.2 + 80 * 0.5)


def test_it_is_forgotten_with_the_last_worker_of_its_host() -> None:
    fleet = a_host("a", "b")
    say(fleet, "default/a", 0, 0, batch(came(PROMPT)))
    fleet.remove("default/a")
    assert row_of(fleet, "b") == (0, 10, 0, 10)
    fleet.remove("default/b")
    a_host("c", fleet=fleet)
    assert row_of(fleet, "c") == (0, 0, 0, 0)
    assert fleet.totals().blocks == 0


def test_a_worker_in_another_namespace_has_that_one_s_blocks() -> None:
    fleet = a_host("a", "b")
    say(fleet, "default/a", 0, 0, batch(came(PROMPT)))
    moved = replace(a_worker("a", port=5000, namespace="b" * 32, near=NEAR))
    assert fleet.add(moved, "flag") == "renewed"
    assert row_of(fleet, "a") == (0, 0, 0, 0)
    assert row_of(fleet, "b") == (0, 10, 0, 10)
    say(fleet, "default/a", 0, 1, batch(came(PROMPT[:4])))
    assert row_of(fleet, "a") == (0, 4, 0, 4)


def test_a_renewed_lease_changes_nothing() -> None:
    fleet = a_host("a")
    say(fleet, "default/a", 0, 0, batch(came(PROMPT)))
    for _ in range(3):
        assert fleet.add(a_worker("a", port=5000, namespace=NAMESPACE, near=NEAR), "flag") == "renewed"
    fleet.remove("default/a")
    assert fleet.totals().blocks == 0


def test_a_gap_that_nothing_closed_forgets_it_until_it_is_told_again() -> None:
    fleet = a_host("a", "b")
    say(fleet, "default/a", 0, 0, batch(came(PROMPT)))
    fleet.rank("default/b", 0).reset("restarted", anew=True)
    assert row_of(fleet, "b") == (0, 10, 0, 10), "a restart loses no event of the others"
    fleet.rank("default/b", 0).reset("a gap")
    assert row_of(fleet, "a") == (0, 0, 0, 0)
    say(fleet, "default/b", 0, 7, batch(cleared("GPU"), came(PROMPT[:9])))
    assert row_of(fleet, "a") == (0, 9, 0, 9)


def test_a_cleared_engine_keeps_its_host_s_near_pool() -> None:
    fleet = a_host("a")
    say(fleet, "default/a", 0, 0, batch(came(PROMPT), stored(PROMPT)))
    say(fleet, "default/a", 0, 1, batch(cleared()))
    assert row_of(fleet, "a") == (0, 10, 0, 10)


def test_a_snapshot_holds_it() -> None:
    fleet = a_host("a", "b")
    say(fleet, "default/a", 0, 3, batch(came(PROMPT)))
    say(fleet, "default/b", 0, 3, batch(stored(PROMPT[:1])))
    written = unpack(b"".join(pack(Snapshot(1.0, "life", fleet.snapshot()))))
    again = Fleet(clock=Clock())
    again.restore(written, age_s=1.0, flags={"default/a", "default/b"}, life="life")
    for name in ("a", "b"):
        again.rank(f"default/{name}", 0).heard()
    assert row_of(again, "a") == (0, 10, 0, 10)
    assert row_of(again, "b") == (1, 10, 0, 10)


def test_a_record_names_it() -> None:
    worker = a_worker("w", incarnation="1", namespace=NAMESPACE, near=NEAR)
    read = unpack_worker(*pack_worker(worker, 10.0))
    assert read is not None
    assert read.worker == worker
    without = unpack_worker(*pack_worker(replace(worker, near=""), 10.0))
    assert without is not None
    assert without.worker.near == ""


def test_ranks_of_several_hosts_have_none() -> None:
    ranks = [
        unpack_worker(*pack_worker(a_worker(incarnation=near, near=near, publishers=(publisher,)), 10.0))
        for near, publisher in zip((NEAR, OTHER), a_worker(ranks=2).publishers, strict=True)
    ]
    workers, problems = merge_ranks(one for one in ranks if one is not None)
    assert problems == []
    assert workers["default/w"].near == ""
    assert len(workers["default/w"].publishers) == 2


@pytest.mark.parametrize("near", ["x", "1" * 31, "G" * 32, "1" * 33])
def test_a_wrong_name_is_refused(near: str) -> None:
    with pytest.raises(ConfigError, match="near is 32 hex digits or nothing"):
        check_worker(a_worker(near=near))
