"""TLS between clients and an index: whom either side trusts, and one line for each way in which it goes wrong."""

from __future__ import annotations

import logging
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest

from kvpool import ConfigError, IndexClient, IndexUnavailable
from kvpool.index.net.tls import ServerTls
from tests.support.credentials import Authority, Pair
from tests.support.deadlines import eventually
from tests.support.fleets import serving

pytestmark = pytest.mark.usefixtures("grpc_started")

WAIT_S = 60
NAMES = ("127.0.0.1", "localhost")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder)


@pytest.fixture(scope="module")
def stranger(folder: Path) -> Authority:
    return Authority(folder, "stranger")


@pytest.fixture(scope="module")
def server(authority: Authority) -> Pair:
    return authority.issue("server", names=NAMES)


def secured(pair: Pair, ca: Authority | None = None) -> Any:
    return serving(tls=ServerTls(str(pair.cert), str(pair.key), str(ca.ca) if ca else ""))


def of(pair: Pair) -> dict[str, str]:
    return {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}


def ask(target: str, **options: Any) -> int:
    with IndexClient(target, WAIT_S, **options) as client:
        return len(client.workers())


def refused(target: str, **options: Any) -> str:
    with pytest.raises(IndexUnavailable) as caught:
        ask(target, **options)
    line = str(caught.value)
    assert "\n" not in line
    assert target in line
    return line


def test_an_index_that_proves_its_name_is_asked(authority: Authority, server: Pair) -> None:
    with secured(server) as served:
        port = served.target.rpartition(":")[2]
        for host in NAMES:
            assert ask(f"{host}:{port}", tls_ca=str(authority.ca)) == 0


def test_an_index_that_does_not_prove_itself_is_not_asked(
    authority: Authority, stranger: Authority, server: Pair
) -> None:
    with secured(server) as served:
        line = refused(served.target, tls_ca=str(stranger.ca))
        assert "its certificate is of no authority in tls_ca" in line
        line = refused(served.target)
        assert "If the index serves TLS, name its authority with tls_ca" in line
    with secured(authority.issue("old", names=NAMES, days=-1)) as served:
        assert "its certificate has expired: renew it" in refused(served.target, tls_ca=str(authority.ca))
    with secured(authority.issue("other", names=("other.invalid",))) as served:
        line = refused(served.target, tls_ca=str(authority.ca))
        assert "its certificate is not for this host" in line


def test_an_index_without_tls_is_not_asked_over_it(authority: Authority) -> None:
    with serving() as served:
        line = refused(served.target, tls_ca=str(authority.ca))
        assert "speaks no TLS: leave tls_ca out" in line


def test_an_index_may_demand_a_certificate(authority: Authority, stranger: Authority, server: Pair) -> None:
    trusted = {"tls_ca": str(authority.ca)}
    with secured(server, authority) as served:
        assert ask(served.target, **trusted, **of(authority.issue("client"))) == 0
        for wrong in (
            {},
            of(stranger.issue("client of another")),
            of(authority.issue("client of old", days=-1)),
        ):
            line = refused(served.target, **trusted, **wrong)
            assert "add tls_cert and tls_key, of an authority that it trusts and not expired" in line


def shown_by(address: str, authority: Authority, client: Pair) -> str:
    """The certificate that a new connection is shown; empty: the caller is refused."""
    trust = ssl.create_default_context(cafile=str(authority.ca))
    trust.set_alpn_protocols(["h2", "http/1.1"])  # gRPC's, which says something first, and HTTP's
    trust.load_cert_chain(client.cert, client.key)
    host, port = address.split(":")
    try:
        with (
            socket.create_connection((host, int(port)), timeout=WAIT_S) as plain,
            trust.wrap_socket(plain, server_hostname=host) as connection,
        ):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
            if not connection.recv(100):
                return ""
            return ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True) or b"")
    except (ssl.SSLError, ConnectionError):
        return ""


