"""What every store on a Redis or Valkey server has in common, whichever client moves its values."""

from __future__ import annotations

from collections.abc import Iterator

from kvpool.stores.server_announcements import ServerAnnouncements
from kvpool.stores.server_scan import scan_server
from kvpool.stores.store import Store, StoredBlock
from kvpool.stores.url import SERVER_SCHEMES, StoreURL


class ServerStore(Store):
    """Leased documents on the server of ``url``, for which a subclass moves the values."""

    _url: StoreURL
    _announced: ServerAnnouncements

    def _announce(self, key: str, document: bytes, lease_s: float) -> None:
        self._announced.put(key, document, lease_s)

    def _withdraw(self, key: str) -> bool:
        return self._announced.remove(key)

    def _announcements(self, prefix: str) -> dict[str, bytes]:
        return self._announced.all(prefix)

    def _withdraw_all(self, prefix: str) -> int:
        return self._announced.remove_all(prefix)

    def _life(self) -> str:
        return self._announced.run_id()

    def _scan(self, prefix: str) -> Iterator[list[StoredBlock]]:
        return scan_server(self._url, self._name, prefix)


def server_name(url: StoreURL) -> str:
    """How the server of ``url`` is called in errors: without its secrets."""
    assert url.scheme in SERVER_SCHEMES, url.scheme
    if url.path:
        return f"{url.scheme}://{url.path}?db={url.database}"
    host = f"[{url.host}]" if ":" in url.host else url.host
    return f"{url.scheme}://{host}:{url.port}/{url.database}"
