"""The HTTP door: calls in JSON, and requests that misbehave.

Over 400 lines because all calls over HTTP share its fixtures.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st

from kvpool import BlockHasher, ConfigError
from kvpool.index import limits
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.front import proxy as proxy_module
from kvpool.index.net import listener as listener_module
from kvpool.index.net.tls import ServerTls
from kvpool.index.protocol.messages import REPLIES, SERVICE
from kvpool.index.request_stats import RequestStats
from kvpool.index.serve import http as http_module
from kvpool.index.serve.auth import TokenAuth
from kvpool.index.serve.health import Health
from kvpool.index.serve.http import HttpServer
from kvpool.index.serve.service import IndexServer
from kvpool.v1 import index_pb2 as pb
from tests.support.credentials import Authority, write_tokens
from tests.support.deadlines import eventually
from tests.support.fleets import Served, a_worker, joined, serving, two_tenants
from tests.support.fronts import proxy_cluster
from tests.support.index_process import running
from tests.support.wire import packed64, stored

pytestmark = pytest.mark.usefixtures("grpc_started")

WAIT_S = 60
TOKENS = list(range(1000, 1160))  # ten blocks of 16
HASHES = [int.from_bytes(digest[-8:], "big") for digest in BlockHasher(16).hashes(TOKENS)]


ASKED = {"scope": {"model": "m"}, "token_ids": base64.b64encode(array("I", TOKENS).tobytes()).decode()}


class JsonClient:
    """Calls over one connection; ``headers`` of all of them."""

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

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        self.connection.request(method, path, raw, self.headers | headers)
        reply = self.connection.getresponse()
        text = reply.read()
        assert reply.headers["content-type"] == "application/json"
        return reply.status, json.loads(text)

    def lookup(self, **fields: Any) -> Any:
        status, reply = self.call("POST", "/v1/lookup", {**ASKED, **fields})
        assert status == 200, reply
        return reply

    def is_well(self) -> bool:
        self.connection.request("GET", "/health")
        with self.connection.getresponse() as reply:
            reply.read()
            return reply.status == 200

    def device_blocks(self) -> list[int]:
        return self.lookup()["device_blocks"]  # type: ignore[no-any-return]


@contextmanager
def asking(address: str, token: str = "", trust: ssl.SSLContext | None = None) -> Iterator[JsonClient]:
    client = JsonClient(address, token, trust)
    try:
        yield client
    finally:
        client.connection.close()


def dialled(address: str, source: str = "") -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S, source_address=(source, 0))


@pytest.fixture
def served() -> Iterator[Served]:
    fleet = Fleet()
    joined(fleet, a_worker("a"), stored(HASHES[:4]))
    with serving(fleet, http=True) as index:
        yield index


@contextmanager
def opened(door: str) -> Iterator[str]:
    """The address of an index, or of a router: both have the same listener."""
    with serving(http=True) if door == "index" else proxy_cluster("a") as there:
        served = there if isinstance(there, Served) else there.index
        yield served.http or served.proxy


OF_BOTH = pytest.mark.parametrize("door", ["index", "router"])


# ---- answers


def without_times(message: Any) -> Any:
    for of_time in ("staleness_ms", "load_age_ms"):
        if of_time in message.DESCRIPTOR.fields_by_name:
            message.ClearField(of_time)
    for name in ("rows", "responses"):
        if name in message.DESCRIPTOR.fields_by_name:
            inner = getattr(message, name)
            for one in [inner] if name == "rows" else inner:
                without_times(one)
    return message


def test_answers_are_those_of_grpc_in_the_json_of_protobuf(served: Served) -> None:
    served.fleet.add(a_worker("b", port=5657), "flag")
    hashes = base64.b64encode(packed64(HASHES)).decode()
    names = {"tokenIds": ASKED["token_ids"], "scope": {"model": "m"}}  # as protobuf spells them in JSON
    with asking(served.http) as client, grpc.insecure_channel(served.target) as channel:
        assert client.call("GET", "/health") == (200, {"status": "ok"})
        for path, name, body in (
            ("/v1/lookup", "Lookup", ASKED),
            ("/v1/lookup", "Lookup", names),
            ("/v1/lookup", "Lookup", {"scope": {"model": "m"}, "block_hashes": hashes, "workers": ["b"]}),
            ("/v1/lookup", "Lookup", {"requests": [{**ASKED, "id": "7"}, {"scope": {"model": "x"}}]}),
            ("/v1/route", "Route", {**ASKED, "most": 1, "loads": [{"worker": "a", "running": 3}]}),
        ):
            kind = {"Lookup": pb.LookupRequest, "Route": pb.RouteRequest}[name]
            packed = json_format.ParseDict(body, kind()).SerializeToString()
            reply = REPLIES[name].FromString(channel.unary_unary(f"/{SERVICE}/{name}")(packed))
            status, answer = client.call("POST", path, body)
            assert status == 200, answer
            read = json_format.ParseDict(answer, REPLIES[name]())
            assert without_times(read) == without_times(reply)
        assert client.lookup()["device_blocks"] == [4, 0]


def test_tokens_are_asked_for_here_too(tmp_path: Path) -> None:
    tokens = write_tokens(
        tmp_path / "tokens.toml",
        router=(["read"], ["t"]), worker=(["publish"], ["t"]), chief=(["admin"], ["*"]),
    )  # fmt: skip
    fleet = Fleet()
    fleet.add(a_worker("a", tenant="t"), "flag")
    asked = {**ASKED, "scope": {"model": "m", "tenant": "t"}}
    with serving(fleet, http=True, auth=TokenAuth(str(tmp_path / "tokens.toml"))) as served:

        def status(holder: str, method: str, path: str, body: Any = None) -> int:
            with asking(served.http, tokens.get(holder, holder)) as client:
                return client.call(method, path, body)[0]

        assert status("", "GET", "/health") == 200
        for path in ("/v1/lookup", "/v1/route"):
            assert status("", "POST", path, asked) == 401
            assert status("wrong", "POST", path, asked) == 401
            assert status("router", "POST", path, asked) == 200
            assert status("worker", "POST", path, asked) == 403
            for tenant in ("other", "default"):  # whether there are workers of it or not
                of_tenant = {**asked, "scope": {"model": "m", "tenant": tenant}}
                assert status("router", "POST", path, of_tenant) == 403


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


def test_what_is_asked_is_counted() -> None:
    fleet, stats = Fleet(), RequestStats()
    joined(fleet, a_worker("a"), stored(HASHES[:5]))
    with serving(fleet, stats=stats, http=True) as served, asking(served.http) as client:
        client.lookup()
        client.lookup()
        client.call("POST", "/v1/lookup", {"scope": {"model": "unknown"}, "token_ids": "AQAAAA=="})
        client.call("POST", "/v1/lookup", {"scope": {"model": "m"}})
        client.call("GET", "/v1/lookup")
    totals = stats.totals()
    assert totals.results == {"answered": 2, "wrong": 1, "unknown": 1, "failed": 0}
    assert totals.matched == (20, 10, 10, 0)
    assert totals.refused == {"NOT_FOUND": 1, "INVALID_ARGUMENT": 1, "UNIMPLEMENTED": 1}


# ---- what is refused


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("POST", "/v1/lookup", b"{", 400, "it is no LookupRequest in JSON"),
        ("POST", "/v1/lookup", b"[1]", 400, "write an object"),
        ("POST", "/v1/lookup", b"\xff", 400, "it is no LookupRequest in JSON"),
        ("POST", "/v1/lookup", {"model": "m"}, 400, "model is no field of LookupRequest"),
        ("POST", "/v1/lookup", {**ASKED, "token_ids": [1, 2]}, 400, "token_ids is base64 of 4 bytes a token"),
        ("POST", "/v1/lookup", {**ASKED, "token_ids": "AQ=="}, 400, "4 bytes each"),
        ("POST", "/v1/lookup", {**ASKED, "scope": {"model": "m", "tenant": "a/b"}}, 400, "tenant"),
        ("POST", "/v1/lookup", {**ASKED, "scope": {"model": "x"}}, 404, 'unknown model "x"; known are m'),
        ("POST", "/v1/lookup", {"scope": {"model": "m"}}, 400, "a request holds a prompt"),
        ("POST", "/v1/lookup", b'{"requests":[' * 20 + b"{}" + b"]}" * 20, 400, "is nested too deeply"),
        ("POST", "/v1/lookup", b"[" * 100_000, 400, "more than 4096 lists"),
        ("POST", "/v1/lookup", b'{"workers": [' + b"1," * (1 << 18) + b"1]}", 400, "more than 65536 values"),
        ("POST", "/v1/route", {**ASKED, "most": -1}, 400, "most is out of range"),
        ("POST", "/v1/route", {**ASKED, "loads": [{}] * 5000}, 400, "more than 4096 lists and objects"),
        ("GET", "/v1/lookup", None, 405, "GET /v1/lookup: Method Not Allowed; use POST"),
        ("POST", "/health", b"", 405, "Method Not Allowed"),
        ("POST", "/nowhere", b"", 404, "POST /nowhere: Not Found"),
        *[("POST", path, b"{}", 410, http_module.GONE[path]) for path in http_module.GONE],
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
        assert client.device_blocks() == [4]  # and the next one is answered


SITES: list[tuple[dict[str, str], int]] = [
    ({"Content-Type": "text/plain"}, 415),
    ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ({"Content-Type": ""}, 415),
    ({"Sec-Fetch-Site": "cross-site"}, 403),
    ({"Sec-Fetch-Site": "same-site", "Origin": "http://{host}"}, 403),
    ({"Origin": "http://elsewhere"}, 403),
    ({"Origin": "null"}, 403),
    ({"Origin": "http://{host}", "Content-Type": "Application/JSON; charset=utf-8"}, 200),
    ({"Origin": "https://seen-from-outside", "Sec-Fetch-Site": "same-origin"}, 200),
]


def test_a_page_of_another_site_can_make_no_call(served: Served) -> None:
    """A browser sends a simple request for any page, and a ``Route`` reserves."""
    with asking(served.http) as client:
        for path in ("/v1/lookup", "/v1/route", "/status/prompt"):
            asked = {"model": "m", "token_ids": TOKENS} if path == "/status/prompt" else ASKED
            for headers, status in SITES:
                sent = {name: value.format(host=served.http) for name, value in headers.items()}
                assert client.call("POST", path, asked, **sent)[0] == status, (path, headers)


HOSTS = [
    ("page.example:50053", 403),
    ("127.0.0.1.page.example", 403),
    ("other.example.com.", 403),
    ("index.example.com:50053", 200),
    ("INDEX.example.com.", 200),
    ("127.0.0.1:1", 200),
    ("[::1]:1", 200),
    ("index", 200),
    ("index.kvpool.svc.cluster.local:50053", 200),
]


def test_a_page_whose_name_leads_to_an_index_without_tokens_learns_nothing() -> None:
    """DNS rebinding: to its browser the page is of this site."""
    with (
        running("--http", "127.0.0.1:0", "--http-name", "Index.example.com") as index,
        asking(f"127.0.0.1:{index.http_port}") as client,
    ):
        for host, status in HOSTS:
            for method, path in (("GET", "/status/data"), ("POST", "/v1/lookup"), ("POST", "/v1/route")):
                served = 404 if status == 200 and method == "POST" else status  # no such model
                asked = ASKED if method == "POST" else None
                assert client.call(method, path, asked, Host=host)[0] == served, (path, host)
            assert client.call("GET", "/health", Host=host)[0] != 403, "it tells nothing"
        line = client.call("GET", "/status/data", Host="page.example")[1]["error"]
        assert line == "this index is not called page.example: start it with --http-name, or ask its address"


def test_an_index_with_tokens_is_asked_by_any_name(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "t.toml", a=(["read"], ["*"]))
    auth = TokenAuth(str(tmp_path / "t.toml"))
    with serving(http=True, auth=auth) as served, asking(served.http, tokens["a"]) as client:
        assert client.call("GET", "/status/data", Host="index.example.com")[0] == 200


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(list(pb.RouteRequest.DESCRIPTOR.fields_by_name)), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.binary(max_size=40) | json_values.map(lambda value: json.dumps(value).encode()))
def test_json_becomes_a_message_or_is_refused(raw: bytes) -> None:
    for kind in (pb.LookupRequest, pb.RouteRequest):
        with contextlib.suppress(ConfigError):
            kind.FromString(http_module._pack(kind, raw))


def test_a_fault_of_ours_says_no_more_than_that(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(served.fleet, "ask", fails)
    with asking(served.http) as client:
        status, reply = client.call("POST", "/v1/lookup", ASKED)
    assert (status, reply) == (500, {"error": "the index failed to answer; its log says why"})
    assert "ZeroDivisionError" in caplog.text
    caplog.clear()  # its traceback holds the server


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large(served: Served, monkeypatch: pytest.MonkeyPatch, chunked: bool) -> None:
    monkeypatch.setattr(http_module, "MAX_BODY_NBYTES", 1 << 20)
    body = b" " * ((2 << 20) + 1)
    with asking(served.http) as client:
        given: Any = iter([body[: 1 << 20], body[1 << 20 :]]) if chunked else body
        client.connection.request("POST", "/v1/lookup", given, client.headers, encode_chunked=chunked)
        reply = client.connection.getresponse()
        assert reply.status == 413
        assert "at most 1048576 bytes: send hashes" in json.loads(reply.read())["error"]
        assert client.device_blocks() == [4]


def test_bodies_in_memory_are_bounded_and_given_back(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    request = json.dumps(ASKED).encode()
    buffers = served.fleet.limits
    monkeypatch.setattr(buffers, "limit_nbytes", buffers.used_nbytes + len(request) + 50)
    with asking(served.http) as client, slowly(served, b"[" * 100) as held:
        assert eventually(lambda: client.call("POST", "/v1/lookup", request)[0] == 503)
        held.close()
        assert eventually(lambda: client.call("POST", "/v1/lookup", request)[0] == 200)


@pytest.mark.parametrize("head", ["Content-Length: 8000000", "Transfer-Encoding: chunked"])
def test_a_body_sent_to_health_takes_no_memory_of_others(
    served: Served, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    """It takes no token: two hosts that sent bodies there had all that is held beside the tables."""
    monkeypatch.setattr(listener_module, "LINGER_S", 0.2)
    buffers = served.fleet.limits
    taken: list[int] = []
    take = buffers.take
    monkeypatch.setattr(buffers, "take", lambda nbytes, owner: (taken.append(nbytes), take(nbytes, owner))[1])
    with dialled(served.http) as connection:
        connection.sendall(f"GET /health HTTP/1.1\r\nHost: h\r\n{head}\r\n\r\n".encode())
        reply = b"".join(iter(lambda: connection.recv(4096), b""))  # it ends before any of the body has come
    assert reply.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in reply.lower()
    with dialled(served.http) as connection:
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
def slowly(served: Served, body: bytes, head: str = "POST /v1/lookup HTTP/1.1") -> Iterator[socket.socket]:
    """A connection that has sent the beginning of a request."""
    with dialled(served.http) as connection:
        sent = (
            f"{head}\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n".encode()
            + body
        )
        connection.sendall(sent)
        yield connection


def test_a_body_that_drips(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "BODY_S", 1.0)
    monkeypatch.setattr(listener_module, "LINGER_S", 0.2)
    with slowly(served, b"{") as connection, asking(served.http) as client:
        assert client.device_blocks() == [4]  # meanwhile others are answered
        reply = b"".join(iter(lambda: connection.recv(4096), b""))
        assert reply.startswith(b"HTTP/1.1 408 ")
        assert reply.endswith(b'{"error":"the request did not arrive within 1 s"}')


@OF_BOTH
@pytest.mark.parametrize("sent", [b"", b"POST /v1/lookup HTTP/1.1\r\nHost: h\r\nX: "])
def test_headers_that_drip(monkeypatch: pytest.MonkeyPatch, door: str, sent: bytes) -> None:
    """Each byte comes in time, and the whole does not."""
    monkeypatch.setattr(listener_module, "HEAD_S", 0.5)
    with opened(door) as address, dialled(address) as connection:
        connection.settimeout(0.05)
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


@OF_BOTH
def test_a_head_has_a_size(door: str) -> None:
    """Each header is small, and their names have no end."""
    with opened(door) as address, asking(address) as client, dialled(address) as connection:
        assert client.is_well()  # another head of a connection is bounded, too
        for one in (connection, client.connection.sock):
            with contextlib.suppress(ConnectionError):
                one.sendall(b"GET /health HTTP/1.1\r\nHost: h\r\n")
                for number in range(20):
                    one.sendall(b"X%d: " % number + b"x" * 8000 + b"\r\n")
            assert cut_off(one)


def test_heads_are_counted_and_a_host_leaves_room_for_those_of_others(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is legal; 4,096 of them are a GiB."""
    monkeypatch.setattr(listener_module, "HEAD_S", 2.0 * WAIT_S)
    memory = served.fleet.limits
    before = memory.used_nbytes
    monkeypatch.setattr(memory, "limit_nbytes", before + (1 << 20))  # 384 KiB of it for heads of a host

    def large(nbytes: int) -> bytes:
        lines = b"".join(b"X%d: " % number + b"x" * 8000 + b"\r\n" for number in range(nbytes // 8000))
        return b"GET /health HTTP/1.1\r\nHost: h\r\n" + lines

    with dialled(served.http) as first, dialled(served.http) as second:
        first.sendall(large(96_000))
        assert eventually(lambda: memory.used_nbytes > before + 192_000)
        with contextlib.suppress(ConnectionError):
            second.sendall(large(120_000))
        assert cut_off(second)
        with dialled(served.http, "127.0.0.2") as another:
            another.sendall(large(40_000) + b"\r\n")
            assert another.recv(100).startswith(b"HTTP/1.1 200 ")
            assert eventually(lambda: memory.used_nbytes < before + 250_000), "until it is answered"
        with asking(served.http) as client:
            assert client.call("GET", "/health")[0] == 200, "a small head has room"
        first.sendall(b"\r\n")
        assert first.recv(100).startswith(b"HTTP/1.1 200 ")
        assert eventually(lambda: memory.used_nbytes == before)


@OF_BOTH
def test_a_second_request_may_not_drip_either(monkeypatch: pytest.MonkeyPatch, door: str) -> None:
    monkeypatch.setattr(listener_module, "HEAD_S", 0.3)
    with opened(door) as address, asking(address) as client:
        assert client.is_well()
        connection = client.connection.sock
        connection.sendall(b"POST /v1")
        assert cut_off(connection)


@OF_BOTH
def test_an_idle_connection_outlives_the_time_for_headers(monkeypatch: pytest.MonkeyPatch, door: str) -> None:
    monkeypatch.setattr(listener_module, "HEAD_S", 1.5)
    monkeypatch.setattr(listener_module, "REQUEST_S", 1.0)
    with opened(door) as address, asking(address) as client, asking(address) as other:
        assert client.is_well()
        held = client.connection.sock
        other.connection.connect()
        assert cut_off(other.connection.sock)  # after HEAD_S, and REQUEST_S with it
        assert client.is_well()
        assert client.connection.sock is held


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01 not HTTP\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: h\r\nX: " + b"x" * (64 << 10)]
)
def test_what_is_no_http_is_turned_away(served: Served, sent: bytes) -> None:
    with dialled(served.http) as connection:
        connection.sendall(sent)
        assert connection.recv(4096).split()[1] == b"400"
    with asking(served.http) as client:
        assert client.device_blocks() == [4]


@OF_BOTH
@pytest.mark.parametrize("limit", ["total", "of_host"])
def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch, door: str, limit: str) -> None:
    bounds: dict[str, Any] = {limit: 2}
    module = listener_module if door == "index" else proxy_module  # a router has more
    monkeypatch.setattr(module, "CONNECTIONS", module.CONNECTIONS._replace(**bounds))
    monkeypatch.setattr(listener_module, "HEAD_S", 2.0 * WAIT_S)
    with opened(door) as address:
        with asking(address) as client, asking(address) as second:
            assert client.is_well()
            assert second.is_well()
            with dialled(address) as third:
                assert cut_off(third)
            assert client.is_well()
            if limit == "of_host":
                with dialled(address, "127.0.0.2") as another:
                    another.sendall(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
                    assert another.recv(100).startswith(b"HTTP/1.1 200 ")
        assert eventually(lambda: _answers(address)), "others have gone"


def test_connections_are_bounded_before_their_handshake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "CONNECTIONS", listener_module.CONNECTIONS._replace(of_host=2))
    monkeypatch.setattr(listener_module, "HEAD_S", 2.0 * WAIT_S)
    authority = Authority(tmp_path)
    server = authority.issue("server", names=("127.0.0.1",))
    trust = ssl.create_default_context(cafile=str(authority.ca))
    with (
        serving(http=True, tls=ServerTls(str(server.cert), str(server.key), "")) as served,
        dialled(served.http), dialled(served.http) as second, dialled(served.http) as third,
    ):  # fmt: skip
        assert cut_off(third)
        with dialled(served.http, "127.0.0.2") as another:
            spoken = trust.wrap_socket(another, server_hostname="127.0.0.1")
            with spoken:
                spoken.sendall(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
                assert spoken.recv(100).startswith(b"HTTP/1.1 200 ")
        second.sendall(b"no handshake\r\n" * 9)  # what it took is free again
        assert eventually(lambda: _answers(served.http, trust))


def _answers(address: str, trust: ssl.SSLContext | None = None) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException), asking(address, trust=trust) as client:
        return client.is_well()
    return False


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
        assert ages_s[-1] >= 0.2


