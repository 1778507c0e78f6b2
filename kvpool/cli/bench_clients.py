"""What ``kvpool bench store`` measures beside each other: kvpool's own client of a store, and others.

On a server these are the stores of ``?client=glide`` and ``?client=redis``, which do the same job: records that prove
themselves, in the same layout. Beside a directory it is a plain loop over files. All keys are of this run alone.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from kvpool.errors import ConfigError
from kvpool.keys import Namespace
from kvpool.stores import Store, open_store
from kvpool.stores.url import SERVER_SCHEMES, StoreURL

OWN = "kvpool"
TENANT = "bench"
TIMEOUT_S = 120.0  # of one batch

Views = Sequence[memoryview]


class Client(Protocol):
    """Value ``i`` of a batch has a place of its own, ``delete`` empties all of them."""

    name: str

    def put(self, sources: Views) -> None: ...
    def get(self, targets: Views) -> None: ...
    def delete(self, count: int) -> None: ...


@contextlib.contextmanager
def clients(store: Store, url: StoreURL, folder: Path) -> Iterator[list[Client]]:
    """kvpool's own first, then the others that this pool can be reached with; closed at the end of the block."""
    with contextlib.ExitStack() as opened:
        found: list[Client] = [KVPool(OWN, store)]
        if url.scheme not in SERVER_SCHEMES:
            found.append(PythonFiles(folder))
        else:
            if not url.path:  # GLIDE has no Unix sockets
                found.append(KVPool("glide", opened.enter_context(open_store(replace(url, client="glide")))))
            found.append(KVPool("redis-py", opened.enter_context(open_store(replace(url, client="redis")))))
        yield found


class KVPool:
    """One batch of a store, one return into Python."""

    def __init__(self, name: str, store: Store) -> None:
        self.name = name
        self._store = store
        self._key = _keys(name)

    def put(self, sources: Views) -> None:
        _all(self._store.put_many(self._keys(len(sources)), sources, timeout_s=TIMEOUT_S))

    def get(self, targets: Views) -> None:
        _all(self._store.get_many_into(self._keys(len(targets)), targets, timeout_s=TIMEOUT_S))

    def delete(self, count: int) -> None:
        self._store.delete_many(self._keys(count), timeout_s=TIMEOUT_S)

    def _keys(self, count: int) -> list[str]:
        return [self._key(index) for index in range(count)]


class PythonFiles:
    """One file a value: ``write``, ``readinto``."""

    name = "python files"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()

    def put(self, sources: Views) -> None:
        for index, source in enumerate(sources):
            (self._folder / f"{index}").write_bytes(source)

    def get(self, targets: Views) -> None:
        for index, target in enumerate(targets):
            with (self._folder / f"{index}").open("rb", buffering=0) as file:
                _all([file.readinto(target) == len(target)])

    def delete(self, count: int) -> None:
        for index in range(count):
            (self._folder / f"{index}").unlink(missing_ok=True)


def _keys(client: str) -> Callable[[int], str]:
    """Keys of a namespace that nobody else has, by number."""
    namespace = Namespace(TENANT, {"bench": client, "run": secrets.token_hex(16)})
    return lambda index: namespace.key(index.to_bytes(32, "big"), 0, 0)


def _all(found: Sequence[bool]) -> None:
    if not all(found):
        raise ConfigError("the pool did not keep a whole batch: raise its capacity, or lower --batch-bytes")
