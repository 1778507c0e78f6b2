"""One Redis or Valkey server: its content, fill level, and the user's rights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import redis

from kvpool.errors import RepliesTooLarge, StoreUnavailable
from kvpool.key.key import KEY_PREFIX, is_key
from kvpool.store.server.connection import connect
from kvpool.store.server.replies import is_command_refused, reason_of, words_of
from kvpool.store.store import LOOK_KEYS, SCAN_KEYS, StoredBlock, Usage
from kvpool.store.url import SERVER_SCHEMES, StoreURL

RUN_ID_S = 2.0
USAGE_S = 2.0
SCAN_S = 5.0  # per request and reply
RIGHTS_S = 2.0
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
                yield _sized(server, keys)


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


def _sized(server: redis.Redis, keys: list[str]) -> list[StoredBlock]:
    """Blocks with the size of their fields; foreign values count 0 bytes."""
    with server.pipeline(transaction=False) as together:
        for key in keys:
            for field in FIELDS:
                together.hstrlen(key, field)
        replies = together.execute(raise_on_error=False)
    for reply in replies:
        if isinstance(reply, redis.exceptions.NoPermissionError):
            raise reply
    nbytes = [reply if isinstance(reply, int) else 0 for reply in replies]
    count = len(FIELDS)
    return [StoredBlock(key, sum(nbytes[at * count : (at + 1) * count])) for at, key in enumerate(keys)]


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
