"""RFC 1403 over HTTP: a client written from its definition, real publishers, and requests that misbehave.

Over 400 lines because all calls over HTTP share its fixtures.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpool import BlockHasher, ConfigError
from kvpool.index.client.tls import ServerTls
from kvpool.index.fleet import Fleet
from kvpool.index.follow.roster import Roster
from kvpool.index.follow.subscriber import Subscriber
from kvpool.index.serve import http as http_module
from kvpool.index.serve import http_listener as listener_module
from kvpool.index.serve import limiter, rfc1403
from kvpool.index.serve.auth import TokenAuth
from kvpool.index.serve.http import HttpServer
from kvpool.index.serve.request_stats import RequestStats
from tests.conftest import eventually
from tests.index.fleets import Served, a_worker, say, serving
from tests.index.publisher import Misbehaving, misbehaving
from tests.index.tokens import write_tokens
from tests.index.wire import batch, removed, stored
from tests.store.certificates import Authority

pytestmark = pytest.mark.usefixtures("grpc_started")

WAIT_S = 30
TOKENS = list(range(1000, 1160))  # ten blocks of 16
HASHES = [int.from_bytes(digest[-8:], "big") for digest in BlockHasher(16).hashes(TOKENS)]


class Rfc1403Client:
    """As a gateway would write one from "Mooncake Conductor Indexer API" (RFC 1403), and nothing else."""

    def __init__(self, address: str, token: str = "", trust: ssl.SSLContext | None = None) -> None:
        host, port = address.split(":")
        self.headers = {"Content-Type": "application/json"}
        if token:
            self.headers["Authorization"] = f"Bearer {token}"
        self.connection = (
            http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
            if trust is None
            else http.client.HTTPSConnection(host, int(port), timeout=WAIT_S, context=trust)
        )

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        self.connection.request(method, path, raw, self.headers)
        reply = self.connection.getresponse()
        text = reply.read()
        assert reply.headers["content-type"] == "application/json"
        return reply.status, json.loads(text)

    def register(self, instance_id: str, publisher: Misbehaving, dp_rank: int, model: str = "m") -> Any:
        body = {
            "endpoint": publisher.publisher.events, "replay_endpoint": publisher.publisher.replay, "type": "vLLM",
            "modelname": model, "tenant_id": "default", "instance_id": instance_id, "block_size": 16,
            "dp_rank": dp_rank,
        }  # fmt: skip
        status, reply = self.call("POST", "/register", body)
        assert status == 200, reply
        return reply

    def unregister(self, instance_id: str, dp_rank: int) -> tuple[int, Any]:
        body = {
            "type": "vLLM", "modelname": "m", "tenant_id": "default", "instance_id": instance_id, "block_size": 16,
            "dp_rank": dp_rank,
        }  # fmt: skip
        return self.call("POST", "/unregister", body)

    def query(self, **fields: Any) -> Any:
        return self._asked("/query", {"model": "m", "token_ids": TOKENS, "block_size": 16, **fields})

    def query_by_hash(self, **fields: Any) -> Any:
        return self._asked("/query_by_hash", {"model": "m", "seq_hashes": HASHES, "block_size": 16, **fields})

    def _asked(self, path: str, body: dict[str, Any]) -> Any:
        status, reply = self.call("POST", path, body)
        assert status == 200, reply
        return reply[body.get("tenant_id", "default")]


@contextmanager
def asking(address: str, token: str = "", trust: ssl.SSLContext | None = None) -> Iterator[Rfc1403Client]:
    client = Rfc1403Client(address, token, trust)
    try:
        yield client
    finally:
        client.connection.close()


@pytest.fixture
def served() -> Iterator[Served]:
    fleet = Fleet()
    fleet.add(a_worker("a"), "flag")
    say(fleet, "default/a", 0, 0, batch(stored(HASHES[:4])))
    with serving(fleet, http=True) as running:
        yield running


# ---- answers


def test_a_client_gets_right_answers_of_real_publishers() -> None:
    fleet = Fleet()
    with (
        misbehaving() as first, misbehaving() as second, misbehaving() as other,
        serving(fleet, feed=Subscriber(fleet), http=True) as served, asking(served.http) as client,
    ):  # fmt: skip
        try:
            assert client.call("GET", "/health") == (200, {"status": "ok"})
            first.publish(batch(stored(HASHES[:4]), stored(HASHES[:7], medium="CPU")))
            second.publish(batch(stored(HASHES[:6]), stored(HASHES[:2], medium="DISK")))
            other.publish(batch(stored(HASHES[:9])))
            assert client.register("x", first, 0) == {
                "status": "registered successfully", "instance_id": "x",
            }  # fmt: skip
            client.register("x", second, 1)
            client.register("y", other, 0)

            x = {
                "longest_matched": 112, "GPU": 96, "DP": {"0": 64, "1": 96}, "CPU": 112, "DISK": 32, "POOL": 0,
            }  # fmt: skip
            y = {"longest_matched": 144, "GPU": 144, "DP": {"0": 144}, "CPU": 0, "DISK": 0, "POOL": 0}
            assert eventually(lambda: client.query() == {"x": x, "y": y}), client.query()
            assert client.query_by_hash() == {"x": x, "y": y}
            assert client.query(instance_id="x") == {"x": x}
            assert client.query(instance_id="nobody") == {}
            salted = client.query(cache_salt="s")
            assert {name: one["longest_matched"] for name, one in salted.items()} == {"x": 0, "y": 0}

            other.publish(batch(removed([HASHES[2]])))
            assert eventually(lambda: client.query()["y"]["GPU"] == 32)
            assert client.query()["x"] == x

            removal = {"status": "unregistered successfully", "removed_instances": ["x|default|1"]}
            assert client.unregister("x", 1) == (200, removal)
            one = {"longest_matched": 112, "GPU": 64, "DP": {"0": 64}, "CPU": 112, "DISK": 0, "POOL": 0}
            assert eventually(lambda: client.query()["x"] == one), client.query()
            assert client.unregister("x", 1)[0] == 404
            assert client.unregister("x", 0)[0] == 200
            assert list(client.query()) == ["y"]
        finally:
            served.roster.close()


def test_the_pool_stands_for_itself() -> None:
    fleet = Fleet()
    fleet.add(a_worker("a", namespace="a" * 32), "flag")
    fleet.add(a_worker("b", namespace="a" * 32), "flag")
    say(fleet, "default/a", 0, 0, batch(stored(HASHES[:2]), stored(HASHES[:5], medium="STORAGE")))
    with serving(fleet, http=True) as served, asking(served.http) as client:
        answer = client.query()
        assert answer["a"] == {
            "longest_matched": 80, "GPU": 32, "DP": {"0": 32}, "CPU": 0, "DISK": 0, "POOL": 80,
        }  # fmt: skip
        # b has not been heard from: it is not credited, but the pool is not its own.
        assert answer["b"] == {
            "longest_matched": 80, "GPU": 0, "DP": {"0": 0}, "CPU": 0, "DISK": 0, "POOL": 80,
        }  # fmt: skip


def test_the_pool_goes_on_where_the_device_ends() -> None:
    fleet = Fleet()
    fleet.add(a_worker("a", namespace="a" * 32), "flag")
    device, pool = stored(HASHES[:2]), stored(HASHES[2:7], medium="STORAGE")
    say(fleet, "default/a", 0, 0, batch(device, pool))
    with serving(fleet, http=True) as served, asking(served.http) as client:
        both = client.call("POST", "/query", {"model": "m", "token_ids": TOKENS})[1]
        assert both["default"]["a"] == {
            "longest_matched": 112, "GPU": 32, "DP": {"0": 32}, "CPU": 0, "DISK": 0, "POOL": 0,
        }  # fmt: skip
        tiers = {"gpu": 32, "cpu": 32, "disk": 112}
        assert both["instances"]["a"] == {
            "longest_matched": 112, "dp": {"0": 32}, **tiers, "rank_matches": {"0": tiers},
        }  # fmt: skip
        served.fleet.mark("default/a", 0, stale=True, problem="batches are missing")
        assert client.query()["a"]["longest_matched"] == 0, "the pool alone begins too late"


def test_a_stale_rank_is_not_credited(served: Served) -> None:
    with asking(served.http) as client:
        assert client.query()["a"]["GPU"] == 64
        served.fleet.mark("default/a", 0, stale=True, problem="batches are missing")
        assert client.query()["a"]["longest_matched"] == 0
        served.fleet.mark("default/a", 0, stale=False)
        assert client.query()["a"]["GPU"] == 64


def test_tenants_are_apart() -> None:
    fleet = Fleet()
    fleet.add(a_worker("a", tenant="t"), "flag")
    say(fleet, "t/a", 0, 0, batch(stored(HASHES)))
    with serving(fleet, http=True) as served, asking(served.http) as client:
        assert client.query(tenant_id="t")["a"]["GPU"] == 160
        status, reply = client.call("POST", "/query", {"model": "m", "token_ids": TOKENS})
        assert (status, reply) == (
            404,
            {
                "error": 'unknown model "m": this index follows no worker of tenant "default"; kvpool top shows whom '
                "it follows, kvpool doctor why not others"
            },
        )


def test_tokens_are_asked_for_here_too(tmp_path: Path) -> None:
    tokens = write_tokens(
        tmp_path / "tokens.toml",
        router=(["read"], ["t"]), worker=(["publish"], ["t"]), chief=(["admin"], ["*"]),
    )  # fmt: skip
    fleet = Fleet()
    fleet.add(a_worker("a", tenant="t"), "flag")
    asked = {"model": "m", "token_ids": TOKENS, "tenant_id": "t"}
    named = {
        "tenant_id": "t",
        "instance_id": "b",
        "type": "vLLM",
        "modelname": "m",
        "block_size": 16,
        "dp_rank": 0,
    }
    endpoint = {"endpoint": "tcp://127.0.0.1:1", "replay_endpoint": "tcp://127.0.0.1:2"}
    with serving(fleet, http=True, auth=TokenAuth(str(tmp_path / "tokens.toml"))) as served:

        def status(holder: str, method: str, path: str, body: Any = None) -> int:
            with asking(served.http, tokens.get(holder, holder)) as client:
                return client.call(method, path, body)[0]

        assert status("", "GET", "/health") == 200
        assert status("", "POST", "/query", asked) == 401
        assert status("wrong", "POST", "/query", asked) == 401
        assert status("router", "POST", "/query", asked) == 200
        assert status("worker", "POST", "/query", asked) == 403
        for tenant in ("other", "default"):  # whether there are workers of it or not
            assert status("router", "POST", "/query", {**asked, "tenant_id": tenant}) == 403
        assert status("router", "POST", "/register", named | endpoint) == 403
        assert status("worker", "POST", "/register", named | endpoint) == 200
        assert status("worker", "POST", "/unregister", named) == 403
        assert status("chief", "POST", "/unregister", named) == 200


def test_tls_is_spoken_here_too(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server, client = authority.issue("server", names=("127.0.0.1",)), authority.issue("client")
    trust = ssl.create_default_context(cafile=str(authority.ca))
    tls = ServerTls(str(server.cert), str(server.key), str(authority.ca))
    fleet = Fleet()
    with serving(fleet, http=True, tls=tls) as served:
        with asking(served.http, trust=trust) as stranger, pytest.raises(OSError):
            stranger.call("GET", "/health")
        trust.load_cert_chain(str(client.cert), str(client.key))
        with asking(served.http, trust=trust) as known:
            assert known.call("GET", "/health") == (200, {"status": "ok"})
        with asking(served.http) as plain, pytest.raises((OSError, http.client.HTTPException)):
            plain.call("GET", "/health")


def test_a_request_is_answered_in_its_own_spelling(served: Served) -> None:
    with asking(served.http) as client:
        signed = [number - (1 << 64) if number >> 63 else number for number in HASHES]
        for path, prompt in (("/query", {"token_ids": TOKENS}), ("/query_by_hash", {"block_hashes": signed})):
            status, reply = client.call("POST", path, {"model_name": "m", **prompt})
            assert status == 200
            assert reply["scores"] == {"a": {"0": 64}}
            assert reply["instances"]["a"]["gpu"] == reply["instances"]["a"]["longest_matched"] == 64


def test_what_is_asked_is_counted() -> None:
    fleet, stats = Fleet(), RequestStats()
    fleet.add(a_worker("a"), "flag")
    say(fleet, "default/a", 0, 0, batch(stored(HASHES[:5])))
    with serving(fleet, stats=stats, http=True) as served, asking(served.http) as client:
        client.query()
        client.query_by_hash()
        client.call("POST", "/query", {"model": "unknown", "token_ids": [1]})
        client.call("POST", "/query", b"{")
        client.call("GET", "/query")
    totals = stats.totals()
    assert totals.results == {"answered": 2, "wrong": 1, "unknown": 1, "failed": 0}
    assert totals.matched == (20, 10, 10, 0)
    assert totals.refused == {"NOT_FOUND": 1, "INVALID_ARGUMENT": 1, "UNIMPLEMENTED": 1}


# ---- what is refused


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("POST", "/query", b"{", 400, "the request is not JSON"),
        ("POST", "/query", {"model": "m", "token_ids": [-1]}, 400, "token_ids are whole numbers"),
        ("POST", "/query", {"model": "m", "token_ids": [1], "tenant_id": "a/b"}, 400, "tenant"),
        ("POST", "/query", {"model": "x", "token_ids": [1]}, 404, 'unknown model "x"; known are m'),
        ("POST", "/query", {"model": "m", "token_ids": [1], "block_size": 32}, 404, "known are 16"),
        ("POST", "/query_by_hash", {"model": "m"}, 400, "give the hashes"),
        ("POST", "/register", {"model": "m"}, 400, "block_size is missing"),
        ("POST", "/register", {"model": "m", "block_size": 16, "instance_id": "w", "endpoint": "tcp://*:1"}, 400,
         "is where the worker listens"),
        ("POST", "/register", {"model": "m", "block_size": 16, "instance_id": "a\nb", "endpoint": "tcp://h:1"}, 400,
         "name"),
        ("POST", "/unregister", {"instance_id": "nobody"}, 404, 'unknown instance "nobody"'),
        ("GET", "/query", None, 405, "GET /query: Method Not Allowed; use POST"),
        ("POST", "/health", b"", 405, "Method Not Allowed"),
        ("DELETE", "/register", None, 405, "Method Not Allowed"),
        ("POST", "/nowhere", b"", 404, "POST /nowhere: Not Found"),
    ],
)  # fmt: skip
def test_what_is_refused_is_one_line_of_json(
    served: Served, method: str, path: str, body: Any, status: int, says: str
) -> None:
    with asking(served.http) as client:
        answered, reply = client.call(method, path, body)
        assert answered == status
        assert list(reply) == ["error"]
        assert says in reply["error"]
        assert "\n" not in reply["error"]
        assert client.query()["a"]["GPU"] == 64  # and the next one is answered


def test_a_fault_of_ours_says_no_more_than_that(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(served.fleet, "lookup_tiers", fails)
    with asking(served.http) as client:
        status, reply = client.call("POST", "/query", {"model": "m", "token_ids": TOKENS})
    assert (status, reply) == (500, {"error": "the index failed to answer; its log says why"})
    assert "ZeroDivisionError" in caplog.text
    caplog.clear()  # its traceback holds the server


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large(served: Served, monkeypatch: pytest.MonkeyPatch, chunked: bool) -> None:
    monkeypatch.setattr(http_module, "MAX_BODY_NBYTES", 1 << 20)
    body = b" " * ((2 << 20) + 1)
    with asking(served.http) as client:
        given: Any = iter([body[: 1 << 20], body[1 << 20 :]]) if chunked else body
        client.connection.request("POST", "/query", given, encode_chunked=chunked)
        reply = client.connection.getresponse()
        assert reply.status == 413
        assert "at most 1048576 bytes: send hashes" in json.loads(reply.read())["error"]
        assert client.query()["a"]["GPU"] == 64


def test_bodies_in_memory_are_bounded_and_given_back(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    request = json.dumps({"model": "m", "token_ids": TOKENS}).encode()
    buffers = served.fleet.buffers
    monkeypatch.setattr(buffers, "limit_nbytes", buffers.used_nbytes + len(request) + 50)
    with asking(served.http) as client, slowly(served, b"[" * 100) as held:
        assert eventually(lambda: client.call("POST", "/query", request)[0] == 503)
        held.close()
        assert eventually(lambda: client.call("POST", "/query", request)[0] == 200)


@pytest.mark.parametrize("head", ["Content-Length: 8000000", "Transfer-Encoding: chunked"])
def test_a_body_sent_to_health_takes_no_memory_of_others(
    served: Served, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    """It takes no token: two hosts that sent bodies there had all that is held beside the tables."""
    buffers = served.fleet.buffers
    taken: list[int] = []
    take = buffers.take
    monkeypatch.setattr(buffers, "take", lambda nbytes, owner: (taken.append(nbytes), take(nbytes, owner))[1])
    host, port = served.http.split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        connection.sendall(f"GET /health HTTP/1.1\r\nHost: h\r\n{head}\r\n\r\n".encode())
        reply = b"".join(iter(lambda: connection.recv(4096), b""))  # it ends before any of the body has come
    assert reply.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in reply
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        connection.sendall(
            f"GET /health HTTP/1.1\r\nHost: h\r\n{head}\r\n\r\n10000\r\n".encode() + b"x" * 65536
        )
        assert eventually(lambda: cut_off(connection) or True)
    assert not taken


def cut_off(connection: socket.socket) -> bool:
    """Wait until the other side has ended it; False: it has sent something."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@contextmanager
