"""Real Redis and Valkey servers for a test: started on a free port, killed at its end.

``scripts/servers`` finds or fetches them (``make test`` runs it).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvpool.cli.engine_process import free_ports
from tests.conftest import eventually

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

    def start(self) -> None:
        assert self._process is None
        command = [find(self.name), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
                   "--appendonly", "no", "--dir", str(self.folder), "--unixsocket", str(self.socket_path),
                   "--logfile", str(self.folder / "log"), *self.options]  # fmt: skip
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
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


@contextmanager
def running(name: str, folder: Path, *options: str) -> Iterator[Server]:
    """A server of this name with its files in ``folder``, until the end of the block."""
    server = Server(name, folder, *options)
    try:
        server.start()
        yield server
    finally:
        server.kill()
