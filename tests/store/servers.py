"""Real Redis and Valkey servers for a test: started on a free port, killed at its end.

``scripts/servers`` finds or fetches them (``make test`` runs it).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvpool.cli.engine_process import free_ports
from tests.conftest import eventually
from tests.store.certificates import Authority, Pair

FOLDER = Path(__file__).parents[2] / ".cache" / "servers" / "bin"
SERVERS = ("redis-server", "valkey-server")
CLIENTS = ("native", "redis", "glide")


def with_client(url: str, client: str) -> str:
    """``url``, opened by this one of ``CLIENTS``."""
    if client == "native":
        return url
    return f"{url}{'&' if '?' in url else '?'}client={client}"


def find(name: str) -> str:
    """The server's program: what the environment names, what scripts/servers found, or what is on the PATH."""
    named: str | None = (
        os.environ.get(name.upper().replace("-", "_")) or shutil.which(FOLDER / name) or shutil.which(name)
    )
    assert named, f"there is no {name}: scripts/servers .cache/servers finds or fetches it"
    return named


class Server:
    """One running server. ``client`` is for the test's own questions."""

    def __init__(self, name: str, folder: Path, *options: str) -> None:
        self.name, self.folder, self.options = name, folder, options
        (self.port,) = free_ports(1)
        self.socket_path = folder / "socket"
        self.client = redis.Redis(port=self.port, protocol=2, socket_timeout=10, retry=Retry(NoBackoff(), 0))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        return [find(self.name), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
                   "--appendonly", "no", "--dir", str(self.folder), "--unixsocket", str(self.socket_path),
                   "--logfile", str(self.folder / "log"), *self.options]  # fmt: skip

    def start(self) -> None:
        assert self._process is None
        self._process = subprocess.Popen(self.command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        assert eventually(self._answers), (self.folder / "log").read_text()[-2000:]

    def kill(self) -> None:
        """End it without a chance to say goodbye."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self.client.connection_pool.disconnect()

    def stop(self) -> None:
        """Freeze it: its sockets stay open, and nobody answers."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def info(self, name: str) -> Any:
        return self.client.info()[name]

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "log").read_text()[-2000:]
        try:
            return bool(self.client.ping())
        except (redis.exceptions.AuthenticationError, redis.exceptions.BusyLoadingError):
            return True
        except redis.RedisError:
            return False


_AnyServer = TypeVar("_AnyServer", bound=Server)


