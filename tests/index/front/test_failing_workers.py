"""A worker that fails fast, is busy or ill, behind either front: how many requests it gets."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kvpool.index.cost import ejections
from kvpool.index.cost.ejections import FAILURES
from kvpool.index.cost.router import Router
from kvpool.index.follow.scraper import Scraper
from tests.support.deadlines import eventually
from tests.support.ext_proc import Call, calling, picking, response
from tests.support.fleets import say
from tests.support.fronts import (
    ASKED,
    Cluster,
    ProxyCluster,
    beside,
    envoy_cluster,
    followed,
    proxy_cluster,
)
from tests.support.http_client import TEXT, get, of_request, post, request_of
from tests.support.openai_worker import BadWorker, ScriptedWorker, scripted
from tests.support.placing import TEN, order
from tests.support.wire import batch, packed64, stored

pytestmark = pytest.mark.usefixtures("grpc_started")


@pytest.fixture(autouse=True)
def _no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is."""
    monkeypatch.setattr(ejections, "EJECT_S", 600.0)


def asked(number: int, **fields: Any) -> dict[str, Any]:
    """A request like no other, with the prompt that worker a holds."""
    return {**ASKED, "max_tokens": number + 1, **fields}


@contextmanager
def front(kind: str, folder: Path) -> Iterator[Cluster]:
    """Worker a, which holds the prompt, and b, which does not."""
    with envoy_cluster(folder, names=("a", "b")) if kind == "envoy" else proxy_cluster("a", "b") as there:
        there.hold("a")
        assert post(there.url, ASKED).worker == "a"
        yield there


@pytest.mark.parametrize("kind", ["envoy", "router"])
def test_a_worker_that_fails_fast_costs_few_requests(kind: str, tmp_path: Path) -> None:
    with front(kind, tmp_path) as there, ThreadPoolExecutor(16) as callers:
        there.workers["a"].status = 500
        statuses = list(callers.map(lambda number: post(there.url, asked(number)).status, range(160)))
        assert sorted(set(statuses)) == [200, 500]
        assert statuses.count(500) <= 40


@pytest.mark.parametrize("kind", ["envoy", "router"])
@pytest.mark.parametrize("status", [429, 503])
def test_a_worker_that_is_full_is_not_broken(kind: str, status: int, tmp_path: Path) -> None:
    with front(kind, tmp_path) as there:
        a = there.workers["a"]
        a.status = status
        assert [post(there.url, asked(number)).worker for number in range(20)] == ["b"] * 20
        a.status = 200
        router: Router = there.index._options["router"]
        router.check(
            there.index.fleet.start("default/a"), failed=False
        )  # Envoy does not say that it was full
        assert post(there.url, ASKED).worker == "a"


@pytest.mark.parametrize("kind", ["envoy", "router"])
def test_if_all_workers_refuse_the_caller_learns_it(kind: str, tmp_path: Path) -> None:
    with front(kind, tmp_path) as there:
        for worker in there.workers.values():
            worker.status = 429
        assert {post(there.url, ASKED).status for _ in range(10)} == {429}
        for worker in there.workers.values():
            worker.status = 200
        assert post(there.url, ASKED).status == 200


def ejected(there: Cluster) -> list[str]:
    router: Router = there.index._options["router"]
    return [name for name, one in router._ejections._failing.items() if one.names]


def answering(post: bytes, get: bytes = b"200 OK") -> Callable[[socket.socket], None]:
    """Heads of a worker's answers, with what comes behind them."""

    def talk(client: socket.socket) -> None:
        while request := request_of(client):
            head, _, body = (post if request.startswith(b"POST /v1/completions") else get).partition(b"|")
            length = b"" if b"\r\n" in head else b"\r\ncontent-length: %d" % len(body)
            client.sendall(b"HTTP/1.1 " + head + length + b"\r\n\r\n" + body)
            if length == b"" and not body.endswith(b"0\r\n\r\n"):
                return

    return talk


def chunk(part: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(part), part)


STREAM = b"200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked|"
TOKEN, DONE = chunk(b'data: {"choices": []}\n\n'), chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
FAULT = b'data: {"error": {"message": "x", "type": "InternalServerError", "param": null, "code": 500}}\n\n'
FAULT_OF_MESSAGES = (
    b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"x"}}\n\n'
)
BAD_REQUEST = FAULT.replace(b"InternalServerError", b"BadRequestError").replace(b"500", b"400")
BROKEN = {
    "500": b"500 Internal Server Error|{}", "502": b"502 Bad Gateway|{}", "no HTTP": b"2x0|{}",
    "a short answer breaks off": b"200 OK\r\ncontent-length: 9|{", "a stream breaks off": STREAM + TOKEN,
    "a stream tells a fault": STREAM + chunk(FAULT) + DONE,
    "a stream tells a fault late": STREAM + TOKEN + chunk(FAULT) + DONE,
    "a stream of messages tells a fault": STREAM + TOKEN + chunk(FAULT_OF_MESSAGES) + DONE,
}  # fmt: skip


