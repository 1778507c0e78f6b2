"""The reader of ZMTP on a socket whose other end sends what hypothesis makes up."""

from __future__ import annotations

import asyncio
import socket
import threading

from hypothesis import example, given
from hypothesis import strategies as st

from kvpool.index.limits import Limits
from kvpool.index.net.zmtp import Connection, Lost

Messages = list[list[bytes]]


def frame(flags: int, body: bytes) -> bytes:
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | 2,)) + len(body).to_bytes(8, "big") + body


def packed(message: list[bytes]) -> bytes:
    return b"".join(frame(at + 1 < len(message), body) for at, body in enumerate(message))


def read(sent: bytes, pieces: list[int], limits: Limits) -> tuple[Messages, str]:
    """What comes of these bytes, sent in pieces of these sizes, and why the connection is lost then."""

    async def receive(ours: socket.socket) -> tuple[Messages, str]:
        connection, messages = Connection(ours, limits, "a"), []
        try:
            while True:
                messages.append([bytes(one) for one in await connection.receive()])
        except Lost as error:
            return messages, str(error)
        finally:
            connection.close()

    def send() -> None:
        at = 0
        try:
            for size in pieces:
                theirs.sendall(sent[at : at + size])
                at += size
            theirs.sendall(sent[at:])
            theirs.shutdown(socket.SHUT_WR)
        except OSError:  # the reader has seen enough
            pass

    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        sender = threading.Thread(target=send)
        sender.start()
        try:
            return asyncio.run(receive(ours))
        finally:
            sender.join()


BODIES = st.one_of(st.binary(max_size=300), st.integers(0, 1 << 18).map(lambda size: b"x" * size))
MESSAGES = st.lists(BODIES, min_size=1, max_size=8)
COMMANDS = st.sampled_from([b"", b"\x04PING\0\0context", b"\x04PONG", b"\x05ERROR\x01x", b"c" * 300])
PIECES = st.lists(st.integers(1, 4096), max_size=20)


@given(st.lists(st.tuples(MESSAGES, st.lists(COMMANDS, max_size=3)), max_size=6), PIECES)
def test_messages_are_read_whole_however_they_arrive_and_whatever_commands_are_between(
    said: list[tuple[list[bytes], list[bytes]]], pieces: list[int]
) -> None:
    limits = Limits()
    sent = b"".join(b"".join(frame(4, one) for one in commands) + packed(one) for one, commands in said)
    messages, why = read(sent, pieces, limits)
    assert messages == [message for message, _ in said]
    assert why in ("its connection was closed", "its connection was lost: Broken pipe"), "of a ping's answer"
    assert limits.used_nbytes == 0


FRAMES = st.builds(frame, st.integers(0, 7), BODIES)
HEADERS = st.builds(lambda flags, nbytes: bytes((flags,)) + nbytes, st.integers(0, 7), st.binary(max_size=9))


@given(st.lists(st.one_of(FRAMES, HEADERS, st.binary(max_size=64)), max_size=12).map(b"".join), PIECES)
@example(b"\x04\x00" * 5000, [])
@example(b"\x01\x00" * 9, [1, 1])
@example(b"\x02" + b"\x7f" * 8, [])
def test_any_bytes_end_the_connection_alone_and_are_counted_to_the_end(
    sent: bytes, pieces: list[int]
) -> None:
    limits = Limits(1 << 20)  # an owner has an eighth of it
    messages, why = read(sent, pieces, limits)
    assert why
    assert "\n" not in why
    assert sum(len(body) for message in messages for body in message) <= len(sent)
    assert limits.used_nbytes == 0
