"""``Replies``: what a server answers, parsed natively.

redis-py's own parser takes a call of Python for each part of a reply, and a server decides how many parts there
are: beside two busy threads, a map of 16,384 ranges took all 8 seconds that a topology has.
"""

from __future__ import annotations

import select
from math import ceil
from typing import Any

import redis
from redis._parsers import BaseParser

from kvpool import _native

RECEIVE_NBYTES = 1 << 16


def words_of(error: Exception) -> str:
    """A server's error as it was sent; of any other error its text.

    Its first word says what it is. The rest is prose: other errors, versions and servers have the same words.
    """
    return getattr(error, "said", "") or str(error)


def first_word(words: str) -> str:
    return words.partition(" ")[0]


def reason_of(words: str) -> str:
    """An aborted transaction says at its end why EXEC was refused; other words are their own reason."""
    _, because, reason = words.partition("because of: ")
    return reason if because and first_word(words) == "EXECABORT" else words


def is_command_refused(words: str) -> bool:
    """Whether an error concerns the command rather than the key: no right, or unknown."""
    return first_word(words) in ("NOPERM", "ERR") and "command" in words


def is_joining_refused(words: str) -> bool:
    """Whether an error of a command with many keys may be none with one: not one of a busy or loading server."""
    is_of_server = _native.error_status(words) == _native.FAULT
    return not is_of_server or first_word(words) in ("ASK", "MOVED", "TRYAGAIN")


def _error(words: bytes) -> Exception:
    said = words.decode("utf-8", "replace")
    error: Any = BaseParser.parse_error(said)  # type: ignore[no-untyped-call]
    error.said = said  # redis-py cuts off the first word of those that it knows
    return error  # type: ignore[no-any-return]


class Replies(BaseParser):
    """One connection's parser (RESP2), for redis-py: bytes, int, list, None, or an error as a value."""

    def __init__(self, socket_read_size: int) -> None:
        self._socket: Any = None
        self._received = _native.Replies(_error)

    def on_connect(self, connection: Any, **_: Any) -> None:
        self._socket = connection._sock
        self._received = _native.Replies(_error)

    def on_disconnect(self) -> None:
        self._socket = None

    def can_read(self, timeout: float = 0) -> bool:
        """Whether bytes are there within ``timeout`` seconds, or the server has hung up. Errors: ``OSError``."""
        if not self._received.empty() or ((pending := getattr(self._socket, "pending", None)) and pending()):
            return True
        polled = select.poll()
        polled.register(self._socket, select.POLLIN)
        return bool(polled.poll(ceil(timeout * 1e3)))

    def read_response(self, disable_decoding: bool = False, **_: Any) -> Any:
        """The next reply. Errors: ``OSError``; redis-py's for no reply, and for one that is about the connection."""
        while not self._received.ready():
            if self._socket is None or not (data := self._socket.recv(RECEIVE_NBYTES)):
                raise redis.ConnectionError("Connection closed by server.")
            try:
                self._received.feed(data)
            except ValueError as error:
                raise redis.InvalidResponse(f"Protocol Error: {error}") from error
        reply = self._received.take()
        if isinstance(reply, redis.ConnectionError):
            raise reply
        return reply
