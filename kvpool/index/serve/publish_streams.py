"""``PublishStreams``: batches that publishers push over gRPC, acknowledged and asked for again on their stream.

The handlers run in one event loop. Batches are applied in ``_threads``, apart from those of the other calls, so that a
flood of them keeps no prompt waiting, and shared by tenants, so that one of them does not keep the others waiting.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from kvpool.discovery.worker import DEFAULT_TENANT
from kvpool.index.follow.push import PushReceiver
from kvpool.index.serve import codec
from kvpool.index.serve.auth import Permissions
from kvpool.index.serve.calls import Calls, Method
from kvpool.index.serve.tenant_threads import TenantThreads
from kvpool.v1 import index_pb2 as pb

THREADS, THREADS_OF_TENANT = 4, 2
ACK_TIMEOUT_S = 5.0  # a publisher that does not read for so long is stale


class PublishStreams:
    """Hands batches on to ``receiver``. ``close`` ends the threads."""

    def __init__(self, receiver: PushReceiver, calls: Calls) -> None:
        self._receiver, self._calls = receiver, calls
        self._threads = TenantThreads("kvpool-push", THREADS, THREADS_OF_TENANT)

    def close(self) -> None:
        """Wait for what is being applied."""
        self._threads.close()

    async def serve(self, context: grpc.aio.ServicerContext) -> None:
        """One stream of a publisher."""
        stream = self._receiver.open()
        tenant = DEFAULT_TENANT  # of the last batch

        async def take(batch: Any, _: Permissions) -> Any:
            nonlocal tenant
            tenant = _tenant(batch)
            pushed = codec.decode_batch(batch)
            return await self._threads.run(tenant, lambda: stream.take(pushed))

        answer = self._calls.answering("Publish", Method(pb.EventBatch, "publish", _tenant, take))
        reading: asyncio.Future[Any] | None = None
        try:
            while True:
                reading = reading or asyncio.ensure_future(context.read())
                await asyncio.wait({reading}, timeout=stream.wait_s())
                if reading.done():
                    batch, reading = reading.result(), None
                    if batch is grpc.aio.EOF:
                        return
                    acks = await answer(batch, context)
                else:
                    acks = await self._threads.run(tenant, stream.remind)
                # A publisher that does not read is stale until it does, and delays only itself.
                unread = asyncio.get_running_loop().call_later(ACK_TIMEOUT_S, stream.close)
                try:
                    for ack in acks:
                        await context.write(codec.encode_ack(ack))
                finally:
                    unread.cancel()
        finally:
            if reading is not None:
                reading.cancel()
            stream.close()


def _tenant(batch: Any) -> str:
    return batch.tenant or DEFAULT_TENANT
