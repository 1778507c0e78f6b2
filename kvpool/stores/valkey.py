"""A store on a Redis or Valkey server that many hosts share.

The native engine owns the connections over which values go; leased documents go over short connections of
``ServerAnnouncements``.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvpool import _native
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.stores.native import NativeStore
from kvpool.stores.server_announcements import ServerAnnouncements
from kvpool.stores.server_scan import scan_server
from kvpool.stores.store import StoredBlock
from kvpool.stores.url import SERVER_SCHEMES, StoreURL

# How a server words that it will never let us in as we are.
_SETTINGS = ("AUTH: ", "WRONGPASS", "NOAUTH", "NOPERM", "SELECT: ")


class ValkeyStore(NativeStore):
    """``valkey://host:6379``: one HASH key a record, with a time to live; the server evicts when it is full.

    ``url``: one of the schemes of ``SERVER_SCHEMES``; its ``threads`` is the number of connections.
    Blocking: one connection is made and asked for a PING, for 2 seconds an address at most.
    Errors: ``ConfigError`` when the server refuses user, password or database; ``StoreUnavailable`` when it
    cannot be reached.
    """

    def __init__(self, url: StoreURL) -> None:
        assert url.scheme in SERVER_SCHEMES, url.scheme
        name = _name(url)
        try:
            engine = _native.open_resp_engine(
                url.host, url.port, url.path, url.user, url.password, url.database, url.ttl_s, url.threads
            )
        except _native.RespError as error:
            if any(sign in str(error) for sign in _SETTINGS):
                raise ConfigError(
                    f"{name}: the server refuses: {error}; correct user, password or database"
                ) from error
            raise StoreUnavailable(f"{name}: the server refuses: {error}") from error
        except OSError as error:
            raise StoreUnavailable(
                f"{name}: cannot connect: {error.strerror or error}; check that the server runs there"
            ) from error
        super().__init__(name, engine)
        self._url = url
        self._announced = ServerAnnouncements(url, name)

    def _announce(self, key: str, document: bytes, lease_s: float) -> None:
        self._announced.put(key, document, lease_s)

    def _withdraw(self, key: str) -> bool:
        return self._announced.remove(key)

    def _life(self) -> str:
        return self._announced.run_id()

    def _announcements(self, prefix: str) -> dict[str, bytes]:
        return self._announced.all(prefix)

    def _withdraw_all(self, prefix: str) -> int:
        return self._announced.remove_all(prefix)

    def _scan(self, prefix: str) -> Iterator[list[StoredBlock]]:
        return scan_server(self._url, self._name, prefix)


def _name(url: StoreURL) -> str:
    if url.path:
        return f"{url.scheme}://{url.path}?db={url.database}"
    host = f"[{url.host}]" if ":" in url.host else url.host
    return f"{url.scheme}://{host}:{url.port}/{url.database}"
