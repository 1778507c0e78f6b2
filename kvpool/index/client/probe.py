"""``is_serving``: what ``grpc.health.v1`` says of an index, or of its endpoint picker.

The two messages of that protocol are one field each, so they are written here: a client needs no package for them.
"""

from __future__ import annotations

import grpc

from kvpool.index.client import channel
from kvpool.index.client.access import Access

CHECK = "/grpc.health.v1.Health/Check"
PICKER = "envoy.service.ext_proc.v3.ExternalProcessor"
SERVING = b"\x08\x01"  # HealthCheckResponse.status = SERVING


def is_serving(target: str, service: str, access: Access, timeout_s: float) -> bool:
    """Whether the server at ``target`` says that it serves ``service`` (empty: itself). Blocking.

    Errors: ``ConfigError``, ``IndexUnavailable``.
    """
    name = service.encode()
    request = b"\x0a" + bytes([len(name)]) + name if name else b""
    opened = access.open(grpc, channel.check_target(target), channel.OPTIONS)
    try:
        reply: bytes = opened.unary_unary(CHECK)(request, timeout=timeout_s)
    except grpc.RpcError as error:
        raise channel.error_of(target, timeout_s, error) from error
    finally:
        opened.close()
    return reply == SERVING
