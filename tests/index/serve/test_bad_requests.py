"""Bad input through both fronts of a fleet, the real router and the real picker behind a real Envoy: an answer in the
form of OpenAI's API, or the end of the connection; never a hang, and never something of it at a worker."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvpool.errors import ConfigError
from kvpool.index.cost.ejections import FAILURES
from kvpool.index.fleet.fleet import Fleet
from tests.support import envoy
from tests.support.deadlines import eventually, raises
from tests.support.fleets import serving
from tests.support.fronts import ASKED, EnvoyCluster, ProxyCluster, beside, envoy_cluster, proxy_cluster
from tests.support.http_client import TEXT, all_of, get, post, request_of
from tests.support.openai_worker import BadWorker, ScriptedWorker, scripted

pytestmark = pytest.mark.usefixtures("grpc_started")

Front = EnvoyCluster | ProxyCluster
BODY = json.dumps(ASKED).encode()
LENGTH = f"content-length: {len(BODY)}"
NAMES = ("a", "b")


@pytest.fixture(params=["router", "envoy"])
def front(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Front]:
    if request.param == "router":
        with proxy_cluster(*NAMES) as there:
            yield there
    else:
        with envoy_cluster(tmp_path, names=NAMES) as there:
            yield there


def sent(line: str = "POST /v1/completions HTTP/1.1", *headers: str, body: bytes = b"") -> bytes:
    lines = [line, "host: x", "connection: close", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def answered(there: Front, request: bytes) -> tuple[int, bytes]:
    """The status and the body of the last response; status 0: the connection has ended without one."""
    port = int(there.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        try:
            client.sendall(request)
            received = all_of(client)
        except ConnectionError:
            return 0, b""
    status, body = 0, b""
    for found in re.finditer(rb"HTTP/1\.[01] (\d\d\d)[^\r]*\r\n(?:[^\r]+\r\n)*\r\n", received):
        status, body = int(found[1]), received[found.end() :]
    return status, body


def taken(there: Front) -> int:
    """Requests that have come to a worker."""
    return sum(len(worker.bodies) for worker in there.workers.values())


def in_form(body: bytes, status: int) -> str:
    """The message of an error in the form of OpenAI's API."""
    error = json.loads(body)["error"]
    assert error["code"] == status
    assert error["type"]
    return str(error["message"])


NO_REQUESTS = {
    "two lengths": sent("POST / HTTP/1.1", LENGTH, LENGTH, body=BODY),
    "different lengths": sent("POST / HTTP/1.1", LENGTH, "content-length: 3", body=BODY),
    "a list of lengths": sent("POST / HTTP/1.1", f"{LENGTH}, {len(BODY)}", body=BODY),
    "a negative length": sent("POST / HTTP/1.1", "content-length: -1"),
    "a huge length": sent("POST / HTTP/1.1", f"content-length: {10**30}", body=BODY),
    "a length and chunks": sent("POST / HTTP/1.1", LENGTH, "transfer-encoding: chunked", body=b"0\r\n\r\n"),
    "a huge chunk": sent("POST / HTTP/1.1", "transfer-encoding: chunked", body=b"f" * 20 + b"\r\n"),
    "a negative chunk": sent("POST / HTTP/1.1", "transfer-encoding: chunked", body=b"-1\r\n"),
    "no host": sent().replace(b"host: x\r\n", b""),
    "10,000 headers": sent("POST / HTTP/1.1", LENGTH, *(f"x-{n}: {n}" for n in range(10_000)), body=BODY),
    "a long header": sent("POST / HTTP/1.1", LENGTH, "x-a: " + "a" * 70_000, body=BODY),
    "NUL in a header": sent("POST / HTTP/1.1", LENGTH, "x-a: b\0c", body=BODY),
    "a space in a header's name": sent("POST / HTTP/1.1", LENGTH, "x a: b", body=BODY),
    "no method": sent("BREW / HTTP/1.1", LENGTH, body=BODY),
    "no path": sent("POST v1/completions HTTP/1.1", LENGTH, body=BODY),
    "bytes in a path": sent("POST /v1/\xe9 HTTP/1.1", LENGTH, body=BODY),
    "CONNECT": sent("CONNECT 127.0.0.1:1 HTTP/1.1"),
    "TLS": b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + bytes(160),
}  # fmt: skip


def test_what_is_no_request_comes_to_no_worker(front: Front) -> None:
    for name, request in NO_REQUESTS.items():
        status, body = answered(front, request)
        assert status in (0, 400, 403, 405, 431), name
        if body:
            assert in_form(body, status), name
        assert taken(front) == 0, name
    assert answered(front, sent("POST / HTTP/1.1", LENGTH, body=BODY))[0] == 200


