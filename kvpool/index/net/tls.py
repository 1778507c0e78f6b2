"""TLS of an index's ports and clients, from PEM files that are checked at the start.

gRPC reports a bad file only when a peer connects, and to the peer.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc

from kvpool.errors import ConfigError
from kvpool.files import read_file
from kvpool.store.tls import MAX_PEM_NBYTES, new_context

logger = logging.getLogger("kvpool.index")


class ServerTls:
    """TLS of listening ports. ``client_ca``: authorities of callers' required certificates; empty: not required.

    ``context``: for servers other than gRPC's. A ``reload`` holds for later connections. ``_make`` and
    ``_current`` are shared with servers' threads and replaced whole. Errors: ``ConfigError`` with the file.
    """

    def __init__(self, cert: str, key: str, client_ca: str = "") -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._seen = self._state()
        self._make, self._current = self._read()
        _, self.context = self._read()
        self.context.sni_callback = self._choose  # OpenSSL calls it at each handshake, with or without a name

    def credentials(self) -> grpc.ServerCredentials:
        used = self._make

        def fresh() -> grpc.ServerCertificateConfiguration | None:
            """gRPC calls it at each handshake; None: unchanged."""
            nonlocal used
            make = self._make
            if make is used:
                return None
            used = make
            return make()

        return grpc.dynamic_ssl_server_credentials(
            used(), fresh, require_client_authentication=bool(self._client_ca)
        )

    def reload(self) -> None:
        """Use changed files from now on. Unusable ones change nothing, and are logged once.

        Blocking: reads files.
        """
        if (seen := self._state()) == self._seen:
            return
        self._seen = seen
        try:
            self._make, self._current = self._read()
        except ConfigError as error:
            logger.warning("the certificate stays as it was: %s", error)
        else:
            logger.info("the certificate was read again")

    def _choose(self, connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        connection.context = self._current

    def _state(self) -> list[object]:
        return [file_state(path) for path in (self._cert, self._key, self._client_ca) if path]

    def _read(self) -> tuple[Callable[[], grpc.ServerCertificateConfiguration], ssl.SSLContext]:
        chain, private = _pem("--tls-cert", self._cert), _pem("--tls-key", self._key)
        context = new_context(ssl.PROTOCOL_TLS_SERVER)
        _judge_chain(context, f"--tls-cert {self._cert} and --tls-key {self._key}", self._cert, self._key)
        authorities = None
        if self._client_ca:
            authorities = _authorities(context, "--tls-client-ca", self._client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        # gRPC consumes a configuration: each server needs one of its own.
        return partial(grpc.ssl_server_certificate_configuration, [(private, chain)], authorities), context


def channel_credentials(ca: str, cert: str = "", key: str = "") -> grpc.ChannelCredentials:
    """TLS of a client. ``ca``: authorities of the index's certificate, which must be for the dialled host.

    ``cert`` and ``key``: of the client, both or none. Errors: ``ConfigError`` with the file.
    """
    context = new_context(ssl.PROTOCOL_TLS_CLIENT)
    authorities = _authorities(context, "tls_ca", ca)
    if not cert:
        return grpc.ssl_channel_credentials(authorities)
    chain, private = _pem("tls_cert", cert), _pem("tls_key", key)
    _judge_chain(context, f"tls_cert {cert} and tls_key {key}", cert, key)
    return grpc.ssl_channel_credentials(authorities, private, chain)


def trusting(option: str, ca: str) -> ssl.SSLContext:
    """Trusts these authorities alone. Errors: ``ConfigError`` with the option and the file."""
    context = new_context(ssl.PROTOCOL_TLS_CLIENT)
    _authorities(context, option, ca)
    return context


def _authorities(context: ssl.SSLContext, option: str, path: str) -> bytes:
    pem = _pem(option, path)
    try:
        context.load_verify_locations(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {path}: holds no certificate in PEM") from error
    return pem


def _judge_chain(context: ssl.SSLContext, what: str, cert: str, key: str) -> None:
    try:
        context.load_cert_chain(cert, key, password="")  # OpenSSL would read it from the terminal
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", "") or "no PEM"
        raise ConfigError(
            f"{what}: not a certificate and its own private key in PEM, without a passphrase ({reason})"
        ) from error


def _pem(option: str, path: str) -> bytes:
    try:
        return read_file(path, MAX_PEM_NBYTES)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}") from error


def file_state(path: str) -> object:
    """A value that changes with the file. Blocking: looks at one file."""
    try:
        found = Path(path).stat()
    except OSError as error:
        return error.errno
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