def slowly(served: Served, body: bytes, head: str = "POST /query HTTP/1.1") -> Iterator[socket.socket]:
    """A connection that has sent the beginning of a request."""
    host, port = served.http.split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        sent = f"{head}\r\nHost: h\r\nContent-Length: 1000\r\n\r\n".encode() + body
        connection.sendall(sent)
        yield connection


def test_a_body_that_drips(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "BODY_S", 1.0)
    with slowly(served, b"{") as connection, asking(served.http) as client:
        assert client.query()["a"]["GPU"] == 64  # meanwhile others are answered
        reply = b"".join(iter(lambda: connection.recv(4096), b""))
        assert reply.startswith(b"HTTP/1.1 408 ")
        assert reply.endswith(b'{"error":"the request did not arrive within 1 s"}')


@pytest.mark.parametrize("sent", [b"", b"POST /query HTTP/1.1\r\nHost: h\r\nX: "])
def test_headers_that_drip(served: Served, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """Each byte comes in time, and the whole does not."""
    monkeypatch.setattr(listener_module, "HEAD_S", 0.5)
    host, port = served.http.split(":")
    with socket.create_connection((host, int(port)), timeout=0.05) as connection:
        connection.sendall(sent)
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            try:
                assert connection.recv(1) == b""
                break
            except TimeoutError:
                if sent:
                    connection.sendall(b"x")
            except ConnectionError:
                break
        else:
            pytest.fail("it was never cut off")


def test_a_second_request_may_not_drip_either(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "HEAD_S", 0.3)
    with asking(served.http) as client:
        client.query()
        connection = client.connection.sock
        connection.sendall(b"POST /qu")
        assert cut_off(connection)


def test_an_idle_connection_outlives_the_time_for_headers(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "HEAD_S", 1.5)
    monkeypatch.setattr(listener_module, "REQUEST_S", 1.0)
    with asking(served.http) as client, asking(served.http) as other:
        client.query()
        held = client.connection.sock
        other.connection.connect()
        assert cut_off(other.connection.sock)  # after HEAD_S, and REQUEST_S with it
        client.query()
        assert client.connection.sock is held


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01 not HTTP\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: h\r\nX: " + b"x" * (64 << 10)]
)
def test_what_is_no_http_is_turned_away(served: Served, sent: bytes) -> None:
    host, port = served.http.split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        connection.sendall(sent)
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
    with asking(served.http) as client:
        assert client.query()["a"]["GPU"] == 64


