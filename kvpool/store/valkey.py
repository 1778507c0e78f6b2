"""A store on Redis or Valkey servers that many hosts share: one, a cluster, or what sentinels watch.

The native engine owns the connections over which values go; leased documents go over one that is kept besides.
"""

from __future__ import annotations

from kvpool import _native
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.store.native import NativeStore
from kvpool.store.server.connection import client_of, library_version
from kvpool.store.server.server import ServerStore, server_name
from kvpool.store.server.topology import Primaries
from kvpool.store.server.topology_watch import TopologyWatch
from kvpool.store.store import DEFAULT_TIMEOUT_S
from kvpool.store.tls import advice
from kvpool.store.url import StoreURL

# How a server words that it will never let us in as we are.
_SETTINGS = ("AUTH: ", "WRONGPASS", "NOAUTH", "NOPERM", "SELECT: ")


class ValkeyStore(NativeStore, ServerStore):
    """``valkey://host:6379``: one HASH key a record, with a time to live; the server evicts when it is full.

    ``url``: one of the schemes of ``SERVER_SCHEMES``; its ``threads`` is the number of connections.
    Blocking: one connection is made and asked for a PING, for 2 seconds an address at most; of a cluster or of
    sentinels, one after the other is asked for the servers of the pool.
    Errors: ``ConfigError`` when the server refuses user, password or database, or a file for TLS cannot be used;
    ``StoreUnavailable`` when it cannot be reached.
    """

    def __init__(self, url: StoreURL) -> None:
        name = server_name(url)
        primaries = Primaries(url, name)
        self._watch: TopologyWatch | None = None
        if url.nodes:
            engine, self._watch = _open_many(url, primaries)
        else:
            engine = _open_one(url, name)
        super().__init__(name, engine)
        self._set_up(url, primaries)

    def _close(self) -> None:
        try:
            super()._close()
        finally:
            self._close_kept()
            if self._watch is not None:
                self._watch.close()


def _open_many(url: StoreURL, primaries: Primaries) -> tuple[_native.IoExecutor, TopologyWatch]:
    try:
        engine, topology = _native.open_routed_resp_executor(*_of_any_server(url))
    except _native.TlsError as error:
        raise ConfigError(f"{server_name(url)}: {error}") from error
    try:
        return engine, TopologyWatch(topology, primaries)
    except BaseException:
        engine.close(DEFAULT_TIMEOUT_S)
        raise


def _open_one(url: StoreURL, name: str) -> _native.IoExecutor:
    try:
        return _native.open_resp_executor(url.host, url.port, url.path, *_of_any_server(url))
    except _native.TlsError as error:
        raise ConfigError(f"{name}: {error}") from error
    except _native.RespError as error:
        if any(sign in str(error) for sign in _SETTINGS):
            raise ConfigError(
                f"{name}: the server refuses: {error}; correct user, password or database"
            ) from error
        raise StoreUnavailable(f"{name}: the server refuses: {error}") from error
    except OSError as error:
        words = error.strerror or str(error)
        raise StoreUnavailable(f"{name}: cannot connect: {words}; {advice(words)}") from error


def _of_any_server(
    url: StoreURL,
) -> tuple[str, str, int, float, int, tuple[str, str, str] | None, str, str]:
    """The settings of the native executor for any server, in the order of ``_native``."""
    files = url.tls.files() if url.tls is not None else None
    return (
        url.user, url.password, url.database, url.ttl_s, url.threads, files, client_of(url), library_version()
    )  # fmt: skip
