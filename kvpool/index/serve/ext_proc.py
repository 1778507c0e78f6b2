"""``ExtProcServer``: the endpoint picker of the Gateway API inference extension, for Envoy and what is made of it.

Envoy opens a stream of ``envoy.service.ext_proc.v3.ExternalProcessor`` for each request, and sends its headers and
body. It is told where the request should go by the header and by the dynamic metadata
``x-gateway-destination-endpoint`` (namespace ``envoy.lb``): ``IP:PORT``, several in the order in which to try them.
Sources: proposal 004 of kubernetes-sigs/gateway-api-inference-extension; Envoy's ``external_processor.proto``.

Bodies come whole (``BUFFERED``) or in parts that are handed back (``FULL_DUPLEX_STREAMED``, which the protocol asks
for); in other modes a request is placed by load, once. One event loop.
"""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvpool.discovery.worker import DEFAULT_TENANT
from kvpool.errors import ConfigError
from kvpool.index.client.tls import ServerTls
from kvpool.index.serve.calls import Calls
from kvpool.index.serve.ext_proc_exchange import Exchange
from kvpool.index.serve.fields import check_fields
from kvpool.index.serve.grpc_server import open_server
from kvpool.index.serve.health import HEALTH, Health
from kvpool.index.serve.limiter import of_placements
from kvpool.index.serve.placements import MAX_BODY_NBYTES, Placements
from kvpool.v1 import ext_proc_pb2 as pb

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
TENANT = "x-kvpool-tenant"  # in the metadata of Envoy's call: its operator says it, not who sends the request
CALLS_OF_CONNECTION = 1024
MAX_HEADERS = 1000  # of a request or a response; Envoy takes 100 unless it is told otherwise
MAX_HEADERS_NBYTES = 256 << 10  # with the metadata beside them; Envoy takes 60 KiB
MAX_MESSAGE_NBYTES = MAX_BODY_NBYTES + (1 << 20)  # a body that is a little too large is answered with 413
STOP_TIMEOUT_S = 5.0


class ExtProcServer:
    """Use it in one event loop: ``start``, ``stop``.

    ``calls``, ``health``: of the index, whose callers and whose state these are. ``max_connection_age_s``,
    ``max_connection_grace_s``: as of ``IndexServer``.
    """

    def __init__(
        self,
        placements: Placements,
        calls: Calls,
        health: Health,
        *,
        tls: ServerTls | None = None,
        max_connection_age_s: float = 0.0,
        max_connection_grace_s: float = 0.0,
    ) -> None:
        self._placements, self._calls, self._health, self._tls = placements, calls, health, tls
        self._ages_s = (max_connection_age_s, max_connection_grace_s)
        self._limiter = of_placements()
        self._server: grpc.aio.Server | None = None

    async def start(self, listen: str) -> int:
        """Listen on ``HOST:PORT``; port 0: any that is free. Returns the port. Errors: ``ConfigError``."""
        handlers = {
            SERVICE: {
                "Process": grpc.stream_stream_rpc_method_handler(
                    self._calls.stream("Process", "read", self._serve, self._limiter)
                )
            },
            HEALTH: self._health.handlers(self._calls),
        }
        self._server, port = open_server(
            listen,
            handlers,
            self._tls,
            calls_of_connection=CALLS_OF_CONNECTION,
            request_nbytes=MAX_MESSAGE_NBYTES,
            age_s=self._ages_s[0],
            grace_s=self._ages_s[1],
        )
        await self._server.start()
        return port

    async def stop(self) -> None:
        """Refuse new requests, and give those under way a few seconds."""
        if self._server is not None:
            await self._server.stop(STOP_TIMEOUT_S)

    async def _serve(self, context: grpc.aio.ServicerContext) -> None:
        metadata = {str(key): str(value) for key, value in context.invocation_metadata() or ()}
        tenant = metadata.get(TENANT, DEFAULT_TENANT)
        self._calls.caller("read", context).check("read", tenant)
        exchange = Exchange(self._placements, tenant, context.peer().rpartition(":")[0])
        try:
            while (packed := await context.read()) is not grpc.aio.EOF:
                answering = exchange.answer(_read(packed))
                del packed  # a body; the next message comes with the response
                for reply in await answering:
                    await context.write(reply.SerializeToString())
        finally:
            exchange.close()


def _read(packed: bytes) -> Any:
    try:
        check_fields(packed, pb.ProcessingRequest.DESCRIPTOR)
        message = pb.ProcessingRequest.FromString(packed)
    except (DecodeError, RecursionError):
        raise ConfigError("the message is not an envoy.service.ext_proc.v3.ProcessingRequest") from None
    kind = message.WhichOneof("request")
    if kind in ("request_headers", "response_headers"):
        count = len(getattr(message, kind).headers.headers)
        if count > MAX_HEADERS or len(packed) > MAX_HEADERS_NBYTES:
            raise ConfigError(f"at most {MAX_HEADERS} headers in {MAX_HEADERS_NBYTES} bytes are read")
    return message
