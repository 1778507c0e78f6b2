"""``Connection``: the client's end of ZMTP 3.0 (https://rfc.zeromq.org/spec/23/), without security.

Over TCP or a Unix socket, as SUB to PUB sockets (all topics) and as DEALER to ROUTER sockets. libzmq bounds
the bytes of a frame and the number of messages, but not the bytes of a message or a queue. It also resolves
names in the thread that serves all sockets. Here each message is read in its turn and counted in a
``Limits``; unread ones wait at the publisher. One event loop.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import time
from concurrent.futures import Future
from typing import cast

from kvpool.errors import KVPoolError
from kvpool.index.limits import Limits

MAX_MESSAGE_NBYTES = (64 << 20) + 4096  # a largest batch and its number
MAX_FRAMES = 8  # vLLM sends 3, and 5 in a replay
MAX_COMMAND_NBYTES = 4096
MAX_COMMANDS = 1024  # within HEARTBEAT_S: a peer's pings and pongs are a few
LARGE_NBYTES = 64 << 10  # larger frames have their own buffer
READ_NBYTES = 64 << 10
SLICE_NBYTES = 1 << 20  # of a large frame, before others have their turn
TURN_S = 0.005  # of one connection's frames and what is done with them in a row; then others' turn
LARGE_TIMEOUT_S, LARGE_NBYTES_PER_S = 5.0, 4 << 20  # for a large frame
HEARTBEAT_S = 5.0  # silence before a ping
SILENT_S = 15.0  # silence before the connection counts as lost
KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 5),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 2),
    (socket.TCP_USER_TIMEOUT, int(SILENT_S * 1000)),
)

_MORE, _LONG, _COMMAND = 1, 2, 4
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_GREETING = _SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_GREETING_NBYTES = 64


class Lost(KVPoolError):
    """The connection is unusable; says why, in one line."""


class Silent(Lost):
    """Nothing has arrived for too long."""


class Connection:
    """Made by ``connect``; end with ``close``.

    ``owner``: whose part of ``limits`` it uses. ``silence_s``: of ``receive``; None: as long as the peer
    answers pings.
    """

    def __init__(
        self, made: socket.socket, limits: Limits, owner: str, silence_s: float | None = None
    ) -> None:
        self._socket, self._limits, self._owner, self._silence_s = made, limits, owner, silence_s
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()  # read, not consumed
        self._at = 0  # its consumed bytes
        self._frames_nbytes = 0  # of the message being received
        self._taken_nbytes = 0  # of ``limits``
        self._heard_at = self._asked_at = time.monotonic()
        self._pings = False  # the peer answers pings, so silence counts
        self._turn_ends_s = self._heard_at + TURN_S
        self._commands, self._commands_since_s = 0, self._heard_at
        self._problem = ""  # reason of the abort
        self._waiter: asyncio.Future[bool] | None = None

    @classmethod
    async def connect(
        cls,
        endpoint: str,
        addresses: Future[tuple[str, ...]] | None,
        kind: bytes,
        limits: Limits,
        owner: str,
        *,
        attempt: int = 0,
        silence_s: float | None = None,
    ) -> Connection:
        """A connection after its handshake. Put a deadline on it.

        ``addresses``: of the host, None for ``ipc://``; each attempt tries the next. ``kind``: ``SUB`` or
        ``DEALER``. Errors: ``Lost``, ``Unresolved``.
        """
        if addresses is None:
            path = endpoint.removeprefix("ipc://")
            family, where = socket.AF_UNIX, ("\0" + path[1:] if path.startswith("@") else path)
        else:
            found = await asyncio.wrap_future(addresses)
            host, port = found[attempt % len(found)], int(endpoint.rpartition(":")[2])
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            where = (host, port)  # type: ignore[assignment]
        try:
            made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as error:
            raise Lost(f"the index has no socket left for it: {error.strerror}") from error
        one = cls(made, limits, owner, silence_s)
        try:
            if family != socket.AF_UNIX:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for option, value in KEEPALIVE:
                    made.setsockopt(socket.IPPROTO_TCP, option, value)
            await one._loop.sock_connect(made, where)
            await one._shake_hands(kind)
        except (OSError, ValueError) as error:
            one.close()
            # asyncio puts the address again into strerror.
            why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            raise Lost(f"cannot connect to {endpoint}: {why}") from error
        except BaseException:
            one.close()
            raise
        return one

    def close(self) -> None:
        """Drop unreceived bytes. Idempotent."""
        self._buffer, self._frames_nbytes = bytearray(), 0
        self._hold(0)
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
        self._socket.close()

    def abort(self, problem: str) -> None:
        """Have ``receive`` end with this problem, now or at its next call."""
        self._problem = problem
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    def send(self, *frames: bytes) -> None:
        """A small message. Errors: ``Lost``, also when the peer does not read."""
        self._heard_at = time.monotonic()  # the reply's deadline starts now
        self._write(b"".join(_frame(_MORE * (at + 1 < len(frames)), one) for at, one in enumerate(frames)))

    async def receive(self) -> list[bytes]:
        """The next message, as frames. Their memory is counted until the next call.

        Other connections have their turn at least every ``TURN_S``, whatever the peer sends. Not to be cancelled and
        called again. Errors: ``Lost``.
        """
        frames: list[bytes] = []
        self._frames_nbytes = 0
        if self._taken_nbytes > LARGE_NBYTES:
            self._hold(0)
        while True:
            if time.monotonic() >= self._turn_ends_s:
                await asyncio.sleep(0)
                self._turn_ends_s = time.monotonic() + TURN_S
            flags, nbytes = await self._header()
            if flags & _COMMAND:
                if flags & _MORE or nbytes > MAX_COMMAND_NBYTES:
                    raise Lost("it sent what is no command of ZMTP")
                self._obey(await self._small(nbytes))
                continue
            if len(frames) == MAX_FRAMES or self._frames_nbytes + nbytes > MAX_MESSAGE_NBYTES:
                raise Lost(
                    f"it sent a message of more than {MAX_MESSAGE_NBYTES >> 20} MiB or {MAX_FRAMES} frames"
                )
            frames.append(await (self._small(nbytes) if nbytes <= LARGE_NBYTES else self._large(nbytes)))
            self._frames_nbytes += nbytes
            if not flags & _MORE:
                return frames

    # ---- parts of a message

    async def _shake_hands(self, kind: bytes) -> None:
        ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
        self._write(_GREETING + _frame(_COMMAND, ready))
        greeting = await self._small(_GREETING_NBYTES)
        if greeting[:1] != b"\xff" or greeting[9:10] != b"\x7f" or greeting[10] < 3:
            raise Lost("what answers there does not speak ZMTP 3")
        if greeting[12:32] != _GREETING[12:32]:
            raise Lost("its socket asks for security: kvpool follows sockets without")
        flags, nbytes = await self._header()
        command = await self._small(nbytes) if nbytes <= MAX_COMMAND_NBYTES else b""
        if not flags & _COMMAND or command[:6] != b"\x05READY":
            why = command[7:].decode("ascii", "replace") if command[:6] == b"\x05ERROR" else "no handshake"
            raise Lost(f"its socket refuses the index: {why:.100}")
        self._pings = greeting[11] >= 1  # libzmq from 4.3 on
        if kind == b"SUB":  # libzmq takes no message before it has sent its own READY
            self.send(b"\x01")  # all topics

    def _obey(self, command: bytes) -> None:
        self._commands += 1
        if self._commands > MAX_COMMANDS:
            now = time.monotonic()
            if now < self._commands_since_s + HEARTBEAT_S:
                raise Lost(f"it sent more than {MAX_COMMANDS} commands within {HEARTBEAT_S:g} s")
            self._commands, self._commands_since_s = 1, now
        if command[:5] == b"\x04PING":
            self._write(_frame(_COMMAND, b"\x04PONG" + command[7:23]))
        elif command[:5] == b"\x04PONG":
            self._pings = True

    async def _header(self) -> tuple[int, int]:
        await self._need(2)
        flags, nbytes = self._buffer[self._at], self._buffer[self._at + 1]
        self._at += 2
        if flags & ~(_MORE | _LONG | _COMMAND):
            raise Lost("it sent what is no frame of ZMTP")
        if flags & _LONG:
            await self._need(7)
            nbytes = nbytes << 56 | int.from_bytes(self._buffer[self._at : self._at + 7], "big")
            self._at += 7
        return flags, nbytes

    async def _small(self, nbytes: int) -> bytes:
        await self._need(nbytes)
        self._at += nbytes
        return bytes(self._buffer[self._at - nbytes : self._at])

    async def _large(self, nbytes: int) -> bytes:
        """Memory is reserved before any byte is read; a deadline keeps others from waiting."""
        await self._wait_for_room(nbytes)
        # Anonymous memory: zeroing a bytearray of 58 MiB takes 25 ms.
        body = memoryview(mmap.mmap(-1, nbytes))
        filled = min(len(self._buffer) - self._at, nbytes)
        body[:filled] = self._buffer[self._at : self._at + filled]
        self._at += filled
        deadline = time.monotonic() + LARGE_TIMEOUT_S + nbytes / LARGE_NBYTES_PER_S
        while filled < nbytes:
            try:
                count = self._socket.recv_into(body[filled : filled + SLICE_NBYTES])
            except BlockingIOError:
                await self._readable(deadline)
                continue
            except OSError as error:
                raise Lost(_lost(error)) from error
            self._read(count)
            filled += count
            await asyncio.sleep(0)
        return cast("bytes", body)  # not written any more; a copy would double the memory

    async def _wait_for_room(self, nbytes: int) -> None:
        wanted = self._frames_nbytes + nbytes
        more = wanted - self._taken_nbytes
        if more > 0:
            if wanted > self._limits.limit_of_owner_nbytes or not await self._limits.acquire(
                more, self._owner
            ):
                raise Lost(f"there is no room for a message of {wanted} bytes: raise --max-memory")
            self._taken_nbytes = wanted

    # ---- bytes

    async def _need(self, nbytes: int) -> None:
        while len(self._buffer) - self._at < nbytes:
            try:
                read = self._socket.recv(READ_NBYTES)
            except BlockingIOError:
                del self._buffer[: self._at]
                self._at = 0
                if not self._hold(len(self._buffer) + self._frames_nbytes):
                    raise Lost("there is no room for its messages: raise --max-memory") from None
                await self._readable()
                continue
            except OSError as error:
                raise Lost(_lost(error)) from error
            self._read(len(read))
            del self._buffer[: self._at]
            self._at = 0
            self._buffer += read

    def _read(self, count: int) -> None:
        if self._problem:
            raise Lost(self._problem)
        if not count:
            raise Lost("its connection was closed")
        self._heard_at = time.monotonic()

    async def _readable(self, deadline: float | None = None) -> None:
        """Wait until bytes have arrived. Errors: ``Lost`` when none do."""
        while True:
            if self._problem:
                raise Lost(self._problem)
            if self._silence_s is None:
                until = max(self._heard_at, self._asked_at) + HEARTBEAT_S
            else:
                until = self._heard_at + self._silence_s
            if deadline is not None:
                until = min(until, deadline)
            self._waiter = waiter = self._loop.create_future()
            # Arrived bytes win over the deadline: a busy loop takes no publisher for silent.
            self._loop.add_reader(self._socket, _settle, waiter, True)
            timer = self._loop.call_at(until, _settle, waiter, False)
            try:
                if await waiter:
                    self._turn_ends_s = time.monotonic() + TURN_S
                    return
            finally:
                self._waiter = None
                timer.cancel()
                self._loop.remove_reader(self._socket)
            if deadline is not None and time.monotonic() >= deadline:
                raise Lost("a message came too slowly")
            self._be_patient()

    def _be_patient(self) -> None:
        """After a silence: send a ping. Errors: ``Lost`` after ``SILENT_S``."""
        now = time.monotonic()
        if self._silence_s is not None:
            if now >= self._heard_at + self._silence_s:
                raise Silent("it does not answer")
        elif self._pings and now >= self._heard_at + SILENT_S:
            raise Silent(f"it was silent for {SILENT_S:g} s")
        elif now >= self._asked_at + HEARTBEAT_S:
            self._asked_at = now
            self._write(_frame(_COMMAND, b"\x04PING\0\0"))

    def _write(self, packed: bytes) -> None:
        """Small and rare; bytes that the kernel does not take mean a peer that has not read for long."""
        try:
            sent = self._socket.send(packed)
        except OSError as error:
            raise Lost(_lost(error)) from error
        if sent != len(packed):
            raise Lost("it does not read what it is sent")

    def _hold(self, nbytes: int) -> bool:
        """Whether the budget has room for so many bytes, in place of those held before."""
        if nbytes > self._taken_nbytes:
            if not self._limits.take(nbytes - self._taken_nbytes, self._owner):
                return False
        elif nbytes < self._taken_nbytes:
            self._limits.give(self._taken_nbytes - nbytes, self._owner)
        self._taken_nbytes = nbytes
        return True


def _settle(waiter: asyncio.Future[bool], came: bool) -> None:
    if not waiter.done():
        waiter.set_result(came)


def _frame(flags: int, body: bytes) -> bytes:
    assert len(body) < 256
    return bytes((flags, len(body))) + body


def _lost(error: OSError) -> str:
    return f"its connection was lost: {error.strerror or error}"
