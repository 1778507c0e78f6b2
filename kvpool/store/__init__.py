"""Stores move batches of buffers in and out of shared memory, by key.

``open_store`` picks the store of a URL; ``Store`` is their common interface.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace

from kvpool.errors import ConfigError
from kvpool.store.batch import Batch, LookupBatch, LookupGroup
from kvpool.store.store import DEFAULT_TIMEOUT_S, Store
from kvpool.store.url import SERVER_SCHEMES, StoreURL, check_threads
from kvpool.text import joined_urls

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "LookupBatch",
    "LookupGroup",
    "Store",
    "StoreURL",
    "Batch",
    "open_for_inspection",
    "open_store",
]

logger = logging.getLogger("kvpool.store")


def open_store(
    url: str | Sequence[str] | StoreURL,
    *,
    threads: int | None = None,
    opened_by: str = "",
    must_answer: bool = True,
) -> Store:
    """Open the store at ``url``: ``file:///dir``, ``valkey://host:6379`` or ``valkey+unix:///socket``.

    Two URLs, in a list or with a space between them: a near pool, which is a directory, before a far one.

    ``threads``: threads that move bytes, 1 to 64, each with its own connections to a server; None: as in the
    URL, or 2. They are native unless the URL names another client: ``?client=redis``. ``opened_by``: names
    the connections in ``CLIENT LIST``; empty: this host and process. Blocks: a file store makes its
    directory; a server is pinged, for a few seconds at most. ``must_answer``: false: a host that does not answer
    is no error, and is used when it does (by the native client). Close the store, or use ``with``. Errors:
    ``ConfigError`` for a wrong URL, ``StoreUnavailable`` for an unreachable store; each one line that says
    what to do.
    """
    parsed = url if isinstance(url, StoreURL) else StoreURL.parse(joined_urls(url))  # type: ignore[arg-type]
    if threads is not None:
        check_threads(threads)
    if parsed.near is not None:
        from kvpool.store.near_far import NearFarStore

        with contextlib.ExitStack() as opened:
            near, far = (
                opened.enter_context(
                    open_store(one, threads=threads, opened_by=opened_by, must_answer=must_answer)
                )
                for one in parsed.pools()
            )
            if parsed.scheme == "file":
                from kvpool.store.file import pool_id

                if pool_id(parsed.near.path) == pool_id(parsed.path):  # by a link, or a second mount
                    raise ConfigError(
                        f"{far!r}: the near pool and the far one are the same directory; name another one"
                    )
            store: Store = NearFarStore(
                near, far, all_goes_far=parsed.near.far != "reused", far_ttl_s=parsed.ttl_s
            )
            opened.pop_all()
            return store
    if parsed.scheme in SERVER_SCHEMES:
        from kvpool.store.valkey import ValkeyStore

        parsed = replace(parsed, threads=threads or parsed.threads, opened_by=opened_by)
        store = ValkeyStore(parsed, must_answer)
        for refused in store.refused_commands():
            logger.warning("kvpool: %r: %s (kvpool doctor says what to change)", store, refused.says)
        return store
    assert parsed.scheme == "file", parsed.scheme
    from kvpool.store.file import FileStore

    directory = FileStore(parsed.path, parsed.capacity_nbytes, threads or parsed.threads)
    if shortage := directory.shortage(parsed.capacity_nbytes if parsed.says_capacity else None):
        logger.warning("kvpool: %r: %s", directory, shortage)
    return directory


def open_for_inspection(url: str | StoreURL) -> Store:
    """``open_store`` of one pool, read-only: it writes and evicts nothing in a directory.

    The server user's rights are not checked. Errors: as ``open_store``; ``ConfigError`` without a pool there.
    """
    parsed = url if isinstance(url, StoreURL) else StoreURL.parse(url)
    assert parsed.near is None, "each pool by itself: StoreURL.pools"
    if parsed.scheme in SERVER_SCHEMES:
        from kvpool.store.valkey import ValkeyStore

        return ValkeyStore(replace(parsed, threads=1))
    from kvpool.store.file import FileStore

    return FileStore(parsed.path, None, 1)
