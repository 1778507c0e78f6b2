"""TLS settings of connections to a server: authorities and client certificate."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from kvpool import _native
from kvpool.errors import ConfigError
from kvpool.files import read_file
from kvpool.store.advice import advised

MAX_PEM_NBYTES = 1 << 20


@dataclass(frozen=True)
class Tls:
    """Absolute paths of PEM files: ``ca``, the trusted authorities, empty for the system's; ``cert`` and
    ``key``, a client's certificate chain and its private key without a passphrase, both or none.

    The server's certificate must name the URL's host; no setting disables that.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""

    def files(self) -> tuple[str, str, str]:
        return self.ca, self.cert, self.key

    def context(self) -> ssl.SSLContext:
        """For a client in Python; reads the files again. Errors: ``OSError``, ``ConfigError``."""
        for path in filter(None, self.files()):
            read_file(path, MAX_PEM_NBYTES)  # OpenSSL would wait for a pipe
        context = new_context(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.hostname_checks_common_name = False
        if self.ca:
            context.load_verify_locations(self.ca)
        else:
            _trust_system(context)
        if self.cert:
            context.load_cert_chain(
                self.cert, self.key, password=""
            )  # without it OpenSSL would prompt on the terminal
        return context


def new_context(protocol: int) -> ssl.SSLContext:
    """Errors: ``ConfigError`` where OpenSSL's configuration leaves no TLS."""
    try:
        return ssl.SSLContext(protocol)
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).replace("_", " ").lower()
        raise ConfigError(advised(f"OpenSSL offers no TLS: {reason}")) from error


def _trust_system(context: ssl.SSLContext) -> None:
    """As the native client: OpenSSL's own places; if it was built elsewhere, the usual ones."""
    places = ssl.get_default_verify_paths()
    system = "" if places.cafile or places.capath else _native.system_authorities()
    if system:
        context.load_verify_locations(system)
    else:
        context.set_default_verify_paths()
