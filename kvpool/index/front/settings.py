"""What an operator chooses of a front: ``PlacingSettings``, ``ProxySettings``. Immutable."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvpool.discovery.worker import DEFAULT_TENANT
from kvpool.index.front.placement import SESSION

MAX_ENDPOINTS = 4  # the best, and a proxy's next tries
PLACE_S = 0.15  # Envoy waits 0.2 s for a picker by default
RESPONSE_S = 600.0  # a prompt may wait for long


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacingSettings:
    """``timeout_s``: of a whole placement. ``max_waiting``: waiting requests at which a worker takes no more; None:
    any number. ``max_endpoints``: of a placement, 1 to ``MAX_ENDPOINTS``. ``shows``: whether ``Placer.headers`` name
    a request's worker and reason. ``session_header``: names a request's session where its body does not.
    """

    timeout_s: float = PLACE_S
    max_waiting: int | None = None
    max_endpoints: int = MAX_ENDPOINTS
    shows: bool = True
    session_header: str = SESSION


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySettings:
    """``tenant``: of the workers. ``names``: by which browsers' pages may ask, beside addresses and private names.
    ``response_s``: longest silence of a worker.
    """

    tenant: str = DEFAULT_TENANT
    names: Collection[str] = ()
    response_s: float = RESPONSE_S
