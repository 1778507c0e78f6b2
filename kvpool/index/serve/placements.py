"""``Placements``: what the doors for inference requests share: placing them, limits, and what is said of it in headers.

One event loop.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping

import msgspec

from kvpool.errors import KVPoolError
from kvpool.index.buffer_budget import INFERENCE, BufferBudget
from kvpool.index.place.placement import AllBusy, NoWorker, Placement, Target
from kvpool.index.place.placer import Placer
from kvpool.index.serve.health import Health
from kvpool.index.serve.request_stats import RequestStats
from kvpool.tracing import Span, Tracing

DESTINATION = "x-gateway-destination-endpoint"
WORKER, MATCHED, BLOCKS, REASON = (
    "x-kvpool-worker", "x-kvpool-matched-blocks", "x-kvpool-prompt-blocks", "x-kvpool-reason",
)  # fmt: skip
RANK = "x-data-parallel-rank"  # vllm/entrypoints/serve/engine/serving.py
# Not for a client to say.
OURS = (DESTINATION, WORKER, MATCHED, BLOCKS, REASON, RANK)

MAX_BODY_NBYTES = 16 << 20
HOST_PARTS = 4  # one of them no host gets alone: a proxy that asks for many clients has the other three
RETRY_AFTER_S = 1

_KINDS = {
    413: "BadRequestError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}

logger = logging.getLogger("kvpool.index")


class Refusal(KVPoolError):
    """What is answered in the place of a worker: an HTTP status, and why."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status

    @property
    def headers(self) -> dict[str, str]:
        """Of the answer."""
        headers = {"content-type": "application/json"}
        if self.status in (429, 503):
            headers["retry-after"] = str(RETRY_AFTER_S)
        return headers

    @property
    def body(self) -> bytes:
        """In the form of OpenAI's API."""
        kind = _KINDS.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        error = {"message": str(self), "type": kind, "param": None, "code": self.status}
        return msgspec.json.encode({"error": error})


class Placements:
    """``health``: of the index. ``shows``: whether requests and responses say in headers where they were placed, and
    why. ``budget``: what bodies are counted in. ``held_nbytes``: of bodies and of headers, now; take more with
    ``hold``.
    """

    def __init__(
        self,
        placer: Placer,
        health: Health,
        stats: RequestStats,
        budget: BufferBudget,
        *,
        shows: bool = True,
        tracing: Tracing | None = None,
    ) -> None:
        self._placer, self._health, self._stats, self._shows = placer, health, stats, shows
        self._budget, self._tracing = budget, tracing or Tracing()
        self.held_nbytes = 0
        self._held_by: Counter[str] = Counter()

    def hold(self, have_nbytes: int, nbytes: int, host: str) -> None:
        """Take room for so much more of a body of which there are ``have_nbytes``. ``host``: whose part it takes.
        Errors: ``Refusal``."""
        if have_nbytes + nbytes > MAX_BODY_NBYTES:
            raise Refusal(413, f"a request has at most {MAX_BODY_NBYTES} bytes")
        limit_of_host_nbytes = self._budget.limit_of_owner_nbytes * (HOST_PARTS - 1) // HOST_PARTS
        is_over = self._held_by[host] + nbytes > limit_of_host_nbytes
        if is_over or not self._budget.take(nbytes, INFERENCE):
            raise Refusal(503, "too many requests are being read: send it again later")
        self.held_nbytes += nbytes
        self._held_by[host] += nbytes

    def let_go(self, nbytes: int, host: str) -> None:
        """Of what was held for that host."""
        self.held_nbytes -= nbytes
        self._held_by[host] -= nbytes
        if not self._held_by[host]:
            del self._held_by[host]
        if nbytes:
            self._budget.give(nbytes, INFERENCE)

    async def place(
        self,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        tenant: str,
        subset: frozenset[str] | None = None,
    ) -> Placement:
        """Where a request goes; a placement without targets: a fault of ours, or of an index that does not know the
        fleet yet. Errors: ``Refusal``."""
        with self._tracing.span("kvpool.place", headers) as span:
            return await self._place(path, headers, body, tenant, subset, span)

    async def _place(
        self,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        tenant: str,
        subset: frozenset[str] | None,
        span: Span,
    ) -> Placement:
        began_s = time.perf_counter()
        outcome = ""
        asked = {name: headers[name] for name in ("authorization",) if name in headers}
        try:
            placement = await self._placer.place(path, body, tenant=tenant, subset=subset, headers=asked)
            outcome = placement.reason
            span.set(prompt_blocks=placement.prompt_blocks)
            if placement.targets:
                best = placement.targets[0]
                known = placement.prompt_blocks > 0
                self._stats.record_placed(
                    placement.prompt_blocks,
                    best.matched_blocks if known else 0,
                    placement.held_blocks if known else 0,
                )
                span.set(worker=best.worker, matched_blocks=best.matched_blocks)
            return placement
        except NoWorker as error:
            outcome = "no-worker"
            if subset is None and not self._health.serves:
                return Placement(tenant, "load", detail=str(error))
            raise Refusal(503, str(error)) from error
        except AllBusy as error:
            outcome = "busy"
            raise Refusal(429, str(error)) from error
        except Exception:
            logger.exception("a request was not placed")
            outcome = "failed"
            return Placement(tenant, "failed")
        finally:
            span.set(outcome=outcome or "given up", tenant=tenant)
            if outcome:  # not of a request that was given up
                self._stats.record_placement(time.perf_counter() - began_s, outcome)

    def models(self, tenant: str) -> list[str]:
        """``Placer.models``."""
        return self._placer.models(tenant)

    def release(self, placement: Placement, *, now: bool) -> None:
        """End its reservation: its worker has answered (``now``), or its metrics will show it."""
        if now:
            self._placer.release(placement)
        else:
            self._placer.release_when_shown(placement)

    def shown(self, placement: Placement, target: Target | None) -> list[tuple[str, str]]:
        """The headers that say where a request went, and why. ``target``: None: to any worker."""
        if not self._shows:
            return []
        if target is None:
            return [(REASON, placement.reason)]
        shown: list[tuple[str, str]] = [(REASON, placement.reason), (WORKER, target.worker)]
        if placement.prompt_blocks:
            shown += [(MATCHED, str(target.matched_blocks)), (BLOCKS, str(placement.prompt_blocks))]
        return shown
