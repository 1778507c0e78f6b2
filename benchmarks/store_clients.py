"""The clients of ``python -m benchmarks store``: kvpool's own client of a store, and its peers.

- ``kvpool``: the store that the pool's URL opens.
- ``bare loop``, twice: the plainest native loop over the same server or directory, the bar; against itself it shows how
  much the machine wavers. Not under TLS, and not in a cluster.
- ``glide``, ``redis-py``: kvpool's stores of ``?client=``, which do the same job: verified records, in the
  same layout, moved by that client. ``python files``: a plain loop in a directory.
- ``--peers``: other projects' clients, each in a process and an environment of its own (``store_peer.py``).

All keys are of this run alone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import selectors
import socket
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import kvpool_bare

from benchmarks import store_peer
from kvpool.cli.bench_store import TENANT, TIMEOUT_S, StoreClient, TimedClient, Values, Views, check_all
from kvpool.errors import ConfigError
from kvpool.store import Store, open_store
from kvpool.store.file_system import FileSystem
from kvpool.store.server.connection import connect
from kvpool.store.url import DEFAULT_THREADS, SERVER_SCHEMES, StoreURL

OWN, BARE, BARE_AGAIN, LMCACHE = "kvpool", "bare loop", "bare again", "lmcache"
PEERS = {"lmcache": LMCACHE, "glide": "glide plain", "redis": "redis plain"}
PEER_THREADS = 4  # the fastest number for a Python client beside a busy interpreter


class Client(Protocol):
    """A measured client. Every call blocks; times are seconds. Errors: ``KVPoolError``, ``RuntimeError``."""

    name: str
    whole_batches: bool  # always measured with all values, however slow

    def fill(self, values: Values) -> None:
        """Put all of ``values``, each under its own key, for the calls below."""

    def put(self, count: int) -> float: ...
    def get(self, count: int) -> float: ...
    def exists(self, count: int) -> float | None:
        """Time to test the presence of the first ``count``. None: unsupported."""

    def busy(self) -> contextlib.AbstractContextManager[None]:
        """A pure-Python thread spins in the process that moves the bytes."""

    def empty(self) -> None:
        """Delete the values of ``fill``."""


@contextlib.contextmanager
def clients(store: Store, url: StoreURL, peers: Path | None) -> Iterator[list[Client]]:
    """kvpool's own first, then the bare loop twice if possible, then the others of ``peers``."""
    with contextlib.ExitStack() as opened:
        found: list[Client] = [LocalStoreClient(OWN, store, whole_batches=True)]
        if url.scheme not in SERVER_SCHEMES:
            direct = FileSystem.of(url.path).kind != "tmpfs"  # as kvpool's own records
            beside = Path(opened.enter_context(tempfile.TemporaryDirectory(dir=Path(url.path).parent)))
            found += [BareFiles(name, beside, url.threads, direct) for name in (BARE, BARE_AGAIN)]
            found.append(PythonFiles(beside))
        else:
            if url.tls is None and not url.nodes:
                for name in (BARE, BARE_AGAIN):
                    found.append(opened.enter_context(contextlib.closing(BareServer(name, url))))
            for name in ("glide", "redis"):
                other = opened.enter_context(open_store(replace(url, client=name)))
                found.append(LocalStoreClient({"redis": "redis-py"}.get(name, name), other))
            if peers is not None:
                found += [opened.enter_context(Peer(name, url, peers)) for name in PEERS]
        yield found


class LocalClient(TimedClient):
    whole_batches = False

    def exists(self, count: int) -> float | None:
        return None

    def busy(self) -> contextlib.AbstractContextManager[None]:
        return store_peer.busy_interpreter()


class LocalStoreClient(StoreClient, LocalClient):
    def __init__(self, name: str, store: Store, *, whole_batches: bool = False) -> None:
        super().__init__(name, store)
        self.whole_batches = whole_batches


class BareServer(LocalClient):
    """``SET`` and ``GET`` of plain strings over its own connections."""

    whole_batches = True

    def __init__(self, name: str, url: StoreURL) -> None:
        super().__init__(name)
        self._url = url
        self._prefix = _plain_prefix()
        self._connections: list[socket.socket] = []
        try:
            while len(self._connections) < url.threads:
                self._connections.append(_connected(url))
        except OSError as error:
            self.close()
            raise RuntimeError(f"{name}: {error}") from error
        self._numbers = [one.fileno() for one in self._connections]

    def close(self) -> None:
        for one in self._connections:
            one.close()

    def empty(self) -> None:
        _unlink(self._url, self._prefix, self._values.count)

    def _put(self, sources: Views) -> None:
        kvpool_bare.put_values(self._numbers, _numbered(self._prefix, len(sources)), sources)

    def _get(self, targets: Views) -> None:
        kvpool_bare.get_values(self._numbers, _numbered(self._prefix, len(targets)), targets)


