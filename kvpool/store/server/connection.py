"""redis-py connections whose every step ends in time, even when the peer trickles bytes.

redis-py bounds each socket call separately; this socket has a deadline. ``CLIENT LIST`` shows each connection
as ``kvpool:ROLE:WHO``.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection
from redis.retry import Retry

from kvpool.errors import AnnouncementsRefused, KVPoolError, RepliesTooLarge, StoreUnavailable
from kvpool.store.tls import Tls
from kvpool.store.url import StoreURL

# Deadline of all calls of this thread (monotonic).
_END_S: ContextVar[float] = ContextVar("end_s", default=float("inf"))
# Budget for all replies to this thread; None: a budget per step.
_ROOM: ContextVar[_Room | None] = ContextVar("room", default=None)

_NOT_IN_A_NAME = re.compile(r"[^!-~]+")  # of a connection's name: spaces are not allowed
_NAME_CHARS = 100
# Of replies in a step, or of one tenant's announcements, wherever no blocks are read: 32,768 ranks, their
# names and their records are about 20 MiB.
MAX_REPLIES_NBYTES = 32 << 20


class _Room:
    """Bytes of replies that may still come."""

    def __init__(self, nbytes: int) -> None:
        self.left_nbytes = nbytes


@functools.cache
def library_version() -> str:
    # Of the package itself: a copied or frozen one has no metadata.
    return str(sys.modules["kvpool"].__version__)


def client_of(url: StoreURL) -> str:
    """The WHO in names of this store's connections: its opener, or this host and process."""
    who = url.opened_by or f"{socket.gethostname()}.{os.getpid()}"
    return _NOT_IN_A_NAME.sub("-", who)[:_NAME_CHARS]


def introduction(url: StoreURL, role: str) -> list[tuple[str, ...]]:
    """Commands by which a connection names itself."""
    return [
        ("CLIENT", "SETNAME", f"kvpool:{role}:{client_of(url)}"),
        ("CLIENT", "SETINFO", "LIB-NAME", "kvpool"),
        ("CLIENT", "SETINFO", "LIB-VER", library_version()),
    ]


class DeadlineSocket(socket.socket):
    """A connected socket whose blocking calls all end at ``deadline_s`` (monotonic).

    ``moved_s``: time of the last byte in either direction. ``room``: bytes it may still receive; beyond that
    it raises ``RepliesTooLarge``.
    """

    deadline_s = 0.0
    moved_s = 0.0
    room = _Room(sys.maxsize)

    def recv(self, *arguments: Any) -> bytes:
        self._bound()
        received = super().recv(*arguments)
        self._note_received(len(received))
        return received

    def recv_into(self, *arguments: Any) -> int:
        self._bound()
        nbytes = super().recv_into(*arguments)
        self._note_received(nbytes)
        return nbytes

    def send(self, *arguments: Any) -> int:
        self._bound()
        nbytes = super().send(*arguments)
        self._note_move()
        return nbytes

    def sendall(self, data: Any, *flags: Any) -> None:
        with memoryview(data) as view, view.cast("B") as left:
            sent = 0
            while sent < left.nbytes:
                sent += self.send(left[sent:], *flags)

    def _bound(self) -> None:
        if self.gettimeout() == 0:
            return
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no answer in time")
        self.settimeout(left_s)

    def _note_move(self) -> None:
        self.moved_s = time.monotonic()

    def _note_received(self, nbytes: int) -> None:
        self._note_move()
        self.room.left_nbytes -= nbytes
        if self.room.left_nbytes < 0:
            raise RepliesTooLarge("its replies are too large")


class _TlsDeadlineSocket(DeadlineSocket, ssl.SSLSocket):
    def getpeername(self) -> Any:
        try:
            return super().getpeername()
        except OSError as error:
            # A reset since the connect: while wrapping, Python 3.11 would read from it and leave it open.
            self.close()
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)) from error