REQUESTS = {
    "HTTP/1.0": sent("POST /v1/completions HTTP/1.0", LENGTH, body=BODY),
    "chunks": sent(
        "POST / HTTP/1.1", "transfer-encoding: chunked", body=b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    ),
    "trailers": sent(
        "POST / HTTP/1.1", "transfer-encoding: chunked", "trailer: x-kvpool-worker",
        body=b"%x\r\n%s\r\n0\r\nx-kvpool-worker: forged\r\n\r\n" % (len(BODY), BODY),
    ),
    "Expect": sent("POST / HTTP/1.1", LENGTH, "expect: 100-continue", body=BODY),
    "80 headers": sent("POST / HTTP/1.1", LENGTH, *(f"x-{n}: {n}" for n in range(80)), body=BODY),
    "bytes in a header": sent("POST / HTTP/1.1", LENGTH, "x-a: \xff\xfe", body=BODY),
    "an underscore in a name": sent("POST / HTTP/1.1", LENGTH, "x_kvpool_worker: forged", body=BODY),
}  # fmt: skip


def test_a_request_has_so_many_headers(front: Front) -> None:
    """At Envoy a hundred, with those that it and the picker add."""
    router, of_envoy = ((110, 200), (129, 400)), ((88, 200), (96, 500), (101, 0))
    for count, status in router if isinstance(front, ProxyCluster) else of_envoy:
        more = (f"x-{number}: 1" for number in range(count - 3))
        assert answered(front, sent("POST / HTTP/1.1", LENGTH, *more, body=BODY))[0] == status, count


def test_what_is_an_odd_request_is_served(front: Front) -> None:
    for number, (name, request) in enumerate(REQUESTS.items(), 1):
        status, body = answered(front, request)
        assert status == 200, name
        assert hashlib.sha256(BODY).hexdigest().encode() in body, name
        assert taken(front) == number, name
    large = json.dumps({"model": "m", "prompt": "x" * (10 << 20)}).encode()
    assert json.loads(post(front.url, large).body)["sha256"] == hashlib.sha256(large).hexdigest()


@pytest.mark.parametrize("field", [b'"a\xff": 1', b'"a": "\xff"'], ids=["name", "text"])
def test_a_chat_that_is_no_text_is_its_workers_to_judge(front: Front, field: bytes) -> None:
    chat = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], ' + field + b"}"
    reply = post(front.url, chat, path="/v1/chat/completions")
    assert (reply.status, reply.headers["x-kvpool-reason"]) == (200, "unreadable")
    assert json.loads(reply.body)["sha256"] == hashlib.sha256(chat).hexdigest()


def test_an_upgrade_is_answered_and_not_made(front: Front) -> None:
    for protocol in ("websocket", "h2c"):
        upgrade = (
            f"upgrade: {protocol}", "connection: upgrade, http2-settings", "http2-settings: AAMAAABkAARAAAAAAAIAAAAA",
            "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==", "sec-websocket-version: 13",
        )  # fmt: skip
        status, body = answered(front, sent("GET /v1/realtime HTTP/1.1", *upgrade))
        assert status in (200, 403)
        assert status == 200 or in_form(body, status)
        assert all(
            "upgrade" not in map(str.lower, w.headers[-1]) for w in front.workers.values() if w.headers
        )


def test_a_models_name_forges_no_header(front: Front) -> None:
    for model in ("m\r\nx-forged: 1", "m\0", "\u00e9\u4e2d", "a" * 5000, "../.."):
        reply = post(front.url, {"model": model, "prompt": "x"})
        assert (reply.status, reply.headers["x-kvpool-worker"] in NAMES) == (200, True)
        assert reply.headers["x-kvpool-reason"] in ("unknown-model", "unreadable")
        seen = front.workers[reply.worker].seen()
        assert "x-forged" not in {*reply.headers, *seen}


def test_a_prompt_that_is_too_long_gets_the_workers_answer(front: Front) -> None:
    said = b'{"error":{"message":"at most 4096 tokens","type":"BadRequestError","param":null,"code":400}}'
    for worker in front.workers.values():
        worker.status, worker.reply, worker.render_status = 400, said, 400
    for prompt in (TEXT * 1000, list(range(600_000))):
        reply = post(front.url, {"model": "m", "prompt": prompt})
        assert (reply.status, reply.body) == (400, said)


