"""redis-py connections whose every step ends in time, even when the peer trickles bytes.

Their sockets have a deadline. ``CLIENT LIST`` shows each connection as ``kvpool:ROLE:WHO``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
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

from kvpool.errors import (
    AnnouncementsRefused,
    ConfigError,
    KVPoolError,
    RepliesTooLarge,
    StoreUnavailable,
)
from kvpool.store.server.deadline_socket import DeadlineSocket, Room, dialled, under_tls
from kvpool.store.server.replies import Replies, first_word, words_of
from kvpool.store.url import StoreURL

# Deadline of all calls of this thread (monotonic).
_END_S: ContextVar[float] = ContextVar("end_s", default=float("inf"))
# Budget for all replies to this thread; None: a budget per step.
_ROOM: ContextVar[Room | None] = ContextVar("room", default=None)

_NOT_IN_A_NAME = re.compile(r"[^!-~]+")  # of a connection's name: spaces are not allowed
_NAME_CHARS = 100
# Of replies in a step, or of one tenant's announcements, wherever no blocks are read: 32,768 ranks, their
# names and their records are about 20 MiB.
MAX_REPLIES_NBYTES = 32 << 20
HUNG_UP = " and hangs up"  # ends the text of an error that a server explained


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


class _Credentials(redis.CredentialProvider):
    """What AUTH sends, of each dial anew: the password's file may be replaced."""

    def __init__(self, url: StoreURL) -> None:
        self._url = url

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            password = self._url.password_now()
        except ConfigError as error:
            raise redis.ConnectionError(str(error)) from error
        return (self._url.user, password) if self._url.user else (password,)


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
            credential_provider=_Credentials(url) if url.password or url.password_file else None,
            db=url.database,
            socket_timeout=step_s,
            socket_connect_timeout=step_s,
            retry=Retry(NoBackoff(), 0),
            redis_connect_func=Bounded._greet,
            parser_class=Replies,
            **settings,
        )  # type: ignore[no-untyped-call]
        self._url, self._role, self.step_s = url, role, step_s
        self._max_replies_nbytes = max_replies_nbytes
        self.socket: DeadlineSocket | None = None
        self._dialled_s = float("inf")  # deadline of the whole dial
        self._said = ""  # its last reply, if that is an error with which servers hang up

    def connect(self) -> None:
        if self._sock is not None:
            return
        self._dialled_s = time.monotonic() + self.step_s
        try:
            super().connect()  # type: ignore[no-untyped-call]
            self._introduce()
        finally:
            self._dialled_s, self._said = float("inf"), ""

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        self.extend()
        super().send_packed_command(command, check_health)  # type: ignore[no-untyped-call]

    def read_response(self, *arguments: Any, **settings: Any) -> Any:
        """As redis-py's; the error with which a server hangs up is the ``ConnectionError``'s reason."""
        try:
            reply = super().read_response(*arguments, **settings)
        except redis.ResponseError as error:
            is_last = self._dialled_s < float("inf") or words_of(error).startswith("ERR Protocol error")
            self._said = str(error) if is_last else ""
            raise
        except redis.ConnectionError as error:
            if type(error) is redis.ConnectionError and self._said:
                raise redis.ConnectionError(f'the server says "{self._said}"{HUNG_UP}') from error
            raise
        self._said = ""
        return reply

    def extend(self) -> None:
        if self.socket is not None:
            self.socket.deadline_s = self._end_s()
            self.socket.room = _ROOM.get() or Room(self._max_replies_nbytes)

    def _end_s(self) -> float:
        return min(time.monotonic() + self.step_s, self._dialled_s, _END_S.get())

    def _connect(self) -> socket.socket:
        end_s = self._end_s()
        plain = dialled(self._url.path or (self._url.host, self._url.port), end_s)
        if self._url.tls is None:
            self.socket = DeadlineSocket(fileno=plain.detach())
        else:
            self.socket = under_tls(plain, self._url.tls, self._url.host, end_s)
        self.socket.deadline_s = end_s
        self.socket.moved_s = time.monotonic()
        return self.socket

    def _greet(self) -> None:
        try:
            self.on_connect()  # type: ignore[no-untyped-call]
        except redis.ResponseError:
            self.send_packed_command(self.pack_command("PING"), False)  # type: ignore[no-untyped-call]
            with contextlib.suppress(redis.ResponseError, redis.AuthenticationError):
                self.read_response()  # raises if that error concerned the connection, not this user
            raise

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
    before = _ROOM.set(Room(nbytes))
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
        isinstance(error, redis.exceptions.ResponseError) and first_word(words_of(error)) == "WRONGTYPE"
    )
