"""Replies from pieces of any size, as redis-py's own parser gives them."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from kvpool import _native
from kvpool.store.server.replies import Replies, is_command_refused, words_of

SAID: list[tuple[bytes, Any]] = [
    (b"+PONG\r\n", b"PONG"),
    (b"+\r\n", b""),
    (b":-7\r\n", -7),
    (b"$3\r\na\r\n\r\n", b"a\r\n"),
    (b"$0\r\n\r\n", b""),
    (b"$-1\r\n", None),
    (b"*-1\r\n", None),
    (b"*0\r\n", []),
    (b"*2\r\n*2\r\n:1\r\n*0\r\n$1\r\nx\r\n", [[1, []], b"x"]),
    (b"$100000\r\n" + b"x" * 100_000 + b"\r\n", b"x" * 100_000),
]


def connected() -> tuple[socket.socket, Replies]:
    """The server's end, and a parser at the other."""
    server, client = socket.socketpair()
    client.settimeout(60)
    replies = Replies(socket_read_size=65536)
    replies.on_connect(SimpleNamespace(_sock=client))
    return server, replies


@pytest.mark.parametrize("piece_nbytes", [1, 2, 7, 1 << 20])
def test_replies_come_in_order_from_pieces_of_any_size(piece_nbytes: int) -> None:
    said = b"".join(words for words, _ in SAID)
    replies = _native.Replies(str)
    taken = []
    for start in range(0, len(said), piece_nbytes):
        replies.feed(said[start : start + piece_nbytes])
        while replies.ready():
            taken.append(replies.take())
    assert taken == [reply for _, reply in SAID]
    assert replies.empty()
    replies.feed(b"+")
    assert not replies.empty()
    with pytest.raises(RuntimeError):
        replies.take()


def test_errors_are_those_of_redis_py() -> None:
    server, replies = connected()
    with server, replies._socket:
        server.sendall(b"-NOPERM no\r\n*2\r\n-OOM full\r\n:1\r\n-ERR max number of clients reached\r\n")
        assert isinstance(replies.read_response(), redis.exceptions.NoPermissionError)
        inner, one = replies.read_response()
        assert (type(inner), str(inner), one) == (redis.exceptions.OutOfMemoryError, "full", 1)
        with pytest.raises(redis.ConnectionError, match="max number of clients"):
            replies.read_response()


@pytest.mark.parametrize(
    ("said", "is_refused"),
    [
        ("NOPERM User worker has no permissions to run the 'hset' command", True),
        ("ERR unknown command 'touch', with args beginning with: 'a'", True),
        ("NOPERM No permissions to access a key", False),
        ("OOM command not allowed when used memory > 'maxmemory'.", False),
        ("MISCONF Errors writing to the AOF file, so commands are refused", False),
        ("ERRATIC command NOPERM", False),
    ],
)
def test_the_first_word_of_an_error_decides_what_it_is(said: str, is_refused: bool) -> None:
    server, replies = connected()
    with server, replies._socket:
        server.sendall(f"-{said}\r\n".encode())
        error = replies.read_response()
    assert words_of(error) == said
    assert is_command_refused(words_of(error)) is is_refused


@pytest.mark.parametrize(
    "nonsense", [b"HTTP/1.1 400\r\n", b"$x\r\n", b"*99999999999\r\n", b"*1\r\n" * 17 + b":1\r\n"]
)
def test_what_is_no_reply_is_refused(nonsense: bytes) -> None:
    server, replies = connected()
    with server, replies._socket:
        server.sendall(nonsense)
        with pytest.raises(redis.InvalidResponse, match="Protocol Error"):
            replies.read_response()


def test_what_can_be_read_is_known_before_it_is() -> None:
    server, replies = connected()
    with replies._socket:
        with server:
            assert not replies.can_read(0)
            server.sendall(b"+a\r\n+b\r\n")
            assert replies.can_read(60)
            assert replies.read_response() == b"a"
            assert replies.can_read(0), "received with the one before"
            assert replies.read_response() == b"b"
            assert not replies.can_read(0)
        assert replies.can_read(60), "it hung up"
        with pytest.raises(redis.ConnectionError):
            replies.read_response()
