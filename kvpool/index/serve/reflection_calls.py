"""``reflection_handlers``: gRPC's reflection, which says what is served here."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from kvpool.index.protocol.messages import SERVICE
from kvpool.index.serve.calls import Calls
from kvpool.index.serve.health import HEALTH
from kvpool.v1 import health_pb2, index_pb2, reflection_pb2

REFLECTION = "grpc.reflection.v1alpha.ServerReflection"
_NOT_FOUND: int = grpc.StatusCode.NOT_FOUND.value[0]


def reflection_handlers(calls: Calls) -> dict[str, grpc.RpcMethodHandler]:
    """Handlers of gRPC's reflection, which takes no token."""
    files = _files()

    async def serve(context: grpc.aio.ServicerContext) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            await context.write(_answer(request, files))

    handler = grpc.stream_stream_rpc_method_handler(
        calls.stream("ServerReflectionInfo", None, serve),
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return {"ServerReflectionInfo": handler}


def _files() -> dict[str, bytes]:
    """The three files by their names, and by the names of what they define. None imports another."""
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
