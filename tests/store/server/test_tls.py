"""Servers under TLS: the conformance kit, whom the store trusts, what it says when it does not, and faults."""

from __future__ import annotations

import contextlib
import gc
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from kvpool import open_store
from kvpool.cli.doctor.server import server_findings
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.store import StoreURL
from kvpool.store.server.connection import connect
from kvpool.store.server.deadline_socket import under_tls
from kvpool.store.tls import Tls
from tests.support.conformance import MIB, LightConformance, ServerConformance, keys, payload
from tests.support.credentials import Authority, Pair
from tests.support.deadlines import ends_within, eventually
from tests.support.proxy import Harm, Way, proxied
from tests.support.servers import CLIENTS, ON_REDIS, ON_VALKEY, SERVERS, TlsServer, started, with_client
from tests.support.store_traffic import Exchange, said_undisturbed, serves


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(params=SERVERS, scope="module")
def server_of_module(
    request: pytest.FixtureRequest, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TlsServer]:
    with started(TlsServer(request.param, tmp_path_factory.mktemp("server"), authority)) as server:
        yield server


# ---------------------------------------------------------------------- it works


@ON_REDIS
class TestNativeUnderTls(ServerConformance):
    pass


@ON_VALKEY
class TestRedisPyUnderTls(LightConformance):
    client = "redis"


@ON_REDIS
class TestGlideUnderTls(LightConformance):
    client = "glide"


