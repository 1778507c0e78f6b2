"""``GET /v1/models`` of the router before workers of several models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from kvpool.index.serve import proxy
from tests.support.deadlines import eventually
from tests.support.fleets import a_worker
from tests.support.fronts import ProxyCluster, join, proxy_cluster
from tests.support.http_client import get
from tests.support.openai_worker import ScriptedWorker, card, scripted

pytestmark = pytest.mark.usefixtures("grpc_started")


def lists(worker: ScriptedWorker, *cards: dict[str, Any]) -> None:
    worker.reply = json.dumps({"object": "list", "data": cards}).encode()
    worker.reply_headers = {"content-type": "application/json"}


def test_the_models_of_all_workers_each_once() -> None:
    with scripted("a", "b", "c") as workers, proxy_cluster(workers=[]) as there:
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
    monkeypatch.setattr(proxy, "LIST_S", 6.0)  # of which those that answer take a hundredth
    monkeypatch.setattr(proxy, "KEEP_S", 0.0)
    monkeypatch.setattr(proxy, "MAX_LIST_NBYTES", 1000)
    with scripted("a", "b", "c", "d", "e", "f") as workers, proxy_cluster(workers=[]) as there:
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
        monkeypatch.setattr(proxy, "MAX_ASKED", 5)
        b.hold.set()
        listed = json.loads(get(f"{there.url}/v1/models").body)["data"]
        assert [one["id"] for one in listed] == [f"of-{name}" for name in "abcdef"]
        assert len(f.bodies) == 1
        for worker in workers:
            worker.stop()
        reply = get(f"{there.url}/v1/models")
        assert (reply.status, json.loads(reply.body)["error"]["type"]) == (503, "ServiceUnavailableError")
        assert eventually(there.ends)


@pytest.mark.parametrize("status", [401, 404])
def test_what_all_workers_refuse_is_refused(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "KEEP_S", 0.0)
    with scripted("a", "b") as workers, proxy_cluster(workers=[]) as there:
        for worker in workers:
            join(there, worker, f"of-{worker.name}")
            worker.reply, worker.status = b'{"error": "no key"}', status
        reply = get(f"{there.url}/v1/models")
        assert (reply.status, reply.body) == (status, b'{"error": "no key"}')
        lists(workers[1], card("of-b"))
        workers[1].status = 200
        listed = json.loads(get(f"{there.url}/v1/models").body)["data"]
        assert listed == [card("of-b")], "not those that the caller may not see"


@contextmanager
def two_models() -> Iterator[tuple[ProxyCluster, list[ScriptedWorker]]]:
    with scripted("a", "b") as workers, proxy_cluster(workers=[]) as there:
        for worker in workers:
            join(there, worker, f"of-{worker.name}")
            lists(worker, card(f"of-{worker.name}"))
        yield there, workers


def asked(workers: list[ScriptedWorker]) -> list[int]:
    return [len(worker.bodies) for worker in workers]


def test_callers_who_ask_the_same_share_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "KEEP_S", 600.0)
    monkeypatch.setattr(proxy, "LIST_S", 30.0)
    with two_models() as (there, workers), ThreadPoolExecutor(4) as callers:
        workers[0].hold.clear()
        url = f"{there.url}/v1/models"
        mine, other = {"authorization": "Bearer mine"}, {"authorization": "Bearer other"}
        with there.connect() as gone:
            gone.sendall(
                b"GET /v1/models HTTP/1.1\r\nhost: x\r\nAuthorization: Bearer mine\r\nx-request-id: 1\r\n\r\n"
            )
            assert eventually(lambda: asked(workers) == [1, 1])
        waiting = [callers.submit(get, url, headers=mine) for _ in range(4)]
        assert eventually(lambda: there.outcomes() == {"gone": 1})
        assert eventually(lambda: there.index.proxy_stats.totals().under_way == 4)
        workers[0].hold.set()
        answers = [json.loads(one.result().body)["data"] for one in waiting]
        assert answers == [[card("of-a"), card("of-b")]] * 4
        assert get(url, headers=mine).status == 200
        assert (asked(workers), workers[0].given_up) == ([1, 1], 0), (
            "also for one whose first caller has gone"
        )
        for worker in workers:
            worker.status, worker.reply = 401, b'{"error": "no key"}'
        for number, headers in enumerate((other, {**mine, "x-api-key": "1"}, {}), 2):
            assert (get(url, headers=headers).status, asked(workers)) == (401, [number] * 2)
        assert get(url, headers=mine).status == 200
        assert get(f"{url}?limit=1", headers=mine).status == 401, "of another question"
        there.index.fleet.add(a_worker("c", port=6000, model="of-c", address="http://127.0.0.1:1"), "flag")
        assert get(url, headers=mine).status == 401, "of another fleet"
        assert eventually(there.ends)


def test_an_answer_is_kept_for_a_while_and_a_failure_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "KEEP_S", 0.05)
    with two_models() as (there, workers):
        url = f"{there.url}/v1/models"
        assert eventually(lambda: get(url).status == 200 and asked(workers) >= [2, 2])
        monkeypatch.setattr(proxy, "KEEP_S", 600.0)
        for worker in workers:
            worker.stop()
        assert eventually(lambda: get(url).status == 503)
        for worker in workers:
            worker.start()
        assert get(url).status == 200


def test_answers_that_are_kept_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "KEEP_S", 600.0)
    monkeypatch.setattr(proxy, "MAX_KEPT", 1)
    with two_models() as (there, workers):
        for number, key in enumerate(("1", "1", "2", "2", "1")):
            assert get(f"{there.url}/v1/models", headers={"authorization": key}).status == 200
            assert asked(workers) == [[1, 1, 2, 3, 3][number]] * 2


def test_the_worker_of_an_only_model_answers_itself() -> None:
    with proxy_cluster("a", "b") as there:
        for worker in there.workers.values():
            worker.reply = b"as it is"
        reply = get(f"{there.url}/v1/models")
        assert (reply.status, reply.body) == (200, b"as it is")
        assert "x-kvpool-worker" in reply.headers