def test_all_workers_away(front: Front) -> None:
    for worker in front.workers.values():
        worker.stop()
    reply = post(front.url, ASKED)
    assert reply.status == 503
    assert in_form(reply.body, 503)
    for name in NAMES:
        front.index.fleet.remove(f"default/{name}")
    reply = post(front.url, ASKED)
    said = in_form(reply.body, reply.status)
    assert said == "the index knows no worker: its log says which it refused or lost"
    assert reply.headers["retry-after"] == "1"


PATHS = (
    "/inference/v1/abort", "//inference/v1/abort", "/v1/../inference/v1/abort", "/%69nference/v1/abort",
    "/inference%2Fv1/abort", "/inference%2fv1%2fabort", "/.//inference/v1/abort", "/%2e%2e/inference/v1/abort",
    "/%2Finference/v1/abort", "/v1/%2e%2e%2finference/v1/abort", "/inference%5Cv1/abort",
)  # fmt: skip


def test_what_is_between_engines_cannot_be_reached_by_another_spelling(tmp_path: Path) -> None:
    with envoy_cluster(tmp_path, names=NAMES) as there:
        for path in PATHS:
            status, body = answered(there, sent(f"POST {path} HTTP/1.1", LENGTH, body=BODY))
            assert (status, taken(there)) == (404, 0), path
            assert in_form(body, 404)
        for path, read in (("//v1/../v1//completions", "/v1/completions"), ("/v1/a%2Fb?x=%2F", "/v1/a/b")):
            status, body = answered(there, sent(f"POST {path} HTTP/1.1", LENGTH, body=BODY))
            assert (status, json.loads(body)["path"]) == (200, read)


def test_the_router_passes_paths_as_they_are() -> None:
    with proxy_cluster(*NAMES) as there:
        for path in ("//v1/completions", "/v1/../x", "/..", "/%2e%2e/x", "/v1/completions%00", "/v1/x;y"):
            status, body = answered(there, sent(f"POST {path} HTTP/1.1", LENGTH, body=BODY))
            assert status == 200
            assert json.loads(body)["path"] == path.replace("%2e", ".").replace("%00", "\0")


def test_what_envoy_itself_answers_has_the_form_of_openais_api(tmp_path: Path) -> None:
    text = envoy.CONFIG.read_text()
    assert text.count("request_timeout: 30s") == 1
    text = text.replace("request_timeout: 30s", "request_timeout: 1s")
    with scripted("a") as workers, serving(Fleet(), place={"timeout_s": 60}) as index:
        index.fleet.add(workers[0].worker(), "flag")
        with envoy.running(tmp_path, [workers[0].at], [index.ext_proc], text=text) as front:
            assert eventually(lambda: front.healthy("workers") == 1 and front.healthy("picker") == 1)
            there = EnvoyCluster(workers, index, front)
            status, body = answered(there, sent("POST / HTTP/1.1", LENGTH, body=BODY[:9]))
            assert (status, in_form(body, 408)[:16]) == (408, "Envoy answers: r"), "the rest does not come"
            status, body = answered(
                there, sent("POST / HTTP/1.1", f"content-length: {17 << 20}", body=bytes(17 << 20))
            )
            assert status in (0, 413), "0: it does not wait for all of it"
            assert status == 0 or in_form(body, 413)
            assert workers[0].bodies == []
            workers[0].hold.clear()
            timer = threading.Timer(2.0, workers[0].hold.set)
            timer.start()
            assert post(front.url, ASKED).status == 200, "a worker may take longer than a body"
            timer.join()
            index.stop()
            workers[0].stop()
            reply = get(f"{front.url}/v1/models")
            assert reply.status == 503
            assert in_form(reply.body, 503).startswith("Envoy answers: ")


def test_envoy_has_so_many_clients(tmp_path: Path) -> None:
    text = envoy.CONFIG.read_text()
    assert text.count("connections: 8192") == 1
    text = text.replace("connections: 8192", "connections: 2")
    with (
        scripted("a") as workers,
        envoy.running(tmp_path, [workers[0].at], ["127.0.0.1:1"], text=text) as front,
    ):
        assert eventually(lambda: front.healthy("workers") == 1)
        at = ("127.0.0.1", int(front.url.rpartition(":")[2]))
        with socket.create_connection(at, timeout=60) as one, socket.create_connection(at, timeout=60) as two:
            for client in (one, two):
                client.sendall(sent("GET /v1/models HTTP/1.1").replace(b"connection: close\r\n", b""))
                assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
            with socket.create_connection(at, timeout=60) as third, suppress(ConnectionError):
                assert third.recv(1) == b""
        assert eventually(lambda: not raises(OSError, lambda: get(f"{front.url}/v1/models"))), (
            "once others have gone"
        )
        assert front.healthy("workers") == 1, "its administration is not counted"


