"""TLS settings of connections to a server: authorities, client certificate, and advice on a fault."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from kvpool import _native


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
        """For a client in Python; reads the files again. Errors: ``OSError``."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
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


def _trust_system(context: ssl.SSLContext) -> None:
    """As the native client: OpenSSL's own places; if it was built elsewhere, the usual ones."""
    places = ssl.get_default_verify_paths()
    system = "" if places.cafile or places.capath else _native.system_authorities()
    if system:
        context.load_verify_locations(system)
    else:
        context.set_default_verify_paths()


# A phrase of OpenSSL's words or ours -> what to change. The first match counts.
_ADVICE = {
    "certificate has expired": "renew the server's certificate",
    "certificate is not yet valid": "correct the server's certificate, or this host's clock",
    "hostname mismatch": "write a name that the server's certificate holds, or have one issued for this name",
    "ip address mismatch": "write a name or address that the server's certificate holds, or have one issued for this",
    "certificate verify failed": "name the file of the authority that signed the server's certificate: ?ca=/path.pem",
    "certificate required": "the server demands a client certificate: add ?cert=/path.pem&key=/path.pem",
    "handshake failure": "if the server demands a client certificate, add ?cert=/path.pem&key=/path.pem",
    "alert unknown ca": "use a client certificate of an authority that the server trusts",
    "alert bad certificate": "use a client certificate of an authority that the server trusts",
    "alert certificate expired": "renew the client certificate",
    "wrong version number": "the port speaks no TLS: write valkey://, or the port that the server has for TLS",
    "number of clients": "raise the server's maxclients, or write fewer ?connections=",
    "protected mode": "set a password at the server, or its bind and protected-mode no",
    "hangs up": "do what it says, or ask its operator",
    "not known": "check the name of the host",
    "name resolution": "check the name of the host, and the name servers of this one",
    "no address associated": "check the name of the host",
    "tls handshake": "check that the server runs there below its maxclients, and that this is its port for TLS",
    "connection reset by peer": "if this is the server's port for TLS, write valkeys://",
    "closed the connection": "if this is the server's port for TLS, write valkeys://",
}
_OTHERWISE = "check that the server runs there"


def advice(words: str) -> str:
    """What to change after a failed connection with ``words``, for the end of a line."""
    folded = words.lower()
    return next((advised for sign, advised in _ADVICE.items() if sign in folded), _OTHERWISE)