@pytest.mark.parametrize("door", ["target", "http"])
def test_renewed_certificates_and_authorities_of_callers_are_used_and_broken_ones_are_not(
    authority: Authority, stranger: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture, door: str
) -> None:
    caplog.set_level(logging.INFO, "kvpool.index")
    first, second = (authority.issue(f"{door}-{number}", names=NAMES) for number in range(2))
    known, unknown = authority.issue("caller"), stranger.issue("caller of another")
    now = tmp_path / "now"
    shown, ca = Pair(now / "shown.crt", now / "shown.key"), now / "ca.crt"

    def show(pair: Pair, callers: Authority) -> None:
        """All three at once, as a mounted secret changes."""
        folder = tmp_path / pair.cert.stem
        folder.mkdir()
        for new, at in ((pair.cert, shown.cert), (pair.key, shown.key), (callers.ca, ca)):
            (folder / at.name).write_bytes(new.read_bytes())
        (tmp_path / "next").symlink_to(folder)
        (tmp_path / "next").replace(now)

    show(first, authority)
    with serving(http=door == "http", tls=ServerTls(str(shown.cert), str(shown.key), str(ca))) as served:
        address = getattr(served, door)
        assert shown_by(address, authority, known) == first.cert.read_text()
        assert shown_by(address, authority, unknown) == ""
        show(second, stranger)
        assert eventually(lambda: shown_by(address, authority, unknown) == second.cert.read_text())
        assert shown_by(address, authority, known) == ""
        shown.cert.write_text("nothing")
        assert eventually(lambda: "the certificate stays as it was" in caplog.text)
        for _ in range(3):
            assert shown_by(address, authority, unknown) == second.cert.read_text()
    said = [message.partition(":")[0] for message in caplog.messages]
    assert said == ["the certificate was read again", "the certificate stays as it was"]
    caplog.clear()  # the error's frames hold the server


def test_files_that_cannot_be_used_are_one_line(authority: Authority, server: Pair, folder: Path) -> None:
    cert, key, ca = str(server.cert), str(server.key), str(authority.ca)
    other = authority.issue("not its own")
    hidden = authority.issue("hidden", passphrase=b"hunter2")
    (folder / "noise").write_bytes(bytes(range(256)))
    noise, nowhere = str(folder / "noise"), str(folder / "nowhere")
    (folder / "huge").write_bytes(bytes(2 << 20))
    for make, says in [
        (lambda: ServerTls(nowhere, key), f"--tls-cert {nowhere}: No such file"),
        (lambda: ServerTls(cert, nowhere), f"--tls-key {nowhere}: No such file"),
        (lambda: ServerTls(cert, str(folder)), f"--tls-key {folder}: Is a directory"),
        (lambda: ServerTls(cert, key, nowhere), f"--tls-client-ca {nowhere}: No such file"),
        (lambda: ServerTls(cert, str(other.key)), "not a certificate and its own private key"),
        (lambda: ServerTls(str(hidden.cert), str(hidden.key)), "without a passphrase"),
        (lambda: ServerTls(noise, key), "not a certificate and its own private key"),
        (lambda: ServerTls(cert, key, noise), f"--tls-client-ca {noise}: holds no certificate in PEM"),
        (lambda: ServerTls(str(folder / "huge"), key), "it is larger than 1048576 bytes"),
        (lambda: IndexClient("h:1", tls_ca=nowhere), f"tls_ca {nowhere}: No such file"),
        (lambda: IndexClient("h:1", tls_ca=noise), f"tls_ca {noise}: holds no certificate in PEM"),
        (lambda: IndexClient("h:1", tls_ca=ca, tls_cert=cert), "tls_cert and tls_key go together"),
        (lambda: IndexClient("h:1", tls_cert=cert, tls_key=key), "tls_cert needs tls_ca"),
        (
            lambda: IndexClient("h:1", tls_ca=ca, tls_cert=cert, tls_key=noise),
            "not a certificate and its own",
        ),
    ]:
        with pytest.raises(ConfigError) as caught:
            make()
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)
