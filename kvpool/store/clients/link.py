"""One connection to a server through some client, and the commands that move records over it.

Commands: ``docs/explanation/stores.md``, "On the server". An unexpected reply is ``LinkFault``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from kvpool import _native
from kvpool.store.header import WRITER
from kvpool.store.server.replies import first_word, reason_of
from kvpool.store.url import StoreURL

DIAL_S = 2.0
PATIENCE_S = 0.25  # least limit of a call, and of a dial: a shorter silence says nothing of a server
_PROBE_S = 0.5
PUT_COMMANDS = 4
_UNEXPECTED = "its reply does not fit what it was asked"

Command = tuple[bytes | memoryview, ...]


class LinkFault(Exception):
    """No usable connection; says why."""


class LinkSilent(LinkFault):
    """No answer in time: the next call to this server would wait as long."""


class LinkEnded(LinkFault):
    """The server ended the connection before all replies came; ``said``: in words about the protocol."""

    def __init__(self, words: str, said: bool = False) -> None:
        super().__init__(words)
        self.said = said


class LinkRefused(LinkFault):
    """The server refuses us: user, password, database or rights."""


class ErrorReply(str):
    """An error reply in the server's words; the connection stays usable."""

    __slots__ = ()


class Unanswered(ErrorReply):
    """In place of the reply of one server among several: why there is none. The link stays usable."""

    __slots__ = ()


class Link(Protocol):
    """Used by one thread; ``timeout_s`` bounds every call."""

    def dial(self, timeout_s: float) -> None:
        """Check that the server answers, over the present connection or a new one. Errors: ``LinkFault``."""

    def is_stale(self) -> bool:
        """Whether the connection ended or received an unexpected reply since the last exchange."""

    def exchange(self, commands: Sequence[Command], timeout_s: float) -> list[Any]:
        """Send all, and return a reply each: bytes, int, list, None or ``ErrorReply``. Errors: ``LinkFault``."""

    def drop(self) -> None:
        """Close the connection; ``dial`` makes the next one."""

    def close(self) -> None:
        """Release everything."""


def probe_s(url: StoreURL) -> float:
    """Limit of a dial to an unreachable server: TLS enters a busy interpreter dozens of times."""
    return _PROBE_S if url.tls is None else DIAL_S


def put_commands(key: bytes, view: memoryview, ttl_ms: bytes, writer: bytes) -> list[Command]:
    """A transaction, so that no record lacks a time to live wherever the connection is cut."""
    fields: list[bytes | memoryview] = []
    for name, part in _cut(view):
        fields += [name, part]
    fields[-1] = b"".join((fields[-1], _native.pack_header(key.decode("ascii"), view, writer)))
    return [(b"MULTI",), (b"HSET", key, *fields), (b"PEXPIRE", key, ttl_ms), (b"EXEC",)]


def get_command(key: bytes, view: memoryview) -> Command:
    return (b"HMGET", key, *(name for name, _ in _cut(view)))


def _cut(view: memoryview) -> list[tuple[bytes, memoryview]]:
    """The record's fields without its header: names, and parts of the payload."""
    fields, begin = [], 0
    for name, nbytes in _native.cut_record(view.nbytes):
        fields.append((name.encode("ascii"), view[begin : begin + nbytes]))
        begin += nbytes
    return fields


def put_outcome(replies: Sequence[Any]) -> int | ErrorReply:
    """A key's status from the replies to ``put_commands``; the first of several errors decides."""
    done = replies[-1] if isinstance(replies[-1], list) else []
    for reply in (*replies, *done):
        if isinstance(reply, Unanswered):
            return reply
        if isinstance(reply, ErrorReply):
            words = ErrorReply(reason_of(reply))
            return _native.NO_ROOM if first_word(words) == "OOM" else words
    if len(done) != 2 or done[0] not in (0, 1, 2, 3) or done[1] not in (0, 1):
        raise LinkFault(_UNEXPECTED)
    return _native.OK if done[1] else _native.NO_ROOM


def found(reply: Any) -> int | ErrorReply:
    """A key's status from the reply to EXISTS, TOUCH or UNLINK."""
    if isinstance(reply, ErrorReply):
        return reply
    if reply not in (0, 1):
        raise LinkFault(_UNEXPECTED)
    return _native.OK if reply else _native.MISS


class Read(NamedTuple):
    """What a record is read as. ``damage``: "": it is valid; None: a miss."""

    damage: str | None
    writer: bytes = b""


def read_record(key: str, reply: Any, view: memoryview) -> Read:
    """Copy a record from the reply to ``get_command`` into ``view``."""
    if isinstance(reply, ErrorReply):  # a key of another type
        return Read("magic")
    fields = _cut(view)
    if not isinstance(reply, list) or len(reply) != len(fields):
        raise LinkFault(_UNEXPECTED)
    if not all(isinstance(field, bytes) for field in reply if field is not None):
        raise LinkFault(_UNEXPECTED)
    if all(field is None for field in reply):
        return Read(None)
    header_nbytes = _native.RECORD_HEADER_NBYTES
    if None in reply or len(reply[-1]) < header_nbytes:
        return Read("truncated")
    reply[-1], header = memoryview(reply[-1])[:-header_nbytes], reply[-1][-header_nbytes:]
    if any(len(got) != part.nbytes for got, (_, part) in zip(reply, fields, strict=True)):
        return Read("length")
    for got, (_, part) in zip(reply, fields, strict=True):
        part[:] = got
    return Read(_native.verify_record(key, header, view) or "", header[WRITER])
