"""A store on Redis or Valkey servers shared by many hosts: a server, a cluster, or a sentinels' service.

The native engine, or Python threads with redis-py or GLIDE, move the values; documents use a kept connection.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvpool import _native
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.store.advice import advice, advised
from kvpool.store.batch import DataPath
from kvpool.store.server.connection import KeptServer, client_of, library_version
from kvpool.store.server.documents import SLOT, ServerDocuments
from kvpool.store.server.notices import ServerNotices
from kvpool.store.server.server import (
    RUN_ID_S,
    MissingRight,
    refused_commands,
    run_id,
    run_id_of,
    scan_keys,
    scan_server,
    scan_writers,
    server_name,
    usage_of,
)
from kvpool.store.server.topology import Primaries, TopologyWatch
from kvpool.store.store import DEFAULT_TIMEOUT_S, Store, StoredBlock, Usage, WrittenBlock
from kvpool.store.url import StoreURL

# Of a dial: a command and the first word of its error, where nothing but another setting ends it.
_SETTINGS = re.compile(r": (?:[A-Z]+: (?:WRONGPASS|NOAUTH|NOPERM)|(?:AUTH|SELECT): ERR) ")


class ValkeyStore(Store):
    """``valkey://host:6379``: one HASH key a record, with a time to live; a full server evicts.

    ``url``: of a scheme in ``SERVER_SCHEMES``; its ``threads`` is the number of connections. Blocks for a
    dial and a PING, 2 seconds an address at most; cluster nodes and sentinels are asked in turn for the
    pool's servers. Errors: ``ConfigError`` when the server refuses user, password or database, or a file of
    TLS or password is unusable; ``StoreUnavailable`` when it cannot be reached, unless it need not answer
    (``must_answer``).
    """

    def __init__(self, url: StoreURL, must_answer: bool = True) -> None:
        name = server_name(url)
        url.password_now()  # its file, if it has one, must be readable now
        self._url, self._primaries = url, Primaries(url, name)
        engine, self._watch = _open_engine(url, self._primaries, name, must_answer)
        self._kept = KeptServer(lambda: self._primaries.url_of(SLOT), name, role="announcements")
        in_cluster = url.scheme == "valkey+cluster"
        super().__init__(name, engine, ServerDocuments(self._kept, name, in_cluster=in_cluster))

    def _close(self) -> None:
        try:
            super()._close()
        finally:
            self._kept.close()
            if self._watch is not None:
                self._watch.close()

    def refused_commands(self) -> list[MissingRight]:
        """Commands that a server refuses this user; empty if unknown. Blocks for a few round trips."""
        with contextlib.suppress(Exception):  # any client error on any reply
            return refused_commands(self._primaries.url_of(SLOT))
        return []

    def _server_run_id(self) -> str:
        """A digest of all servers' run ids; empty if one refuses."""
        if not self._url.nodes:
            with self._kept.asked("cannot ask for its run_id", RUN_ID_S) as server:
                return run_id_of(server)
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

    def _scan_writers(self, prefix: str) -> Iterator[list[WrittenBlock]]:
        for url in self._primaries.urls():
            yield from scan_writers(url, self._name, prefix)

    def _scan_keys(self, prefix: str) -> Iterator[list[str]]:
        before = self._primaries.find()
        for url in self._primaries.urls():
            yield from scan_keys(url, self._name, prefix)
        # If they changed, keys may have moved from an unscanned server to a scanned one.
        if self._primaries.find() != before:
            raise StoreUnavailable(f"{self._name}: its servers changed during the scan")

    def _notices(self) -> ServerNotices:
        return ServerNotices(self._primaries, self._name)


def _open_engine(
    url: StoreURL, primaries: Primaries, name: str, must_answer: bool
) -> tuple[DataPath, TopologyWatch | None]:
    """An engine for ``url``, and the thread that keeps its topology. Blocking and errors: ``ValkeyStore``'s."""
    if url.client != "native":
        return _open_client(url, primaries, name, must_answer)
    if url.nodes:
        return _open_many(url, primaries, name, must_answer)
    try:
        return _open_one(url, name), None
    except StoreUnavailable:
        if must_answer or not url.host:
            raise
        # The engine of clusters dials when it has keys to ask for.
        return _open_many(url, primaries, name, must_answer)


def _open_client(
    url: StoreURL, primaries: Primaries, name: str, must_answer: bool
) -> tuple[DataPath, TopologyWatch | None]:
    from kvpool.store.clients.cluster import cluster_of
    from kvpool.store.clients.executor import ClientExecutor
    from kvpool.store.clients.link import Link, LinkFault, LinkRefused

    if url.client == "redis":
        from kvpool.store.clients.redis import RedisLink as ClientLink
    else:
        from kvpool.store.clients.glide import GlideLink as ClientLink  # type: ignore[assignment]
    links: Sequence[Link]
    shards, watch = None, None
    if url.nodes:
        ClientLink(url)  # says whether the client is installed
        if url.tls is not None:  # and this what is wrong with its files
            _open_routed(url, name)[0].close(DEFAULT_TIMEOUT_S)
        shards, links = cluster_of(url, primaries, ClientLink)
        watch = TopologyWatch(shards, primaries, must_answer)
    else:
        links = [ClientLink(url) for _ in range(url.threads)]
        if url.tls is not None:
            # Unlike redis-py and GLIDE, the native client reads the server's last words, and advises.
            _open_one(replace(url, threads=1), name).close(DEFAULT_TIMEOUT_S)
    try:
        return ClientExecutor(url, links, shards), watch
    except BaseException as error:
        if watch is not None:
            watch.close()
        if isinstance(error, LinkRefused):
            raise ConfigError(
                f"{name}: the server refuses: {error}; correct user, password or database"
            ) from error
        if isinstance(error, LinkFault):
            raise StoreUnavailable(f"{name}: cannot connect: {error}; {advice(str(error))}") from error
        raise


def _open_routed(url: StoreURL, name: str) -> tuple[_native.IoExecutor, _native.Topology]:
    """The native engine of several servers, which dials none yet."""
    try:
        return _native.open_routed_resp_executor(_of_any_server(url))
    except _native.TlsError as error:
        raise ConfigError(advised(f"{name}: {error}")) from error


def _open_many(
    url: StoreURL, primaries: Primaries, name: str, must_answer: bool
) -> tuple[_native.IoExecutor, TopologyWatch]:
    engine, topology = _open_routed(url, name)
    try:
        return engine, TopologyWatch(topology, primaries, must_answer)
    except BaseException:
        engine.close(DEFAULT_TIMEOUT_S)
        raise


def _open_one(url: StoreURL, name: str) -> _native.IoExecutor:
    try:
        return _native.open_resp_executor(url.host, url.port, url.path, _of_any_server(url))
    except _native.TlsError as error:
        raise ConfigError(advised(f"{name}: {error}")) from error
    except _native.RespError as error:
        if _SETTINGS.search(str(error)):
            raise ConfigError(
                f"{name}: the server refuses: {error}; correct user, password or database"
            ) from error
        raise StoreUnavailable(f"{name}: the server refuses: {error}") from error
    except OSError as error:
        words = error.strerror or str(error)
        raise StoreUnavailable(f"{name}: cannot connect: {words}; {advice(words)}") from error


def _of_any_server(url: StoreURL) -> _native.ServerSettings:
    """The native executor's settings for any server."""
    files = url.tls.files() if url.tls is not None else None
    return (
        url.user, url.password, url.password_file, url.database, url.ttl_s, url.threads, files, client_of(url),
        library_version(),
    )  # fmt: skip
