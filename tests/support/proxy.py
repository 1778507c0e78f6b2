"""A TCP proxy between a store and its server, which harms a connection at a given byte."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

TRANSCRIPT_NBYTES = 1 << 20
_PIECE_NBYTES = 64 << 10
_DIAL_TIMEOUT_S = 60.0
_JOIN_TIMEOUT_S = 60.0


class Way(Enum):
    """The way of a byte: what the store asks, or what the server answers."""

    ASKED = 0
    ANSWERED = 1


class Harm(Enum):
    """What befalls a connection."""

    CLOSE = 0  # both sides see its end, after what was passed on
    RESET = 1  # both sides see an error; what they have not read yet is lost
    SILENCE = 2  # it stands, and nothing more goes that way
    FLIP = 3  # a bit of the last byte is another one; all goes on


class Proxy:
    """Passes bytes between clients and the server on ``port`` of this machine, over one connection each.

    It counts the bytes that it passed each way, on all connections together. ``delay_s`` makes it slow: so long
    does each piece of at most 64 KiB take. ``nbytes_per_s`` is what all connections together can carry each way, piece
    by piece in turns, as over a thin link; None: what they like.
    One thread accepts; each connection has a thread each way. ``_lock`` guards ``_passed_nbytes``, ``_passed``,
    ``_armed``, ``_harmed``, ``_connections``, ``_threads``, ``_free_s`` and ``_closing``; under it no
    socket is read or written.
    """

    def __init__(self, port: int, nbytes_per_s: float | None = None) -> None:
        self._nbytes_per_s = nbytes_per_s
        self._free_s = dict.fromkeys(Way, 0.0)  # when the link has carried all that it was given
        self._server = ("127.0.0.1", port)
        self._lock = threading.Lock()
        self._passed_nbytes = dict.fromkeys(Way, 0)
        self._passed = {way: bytearray() for way in Way}
        self._armed: tuple[Way, int, Harm] | None = None
        self._harmed = 0
        self._connections: set[_Connection] = set()
        self._threads: list[threading.Thread] = []
        self._closing = False
        self.delay_s = 0.0
        self._listener = socket.create_server(("127.0.0.1", 0))
        if nbytes_per_s is not None:  # a link holds little; who sends waits
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * _PIECE_NBYTES)
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept)
        self._acceptor.start()

    def arm(self, way: Way, nbytes: int, harm: Harm) -> None:
        """Once ``nbytes`` more have passed ``way``, harm the connection that carried the last, and no other."""
        with self._lock:
            self._armed = (way, self._passed_nbytes[way] + nbytes, harm)

    @property
    def harmed(self) -> int:
        """How many connections were harmed."""
        with self._lock:
            return self._harmed

    def passed_nbytes(self, way: Way) -> int:
        with self._lock:
            return self._passed_nbytes[way]

    def passed(self, way: Way) -> bytes:
        """What passed first, up to ``TRANSCRIPT_NBYTES``."""
        with self._lock:
            return bytes(self._passed[way])

    def close(self) -> None:
        with self._lock:
            self._closing = True
        with contextlib.suppress(OSError):  # wakes accept(), which close() does not
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(_JOIN_TIMEOUT_S)
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                connection.hang_up()
            threads = list(self._threads)
        for thread in threads:
            thread.join(_JOIN_TIMEOUT_S)
            assert not thread.is_alive(), "a thread of the proxy is stuck"

    # ------------------------------------------------------------------ its threads

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._server, _DIAL_TIMEOUT_S)
            except OSError:
                client.close()
                continue
            for end in (client, server):
                end.settimeout(None)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._begin(client, server)

    def _begin(self, client: socket.socket, server: socket.socket) -> None:
        connection = _Connection(client, server)
        threads = [threading.Thread(target=self._carry, args=(connection, way)) for way in Way]
        with self._lock:
            self._connections.add(connection)
            self._threads = [thread for thread in self._threads if thread.is_alive()] + threads
            if self._closing:
                connection.hang_up()
            # Under the lock, so that nobody finds one here that has not begun, and takes it for one that ended.
            for thread in threads:
                thread.start()

    def _carry(self, connection: _Connection, way: Way) -> None:
        source, target = connection.ends if way is Way.ASKED else reversed(connection.ends)
        over = False
        with contextlib.suppress(OSError):
            while not over and (piece := source.recv(_PIECE_NBYTES)):
                time.sleep(self.delay_s + self._transit_s(way, len(piece)))
                due, over = self._due(connection, way, piece)
                target.sendall(due)
        with self._lock:
            connection.hang_up()
            # The last thread that uses the sockets closes them: their numbers must not be others' by then.
            connection.carriers -= 1
            if connection.carriers == 0:
                self._connections.remove(connection)
                connection.close()

    def _transit_s(self, way: Way, nbytes: int) -> float:
        """How long until the link has carried so many bytes more."""
        if self._nbytes_per_s is None:
            return 0.0
        with self._lock:
            now_s = time.monotonic()
            self._free_s[way] = max(now_s, self._free_s[way]) + nbytes / self._nbytes_per_s
            return self._free_s[way] - now_s

    def _due(self, connection: _Connection, way: Way, piece: bytes) -> tuple[bytes, bool]:
        """What of ``piece`` is still to be passed on, and whether the connection ends with that."""
        with self._lock:
            if connection.harm in (Harm.CLOSE, Harm.RESET):
                return b"", True
            if connection.harm is Harm.SILENCE and connection.harmed_way is way:
                return b"", False
            if self._armed is not None and self._armed[0] is way:
                left = max(0, self._armed[1] - self._passed_nbytes[way])
                if left <= len(piece):
                    if self._armed[2] is Harm.FLIP:
                        piece = piece[: left - 1] + bytes([piece[left - 1] ^ 1]) + piece[left:]
                    else:
                        piece = piece[:left]
                        connection.harmed_way, connection.harm = way, self._armed[2]
                    self._armed = None
                    self._harmed += 1
            self._passed_nbytes[way] += len(piece)
            self._passed[way] += piece[: TRANSCRIPT_NBYTES - len(self._passed[way])]
            return piece, connection.harm in (Harm.CLOSE, Harm.RESET)


class _Connection:
    """A client's socket and the server's. The proxy's lock guards all of it but ``ends``."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.ends = (client, server)
        self.harm: Harm | None = None
        self.harmed_way: Way | None = None
        self.carriers = len(Way)  # threads that use the sockets

    def hang_up(self) -> None:
        """Wakes the threads that use it. The other sides see its end, unless its close is to be a reset."""
        for end in self.ends:
            with contextlib.suppress(OSError):
                if self.harm is Harm.RESET:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    end.shutdown(socket.SHUT_RD)
                else:
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in self.ends:
            end.close()


@contextmanager
def proxied(port: int, *, nbytes_per_s: float | None = None) -> Iterator[Proxy]:
    """A proxy in front of ``port``, until the end of the block."""
    proxy = Proxy(port, nbytes_per_s)
    try:
        yield proxy
    finally:
        proxy.close()
