"""Credentials for a test: certificates of an authority of its own, tokens, and the rights of a user of a server."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvpool.index.serve.auth import make_token

if TYPE_CHECKING:
    from tests.support.servers import Server

_DAY = datetime.timedelta(days=1)
_PEM = serialization.Encoding.PEM


@dataclass(frozen=True)
class Pair:
    """Paths of a certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates; ``ca`` is the path of its own."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        own = self._builder(self._name, self._key.public_key(), 2 * _DAY)
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(own.sign(self._key, hashes.SHA256()).public_bytes(_PEM))

    def issue(
        self, name: str, *, names: tuple[str, ...] = (), days: int = 2, passphrase: bytes | None = None
    ) -> Pair:
        """A certificate for the DNS names and IP addresses ``names``; it has run out when ``days`` is below 0."""
        key = ec.generate_private_key(ec.SECP256R1())
        cert = self._builder(_named(name), key.public_key(), days * _DAY)
        if names:
            cert = cert.add_extension(x509.SubjectAlternativeName([_general(one) for one in names]), False)
        pair = Pair(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        pair.cert.write_bytes(cert.sign(self._key, hashes.SHA256()).public_bytes(_PEM))
        hidden = (
            serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
        )
        pair.key.write_bytes(key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, hidden))
        return pair

    def _builder(
        self, subject: x509.Name, public: ec.EllipticCurvePublicKey, life: datetime.timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.timezone.utc)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 10 * _DAY)
            .not_valid_after(now + life)
        )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def write_tokens(path: Path, **holders: tuple[list[str], list[str]]) -> dict[str, str]:
    """``name=(rights, tenants)``; the tokens by name."""
    tokens, entries = {}, []
    for name, (rights, tenants) in holders.items():
        tokens[name], entry = make_token(name, rights, tenants)
        entries.append(entry)
    fresh = path.with_suffix(".new")
    fresh.write_text("\n".join(entries))
    fresh.rename(path)  # another file each time, so no clock has to move
    return tokens


# As docs/how-to/valkey.md has it.
DOCUMENTED = [
    "+ping", "+select", "+client|setname", "+multi", "+exec", "+hset", "+pexpire", "+pttl", "+hmget", "+exists",
    "+touch", "+unlink", "+time", "+set", "+mget", "+zadd", "+zcard", "+zrange", "+zrem",
    "+zremrangebyscore", "+zremrangebyrank",
]  # fmt: skip


def url_of(server: Server, *, without: tuple[str, ...] = (), keys: str = "kvpool:tenant-1:*") -> str:
    """For a user who may do what the documentation says, but for these."""
    commands = [one for one in DOCUMENTED if one[1:] not in without] + ["+info"]  # GLIDE's own
    if server.knows("client|setinfo"):
        commands.append("+client|setinfo")
    server.client.acl_setuser(
        "worker", enabled=True, reset=True, passwords=["+p"], keys=[keys], commands=commands
    )
    return f"valkey://worker:p@127.0.0.1:{server.port}"
