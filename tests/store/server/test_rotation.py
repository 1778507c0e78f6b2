"""Certificates and passwords that are replaced while a store is open: the next dial uses the new ones."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kvpool import open_store
from kvpool.cli.doctor.server import server_findings
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.store import StoreURL
from kvpool.store.store import Store
from tests.support.credentials import Authority
from tests.support.deadlines import eventually
from tests.support.servers import CLIENTS, SERVERS, Server, TlsServer, started, with_client
from tests.support.store_traffic import serves


def announces(store: Store) -> bool:
    try:
        store.announce("kvpool:t:x", b"document", lease_s=60)
        return store.announcements("kvpool:t:") == {"kvpool:t:x": b"document"}
    except StoreUnavailable:
        return False


def cut(server: Server) -> None:
    """End all connections but the test's own: each client has to dial."""
    server.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")  # type: ignore[no-untyped-call]


def test_files_of_tls_are_replaced_one_by_one(tmp_path: Path, client: str) -> None:
    """Authority, certificate and key: at times they do not fit each other."""
    mounted = {name: tmp_path / f"{name}.pem" for name in ("ca", "cert", "key")}
    authorities = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        authorities.append(Authority(tmp_path / name))

    def mount(authority: Authority) -> None:
        pair = authority.issue("worker")
        for name, path in {"ca": authority.ca, "cert": pair.cert, "key": pair.key}.items():
            shutil.copy(path, mounted[name])

    mount(authorities[0])
    (tmp_path / "server").mkdir()
    name = SERVERS[CLIENTS.index(client) % 2]
    server = TlsServer(name, tmp_path / "server", authorities[0], demands_certificate=True)
    query = "&".join(f"{name}={path}" for name, path in mounted.items())
    url = with_client(f"valkeys://127.0.0.1:{server.tls_port}?{query}", client)
    with started(server), open_store(url) as store:
        assert serves(store)
        assert announces(store)
        pair = authorities[1].issue("server", names=("127.0.0.1",))
        server.client.execute_command(  # type: ignore[no-untyped-call]
            "CONFIG", "SET", "tls-cert-file", str(pair.cert), "tls-key-file", str(pair.key),
            "tls-ca-cert-file", str(authorities[1].ca),
        )  # fmt: skip
        cut(server)
        assert eventually(lambda: not serves(store))
        mount(authorities[1])
        assert eventually(lambda: serves(store))
        assert eventually(lambda: announces(store))


def test_a_password_is_replaced_as_kubernetes_mounts_secrets(
    own_server: Server, tmp_path: Path, client: str
) -> None:
    """The file is behind a link that points to another folder from one moment to the next."""
    server = own_server

    def mount(password: str) -> None:
        folder = tmp_path / password
        folder.mkdir()
        (folder / "password").write_text(f"{password}\n")
        (tmp_path / "new").symlink_to(folder)
        os.replace(tmp_path / "new", tmp_path / "data")  # noqa: PTH105

    def allow(password: str) -> None:
        server.client.acl_setuser(
            "worker", enabled=True, reset_passwords=True, passwords=[f"+{password}"], keys=["*"],
            channels=["*"], commands=["+@all"],
        )  # fmt: skip

    allow("hunter2")
    mount("hunter2")
    plain = f"valkey://worker@127.0.0.1:{server.port}?password_file={tmp_path}/data/password"
    with open_store(with_client(plain, client)) as store:
        assert serves(store)
        assert announces(store)
        allow("hunter3")
        cut(server)
        assert eventually(lambda: not serves(store))
        mount("hunter3")
        assert eventually(lambda: serves(store))
        assert eventually(lambda: announces(store))
        assert "hunter" not in repr(store)
        assert store.server_run_id()
    assert "it does not answer" not in str(server_findings(StoreURL.parse(plain)))


def test_a_wrong_or_missing_password_is_no_start(own_server: Server, tmp_path: Path, client: str) -> None:
    own_server.client.config_set("requirepass", "hunter2")
    file = tmp_path / "password"
    url = with_client(f"valkey://127.0.0.1:{own_server.port}?password_file={file}", client)
    for content, words in {None: "No such file", "\n": "holds no password", "other": "refuses: "}.items():
        if content is not None:
            file.write_text(content)
        with pytest.raises(ConfigError, match=words):
            open_store(url)
