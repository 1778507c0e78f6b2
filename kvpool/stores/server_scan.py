"""What blocks lie on a Redis or Valkey server: SCAN in small steps, over a connection of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvpool.errors import StoreUnavailable
from kvpool.keys import is_key
from kvpool.stores.server_announcements import connect
from kvpool.stores.store import SCAN_KEYS, StoredBlock
from kvpool.stores.url import StoreURL

if TYPE_CHECKING:
    import redis

TIMEOUT_S = 5.0  # of each request and reply
_SPECIAL = re.compile(r"([\\*?\[\]])")


def scan_server(url: StoreURL, name: str, prefix: str) -> Iterator[list[StoredBlock]]:
    """``Store.scan`` on the server of ``url``; ``name``: of the store, for errors.

    The server walks about a thousand of its keys in each step, those of others among them; of these nothing but
    the name is read. Errors: ``StoreUnavailable``.
    """
    import redis

    pattern = _SPECIAL.sub(r"\\\1", prefix) + "*"
    try:
        with connect(url, timeout_s=TIMEOUT_S) as server:
            cursor = 0
            while True:
                cursor, names = server.scan(cursor, match=pattern, count=SCAN_KEYS)
                keys = [key for key in (one.decode("ascii", "replace") for one in names) if is_key(key)]
                if keys:
                    yield _sized(server, keys)
                if cursor == 0:
                    return
    except redis.RedisError as error:
        raise StoreUnavailable(f"{name}: cannot look at its blocks: {error}") from error


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
