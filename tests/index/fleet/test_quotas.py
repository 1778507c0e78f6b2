"""What one tenant may have of an index that serves several, so that others find room."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpool import IndexClient, IndexUnavailable, KVPoolError
from kvpool.index import Publisher, Worker
from kvpool.index.cost import load
from kvpool.index.cost.router import Router
from kvpool.index.fleet import workers
from kvpool.index.fleet.fleet import Fleet
from kvpool.key.hashing import seed_id
from tests.support.credentials import write_tokens
from tests.support.fleets import a_worker
from tests.support.index_process import running

LIMITS = {"MAX_WORKERS": 8, "MAX_RANKS": 16, "MAX_MODELS": 4, "MAX_PARTITIONS": 4}


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    for name, most in LIMITS.items():
        monkeypatch.setattr(workers, name, most)
    return Fleet(tenant_share=0.5)


def test_a_tenant_has_its_part_of_the_workers_and_another_finds_room(fleet: Fleet) -> None:
    for number in range(4):
        fleet.add(a_worker(f"w{number}", tenant="a"), "call")
    with pytest.raises(KVPoolError, match=r"tenant a may have 4 workers: remove .* larger --tenant-share$"):
        fleet.add(a_worker("w4", tenant="a"), "call")
    for number in range(4):
        fleet.add(a_worker(f"w{number}", tenant="b"), "call")
    fleet.remove("a/w0")
    assert fleet.add(a_worker("w4", tenant="a"), "call") == "new"
    assert fleet.add(a_worker("w4", tenant="a", incarnation="2"), "call") == "replaced"


def test_a_tenant_has_its_part_of_the_ranks(fleet: Fleet) -> None:
    fleet.add(a_worker("w", tenant="a", ranks=7), "call")
    with pytest.raises(KVPoolError, match="tenant a may have 8 ranks"):
        fleet.add(a_worker("v", tenant="a", ranks=2), "call")
    assert fleet.add(a_worker("w", tenant="a", ranks=8), "call") == "replaced"
    assert fleet.add(a_worker("w", tenant="b", ranks=8), "call") == "new"


def test_a_tenant_has_its_part_of_the_models_and_those_without_workers_make_room(fleet: Fleet) -> None:
    for number in range(2):
        fleet.add(a_worker(f"w{number}", tenant="a", model=f"m{number}"), "call")
    for another in (
        a_worker("w", tenant="a", model="n"),
        a_worker("w", tenant="a", model="m0", block_tokens=32),
    ):
        with pytest.raises(KVPoolError, match="tenant a may have 2 models, hash schemes and block sizes"):
            fleet.add(another, "call")
    for number in range(2):
        fleet.add(a_worker(f"w{number}", tenant="b", model=f"m{number}"), "call")
    fleet.remove("a/w0")
    assert fleet.add(a_worker("w", tenant="a", model="n"), "call") == "new"


def test_a_tenant_has_its_part_of_the_reservations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "MAX_RESERVATIONS", 4)
    fleet = Fleet()
    for tenant in "ab":
        fleet.add(a_worker(tenant=tenant), "flag")
    router = Router(fleet, tenant_share=0.5)

    def reserve(tenant: str) -> str:
        return router.route("m", tenant=tenant, token_ids=[1], reserve_s=60).reservation

    held = [reserve("a") for _ in range(2)]
    assert all(held)
    assert [reserve("a"), bool(reserve("b"))] == ["", True]
    assert router.release("a", held[0])
    assert reserve("a")


@pytest.mark.usefixtures("grpc_started")
def test_the_models_of_one_tenant_leave_room_for_another_tenant(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    tokens = write_tokens(path, a=(["publish"], ["a"]), b=(["publish"], ["b"]))

    def worker(tenant: str, number: int) -> Worker:
        name = f"w{number}"
        return Worker(name, f"m{number}", 16, seed_id(None), (Publisher(0, "", ""),), tenant=tenant)

    most = workers.MAX_MODELS // 100
    with running("--tokens", str(path), "--tenant-share", "0.01") as index:
        with IndexClient(index.target, 60, token=tokens["a"]) as client:
            for number in range(most):
                client.register(worker("a", number))
            with pytest.raises(
                IndexUnavailable, match=f"RESOURCE_EXHAUSTED.*tenant a may have {most} models"
            ):
                client.register(worker("a", most))
        with IndexClient(index.target, 60, token=tokens["b"]) as client:
            client.register(worker("b", 0))
