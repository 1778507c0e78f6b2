"""``PublishStreams``: batches that publishers push over gRPC, acknowledged and asked for again on their stream.

The handlers run in one event loop. Batches are applied in ``_threads``, apart from those of the other calls, so that a
flood of them keeps no prompt waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc
import grpc.aio

from kvpool.discovery.worker import DEFAULT_TENANT
from kvpool.index.follow.push import PushReceiver
from kvpool.index.serve import codec
from kvpool.index.serve.auth import Permissions
from kvpool.index.serve.calls import Calls, Method
from kvpool.v1 import index_pb2 as pb

THREADS = 2
ACK_TIMEOUT_S = 5.0  # a publisher that does not read for so long is stale

Value = TypeVar("Value")


class PublishStreams:
    """Hands batches on to ``receiver``. ``close`` ends the threads."""

    def __init__(self, receiver: PushReceiver, calls: Calls) -> None:
        self._receiver, self._calls = receiver, calls
        self._threads = ThreadPoolExecutor(THREADS, "kvpool-push")

    def close(self) -> None:
        """Wait for what is being applied."""
        self._threads.shutdown()

    async def serve(self, context: grpc.aio.ServicerContext) -> None:
        """One stream of a publisher."""
        stream = self._receiver.open()

        async def take(batch: Any, _: Permissions) -> Any:
            pushed = codec.decode_batch(batch)
            return await self._in_thread(lambda: stream.take(pushed))

        answer = self._calls.answering(
            "Publish", Method(pb.EventBatch, "publish", lambda batch: batch.tenant or DEFAULT_TENANT, take)
        )
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
                    acks = await self._in_thread(stream.remind)
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

    async def _in_thread(self, work: Callable[[], Value]) -> Value:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
