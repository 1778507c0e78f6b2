"""Networks that fail: a server in a network of its own, whose packets can be dropped, an address that drops them, and
resolvers whose names hang or lead there first.

The first needs root, and a kernel that has network namespaces and iptables; ``missing`` says what is not there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvpool.index.net.resolver import Addresses, Resolver, Unresolved
from tests.support.deadlines import eventually
from tests.support.servers import find

PORT = 6379
_TIMEOUT_S = 60.0


class Distant:
    """A running server at ``host``:``PORT``; between it and us are a pair of interfaces and its own packet filter."""

    def __init__(self, name: str, folder: Path, namespace: str, host: str) -> None:
        self._name, self._folder, self._namespace, self.host = name, folder, namespace, host
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"valkey://{host}:{PORT}"

    def start(self) -> None:
        command = [find(self._name), "--port", str(PORT), "--bind", self.host, "--protected-mode", "no",
                   "--save", "", "--dir", str(self._folder)]  # fmt: skip
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", self._namespace, *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        assert eventually(self._answers)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()  # ip has become the server
            self._process.wait()
            self._process = None

    def drop_packets(self) -> None:
        for chain in ("INPUT", "OUTPUT"):
            _run("ip", "netns", "exec", self._namespace, "iptables", "-w", "-I", chain, "-j", "DROP")

    def pass_packets(self) -> None:
        _run("ip", "netns", "exec", self._namespace, "iptables", "-w", "-F")

    def _answers(self) -> bool:
        with (
            contextlib.suppress(redis.RedisError),
            redis.Redis(self.host, PORT, socket_timeout=1, retry=Retry(NoBackoff(), 0)) as asking,
        ):
            return bool(asking.ping())
        return False


@functools.cache
def missing() -> str:
    """Why no such network can be made here; empty when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "iptables"):
        if shutil.which(tool) is None:
            return f"there is no {tool} (Debian: iproute2, iptables)"
    try:
        with _network() as (namespace, _):
            _run("ip", "netns", "exec", namespace, "iptables", "-w", "-I", "INPUT", "-j", "DROP")
    except subprocess.CalledProcessError as error:
        return f"not permitted here: {error.stderr.decode(errors='replace').strip():.200}"
    return ""


@contextmanager
def distant(name: str, folder: Path) -> Iterator[Distant]:
    """A server of this name in a network of its own, until the end of the block."""
    with _network() as (namespace, host):
        server = Distant(name, folder, namespace, host)
        try:
            server.start()
            yield server
        finally:
            server.kill()


@contextmanager
def _network() -> Iterator[tuple[str, str]]:
    """A namespace, and its address as seen from here."""
    # One a process: tests of several processes may run at once.
    pid = os.getpid()
    namespace, outer, inner = f"kvpool-{pid}", f"kvp{pid}a", f"kvp{pid}b"
    prefix = f"10.{200 + pid // 64 // 256 % 50}.{pid // 64 % 256}"
    first = pid % 64 * 4
    _run("ip", "netns", "add", namespace)
    try:
        _run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", namespace)
        _run("ip", "address", "add", f"{prefix}.{first + 1}/30", "dev", outer)
        _run("ip", "link", "set", outer, "up")
        _run("ip", "-n", namespace, "address", "add", f"{prefix}.{first + 2}/30", "dev", inner)
        _run("ip", "-n", namespace, "link", "set", inner, "up")
        yield namespace, f"{prefix}.{first + 2}"
    finally:
        # The interfaces go with the namespace once nothing uses it; said here, they go at once.
        subprocess.run(["ip", "link", "delete", outer], capture_output=True, timeout=_TIMEOUT_S)
        _run("ip", "netns", "delete", namespace)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)


SILENT = "127.0.0.2"


@contextmanager
def silent(port: int) -> Iterator[None]:
    """``SILENT``:``port`` answers no connect: its listener takes one connection, and has it."""
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(socket.create_server((SILENT, port), backlog=0))
        for _ in range(3):
            filler = sockets.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield


def two_addresses(host: str, port: Any = 0, *_: Any, **__: Any) -> list[Any]:
    """In the place of the system's resolver: each host is ``SILENT`` first, and then this one."""
    return [
        (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port))
        for address in (SILENT, "127.0.0.1")
    ]


WITHIN_S = 60.0


class Names:
    """In the place of the system's resolver: names that begin with "hang" have no answer until ``go_on``."""

    def __init__(self) -> None:
        self.known = {"a.test": "127.0.0.1"}
        self.asked: list[str] = []
        self.go_on = threading.Event()
        self._lock = threading.Lock()

    def getaddrinfo(self, host: str, *_: Any, **__: Any) -> list[Any]:
        with self._lock:
            self.asked.append(host)
        if host.startswith("hang"):
            assert self.go_on.wait(WITHIN_S)
        if host not in self.known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (self.known[host], 0))]


class KnownNames(Resolver):
    """Knows names; others have no address, or hang. ``asked``: how often it was."""

    def __init__(self, *hanging: str, **known: str) -> None:
        super().__init__()
        self.known, self.asked = known, 0
        self.hanging: dict[str, Future[Addresses]] = {name: Future() for name in hanging}

    def resolve(self, host: str, owner: str = "", port: int = 0) -> Future[Addresses]:
        self.asked += 1
        if host in self.hanging:
            return self.hanging[host]
        found: Future[Addresses] = Future()
        if host in self.known:
            found.set_result((self.known[host],))
        else:
            found.set_exception(Unresolved(f"the name {host} does not resolve"))
        return found