class TlsServer(Server):
    """One that speaks TLS on ``tls_port``, and in plain to the test's own ``client``.

    ``pair``: its certificate; None: one for localhost and 127.0.0.1. ``demands_certificate``: of its clients.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        authority: Authority,
        *options: str,
        pair: Pair | None = None,
        demands_certificate: bool = False,
    ) -> None:
        self.authority = authority
        self.pair = pair or authority.issue("server", names=("localhost", "127.0.0.1"))
        (self.tls_port,) = free_ports(1)
        super().__init__(
            name, folder, "--tls-port", str(self.tls_port), "--tls-cert-file", str(self.pair.cert),
            "--tls-key-file", str(self.pair.key), "--tls-ca-cert-file", str(authority.ca),
            "--tls-auth-clients", "yes" if demands_certificate else "no", *options,
        )  # fmt: skip

    @property
    def url(self) -> str:
        return self.url_at(self.tls_port)

    def url_at(self, port: int, host: str = "127.0.0.1", userinfo: str = "", path: str = "") -> str:
        return f"valkeys://{userinfo}{host}:{port}{path}?ca={self.authority.ca}"


@contextmanager
def running(name: str, folder: Path, *options: str) -> Iterator[Server]:
    """A server of this name with its files in ``folder``, until the end of the block."""
    with started(Server(name, folder, *options)) as server:
        yield server


@contextmanager
def started(server: _AnyServer) -> Iterator[_AnyServer]:
    """The server runs until the end of the block."""
    try:
        server.start()
        yield server
    finally:
        server.kill()


class Cluster:
    """Primaries that share the slots, each with ``replicas`` replicas; started and joined when it is made.

    ``authority``: signs certificates for nodes that speak TLS, to each other too; None: no TLS.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        primaries: int = 3,
        replicas: int = 0,
        authority: Authority | None = None,
    ) -> None:
        self.primaries, self._authority = primaries, authority
        self.servers: list[Server] = []
        self._folder, self._name = folder, name
        for number in range(primaries * (1 + replicas)):
            self.servers.append(self._make(number))
        try:
            for server in self.servers:
                server.start()
            self._join(replicas)
        except BaseException:
            self.kill()
            raise

    @property
    def url(self) -> str:
        if self._authority is None:
            return "valkey+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers)
        nodes = ",".join(f"127.0.0.1:{port_of(server)}" for server in self.servers)
        return f"valkey+cluster://{nodes}?tls=true&ca={self._authority.ca}"

    def _make(self, number: int) -> Server:
        folder = self._folder / str(number)
        folder.mkdir()
        (bus_port,) = free_ports(1)
        options = (
            "--cluster-enabled", "yes", "--cluster-port", str(bus_port),
            "--cluster-node-timeout", "1000", "--cluster-require-full-coverage", "no",
            "--repl-diskless-sync-delay", "0", "--cluster-allow-replica-migration", "no",
        )  # fmt: skip
        if self._authority is not None:
            return TlsServer(self._name, folder, self._authority, "--tls-cluster", "yes", *options)
        return Server(self._name, folder, *options)

    def _join(self, replicas: int) -> None:
        first = self.servers[0]
        ids = [server.client.execute_command("CLUSTER MYID") for server in self.servers]
        for number, server in enumerate(self.servers):
            server.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for server in self.servers[1:]:
            bus_port = server.client.config_get("cluster-port")["cluster-port"]
            first.client.execute_command("CLUSTER", "MEET", "127.0.0.1", port_of(server), bus_port)
        step = 16384 // self.primaries
        for number, server in enumerate(self.servers[: self.primaries]):
            last = 16383 if number == self.primaries - 1 else (number + 1) * step - 1
            server.client.execute_command("CLUSTER", "ADDSLOTSRANGE", number * step, last)
        assert eventually(
            lambda: all(self._knows(server) == len(ids) for server in self.servers), within_s=30
        )
        for number, server in enumerate(self.servers[self.primaries :]):
            assert eventually(lambda s=server, n=number: self._replicates(s, ids[n % self.primaries]))
        assert eventually(lambda: all(self.is_well(server) for server in self.servers), within_s=30)
        replicating = self.servers[self.primaries :]
        assert eventually(
            lambda: all(server.info("master_link_status") == "up" for server in replicating), within_s=30
        )

    def _knows(self, server: Server) -> int:
        return len(server.client.execute_command("CLUSTER NODES"))

    def _replicates(self, server: Server, primary_id: bytes) -> bool:
        try:
            server.client.execute_command("CLUSTER", "REPLICATE", primary_id)
        except redis.ResponseError:  # it has not heard of it yet
            return False
        return True

    def is_well(self, server: Server) -> bool:
        info = server.client.execute_command("CLUSTER INFO")
        return bool(info["cluster_state"] == "ok" and int(info["cluster_slots_ok"]) == 16384)

    def holder(self, slot: int) -> Server:
        """The primary of this slot, as the first server that answers sees it."""
        for server in self.servers:
            with contextlib.suppress(redis.RedisError):
                for first, last, primary, *_ in server.client.execute_command("CLUSTER SLOTS"):
                    if first <= slot <= last:
                        return next(one for one in self.servers if one.port == primary[1])
        raise AssertionError(f"nobody holds slot {slot}")

    def begin_move(self, slot: int, to: Server) -> Server:
        """From now on keys of ``slot`` that are not on its server are asked for at ``to``; the server."""
        giver = self.holder(slot)
        giver_id, to_id = (one.client.execute_command("CLUSTER MYID").decode() for one in (giver, to))
        to.client.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", giver_id)
        giver.client.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", to_id)
        return giver

    def move_keys(self, slot: int, giver: Server, to: Server) -> None:
        while keys := giver.client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
            giver.client.execute_command("MIGRATE", "127.0.0.1", port_of(to), "", 0, 5000, "KEYS", *keys)

    def end_move(self, slot: int, to: Server) -> None:
        to_id = to.client.execute_command("CLUSTER MYID").decode()
        for server in (to, *self.servers[: self.primaries]):
            server.client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", to_id)

    def kill(self) -> None:
        for server in self.servers:
            server.kill()


