"""``reflection_handlers``: gRPC's reflection, which says what is served here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection, reflection_pb2

from kvpool.index.serve.calls import Calls


def reflection_handlers(calls: Calls, services: Sequence[str]) -> dict[str, grpc.RpcMethodHandler]:
    """Handlers of gRPC's reflection, which takes no token."""
    servicer = reflection.aio.ReflectionServicer(services)

    async def serve(context: grpc.aio.ServicerContext) -> None:
        async def requests() -> AsyncIterator[Any]:
            while (request := await context.read()) is not grpc.aio.EOF:
                yield request

        async for reply in servicer.ServerReflectionInfo(requests(), context):
            await context.write(reply)

    handler = grpc.stream_stream_rpc_method_handler(
        calls.stream("ServerReflectionInfo", None, serve),
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return {"ServerReflectionInfo": handler}
