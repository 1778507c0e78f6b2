"""What to change after a fault, by a phrase in its words: the system's, OpenSSL's, a server's or ours."""

from __future__ import annotations

from kvpool.errors import NO_PROVIDER
from kvpool.threads import ADVICE, NO_THREAD

# Phrase, in lower case -> what to change. The first match counts.
# Of what this host or process has too little of.
_HOST = {
    NO_THREAD: ADVICE,
    "too many open files in system": "raise the host's limit of open files (sysctl fs.file-max)",
    "too many open files": "raise this process's limit of open files (ulimit -n)",
    "library has no ciphers": NO_PROVIDER,
    "cannot allocate memory": "raise the limit of memory of this process or container (ulimit -v)",
}
# Of a record whose connection ended.
_BLOCKS = {
    "invalid bulk length": "raise the server's proto-max-bulk-len above the size of a block",
    "of a block under way": (
        "if that happens again, the server's log says why: raise client-query-buffer-limit, maxmemory-clients or "
        "client-output-buffer-limit above twice the size of a block"
    ),
}
# Of a connection that does not come to stand.
_DIALS = {
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
    """After a failed connection with ``words``, for the end of a line."""
    return host_advice(words) or _match(_DIALS, words) or _OTHERWISE


def host_advice(words: str) -> str:
    """After a failure with ``words`` for which this host or process has too little of something; else empty."""
    return "" if ADVICE in words else _match(_HOST, words)


def advised(words: str) -> str:
    """``words``, with ``host_advice`` behind them."""
    found = host_advice(words)
    return f"{words}; {found}" if found else words


def block_advice(words: str) -> str:
    """After a fault of blocks, with what parts it from ``words``; empty: none is known."""
    found = host_advice(words) or _match(_BLOCKS, words)
    return found and f"; {found}"


def _match(table: dict[str, str], words: str) -> str:
    folded = words.lower()
    return next((advised for sign, advised in table.items() if sign in folded), "")