@pytest.mark.parametrize("limit", ["MAX_CONNECTIONS", "MAX_CONNECTIONS_OF_HOST"])
def test_connections_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(listener_module, limit, 2)
    monkeypatch.setattr(listener_module, "HEAD_S", 2.0 * WAIT_S)
    host, port = served.http.split(":")
    with asking(served.http) as client, asking(served.http) as second:
        assert client.call("GET", "/health")[0] == second.call("GET", "/health")[0] == 200
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as third:
            assert cut_off(third)
        assert client.call("GET", "/health")[0] == 200
        if limit == "MAX_CONNECTIONS_OF_HOST":
            with socket.create_connection((host, int(port)), WAIT_S, ("127.0.0.2", 0)) as another:
                another.sendall(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
                assert another.recv(100).startswith(b"HTTP/1.1 200 ")


def test_a_connection_of_some_age_is_ended_after_an_answer() -> None:
    with serving(http=True, max_connection_age_s=0.2) as served, asking(served.http) as client:
        ages_s, begun_s = [], time.monotonic()
        while True:
            client.connection.request("GET", "/health")
            reply = client.connection.getresponse()
            assert reply.read() == b'{"status":"ok"}'
            ages_s.append(time.monotonic() - begun_s)
            if reply.headers["connection"] == "close":
                break
            assert ages_s[-1] < WAIT_S
        assert len(ages_s) > 1
        assert ages_s[-1] >= 0.2


def test_calls_of_one_tenant_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limiter, "MAX_CALLS_OF_TENANT", 1)
    tokens = write_tokens(tmp_path / "t.toml", a=(["read"], ["a"]), b=(["read"], ["b"]))
    fleet = Fleet()
    for tenant in ("a", "b"):
        fleet.add(a_worker("w", tenant=tenant), "flag")
    with (
        serving(fleet, http=True, auth=TokenAuth(str(tmp_path / "t.toml"))) as served,
        slowly(served, b"{", f"POST /query HTTP/1.1\r\nAuthorization: Bearer {tokens['a']}"),
        asking(served.http, tokens["a"]) as same, asking(served.http, tokens["b"]) as other,
    ):  # fmt: skip
        asked = {"model": "m", "token_ids": TOKENS}
        said = (429, {"error": "1 calls are open for this tenant: ask again later"})
        assert eventually(lambda: same.call("POST", "/query", {**asked, "tenant_id": "a"}) == said)
        assert other.call("POST", "/query", {**asked, "tenant_id": "b"})[0] == 200


