"""``ExtProcServer``: the endpoint picker of the Gateway API inference extension, for Envoy and what is made of it.

Envoy opens a stream of ``envoy.service.ext_proc.v3.ExternalProcessor`` for each request, and sends its headers and
body. It is told where the request should go by the header and by the dynamic metadata
``x-gateway-destination-endpoint`` (namespace ``envoy.lb``): ``IP:PORT``, several in the order in which to try them.
Sources: proposal 004 of kubernetes-sigs/gateway-api-inference-extension; Envoy's ``external_processor.proto``.

Bodies come whole (``BUFFERED``) or in parts that are handed back (``FULL_DUPLEX_STREAMED``, which the protocol asks
for); in other modes a request is placed by load. One event loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health

from kvpool.discovery.worker import DEFAULT_TENANT
from kvpool.errors import ConfigError
from kvpool.index.client.tls import ServerTls
from kvpool.index.place.placer import AllBusy, NoWorker, Placement, Placer
from kvpool.index.serve.calls import Calls
from kvpool.index.serve.ext_proc_exchange import BLOCKS, MATCHED, REASON, WORKER, Exchange, Refusal
from kvpool.index.serve.grpc_server import open_server
from kvpool.index.serve.health import Health
from kvpool.index.serve.limiter import of_placements
from kvpool.index.serve.request_stats import RequestStats
from kvpool.v1 import ext_proc_pb2 as pb

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
TENANT = "x-kvpool-tenant"  # in the metadata of Envoy's call: its operator says it, not who sends the request
MAX_WAITING_NBYTES = 256 << 20  # of bodies that are held
CALLS_OF_CONNECTION = 1024
STOP_TIMEOUT_S = 5.0

logger = logging.getLogger("kvpool.index")


class ExtProcServer:
    """Use it in one event loop: ``start``, ``stop``.

    ``calls``, ``health``: of the index, whose callers and whose state these are. ``shows``: whether requests and
    responses say in headers where they were placed, and why.
    """

    def __init__(
        self,
        placer: Placer,
        calls: Calls,
        health: Health,
        stats: RequestStats,
        *,
        tls: ServerTls | None = None,
        shows: bool = True,
    ) -> None:
        self._placer, self._calls, self._health, self._stats = placer, calls, health, stats
        self._tls, self._shows = tls, shows
        self._limiter = of_placements()
        self._waiting_nbytes = 0
        self._server: grpc.aio.Server | None = None

    async def start(self, listen: str) -> int:
        """Listen on ``HOST:PORT``; port 0: any that is free. Returns the port. Errors: ``ConfigError``."""
        handlers = {
            SERVICE: {
                "Process": grpc.stream_stream_rpc_method_handler(
                    self._calls.stream("Process", "read", self._serve, self._limiter)
                )
            },
            health.SERVICE_NAME: self._health.handlers(self._calls),
        }
        self._server, port = open_server(listen, handlers, self._tls, calls_of_connection=CALLS_OF_CONNECTION)
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
        exchange = Exchange(self, tenant)
        try:
            while (packed := await context.read()) is not grpc.aio.EOF:
                for reply in await exchange.answer(_read(packed)):
                    await context.write(reply.SerializeToString())
        finally:
            exchange.close()

    # ---- for exchanges

    def hold(self, nbytes: int) -> bool:
        """Take room for so much of a body; False: there is none."""
        if self._waiting_nbytes + nbytes > MAX_WAITING_NBYTES:
            return False
        self._waiting_nbytes += nbytes
        return True

    def let_go(self, nbytes: int) -> None:
        """Of what was held."""
        self._waiting_nbytes -= nbytes

    async def place(
        self, headers: Mapping[str, str], body: bytes, tenant: str, subset: frozenset[str] | None
    ) -> Placement | Refusal:
        """Where a request goes, or what is answered in the place of a worker."""
        began_s = time.perf_counter()
        outcome = ""
        asked = {name: headers[name] for name in ("authorization",) if name in headers}
        try:
            placement = await self._placer.place(
                headers.get(":path", "/"), body, tenant=tenant, subset=subset, headers=asked
            )
            outcome = placement.reason
            return placement
        except NoWorker as error:
            outcome = "no-worker"
            if subset is None and not self._health.serves:
                # It does not know the fleet yet: Envoy chooses.
                return Placement(tenant, "load", detail=str(error))
            return Refusal(503, str(error))
        except AllBusy as error:
            outcome = "busy"
            return Refusal(429, str(error))
        except Exception:  # a fault of ours is no reason to fail a request: Envoy chooses
            logger.exception("a request was not placed")
            outcome = "failed"
            return Placement(tenant, "failed")
        finally:
            if outcome:  # not of a request that was given up
                self._stats.record_placement(time.perf_counter() - began_s, outcome)

    def release(self, placement: Placement, *, now: bool) -> None:
        """End its reservation: its worker has answered (``now``), or its metrics will show it."""
        if now:
            self._placer.release(placement)
        else:
            self._placer.release_when_shown(placement)

    def shown(self, placement: Placement) -> list[tuple[str, str]]:
        """The headers that say where a request went, and why."""
        if not self._shows:
            return []
        shown: list[tuple[str, str]] = [(REASON, placement.reason)]
        if placement.worker:
            shown.append((WORKER, placement.worker))
        if placement.prompt_blocks:
            shown += [(MATCHED, str(placement.matched_blocks)), (BLOCKS, str(placement.prompt_blocks))]
        return shown


def _read(packed: bytes) -> Any:
    try:
        return pb.ProcessingRequest.FromString(packed)
    except DecodeError:
        raise ConfigError("the message is not an envoy.service.ext_proc.v3.ProcessingRequest") from None
