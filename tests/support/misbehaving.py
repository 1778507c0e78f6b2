"""A small Redis of one process that misbehaves in one named way, while it is told to.

It keeps hashes and answers what stores ask. A harm is a function that is called instead of answering: it gets the
connection, the command and the good reply, and says what it likes.
"""

from __future__ import annotations

import contextlib
import io
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tests.support.records import fields_of

Harm = Callable[["Peer", Sequence[bytes], bytes], None]

_JOIN_S = 60.0
# What a dial says, and what clients say of themselves.
_GREETINGS = (b"AUTH", b"CLIENT", b"HELLO", b"INFO", b"PING", b"SELECT")


class HungUp(Exception):
    """A harm ended the connection."""


class Peer:
    """One connection; used by its own thread, but for ``hang_up``."""

    def __init__(self, connection: socket.socket, over: threading.Event) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self.queued: list[Sequence[bytes]] | None = None  # in a transaction: what it consists of so far
        self.owes = False  # a harm has kept a reply back
        self._over = over  # the harm that was done is over

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def drip(self, data: bytes, pause_s: float) -> None:
        """A byte each ``pause_s``, until all is said or the harm is over; then the connection ends."""
        for place in range(len(data)):
            self.send(data[place : place + 1])
            if self._over.wait(pause_s):
                break
        raise HungUp

    def fall_silent(self) -> None:
        """Neither read nor say any more, until the harm is over; then the connection ends."""
        self._over.wait()
        raise HungUp

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class Misbehaving:
    """Listens on ``port`` of this machine; a thread for each connection.

    ``_lock`` guards ``_hashes``, ``_harm``, ``_peers``, ``_threads`` and ``_closing``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hashes: dict[bytes, dict[bytes, bytes]] = {}
        self._harm: tuple[Harm, bool] | None = None
        self._over = threading.Event()
        self._peers: set[Peer] = set()
        self._closing = False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"valkey://127.0.0.1:{self.port}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def misbehave(self, harm: Harm, *, when_dialled: bool = False) -> None:
        """From now on ``harm`` answers every command about values; those of a dial too, if ``when_dialled``."""
        with self._lock:
            self._over = threading.Event()
            for peer in self._peers:
                peer._over = self._over
            self._harm = (harm, when_dialled)

    def behave(self) -> None:
        """From now on the server is good. Connections that are silent or owe a reply end."""
        with self._lock:
            self._harm = None
            self._over.set()
            for peer in self._peers:
                if peer.owes:
                    peer.hang_up()

    def put(self, key: str, value: bytes) -> None:
        """Keep a good record."""
        with self._lock:
            self._hashes[key.encode()] = fields_of(key, value)

    def forget(self, key: str) -> None:
        """Keep nothing under ``key``."""
        with self._lock:
            self._hashes.pop(key.encode(), None)

    def holds(self, key: str, value: bytes) -> bool:
        """Whether a good record of ``value`` is kept under ``key``."""
        with self._lock:
            return self._hashes.get(key.encode()) == fields_of(key, value)

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._over.set()
            for peer in self._peers:
                peer.hang_up()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(_JOIN_S)
        self._listener.close()
        for thread in self._threads:
            thread.join(_JOIN_S)
            assert not thread.is_alive(), "a thread of the server is stuck"

    # ------------------------------------------------------------------ its threads

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                peer = Peer(connection, self._over)
                self._peers.add(peer)
                if self._closing:
                    peer.hang_up()
                thread = threading.Thread(target=self._serve, args=(connection, peer))
                self._threads = [old for old in self._threads if old.is_alive()] + [thread]
                thread.start()

    def _serve(self, connection: socket.socket, peer: Peer) -> None:
        with contextlib.suppress(OSError, HungUp), connection, connection.makefile("rb") as asked:
            while line := asked.readline():
                words = [self._word(asked) for _ in range(int(line[1:]))]
                harm, good = self._hear(peer, words)
                if harm is None:
                    peer.send(good)
                else:
                    harm(peer, words, good)
        with self._lock:
            self._peers.discard(peer)

    def _word(self, asked: io.BufferedReader) -> bytes:
        if not (line := asked.readline()):
            raise HungUp
        return asked.read(int(line[1:]) + 2)[:-2]

    def _hear(self, peer: Peer, words: Sequence[bytes]) -> tuple[Harm | None, bytes]:
        with self._lock:
            good = self._answer_within(peer, words)
            if self._harm is None or (words[0] in _GREETINGS and not self._harm[1]):
                return None, good
            return self._harm[0], good

    def _answer_within(self, peer: Peer, words: Sequence[bytes]) -> bytes:
        """The answer to a command that may be one of a transaction."""
        if words[0] == b"MULTI":
            peer.queued = []
            return b"+OK\r\n"
        if words[0] == b"EXEC":
            queued, peer.queued = peer.queued or [], None
            return b"*%d\r\n" % len(queued) + b"".join(self._answer(one) for one in queued)
        if peer.queued is not None:
            peer.queued.append(words)
            return b"+QUEUED\r\n"
        return self._answer(words)

    def _answer(self, words: Sequence[bytes]) -> bytes:
        name, *rest = words
        if name == b"PING":
            return b"+PONG\r\n"
        if name == b"INFO":
            return bulk(b"role:master\r\n")
        if name in _GREETINGS:
            return b"+OK\r\n"
        if name == b"HSET":
            self._hashes.setdefault(rest[0], {}).update(zip(rest[1::2], rest[2::2], strict=True))
            return b":%d\r\n" % (len(rest) // 2)
        if name == b"HMGET":
            kept = self._hashes.get(rest[0], {})
            return b"*%d\r\n" % (len(rest) - 1) + b"".join(bulk(kept.get(field)) for field in rest[1:])
        if name == b"UNLINK":
            return b":%d\r\n" % (self._hashes.pop(rest[0], None) is not None)
        if name == b"PTTL":
            return b":86400000\r\n"
        if name in (b"EXISTS", b"TOUCH"):
            return b":%d\r\n" % sum(key in self._hashes for key in rest)
        if name == b"PEXPIRE":
            return b":%d\r\n" % (rest[0] in self._hashes)
        return b"-ERR unknown command\r\n"


def says(reply: bytes) -> Harm:
    """The same to everything."""
    return lambda peer, words, good: peer.send(reply)


def to(name: bytes, change: Callable[[Sequence[bytes], bytes], bytes]) -> Harm:
    """A good server, but for what ``change`` makes of the reply to commands of this name."""
    return lambda peer, words, good: peer.send(change(words, good) if words[0] == name else good)


def bulk(data: bytes | None) -> bytes:
    return b"$-1\r\n" if data is None else b"$%d\r\n%s\r\n" % (len(data), data)


@contextmanager
def misbehaving() -> Iterator[Misbehaving]:
    """A server that is good until it is told otherwise, until the end of the block."""
    server = Misbehaving()
    try:
        yield server
    finally:
        server.close()