def test_calls_of_one_tenant_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HTTP_CALLS", limits.HTTP_CALLS._replace(of_tenant=1))
    with (
        two_tenants(tmp_path, http=True) as (served, tokens),
        slowly(served, b"{", f"POST /v1/lookup HTTP/1.1\r\nAuthorization: Bearer {tokens['a']}"),
        asking(served.http, tokens["a"]) as same, asking(served.http, tokens["b"]) as other,
    ):  # fmt: skip
        of = {name: {**ASKED, "scope": {"model": "m", "tenant": name}} for name in "ab"}
        said = (429, {"error": "1 calls are open for this tenant: ask again later"})
        assert eventually(lambda: same.call("POST", "/v1/lookup", of["a"]) == said)
        assert other.call("POST", "/v1/lookup", of["b"])[0] == 200


def test_questions_of_one_tenant_leave_threads_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse, go_on, held = http_module._pack, threading.Event(), threading.Semaphore(0)

    def slow(kind: Any, raw: bytes) -> bytes:
        if b'"tenant": "a"' in raw:
            held.release()
            go_on.wait(WAIT_S)
        return parse(kind, raw)

    monkeypatch.setattr(http_module, "_pack", slow)
    with two_tenants(tmp_path, http=True) as (served, tokens), ExitStack() as parts:
        body = json.dumps({**ASKED, "scope": {"model": "m", "tenant": "a"}})
        for _ in range(8):
            client = parts.enter_context(asking(served.http, tokens["a"]))
            client.connection.request("POST", "/v1/lookup", body, client.headers)
        try:
            for _ in range(http_module.THREADS_OF_OWNER):
                assert held.acquire(timeout=WAIT_S)
            with asking(served.http, tokens["b"]) as other:
                asked = {**ASKED, "scope": {"model": "m", "tenant": "b"}}
                assert other.call("POST", "/v1/lookup", asked)[0] == 200
        finally:
            go_on.set()


