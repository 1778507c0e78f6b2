"""Workers that hash with another seed than the index: no prompt in tokens matches them, and they say so."""

from __future__ import annotations

import logging

import pytest

from kvpool import IndexClient
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.rank import ONE_SEED, UNHASHED
from kvpool.index.fleet.workers import SOURCES, Source
from kvpool.key.hashing import seed_id
from tests.support.fleets import a_worker, joined, serving
from tests.support.wire import packed64, stored

OTHER = (
    f"{UNHASHED}, for such workers hash with another seed than the index: "
    "set the same PYTHONHASHSEED for all workers and the index"
)


@pytest.fixture
def fleet() -> Fleet:
    made = Fleet()
    for name, seed in (("good", None), ("other", "7")):
        joined(made, a_worker(name, hash_seed_id=seed_id(seed)), stored([1, 2]))
    return made


@pytest.mark.usefixtures("grpc_started")
def test_a_worker_with_another_seed_says_what_to_change(fleet: Fleet) -> None:
    """It had no row for tokens, and nothing said so."""
    with serving(fleet) as served, IndexClient(served.target, 60) as client:
        assert [row.worker for row in client.lookup("m", token_ids=[1] * 32)] == ["good"]
        problems = {one.worker.name: one.publishers[0].problem for one in client.workers()}
        assert problems == {"good": "", "other": OTHER}
        rows = {
            row.worker: (row.device_blocks, row.stale) for row in client.lookup("m", hashes64=packed64([1]))
        }
        assert rows == {"good": (1, False), "other": (1, False)}, "prompts in hashes match it"


def test_what_else_is_wrong_with_it_is_said_behind_that(fleet: Fleet) -> None:
    fleet.rank("default/other", 0).mark(stale=True, problem="its feed is silent")
    (status,) = fleet.workers(["default/other"])
    assert status.publishers[0].problem == f"{OTHER}; its feed is silent"


@pytest.mark.parametrize("source", SOURCES)
def test_the_log_names_it_whoever_named_it(source: Source, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvpool.index")
    fleet = Fleet(seed="5")
    fleet.add(a_worker("good", hash_seed_id=seed_id("5")), source)
    for _ in range(2):  # the second one renews it
        fleet.add(a_worker("other", hash_seed_id=seed_id("6")), source)
    assert caplog.messages == [f"worker default/other: {OTHER}"]


def test_an_algorithm_that_needs_a_seed_where_there_is_none() -> None:
    fleet = Fleet()
    joined(fleet, a_worker(hash_algorithm="xxhash_cbor"), stored([1]))
    (status,) = fleet.workers()
    says = f"{UNHASHED}, for such workers hash with xxhash_cbor, which needs a seed: {ONE_SEED}"
    assert status.publishers[0].problem == says


def test_a_prompt_that_was_asked_for_is_hashed_once_for_a_tenant(fleet: Fleet) -> None:
    for tenant in ("one", "two"):
        fleet.add(a_worker("w", tenant=tenant), "flag")
    hashes, sizes = fleet._workers._hashes, []
    for tenant in ("one", "one", "two"):
        fleet.lookup("m", token_ids=list(range(2048)), tenant=tenant)
        sizes.append(hashes.nbytes)
    assert sizes == [sizes[0], sizes[0], 2 * sizes[0]] != [0, 0, 0]
