"""What stores with a native data path have in common: batches go to an engine of the C++ core."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from kvpool import _native
from kvpool.errors import ConfigError, StoreClosed, StoreUnavailable
from kvpool.key.key import namespace_prefix
from kvpool.store.lookup import LookupKeys
from kvpool.store.store import DEFAULT_TIMEOUT_S, Store


class NativeStore(Store):
    """A store whose bytes are moved by ``engine``, which it owns; a subclass adds the leased documents.

    ``name``: without secrets.
    """

    def __init__(self, name: str, engine: _native.IoExecutor) -> None:
        super().__init__(name)
        self._engine = engine

    def counters(self) -> dict[str, int]:
        self._check_open()
        return self._engine.counters()

    def _submit(
        self, operation: int, keys: Sequence[str], views: Sequence[memoryview] | None, timeout_s: float
    ) -> _native.Batch:
        with self._mapped():
            return self._engine.submit(operation, keys, views, timeout_s)

    def _submit_lookup(self, keys: LookupKeys, timeout_s: float) -> _native.Batch:
        prefix = namespace_prefix(keys.namespace.tenant, keys.namespace.hex)
        groups = [
            (
                group.hashes,
                group.hash_nbytes,
                group.group,
                group.ranks,
                group.record_tokens,
                group.sliding_window,
            )
            for group in keys.groups
        ]
        with self._mapped():
            return self._engine.lookup(prefix, groups, timeout_s)

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError) as error:
            raise ConfigError(str(error)) from error
        except RuntimeError as error:
            if self._closed:
                raise StoreClosed(f"{self._name}: the store is closed") from error
            raise StoreUnavailable(f"{self._name}: {error}") from error

    def _close(self) -> None:
        if not self._engine.close(DEFAULT_TIMEOUT_S):
            raise StoreUnavailable(f"{self._name}: a thread is stuck in the system; it was left behind")
