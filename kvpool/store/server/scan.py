"""What blocks lie on a Redis or Valkey server: SCAN in small steps, over a connection of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvpool.errors import RepliesTooLarge, StoreUnavailable
from kvpool.key.key import is_key
from kvpool.store.server.connection import connect
from kvpool.store.store import LOOK_KEYS, SCAN_KEYS, StoredBlock
from kvpool.store.url import StoreURL

if TYPE_CHECKING:
    import redis

TIMEOUT_S = 5.0  # of each request and reply
_SPECIAL = re.compile(r"([\\*?\[\]])")


def scan_server(url: StoreURL, name: str, prefix: str) -> Iterator[list[StoredBlock]]:
    """``Store.scan`` on the server of ``url``; ``name``: of the store, for errors.

    The server walks about a thousand of its keys in each step, those of others among them; of these nothing but
    the name is read. Errors: ``StoreUnavailable``; ``RepliesTooLarge`` for names, under ``prefix``, of many MiB.
    """
    with _looking(url, name) as server:
        for keys in _walk(server, prefix, SCAN_KEYS):
            if keys:
                yield _sized(server, keys)


def scan_keys(url: StoreURL, name: str, prefix: str) -> Iterator[list[str]]:
    """``Store.scan_keys`` on the server of ``url``. Errors: as ``scan_server``."""
    with _looking(url, name) as server:
        yield from _walk(server, prefix, LOOK_KEYS)


@contextmanager
def _looking(url: StoreURL, name: str) -> Iterator[redis.Redis]:
    import redis

    try:
        with connect(url, timeout_s=TIMEOUT_S, role="scan") as server:
            yield server
    except (redis.RedisError, RepliesTooLarge) as error:
        fault = RepliesTooLarge if isinstance(error, RepliesTooLarge) else StoreUnavailable
        raise fault(f"{name}: cannot look at its blocks: {error}") from error


def _walk(server: redis.Redis, prefix: str, count: int) -> Iterator[list[str]]:
    """The blocks' keys of each step, in which the server walks about ``count``."""
    pattern = _SPECIAL.sub(r"\\\1", prefix) + "*"
    cursor = 0
    while True:
        reply: Any = server.scan(cursor, match=pattern, count=count)
        cursor, names = reply
        yield [key for key in (one.decode("ascii", "replace") for one in names) if is_key(key)]
        if cursor == 0:
            return


def _sized(server: redis.Redis, keys: list[str]) -> list[StoredBlock]:
    """The two fields of a record; what is no record has no bytes that anyone counts."""
    import redis

    with server.pipeline(transaction=False) as together:
        for key in keys:
            together.hstrlen(key, "h")
            together.hstrlen(key, "b")
        replies = together.execute(raise_on_error=False)
    for reply in replies:
        if isinstance(reply, redis.exceptions.NoPermissionError):
            raise reply
    nbytes = [reply if isinstance(reply, int) else 0 for reply in replies]
    return [StoredBlock(key, nbytes[2 * at] + nbytes[2 * at + 1]) for at, key in enumerate(keys)]
