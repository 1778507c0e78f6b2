"""``Endpoints``: workers' addresses as ``IP:PORT``: addresses name hosts, and proxies need numbers.

One event loop. Known names keep their last addresses, so a hanging name server delays no request.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from kvpool.discovery.worker import Worker
from kvpool.errors import KVPoolError
from kvpool.index.answer import Pick
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.front.placement import Refusal
from kvpool.index.net.resolver import Addresses, Resolver, Unresolved, ended
from kvpool.index.net.worker_url import MAX_NAMES, Url, numeric, parse_url

MAX_TENANTS = 64  # with remembered endpoints
PLACES_S = 1.0  # lifetime of a tenant's endpoints; names are looked up every 5 s at most


class _Places(NamedTuple):
    """Of a tenant. ``workers``: all of them then. ``names``: by endpoint. ``unknown``: addresses in their
    first lookup.
    """

    workers: list[Worker]
    made_s: float
    names: dict[str, list[str]]
    unknown: list[str]


class _NotYet(Unresolved):
    pass


class Endpoints:
    def __init__(self, fleet: Fleet, resolver: Resolver) -> None:
        self._fleet, self._resolver = fleet, resolver
        self._known: OrderedDict[tuple[str, str], Addresses] = OrderedDict()  # by tenant and host
        self._places: dict[str, _Places] = {}  # by tenant

    async def resolve(self, address: str, tenant: str, timeout_s: float) -> str:
        """``IP:PORT`` of a worker's address. Errors: ``ConfigError``; ``Unresolved``, also after ``timeout_s``."""
        url = parse_url(address)
        if url.endpoint:
            return url.endpoint
        found = self._resolver.resolve(url.host, tenant, url.port)
        if not found.done() and (tenant, url.host) not in self._known:
            await ended(found, timeout_s)
        return self._endpoint(url, tenant, found, timeout_s)

    async def of_picks(self, picks: Sequence[Pick], tenant: str, ends_s: float, most: int) -> dict[str, Pick]:
        """The best pick at each endpoint, in order, ``most`` of them. ``ends_s``: monotonic. Errors: ``Refusal``."""
        placed: dict[str, Pick] = {}
        why = ""
        for pick in picks:
            try:
                left_s = max(0.01, ends_s - time.monotonic())
                endpoint = await self.resolve(pick.row.address, tenant, left_s)
            except KVPoolError as error:
                why = why or str(error)
                continue
            placed.setdefault(endpoint, pick)
            if len(placed) == most:
                break
        if not placed:
            raise Refusal(503, f"no worker can be addressed: {why}")
        return placed

    async def names_at(self, wanted: frozenset[str], tenant: str, timeout_s: float) -> list[str]:
        """A tenant's workers at these ``IP:PORT``. Waits for first lookups only if none is found without."""
        places = self._places_of(tenant)
        if places.unknown and not places.names.keys() & wanted:
            await asyncio.gather(
                *(self.resolve(address, tenant, timeout_s) for address in places.unknown),
                return_exceptions=True,
            )
            self._places.pop(tenant, None)
            places = self._places_of(tenant)
        return [name for at in wanted for name in places.names.get(at, ())]

    def holds(self, endpoint: str, tenant: str) -> bool:
        """Whether a worker of the tenant is known to serve at this ``IP:PORT``."""
        return endpoint in self._places_of(tenant).names

    def _places_of(self, tenant: str) -> _Places:
        workers = self._fleet.followed()
        known = self._places.get(tenant)
        if known and time.monotonic() < known.made_s + PLACES_S and known.workers == workers:
            return known
        places = _Places(workers, time.monotonic(), {}, [])
        for worker in workers:
            if worker.tenant != tenant or not worker.address:
                continue
            try:
                url = parse_url(worker.address)
                at = url.endpoint or self._endpoint(
                    url, tenant, self._resolver.resolve(url.host, tenant, url.port), 0.0
                )
            except _NotYet:
                places.unknown.append(worker.address)
            except KVPoolError:
                continue
            else:
                places.names.setdefault(at, []).append(worker.name)
        self._places.pop(tenant, None)
        self._places[tenant] = places
        if len(self._places) > MAX_TENANTS:
            del self._places[next(iter(self._places))]
        return places

    def _endpoint(self, url: Url, tenant: str, found: Future[Addresses], waited_s: float) -> str:
        """As known now. Errors: ``Unresolved``; ``_NotYet``: not yet."""
        known = self._known.get((tenant, url.host))
        if found.done():
            if (error := found.exception()) is None:
                known = found.result()
                self._remember((tenant, url.host), known)
            elif known is None:
                raise Unresolved(str(error)) from error  # as addresses_of does
        if known is None:
            raise _NotYet(f"the name {url.host} is not resolved within {waited_s:g} s")
        return numeric(known[0], url.port)

    def _remember(self, key: tuple[str, str], addresses: Addresses) -> None:
        self._known[key] = addresses
        self._known.move_to_end(key)
        if len(self._known) > MAX_NAMES:
            self._known.popitem(last=False)