def test_a_workers_name_forges_no_header(front: Front) -> None:
    fleet, worker = front.index.fleet, front.workers["a"]
    for name in NAMES:
        fleet.remove(f"default/{name}")
    for name in ("a\r\nx-forged: 1", "a\nb", "a\0", "a\x85"):
        with pytest.raises(ConfigError, match="cannot be printed"):
            fleet.add(ScriptedWorker(name, worker.port).worker(), "flag")
    for name in ("b\u00f6d", 'a b, c; d="e"', "a%0d%0ax-forged: 1"):
        fleet.add(ScriptedWorker(name, worker.port).worker(), "flag")
        fleet.rank(f"default/{name}", 0).heard()
        reply = post(front.url, ASKED)
        assert (reply.status, "x-forged" in reply.headers) == (200, False)
        assert reply.headers["x-kvpool-worker"].encode("latin-1").decode() == name
        fleet.remove(f"default/{name}")


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade", "HTTP status 101"),
        (b"999 X\r\ncontent-length: 2", "HTTP status 999"),
        (b"099 X\r\ncontent-length: 2", "HTTP status 99"),
        (b"200 OK\r\ncontent-length: 2\r\ncontent-length: 3", "is no HTTP: Duplicate Content-Length"),
        (b"200 OK\r\n" + b"x-a: b\r\n" * 500 + b"content-length: 2", "is no HTTP: Too many headers"),
        (b"200 OK\r\nx-a: " + b"a" * 100_000, "is no HTTP: Got more than "),
        (b"200 O\x01K\r\ncontent-length: 2", "is no HTTP: its head holds control characters"),
        (b"200 O\x00K\r\ncontent-length: 2", "is no HTTP: its head holds control characters"),
        (b"200 OK\r\nx-a: a\x1bb\r\ncontent-length: 2", "is no HTTP: its head holds control characters"),
        (
            b"200 OK\r\nx-a: a\x7fb\r\nx-b: \xe9\r\ncontent-length: 2",
            "is no HTTP: its head holds control characters",
        ),
    ],
    ids=["101", "999", "99", "lengths", "headers", "header", "reason", "NUL", "ESC", "DEL"],
)
def test_a_workers_answer_that_is_none(head: bytes, message: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    def talk(client: socket.socket) -> None:
        if request_of(client):
            client.sendall(b"HTTP/1.1 " + head + b"\r\n\r\n{}")

    with beside(BadWorker("b\u00f6d", talk), "a") as there:
        reply = post(there.url, ASKED)
        assert reply.status == 502
        said = in_form(reply.body, 502)
        assert message in said
        assert "b\u00f6d" in said
        assert "\n" not in said
        assert "http://" not in said, "where workers are is not for callers to know"
        assert eventually(there.ends)
        assert there.outcomes() == {"refused": 1}
        lines = [one.getMessage() for one in caplog.records if "is no HTTP" in one.getMessage()]
        assert len(lines) == ("is no HTTP" in message)
        assert not any(one.exc_info for one in caplog.records)


ODD = b"caf\xe9 \xff\x80 \xc3\xa9 \xed\xa0\x80"  # Latin-1, no text, UTF-8, half of a pair


def test_bytes_of_headers_pass_both_ways() -> None:
    seen: list[bytes] = []

    def talk(client: socket.socket) -> None:
        while request := request_of(client):
            seen.append(request)
            client.sendall(b"HTTP/1.1 200 OK \xe9\r\nx-b: " + ODD + b"\r\ncontent-length: 2\r\n\r\n{}")

    with beside(BadWorker("bad", talk), "a") as there:
        asked = sent("POST /v1/completions HTTP/1.1", LENGTH, "x-a: ODD", body=BODY).replace(b"ODD", ODD)
        answer = there.raw(asked)
        assert answer.startswith(b"HTTP/1.1 200 OK \xe9\r\n")
        assert b"\r\nx-b: " + ODD + b"\r\n" in answer
        assert b"\r\nx-a: " + ODD + b"\r\n" in seen[0]
        assert there.outcomes() == {"2xx": 1}


@pytest.mark.parametrize("header", ["x-a: b\x01c", "x-a: \x7f", "x-a: \x1b[31m", "x-a: \xe9\x01"])
def test_a_header_that_cannot_be_sent_is_its_callers_fault(front: Front, header: str) -> None:
    for _ in range(2 * FAILURES):
        status, body = answered(front, sent("POST /v1/completions HTTP/1.1", LENGTH, header, body=BODY))
        assert status == (0 if isinstance(front, EnvoyCluster) else 400)
        assert not status or in_form(body, 400)
    assert taken(front) == 0
    assert len(front.index._options["router"]._ejections._failing) == 0
