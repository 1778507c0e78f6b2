"""``open_server``: a gRPC server with the limits that every door of an index has."""

from __future__ import annotations

from collections.abc import Mapping

import grpc
import grpc.aio

from kvpool.errors import ConfigError
from kvpool.index.client.tls import ServerTls
from kvpool.index.protocol.messages import MAX_REPLY_NBYTES, MAX_REQUEST_NBYTES
from kvpool.index.serve.listening import open_listening

# Of all calls, those among them that are being refused: what bounds the memory that calls take. Honest callers meet
# ``Limits.calls`` first.
MAX_CALLS = 8192
MAX_CONNECTIONS = 4096
MAX_CALLS_OF_CONNECTION = 256  # a caller's gRPC keeps more of them waiting
# How much of a request gRPC receives before a handler reads it. Its own choice grows with a connection's speed, to tens
# of MiB for each call of a fast caller. A handler that reads gets requests of any size at full speed.
LOOKAHEAD_NBYTES = 256 << 10
HANDSHAKE_S = 10  # for a connection to become one of HTTP/2, TLS included
KEEPALIVE_S = 60  # a connection that is silent is asked whether its other end lives
KEEPALIVE_TIMEOUT_S = 20

Handlers = Mapping[str, Mapping[str, grpc.RpcMethodHandler]]  # by service and method


def open_server(
    listen: str,
    handlers: Handlers,
    tls: ServerTls | None,
    *,
    calls_of_connection: int = MAX_CALLS_OF_CONNECTION,
    request_nbytes: int = MAX_REQUEST_NBYTES,
    age_s: float = 0.0,
    grace_s: float = 0.0,
) -> tuple[grpc.aio.Server, int]:
    """A server on ``HOST:PORT`` that is not started yet, and its port.

    ``request_nbytes``: of the largest message; gRPC refuses larger ones by their first bytes.

    ``age_s``: after so long a caller is told to connect anew; ``grace_s``: after so long more its streams are ended;
    0, of either: never. Errors: ``ConfigError``.
    """
    # gRPC prints lines of its own when it cannot listen, and says less.
    open_listening(listen, "listen on").close()
    # so_reuseport off: two indexes on one port would each get half of the calls
    options = [
        ("grpc.max_receive_message_length", request_nbytes),
        ("grpc.max_send_message_length", MAX_REPLY_NBYTES),
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.max_concurrent_streams", calls_of_connection),
        ("grpc.http2.lookahead_bytes", LOOKAHEAD_NBYTES),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_S * 1000),
        ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    ]
    for name, seconds in (("age", age_s), ("age_grace", grace_s)):
        if seconds:
            options.append((f"grpc.max_connection_{name}_ms", max(1, round(seconds * 1000))))
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MAX_CALLS)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(name, calls) for name, calls in handlers.items()]
    )
    try:
        if tls is None:
            return server, int(server.add_insecure_port(listen))
        return server, int(server.add_secure_port(listen, tls.credentials()))
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {listen}: {error}") from error
