"""``Health``: what ``grpc.health.v1`` says of an index. One event loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from grpc_health.v1 import health, health_pb2

from kvpool.index.client.messages import SERVICE

logger = logging.getLogger("kvpool.index")


class Health:
    """Says "not serving" until ``is_warm()``, for ``warm_up_s`` seconds after ``begin`` at most, then "serving".

    ``servicer``: what answers. ``serves``: what was said last.
    """

    def __init__(self, is_warm: Callable[[], bool], warm_up_s: float) -> None:
        self._is_warm, self._warm_up_s = is_warm, warm_up_s
        self._serves_at_s = 0.0  # at the latest
        self.serves = False
        self.servicer = health.aio.HealthServicer()

    async def begin(self) -> None:
        """Set the first status, before the server listens."""
        self._serves_at_s = time.monotonic() + self._warm_up_s
        await self.update()

    async def update(self) -> None:
        """Say "serving" once it is."""
        is_warm = self._is_warm()
        self.serves = is_warm or time.monotonic() >= self._serves_at_s
        if self.serves and not is_warm:
            logger.warning(
                "after %g s some workers were not heard from; the index serves without", self._warm_up_s
            )
        status = health_pb2.HealthCheckResponse
        for name in ("", SERVICE):
            await self.servicer.set(name, status.SERVING if self.serves else status.NOT_SERVING)

    async def is_serving(self) -> bool:
        """Whether the servicer says so; no longer once it shuts down."""
        asked = health_pb2.HealthCheckRequest(service=SERVICE)
        told = await self.servicer.Check(asked, None)
        return bool(told.status == health_pb2.HealthCheckResponse.SERVING)