class Bounded(Connection):
    """A redis-py connection over TCP, TLS or a Unix socket, whose steps take at most ``step_s``.

    A step is a connect with its handshake, or a request with its replies of at most ``max_replies_nbytes``.
    Steps inside ``deadline`` also end by that deadline.
    """

    def __init__(
        self,
        *,
        url: StoreURL,
        role: str,
        step_s: float,
        max_replies_nbytes: int = sys.maxsize,
        **settings: Any,
    ) -> None:
        super().__init__(
            host=url.host or "localhost",
            port=url.port,
            username=url.user or None,
            password=url.password or None,
            db=url.database,
            socket_timeout=step_s,
            socket_connect_timeout=step_s,
            retry=Retry(NoBackoff(), 0),
            **settings,
        )  # type: ignore[no-untyped-call]
        self._url, self._role, self.step_s = url, role, step_s
        self._max_replies_nbytes = max_replies_nbytes
        self.socket: DeadlineSocket | None = None
        self._dialled_s = float("inf")  # deadline of the whole dial

    def connect(self) -> None:
        if self._sock is not None:
            return
        self._dialled_s = time.monotonic() + self.step_s
        try:
            super().connect()  # type: ignore[no-untyped-call]
            self._introduce()
        finally:
            self._dialled_s = float("inf")

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        self.extend()
        super().send_packed_command(command, check_health)  # type: ignore[no-untyped-call]

    def extend(self) -> None:
        if self.socket is not None:
            self.socket.deadline_s = self._end_s()
            self.socket.room = _ROOM.get() or _Room(self._max_replies_nbytes)

    def _end_s(self) -> float:
        return min(time.monotonic() + self.step_s, self._dialled_s, _END_S.get())

    def _connect(self) -> socket.socket:
        end_s = self._end_s()
        plain = _dialled(self._url, end_s)
        if self._url.tls is None:
            self.socket = DeadlineSocket(fileno=plain.detach())
        else:
            self.socket = _under_tls(plain, self._url.tls, self._url.host, end_s)
        self.socket.deadline_s = end_s
        self.socket.moved_s = time.monotonic()
        return self.socket

    def _host_error(self) -> str:
        return self._url.path or f"{self._url.host}:{self._url.port}"

    def _introduce(self) -> None:
        """Name this connection, unless the server or the user's rights refuse."""
        said = introduction(self._url, self._role)
        self.send_packed_command(self.pack_commands(said), False)  # type: ignore[no-untyped-call]
        for _ in said:
            with contextlib.suppress(redis.ResponseError, redis.AuthenticationError):
                self.read_response()


def connect(url: StoreURL, *, timeout_s: float, role: str) -> redis.Redis:
    """A redis-py client for the server of ``url``: no retries, RESP2, ``timeout_s`` per step. Close it.

    ``role``: in its connections' names. Errors: ``RepliesTooLarge`` above ``MAX_REPLIES_NBYTES`` a step.
    """
    pool = redis.ConnectionPool(
        Bounded, url=url, role=role, step_s=timeout_s, max_replies_nbytes=MAX_REPLIES_NBYTES, protocol=2
    )
    return redis.Redis.from_pool(pool)


@contextmanager
def deadline(timeout_s: float) -> Iterator[None]:
    """Bound all of this thread's server calls in the block to ``timeout_s`` together."""
    before = _END_S.set(min(time.monotonic() + timeout_s, _END_S.get()))
    try:
        yield
    finally:
        _END_S.reset(before)


@contextmanager
def max_replies(nbytes: int) -> Iterator[None]:
    """Bound all replies to this thread in the block to ``nbytes``; beyond, ``RepliesTooLarge``."""
    before = _ROOM.set(_Room(nbytes))
    try:
        yield
    finally:
        _ROOM.reset(before)


