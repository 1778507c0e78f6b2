"""``ExtProcServer``: the endpoint picker of the Gateway API inference extension, for Envoy and its kin.

Envoy opens a stream of ``envoy.service.ext_proc.v3.ExternalProcessor`` per request, and sends its headers and
body; an ``Exchange`` answers. The header and the dynamic metadata ``x-gateway-destination-endpoint``
(namespace ``envoy.lb``) name ``IP:PORT``, several in order of preference. Sources: proposal 004 of
kubernetes-sigs/gateway-api-inference-extension; Envoy's ``external_processor.proto``.

Bodies come whole (``BUFFERED``) or in parts that are handed back (``FULL_DUPLEX_STREAMED``, as the protocol
asks); in other modes a request is placed by load, once. One event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvpool.discovery.worker import DEFAULT_TENANT
from kvpool.errors import ConfigError
from kvpool.index import limits
from kvpool.index.front.inference_request import engine_path
from kvpool.index.front.placement import (
    DESTINATION,
    MAX_BODY_NBYTES,
    OURS,
    RANK,
    Placement,
    Refusal,
    Target,
    hold,
)  # fmt: skip
from kvpool.index.front.placer import Placer
from kvpool.index.front.stored_responses import is_of_responses
from kvpool.index.limits import INFERENCE, Limits
from kvpool.index.net.connections import PLAIN, Connections
from kvpool.index.protocol.packed import check_fields
from kvpool.index.serve.calls import Calls
from kvpool.index.serve.grpc_server import open_server
from kvpool.index.serve.health import HEALTH, Health
from kvpool.tracing import HEADERS
from kvpool.v1 import ext_proc_pb2 as pb

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
TENANT = "x-kvpool-tenant"  # in the metadata of Envoy's call: set by its operator, not by the client
CALLS_OF_CONNECTION = 1024
MAX_HEADERS = 1000  # of a request or a response; Envoy takes 100 by default
MAX_HEADERS_NBYTES = 256 << 10  # with the metadata beside them; Envoy takes 60 KiB
MAX_MESSAGE_NBYTES = MAX_BODY_NBYTES + (1 << 20)  # a slightly larger body is answered with 413
BODY_S = 60.0  # for a message of a body: a caller may be slow, and Envoy waits 30 s for all of it
RESPONSE_S = 3600.0  # for a message of a response: a generation may take long
STOP_TIMEOUT_S = 5.0

SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
LB, SUBSET_HINT = "envoy.lb", "envoy.lb.subset_hint"
PART_NBYTES = 62 << 10  # of a body that is handed back: Envoy takes no more in one message

_MODE = pb.ProcessingMode
_FULL_DUPLEX = _MODE.FULL_DUPLEX_STREAMED
_WITH_BODY = (_MODE.BUFFERED, _MODE.BUFFERED_PARTIAL, _FULL_DUPLEX)
_PATH, _METHOD = ":path", ":method"
_ODD = "surrogateescape", "replace"  # bytes that are no UTF-8: of headers, of paths; as the router's are read
_KEPT = frozenset((_PATH, _METHOD, "authorization", *HEADERS, *OURS))  # of the headers of a request
_ENDPOINT_NBYTES = 128  # of memory, per endpoint of a subset
_OVERWRITE = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD

logger = logging.getLogger("kvpool.index")


class ExtProcServer:
    """One event loop: ``start``, ``stop``.

    ``calls``, ``health``: of the index.
    """

    def __init__(
        self,
        placer: Placer,
        calls: Calls,
        health: Health,
        connections: Connections = PLAIN,
    ) -> None:
        self._placer, self._limits, self._calls, self._health = placer, calls.limits, calls, health
        self._connections = connections
        self._server: grpc.aio.Server | None = None

    async def start(self, listen: str) -> int:
        """Listen on ``HOST:PORT``; port 0: any free one. Returns the port. Errors: ``ConfigError``."""
        handlers = {
            SERVICE: {
                "Process": grpc.stream_stream_rpc_method_handler(
                    self._calls.stream("Process", "read", self._serve, limits.PLACEMENTS)
                )
            },
            HEALTH: self._health.handlers(self._calls),
        }
        self._server, port = open_server(
            listen,
            handlers,
            self._connections,
            calls_of_connection=CALLS_OF_CONNECTION,
            request_nbytes=MAX_MESSAGE_NBYTES,
        )
        await self._server.start()
        return port

    async def stop(self) -> None:
        """Refuse new requests; running ones have a few seconds."""
        if self._server is not None:
            await self._server.stop(STOP_TIMEOUT_S)

    async def _serve(self, context: grpc.aio.ServicerContext) -> None:
        metadata = {str(key): str(value) for key, value in context.invocation_metadata() or ()}
        tenant = metadata.get(TENANT, DEFAULT_TENANT)
        caller = self._calls.caller("read", context)
        caller.check("read", tenant)
        memory = self._calls.memory(caller, context)
        host = context.peer().rpartition(":")[0]
        exchange = Exchange(self._placer, self._limits, tenant, host)
        try:
            # Headers come with the call. gRPC holds a message of which a part has come, and does not say so.
            packed: Any = await self._calls.receive("Process", context, memory)
            while packed is not grpc.aio.EOF:
                answering = exchange.answer(_message(packed))
                del packed  # a body; the next message comes with the response
                for reply in await answering:
                    await context.write(reply.SerializeToString())
                due = ("body", BODY_S) if exchange.awaits_body else ("response", RESPONSE_S)
                packed = await self._calls.next_message("Process", context, *due)
        finally:
            exchange.close()


class Exchange:
    """One request and its response, in Envoy's messages of ``external_processor.proto``.

    Envoy's configured modes, in its first message, determine messages and replies. ``host``: Envoy's.
    """

    def __init__(self, placer: Placer, limits: Limits, tenant: str, host: str) -> None:
        self._placer, self._limits = placer, limits
        self._tenant, self._host = tenant, host
        self._headers: dict[str, str] = {}
        self._headers_nbytes = 0  # held, with the subset
        self._body = bytearray()  # of parts
        self._body_nbytes = 0  # held
        self._is_placed = False
        self._subset: frozenset[str] | None = None
        self._mode = _MODE.BUFFERED
        self._response_mode = _MODE.NONE
        self._placement: Placement | None = None  # with a reservation to release

    @property
    def awaits_body(self) -> bool:
        return not self._is_placed

    def close(self) -> None:
        self._forget_body()
        self._forget_headers()
        if self._placement is not None:
            self._placer.release_when_shown(self._placement)
            self._placement = None

    async def answer(self, message: Any) -> list[Any]:
        if message.HasField("protocol_config"):
            self._mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        kind = message.WhichOneof("request")
        try:
            if kind == "request_headers":
                return await self._on_headers(message)
            if kind == "request_body":
                return await self._on_body(message.request_body)
            if kind == "request_trailers":
                replies = await self._streamed(end_of_stream=False) if self._mode == _FULL_DUPLEX else []
                return [*replies, pb.ProcessingResponse(request_trailers=pb.TrailersResponse())]
        except Refusal as refusal:
            return [_refused(refusal)]
        if kind == "response_headers":
            return [self._on_response(message)]
        if kind == "response_body":
            return self._on_response_body(message.response_body)
        return [pb.ProcessingResponse(response_trailers=pb.TrailersResponse())]

    async def _on_headers(self, message: Any) -> list[Any]:
        self._forget_headers()
        self._is_placed = False
        headers = {
            header.key: (header.raw_value or header.value.encode()).decode(errors=_ODD[header.key == _PATH])
            for header in message.request_headers.headers.headers
            if header.key in _KEPT or header.key == self._placer.session_header
        }
        subset = _subset(message.metadata_context)
        nbytes = sum(len(name) + len(value) for name, value in headers.items())
        nbytes += _ENDPOINT_NBYTES * len(subset or ())
        hold(self._limits, 0, nbytes, self._host)
        self._headers, self._subset, self._headers_nbytes = headers, subset, nbytes
        if message.request_headers.end_of_stream or self._mode not in _WITH_BODY:
            return [self._to(await self._place(b""), in_body=False)]
        if self._mode == _FULL_DUPLEX:  # the answer waits for the body
            return []
        return [pb.ProcessingResponse(request_headers=pb.HeadersResponse())]

    async def _on_body(self, body: Any) -> list[Any]:
        if self._is_placed:
            if self._mode not in _WITH_BODY:
                _warn_of(self._mode)
            return [pb.ProcessingResponse(request_body=pb.BodyResponse())]
        hold(self._limits, self._body_nbytes, len(body.body), self._host)
        self._body_nbytes += len(body.body)
        if self._mode == _FULL_DUPLEX:
            self._body += body.body
            return await self._streamed(end_of_stream=True) if body.end_of_stream else []
        return [self._to(await self._place(body.body), in_body=True)]

    async def _streamed(self, *, end_of_stream: bool) -> list[Any]:
        """The answer to the headers, and the body handed back."""
        body = bytes(self._body)
        replies = [self._to(await self._place(body), in_body=False)]
        for at in range(0, max(len(body), 1), PART_NBYTES):
            is_last = at + PART_NBYTES >= len(body)
            part = _part(body[at : at + PART_NBYTES], end_of_stream and is_last)
            replies.append(pb.ProcessingResponse(request_body=part))
        return replies

    @property
    def _path(self) -> str:
        return self._headers.get(_PATH, "/")

    async def _place(self, body: bytes) -> Placement:
        self._release()  # of a caller with two requests in one call
        self._is_placed = True
        held = body if self._headers.get(_METHOD, "POST") == "POST" else b""  # OPTIONS needs no key
        try:
            placing = self._placer.place(self._path, self._headers, held, self._tenant, self._subset)
            self._placement = await placing
        finally:
            self._forget_body()
        return self._placement

    def _on_response(self, message: Any) -> Any:
        placement = self._placement
        if placement is None:
            return pb.ProcessingResponse(response_headers=pb.HeadersResponse())
        served, targets = _text(message.metadata_context, LB, SERVED), _fit(placement)
        sent = message.response_headers.headers.headers
        headers = {header.key: header.raw_value.decode("latin-1") or header.value for header in sent}
        elsewhere = bool(served) and served not in (target.endpoint for target in targets[:1])
        status = headers.get(":status", "")
        # Envoy retries after 404, too, and does not say whether the first worker failed.
        unknown = placement.reason == "unknown-model" or is_of_responses(engine_path(self._path))
        gone_on = self._placer.doubt if unknown or status == "404" else self._placer.record
        if elsewhere and not self._placer.holds(placement, served):
            targets = []  # a retry went to another InferencePool, whose picker knows why
        for target in targets:
            if not served or target.endpoint == served:
                if status.isdecimal():
                    self._placer.record(placement, target, int(status))
                if status.startswith("2"):  # its body does not come here
                    self._placer.judge(placement, target, served=True)
                break
            gone_on(placement, target)
        # The headers of a stream come before its prompt is computed.
        if elsewhere or not headers.get("content-type", "").startswith("text/event-stream"):
            self._release()
        if not status.startswith("2"):  # whom the worker refuses learns nothing of what others' prompts hold
            return pb.ProcessingResponse(response_headers=pb.HeadersResponse())
        common = pb.CommonResponse(header_mutation=_setting(self._placer.headers(placement)))
        return pb.ProcessingResponse(response_headers=pb.HeadersResponse(response=common))

    def _on_response_body(self, body: Any) -> list[Any]:
        if body.end_of_stream:
            self._release()
        if self._response_mode != _FULL_DUPLEX:
            return [pb.ProcessingResponse(response_body=pb.BodyResponse())]
        return [pb.ProcessingResponse(response_body=_part(body.body, body.end_of_stream))]

    def _to(self, placement: Placement, *, in_body: bool) -> Any:
        """The answer to the headers, or the body, that names the targets; without targets Envoy chooses."""
        headers, metadata = self._placer.headers(placement), None
        if placement.targets:
            rank = placement.targets[0].dp_rank
            endpoints = ",".join(target.endpoint for target in _fit(placement))
            headers.append((DESTINATION, endpoints))
            metadata = {LB: {DESTINATION: endpoints}}
            if rank is not None:
                headers.append((RANK, str(rank)))
        names = {name for name, _ in headers}
        mutation = _setting(headers)
        mutation.remove_headers.extend(name for name in OURS if name in self._headers and name not in names)
        common = pb.CommonResponse(header_mutation=mutation)
        if in_body:
            body = pb.BodyResponse(response=common)
            return pb.ProcessingResponse(request_body=body, dynamic_metadata=metadata)
        answer = pb.HeadersResponse(response=common)
        return pb.ProcessingResponse(request_headers=answer, dynamic_metadata=metadata)

    def _release(self) -> None:
        if self._placement is not None:
            self._placer.release(self._placement)
            self._placement = None

    def _forget_body(self) -> None:
        self._limits.give(self._body_nbytes, INFERENCE, host=self._host)
        self._body, self._body_nbytes = bytearray(), 0

    def _forget_headers(self) -> None:
        self._limits.give(self._headers_nbytes, INFERENCE, host=self._host)
        self._headers, self._subset, self._headers_nbytes = {}, None, 0


# ---- messages


def _fit(placement: Placement) -> list[Target]:
    """Envoy sends the same headers to each endpoint, so all need the rank of the best."""
    rank = next((target.dp_rank for target in placement.targets), None)
    return [target for target in placement.targets if rank in (None, target.dp_rank)]


def _message(packed: bytes) -> Any:
    try:
        check_fields(packed, pb.ProcessingRequest.DESCRIPTOR)
        message = pb.ProcessingRequest.FromString(packed)
    except (DecodeError, RecursionError):
        raise ConfigError("the message is not an envoy.service.ext_proc.v3.ProcessingRequest") from None
    kind = message.WhichOneof("request")
    if kind in ("request_headers", "response_headers"):
        count = len(getattr(message, kind).headers.headers)
        if count > MAX_HEADERS or len(packed) > MAX_HEADERS_NBYTES:
            raise ConfigError(f"at most {MAX_HEADERS} headers in {MAX_HEADERS_NBYTES} bytes are read")
    return message


def _subset(metadata: Any) -> frozenset[str] | None:
    """Of ``IP:PORT``; None: all."""
    told = metadata.filter_metadata
    if SUBSET_HINT not in told or SUBSET not in told[SUBSET_HINT].fields:
        return None
    value = told[SUBSET_HINT].fields[SUBSET]
    if value.WhichOneof("kind") == "list_value":
        named: Iterable[str] = (one.string_value for one in value.list_value.values)
    else:
        named = value.string_value.split(",")
    return frozenset(name.strip() for name in named if name.strip())


def _text(metadata: Any, namespace: str, name: str) -> str:
    if namespace not in metadata.filter_metadata:
        return ""
    fields = metadata.filter_metadata[namespace].fields
    return str(fields[name].string_value) if name in fields else ""


@cache
def _warn_of(mode: int) -> None:
    logger.warning(
        "Envoy sends bodies of requests in the mode %s, in which they are placed by load, without their prompt: set "
        "request_body_mode to BUFFERED or FULL_DUPLEX_STREAMED",
        _MODE.BodySendMode.Name(mode) if mode in _MODE.BodySendMode.values() else mode,
    )


def _setting(headers: Iterable[tuple[str, str]]) -> Any:
    return pb.HeaderMutation(
        set_headers=[
            pb.HeaderValueOption(
                header=pb.HeaderValue(key=name, raw_value=value.encode()), append_action=_OVERWRITE
            )
            for name, value in headers
        ]
    )


def _part(body: bytes, end_of_stream: bool) -> Any:
    streamed = pb.StreamedBodyResponse(body=body, end_of_stream=end_of_stream)
    mutation = pb.BodyMutation(streamed_response=streamed)
    return pb.BodyResponse(response=pb.CommonResponse(body_mutation=mutation))


def _refused(refusal: Refusal) -> Any:
    reply = pb.ProcessingResponse()
    reply.immediate_response.status.code = refusal.status
    reply.immediate_response.headers.CopyFrom(_setting(refusal.headers.items()))
    reply.immediate_response.body = refusal.body
    reply.immediate_response.details = "kvpool"
    return reply