class _Folder(LocalClient):
    whole_batches = True

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name)
        self._folder = folder
        self._folder.mkdir()

    def empty(self) -> None:
        for path in self._folder.iterdir():
            path.unlink()


class BareFiles(_Folder):
    def __init__(self, name: str, folder: Path, threads: int, direct: bool) -> None:
        super().__init__(name, folder / secrets.token_hex(8))
        self._threads, self._direct = threads, direct

    def _put(self, sources: Views) -> None:
        kvpool_bare.write_files(
            _numbered(f"{self._folder}/", len(sources)), sources, self._threads, self._direct
        )

    def _get(self, targets: Views) -> None:
        kvpool_bare.read_files(
            _numbered(f"{self._folder}/", len(targets)), targets, self._threads, self._direct
        )


class PythonFiles(_Folder):
    """``write``, ``readinto``."""

    def __init__(self, folder: Path) -> None:
        super().__init__("python files", folder / "python")

    def _put(self, sources: Views) -> None:
        for index, source in enumerate(sources):
            (self._folder / f"{index}").write_bytes(source)

    def _get(self, targets: Views) -> None:
        for index, target in enumerate(targets):
            with (self._folder / f"{index}").open("rb", buffering=0) as file:
                check_all([file.readinto(target) == len(target)])


class Peer:
    """Another project's client in its own process, driven by a line of JSON each way."""

    whole_batches = False

    def __init__(self, peer: str, url: StoreURL, folder: Path) -> None:
        self.name = PEERS[peer]
        python = folder / peer / "bin" / "python"
        if not python.exists():
            raise ConfigError(f"there is no {python}: make bench-peers makes it, in a clone of kvpool")
        if url.path or url.nodes or url.tls is not None:
            raise ConfigError("--peers needs valkey://host:port: not all of them can use anything else")
        self._prefix = _plain_prefix()
        self._process = subprocess.Popen(
            [python, "-I", store_peer.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._replies = selectors.DefaultSelector()
        assert self._process.stdout is not None
        self._replies.register(self._process.stdout, selectors.EVENT_READ)
        try:
            self._ask(
                "open", client=peer, host=url.host, port=url.port, user=url.user, password=url.password,
                database=url.database, threads=DEFAULT_THREADS if self.name == LMCACHE else PEER_THREADS,
            )  # fmt: skip
        except BaseException:
            self.close()
            raise

    def fill(self, values: Values) -> None:
        self._ask("fill", prefix=self._prefix, nbytes=values.nbytes, count=values.count)

    def put(self, count: int) -> float:
        return float(self._ask("put", count=count))

    def get(self, count: int) -> float:
        return float(self._ask("get", count=count))

    def exists(self, count: int) -> float:
        return float(self._ask("exists", count=count))

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        self._ask("busy", on=True)
        try:
            yield
        finally:
            self._ask("busy", on=False)

    def empty(self) -> None:
        self._ask("empty")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._replies.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, do: str, **how: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do} | how).encode() + b"\n")
        except BrokenPipeError:
            raise RuntimeError(f"{self.name} ended") from None
        if not self._replies.select(TIMEOUT_S):
            raise RuntimeError(f"{self.name} did not {do} within {TIMEOUT_S:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended; what it said is above")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.name} could not {do}: {answer['error']}")
        return answer["result"]


def _plain_prefix() -> str:
    return f"kvpool:{TENANT}:plain-{secrets.token_hex(8)}:"


def _numbered(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{index}" for index in range(count)]


def _connected(url: StoreURL) -> socket.socket:
    """Logged in, and blocking, with calls of at most ``TIMEOUT_S``. Errors: ``OSError``."""
    if url.path:
        made = socket.socket(socket.AF_UNIX)
        made.connect(url.path)
    else:
        made = socket.create_connection((url.host, url.port), TIMEOUT_S)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        made.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(TIMEOUT_S), 0))
    commands = [["SELECT", f"{url.database}"]]
    if url.password:
        commands.insert(0, ["AUTH", url.user, url.password] if url.user else ["AUTH", url.password])
    for words in commands:
        packed = b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in map(str.encode, words))
        made.sendall(b"*%d\r\n%s" % (len(words), packed))
        if made.recv(5, socket.MSG_WAITALL) != b"+OK\r\n":
            made.close()
            raise OSError(f"the server refused {words[0]}")
    return made


def _unlink(url: StoreURL, prefix: str, count: int) -> None:
    with connect(url, timeout_s=TIMEOUT_S, role="bench") as server:
        keys = iter(_numbered(prefix, count))
        while some := list(itertools.islice(keys, 1000)):
            server.unlink(*some)
