"""``SnapshotStreams``: the index's state, in chunks, for another index at its start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, AsyncExitStack
from typing import Any

import grpc
import grpc.aio

from kvpool.errors import KVPoolError
from kvpool.index.serve.auth import ALL_TENANTS, Permissions
from kvpool.index.serve.calls import Calls, Method, NotTaken, NotWarm
from kvpool.index.serve.health import Health
from kvpool.v1 import index_pb2 as pb

CHUNK_NBYTES = 1 << 20
CHUNK_TIMEOUT_S = 30.0  # for a caller to take one chunk


class SnapshotStreams:
    """``packed``: a snapshot, see ``Fleet.packed``, made in ``threads``; None: this index gives none."""

    def __init__(
        self,
        packed: Callable[[], AbstractContextManager[list[bytes]]] | None,
        health: Health,
        calls: Calls,
        threads: Executor,
    ) -> None:
        self._packed, self._health, self._calls, self._threads = packed, health, calls, threads
        self._taking = asyncio.Lock()

    async def serve(self, context: grpc.aio.ServicerContext) -> None:
        """One at a time."""
        async with AsyncExitStack() as held:

            async def take(_: Any, __: Permissions) -> list[bytes]:
                if self._packed is None or not self._health.serves:
                    raise NotWarm("this index has nothing to give: it is not warm itself")
                if self._taking.locked():
                    raise KVPoolError("another snapshot is under way: ask later")
                await held.enter_async_context(self._taking)
                packed = self._packed()
                packing = self._threads.submit(packed.__enter__)
                # A caller may go while it is packed.
                held.callback(packing.add_done_callback, lambda done: _end(packed, done))
                return await asyncio.wrap_future(packing)

            method = Method(pb.SnapshotRequest, "admin", lambda _: ALL_TENANTS, take)
            request = await self._calls.receive("Snapshot", context)
            caller = self._calls.caller(method.right, context)
            memory = self._calls.memory(caller, context)
            for part in await self._calls.answer(method, request, caller, memory):
                for at in range(0, len(part), CHUNK_NBYTES):
                    chunk = pb.SnapshotChunk(data=part[at : at + CHUNK_NBYTES]).SerializeToString()
                    try:
                        await asyncio.wait_for(context.write(chunk), CHUNK_TIMEOUT_S)
                    except (TimeoutError, asyncio.TimeoutError):
                        raise NotTaken("the caller did not take its snapshot") from None


def _end(packed: AbstractContextManager[Any], packing: Future[Any]) -> None:
    if not packing.cancelled() and packing.exception() is None:
        packed.__exit__(None, None, None)