def test_a_client_certificate_and_a_user(
    authority: Authority, client: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    name = SERVERS[CLIENTS.index(client) % 2]
    with started(TlsServer(name, tmp_path, authority, demands_certificate=True)) as server:
        server.client.acl_setuser(
            "worker", enabled=True, passwords=["+hunter2"], keys=["*"], commands=["+@all"]
        )
        pair = authority.issue("worker")
        url = server.url_at(server.tls_port, "localhost", "worker:hunter2@", "/3")
        url = with_client(f"{url}&cert={pair.cert}&key={pair.key}", client)
        with open_store(url) as store:
            assert serves(store)
            store.announce("kvpool:t:x", b"document", lease_s=60)
            assert store.announcements("kvpool:t:") == {"kvpool:t:x": b"document"}
            assert [len(blocks) for blocks in store.scan()] == [1]
            assert "hunter2" not in repr(store)
        assert all(finding.level != "fail" for finding in server_findings(StoreURL.parse(url))[:1])
        assert server.client.dbsize() == 0  # it was in database 3


# ---------------------------------------------------------------------- whom it trusts, and what it says


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"), "stranger")


def refused(url: str, words: str, client: str, kind: type[Exception] = StoreUnavailable) -> None:
    with pytest.raises(kind, match=re.escape(words)) as caught:
        open_store(with_client(url, client))
    assert "\n" not in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert "PRIVATE" not in str(caught.value)


def test_an_unknown_authority(server: TlsServer, stranger: Authority, client: str) -> None:
    url = f"valkeys://:hunter2@127.0.0.1:{server.tls_port}"
    refused(
        url, "certificate verify failed: self-signed certificate in certificate chain; name the file", client
    )
    refused(f"{url}?ca={stranger.ca}", "name the file of the authority that signed", client)


@pytest.mark.parametrize(
    ("host", "names", "days", "words"),
    [
        ("127.0.0.1", ("localhost",), 2, "IP address mismatch; write a name or address that the server's"),
        ("127.0.0.1", ("10.0.0.1",), 2, "IP address mismatch; write a name or address that the server's"),
        ("localhost", ("127.0.0.1", "*.localhost"), 2, "hostname mismatch; write a name that the server's"),
        ("localhost", (), 2, "hostname mismatch; write a name that the server's"),  # its common name
        ("localhost", ("localhost",), -1, "certificate has expired; renew the server's certificate"),
    ],
)
def test_a_certificate_that_is_not_for_this_server(
    authority: Authority,
    tmp_path: Path,
    client: str,
    host: str,
    names: tuple[str, ...],
    days: int,
    words: str,
) -> None:
    pair = authority.issue("localhost", names=names, days=days)
    with started(TlsServer("valkey-server", tmp_path, authority, pair=pair)) as server:
        refused(server.url_at(server.tls_port, host), words, client)


def test_announcements_trust_nobody_else_either(server: TlsServer, stranger: Authority) -> None:
    url = StoreURL.parse(server.url)
    for untrusted in (Tls(), Tls(str(stranger.ca))):
        with (
            pytest.raises(redis.ConnectionError, match="certificate verify failed"),
            connect(replace(url, tls=untrusted), timeout_s=2, role="test") as asking,
        ):
            asking.ping()
    with connect(url, timeout_s=2, role="test") as asking:
        assert asking.ping()


@pytest.mark.parametrize("version", ["TLSv1.2", "TLSv1.3"])
def test_a_client_certificate_that_is_demanded(
    authority: Authority, stranger: Authority, tmp_path: Path, client: str, version: str
) -> None:
    demanding = TlsServer("redis-server", tmp_path, authority, demands_certificate=True)
    with started(demanding) as server:
        server.client.config_set("tls-protocols", version)
        refused(server.url, "a client certificate", client)
        refused(server.url, "?cert=/path.pem&key=/path.pem", client)

        def shown(pair: Pair) -> str:
            return f"{server.url}&cert={pair.cert}&key={pair.key}"

        refused(
            shown(stranger.issue("client")),
            "use a client certificate of an authority that the server",
            client,
        )
        refused(shown(authority.issue("old", days=-1)), "renew the client certificate", client)


def test_a_port_that_speaks_the_other_way(server: TlsServer, client: str) -> None:
    refused(f"valkey://:hunter2@127.0.0.1:{server.tls_port}", "port for TLS, write valkeys://", client)
    refused(server.url_at(server.port), "does not answer the TLS handshake; check that", client)


def test_a_port_that_answers_something_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(b"-ERR unknown command\r\n")
                peer.recv(1 << 16)

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"valkeys://127.0.0.1:{listener.getsockname()[1]}"
        refused(url, "wrong version number; the port speaks no TLS: write valkey://", "native")
        thread.join()


def test_files_that_cannot_be_used_are_named_before_anything_is_dialled(
    authority: Authority, tmp_path: Path, client: str
) -> None:
    pair, other = authority.issue("client"), authority.issue("other")
    locked = authority.issue("locked", passphrase=b"hunter2")
    noise = tmp_path / "noise.pem"
    noise.write_text("hunter2")
    missing = tmp_path / "missing.pem"
    nobody = "valkeys://127.0.0.1:1"
    for query, words in {
        f"ca={missing}": f"{missing}: the file of authorities cannot be read: No such file or directory",
        f"ca={noise}": f"{noise}: the file of authorities cannot be used: ",
        f"ca={tmp_path}": f"{tmp_path}: the file of authorities cannot be read: it is not a file",
        f"cert={missing}&key={pair.key}": f"{missing}: the client certificate cannot be read: ",
        f"cert={noise}&key={pair.key}": f"{noise}: the client certificate cannot be used: ",
        f"cert={pair.cert}&key={missing}": f"{missing}: the private key cannot be read: ",
        f"cert={pair.cert}&key={noise}": f"{noise}: the private key cannot be used: ",
        f"cert={pair.cert}&key={other.key}": f"{other.key}: the private key cannot be used: key values mismatch",
        f"cert={locked.cert}&key={locked.key}": f"{locked.key}: the private key has a passphrase: store it",
    }.items():
        refused(f"{nobody}?{query}", words, client, ConfigError)


# ---------------------------------------------------------------------- faults


def through(server: TlsServer, port: int, connections: int = 1) -> str:
    return f"{server.url_at(port)}&connections={connections}"


def test_a_server_that_never_answers_the_handshake() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"valkeys://127.0.0.1:{listener.getsockname()[1]}"
        with ends_within(2.0):
            refused(url, "does not answer the TLS handshake", "native")


def test_a_connection_that_is_reset_before_its_handshake_leaves_no_socket() -> None:
    """A socket that nobody closes is a warning, which fails a test."""
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as ends:
        plain = ends.enter_context(socket.create_connection(listener.getsockname()))
        accepted, _ = listener.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()
        with pytest.raises(ConnectionResetError):
            under_tls(plain, Tls(), "127.0.0.1", time.monotonic() + 5)
        gc.collect()  # a socket that is left open warns now
        assert plain.fileno() == -1


def test_a_server_that_is_stopped_in_the_middle(server: TlsServer) -> None:
    value, target, names = payload(1, 4 * MIB), bytearray(4 * MIB), keys(8) * 25

    def moved_nbytes() -> int:
        return int(server.info("total_net_input_bytes") + server.info("total_net_output_bytes"))

    with open_store(server.url) as store:
        assert serves(store, 99)
        for submit in (
            lambda: store.submit_put(names, [value] * len(names), timeout_s=2.0),
            lambda: store.submit_get(names, [target] * len(names), timeout_s=2.0),
        ):
            before_nbytes = moved_nbytes()
            transfer = submit()
            assert eventually(lambda before_nbytes=before_nbytes: moved_nbytes() > before_nbytes + 2 * MIB)
            server.stop()
            try:
                with ends_within(2.0), pytest.raises(StoreUnavailable):
                    transfer.wait(60)
            finally:
                server.go_on()
            assert eventually(lambda: serves(store, 99))
        assert store.counters()["damaged"] == 0


@pytest.mark.parametrize(
    ("server_of_module", "harm"),
    [("valkey-server", Harm.CLOSE), ("redis-server", Harm.RESET)],
    indirect=["server_of_module"],
    scope="module",
)
@pytest.mark.parametrize("way", Way)
def test_a_connection_that_ends_anywhere(server: TlsServer, way: Way, harm: Harm) -> None:
    direct = server.client
    with proxied(server.tls_port) as proxy:
        url = through(server, proxy.port)
        nbytes = len(said_undisturbed(url, direct, proxy, way))
        chance = random.Random(5)
        # Two handshakes and the batches; the round trip behind them is longer than all that. Signatures differ in
        # length by a byte or two: the end is not the same each time.
        assert nbytes > 100_000
        positions = [*range(8), *sorted(chance.sample(range(8, 15_000), 40)), 50_000]
        disturbed = 0
        for position in positions:
            harmed = proxy.harmed
            proxy.arm(way, position, harm)
            disturbed += Exchange(url, direct).run() != []
            assert proxy.harmed == harmed + 1, f"nothing was harmed at byte {position}"
        assert disturbed > len(positions) // 3