class KeptServer:
    """One connection to the result of ``server``, kept between periodic calls. Any thread.

    ``server`` is called before the first call, after a failure, and every ``ASK_AGAIN_S``. The last call on a
    replaced client closes it. ``_lock`` guards all fields below it; no I/O under it.
    """

    STEP_S = 2.0
    ASK_AGAIN_S = 30.0

    def __init__(self, server: Callable[[], StoreURL], name: str, *, role: str) -> None:
        self._server, self._name, self._role = server, name, role
        self._lock = threading.Lock()
        self._client: redis.Redis | None = None
        self._calls: Counter[redis.Redis] = Counter()  # calls in flight, by client
        self._url: StoreURL | None = None
        self._asked_s = 0.0
        self._closed = False

    @contextmanager
    def asked(self, action: str, timeout_s: float) -> Iterator[redis.Redis]:
        """The server, for one call's requests, which take at most ``timeout_s`` together.

        Errors: ``StoreUnavailable`` with ``action`` for any client error; ``AnnouncementsRefused`` if it
        concerns the keys, not the server.
        """
        client: redis.Redis | None = None
        try:
            with deadline(timeout_s):
                client = self._current()
                yield client
        except Exception as error:
            if isinstance(error, KVPoolError) and not isinstance(error, RepliesTooLarge):
                raise
            if isinstance(error, RepliesTooLarge) or _is_about_keys(error):
                raise AnnouncementsRefused(f"{self._name}: {action}: {error}") from error
            with self._lock:
                if self._client is client:
                    self._client = self._url = None
            raise StoreUnavailable(f"{self._name}: {action}: {error or type(error).__name__}") from error
        finally:
            if client is not None:
                self._ended(client)

    def answers(self) -> bool:
        """Whether the server answers a PING. Blocks for at most ``STEP_S``."""
        try:
            with self.asked("cannot be reached", self.STEP_S) as server:
                return bool(server.ping())
        except StoreUnavailable:
            return False

    def close(self) -> None:
        with self._lock:
            self._closed = True
            client, self._client, self._url = self._client, None, None
            in_use = client in self._calls
        if client is not None and not in_use:
            client.close()

    def _current(self) -> redis.Redis:
        with self._lock:
            if self._client is not None and time.monotonic() < self._asked_s + self.ASK_AGAIN_S:
                self._calls[self._client] += 1
                return self._client
        url = self._server()
        with self._lock:
            self._asked_s = time.monotonic()
            if self._client is not None and self._url == url:
                self._calls[self._client] += 1
                return self._client
            fresh = connect(url, timeout_s=self.STEP_S, role=self._role)
            self._calls[fresh] += 1
            if self._closed:  # a call after close: drop its connection too
                return fresh
            old, self._client, self._url = self._client, fresh, url
            in_use = old in self._calls
        if old is not None and not in_use:
            old.close()
        return fresh

    def _ended(self, client: redis.Redis) -> None:
        with self._lock:
            self._calls[client] -= 1
            in_use = self._calls[client] > 0
            if not in_use:
                del self._calls[client]
            kept = in_use or client is self._client
        if not kept:
            client.close()


def _is_about_keys(error: Exception) -> bool:
    return isinstance(error, redis.exceptions.NoPermissionError) or (
        isinstance(error, redis.exceptions.ResponseError) and "WRONGTYPE " in str(error)
    )


def _dialled(url: StoreURL, end_s: float) -> socket.socket:
    """A socket connected by ``end_s``. Errors: ``OSError``."""
    if url.path:
        plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        return _connected(plain, url.path, end_s)
    failure = OSError(f"{url.host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM):
        try:
            plain = socket.socket(family, kind, protocol)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return _connected(plain, address, end_s)
        except OSError as error:
            failure = error
    raise failure


def _connected(plain: socket.socket, address: Any, end_s: float) -> socket.socket:
    try:
        plain.settimeout(max(end_s - time.monotonic(), 1e-3))
        plain.connect(address)
    except BaseException:
        plain.close()
        raise
    return plain


def _under_tls(plain: socket.socket, tls: Tls, host: str, end_s: float) -> DeadlineSocket:
    """Take over ``plain`` and shake hands until ``end_s`` at most. Errors: ``OSError``.

    redis-py's own TLS also trusts the system's authorities beside the named one.
    """
    try:
        context = tls.context()
        context.sslsocket_class = _TlsDeadlineSocket
        plain.settimeout(max(end_s - time.monotonic(), 1e-3))
        wrapped = context.wrap_socket(plain, server_hostname=host)
    except BaseException:
        plain.close()
        raise
    assert isinstance(wrapped, DeadlineSocket)
    return wrapped
