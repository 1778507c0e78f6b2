"""Servers under TLS: the conformance kit, whom the store trusts, what it says when it does not, and faults.

Over 400 lines because one authority signs all that these tests refuse and accept.
"""

from __future__ import annotations

import contextlib
import gc
import random
import re
import socket
import ssl
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
from kvpool.store import Store, StoreURL
from kvpool.store.server.connection import _under_tls, connect
from kvpool.store.tls import Tls
from tests.support.conformance import MIB, LightConformance, ServerConformance, key, keys, payload
from tests.support.credentials import Authority, Pair
from tests.support.deadlines import MARGIN_S, ends_within, eventually
from tests.support.exchange import Exchange
from tests.support.proxy import Harm, Way, proxied
from tests.support.servers import CLIENTS, ON_REDIS, ON_VALKEY, SERVERS, TlsServer, started, with_client
from tests.support.store_traffic import Traffic, serves

SIZES = [1, 127, 128, 129, 4095, 4096, 4224, 16383, 16384, 16385, 65536, 262145, 2 * MIB, 4 * MIB]


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


@pytest.mark.parametrize("version", ["TLSv1.2", "TLSv1.3"])
def test_values_of_all_sizes(server: TlsServer, version: str) -> None:
    server.client.config_set("tls-protocols", version)
    values = [payload(nbytes, nbytes) for nbytes in SIZES] * 2
    order = list(range(len(values)))
    random.Random(1).shuffle(order)
    targets = [bytearray(len(values[number])) for number in order]
    try:
        with open_store(server.url) as store:
            assert all(store.put_many(keys(len(values)), values))
            assert all(store.get_many_into([key(number) for number in order], targets))
            assert targets == [values[number] for number in order]
            assert store.counters()["damaged"] == 0
            assert store.counters()["disconnections"] == 0
    finally:
        server.client.config_set("tls-protocols", "")


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
        f"ca={tmp_path}": f"{tmp_path}: the file of authorities cannot be used: ",
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


@ON_VALKEY
@pytest.mark.parametrize("nbytes", [3, 400])
@pytest.mark.parametrize("way", Way)
def test_a_handshake_that_falls_silent(server: TlsServer, way: Way, nbytes: int) -> None:
    with proxied(server.tls_port) as proxy, open_store(through(server, proxy.port)) as store:
        assert serves(store)
        proxy.arm(way, nbytes, Harm.SILENCE)
        server.client.client_kill_filter(_type="normal", skipme=True)
        assert eventually(lambda: serves(store) and proxy.harmed == 1)
        assert store.counters()["damaged"] == 0


def test_a_server_that_is_killed_in_the_middle(authority: Authority, tmp_path: Path, client: str) -> None:
    name = SERVERS[CLIENTS.index(client) % 2]
    with (
        started(TlsServer(name, tmp_path, authority)) as server,
        open_store(with_client(server.url, client)) as store,
        Traffic(store, timeout_s=2.0) as traffic,
    ):
        for _ in range(2):
            server.kill()
            assert eventually(lambda: traffic.faults > 50)
            seen = traffic.hits
            server.start()
            assert eventually(lambda seen=seen: traffic.hits > seen + 20)
            traffic.faults = 0
        assert traffic.longest_s < 2.0 + MARGIN_S
        assert store.counters()["damaged"] == 0


def test_a_connection_that_is_reset_before_its_handshake_leaves_no_socket() -> None:
    """A socket that nobody closes is a warning, which fails a test."""
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as ends:
        plain = ends.enter_context(socket.create_connection(listener.getsockname()))
        accepted, _ = listener.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()
        with pytest.raises(ConnectionResetError):
            _under_tls(plain, Tls(), "127.0.0.1", time.monotonic() + 5)
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
        assert Exchange(url, direct).run() == []
        nbytes = len(proxy.passed(way))
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


@pytest.mark.parametrize("verb", ["get", "put"])
def test_a_byte_that_was_changed_is_a_fault_and_never_data(server: TlsServer, verb: str) -> None:
    """Where the length of a record was changed, one side waits for the rest: that ends with the deadline."""
    value = payload(1, 60_000)
    chance = random.Random(7)
    for position in [*range(1, 6), *sorted(chance.sample(range(6, 60_000), 25))]:
        target = bytearray(len(value))
        with proxied(server.tls_port) as proxy, open_store(through(server, proxy.port)) as store:
            assert serves(store)
            if verb == "get":
                assert store.put_many([key(0)], [value]) == [True]
            proxy.arm(Way.ANSWERED if verb == "get" else Way.ASKED, position, Harm.FLIP)
            move = store.submit_get if verb == "get" else store.submit_put
            with pytest.raises(StoreUnavailable):
                move([key(0)], [target if verb == "get" else value], timeout_s=0.3).wait()
            assert proxy.harmed == 1
            assert eventually(lambda store=store: serves(store))
            assert store.get_many_into([key(0)], [target]) == [verb == "get"]
            assert store.counters()["damaged"] == 0


def test_connections_that_are_cut_under_traffic(server: TlsServer) -> None:
    chance = random.Random(3)
    with (
        proxied(server.tls_port) as proxy,
        open_store(through(server, proxy.port, connections=2)) as store,
        Traffic(store, timeout_s=5.0) as traffic,
    ):
        for number in range(30):
            seen = traffic.hits
            harm = chance.choice([Harm.CLOSE, Harm.RESET, Harm.FLIP])
            proxy.arm(chance.choice(list(Way)), chance.randrange(1, 3 * MIB), harm)
            assert eventually(lambda number=number: proxy.harmed == number + 1)
            assert eventually(lambda seen=seen: traffic.hits > seen)
        assert store.counters()["damaged"] == 0
        assert eventually(lambda: serves(store))


def test_a_reply_too_many_in_the_same_record_is_not_taken_for_another(authority: Authority) -> None:
    """poll() does not show it: OpenSSL has it already."""
    with _Talker(authority) as talker, open_store(talker.url) as store:
        assert store.contains_many([key(1)]) == [False]
        talker.surplus = b":1\r\n"
        assert store.contains_many([key(1)]) == [False]
        assert eventually(lambda: store.counters()["disconnections"] == 1)
        assert eventually(lambda: _asked(store) == [False])


def _asked(store: Store) -> list[bool] | None:
    with contextlib.suppress(StoreUnavailable):
        return store.contains_many([key(1)])
    return None


class _Talker:
    """A server under TLS that has nothing, and once answers with ``surplus`` behind its reply, in one record.

    ``surplus``: the test writes it, the thread of one connection takes it.
    """

    def __init__(self, authority: Authority) -> None:
        pair = authority.issue("talker", names=("127.0.0.1",))
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(pair.cert, pair.key)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"valkeys://127.0.0.1:{self._listener.getsockname()[1]}?ca={authority.ca}&connections=1"
        self.surplus = b""
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> _Talker:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(peer,))
                self._threads.append(thread)
                thread.start()

    def _serve(self, plain: socket.socket) -> None:
        with plain, contextlib.suppress(OSError), self._context.wrap_socket(plain, server_side=True) as peer:
            while asked := peer.recv(1 << 16):
                if (
                    b"EXISTS" not in asked or b"MULTI" in asked
                ):  # as a connection begins, and the look at rights
                    peer.sendall(b"+OK\r\n" * asked.count(b"*"))
                else:
                    surplus, self.surplus = self.surplus, b""
                    peer.sendall(b":0\r\n" * asked.count(b"EXISTS") + surplus)
