"""``WorkerNetworks``: at which addresses an index follows workers that callers or records in a pool name.

Without it a tenant could have the index connect to anything that the index's host can reach, itself included. Workers
that the operator names by a flag are not judged.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from kvpool.discovery.worker import PUSHED, Worker
from kvpool.errors import ConfigError

IPC = "ipc"  # among networks: Unix sockets of the index's own host
MAX_NETWORKS = 1024


class WorkerNetworks:
    """``networks``: such as ``10.0.0.0/8``, and ``ipc``; none: every address but those of the host itself and its link.

    ``loopback``: whether addresses of the host itself are allowed besides. Immutable. Errors: ``ConfigError``.
    """

    def __init__(self, networks: Sequence[str] = (), *, loopback: bool = False) -> None:
        if len(networks) > MAX_NETWORKS:
            raise ConfigError(f"at most {MAX_NETWORKS} networks of workers can be named, not {len(networks)}")
        self._ipc = IPC in networks
        self._networks = tuple(_network(text) for text in networks if text != IPC)
        self._loopback = loopback

    def check(self, worker: Worker) -> None:
        """Errors: ``ConfigError`` that names the field, for an address that is spelled out and not allowed.

        A host name passes: what it resolves to is to be shown to ``allows``.
        """
        for field, endpoint in _endpoints(worker):
            if not self._passes(endpoint):
                raise ConfigError(
                    f"worker {worker.name}: {field}: this index does not connect to {endpoint:.80}; "
                    "its --worker-networks say where workers are; without that, anywhere but on its own host and link. "
                    "For workers of this host: --worker-networks 127.0.0.0/8"
                )

    def allows(self, address: str) -> bool:
        """Whether the index may connect to this IP address."""
        found = ipaddress.ip_address(address.partition("%")[0])
        if found.version == 6 and found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        if self._loopback and found.is_loopback:
            return True
        if self._networks:
            return any(found in network for network in self._networks)
        return not (found.is_loopback or found.is_link_local or found.is_multicast or found.is_unspecified)

    def _passes(self, endpoint: str) -> bool:
        if endpoint.startswith("ipc:"):
            return self._ipc
        try:
            return self.allows(_host(endpoint))
        except ValueError:  # a name, or nothing
            return True


def hosts_of(worker: Worker) -> set[str]:
    """The hosts by which it is reached."""
    return {_host(endpoint) for _, endpoint in _endpoints(worker)} - {""}


def _endpoints(worker: Worker) -> list[tuple[str, str]]:
    """(field, where it says to connect)."""
    named = [
        (f"{field} of rank {publisher.dp_rank}", str(getattr(publisher, field)))
        for publisher in worker.publishers
        for field in ("events", "replay")
    ]
    return [one for one in (("address", worker.address), *named) if one[1] not in ("", PUSHED)]


def _host(endpoint: str) -> str:
    try:
        return urlsplit(endpoint).hostname or ""
    except ValueError:  # no URL: nothing connects to it
        return ""


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise ConfigError(
            f'--worker-networks "{text:.80}": write a network such as 10.0.0.0/8, or {IPC}'
        ) from error