@pytest.mark.parametrize("answer", BROKEN.values(), ids=BROKEN.keys())
def test_only_a_generation_proves_an_engine(answer: bytes) -> None:
    """Whatever else it answers well, a worker that serves no prompt is found out."""
    with beside(BadWorker("bad", answering(answer, b"200 OK|{}")), "a") as there:
        for number in range(FAILURES):
            assert ejected(there) == [], number
            with suppress(OSError, http.client.HTTPException):
                post(there.url, asked(number, stream=True))
            for _ in range(2):
                get(f"{there.url}/version")
                post(there.url, asked(number), path="/tokenize")
        assert eventually(lambda: ejected(there) == ["default/bad"])
        assert {post(there.url, asked(number)).worker for number in range(9, 19)} == {"a"}


UNHURT = {
    "404": b"404 Not Found|{}", "400": b"400 Bad Request|{}", "401": b"401 Unauthorized|{}",
    "503": b"503 Service Unavailable|{}", "429": b"429 Too Many Requests|{}",
    "a stream tells a caller's fault": STREAM + chunk(BAD_REQUEST) + DONE, "nothing": b"200 OK|",
}  # fmt: skip


@pytest.mark.parametrize("answer", UNHURT.values(), ids=UNHURT.keys())
def test_what_says_nothing_of_an_engine(answer: bytes) -> None:
    """Neither does it fail, nor does it end what other requests found."""
    with beside(BadWorker("bad", answering(answer)), "a") as there:
        fleet, router = there.index.fleet, there.index._options["router"]
        for number in range(FAILURES + 1):
            post(there.url, asked(number, stream=True))
        assert ejected(there) == []
        for number in range(FAILURES - 1):
            router.record(fleet.start("default/bad"), bytes([number]), "failed")
        post(there.url, asked(99, stream=True))
        router.record(fleet.start("default/bad"), b"last", "failed")
        assert ejected(there) == ["default/bad"]


def test_a_caller_that_leaves_says_nothing_of_an_engine() -> None:
    with proxy_cluster("a", "b") as there:
        there.hold("a")
        worker = there.workers["a"]
        worker.hold_parts.clear()
        for number in range(FAILURES + 1):
            with there.connect() as client:
                client.sendall(of_request(json.dumps(asked(number, stream=True)).encode()))
                assert client.recv(20).startswith(b"HTTP/1.1 200")
            assert eventually(lambda number=number: worker.given_up == number + 1)
        assert eventually(there.ends)
        assert there.router._ejections._failing == {}


def refusing_poison(client: socket.socket) -> None:
    while request := request_of(client):
        status = b"500 Poison" if b"poison" in request else b"200 OK"
        client.sendall(b"HTTP/1.1 " + status + b"\r\ncontent-length: 2\r\n\r\n{}")


@pytest.mark.parametrize("how", ["sent again", "of a session"])
def test_a_request_that_fails_everywhere_ejects_nobody(how: str) -> None:
    workers = [BadWorker(name, refusing_poison) for name in "abcd"]
    with ExitStack() as ends, proxy_cluster(workers=[]) as there:
        for worker in workers:
            ends.callback(worker.stop)
        followed(workers, there.index.fleet)
        there.hold("a")
        assert post(there.url, ASKED).headers["x-kvpool-worker"] == "a"
        for number in range(40):
            poison = (
                {"max_tokens": number + 1, "session_id": f"s{number // 10}"} if how == "of a session" else {}
            )
            reply = post(there.url, {**ASKED, "user": "poison", **poison})
            assert reply.status == 500
            assert ejected(there) == []
        assert post(there.url, ASKED).headers["x-kvpool-worker"] == "a"


def test_a_request_that_failed_goes_to_another_worker() -> None:
    with beside(BadWorker("bad", answering(BROKEN["500"])), "a") as there:
        assert [post(there.url, ASKED).status for _ in range(2)] == [500, 200]
        session = {**ASKED, "session_id": "s", "max_tokens": 1}
        assert [post(there.url, session).status for _ in range(4)] == [500, 200, 200, 200]


