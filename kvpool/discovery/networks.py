"""``WorkerNetworks``: the addresses at which an index may follow workers named by callers or pool records.

Without it a tenant could make the index dial any host it reaches, itself included. Workers named by a flag
are exempt.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os.path
from collections.abc import Sequence
from urllib.parse import urlsplit

from kvpool.discovery.worker import Worker
from kvpool.errors import ConfigError
from kvpool.key.key import check_tenant

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network | str  # str: IPC
IPC = "ipc"  # Unix sockets of the index's own host
MAX_NETWORKS = 1024
_PORTS = {"http": 80, "https": 443}


class WorkerNetworks:
    """``networks``: comma-separated, such as ``10.0.0.0/8`` or ``ipc``; none: every address except the host's
    own and link-local ones. A ``TENANT=`` prefix reserves these networks for that tenant, and that tenant for
    these networks; several tenants may name the same ones.

    ``loopback``: also allow the host's own addresses. Immutable. Errors: ``ConfigError``.
    """

    def __init__(self, networks: Sequence[str] = (), *, loopback: bool = False) -> None:
        named = [_parsed(text) for text in networks]
        if sum(len(several) for _, several in named) > MAX_NETWORKS:
            raise ConfigError(f"at most {MAX_NETWORKS} networks of workers can be named")
        self._shared = [network for tenant, several in named if not tenant for network in several]
        self._own: dict[str, list[_Network]] = {}
        for tenant, several in named:
            if tenant:
                self._own.setdefault(tenant, []).extend(several)
        self._loopback = loopback

    def check(self, worker: Worker) -> None:
        """Errors: ``ConfigError`` for a forbidden literal address; resolved host names need ``allows``."""
        for field, endpoint in _endpoints(worker):
            if not self._passes(worker.tenant, endpoint):
                raise ConfigError(
                    f"worker {worker.name}: {field}: this index does not connect to {endpoint:.80}; "
                    "its --worker-networks say where workers are; without that, anywhere but on its own host and link. "
                    "For workers of this host: --worker-networks 127.0.0.0/8"
                )

    def allows(self, tenant: str, address: str) -> bool:
        """Whether the index may connect to this IP address for a worker of the tenant."""
        found = unmapped(address)
        if self._loopback and found.is_loopback:
            return True
        if tenant in self._own:
            return _is_in(found, self._own[tenant])
        if any(_is_in(found, networks) for networks in self._own.values()):
            return False
        if self._shared:
            return _is_in(found, self._shared)
        return not (found.is_loopback or found.is_link_local or found.is_multicast or found.is_unspecified)

    def _passes(self, tenant: str, endpoint: str) -> bool:
        if endpoint.startswith("ipc:"):
            return IPC in self._own.get(tenant, self._shared)
        try:
            return self.allows(tenant, _host(endpoint))
        except ValueError:  # a host name, or empty
            return True


def places_of(worker: Worker) -> set[tuple[str, int]]:
    return {place for _, endpoint in _endpoints(worker) if (place := _place(endpoint)) is not None}


def one_spelling(endpoint: str) -> str:
    """The canonical spelling of an endpoint: ``tcp://HOST:PORT`` or ``ipc://PATH``."""
    scheme, _, rest = endpoint.partition("://")
    if scheme != "tcp":
        return f"{scheme}://{os.path.normpath(rest)}"
    host, _, port = rest.rpartition(":")
    host = host.strip("[]").rstrip(".").lower()
    with contextlib.suppress(ValueError):
        host = str(unmapped(host))
    return f"tcp://{host}:{int(port)}"


def unmapped(address: str) -> _Address:
    """An IP address without its ``%`` interface, IPv4-mapped IPv6 as IPv4. Errors: ``ValueError``."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return found if mapped is None else mapped


def _endpoints(worker: Worker) -> list[tuple[str, str]]:
    """(field, host to connect to)."""
    named = [
        (f"{field} of rank {publisher.dp_rank}", str(getattr(publisher, field)))
        for publisher in worker.publishers
        for field in ("events", "replay")
    ]
    return [one for one in (("address", worker.address), *named) if one[1]]


def _host(endpoint: str) -> str:
    try:
        return urlsplit(endpoint).hostname or ""
    except ValueError:  # not a URL, so never connected to
        return ""


def _place(endpoint: str) -> tuple[str, int] | None:
    try:
        url = urlsplit(endpoint)
        port = url.port or _PORTS.get(url.scheme, 0)
    except ValueError:
        return None
    return (url.hostname, port) if url.hostname else None


def _is_in(address: _Address, networks: Sequence[_Network]) -> bool:
    return any(network != IPC and address in network for network in networks)


def _parsed(text: str) -> tuple[str, list[_Network]]:
    """(tenant, networks); the tenant is empty where none is named."""
    tenant, equals, networks = text.rpartition("=")
    if equals:
        check_tenant(tenant)
    return tenant, [network if network == IPC else _network(network) for network in networks.split(",")]


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise ConfigError(
            f'--worker-networks "{text:.80}": write a network such as 10.0.0.0/8, or {IPC}; '
            "TENANT= before it for those of one tenant"
        ) from error
