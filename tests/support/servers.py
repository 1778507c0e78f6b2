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

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from demo.engine_process import free_ports
from kvpool.store import Store
from kvpool.store.valkey import ValkeyStore
from tests.support.credentials import Authority, Pair
from tests.support.deadlines import eventually

FOLDER = Path(__file__).parents[2] / ".cache" / "servers" / "bin"
SERVERS = ("redis-server", "valkey-server")
NEWER = ("redis-server-8", "valkey-server-9")  # for tests of what differs between versions, and of no TLS
CLIENTS = ("native", "redis", "glide")

PROCESSES = 8  # of pytest, at most, at a time
_process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % PROCESSES
_given: set[int] = set()

# For tests, and for classes of them, that need no more than one: of what a module shares.
ON_REDIS, ON_VALKEY = (pytest.mark.parametrize("server_of_module", [name], indirect=True) for name in SERVERS)


def with_client(url: str, client: str) -> str:
    """``url``, opened by this one of ``CLIENTS``."""
    if client == "native":
        return url
    return f"{url}{'&' if '?' in url else '?'}client={client}"


def is_native(store: Store) -> bool:
    """Whether the native client moves the values of this store on a server."""
    return isinstance(store, ValkeyStore) and store._url.client == "native"


def find(name: str) -> str:
    """The server's program: what the environment names, what scripts/servers found, or what is on the PATH."""
    named: str | None = (
        os.environ.get(name.upper().replace("-", "_")) or shutil.which(FOLDER / name) or shutil.which(name)
    )
    assert named, f"there is no {name}: scripts/servers .cache/servers finds or fetches it"
    return named


def own_port() -> int:
    """A free TCP port that no server of this or another test process was given: until one listens, it stays free."""
    while True:
        for port in free_ports(2 * PROCESSES):
            if port % PROCESSES == _process and port not in _given:
                _given.add(port)
                return port


class Server:
    """One running server. ``client`` is for the test's own questions."""

    def __init__(self, name: str, folder: Path, *options: str) -> None:
        self.name, self.folder, self.options = name, folder, options
        self.port = own_port()
        self.socket_path = folder / "socket"
        self.client = redis.Redis(port=self.port, protocol=2, socket_timeout=60, retry=Retry(NoBackoff(), 0))
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

    def knows(self, command: str) -> bool:
        """Whether it has this command, or one behind a bar: versions differ."""
        told = self.client.execute_command("COMMAND INFO", command)  # one word: redis-py has no parser for it
        return bool(told[0])

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
_AnyGroup = TypeVar("_AnyGroup", bound="Group")
PRIMARIES = 3  # of a cluster


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
        self.tls_port = own_port()
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


class Group:
    """Servers that belong together, ``servers``: started when it is made, killed at the end of its ``with`` block."""

    def __init__(self) -> None:
        self.servers: list[Server] = []
        try:
            self._start()
        except BaseException:
            self.kill()
            raise

    def _start(self) -> None:
        """Make, start and join them; each is in ``servers`` before it is started."""
        raise NotImplementedError

    def kill(self) -> None:
        for server in self.servers:
            server.kill()

    def __enter__(self: _AnyGroup) -> _AnyGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Cluster(Group):
    """Three primaries that share the slots, each with ``replicas`` replicas.

    ``authority``: signs certificates for nodes that speak TLS, to each other too; None: no TLS.
    """

    def __init__(
        self, name: str, folder: Path, *, replicas: int = 0, authority: Authority | None = None
    ) -> None:
        self._replicas, self._authority = replicas, authority
        self._folder, self._name = folder, name
        super().__init__()

    @property
    def url(self) -> str:
        if self._authority is None:
            return "valkey+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers)
        nodes = ",".join(f"127.0.0.1:{port_of(server)}" for server in self.servers)
        return f"valkey+cluster://{nodes}?tls=true&ca={self._authority.ca}"

    def _start(self) -> None:
        for number in range(PRIMARIES * (1 + self._replicas)):
            self.servers.append(self._make(number))
        for server in self.servers:
            server.start()
        self._join()

    def _make(self, number: int) -> Server:
        folder = self._folder / str(number)
        folder.mkdir()
        bus_port = own_port()
        options = (
            "--cluster-enabled", "yes", "--cluster-port", str(bus_port),
            # Soon enough to wait for where a replica may take over; else nobody is given up on a busy machine.
            "--cluster-node-timeout", "1000" if self._replicas else "15000", "--cluster-require-full-coverage", "no",
            "--repl-diskless-sync-delay", "0", "--cluster-allow-replica-migration", "no",
        )  # fmt: skip
        if self._authority is not None:
            return TlsServer(self._name, folder, self._authority, "--tls-cluster", "yes", *options)
        return Server(self._name, folder, *options)

    def _join(self) -> None:
        first = self.servers[0]
        ids = [server.client.execute_command("CLUSTER MYID") for server in self.servers]
        for number, server in enumerate(self.servers):
            server.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for server in self.servers[1:]:
            bus_port = server.client.config_get("cluster-port")["cluster-port"]
            first.client.execute_command("CLUSTER", "MEET", "127.0.0.1", port_of(server), bus_port)
        step = 16384 // PRIMARIES
        for number, server in enumerate(self.servers[:PRIMARIES]):
            last = 16383 if number == PRIMARIES - 1 else (number + 1) * step - 1
            server.client.execute_command("CLUSTER", "ADDSLOTSRANGE", number * step, last)
        assert eventually(lambda: all(self._knows(server) == len(ids) for server in self.servers))
        for number, server in enumerate(self.servers[PRIMARIES:]):
            primary_id = ids[number % PRIMARIES]
            assert eventually(lambda s=server, p=primary_id: self._replicates(s, p))
        assert eventually(lambda: all(self.is_well(server) for server in self.servers))
        replicating = self.servers[PRIMARIES:]
        assert eventually(lambda: all(server.info("master_link_status") == "up" for server in replicating))

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
        for server in (to, *self.servers[:PRIMARIES]):
            server.client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", to_id)


