"""``Access``: whom a client of an index trusts, and how it proves who it is."""

from __future__ import annotations

import re
from typing import Any

from kvpool.errors import ConfigError
from kvpool.index.client.tls import channel_credentials

MAX_TOKEN_CHARS = 1024

_TOKEN = re.compile(rf"[\x21-\x7e]{{1,{MAX_TOKEN_CHARS}}}")


class Access:
    """``token``: the bearer token; None: none.

    ``tls_ca``: path of the authorities, in PEM, that the certificate of the index must be of; None: no TLS.
    ``tls_cert`` and ``tls_key``: paths of a certificate of this client and its private key, for an index that demands
    one. Blocking: reads these files. Errors: ``ConfigError``.
    """

    def __init__(
        self, token: str | None, tls_ca: str | None, tls_cert: str | None, tls_key: str | None
    ) -> None:
        if (tls_cert is None) != (tls_key is None):
            raise ConfigError("tls_cert and tls_key go together: a certificate and its private key")
        if tls_cert is not None and tls_ca is None:
            raise ConfigError("tls_cert needs tls_ca: the authority of the index's own certificate")
        self.metadata = () if token is None else (("authorization", f"Bearer {check_token(token)}"),)
        self._credentials = (
            None if tls_ca is None else channel_credentials(tls_ca, tls_cert or "", tls_key or "")
        )

    def open(self, transport: Any, target: str, options: Any) -> Any:
        """A channel to ``HOST:PORT``. ``transport``: the module ``grpc`` or ``grpc.aio``."""
        if self._credentials is None:
            return transport.insecure_channel(target, options=options)
        return transport.secure_channel(target, self._credentials, options=options)


def check_token(token: str) -> str:
    """Return ``token`` if it can be one. Errors: ``ConfigError``, which does not show it."""
    if not isinstance(token, str) or _TOKEN.fullmatch(token) is None:
        raise ConfigError(f"a token is 1 to {MAX_TOKEN_CHARS} printable ASCII characters without spaces")
    return token