def test_questions_of_one_tenant_leave_threads_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = write_tokens(tmp_path / "t.toml", a=(["read"], ["a"]), b=(["read"], ["b"]))
    fleet = Fleet()
    for tenant in ("a", "b"):
        fleet.add(a_worker("w", tenant=tenant), "flag")
    decode, go_on, held = rfc1403.decode_query, threading.Event(), threading.Semaphore(0)

    def slow(raw: bytes, **options: Any) -> rfc1403.Query:
        query = decode(raw, **options)
        if query.prompt.tenant == "a":
            held.release()
            go_on.wait(WAIT_S)
        return query

    monkeypatch.setattr(rfc1403, "decode_query", slow)
    with serving(fleet, http=True, auth=TokenAuth(str(tmp_path / "t.toml"))) as served, ExitStack() as parts:
        body = json.dumps({"model": "m", "token_ids": TOKENS, "tenant_id": "a"})
        for _ in range(8):
            client = parts.enter_context(asking(served.http, tokens["a"]))
            client.connection.request("POST", "/query", body, client.headers)
        try:
            for _ in range(http_module.THREADS_OF_OWNER):
                assert held.acquire(timeout=WAIT_S)
            with asking(served.http, tokens["b"]) as other:
                asked = {"model": "m", "token_ids": TOKENS, "tenant_id": "b"}
                assert other.call("POST", "/query", asked)[0] == 200
        finally:
            go_on.set()


