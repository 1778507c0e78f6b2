"""``SnapshotStreams``: what an index knows, in chunks, for another index that starts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio

from kvpool.errors import KVPoolError
from kvpool.index import snapshot
from kvpool.index.serve import codec
from kvpool.index.serve.auth import ALL_TENANTS, Permissions
from kvpool.index.serve.calls import Calls, Method, NotTaken, NotWarm
from kvpool.index.serve.health import Health
from kvpool.index.snapshot import Snapshot
from kvpool.v1 import index_pb2 as pb

CHUNK_TIMEOUT_S = 30.0  # for a caller to take one chunk


class SnapshotStreams:
    """``take``: a snapshot of what is known, called in ``threads``; None: there is none to be had."""

    def __init__(
        self, take: Callable[[], Snapshot] | None, health: Health, calls: Calls, threads: Executor
    ) -> None:
        self._take, self._health, self._calls, self._threads = take, health, calls, threads
        self._taking = asyncio.Lock()

    async def serve(self, context: grpc.aio.ServicerContext) -> None:
        """One at a time: it takes as much memory as it has bytes."""
        async with AsyncExitStack() as held:

            async def take(_: Any, __: Permissions) -> list[bytes]:
                if self._take is None or not self._health.serves:
                    raise NotWarm("this index has nothing to give: it is not warm itself")
                if self._taking.locked():
                    raise KVPoolError("another snapshot is under way: ask later")
                await held.enter_async_context(self._taking)
                return await asyncio.get_running_loop().run_in_executor(self._threads, self._pack)

            method = Method(pb.SnapshotRequest, "admin", lambda _: ALL_TENANTS, take)
            request = await self._calls.receive("Snapshot", context)
            for part in await self._calls.answering("Snapshot", method)(request, context):
                for at in range(0, len(part), codec.CHUNK_NBYTES):
                    chunk = pb.SnapshotChunk(data=part[at : at + codec.CHUNK_NBYTES]).SerializeToString()
                    try:
                        await asyncio.wait_for(context.write(chunk), CHUNK_TIMEOUT_S)
                    except (TimeoutError, asyncio.TimeoutError):
                        raise NotTaken("the caller did not take its snapshot") from None

    def _pack(self) -> list[bytes]:
        assert self._take is not None
        return snapshot.pack(self._take())
