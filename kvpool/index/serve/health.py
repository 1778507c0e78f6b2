"""``Health``: ``grpc.health.v1`` of an index, for every caller. One event loop.

grpcio-health-checking and grpcio-reflection are not used: each version of them takes one major version of protobuf.

Health takes no token, and gRPC receives a request of up to 33 MiB. So one request is received at a time;
meanwhile other callers get the state of the index, whichever service they name.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvpool.errors import ConfigError
from kvpool.index.protocol.messages import SERVICE
from kvpool.index.serve.calls import Calls
from kvpool.v1 import health_pb2

HEALTH = "grpc.health.v1.Health"

MAX_REQUEST_NBYTES = 1024
WARM_UP_S = 15.0  # longest time until health reports "serving"
# Names that probes and proxies ask an endpoint picker for, by proposal 004 of the Gateway API inference extension.
LIVENESS = "liveness"
NAMES_OF_PICKER = ("readiness", "envoy.service.ext_proc.v3.ExternalProcessor")

logger = logging.getLogger("kvpool.index")


class Health:
    """ "Not serving" until ``is_warm()``, for ``warm_up_s`` seconds after ``begin`` at most, then "serving".

    ``serves``: the last state.
    """

    def __init__(self, is_warm: Callable[[], bool] = lambda: True, warm_up_s: float = WARM_UP_S) -> None:
        self._is_warm, self._warm_up_s = is_warm, warm_up_s
        self._serves_at_s = 0.0  # at the latest
        self.serves = False
        self._receiving = False
        self._ends = False
        self._statuses = {"": health_pb2.HealthCheckResponse.NOT_SERVING}
        self._changed = asyncio.Condition()  # _statuses

    def handlers(self, calls: Calls) -> dict[str, grpc.RpcMethodHandler]:
        async def check(context: grpc.aio.ServicerContext) -> Any:
            asked = await self._asked("Check", context, calls)
            status = self._statuses.get(asked.service)
            if status is None:
                await context.abort(grpc.StatusCode.NOT_FOUND, "no service of this name is here")
            return health_pb2.HealthCheckResponse(status=status)

        async def watch(context: grpc.aio.ServicerContext) -> None:
            asked = await self._asked("Watch", context, calls)
            unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            told = None

            def status() -> Any:
                return self._statuses.get(asked.service, unknown)

            def is_news() -> bool:
                return bool(status() != told)

            while True:
                async with self._changed:
                    await self._changed.wait_for(is_news)
                told = status()
                await context.write(health_pb2.HealthCheckResponse(status=told))

        packed = health_pb2.HealthCheckResponse.SerializeToString
        return {
            "Check": grpc.stream_unary_rpc_method_handler(
                calls.without_token("Check", check), response_serializer=packed
            ),
            "Watch": grpc.stream_stream_rpc_method_handler(
                calls.stream("Watch", None, watch), response_serializer=packed
            ),
        }

    async def _asked(self, name: str, context: grpc.aio.ServicerContext, calls: Calls) -> Any:
        if self._receiving:
            return health_pb2.HealthCheckRequest()
        self._receiving = True
        try:
            packed = await calls.receive(name, context)
        finally:
            self._receiving = False
        if len(packed) > MAX_REQUEST_NBYTES:
            raise ConfigError(
                f"a check of health has at most {MAX_REQUEST_NBYTES} bytes: the name of a service"
            )
        try:
            return health_pb2.HealthCheckRequest.FromString(packed)
        except DecodeError:
            raise ConfigError("the request is not a grpc.health.v1.HealthCheckRequest") from None

    async def begin(self) -> None:
        """Set the first status, before the server listens."""
        self._serves_at_s = time.monotonic() + self._warm_up_s
        await self.update()

    async def update(self) -> None:
        """Report "serving" once warm."""
        is_warm = self._is_warm()
        self.serves = is_warm or time.monotonic() >= self._serves_at_s
        if self.serves and not is_warm:
            logger.warning(
                "after %g s some workers, or their pool, were not heard from; the index serves without",
                self._warm_up_s,
            )
        status = health_pb2.HealthCheckResponse
        if self._ends:
            return
        said = status.SERVING if self.serves else status.NOT_SERVING
        await self._say({**dict.fromkeys(("", SERVICE, *NAMES_OF_PICKER), said), LIVENESS: status.SERVING})

    async def end(self) -> None:
        """Report "not serving" for every service but ``LIVENESS`` from now on."""
        self._ends = True
        status = health_pb2.HealthCheckResponse
        await self._say({**dict.fromkeys(self._statuses, status.NOT_SERVING), LIVENESS: status.SERVING})

    def is_serving(self) -> bool:
        """Whether it reports "serving" for the index; not after ``end``."""
        return self._statuses.get(SERVICE) == health_pb2.HealthCheckResponse.SERVING

    async def _say(self, statuses: dict[str, Any]) -> None:
        async with self._changed:
            self._statuses = statuses
            self._changed.notify_all()