@contextmanager
def deaf(fleet: Fleet, address: str) -> Iterator[None]:
    """A connection that asks many questions at once, 16 MB of answers, and reads none."""
    for number in range(200):
        fleet.add(a_worker(f"worker-{number:03}"), "flag")
    body = b'{"model":"m","seq_hashes":[1]}'
    question = b"POST /query_by_hash HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    host, port = address.split(":")
    with socket.socket() as connection:
        connection.settimeout(WAIT_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        connection.connect((host, int(port)))
        connection.sendall(question * 800)
        yield


def sockets() -> int:
    """That this process has."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own
            found += str(link.readlink()).startswith("socket:")
    return found


def test_who_does_not_read_is_cut_off(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "REQUEST_S", 2.0)
    before = sockets()
    with deaf(served.fleet, served.http):
        assert eventually(lambda: sockets() == before + 2)
        assert eventually(lambda: sockets() == before + 1, within_s=WAIT_S)  # the caller's own end


# ---- start and end


def test_it_ends_with_somebody_who_does_not_read() -> None:
    fleet, stats = Fleet(), RequestStats()
    with serving(fleet, stats=stats, http=True) as served, deaf(fleet, served.http):
        answered = [-1, 0]
        assert eventually(lambda: stats.totals().results["answered"] > 0, within_s=WAIT_S)
        while answered[-1] != answered[-2]:  # then no more goes out
            time.sleep(0.5)
            answered.append(stats.totals().results["answered"])
        started_s = time.monotonic()
        served.stop()
        assert time.monotonic() - started_s < listener_module.STOP_TIMEOUT_S + WAIT_S / 2


def test_it_ends_while_somebody_drips(served: Served) -> None:
    with slowly(served, b"{"), slowly(served, b"", "GET /health HTTP/1.1"), asking(served.http) as client:
        client.call("GET", "/health")
        started_s = time.monotonic()
        served.stop()
        assert time.monotonic() - started_s < listener_module.STOP_TIMEOUT_S + WAIT_S / 2


def test_health_is_that_of_the_index() -> None:
    async def not_yet() -> bool:
        return False

    import asyncio

    async def check() -> bytes:
        server = HttpServer(Roster(Fleet()), RequestStats(), not_yet)
        try:
            port = await server.start("127.0.0.1:0")
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
            reply = await reader.read()
            writer.close()
            await writer.wait_closed()
            return reply
        finally:
            await server.stop()

    reply = asyncio.run(check())
    assert reply.startswith(b"HTTP/1.1 503 ")
    assert b'{"error":"this index does not answer for now"}' in reply


def test_an_address_that_is_taken_is_one_line(served: Served) -> None:
    import asyncio

    async def start(listen: str) -> None:
        server = HttpServer(Roster(Fleet()), RequestStats(), lambda: asyncio.sleep(0, True))
        try:
            await server.start(listen)
        finally:
            await server.stop()

    for listen, says in ((served.http, "Address already in use"), ("x", "write HOST:PORT")):
        with pytest.raises(ConfigError, match=says):
            asyncio.run(start(listen))
