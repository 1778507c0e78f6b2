"""``GET /v1/models`` of the router before workers of several models."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvpool.index.serve import proxy_models
from tests.conftest import eventually
from tests.index.fleets import a_worker
from tests.index.openai_worker import ScriptedWorker, scripted
from tests.index.serve.test_ext_proc import get
from tests.index.serve.test_proxy import Cluster, cluster

pytestmark = pytest.mark.usefixtures("grpc_started")


def card(name: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 7, "owned_by": "vllm", **more}


def lists(worker: ScriptedWorker, *cards: dict[str, Any]) -> None:
    worker.reply = json.dumps({"object": "list", "data": cards}).encode()
    worker.reply_headers = {"content-type": "application/json"}


def join(there: Cluster, worker: ScriptedWorker, model: str, **fields: Any) -> None:
    there.index.fleet.add(worker.worker(model=model, **fields), "flag")
    there.index.fleet.heard(f"default/{worker.name}", 0)


def test_the_models_of_all_workers_each_once() -> None:
    with scripted("a", "b", "c") as workers, cluster(workers=[]) as there:
        a, b, c = workers
        join(there, a, "one")
        join(there, b, "two")
        join(there, c, "two")
        there.index.fleet.add(a_worker("d", port=6000, tenant="t", model="others"), "flag")
        lists(a, card("one", max_model_len=4096), card("adapter", parent="one"), card("shared"))
        for worker in (b, c):
            lists(worker, card("two"), card("shared"))
        headers = {"authorization": "Bearer key", "accept-encoding": "gzip"}
        reply = get(f"{there.url}/v1/models", headers=headers)
        assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
        assert json.loads(reply.body) == {
            "object": "list",
            "data": [
                card("one", max_model_len=4096), card("adapter", parent="one"), card("shared"), card("two")
            ],
        }  # fmt: skip
        assert len(b.bodies) + len(c.bodies) == 1, "one worker of each model is asked"
        assert a.seen()["authorization"] == "Bearer key"
        assert "accept-encoding" not in a.seen(), "the list is read here"
        assert eventually(there.ends)
        assert there.outcomes() == {"2xx": 1}


def test_a_model_whose_workers_list_nothing_is_listed_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_models, "LIST_S", 1.0)
    monkeypatch.setattr(proxy_models, "MAX_LIST_NBYTES", 1000)
    with scripted("a", "b", "c", "d", "e", "f") as workers, cluster(workers=[]) as there:
        for worker in workers:
            join(there, worker, f"of-{worker.name}")
            lists(worker, card(f"of-{worker.name}"))
        a, b, c, d, e, f = workers
        a.stop()
        b.hold.clear()
        c.reply = b'{"data": 3}'
        d.reply = b"[" * 2000
        e.status = 500
        listed = json.loads(get(f"{there.url}/v1/models").body)["data"]
        assert [one["id"] for one in listed] == [f"of-{name}" for name in "abcdef"]
        assert {one["owned_by"] for one in listed[:5]} == {"kvpool"}
        assert listed[5] == card("of-f")
        assert {(type(one["created"]), one["object"]) for one in listed} == {(int, "model")}
        assert eventually(lambda: b.given_up == 1)
        assert eventually(there.ends)
        monkeypatch.setattr(proxy_models, "MAX_ASKED", 5)
        b.hold.set()
        listed = json.loads(get(f"{there.url}/v1/models").body)["data"]
        assert [one["id"] for one in listed] == [f"of-{name}" for name in "abcdef"]
        assert len(f.bodies) == 1
        for worker in workers:
            worker.stop()
        reply = get(f"{there.url}/v1/models")
        assert (reply.status, json.loads(reply.body)["error"]["type"]) == (503, "ServiceUnavailableError")
        assert eventually(there.ends)


def test_what_all_workers_refuse_is_refused() -> None:
    with scripted("a", "b") as workers, cluster(workers=[]) as there:
        for worker in workers:
            join(there, worker, f"of-{worker.name}")
            worker.reply, worker.status = b'{"error": "no key"}', 401
        reply = get(f"{there.url}/v1/models")
        assert (reply.status, reply.body) == (401, b'{"error": "no key"}')
        lists(workers[1], card("of-b"))
        workers[1].status = 200
        listed = json.loads(get(f"{there.url}/v1/models").body)["data"]
        assert listed == [card("of-b")], "not those that the caller may not see"


def test_the_worker_of_an_only_model_answers_itself() -> None:
    with cluster("a", "b") as there:
        for worker in there.workers.values():
            worker.reply = b"as it is"
        reply = get(f"{there.url}/v1/models")
        assert (reply.status, reply.body) == (200, b"as it is")
        assert "x-kvpool-worker" in reply.headers
