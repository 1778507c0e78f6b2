"""``GET /v1/models`` of the router before workers of several names, and of one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvpool.index.fleet.names import Name
from kvpool.index.front import proxy
from tests.support.deadlines import eventually
from tests.support.fleets import a_worker
from tests.support.fronts import ProxyCluster, join, proxy_cluster
from tests.support.http_client import get
from tests.support.openai_worker import ScriptedWorker, scripted

pytestmark = pytest.mark.usefixtures("grpc_started")


@pytest.fixture(autouse=True)
def _made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "LIST_S", -1.0)


def ours(name: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "kvpool", **more}


def listed(there: ProxyCluster) -> list[dict[str, Any]]:
    reply = get(f"{there.url}/v1/models")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    said = json.loads(reply.body)
    assert said["object"] == "list"
    return list(said["data"])


@contextmanager
def three() -> Iterator[tuple[ProxyCluster, list[ScriptedWorker]]]:
    """Workers of the models one, two and two."""
    with scripted("a", "b", "c") as workers, proxy_cluster(workers=[]) as there:
        for worker, model in zip(workers, ("one", "two", "two"), strict=True):
            join(there, worker, model)
        yield there, workers


def test_the_names_of_all_workers_are_listed_and_no_worker_is_asked() -> None:
    with three() as (there, workers):
        fleet = there.index.fleet
        fleet.add(a_worker("d", port=6000, tenant="t", model="others"), "flag")
        fleet.add(a_worker("e", port=6100, model="unreachable", address=""), "flag")
        assert listed(there) == [ours("one"), ours("two")]
        fleet.read_names(
            fleet.start("default/a"), [Name("one", "", 4096), Name("a-b", "", 4096), Name("sql", "/p", 128)]
        )
        fleet.read_names(fleet.start("default/c"), [Name("two"), Name("law", "/q")])
        assert listed(there) == [
            ours("one", max_model_len=4096),
            ours("two"),
            ours("a-b", max_model_len=4096),
            ours("law", root="/q", parent="two"),
            ours("sql", max_model_len=128, root="/p", parent="one"),
        ]
        for worker in workers[1:]:
            worker.stop()
            fleet.remove(f"default/{worker.name}")
        assert [one["id"] for one in listed(there)] == ["one", "a-b", "sql"]
        assert [worker.bodies for worker in workers] == [[], [], []]
        assert there.outcomes() == {"2xx": 3}


def test_callers_that_hang_up_cost_workers_nothing() -> None:
    with three() as (there, workers):

        def seen() -> int:
            return sum(there.outcomes().values()) + there.index.proxy_stats.totals().under_way

        for number in range(20):
            with there.connect() as client:
                client.sendall(f"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-n: {number}\r\n\r\n".encode())
                assert eventually(lambda number=number: seen() > number)
        assert eventually(lambda: sum(there.outcomes().values()) == 20 and there.ends())
        assert [worker.bodies for worker in workers] == [[], [], []]


def test_a_list_is_made_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "LIST_S", 600.0)
    with three() as (there, workers):
        assert len(listed(there)) == 2
        there.index.fleet.remove(f"default/{workers[0].name}")
        assert len(listed(there)) == 2
        monkeypatch.setattr(proxy, "LIST_S", 0.0)
        assert eventually(lambda: get(f"{there.url}/v1/models").headers.get("x-kvpool-worker") in ("b", "c"))


def test_names_beside_the_models_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "MAX_LISTED", 3)
    with three() as (there, _):
        fleet = there.index.fleet
        fleet.read_names(fleet.start("default/a"), [Name(f"n{number}") for number in range(9)])
        assert [one["id"] for one in listed(there)] == ["one", "two", "n0", "n1", "n2"]


def test_the_workers_of_an_only_name_answer_themselves() -> None:
    with proxy_cluster("a", "b") as there:
        for worker in there.workers.values():
            worker.reply, worker.status = b"as it is", 401
        reply = get(f"{there.url}/v1/models")
        assert (reply.status, reply.body) == (401, b"as it is")
        assert sum(len(worker.bodies) for worker in there.workers.values()) == 1


def test_without_workers_there_is_no_list() -> None:
    with proxy_cluster(workers=[]) as there:
        reply = get(f"{there.url}/v1/models")
        assert (reply.status, json.loads(reply.body)["error"]["type"]) == (503, "ServiceUnavailableError")