@contextmanager
def before_a_trial(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProxyCluster]:
    """Worker a, which holds the prompt, has failed and works again; its time is over."""
    monkeypatch.setattr(ejections, "EJECT_S", 0.0)
    monkeypatch.setattr(ejections, "TRIAL_S", 600.0)
    with proxy_cluster("a", "b") as there:
        there.hold("a")
        there.workers["a"].status = 500
        assert [post(there.url, asked(number)).status for number in range(FAILURES)] == [500] * FAILURES
        assert ejected(there) == ["default/a"]
        there.workers["a"].status = 200
        yield there


def test_a_trial_is_a_request_that_an_engine_computes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """None that no engine computes, that goes elsewhere as it has failed there, or that is refused, takes its place."""
    with before_a_trial(monkeypatch) as there:
        a = there.workers["a"]
        asked_before = len(a.bodies)
        for _ in range(8):
            get(f"{there.url}/version")
        assert len(a.bodies) > asked_before
        assert post(there.url, asked(0)).worker == "b"
        a.status = 400
        assert post(there.url, asked(49)).status == 400
        a.status = 200
        assert post(there.url, asked(50)).worker == "a"
        assert ejected(there) == []


def test_a_trial_that_has_begun_to_answer_lets_others_in(monkeypatch: pytest.MonkeyPatch) -> None:
    with before_a_trial(monkeypatch) as there:
        there.workers["a"].hold_parts.clear()
        with there.connect() as client:
            client.sendall(of_request(json.dumps(asked(50, stream=True)).encode()))
            assert client.recv(20).startswith(b"HTTP/1.1 200")
            assert eventually(lambda: ejected(there) == [])
            assert post(there.url, asked(51)).worker == "a"
            there.workers["a"].hold_parts.set()
        assert eventually(there.ends)


def test_connections_that_end_with_a_worker_are_not_of_its_next_start() -> None:
    def talk(client: socket.socket) -> None:
        request_of(client)
        came.release()
        assert go_on.wait(60)

    came, go_on = threading.Semaphore(0), threading.Event()
    bad = BadWorker("bad", talk)
    long = 20 * TEXT
    with beside(bad, "a") as there, ThreadPoolExecutor(4) as callers:
        there.hold("bad", long)
        prompt = list(long.encode())
        waiting = [callers.submit(post, there.url, asked(number, prompt=prompt)) for number in range(4)]
        for _ in waiting:
            assert came.acquire(timeout=60)
        there.index.fleet.add(ScriptedWorker("bad", bad.port).worker(incarnation="2"), "flag")
        go_on.set()
        assert {one.result(60).status for one in waiting} == {502}
        assert there.router._ejections._failing == {}


def test_where_envoy_goes_on_for_a_failure_or_a_404_it_is_no_success_of_the_first() -> None:
    """Workers that lack a model answer with 404, dead ones not at all, and Envoy does not say which."""
    with picking("a", "b") as index, calling(index) as channel:

        def first(status: str) -> str:
            call = Call(channel)
            targets = call.place()
            call.ask(response(served="127.0.0.1:9002", status=status))
            call.end()
            return targets[0]

        assert [first(status) for status in ("200", "200", "404", "200")] == ["127.0.0.1:9001"] * 4
        assert first("200") == "127.0.0.1:9002", "three failures in a row are known"


def test_a_connection_that_fails_counts(tmp_path: Path) -> None:
    with front("router", tmp_path) as there:
        there.workers["a"].stop()
        assert [post(there.url, ASKED).worker for _ in range(10)] == ["b"] * 10
        assert there.index.proxy_stats.totals().retries["unreachable"] <= 4  # type: ignore[index]


@pytest.mark.anyio
async def test_a_worker_that_fails_its_health_check_gets_no_requests_until_it_passes_one() -> None:
    with scripted("a", "b") as workers:
        fleet = followed(workers)
        say(fleet, "default/a", 0, 0, batch(stored(TEN)))
        router = Router(fleet)
        scraper = Scraper(fleet, router.loads, interval_s=0.05, check=router.check)
        scraper.start()

        async def goes_to(name: str) -> None:
            ends_s = time.monotonic() + 60
            while order(router.route("m", hashes64=packed64(TEN)))[0] != name:
                assert time.monotonic() < ends_s, name
                await asyncio.sleep(0.01)

        try:
            for status, name in ((200, "a"), (503, "b"), (404, "a"), (500, "b"), (200, "a")):
                workers[0].health_status = status
                await goes_to(name)
        finally:
            await scraper.close()
