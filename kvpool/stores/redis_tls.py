"""A connection of redis-py under TLS."""

from __future__ import annotations

import socket
from typing import Any

from redis.connection import Connection

from kvpool.stores.tls import Tls


class TlsConnection(Connection):
    """As redis-py's own, but for whom it trusts: that one adds the system's authorities to the one that was named."""

    def __init__(self, *, tls: Tls, **settings: Any) -> None:
        super().__init__(**settings)  # type: ignore[no-untyped-call]
        self._tls = tls

    def _connect(self) -> socket.socket:
        plain: socket.socket = super()._connect()  # type: ignore[no-untyped-call]
        try:
            return self._tls.context().wrap_socket(plain, server_hostname=self.host)
        except BaseException:
            plain.close()
            raise
