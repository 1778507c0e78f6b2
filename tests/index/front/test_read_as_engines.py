"""Requests that an engine reads, however they are written, are placed by their prompt behind either front."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.fronts import ASKED, Cluster, ProxyCluster, envoy_cluster, join, proxy_cluster
from tests.support.http_client import TEXT, get, post
from tests.support.openai_worker import card

pytestmark = pytest.mark.usefixtures("grpc_started")
CHATS = [[{"role": "user", "content": TEXT}], [{"role": "user", "content": "another"}]]


@contextmanager
def front(kind: str, folder: Path) -> Iterator[Cluster]:
    """Worker b holds the prompt."""
    with envoy_cluster(folder) if kind == "envoy" else proxy_cluster() as there:
        there.hold("b")
        yield there


def is_placed_by_prompt(there: Cluster, body: Any, path: str = "/v1/completions") -> None:
    reply = post(there.url, body, path)
    assert (reply.status, reply.worker, reply.headers["x-kvpool-reason"]) == (200, "b", "prefix"), (
        path,
        body,
    )
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    assert there.workers["b"].bodies[-1] == sent, "the worker gets it as it was sent"
    assert json.loads(reply.body)["path"] in (path, "/v1/completions")


@pytest.mark.parametrize("kind", ["envoy", "router"])
def test_a_body_may_have_any_encoding_of_json_and_no_model(kind: str, tmp_path: Path) -> None:
    with front(kind, tmp_path) as there:
        text = json.dumps(ASKED)
        for encoding in ("utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"):
            is_placed_by_prompt(there, text.encode(encoding))
        for model in ({}, {"model": ""}, {"model": None}):
            is_placed_by_prompt(there, {"prompt": ASKED["prompt"], **model})
            is_placed_by_prompt(there, {"prompt": TEXT, **model})


@pytest.mark.parametrize("kind", ["envoy", "router"])
def test_a_path_may_have_escapes_and_a_query(kind: str, tmp_path: Path) -> None:
    with front(kind, tmp_path) as there:
        for path in ("/v1/%63ompletions", "/v1%2Fcompletions?x=/y", "/v1/completions?"):
            for prompt in (ASKED["prompt"], TEXT):  # whose tokens a worker makes
                is_placed_by_prompt(there, {"model": "m", "prompt": prompt}, path)


@pytest.mark.parametrize("kind", ["envoy", "router"])
def test_chats_in_a_batch_are_prompts(kind: str, tmp_path: Path) -> None:
    with front(kind, tmp_path) as there:
        there.hold("b", f"user: {TEXT}\n")
        is_placed_by_prompt(there, {"model": "m", "messages": CHATS}, "/v1/chat/completions/batch")
        if kind == "router":  # deploy/envoy.yaml passes /v1/ alone
            is_placed_by_prompt(there, {"model": "m", "messages": CHATS[0]}, "/cohere/v2/chat")


def test_a_request_without_a_model_may_go_to_workers_of_any() -> None:
    with proxy_cluster() as there:
        join(there, there.workers["c"], "n")
        there.index.fleet.remove("default/c")
        join(there, there.workers["c"], "n")
        there.workers["c"].cards = [card("n")]
        replies = [post(there.url, {"prompt": TEXT}) for _ in range(12)]
        assert {one.status for one in replies} == {200}
        assert {one.worker for one in replies} == {"a", "b", "c"}
        assert {one.headers["x-kvpool-reason"] for one in replies} == {"unreadable"}


def test_an_escaped_path_of_a_kept_response_leads_to_its_keeper() -> None:
    with proxy_cluster() as there:
        assert isinstance(there, ProxyCluster)
        for _ in range(6):
            kept = json.loads(post(there.url, {"model": "m", "input": TEXT}, "/v1/responses").body)
            name = kept["id"].replace("_", "%5F")
            for path in (f"/v1/responses/{name}", f"/v1%2Fresponses/{kept['id']}?stream=false"):
                assert get(there.url + path).worker == kept["worker"]
        assert there.retries() == {}
        workers = [*there.workers.values()]
        for worker in (
            *workers,
            *reversed(workers),
        ):  # of answers that the router has not seen, in no turn of its own
            kept = json.loads(post(f"http://{worker.at}", {"input": TEXT}, "/v1/responses").body)
            reply = get(f"{there.url}/v1%2Fresponses/{kept['id']}")
            assert (reply.status, reply.worker) == (200, worker.name)
