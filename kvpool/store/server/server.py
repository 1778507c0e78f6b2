"""What every store on a Redis or Valkey server has in common, whichever client moves its values."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Sequence

import redis

from kvpool.errors import StoreUnavailable
from kvpool.store.server.connection import KeptServer, connect
from kvpool.store.server.documents import SLOT, ServerAnnouncements
from kvpool.store.server.notices import ServerNotices
from kvpool.store.server.rights import Refused, refused_commands
from kvpool.store.server.scan import scan_keys, scan_server
from kvpool.store.server.topology import Primaries
from kvpool.store.store import Store, StoredBlock, Usage
from kvpool.store.url import SERVER_SCHEMES, StoreURL

RUN_ID_S = 2.0
USAGE_S = 2.0


class ServerStore(Store):
    """Leased documents on the server of ``_url``, for which a subclass moves the values."""

    _url: StoreURL
    _primaries: Primaries
    _kept: KeptServer
    _announced: ServerAnnouncements

    def _set_up(self, url: StoreURL, primaries: Primaries) -> None:
        """All but the values; ``_close_kept`` gives it back."""
        self._url, self._primaries = url, primaries
        self._kept = KeptServer(lambda: primaries.url_of(SLOT), self._name, role="announcements")
        in_cluster = url.scheme == "valkey+cluster"
        self._announced = ServerAnnouncements(self._kept, self._name, in_cluster=in_cluster)

    def _close_kept(self) -> None:
        self._kept.close()

    def refused_commands(self) -> list[Refused]:
        """What its user may not ask a server of this store; nothing where that cannot be found out.

        Blocking, for a few round trips.
        """
        with contextlib.suppress(Exception):  # whatever a client makes of what a server says
            return refused_commands(self._primaries.url_of(SLOT))
        return []

    def _announce(self, key: str, document: bytes, lease_s: float) -> None:
        self._announced.put(key, document, lease_s)

    def _withdraw(self, key: str) -> bool:
        return self._announced.remove(key)

    def _announcements(self, prefix: str, suffix: str = "") -> dict[str, bytes]:
        return self._announced.all(prefix, suffix)

    def _announced_under(self, keys: Sequence[str]) -> dict[str, bytes]:
        return self._announced.of(keys)

    def _announcing_tenants(self) -> list[str]:
        return self._announced.tenants()

    def _withdraw_all(self, prefix: str) -> int:
        return self._announced.remove_all(prefix)

    def _server_run_id(self) -> str:
        """A digest of the run ids of all its servers; empty if one of them may not be asked."""
        if not self._url.nodes:
            with self._kept.asked("cannot ask for its run_id", RUN_ID_S) as server:
                return _run_id(server)
        runs = []
        for url in self._primaries.urls():
            runs.append(run_id(url, self._name))
            if not runs[-1]:
                return ""
        return runs[0] if len(runs) == 1 else hashlib.sha256("".join(runs).encode()).hexdigest()

    def _usage(self) -> list[Usage]:
        return [usage_of(url) for url in self._primaries.urls()]

    def _scan(self, prefix: str) -> Iterator[list[StoredBlock]]:
        for url in self._primaries.urls():
            yield from scan_server(url, self._name, prefix)

    def _scan_keys(self, prefix: str) -> Iterator[list[str]]:
        before = self._primaries.find()
        for url in self._primaries.urls():
            yield from scan_keys(url, self._name, prefix)
        # If they changed, keys may have moved from a server not yet scanned to one already scanned.
        if self._primaries.find() != before:
            raise StoreUnavailable(f"{self._name}: its servers changed during the scan")

    def _notices(self) -> ServerNotices:
        return ServerNotices(self._primaries, self._name)


def run_id(url: StoreURL, name: str) -> str:
    """The run id of the server of ``url``; empty if it may not be asked. Errors: ``StoreUnavailable``."""
    try:
        with connect(url, timeout_s=RUN_ID_S, role="life") as server:
            return _run_id(server)
    except Exception as error:  # whatever a client makes of what a server says
        raise StoreUnavailable(f"{name}: cannot ask for its run_id: {error}") from error


def _run_id(server: redis.Redis) -> str:
    try:
        return str(server.info("server").get("run_id", ""))
    except redis.exceptions.ResponseError:  # also without the permission
        return ""


def usage_of(url: StoreURL) -> Usage:
    """How full the server of ``url`` is. Blocking, for a second or two. Never raises."""
    (name,) = url.servers
    try:
        with connect(url, timeout_s=USAGE_S, role="usage") as server:
            return _usage(name, server)
    except Exception:  # whatever a client makes of what a server says
        return Usage(name, up=False)


def _usage(name: str, server: redis.Redis) -> Usage:
    try:
        info = server.info()
    except redis.exceptions.ResponseError:  # also without the permission
        return Usage(name)
    databases = [part for database, part in info.items() if re.fullmatch(r"db[0-9]+", database)]
    return Usage(
        name,
        used_nbytes=info.get("used_memory"),
        capacity_nbytes=info.get("maxmemory") or None,
        keys=sum(part["keys"] for part in databases),
        evicted=info.get("evicted_keys"),
    )


def server_name(url: StoreURL) -> str:
    """The name of the server of ``url`` for errors, without secrets."""
    assert url.scheme in SERVER_SCHEMES, url.scheme
    if url.nodes:
        hosts = ",".join(url.servers)
        return f"{url.scheme}://{hosts}" + (f"/{url.service}/{url.database}" if url.service else "")
    if url.path:
        return f"{url.scheme}://{url.path}?db={url.database}"
    return f"{url.scheme}://{url.servers[0]}/{url.database}"
