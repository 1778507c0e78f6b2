"""``kvpool capacity``: show, or change, how many bytes a directory may hold for all its processes."""

from __future__ import annotations

import json
from typing import cast

from kvpool.cli.settings import CapacityOptions
from kvpool.errors import ConfigError
from kvpool.store import StoreURL, open_for_inspection
from kvpool.store.file import FileStore
from kvpool.store.url import MIN_CAPACITY_NBYTES
from kvpool.text import MAX_NBYTES, format_nbytes, format_size, parse_sized


def run_capacity(options: CapacityOptions) -> None:
    """Change it, if asked to; then print it. Blocking, for some small calls.

    Errors: ``ConfigError`` for the arguments, a server, or a directory that is no pool; ``StoreUnavailable``.
    """
    url = StoreURL.parse(options.pool).pools()[0]
    if url.scheme != "file":
        raise ConfigError("a server's capacity is its maxmemory; this is for directories: --pool file:///dir")
    nbytes = None if options.size is None else parse_sized(options.size)
    if nbytes is not None and not MIN_CAPACITY_NBYTES <= nbytes < MAX_NBYTES:
        raise ConfigError(f"{options.size} is no capacity of a directory: write 1MiB or more")
    with open_for_inspection(url) as opened:
        store = cast("FileStore", opened)
        before_nbytes = store.capacity_nbytes
        if nbytes is not None:
            store.set_capacity(nbytes)
        now_nbytes, held_nbytes = store.capacity_nbytes, store.counters()["stored_nbytes"]
        shortage = store.shortage(None)
    if options.as_json:
        print(json.dumps({"path": url.path, "capacity_nbytes": now_nbytes, "held_nbytes": held_nbytes}))
        return
    said = "none stands in it" if now_nbytes is None else format_nbytes(now_nbytes)
    was = (
        ""
        if nbytes is None or before_nbytes in (None, nbytes)
        else f" (it was {format_nbytes(before_nbytes or 0)})"
    )
    print(f"{url.path}: capacity {said}{was}, {format_size(held_nbytes)} are held")
    if shortage:
        print(shortage)
