"""Another project's client of a server, driven by lines of JSON: ``{"do": ..., ...}``, ``{"result": ...}``.

Runs in an environment with that client and without kvpool, so it imports nothing of kvpool. Each client is
used in its fastest intended way: buffers in place, a batch per call if supported, else several threads.
Values are plain strings, without verification.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

TIMEOUT_S = 60.0


@contextlib.contextmanager
def busy_interpreter() -> Iterator[None]:
    """A pure-Python thread that never yields the GIL voluntarily."""
    stop = threading.Event()

    def spin() -> None:
        count = 0
        while not stop.is_set():
            for _ in range(10_000):
                count += 1

    thread = threading.Thread(target=spin, name="kvpool-bench-spin", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class LMCache:
    """LMCache's native RESP client: one call a batch, completed by an eventfd."""

    def __init__(self, at: dict[str, Any]) -> None:
        # Its package imports all of LMCache, CUDA included; the client's extension module needs only torch.
        import importlib.machinery
        import importlib.metadata
        import importlib.util

        import torch  # noqa: F401  (loads the libraries that it needs)

        found = [
            str(file.locate())
            for file in importlib.metadata.files("lmcache") or ()
            if file.name.startswith("lmcache_redis.")
        ]
        loader = importlib.machinery.ExtensionFileLoader("lmcache_redis", found[0])
        spec = importlib.util.spec_from_loader("lmcache_redis", loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        if at["database"]:
            raise RuntimeError("it has no SELECT")
        self._client = module.LMCacheRedisClient(
            at["host"], at["port"], at["threads"], at["user"], at["password"]
        )
        self._completed = self._client.event_fd()

    def put(self, keys: list[str], views: list[memoryview]) -> None:
        self._wait(self._client.submit_batch_set(keys, views))

    def get(self, keys: list[str], views: list[memoryview]) -> None:
        self._wait(self._client.submit_batch_get(keys, views))

    def exists(self, keys: list[str]) -> list[bool]:
        return [bool(each) for each in self._wait(self._client.submit_batch_exists(keys))]

    def delete(self, keys: list[str]) -> None:
        self._wait(self._client.submit_batch_delete(keys))

    def _wait(self, asked: int) -> Any:
        import select

        while True:
            if not select.select([self._completed], [], [], TIMEOUT_S)[0]:
                raise RuntimeError("no completion")
            for future, good, error, result in self._client.drain_completions():
                if not good:
                    raise RuntimeError(error)
                if future == asked:
                    return result


class Redis:
    """redis-py: a connection per thread; hiredis reads, its own packer sends memoryviews without a copy."""

    def __init__(self, at: dict[str, Any]) -> None:
        import redis

        self._server = redis.Redis(
            at["host"], at["port"], at["database"], at["password"] or None, username=at["user"] or None,
            socket_timeout=TIMEOUT_S, protocol=2, max_connections=at["threads"] + 1,
        )  # fmt: skip
        try:
            from redis.connection import PythonRespSerializer

            pool = self._server.connection_pool
            pool.connection_kwargs["command_packer"] = PythonRespSerializer(
                6000, self._server.get_encoder().encode
            )
        except ImportError:
            pass  # an older redis-py: its packer copies
        self._server.ping()
        self._threads = ThreadPoolExecutor(at["threads"])

    def put(self, keys: list[str], views: list[memoryview]) -> None:
        list(self._threads.map(self._server.set, keys, views))

    def get(self, keys: list[str], views: list[memoryview]) -> None:
        def one(key: str, view: memoryview) -> None:
            value: Any = self._server.get(key)
            view[:] = value

        list(self._threads.map(one, keys, views))

    def exists(self, keys: list[str]) -> list[bool]:
        with self._server.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.exists(key)
            return [bool(each) for each in pipeline.execute()]

    def delete(self, keys: list[str]) -> None:
        for first in range(0, len(keys), 1000):
            self._server.unlink(*keys[first : first + 1000])


class Glide:
    """Valkey GLIDE's synchronous client, into buffers in place; one client for all threads."""

    def __init__(self, at: dict[str, Any]) -> None:
        import glide_sync

        self._glide = glide_sync
        self._client = glide_sync.GlideClient.create(
            glide_sync.GlideClientConfiguration(
                [glide_sync.NodeAddress(at["host"], at["port"])],
                credentials=(
                    glide_sync.ServerCredentials(at["password"], at["user"] or None)
                    if at["password"]
                    else None
                ),
                database_id=at["database"] or None,
                request_timeout=int(TIMEOUT_S * 1e3),
            )
        )
        self._threads = ThreadPoolExecutor(at["threads"])

    def put(self, keys: list[str], views: list[memoryview]) -> None:
        list(self._threads.map(self._client.set, keys, views))

    def get(self, keys: list[str], views: list[memoryview]) -> None:
        def one(key: str, view: memoryview) -> None:
            self._client.get(key, buffer=view)

        list(self._threads.map(one, keys, views))

    def exists(self, keys: list[str]) -> list[bool]:
        batch = self._glide.Batch(is_atomic=False)
        for key in keys:
            batch.exists([key])
        return [bool(each) for each in self._client.exec(batch, raise_on_error=True) or ()]

    def delete(self, keys: list[str]) -> None:
        for first in range(0, len(keys), 1000):
            self._client.unlink(list(keys[first : first + 1000]))


CLIENTS: dict[str, Callable[[dict[str, Any]], Any]] = {"lmcache": LMCache, "redis": Redis, "glide": Glide}


class Turns:
    def __init__(self) -> None:
        self._client: Any = None
        self._keys: list[str] = []
        self._sources: list[memoryview] = []
        self._targets: list[memoryview] = []
        self._busy = contextlib.ExitStack()

    def do(self, asked: dict[str, Any]) -> Any:
        count = asked.get("count", 0)
        keys = self._keys[:count]
        if asked["do"] == "open":
            self._client = CLIENTS[asked["client"]](asked)
        elif asked["do"] == "fill":
            self._keys = [f"{asked['prefix']}{index}" for index in range(count)]
            self._sources = [memoryview(bytearray(os.urandom(asked["nbytes"]))) for _ in range(count)]
            self._targets = [memoryview(bytearray(asked["nbytes"])) for _ in range(count)]
            self._client.put(self._keys, self._sources)
        elif asked["do"] == "put":
            return timed(lambda: self._client.put(keys, self._sources[:count]))
        elif asked["do"] == "get":
            targets = self._targets[:count]
            for target in targets:
                target[:] = bytes(len(target))
            taken_s = timed(lambda: self._client.get(keys, targets))
            if targets != self._sources[:count]:
                raise RuntimeError("it gave other bytes than it took")
            return taken_s
        elif asked["do"] == "exists":
            found: list[bool] = []
            taken_s = timed(lambda: found.extend(self._client.exists(keys)))
            if found != [True] * count:
                raise RuntimeError("it did not find what it put")
            return taken_s
        elif asked["do"] == "busy":
            if asked["on"]:
                self._busy.enter_context(busy_interpreter())
            else:
                self._busy.close()
        elif asked["do"] == "empty":
            self._client.delete(self._keys)
        return None


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    # Separates answers from a client's prints.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    turns = Turns()
    for line in sys.stdin:
        try:
            answer = {"result": turns.do(json.loads(line))}
        except Exception as error:  # any exception is the client's answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
    os._exit(0)  # a client's threads may not end


if __name__ == "__main__":
    main()