class Watched(Group):
    """A primary with a replica, and three sentinels that watch it as ``pool``.

    ``authority``: signs certificates for all five, which speak TLS to each other too; None: no TLS.
    """

    SERVICE = "pool"

    def __init__(self, name: str, folder: Path, *, authority: Authority | None = None) -> None:
        self._name, self._folder, self._authority = name, folder, authority
        super().__init__()

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{port_of(one)}" for one in self.sentinels)
        tls = f"?tls=true&ca={self._authority.ca}" if self._authority else ""
        return f"valkey+sentinel://{hosts}/{self.SERVICE}{tls}"

    @property
    def sentinels(self) -> list[Server]:
        return self.servers[2:]

    def _start(self) -> None:
        self.primary = self._made("primary")
        self.primary.start()
        follow = ("--replicaof", f"127.0.0.1 {port_of(self.primary)}", "--repl-diskless-sync-delay", "0")
        self.replica = self._made("replica", *follow)
        self.replica.start()
        assert eventually(lambda: self.replica.info("master_link_status") == "up")
        for number in range(3):
            self._watch(f"sentinel-{number}")
        assert eventually(lambda: all(self._agrees(one) for one in self.sentinels))

    def _made(self, role: str, *options: str) -> Server:
        """A server, or a sentinel if its role begins so, with a folder of its own."""
        folder = self._folder / role
        folder.mkdir()
        sentinel = role.startswith("sentinel")
        if self._authority is None:
            server = (Sentinel if sentinel else Server)(self._name, folder, *options)
        else:
            options = ("--tls-replication", "yes", *options)
            server = (TlsSentinel if sentinel else TlsServer)(self._name, folder, self._authority, *options)
        self.servers.append(server)
        return server

    def _watch(self, role: str) -> None:
        sentinel = self._made(role)
        (sentinel.folder / "sentinel.conf").write_text(
            f"sentinel monitor {self.SERVICE} 127.0.0.1 {port_of(self.primary)} 2\n"
            f"sentinel down-after-milliseconds {self.SERVICE} 60000\n"
            f"sentinel failover-timeout {self.SERVICE} 10000\n"
        )
        sentinel.start()
        # Sooner than by default, so that a failover takes 3 s and not 20. TILT begins when a busy machine holds a
        # sentinel up for 2 s, which then does nothing, by default for 30 s.
        pace = {"info-period": 1000, "publish-period": 200, "ask-period": 100, "tilt-period": 1000}
        sentinel.client.execute_command("SENTINEL", "DEBUG", *(word for one in pace.items() for word in one))

    def kill_primary(self) -> None:
        """From now on its sentinels miss it after a second. Before, they give nobody up on a busy machine."""
        self.primary.kill()
        for one in self.sentinels:
            one.client.execute_command("SENTINEL", "SET", self.SERVICE, "down-after-milliseconds", 1000)

    def _agrees(self, sentinel: Server) -> bool:
        state = sentinel.client.execute_command("SENTINEL MASTER", self.SERVICE)
        return bool(state["num-other-sentinels"] == 2 and state["num-slaves"] == 1)


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