class Watched:
    """A primary with a replica, and three sentinels that watch it as ``pool``.

    ``authority``: signs certificates for all five, which speak TLS to each other too; None: no TLS.
    """

    SERVICE = "pool"

    def __init__(self, name: str, folder: Path, *, authority: Authority | None = None) -> None:
        self.sentinels: list[Server] = []
        self._authority = authority
        folders = [folder / one for one in ("primary", "replica", "sentinel-0", "sentinel-1", "sentinel-2")]
        for one in folders:
            one.mkdir()
        self.primary = self._server(name, folders[0])
        self.replica = self._server(
            name,
            folders[1],
            "--replicaof",
            f"127.0.0.1 {port_of(self.primary)}",
            "--repl-diskless-sync-delay",
            "0",
        )
        try:
            self.primary.start()
            self.replica.start()
            assert eventually(lambda: self.replica.info("master_link_status") == "up", within_s=30)
            for one in folders[2:]:
                self.sentinels.append(self._watch(name, one))
            assert eventually(lambda: all(self._agrees(one) for one in self.sentinels), within_s=30)
        except BaseException:
            self.kill()
            raise

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{port_of(one)}" for one in self.sentinels)
        tls = f"?tls=true&ca={self._authority.ca}" if self._authority else ""
        return f"valkey+sentinel://{hosts}/{self.SERVICE}{tls}"

    def _server(self, name: str, folder: Path, *options: str) -> Server:
        if self._authority is None:
            return Server(name, folder, *options)
        return TlsServer(name, folder, self._authority, "--tls-replication", "yes", *options)

    def _watch(self, name: str, folder: Path) -> Server:
        settings = folder / "sentinel.conf"
        settings.write_text(
            f"sentinel monitor {self.SERVICE} 127.0.0.1 {port_of(self.primary)} 2\n"
            f"sentinel down-after-milliseconds {self.SERVICE} 1000\n"
            f"sentinel failover-timeout {self.SERVICE} 10000\n"
        )
        sentinel: Server
        if self._authority is None:
            sentinel = Sentinel(name, folder)
        else:
            sentinel = TlsSentinel(name, folder, self._authority, "--tls-replication", "yes")
        sentinel.start()
        return sentinel

    def _agrees(self, sentinel: Server) -> bool:
        state = sentinel.client.execute_command("SENTINEL MASTER", self.SERVICE)
        return bool(state["num-other-sentinels"] == 2 and state["num-slaves"] == 1)

    def kill(self) -> None:
        for server in (*self.sentinels, self.primary, self.replica):
            server.kill()


class Sentinel(Server):
    """One sentinel, by the ``sentinel.conf`` in its folder."""

    def command(self) -> list[str]:
        return [find(self.name), str(self.folder / "sentinel.conf"), "--sentinel", "--port", str(self.port),
                "--bind", "127.0.0.1", "--dir", str(self.folder),
                "--logfile", str(self.folder / "log"), *self.options]  # fmt: skip


class TlsSentinel(TlsServer, Sentinel):
    """One that speaks TLS on ``tls_port``, and in plain to the test's own ``client``."""


def port_of(server: Server) -> int:
    """Where clients and other servers find it."""
    return server.tls_port if isinstance(server, TlsServer) else server.port
