"""What a worker says that nobody asked for, or about itself: what a client of the router gets of it."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading

import aiohttp
import anyio.to_thread
import pytest

from kvpool.index.net.worker_connection import KEEPALIVE, MAX_EMPTY_NBYTES, MAX_INTERIM, WorkerConnector
from tests.support.deadlines import eventually
from tests.support.fronts import ASKED, beside, proxy_cluster
from tests.support.http_client import post, request_of
from tests.support.openai_worker import BadWorker

pytestmark = pytest.mark.usefixtures("grpc_started")


def answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


@pytest.mark.parametrize(
    ("unasked", "when"),
    [
        (answer(b"for nobody"), "at once"),
        (answer(b"for nobody"), "when idle"),
        (b"HTTP/1.1 200 OK\r\nx-half: ", "when idle"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", "when idle"),
        (b"\r\n", "when idle"),
    ],
    ids=["behind the answer", "later", "half a head", "an interim one", "an empty line"],
)
def test_what_a_worker_sends_unasked_is_given_to_nobody(unasked: bytes, when: str) -> None:
    goes_on, said = threading.Event(), threading.Event()

    def talk(client: socket.socket) -> None:
        while asked := request_of(client):
            mine = answer(asked.partition(b"\r\n\r\n")[2])
            if when == "at once":
                client.sendall(mine + unasked)
                continue
            client.sendall(mine)
            assert goes_on.wait(60)
            client.sendall(unasked)
            said.set()

    with beside(BadWorker("bad", talk)) as there:
        for name in ("a", "b", "c"):
            there.index.fleet.remove(f"default/{name}")
        for number in range(3):
            asked = {**ASKED, "n": number}
            reply = post(there.url, asked)
            assert (reply.status, json.loads(reply.body)) == (200, asked)
            if when != "at once":
                goes_on.set()
                assert said.wait(60)
                goes_on.clear()
                said.clear()
        goes_on.set()


def test_a_worker_that_says_100_for_ever_costs_one_request_that_fails() -> None:
    sent = [0]

    def talk(client: socket.socket) -> None:
        request_of(client)
        while True:
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)
            sent[0] += 1000

    with beside(BadWorker("bad", talk), "a") as there:
        reply = post(there.url, ASKED)
        assert (reply.status, "over 16 responses of 1xx" in reply.body.decode()) == (502, True)
        before = sent[0]
        assert eventually(there.ends)
        assert sent[0] - before <= 1_000_000, "its connection has ended"


def test_a_worker_whose_chunk_never_begins_costs_one_response_that_breaks_off() -> None:
    def talk(client: socket.socket) -> None:
        request_of(client)
        client.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2;")
        while True:
            client.sendall(b"a=b;" * 1000)

    with beside(BadWorker("bad", talk), "a") as there:
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            post(there.url, ASKED)
        assert eventually(there.ends), "its connection has ended"


def test_a_body_in_chunks_of_one_byte_arrives_whole() -> None:
    def talk(client: socket.socket) -> None:
        request_of(client)
        client.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        client.sendall(b"1\r\nx\r\n" * MAX_EMPTY_NBYTES + b"0\r\n\r\n")

    with beside(BadWorker("bad", talk), "a") as there:
        assert post(there.url, ASKED).body == b"x" * MAX_EMPTY_NBYTES


def test_a_few_interim_responses_are_skipped() -> None:
    def talk(client: socket.socket) -> None:
        while asked := request_of(client):
            for _ in range(MAX_INTERIM):
                client.sendall(b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n")
            client.sendall(answer(asked.partition(b"\r\n\r\n")[2]))

    with beside(BadWorker("bad", talk), "a") as there:
        for number in range(3):
            asked = {**ASKED, "n": number}
            assert json.loads(post(there.url, asked).body) == asked


@pytest.mark.parametrize("name", ["location", "content-location"])
@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("http://{at}/v1/x?y=%2F#z", "/v1/x?y=%2F#z"),
        ("//{at}//elsewhere/x", "/elsewhere/x"),
        ("http://{at}", "/"),
        ("/v1/x", "/v1/x"),
        ("../x", "../x"),
        ("https://example.com:8000/x", "https://example.com:8000/x"),
        ("http://[", "http://["),
    ],
)
def test_a_redirect_does_not_show_a_workers_address(name: str, said: str, told: str) -> None:
    with proxy_cluster("a") as there:
        worker = there.workers["a"]
        worker.reply_headers = {name: said.format(at=worker.at)}
        worker.status = 201
        reply = post(there.url, ASKED, "/v1/chat/completions/")
        assert (reply.status, reply.headers[name]) == (201, told)


@pytest.mark.anyio
async def test_what_came_unasked_while_the_event_loop_was_busy_is_given_to_nobody() -> None:
    said = threading.Event()

    def talk(client: socket.socket) -> None:
        while request_of(client):
            client.sendall(answer(b"mine"))
            client.sendall(answer(b"for nobody"))
            said.set()

    worker = BadWorker("bad", talk)
    try:
        async with aiohttp.ClientSession(connector=WorkerConnector(keepalive_s=60, tls=None)) as session:
            for _ in range(20):
                async with session.post(f"http://127.0.0.1:{worker.port}/") as reply:
                    assert await reply.text() == "mine"
                assert said.wait(60), "in which nothing is read"
                said.clear()
    finally:
        worker.stop()


@pytest.mark.anyio
async def test_the_kernel_notices_that_a_workers_host_has_vanished() -> None:
    """Without, its answer is waited for as long as that of a worker that computes."""
    worker = BadWorker("bad", lambda client: client.recv(1 << 16) and client.recv(1))
    try:
        connector = WorkerConnector(keepalive_s=60, tls=None)
        async with aiohttp.ClientSession(connector=connector) as session:
            asked = asyncio.ensure_future(session.get(f"http://127.0.0.1:{worker.port}/"))

            def connected() -> bool:  # before, a placeholder stands there
                return any(protocol.transport is not None for protocol in connector._acquired)

            assert await anyio.to_thread.run_sync(eventually, connected)
            (protocol,) = connector._acquired
            assert protocol.transport is not None
            made = protocol.transport.get_extra_info("socket")
            assert {made.getsockopt(*option[:2]) == option[2] for option in KEEPALIVE} == {True}
            asked.cancel()
    finally:
        worker.stop()
