"""When an answer begins: comments of an event stream keep a connection alive while its prompt waits, and are none.

vLLM sends them by ``--sse-keep-alive-interval``, for chats and completions.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from kvpool.index.cost.ejections import FAILURES
from kvpool.index.front import proxy_forwarding
from kvpool.index.front.worker_answer import Answer
from tests.support.deadlines import eventually
from tests.support.fronts import ASKED, ProxyCluster, beside, proxy_cluster
from tests.support.http_client import get, post, request_of
from tests.support.openai_worker import BadWorker, ScriptedWorker

EVENTS = "text/event-stream; charset=utf-8"
COMMENT = b": keep-alive\n\n"
TOKEN = b'data: {"choices": []}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: " + EVENTS.encode() + b"\r\n"


def parts_of(told: bytes, cuts: list[int]) -> Iterator[bytes]:
    ends = sorted({cut % (len(told) + 1) for cut in cuts} | {len(told)})
    for begin, end in zip([0, *ends], ends, strict=False):
        if end > begin:
            yield told[begin:end]


LINES = st.sampled_from([b":", b": keep-alive", b": data: x", b":\xff\0", b"", b"", b": " + b"x" * 300])
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
SILENCE = st.lists(st.builds(bytes.__add__, LINES, ENDS), max_size=12).map(b"".join)
CUTS = st.lists(st.integers(0, 1 << 16), max_size=20)


@given(SILENCE, st.sampled_from([b"data: x", b"event: error\n", b"id", b" :", b"x"]), CUTS, CUTS)
def test_an_answer_begins_behind_comments_and_blank_lines_however_they_are_cut(
    silence: bytes, told: bytes, cuts: list[int], more: list[int]
) -> None:
    answer = Answer(200, EVENTS)
    for part in parts_of(silence, cuts):
        answer.read(part)
        assert not answer.has_begun
    assert answer.served(is_broken=False) is None
    for part in parts_of(told, more):
        answer.read(part)
        assert answer.has_begun
    answer.read(COMMENT)
    assert answer.has_begun


FAULTS = [
    b'data: {"error": {"message": "x", "type": "InternalServerError", "param": null, "code": 500}}\n\n',
    b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"x"}}\n\n',
]


@given(
    st.lists(st.sampled_from([TOKEN, COMMENT, b"data: [DONE]\n\n"])),
    st.sampled_from(FAULTS),
    st.booleans(),
    CUTS,
)
def test_a_fault_that_a_stream_tells_is_found_however_it_is_cut(
    before: list[bytes], fault: bytes, ends: bool, cuts: list[int]
) -> None:
    told = b"".join(before) + (fault + b"data: [DONE]\n\n" if ends else fault[:-2])
    answer = Answer(200, EVENTS)
    for part in parts_of(told, cuts):
        answer.read(part)
    assert answer.served(is_broken=False) is False


@given(
    st.lists(
        st.sampled_from([TOKEN, COMMENT, b'data: {"text": "event: error \\n {\\"error\\""}\n\n']), min_size=1
    ),
    CUTS,
)
def test_texts_of_a_stream_are_no_faults_however_they_are_cut(events: list[bytes], cuts: list[int]) -> None:
    answer = Answer(200, EVENTS)
    for part in parts_of(TOKEN + b"".join(events), cuts):
        answer.read(part)
    assert answer.served(is_broken=False) is True


@pytest.mark.parametrize("media", ["application/json", "", "text/plain", "text/event-streams"])
def test_only_event_streams_have_comments(media: str) -> None:
    answer = Answer(200, media)
    answer.read(b"")
    assert not answer.has_begun
    answer.read(COMMENT)
    assert answer.has_begun


@contextmanager
def a_stream(*told: bytes) -> Iterator[tuple[ProxyCluster, http.client.HTTPResponse, Callable[[], None]]]:
    """A worker that sends these in turn, the next whenever the last is called. Before: nothing behind the head."""
    turns = threading.Semaphore(0)

    def talk(client: socket.socket) -> None:
        if request_of(client).startswith(b"POST"):
            client.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
            for part in told:
                assert turns.acquire(timeout=60)
                client.sendall(b"%x\r\n%s\r\n" % (len(part), part) if part else b"0\r\n\r\n")

    with beside(BadWorker("bad", talk), "a") as there:
        client = http.client.HTTPConnection("127.0.0.1", there.port, timeout=60)
        client.request("POST", "/v1/completions", json.dumps({**ASKED, "stream": True}))
        try:
            yield there, client.getresponse(), turns.release
        finally:
            for _ in told:
                turns.release()
            client.close()


def first_bytes(there: ProxyCluster) -> int:
    return sum(there.index.proxy_stats.totals().first_byte_seconds.counts)


@pytest.mark.parametrize(
    "silence",
    [[COMMENT], [b": keep", b"-alive\r\n", b"\r\n"], [b":", b"\n\n: x\n"], [b"\r\n\n"]],
    ids=["whole", "cut, CRLF", "cut at the colon", "blank"],
)
@pytest.mark.usefixtures("grpc_started")
def test_a_comment_of_a_stream_ends_no_reservation_and_is_no_first_byte(silence: list[bytes]) -> None:
    with a_stream(*silence, TOKEN, b"") as (there, reply, go_on):
        for part in silence:
            go_on()
            assert reply.read(len(part)) == part, "a client gets it as it comes"
        assert len(there.router._reservations) == 1, "the prompt waits"
        assert first_bytes(there) == 0
        go_on()
        assert reply.read(len(TOKEN)) == TOKEN
        assert len(there.router._reservations) == 0
        assert first_bytes(there) == 1
        go_on()
        assert reply.read() == b""
        assert eventually(there.ends)


@pytest.mark.parametrize("length", [True, False], ids=["of a length", "in chunks"])
@pytest.mark.usefixtures("grpc_started")
def test_a_stream_of_comments_alone_proves_no_engine(length: bool) -> None:
    def talk(client: socket.socket) -> None:
        while request_of(client):
            if length:
                client.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(COMMENT) + COMMENT)
            else:
                framed = b"%x\r\n%s\r\n0\r\n\r\n" % (len(COMMENT), COMMENT)
                client.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n" + framed)

    with beside(BadWorker("bad", talk), "a") as there:
        for number in range(FAILURES - 1):
            there.router.record(there.index.fleet.start("default/bad"), bytes([number]), "failed")
        assert post(there.url, ASKED).body == COMMENT
        there.router.record(there.index.fleet.start("default/bad"), b"last", "failed")
        assert [name for name, one in there.router._ejections._failing.items() if one.names] == [
            "default/bad"
        ]
        assert eventually(there.ends)
        assert first_bytes(there) == 0


class Waiting(ScriptedWorker):
    """Its prompts of ``/v1/responses`` wait for ``hold_parts``, behind a comment."""

    async def _answered(self, request: web.Request) -> web.StreamResponse:
        if request.method != "POST":
            return await super()._answered(request)
        self.responses.add(f"resp_{self.name}")
        response = web.StreamResponse(headers={"content-type": EVENTS})
        await response.prepare(request)
        await response.write(COMMENT)
        while not self.hold_parts.is_set():
            await asyncio.sleep(0.01)
        await response.write(b'data: {"response": {"id": "resp_%s"}}\n\n' % self.name.encode())
        return response


@pytest.mark.usefixtures("grpc_started")
def test_comments_do_not_hide_the_name_of_a_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_forwarding, "LEARNS", 1)
    workers: list[ScriptedWorker] = [Waiting(name) for name in "abcd"]
    with ExitStack() as ends:
        for worker in workers:
            worker.hold_parts.clear()
            worker.start()
            ends.callback(worker.stop)
            ends.callback(worker.hold_parts.set)
        there = ends.enter_context(proxy_cluster(workers=workers))
        client = ends.enter_context(closing(http.client.HTTPConnection("127.0.0.1", there.port, timeout=60)))
        client.request("POST", "/v1/responses", json.dumps({"model": "m", "input": "x", "stream": True}))
        reply = client.getresponse()
        assert reply.read(len(COMMENT)) == COMMENT, "a part of its own"
        for worker in workers:
            worker.hold_parts.set()
        assert b"resp_" in reply.read()
        made = reply.headers["x-kvpool-worker"]
        for _ in range(8):
            assert get(f"{there.url}/v1/responses/resp_{made}").worker == made
        assert there.retries() == {}