@contextmanager
def deaf(fleet: Fleet, address: str) -> Iterator[None]:
    """A connection that asks many questions at once, 16 MB of answers, and reads none."""
    for number in range(200):
        fleet.add(a_worker(f"worker-{number:03}"), "flag")
    head = b"POST /v1/lookup HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
    body = b'{"scope":{"model":"m"},"block_hashes":"AQAAAAAAAAA="}'
    question = head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
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
    monkeypatch.setattr(listener_module, "WRITE_S", 2.0)
    before = sockets()
    with deaf(served.fleet, served.http):
        assert eventually(lambda: sockets() == before + 2)
        assert eventually(lambda: sockets() == before + 1)  # the caller's own end


# ---- start and end


def test_it_ends_with_somebody_who_does_not_read() -> None:
    fleet, stats = Fleet(), RequestStats()
    with serving(fleet, stats=stats, http=True) as served, deaf(fleet, served.http):
        answered = [-1, 0]
        assert eventually(lambda: stats.totals().results["answered"] > 0)
        while answered[-1] != answered[-2]:  # then no more goes out
            time.sleep(0.5)
            answered.append(stats.totals().results["answered"])
        served.stop()  # fails after a minute


def test_it_ends_while_somebody_drips(served: Served) -> None:
    with slowly(served, b"{"), slowly(served, b"", "GET /health HTTP/1.1"), asking(served.http) as client:
        client.call("GET", "/health")
        served.stop()  # fails after a minute


def test_health_is_that_of_the_index() -> None:
    async def check() -> bytes:
        index = IndexServer(Fleet(), health=Health(lambda: False))
        server = HttpServer(index)
        try:
            port = await server.start("127.0.0.1:0")
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
            reply = await reader.read()
            writer.close()
            await writer.wait_closed()
            return reply
        finally:
            await server.stop()
            await index.stop()

    reply = asyncio.run(check())
    assert reply.startswith(b"HTTP/1.1 503 ")
    assert b'{"error":"this index does not answer for now"}' in reply


def test_an_address_that_is_taken_is_one_line(served: Served) -> None:
    async def start(listen: str) -> None:
        index = IndexServer(Fleet())
        server = HttpServer(index)
        try:
            await server.start(listen)
        finally:
            await server.stop()
            await index.stop()

    for listen, says in ((served.http, "Address already in use"), ("x", "write HOST:PORT")):
        with pytest.raises(ConfigError, match=says):
            asyncio.run(start(listen))
