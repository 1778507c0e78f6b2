"""One Redis or Valkey server: its content, fill level, and the user's rights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import redis

from kvpool._native import RECORD_HEADER_NBYTES, cut_record
from kvpool.errors import RepliesTooLarge, StoreUnavailable
from kvpool.key.key import KEY_PREFIX, is_key
from kvpool.store.header import writer_in
from kvpool.store.server.connection import connect, max_replies
from kvpool.store.server.replies import is_command_refused, reason_of, words_of
from kvpool.store.store import LOOK_KEYS, SCAN_KEYS, StoredBlock, Usage, WrittenBlock
from kvpool.store.url import SERVER_SCHEMES, StoreURL

RUN_ID_S = 2.0
USAGE_S = 2.0
SCAN_S = 5.0  # per request and reply
RIGHTS_S = 2.0
LAST_FIELDS_NBYTES = 8 << 20  # read in a step, but one is read whole: most have 92 bytes
FIELDS = ("b", "c", "h")  # of a record; the first two only of those that are cut
_SPECIAL = re.compile(r"([\\*?\[\]])")

_KEY = f"{KEY_PREFIX}:rights"  # only its name matters; no tenant owns it
_BEGIN = (("MULTI",), ("EXEC",))
_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("HMGET", _KEY, *FIELDS),
    ("EXISTS", _KEY),
    ("TOUCH", _KEY),
    ("PTTL", _KEY),
    ("HSET", _KEY, "b", ""),
    ("PEXPIRE", _KEY, "1"),
    ("UNLINK", _KEY),
)
# command -> the cost of lacking it
COSTS = {
    "MULTI": "nothing can be put",
    "EXEC": "nothing can be put",
    "HMGET": "nothing can be loaded",
    "EXISTS": "nothing can be looked up",
    "TOUCH": "a lookup does not keep a block from being evicted",
    "PTTL": "a block expires while it is in use",
    "HSET": "nothing can be put",
    "PEXPIRE": "nothing can be put",
    "UNLINK": "damaged blocks stay",
}


def run_id(url: StoreURL, name: str) -> str:
    """The server's run id; empty if INFO is refused. Errors: ``StoreUnavailable``."""
    try:
        with connect(url, timeout_s=RUN_ID_S, role="life") as server:
            return run_id_of(server)
    except Exception as error:  # any client error on any reply
        raise StoreUnavailable(f"{name}: cannot ask for its run_id: {error}") from error


def run_id_of(server: redis.Redis) -> str:
    try:
        return str(server.info("server").get("run_id", ""))
    except redis.exceptions.ResponseError:  # also without the permission
        return ""


def usage_of(url: StoreURL) -> Usage:
    """The server's fill level. Blocks for a second or two. Never raises."""
    (name,) = url.servers
    try:
        with connect(url, timeout_s=USAGE_S, role="usage") as server:
            return _usage(name, server)
    except Exception:  # any client error on any reply
        return Usage(name, up=False)


def _usage(name: str, server: redis.Redis) -> Usage:
    try:
        info = server.info()
    except redis.exceptions.ResponseError:  # also without the permission
        return Usage(name)
    used_nbytes, capacity_nbytes = info.get("used_memory"), info.get("maxmemory") or None
    is_full = bool(used_nbytes and capacity_nbytes and used_nbytes >= capacity_nbytes)
    databases = [part for database, part in info.items() if re.fullmatch(r"db[0-9]+", database)]
    return Usage(
        name,
        used_nbytes=used_nbytes,
        capacity_nbytes=capacity_nbytes,
        keys=sum(part["keys"] for part in databases),
        evicted=info.get("evicted_keys"),
        refuses=is_full and info.get("maxmemory_policy") == "noeviction",
    )


def server_name(url: StoreURL) -> str:
    assert url.scheme in SERVER_SCHEMES, url.scheme
    if url.nodes:
        hosts = ",".join(url.servers)
        return f"{url.scheme}://{hosts}" + (f"/{url.service}/{url.database}" if url.service else "")
    if url.path:
        return f"{url.scheme}://{url.path}?db={url.database}"
    return f"{url.scheme}://{url.servers[0]}/{url.database}"


def scan_server(url: StoreURL, name: str, prefix: str) -> Iterator[list[StoredBlock]]:
    """``Store.scan`` on one server; ``name``: of the store, for errors.

    Each step walks about a thousand keys, foreign ones included, of which only the names are read. Errors:
    ``StoreUnavailable``; ``RepliesTooLarge`` for names under ``prefix`` of many MiB.
    """
    with _looking(url, name) as server:
        for keys in _walk(server, prefix, SCAN_KEYS):
            if keys:
                yield [StoredBlock(key, sum(of)) for key, of in _sized(server, keys).items()]


def scan_writers(url: StoreURL, name: str, prefix: str) -> Iterator[list[WrittenBlock]]:
    """``Store.scan_writers`` on one server: of each record its last field. Errors: as ``scan_server``."""
    with _looking(url, name) as server:
        for keys in _walk(server, prefix, SCAN_KEYS):
            if keys:
                yield _written(server, _sized(server, keys))


def scan_keys(url: StoreURL, name: str, prefix: str) -> Iterator[list[str]]:
    """``Store.scan_keys`` on one server. Errors: as ``scan_server``."""
    with _looking(url, name) as server:
        yield from _walk(server, prefix, LOOK_KEYS)


