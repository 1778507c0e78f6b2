"""``open_server``: a gRPC server with the limits of every port of an index, and gRPC's reflection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from kvpool.errors import ConfigError
from kvpool.index.net.connections import Connections
from kvpool.index.net.listener import open_listening
from kvpool.index.protocol.messages import MAX_REPLY_NBYTES, MAX_REQUEST_NBYTES, SERVICE
from kvpool.index.serve.calls import Calls
from kvpool.index.serve.health import HEALTH
from kvpool.v1 import health_pb2, index_pb2, reflection_pb2

REFLECTION = "grpc.reflection.v1alpha.ServerReflection"
_REFLECT = "ServerReflectionInfo"
_NOT_FOUND: int = grpc.StatusCode.NOT_FOUND.value[0]
# Of all calls, refused ones included: bounds the memory of calls. Honest callers meet ``Limits.calls`` first.
MAX_CALLS = 8192
MAX_CONNECTIONS = 4096
MAX_CALLS_OF_CONNECTION = 256  # a caller's gRPC queues more
# Bytes of a request that gRPC receives ahead of a handler. Its default grows with a connection's speed, to
# tens of MiB per call of a fast caller. A reading handler gets requests of any size at full speed.
LOOKAHEAD_NBYTES = 256 << 10
HANDSHAKE_S = 10  # for a connection to become HTTP/2, TLS included
KEEPALIVE_S = 60  # period of pings on a silent connection
KEEPALIVE_TIMEOUT_S = 20
# Between pings of a client, with and without a stream: more of them end its connection. Clients send one in 10 s, the
# least that gRPC's guide and the libraries of Go and Java allow.
PING_S = 5.0

Handlers = Mapping[str, Mapping[str, grpc.RpcMethodHandler]]  # by service and method


def open_server(
    listen: str,
    handlers: Handlers,
    connections: Connections,
    *,
    calls_of_connection: int = MAX_CALLS_OF_CONNECTION,
    request_nbytes: int = MAX_REQUEST_NBYTES,
) -> tuple[grpc.aio.Server, int]:
    """A server on ``HOST:PORT``, not started, and its port.

    ``request_nbytes``: of the largest message; gRPC refuses larger ones by their first bytes. Errors: ``ConfigError``.
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
        ("grpc.http2.min_ping_interval_without_data_ms", round(PING_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
    for name, seconds in (("age", connections.age_s), ("age_grace", connections.grace_s)):
        if seconds:
            options.append((f"grpc.max_connection_{name}_ms", max(1, round(seconds * 1000))))
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MAX_CALLS)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(name, calls) for name, calls in handlers.items()]
    )
    try:
        if connections.tls is None:
            return server, int(server.add_insecure_port(listen))
        return server, int(server.add_secure_port(listen, connections.tls.credentials()))
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {listen}: {error}") from error


# ---- reflection


def reflection_handlers(calls: Calls) -> dict[str, grpc.RpcMethodHandler]:
    """gRPC's reflection, which takes no token."""
    files = _files()

    async def serve(context: grpc.aio.ServicerContext) -> None:
        while (request := await calls.next_message(_REFLECT, context)) is not grpc.aio.EOF:
            await context.write(_answer(request, files))

    handler = grpc.stream_stream_rpc_method_handler(
        calls.stream(_REFLECT, None, serve),
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return {_REFLECT: handler}


def _files() -> dict[str, bytes]:
    """The three files by their names, and by the names of their definitions. None imports another."""
    found: dict[str, bytes] = {}
    for descriptor, service in (
        (index_pb2.DESCRIPTOR, SERVICE),
        (health_pb2.DESCRIPTOR, HEALTH),
        (reflection_pb2.DESCRIPTOR, REFLECTION),
    ):
        file = FileDescriptorProto()
        descriptor.CopyToProto(file)
        assert not file.dependency
        ours, theirs = file.package, service.rpartition(".")[0]
        if ours != theirs:  # as others know it
            file.package = theirs
            file.name = f"{theirs.replace('.', '/')}/{file.name.rpartition('/')[2]}"
            _rename(file, f".{ours}.", f".{theirs}.")
        names = [file.name]
        for one in (*file.message_type, *file.enum_type, *file.service):
            names.append(f"{theirs}.{one.name}")
        names += [f"{theirs}.{one.name}.{method.name}" for one in file.service for method in one.method]
        found.update(dict.fromkeys(names, file.SerializeToString()))
    return found


def _rename(file: FileDescriptorProto, ours: str, theirs: str) -> None:
    for message in file.message_type:
        for field in message.field:
            field.type_name = field.type_name.replace(ours, theirs, 1)
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(ours, theirs, 1)
            method.output_type = method.output_type.replace(ours, theirs, 1)


def _answer(request: Any, files: dict[str, bytes]) -> Any:
    asked = request.WhichOneof("message_request")
    reply = reflection_pb2.ServerReflectionResponse(valid_host=request.host, original_request=request)
    if asked == "list_services":
        for name in sorted((SERVICE, HEALTH, REFLECTION)):
            reply.list_services_response.service.add(name=name)
        return reply
    file = files.get(getattr(request, asked)) if asked else None
    if file is None:
        reply.error_response.error_code = _NOT_FOUND
        reply.error_response.error_message = "nothing of this name is served here"
    else:
        reply.file_descriptor_response.file_descriptor_proto.append(file)
    return reply
