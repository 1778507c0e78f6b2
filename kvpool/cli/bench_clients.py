"""What ``kvpool bench store`` measures beside each other: kvpool, and what a Python program would do without it.

The others keep plain values without a checksum, each in the shape that was the fastest of those that were tried for
it (docs/stores.md names them). All keys are spelled as kvpool's, in a namespace of this run alone.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.keys import Namespace
from kvpool.stores import Store
from kvpool.stores.server_announcements import connect
from kvpool.stores.url import SERVER_SCHEMES, StoreURL

if TYPE_CHECKING:
    import glide_sync
    import redis

TENANT = "bench"
TIMEOUT_S = 60.0  # of one batch, and of each step of the other clients
TTL_S = 3600  # of what an interrupted run leaves behind
PIPELINE_NBYTES = 8 << 20  # most that is asked for at once, where a client builds requests and replies whole
TAIL_NBYTES = 128  # as kvpool splits a payload into two fields
GLIDE_THREADS = 4
GLIDE_BATCHED_BELOW_NBYTES = 512 << 10

Views = Sequence[memoryview]
_Item = TypeVar("_Item")


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
        found: list[Client] = [KVPool(store)]
        if url.scheme not in SERVER_SCHEMES:
            found.append(PythonFiles(folder))
        else:
            if not url.path:  # GLIDE has no Unix sockets
                found.append(opened.enter_context(_glide(url)))
            found.append(opened.enter_context(_redis_py(url)))
        yield found


class KVPool:
    """One batch, one return into Python."""

    name = "kvpool"

    def __init__(self, store: Store) -> None:
        self._store = store
        self._key = _keys(self.name)

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


class RedisPy:
    """Pipelines of HSET and of HMGET, of 8 MiB each: kvpool's own layout."""

    name = "redis-py"

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._key = _keys(self.name)

    def put(self, sources: Views) -> None:
        for part in _parts(list(enumerate(sources)), sources[0].nbytes):
            with self._client.pipeline(transaction=False) as pipeline:
                for index, source in part:
                    pipeline.hset(self._key(index), mapping=_fields(source))
                    pipeline.expire(self._key(index), TTL_S)
                pipeline.execute()

    def get(self, targets: Views) -> None:
        for part in _parts(list(enumerate(targets)), targets[0].nbytes):
            with self._client.pipeline(transaction=False) as pipeline:
                for index, _ in part:
                    pipeline.hmget(self._key(index), ["h", "b"])
                for (_, target), values in zip(part, pipeline.execute(), strict=True):
                    _join(target, values)

    def delete(self, count: int) -> None:
        for part in _parts(range(count), 0):
            self._client.unlink(*map(self._key, part))


class Glide:
    """Small values: batches of HSET and of HMGET, of 8 MiB each. Others: SET, and GET into a buffer, by 4 threads."""

    name = "glide"

    def __init__(self, client: glide_sync.GlideClient, threads: ThreadPoolExecutor) -> None:
        self._client, self._threads = client, threads
        self._key = _keys(self.name)

    def put(self, sources: Views) -> None:
        import glide_sync

        if sources[0].nbytes >= GLIDE_BATCHED_BELOW_NBYTES:
            expiry = glide_sync.ExpirySet(glide_sync.ExpiryType.SEC, TTL_S)
            self._each(
                lambda index: self._client.set(self._key(index), sources[index], expiry=expiry), len(sources)
            )
            return
        for part in _parts(list(enumerate(sources)), sources[0].nbytes):
            batch = glide_sync.Batch(is_atomic=False)
            for index, source in part:
                batch.hset(self._key(index), _fields(source))
                batch.expire(self._key(index), TTL_S)
            self._client.exec(batch, raise_on_error=True)

    def get(self, targets: Views) -> None:
        import glide_sync

        if targets[0].nbytes >= GLIDE_BATCHED_BELOW_NBYTES:
            self._each(lambda index: self._client.get(self._key(index), buffer=targets[index]), len(targets))
            return
        for part in _parts(list(enumerate(targets)), targets[0].nbytes):
            batch = glide_sync.Batch(is_atomic=False)
            for index, _ in part:
                batch.hmget(self._key(index), ["h", "b"])
            replies = self._client.exec(batch, raise_on_error=True) or []
            for (_, target), values in zip(part, replies, strict=True):
                _join(target, values)

    def delete(self, count: int) -> None:
        for part in _parts(range(count), 0):
            self._client.unlink([self._key(index) for index in part])

    def _each(self, work: Callable[[int], Any], count: int) -> None:
        def share(first: int) -> None:
            for index in range(first, count, GLIDE_THREADS):
                _all([work(index) is not None])

        list(self._threads.map(share, range(GLIDE_THREADS)))


@contextlib.contextmanager
def _redis_py(url: StoreURL) -> Iterator[RedisPy]:
    import redis

    try:
        with connect(url, timeout_s=TIMEOUT_S) as client:
            yield RedisPy(client)
    except redis.RedisError as error:
        raise StoreUnavailable(f"redis-py: {error}") from error


@contextlib.contextmanager
def _glide(url: StoreURL) -> Iterator[Glide]:
    try:
        import glide_sync
    except ImportError as error:
        raise ConfigError(
            "Valkey GLIDE is measured, too, and not installed: pip install 'kvpool[glide]'"
        ) from error
    glide_sync.Logger.init(glide_sync.LogLevel.ERROR)
    configuration = glide_sync.GlideClientConfiguration(
        [glide_sync.NodeAddress(url.host, url.port)],
        credentials=glide_sync.ServerCredentials(url.password, url.user or None) if url.password else None,
        database_id=url.database or None,
        request_timeout=int(TIMEOUT_S * 1e3),
    )
    try:
        client = glide_sync.GlideClient.create(configuration)
        try:
            with ThreadPoolExecutor(GLIDE_THREADS, "kvpool-bench-glide") as threads:
                yield Glide(client, threads)
        finally:
            client.close()
    except glide_sync.GlideError as error:
        raise StoreUnavailable(f"glide: {error}") from error


def _keys(client: str) -> Callable[[int], str]:
    """Keys of a namespace that nobody else has, by number."""
    namespace = Namespace(TENANT, {"bench": client, "run": secrets.token_hex(16)})
    return lambda index: namespace.key(index.to_bytes(32, "big"), 0, 0)


def _parts(items: Sequence[_Item], value_nbytes: int) -> Iterator[Sequence[_Item]]:
    count = max(1, PIPELINE_NBYTES // value_nbytes) if value_nbytes else 1000
    for start in range(0, len(items), count):
        yield items[start : start + count]


def _fields(source: memoryview) -> dict[Any, Any]:
    """As kvpool lays a record out, without the header's bytes."""
    return {"h": source[-TAIL_NBYTES:], "b": source[:-TAIL_NBYTES]}


def _join(target: memoryview, values: Any) -> None:
    _all([value is not None for value in values])
    target[-TAIL_NBYTES:], target[:-TAIL_NBYTES] = values


def _all(found: Sequence[bool]) -> None:
    if not all(found):
        raise ConfigError("the pool did not keep a whole batch: raise its capacity, or lower --batch-bytes")
