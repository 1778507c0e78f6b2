"""A store on a server through redis-py: for where the native client cannot be used, and to compare with.

redis-py's own packer of large values joins and copies them; its pure-Python one sends a memoryview as it is, so that
one is always used. The timeouts of redis-py bound each call of the socket by itself; here the socket has a deadline.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, PythonRespSerializer, UnixDomainSocketConnection
from redis.retry import Retry

from kvpool.stores.blocking import BlockingStore, Command, Link, LinkFault, LinkRefused, LinkSilent, Refusal
from kvpool.stores.tls import Tls
from kvpool.stores.url import StoreURL

PACKER_CUTOFF_NBYTES = 6000  # what is shorter is joined before it is sent, as redis-py does

# redis-py takes the first word off the errors that it has a class for; from version 7 on it says which it was.
_WORDS: dict[type[redis.RedisError], str] = {
    redis.exceptions.OutOfMemoryError: "OOM",
    redis.exceptions.NoPermissionError: "NOPERM",
    redis.exceptions.ReadOnlyError: "READONLY",
    redis.exceptions.BusyLoadingError: "LOADING",
    redis.exceptions.AuthenticationError: "WRONGPASS",
}


class RedisStore(BlockingStore):
    """``valkey://host:6379?client=redis``: what ``ValkeyStore`` keeps, moved by redis-py."""

    def _link(self) -> Link:
        return RedisLink(self._url)


class RedisLink:
    """One connection of redis-py; see ``Link``."""

    def __init__(self, url: StoreURL) -> None:
        self._url = url
        self._connection: Any = None  # redis-py's connections have no types
        self._socket: _Deadline | None = None

    def dial(self, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        try:
            if self._socket is None:
                self._connection = self._make(timeout_s, end_s)
                self._connection.connect()
                assert self._socket is not None
            self._socket.deadline_s = end_s
            self._exchange([(b"PING",)])
        except redis.AuthenticationError as error:
            self.drop()
            raise LinkRefused(f"AUTH: {_words(error)}") from _alone(error)
        except redis.ResponseError as error:
            self.drop()
            raise LinkRefused(_words(error)) from _alone(error)
        except (redis.RedisError, OSError) as error:
            self.drop()
            raise LinkFault(_words(error)) from _alone(error)
        except BaseException:
            self.drop()
            raise

    def is_stale(self) -> bool:
        try:
            return bool(self._connection.can_read(0))
        except redis.RedisError:
            return True

    def exchange(self, commands: Sequence[Command], timeout_s: float) -> list[Any]:
        assert self._connection is not None
        assert self._socket is not None
        self._socket.deadline_s = time.monotonic() + timeout_s
        try:
            return self._exchange(commands)
        except (redis.TimeoutError, TimeoutError) as error:
            raise LinkSilent(_words(error)) from _alone(error)
        except (redis.RedisError, OSError) as error:
            raise LinkFault(_words(error)) from _alone(error)

    def drop(self) -> None:
        if self._connection is not None:
            self._connection.disconnect()
        self._connection = self._socket = None

    close = drop

    def _exchange(self, commands: Sequence[Command]) -> list[Any]:
        """As ``exchange``, with the errors of redis-py."""
        connection = self._connection
        connection.send_packed_command(connection.pack_commands(commands), check_health=False)
        return [_reply(connection) for _ in commands]

    def _make(self, timeout_s: float, end_s: float) -> Any:
        """A redis-py connection that is not connected yet, and keeps to ``end_s`` while it does."""
        kind: Any = UnixDomainSocketConnection if self._url.path else Connection

        def bounded(plain: socket.socket) -> socket.socket:
            if self._url.tls is None:
                self._socket = _Deadline(fileno=plain.detach())
            else:
                self._socket = _under_tls(plain, self._url.tls, self._url.host, end_s)
            self._socket.deadline_s = end_s
            return self._socket

        class Bounded(kind):  # type: ignore[misc]
            def _connect(self) -> socket.socket:
                return bounded(super()._connect())

        where = (
            {"path": self._url.path} if self._url.path else {"host": self._url.host, "port": self._url.port}
        )
        return Bounded(
            **where,
            username=self._url.user or None,
            password=self._url.password or None,
            db=self._url.database,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            command_packer=PythonRespSerializer(PACKER_CUTOFF_NBYTES, _encoded),
        )


class _Deadline(socket.socket):
    """A connected socket of which every call that may block ends at ``deadline_s`` (monotonic)."""

    deadline_s = 0.0

    def recv(self, *arguments: Any) -> bytes:
        self._bound()
        return super().recv(*arguments)

    def recv_into(self, *arguments: Any) -> int:
        self._bound()
        return super().recv_into(*arguments)

    def send(self, *arguments: Any) -> int:  # what sendall() calls under TLS
        self._bound()
        return super().send(*arguments)

    def sendall(self, *arguments: Any) -> None:
        self._bound()
        super().sendall(*arguments)

    def _bound(self) -> None:
        if self.gettimeout() == 0:
            return
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no answer in time")
        self.settimeout(left_s)


class _TlsDeadline(_Deadline, ssl.SSLSocket):
    """The same under TLS."""


def _under_tls(plain: socket.socket, tls: Tls, host: str, deadline_s: float) -> _TlsDeadline:
    """Takes ``plain`` over, and shakes hands until ``deadline_s`` at most. Errors: ``OSError``."""
    try:
        context = tls.context()
        context.sslsocket_class = _TlsDeadline
        plain.settimeout(max(deadline_s - time.monotonic(), 1e-3))
        wrapped = context.wrap_socket(plain, server_hostname=host)
    except BaseException:
        plain.close()
        raise
    assert isinstance(wrapped, _TlsDeadline)
    return wrapped


def _reply(connection: Any) -> Any:
    try:
        return connection.read_response(disable_decoding=True)
    except redis.ResponseError as error:
        return Refusal(_words(error))


def _alone(error: Exception) -> Exception:
    """Without tracebacks: redis-py keeps some errors in cycles with its frames, and callers' buffers with them."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__context__
    return error


def _words(error: redis.RedisError | OSError) -> str:
    """The server's words with the first one, or the system's."""
    word = getattr(error, "status_code", None) or _WORDS.get(type(error), "")  # type: ignore[arg-type]
    return f"{word} {error}".strip() or type(error).__name__


def _encoded(value: object) -> bytes | memoryview:
    if isinstance(value, (bytes, memoryview)):
        return value
    return str(value).encode()
