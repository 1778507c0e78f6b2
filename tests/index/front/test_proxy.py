"""The router's proxy on real sockets, with scripted workers behind: where requests go, and what their clients see.

Over 400 lines because all are of one door, and share what starts it.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import json
import os
import re
import socket
import ssl
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvpool import BlockHasher, Load
from kvpool.index import limits
from kvpool.index.front import placement, proxy_forwarding
from kvpool.index.net import listener
from kvpool.index.net.tls import ServerTls, trusting
from kvpool.index.request_stats import RequestStats
from kvpool.index.serve.metrics import Exporter
from tests.support.credentials import Authority
from tests.support.deadlines import eventually
from tests.support.fleets import say
from tests.support.fronts import ASKED, beside, proxy_cluster
from tests.support.http_client import TEXT, all_of, get, of_request, post, request_of
from tests.support.metrics_pages import showing
from tests.support.openai_worker import BadWorker, ScriptedWorker, that_accepts_nothing
from tests.support.wire import batch, stored

pytestmark = pytest.mark.usefixtures("grpc_started")


def test_a_request_goes_to_the_worker_that_holds_its_prompt() -> None:
    with proxy_cluster() as there:
        there.hold("b")
        there.hold("c", f"user: {TEXT}\n")
        reply = post(there.url, {"model": "m", "prompt": TEXT})
        blocks = str(len(TEXT) // 16)
        assert (reply.status, reply.worker) == (200, "b")
        assert {key: value for key, value in reply.headers.items() if key.startswith("x-kvpool")} == {
            "x-kvpool-worker": "b", "x-kvpool-reason": "prefix", "x-kvpool-matched-blocks": blocks,
            "x-kvpool-prompt-blocks": blocks,
        }  # fmt: skip
        seen = there.workers["b"].seen()
        assert seen["x-kvpool-worker"] == "b", "the request says it, too"
        assert seen["host"] == there.workers["b"].at, "the worker's own authority"
        chat = {"model": "m", "messages": [{"role": "user", "content": TEXT}]}
        assert post(there.url, chat, "/v1/chat/completions").worker == "c"
        assert post(there.url, {"model": "m", "prompt": [TEXT, "another"]}).worker == "b"
        assert post(there.url, ASKED, "/v1/completions?x=%2F").worker == "b"
        assert json.loads(post(there.url, ASKED, "/v1/a%2Fb").body)["path"] == "/v1/a/b"
        assert eventually(there.ends)


@pytest.mark.parametrize(
    ("path", "prompt", "rendered"),
    [
        ("/v1/responses", {"input": TEXT}, TEXT),
        ("/v1/messages", {"messages": [{"role": "user", "content": TEXT}]}, f"user: {TEXT}\n"),
    ],
    ids=["responses", "messages"],
)
def test_a_request_whose_tokens_only_a_worker_makes_goes_to_the_holder_of_its_prompt(
    path: str, prompt: dict[str, Any], rendered: str
) -> None:
    with proxy_cluster() as there:
        there.hold("b", rendered)
        for _ in range(2):
            reply = post(there.url, {"model": "m", **prompt}, path)
            assert (reply.status, reply.worker, reply.headers["x-kvpool-reason"]) == (200, "b", "prefix")
            assert reply.headers["x-kvpool-matched-blocks"] == str(len(rendered) // 16)
        assert json.loads(reply.body)["path"] == path
        assert sum(worker.rendered for worker in there.workers.values()) == 1, "the tokens are remembered"
        for worker in there.workers.values():
            worker.render = None
        reply = post(there.url, {"model": "m", **prompt, "tools": []}, path)
        assert (reply.status, reply.headers["x-kvpool-reason"]) == (200, "no-tokens")
        assert eventually(there.ends)


def test_a_worker_that_says_no_tokens_in_time_costs_no_request(caplog: pytest.LogCaptureFixture) -> None:
    with proxy_cluster(place={"timeout_s": 0.2}) as there:
        there.hold("b")
        for worker in there.workers.values():
            worker.render_delay_s = 1.0
        assert post(there.url, {"model": "m", "prompt": TEXT}).headers["x-kvpool-reason"] == "no-tokens"
        # They were made all the same, for the next one.
        assert eventually(
            lambda: post(there.url, {"model": "m", "prompt": TEXT}).headers["x-kvpool-reason"] == "prefix"
        )
        assert sum(worker.rendered for worker in there.workers.values()) == 1
        for worker in there.workers.values():
            worker.render, worker.render_delay_s = None, 0.0
        for _ in range(5):
            reply = post(there.url, {"model": "m", "prompt": f"another {TEXT}"})
            assert (reply.status, reply.headers["x-kvpool-reason"]) == (200, "no-tokens")
        assert sum(worker.rendered for worker in there.workers.values()) == 2, "one was enough to know"
        (said,) = [one.getMessage() for one in caplog.records if "/render" in one.message]
        assert said.startswith(
            "requests for m that only a worker makes into tokens are placed by load: http://"
        )
        assert "--tokenizer m=FOLDER, else the workers with --enable-scale-out" in said


def test_parts_of_a_stream_come_as_the_worker_sends_them() -> None:
    with proxy_cluster("a") as there:
        there.workers["a"].hold_parts.clear()
        client = http.client.HTTPConnection("127.0.0.1", there.port, timeout=60)
        client.request("POST", "/v1/completions", json.dumps({**ASKED, "stream": True}))
        reply = client.getresponse()
        assert reply.headers["content-type"] == "text/event-stream"
        assert json.loads(reply.readline()[6:])["number"] == 0, "the worker has sent no more"
        assert len(there.router._reservations) == 0, "the prompt is computed"
        there.workers["a"].hold_parts.set()
        assert reply.read().count(b"data: ") == 3
        client.close()
        assert eventually(there.ends)
        assert there.outcomes() == {"2xx": 1}


@pytest.mark.parametrize("begun", [False, True], ids=["before", "amid"])
def test_a_client_that_goes_away_ends_its_request_at_the_worker(begun: bool) -> None:
    with proxy_cluster("a") as there:
        worker = there.workers["a"]
        (worker.hold_parts if begun else worker.hold).clear()
        with there.connect() as client:
            client.sendall(of_request(json.dumps({**ASKED, "stream": True}).encode()))
            if begun:
                read = b""
                while b"data:" not in read:
                    read += client.recv(65536)
                    assert len(read) < 65536
            assert eventually(lambda: len(worker.bodies) == 1)
            assert worker.given_up == 0
        assert eventually(lambda: worker.given_up == 1)
        assert eventually(there.ends)
        assert there.outcomes() == {"gone": 1}


def test_the_next_best_worker_serves_where_the_best_is_away() -> None:
    with proxy_cluster() as there:
        there.hold("b")
        there.hold("c", TEXT[:32])
        there.workers["b"].stop()
        reply = post(there.url, ASKED)
        assert (reply.status, reply.worker, reply.headers["x-kvpool-worker"]) == (200, "c", "c")
        assert reply.headers["x-kvpool-matched-blocks"] == "2", "of the worker that has served it"
        assert there.retries() == {"unreachable": 1}
        assert eventually(there.ends)


def test_the_next_best_worker_serves_where_the_best_shuts_down() -> None:
    with proxy_cluster() as there:
        there.hold("b")
        there.hold("c", TEXT[:32])
        there.workers["b"].status = 503
        assert post(there.url, ASKED).worker == "c"
        assert there.retries() == {"503": 1}
        for worker in there.workers.values():
            worker.status = 503
        reply = post(there.url, ASKED)
        assert (reply.status, "worker" in json.loads(reply.body)) == (503, True), "what the last one has said"
        assert len(there.workers["b"].bodies) == 2
        for status in (400, 404, 500):
            there.workers["b"].status = status
            assert (post(there.url, ASKED).status, len(there.workers["c"].bodies)) == (status, 2)
        assert eventually(there.ends)


BEGUN = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n6\r\ndata: \r\n"
)


def test_a_response_that_has_begun_is_not_asked_for_again() -> None:
    has_come = threading.Event()

    def half(client: socket.socket) -> None:
        if request_of(client):
            client.sendall(BEGUN)
            assert has_come.wait(60)

    bad = BadWorker("bad", half)
    with beside(bad, "a") as there:
        for sent in (b"HTTP/1.1", b"HTTP/1.0"):
            has_come.clear()
            client = there.connect()
            with client:
                # Another user's: what failed once goes elsewhere.
                body = json.dumps(ASKED | {"user": sent.decode()}).encode()
                client.sendall(of_request(body).replace(b"HTTP/1.1", sent, 1))
                received = b""
                while b"data: " not in received:
                    more = client.recv(65536)
                    assert more, received
                    received += more
                has_come.set()
                if sent == b"HTTP/1.1":
                    assert not (received + all_of(client)).endswith(b"0\r\n\r\n"), "no end of it is told"
                else:
                    with pytest.raises(ConnectionResetError):
                        all_of(client)
        assert there.workers["a"].bodies == []
        assert eventually(there.ends)
        assert there.outcomes() == {"broken": 2}


def test_a_worker_that_accepts_no_connection() -> None:
    with that_accepts_nothing() as port, proxy_cluster("a") as there:
        there.index.fleet.add(ScriptedWorker("full", port).worker(), "flag")
        there.index.fleet.rank("default/full", 0).heard()
        there.hold("full")
        assert post(there.url, ASKED).worker == "a"
        assert there.retries() == {"unreachable": 1}
        assert eventually(there.ends)


def test_responses_without_a_body() -> None:
    with proxy_cluster("a") as there:
        client = http.client.HTTPConnection("127.0.0.1", there.port, timeout=60)
        client.request("HEAD", "/v1/models")
        with client.getresponse() as reply:
            assert (reply.status, reply.read()) == (200, b"")
            assert int(reply.headers["content-length"]) > 0
        there.workers["a"].status, there.workers["a"].reply = 204, b""
        client.request("DELETE", "/v1/responses/1")
        with client.getresponse() as reply:
            assert (reply.status, reply.read(), "content-length" in reply.headers) == (204, b"", False)
        client.close()
        assert eventually(there.ends)


def test_a_short_response_that_is_broken_off_is_an_error() -> None:
    def half(client: socket.socket) -> None:
        if request_of(client):
            client.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}")

    with beside(BadWorker("bad", half), "a") as there:
        reply = post(there.url, ASKED)
        assert (reply.status, there.workers["a"].bodies) == (502, [])
        assert "worker bad did not complete its response" in json.loads(reply.body)["error"]["message"]


def test_a_worker_that_says_nothing_for_too_long() -> None:
    with proxy_cluster("a", proxy={"response_s": 0.2}) as there:
        there.workers["a"].hold.clear()
        assert post(there.url, ASKED).status == 504
        assert eventually(lambda: there.workers["a"].given_up == 1)
        assert eventually(there.ends)


def test_bodies_pass_as_they_are() -> None:
    with proxy_cluster("a") as there:
        worker = there.workers["a"]
        for size in (0, 1, 65_536, 65_537, 1 << 20, (1 << 20) + 1):
            body = os.urandom(size)
            worker.reply, worker.reply_headers = None, {}
            for headers in ({}, {"content_encoding": "gzip"}):
                reply = post(there.url, body, **headers)
                assert json.loads(reply.body)["sha256"] == hashlib.sha256(body).hexdigest()
            worker.reply, worker.reply_headers = gzip.compress(body), {"content-encoding": "gzip"}
            assert gzip.decompress(post(there.url, body).body) == body
        assert eventually(there.ends)


def test_a_client_may_wait_until_its_body_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    with proxy_cluster("a") as there, there.connect() as client:
        head = of_request(b"{}", "expect: 100-continue").removesuffix(b"{}")
        client.sendall(head)
        assert client.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(b"{}")
        assert client.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_body_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "MAX_BODY_NBYTES", 1000)
    monkeypatch.setattr(proxy_forwarding, "MAX_BODY_NBYTES", 1000)
    with proxy_cluster("a") as there:
        assert post(there.url, b"x" * 1000).status == 200
        reply = post(there.url, b"x" * 1001)
        error = json.loads(reply.body)["error"]
        assert (reply.status, error["type"], error["code"]) == (413, "BadRequestError", 413)
        assert error["message"] == "a request has at most 1000 bytes"
        client = http.client.HTTPConnection("127.0.0.1", there.port, timeout=60)
        client.request(
            "POST", "/", iter([b"x" * 900] * 2), {"transfer-encoding": "chunked"}, encode_chunked=True
        )
        assert client.getresponse().status == 413
        client.close()
        buffers = there.index.fleet.limits
        monkeypatch.setattr(buffers, "limit_nbytes", buffers.used_nbytes + 999)
        assert post(there.url, b"x" * 1000).status == 503
        assert eventually(there.ends)


def test_a_body_that_does_not_come_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_forwarding, "BODY_S", 0.2)
    with proxy_cluster("a") as there:
        with there.connect() as client:
            client.sendall(of_request(b"{}{}").removesuffix(b"{}"))
            assert client.recv(65536).startswith(b"HTTP/1.1 408 ")
        assert eventually(there.ends)


def test_a_head_behind_a_request_that_is_being_answered_has_a_size() -> None:
    with proxy_cluster("a") as there:
        there.workers["a"].hold.clear()
        with there.connect() as client:
            client.sendall(of_request(json.dumps(ASKED).encode()))
            assert eventually(lambda: len(there.workers["a"].bodies) == 1)
            with suppress(ConnectionError):
                client.sendall(b"GET /health HTTP/1.1\r\n")
                for number in range(40):
                    client.sendall(b"x%d: " % number + b"x" * 8000 + b"\r\n")
                assert client.recv(1) == b""
        there.workers["a"].hold.set()
        assert eventually(there.ends)


def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "WRITE_S", 0.2)
    with proxy_cluster("a") as there:
        there.workers["a"].reply = bytes(64 << 20)
        with there.connect() as client:
            client.sendall(of_request(b"{}"))
            assert eventually(lambda: there.outcomes() == {"gone": 1})
        assert eventually(there.ends)


def test_forged_headers_and_those_of_a_connection_are_not_passed_on() -> None:
    with proxy_cluster("a", "b") as there:
        there.hold("b")
        there.workers["b"].reply_headers = {
            "x-gateway-destination-endpoint": "9.9.9.9:9", "x-kvpool-reason": "forged", "keep-alive": "timeout=9",
            "x-hop": "1", "connection": "x-hop", "x-own": "1",
        }  # fmt: skip
        forged = {
            "x-kvpool-worker": "a", "x-kvpool-matched-blocks": "9", "x-gateway-destination-endpoint": "9.9.9.9:9",
            "x-data-parallel-rank": "7", "te": "trailers", "proxy-authorization": "secret", "x-mine": "1",
            "authorization": "Bearer key", "x-hop": "1", "connection": "close, X-Hop", "upgrade": "websocket",
        }  # fmt: skip
        client = http.client.HTTPConnection("127.0.0.1", there.port, timeout=60)
        client.request("POST", "/v1/completions", json.dumps(ASKED), forged)
        with client.getresponse() as reply:
            assert (reply.status, reply.headers["x-kvpool-reason"], reply.headers["x-own"]) == (
                200,
                "prefix",
                "1",
            )
            assert not {"x-gateway-destination-endpoint", "keep-alive", "x-hop"} & {
                *map(str.lower, reply.headers)
            }
        client.close()
        seen = there.workers["b"].seen()
        passed = {
            "x-kvpool-worker": "b",
            "x-kvpool-matched-blocks": "5",
            "x-mine": "1",
            "authorization": "Bearer key",
        }
        assert {name: seen[name] for name in forged if name in seen} == passed


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models"])
def test_a_cookie_is_its_clients_own(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    # aiohttp's own jar keeps cookies of names, and none of numeric addresses unless it is told to.
    monkeypatch.setattr("aiohttp.client.CookieJar", partial(aiohttp.CookieJar, unsafe=True))
    with proxy_cluster("a") as there:
        there.workers["a"].reply_headers = {"set-cookie": "session=1; Path=/"}
        assert post(there.url, ASKED, path, cookie="mine=2").headers["set-cookie"] == "session=1; Path=/"
        assert there.workers["a"].seen()["cookie"] == "mine=2"
        post(there.url, ASKED, path)
        assert "cookie" not in there.workers["a"].seen(), "of another client"
        post(there.url, ASKED, path, cookie="other=3")
        assert there.workers["a"].seen()["cookie"] == "other=3"


def test_where_a_request_came_from_is_told() -> None:
    with proxy_cluster("a") as there:
        post(there.url, ASKED)
        seen = there.workers["a"].seen()
        assert (seen["x-forwarded-for"], seen["x-forwarded-proto"]) == ("127.0.0.1", "http")
        lines = (
            "X-Forwarded-For: 1.2.3.4", "x-forwarded-for: 5.6.7.8", "x-forwarded-proto: https",
            "connection: close, x-forwarded-proto",
        )  # fmt: skip
        there.raw(of_request(b"{}", *lines))
        seen = there.workers["a"].seen()
        assert seen["x-forwarded-for"] == "1.2.3.4, 5.6.7.8, 127.0.0.1", "who connects has the last word"
        assert seen["x-forwarded-proto"] == "http"
        there.raw(of_request(b"{}", "x-forwarded-for: 1.2.3.4", "connection: close, x-forwarded-for"))
        assert there.workers["a"].seen()["x-forwarded-for"] == "127.0.0.1"


def test_the_rank_is_told() -> None:
    with proxy_cluster("a") as there:
        fleet, worker = there.index.fleet, there.workers["a"]
        fleet.remove("default/a")
        fleet.add(worker.worker(ranks=2), "flag")
        for rank in (0, 1):
            fleet.rank("default/a", rank).heard()
        say(fleet, "default/a", 1, 0, batch(stored(BlockHasher(16).hashes(list(TEXT.encode())))))
        assert post(there.url, ASKED).headers["x-kvpool-reason"] == "prefix"
        assert worker.seen()["x-data-parallel-rank"] == "1"


def test_all_workers_busy_asleep_or_away() -> None:
    with proxy_cluster("a", "b", place={"max_waiting": 4}) as there:
        for name in there.workers:
            there.router.loads.report(f"default/{name}", Load(name, waiting=4))
        reply = post(there.url, ASKED)
        error = json.loads(reply.body)["error"]
        assert (reply.status, error["code"], error["type"]) == (429, 429, "RateLimitError")
        assert reply.headers["retry-after"] == "1"
        for name in there.workers:
            there.router.loads.scrape(f"default/{name}", Load(name), asleep=True)
        reply = post(there.url, ASKED)
        assert (reply.status, json.loads(reply.body)["error"]["message"]) == (503, "all workers sleep")
        for worker in there.workers.values():
            there.router.loads.scrape(f"default/{worker.name}", Load(worker.name), asleep=False)
            worker.stop()
        reply = post(there.url, ASKED)
        assert reply.status == 503
        said = json.loads(reply.body)["error"]["message"]
        assert re.fullmatch("worker [ab] cannot be reached: Connection refused", said)
        for name in there.workers:
            there.index.fleet.remove(f"default/{name}")
        reply = post(there.url, ASKED)
        assert (reply.status, json.loads(reply.body)["error"]["type"]) == (503, "ServiceUnavailableError")
        assert eventually(there.ends)
        assert there.outcomes() == {"refused": 4}


@pytest.mark.parametrize("method", [b"OPTIONS", b"GET", b"PUT"])
def test_only_a_post_is_placed_by_its_body(method: bytes) -> None:
    """vLLM answers OPTIONS with 200 and without a key, as browsers ask before a request to another site."""
    asked = of_request(json.dumps(ASKED).encode(), "connection: close")
    with proxy_cluster("a", "b") as there:
        there.hold("b")
        for _ in range(4):
            reply = there.raw(method + asked.removeprefix(b"POST"))
            assert reply.startswith(b"HTTP/1.1 200")
            assert b"x-kvpool-worker" in reply.lower()
            assert b"-blocks:" not in reply.lower(), "tells what others' prompts hold"
        assert there.workers["a"].bodies, "nor does the choice of a worker"
        assert b"x-kvpool-matched-blocks: 5" in there.raw(asked).lower()


def test_what_is_wrong_with_a_request_is_for_a_worker_to_say() -> None:
    with proxy_cluster("a") as there:
        there.workers["a"].status = 400
        for number, (body, reason) in enumerate(
            (
                (b"no json", "unreadable"),
                (b"", "unreadable"),
                (b"[1, 2]", "unreadable"),
                (b"\xff\xfe", "unreadable"),
                (b'{"model": "m", "prompt": 7}', "unreadable"),
                (b'{"model": 7}', "unreadable"),
                (b'{"model": "m", "prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "unreadable"),
                (b'{"model": "other", "prompt": "x"}', "unknown-model"),
                (b'{"prompt": "x"}', "load"),  # for the only model
            ),
            1,
        ):
            reply = post(there.url, body)
            assert (reply.status, there.workers["a"].seen()["x-kvpool-reason"]) == (400, reason), body
            assert not [name for name in reply.headers if name.startswith("x-kvpool")], (
                "a caller whom the worker refuses learns of what others' prompts hold"
            )
            assert (there.workers["a"].bodies[-1], len(there.workers["a"].bodies)) == (body, number)
        assert get(f"{there.url}/v1/models").status == 400
        assert eventually(there.ends)


def test_health_waits_until_the_fleet_is_known() -> None:
    warm = threading.Event()
    with proxy_cluster("a", is_warm=warm.is_set) as there:
        reply = get(f"{there.url}/health")
        assert (reply.status, json.loads(reply.body)["error"]["code"]) == (503, 503)
        assert post(there.url, ASKED).status == 200, "what is known serves"
        there.index.fleet.remove("default/a")
        assert post(there.url, ASKED).status == 503
        warm.set()
        assert eventually(lambda: get(f"{there.url}/health").status == 200)


def test_tls_on_both_sides(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("server", names=("127.0.0.1", "localhost"))

    def tls() -> ServerTls:
        return ServerTls(str(pair.cert), str(pair.key))

    worker = ScriptedWorker("a", tls=tls().context)
    worker.start()
    try:
        trusted = trusting("--worker-ca", str(authority.ca))
        untrusted = "worker a cannot be reached: TLS: unable to get local issuer certificate"
        for worker_tls, status, words in ((trusted, 200, ""), (None, 503, untrusted)):
            with proxy_cluster(workers=[worker], proxy={"worker_tls": worker_tls}, tls=tls()) as there:
                there.index.fleet.add(worker.worker(address=f"https://localhost:{worker.port}"), "flag")
                there.index.fleet.rank("default/a", 0).heard()
                client = http.client.HTTPSConnection(
                    "localhost",
                    there.port,
                    timeout=60,
                    context=ssl.create_default_context(cafile=authority.ca),
                )
                client.request("POST", "/v1/completions", json.dumps(ASKED))
                with client.getresponse() as reply:
                    assert reply.status == status
                    assert words in reply.read().decode()
                client.close()
        assert worker.seen()["host"] == f"localhost:{worker.port}"
        assert worker.seen()["x-forwarded-proto"] == "https"
    finally:
        worker.stop()


def test_metrics() -> None:
    with proxy_cluster("a", "b") as there:
        there.workers["a"].stop()
        there.hold("a")
        assert post(there.url, ASKED).worker == "b"
        there.index.fleet.remove("default/a")
        there.index.fleet.remove("default/b")
        assert post(there.url, ASKED).status == 503
        exporter = Exporter(there.index.fleet, RequestStats(), proxy=there.index.proxy_stats)
        with (
            showing(exporter) as port,
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page,
        ):
            figures = dict(
                line.rsplit(" ", 1) for line in page.read().decode().splitlines() if line[0] != "#"
            )
        assert figures["kvpool_router_requests"] == "0.0"
        assert figures['kvpool_router_responses_total{outcome="2xx"}'] == "1.0"
        assert figures['kvpool_router_responses_total{outcome="refused"}'] == "1.0"
        assert figures['kvpool_router_retries_total{reason="unreachable"}'] == "1.0"
        assert figures["kvpool_router_first_byte_seconds_count"] == "1.0"


def test_what_is_no_request_is_refused_in_the_same_form() -> None:
    smuggled = b"0\r\n\r\nGET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
    with proxy_cluster("a") as there:
        for sent in (
            b"what?\r\n\r\n",
            of_request(smuggled, "transfer-encoding: chunked"),
            of_request(b"", "transfer-encoding : chunked"),
            of_request(b"x", "content-length: 2"),
            of_request(b"", "transfer-encoding: chunked, identity"),
            b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: +3\r\n\r\nabc",
            b"POST / HTTP/1.1\r\nhost: x\r\nx-long: " + b"x" * (17 << 10) + b"\r\n\r\n",
        ):
            received = there.raw(sent)
            head, _, body = received.partition(b"\r\n\r\n")
            assert re.match(rb"HTTP/1.[01] 400 ", head), received
            assert received.count(b"HTTP/1.") == 1
            assert json.loads(body)["error"]["message"].startswith("the request cannot be read: ")
        for line in (b"CONNECT 127.0.0.1:1 HTTP/1.1", b"OPTIONS * HTTP/1.1"):
            with there.connect() as client:
                client.sendall(line + b"\r\nhost: x\r\n\r\n")
                assert client.recv(65536).startswith(b"HTTP/1.1 400 ")
        assert there.workers["a"].bodies == []
        absolute = b"GET http://9.9.9.9:9/v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        assert b'"path": "/v1/models"' in there.raw(absolute), "where it goes is not for the client to say"


def test_one_host_has_no_more_than_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REQUESTS", limits.REQUESTS._replace(of_host=2))
    with proxy_cluster("a") as there, ThreadPoolExecutor(2) as callers:
        there.workers["a"].hold.clear()
        asked = [callers.submit(post, there.url, ASKED) for _ in range(2)]
        assert eventually(lambda: len(there.workers["a"].bodies) == 2)
        reply = post(there.url, ASKED)
        assert (reply.status, json.loads(reply.body)["error"]["type"]) == (429, "RateLimitError")
        assert get(f"{there.url}/health").status == 200
        there.workers["a"].hold.set()
        assert {one.result().status for one in asked} == {200}
        assert post(there.url, ASKED).status == 200


def test_bodies_of_one_host_leave_room_for_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with proxy_cluster("a") as there, there.connect() as slow:
        buffers = there.index.fleet.limits
        monkeypatch.setattr(
            buffers, "limit_nbytes", 160_000
        )  # half of it for bodies, and three quarters of that
        slow.sendall(of_request(b"x" * 60_000)[:-1])  # all that a host may have
        assert eventually(lambda: buffers.used_nbytes >= 59_000)
        assert post(there.url, b"x" * 2_000).status == 503
        client = http.client.HTTPConnection("127.0.0.1", there.port, 30, source_address=("127.0.0.2", 0))
        client.request("POST", "/v1/completions", json.dumps(ASKED))
        assert client.getresponse().status == 200
        client.close()
    assert eventually(there.ends)