@contextmanager
def _looking(url: StoreURL, name: str) -> Iterator[redis.Redis]:
    try:
        with connect(url, timeout_s=SCAN_S, role="scan") as server:
            yield server
    except (redis.RedisError, RepliesTooLarge) as error:
        fault = RepliesTooLarge if isinstance(error, RepliesTooLarge) else StoreUnavailable
        raise fault(f"{name}: cannot look at its blocks: {error}") from error


def _walk(server: redis.Redis, prefix: str, count: int) -> Iterator[list[str]]:
    """The blocks' keys of each step of about ``count`` walked keys."""
    pattern = _SPECIAL.sub(r"\\\1", prefix) + "*"
    cursor = 0
    while True:
        reply: Any = server.scan(cursor, match=pattern, count=count)
        cursor, names = reply
        yield [key for key in (one.decode("ascii", "replace") for one in names) if is_key(key)]
        if cursor == 0:
            return


def _sized(server: redis.Redis, keys: list[str]) -> dict[str, tuple[int, ...]]:
    """The sizes of the blocks' ``FIELDS``; 0: there is none, or a foreign value."""
    with server.pipeline(transaction=False) as together:
        for key in keys:
            for field in FIELDS:
                together.hstrlen(key, field)
        replies = _replies(together)
    nbytes = [reply if isinstance(reply, int) else 0 for reply in replies]
    count = len(FIELDS)
    return {key: tuple(nbytes[at * count : (at + 1) * count]) for at, key in enumerate(keys)}


def _written(server: redis.Redis, sizes: dict[str, tuple[int, ...]]) -> list[WrittenBlock]:
    """Blocks with their writers; of what is not cut as a record nothing is read."""
    headers: dict[str, bytes] = {}
    step: list[str] = []
    step_nbytes = 0
    for key, of in sizes.items():
        if not _is_cut(of):
            continue
        if step_nbytes + of[-1] > LAST_FIELDS_NBYTES:
            headers |= _headers(server, step, step_nbytes)
            step, step_nbytes = [], 0
        step.append(key)
        step_nbytes += of[-1]
    headers |= _headers(server, step, step_nbytes)
    return [
        WrittenBlock(key, sum(of), writer_in(headers.get(key, b""), key, sum(of)))
        for key, of in sizes.items()
    ]


def _headers(server: redis.Redis, keys: list[str], nbytes: int) -> dict[str, bytes]:
    """What stands at the end of the last fields, which have ``nbytes`` together."""
    with max_replies(nbytes + LAST_FIELDS_NBYTES), server.pipeline(transaction=False) as together:
        for key in keys:
            together.hmget(key, FIELDS[-1])  # a right that workers have, unlike HGET
        replies = _replies(together)
    found = {key: reply[0] for key, reply in zip(keys, replies, strict=True) if isinstance(reply, list)}
    return {key: last[-RECORD_HEADER_NBYTES:] for key, last in found.items() if isinstance(last, bytes)}


def _is_cut(sizes: tuple[int, ...]) -> bool:
    """Whether a record has fields of these sizes."""
    payload_nbytes = sum(sizes) - RECORD_HEADER_NBYTES
    if payload_nbytes <= 0:
        return False
    cut = dict(cut_record(payload_nbytes))
    cut[FIELDS[-1]] += RECORD_HEADER_NBYTES
    return sizes == tuple(cut.get(name, 0) for name in FIELDS)


def _replies(together: Any) -> list[Any]:
    """Of a pipeline; a refusal of this user is raised, other errors stand in the list."""
    replies: list[Any] = together.execute(raise_on_error=False)
    for reply in replies:
        if isinstance(reply, redis.exceptions.NoPermissionError):
            raise reply
    return replies


class MissingRight(NamedTuple):
    """A refused or unknown command, with the server's words."""

    command: str
    words: str

    @property
    def says(self) -> str:
        return f"{COSTS[self.command]}: the server refuses {self.command} to this user ({self.words})"


def refused_commands(url: StoreURL) -> list[MissingRight]:
    """The commands of ``COSTS`` that the server refuses this user.

    The commands are queued in a transaction that is never executed: the server judges each by rights and
    command list when queued.

    Blocks for two round trips on its own connection. Errors: redis-py's, and ``ValueError`` for nonsense.
    """
    with connect(url, timeout_s=RIGHTS_S, role="rights") as server:
        connection: Any = server.connection_pool.make_connection()
        try:
            connection.connect()
            refused = _asked(connection, _BEGIN)
            if not refused:  # otherwise the rest would be executed
                refused = _asked(connection, (("MULTI",), *_COMMANDS))
            return refused
        finally:
            connection.disconnect()  # and so discards the transaction


def _asked(connection: Any, commands: Sequence[tuple[str, ...]]) -> list[MissingRight]:
    connection.send_packed_command(connection.pack_commands(commands), False)
    refused = []
    for command in commands:
        try:
            connection.read_response()
        except redis.ResponseError as error:
            # Refusals of the key do not matter: no tenant owns it.
            if is_command_refused(reason := reason_of(words_of(error))):
                refused.append(MissingRight(command[0], reason))
    return refused
