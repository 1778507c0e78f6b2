"""Responses that a worker keeps: who continues, shows and cancels them, behind either front."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from kvpool.index.front import stored_responses
from kvpool.index.front.stored_responses import StoredResponses
from tests.support.fronts import Cluster, envoy_cluster, proxy_cluster
from tests.support.http_client import get, post

RESPONSES = "/v1/responses"
NAMES = ("a", "b", "c", "d")


def front(kind: str, folder: Path) -> AbstractContextManager[Cluster]:
    return envoy_cluster(folder, names=NAMES) if kind == "envoy" else proxy_cluster(*NAMES)


@pytest.mark.usefixtures("grpc_started")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["envoy", "router"])
def test_a_response_is_continued_shown_and_cancelled_where_it_is_kept(
    kind: str, stream: bool, tmp_path: Path
) -> None:
    with front(kind, tmp_path) as there:
        for number in range(8):
            asked = {"model": "m", "input": f"turn {number}", "stream": stream}
            made = post(there.url, asked, RESPONSES).body.removeprefix(b"data: ").partition(b"\n")[0]
            first = json.loads(made)
            at = f"{RESPONSES}/{first['id']}"
            again = post(
                there.url, {**asked, "stream": False, "previous_response_id": first["id"]}, RESPONSES
            )
            for reply in (
                again,
                get(there.url + at),
                post(there.url, b"", f"{at}/cancel"),
                get(f"{there.url}{at}?x=1"),
            ):
                assert (reply.status, reply.worker) == (200, first["worker"])
        assert get(f"{there.url}{RESPONSES}/resp_unknown").status == 404


@pytest.mark.usefixtures("grpc_started")
def test_the_router_knows_who_keeps_a_response_and_asks_no_other() -> None:
    with proxy_cluster(*NAMES) as there:
        made = json.loads(post(there.url, {"model": "m", "input": "x"}, RESPONSES).body)
        for _ in range(8):
            assert get(f"{there.url}{RESPONSES}/{made['id']}").worker == made["worker"]
        assert there.retries() == {}
        there.index.fleet.remove(f"default/{made['worker']}")
        there.workers[made["worker"]].stop()
        assert get(f"{there.url}{RESPONSES}/{made['id']}").status == 404, "it went with its worker"


def test_responses_are_known_by_tenant_and_the_first_to_name_one_keeps_it() -> None:
    stored = StoredResponses()
    assert stored.learn("t", "a", b'{"created_at": 1, "id": "resp_1"}')
    assert stored.learn("t", "b", b'data: {"response": {"id":"resp_1"}}')
    assert not stored.learn("t", "b", b'{"id": "chatcmpl-1"}')
    assert stored.worker("t", f"{RESPONSES}/resp_1/cancel", b"") == "a"
    assert stored.worker("other", f"{RESPONSES}/resp_1", b"") is None
    assert stored.worker("t", RESPONSES, b'{"previous_response_id" : "resp_1"}') == "a"
    quoted = json.dumps({"input": json.dumps({"previous_response_id": "resp_1"})}).encode()
    assert stored.worker("t", RESPONSES, quoted) is None, "the text of a prompt"
    stored.learn("t", "b", b'{"id": "resp_2"}')
    for body in (
        b'{"metadata": {"previous_response_id": "resp_1"}, "previous_response_id": "resp_2"}',
        b'{"previous_response_id": "resp_1", "previous\\u005fresponse_id": "resp_2"}',
    ):
        assert stored.worker("t", RESPONSES, body) == "b", "the request's own field, the last of them"
    for body in (
        b'{"previous_response_id": 1}',
        b'{"previous_response_id": "resp_2"',
        b"\xff",
        b"[" * 100_000,
        b"",
    ):
        assert stored.worker("t", RESPONSES, body) is None
    assert stored.worker("t", "/v1/completions", b'{"previous_response_id": "resp_1"}') is None


def test_of_many_responses_the_last_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "MAX_STORED", 3)
    stored = StoredResponses()
    for number in range(9):
        stored.learn("t", "a", b'{"id": "resp_%d"}' % number)
    known = [stored.worker("t", f"{RESPONSES}/resp_{number}", b"") for number in range(9)]
    assert known == [None] * 6 + ["a"] * 3
    assert not stored.learn("t", "a", b'{"id": "resp_%s"}' % (b"x" * 129))
