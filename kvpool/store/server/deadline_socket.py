"""Sockets in plain and under TLS whose blocking calls all end by one deadline; redis-py bounds each call separately."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import sys
import time
from typing import Any

from kvpool.errors import RepliesTooLarge
from kvpool.store.tls import Tls


class Room:
    """Bytes of replies that may still come."""

    def __init__(self, nbytes: int) -> None:
        self.left_nbytes = nbytes


class DeadlineSocket(socket.socket):
    """A connected socket whose blocking calls all end at ``deadline_s`` (monotonic).

    ``moved_s``: time of the last byte in either direction. ``room``: bytes it may still receive; beyond that
    it raises ``RepliesTooLarge``.
    """

    deadline_s = 0.0
    moved_s = 0.0
    room = Room(sys.maxsize)

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

    def send(self, data: Any, *flags: Any) -> int:
        """After the peer has hung up, all counts as sent: receiving says so, behind the peer's last words."""
        self._bound()
        try:
            nbytes = super().send(data, *flags)
        except (BrokenPipeError, ConnectionResetError):
            return len(data)
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


def dialled(place: tuple[str, int] | str, end_s: float) -> socket.socket:
    """A socket connected by ``end_s`` to host and port, or to the path of a Unix socket.

    A silent address takes its share of that time. Errors: ``OSError``.
    """
    if isinstance(place, str):
        plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        return _connected(plain, place, end_s)
    failure = OSError(f"{place[0]} has no address")
    try:
        found = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a label that is empty or too long
        raise OSError(f"{place[0]} is no host's name") from error
    share_s = (end_s - time.monotonic()) / max(len(found), 1)
    for family, kind, protocol, _, address in found:
        try:
            plain = socket.socket(family, kind, protocol)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return _connected(plain, address, min(time.monotonic() + share_s, end_s))
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


def under_tls(plain: socket.socket, tls: Tls, host: str, end_s: float) -> DeadlineSocket:
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
