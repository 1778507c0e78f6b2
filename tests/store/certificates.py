"""Certificates for a test: an authority, and what it signs, as PEM files in a folder."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

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
