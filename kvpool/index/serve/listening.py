"""``open_listening``: a socket that waits for connections at an address that the operator has named."""

from __future__ import annotations

import ipaddress
import socket

from kvpool.errors import ConfigError
from kvpool.text import parse_address


def open_listening(listen: str, what: str) -> socket.socket:
    """A socket that listens on ``HOST:PORT``; the caller closes it. ``what``: what cannot be done where it fails.

    Errors: ``ConfigError`` when the address cannot be bound.
    """
    host, port = parse_address(listen)
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        opened = socket.socket(family, socket.SOCK_STREAM)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(address)
            opened.listen()
        except BaseException:
            opened.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot {what} {listen}: {error.strerror}; choose another address, or {host}:0 for any free port"
        ) from error
    return opened


def is_loopback(listen: str) -> bool:
    """Whether only processes of this host reach ``HOST:PORT``."""
    host = parse_address(listen)[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
