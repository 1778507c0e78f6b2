"""Requests of the router whose worker does not take them, or ends the connection: how long they last, and which are
sent again."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvpool.index.front import inference_request, proxy
from kvpool.index.net import worker_connection
from tests.support.deadlines import eventually
from tests.support.fronts import ASKED, ProxyCluster, beside, proxy_cluster
from tests.support.http_client import TEXT, of_request, post, request_of
from tests.support.openai_worker import BadWorker, ScriptedWorker

pytestmark = pytest.mark.usefixtures("grpc_started")


LARGE_NBYTES = 12 << 20  # more than the buffers of two sockets hold


@contextmanager
def before_one_that_is_stopped() -> Iterator[ProxyCluster]:
    """A cluster of a worker whose kernel accepts connections, and that reads nothing."""
    with (
        socket.create_server(("127.0.0.1", 0)) as stopped,
        proxy_cluster("a", proxy={"response_s": 0.2}) as there,
    ):
        there.index.fleet.remove("default/a")
        there.index.fleet.add(ScriptedWorker("stopped", stopped.getsockname()[1]).worker(), "flag")
        yield there


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("size", [1000, LARGE_NBYTES])
def test_a_worker_that_is_stopped_costs_no_request_for_ever(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(worker_connection, "SEND_S", 0.2)
    with before_one_that_is_stopped() as there:
        before = descriptors()
        reply = post(there.url, b"x" * size)
        assert (reply.status, json.loads(reply.body)["error"]["code"]) == (504, 504)
        assert eventually(there.ends)
        assert eventually(lambda: descriptors() == before), "its connection has ended"


def test_a_client_that_goes_away_leaves_no_connection_to_a_worker_that_is_stopped() -> None:
    with before_one_that_is_stopped() as there:
        before = descriptors()
        with there.connect() as client:
            client.sendall(of_request(b"x" * LARGE_NBYTES))
            assert eventually(lambda: descriptors() == before + 3), "the client's two ends, and the worker's"
        assert eventually(lambda: there.outcomes() == {"gone": 1})
        assert eventually(there.ends)
        assert eventually(lambda: descriptors() == before)


def once(client: socket.socket) -> None:
    """Answers the first request of a connection, and ends it at the second."""
    if request_of(client):
        client.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        request_of(client)


@pytest.mark.parametrize("has_next", [True, False])
def test_a_request_that_breaks_its_worker_is_sent_to_no_other(has_next: bool) -> None:
    bad = BadWorker("bad", request_of)
    with beside(bad, "a") as there:
        if not has_next:
            there.index.fleet.remove("default/a")
        reply = post(there.url, ASKED)
        error = json.loads(reply.body)["error"]
        assert (reply.status, error["code"], error["type"]) == (502, 502, "InternalServerError")
        assert error["message"].startswith("worker bad has ended the connection without an answer: ")
        assert (bad.connections, there.workers["a"].bodies, there.retries()) == (1, [], {})
        assert eventually(there.ends)


def test_a_connection_that_its_worker_has_closed_meanwhile_costs_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proxy, "KEEP_ALIVE_S", 600.0)
    bad = BadWorker("bad", once)
    with beside(bad, "a") as there:
        there.index.fleet.remove("default/a")
        for number in (1, 2, 3):
            assert post(there.url, ASKED).status == 200
            assert bad.connections == number
        assert there.retries() == {"lost": 2}


@pytest.mark.parametrize("is_well", [True, False])
def test_a_request_is_sent_again_once_after_a_lost_connection_and_by_a_new_one(
    is_well: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle connections of several workers may end at one moment."""
    monkeypatch.setattr(proxy, "KEEP_ALIVE_S", 600.0)
    had: list[bytes] = []

    def once_in_all(client: socket.socket) -> None:
        had.append(request_of(client))
        if len(had) == 1:
            client.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            request_of(client)

    first, second = BadWorker("first", once), BadWorker("second", once if is_well else once_in_all)
    other = TEXT[::-1]
    try:
        with proxy_cluster("a") as there:
            for bad in (first, second):
                there.index.fleet.add(bad.worker(), "flag")
                there.index.fleet.rank(f"default/{bad.name}", 0).heard()
            there.hold("first", TEXT)
            there.hold("second", TEXT[:32])
            there.hold("second", other)
            for text in (TEXT, other):  # a connection to each of them
                assert post(there.url, {"model": "m", "prompt": list(text.encode())}).status == 200
            assert (first.connections, second.connections) == (1, 1)
            assert post(there.url, ASKED).status == (200 if is_well else 502)
            assert (first.connections, second.connections) == (1, 2)
            assert (there.retries(), there.workers["a"].bodies) == ({"lost": 1}, [])
            assert eventually(there.ends)
    finally:
        first.stop()
        second.stop()


def test_a_request_that_its_worker_did_not_take_whole_goes_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inference_request, "MAX_READ_NBYTES", 16 << 20)
    bad = BadWorker("bad", lambda client: client.recv(1000))
    with beside(bad, "a") as there:
        assert post(there.url, {**ASKED, "user": "x" * LARGE_NBYTES}).worker == "a"
        assert (bad.connections, there.retries()) == (1, {"lost": 1})
        assert eventually(there.ends)
