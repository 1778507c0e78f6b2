"""``Dialler``: connects to publishers, and refuses an address that another tenant's worker uses.

Names, and spellings that only the system's resolver understands, are compared by their addresses. Otherwise a
tenant could spell another tenant's publisher differently and read its prompts. One event loop.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from concurrent.futures import Future

import anyio

from kvpool.discovery.networks import unmapped
from kvpool.index.limits import Limits
from kvpool.index.net.resolver import Addresses, Resolver, Unresolved, addresses_of
from kvpool.index.net.zmtp import Connection, Lost

CONNECT_S = 5.0  # for name, connection and handshake together

Place = tuple[str, int]  # numeric address, port


class OfAnotherTenant(Lost):
    """A worker of another tenant is followed there."""


class Dialler:
    """Shared by all ``Line``s. ``limits``: for received bytes. ``resolver``: for names."""

    def __init__(self, limits: Limits, resolver: Resolver) -> None:
        self.limits, self.resolver = limits, resolver
        # Tenants followed there, with their lines.
        self.tenants: defaultdict[Place, Counter[str]] = defaultdict(Counter)


class Line:
    """Connects to the endpoints of one publisher, until ``close``.

    The last addresses of an endpoint belong to this tenant, connected or not. While one endpoint leads to
    another tenant's address, neither is connected.
    """

    def __init__(self, dialler: Dialler, tenant: str) -> None:
        self._dialler, self._tenant = dialler, tenant
        self._places: dict[str, set[Place]] = {}  # by endpoint
        self._refused: dict[str, str] = {}  # reason, by endpoint

    async def connect(
        self, endpoint: str, kind: bytes, attempt: int, silence_s: float | None = None
    ) -> Connection:
        """``Connection.connect``. Errors: ``Lost``, which names the endpoint; ``OfAnotherTenant``."""
        addresses: Future[Addresses] | None = None
        if endpoint.startswith("tcp://"):
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            host = host.strip("[]")
            addresses = self._dialler.resolver.resolve(host, self._tenant, int(port))
        try:
            with anyio.fail_after(CONNECT_S):
                if addresses is not None:
                    self._enter(endpoint, int(port), await addresses_of(addresses))
                if self._refused:
                    raise OfAnotherTenant(next(iter(self._refused.values())))
                return await Connection.connect(
                    endpoint, addresses, kind, self._dialler.limits, self._tenant,
                    attempt=attempt, silence_s=silence_s,
                )  # fmt: skip
        except TimeoutError:
            if addresses is not None and not addresses.done():
                raise Lost(f"the name {host} does not resolve: no answer within {CONNECT_S:g} s") from None
            raise Lost(f"no answer from {endpoint} within {CONNECT_S:g} s") from None
        except Unresolved as error:
            raise Lost(str(error)) from error

    def close(self) -> None:
        for endpoint in list(self._places):
            self._leave(endpoint)

    def _enter(self, endpoint: str, port: int, addresses: Addresses) -> None:
        places = {(str(unmapped(address)), port) for address in addresses}
        self._leave(endpoint)
        tenants = self._dialler.tenants
        if any(tenants[place].keys() - {self._tenant} for place in places & tenants.keys()):
            self._refused[endpoint] = (
                f"{endpoint} is not connected to: another tenant's worker is followed there; "
                "name the worker's own endpoint"
            )
            return
        for place in places:
            tenants[place][self._tenant] += 1
        self._places[endpoint] = places
        self._refused.pop(endpoint, None)

    def _leave(self, endpoint: str) -> None:
        tenants = self._dialler.tenants
        for place in self._places.pop(endpoint, set()):
            tenants[place] -= Counter({self._tenant: 1})
            if not tenants[place]:
                del tenants[place]
