"""Stores: batches of buffers in and out of shared memory of some kind, by key.

``open_store`` picks the store that a URL names; ``Store`` is what every one of them can do.
"""

from __future__ import annotations

from kvpool.stores.store import DEFAULT_TIMEOUT_S, Store
from kvpool.stores.transfer import Transfer
from kvpool.stores.url import StoreURL, check_threads

__all__ = ["DEFAULT_TIMEOUT_S", "Store", "StoreURL", "Transfer", "open_store"]


def open_store(url: str, *, threads: int | None = None) -> Store:
    """Open the store that ``url`` names: ``memory://`` or ``file:///dir``.

    ``threads``: native threads that move bytes, 1 to 64; None: what the URL says, or 2.
    Blocking: a file store makes its directory and reads what is there. Close the store, or use ``with``.
    Errors: ``ConfigError`` for a URL that is wrong, ``StoreUnavailable`` for a store that cannot be reached;
    each one line that says what to do.
    """
    parsed = StoreURL.parse(url)
    if threads is not None:
        check_threads(threads)
    if parsed.scheme == "memory":
        from kvpool.stores.memory import MemoryStore

        return MemoryStore(parsed.capacity_nbytes)
    assert parsed.scheme == "file", parsed.scheme
    from kvpool.stores.file import FileStore

    return FileStore(parsed.path, parsed.capacity_nbytes, threads or parsed.threads)
