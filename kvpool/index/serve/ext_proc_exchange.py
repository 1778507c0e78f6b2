"""``Exchange``: one request and its response, as Envoy's external processing asks about them.

Messages are those of ``external_processor.proto``; which of them come, and what is answered to each, goes by the modes
that Envoy is configured with, and says in the first. One event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache
from typing import Any

from kvpool.index.place.placement import Placement
from kvpool.index.serve.placements import DESTINATION, OURS, RANK, Placements, Refusal
from kvpool.tracing import HEADERS
from kvpool.v1 import ext_proc_pb2 as pb

SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
LB, SUBSET_HINT = "envoy.lb", "envoy.lb.subset_hint"

PART_NBYTES = 62 << 10  # of a body that is handed back: Envoy takes no more in one message

_MODE = pb.ProcessingMode
_FULL_DUPLEX = _MODE.FULL_DUPLEX_STREAMED
_WITH_BODY = (_MODE.BUFFERED, _MODE.BUFFERED_PARTIAL, _FULL_DUPLEX)
_PATH = ":path"
_KEPT = frozenset((_PATH, "authorization", *HEADERS, *OURS))  # what is asked of the headers of a request
_ENDPOINT_NBYTES = 128  # of memory, for one of a subset
_OVERWRITE = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD

logger = logging.getLogger("kvpool.index")


class Exchange:
    """One request and its response: what has come of it, and what is answered to each message. ``host``: of Envoy."""

    def __init__(self, placements: Placements, tenant: str, host: str) -> None:
        self._placements, self._tenant, self._host = placements, tenant, host
        self._headers: dict[str, str] = {}
        self._headers_nbytes = 0  # that are held, with the subset
        self._body = bytearray()  # of parts
        self._body_nbytes = 0  # that are held
        self._is_placed = False
        self._subset: frozenset[str] | None = None
        self._mode = _MODE.BUFFERED
        self._response_mode = _MODE.NONE
        self._placement: Placement | None = None  # whose reservation is still to be ended

    def close(self) -> None:
        """Envoy asks no more about it."""
        self._forget_body()
        self._forget_headers()
        if self._placement is not None:
            self._placements.release(self._placement, now=False)
            self._placement = None

    async def answer(self, message: Any) -> list[Any]:
        """The replies to one message."""
        try:
            return await self._answer(message)
        except Refusal as refusal:
            return [_refused(refusal)]

    async def _answer(self, message: Any) -> list[Any]:
        if message.HasField("protocol_config"):
            self._mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        kind = message.WhichOneof("request")
        if kind == "request_headers":
            return await self._on_headers(message)
        if kind == "request_body":
            return await self._on_body(message.request_body)
        if kind == "request_trailers":
            replies = await self._placed_streamed(end_of_stream=False) if self._mode == _FULL_DUPLEX else []
            return [*replies, pb.ProcessingResponse(request_trailers=pb.TrailersResponse())]
        if kind == "response_headers":
            return [self._on_response(message)]
        if kind == "response_body":
            return self._on_response_body(message.response_body)
        return [pb.ProcessingResponse(response_trailers=pb.TrailersResponse())]

    async def _on_headers(self, message: Any) -> list[Any]:
        self._forget_headers()
        self._is_placed = False
        headers = {
            header.key: (header.raw_value or header.value.encode()).decode("latin-1")
            for header in message.request_headers.headers.headers
            if header.key in _KEPT
        }
        subset = _subset(message.metadata_context)
        nbytes = sum(len(name) + len(value) for name, value in headers.items())
        nbytes += _ENDPOINT_NBYTES * len(subset or ())
        self._placements.hold(0, nbytes, self._host)
        self._headers, self._subset, self._headers_nbytes = headers, subset, nbytes
        if message.request_headers.end_of_stream or self._mode not in _WITH_BODY:
            return [self._to_headers(await self._place(b""))]
        if self._mode == _FULL_DUPLEX:  # the answer waits for the body
            return []
        return [pb.ProcessingResponse(request_headers=pb.HeadersResponse())]

    async def _on_body(self, body: Any) -> list[Any]:
        if self._is_placed:
            if self._mode not in _WITH_BODY:
                _warn_of(self._mode)
            return [pb.ProcessingResponse(request_body=pb.BodyResponse())]
        self._placements.hold(self._body_nbytes, len(body.body), self._host)
        self._body_nbytes += len(body.body)
        if self._mode == _FULL_DUPLEX:
            self._body += body.body
            return await self._placed_streamed(end_of_stream=True) if body.end_of_stream else []
        placed = await self._place(body.body)
        return [
            pb.ProcessingResponse(
                request_body=pb.BodyResponse(response=self._to(placed)), dynamic_metadata=_metadata(placed)
            )
        ]

    async def _placed_streamed(self, *, end_of_stream: bool) -> list[Any]:
        """The answer to the headers, and the body handed back."""
        body = bytes(self._body)
        replies = [self._to_headers(await self._place(body))]
        for at in range(0, max(len(body), 1), PART_NBYTES):
            part = pb.StreamedBodyResponse(
                body=body[at : at + PART_NBYTES],
                end_of_stream=end_of_stream and at + PART_NBYTES >= len(body),
            )
            replies.append(pb.ProcessingResponse(request_body=pb.BodyResponse(response=_streamed(part))))
        return replies

    def _to_headers(self, placement: Placement) -> Any:
        return pb.ProcessingResponse(
            request_headers=pb.HeadersResponse(response=self._to(placement)),
            dynamic_metadata=_metadata(placement),
        )

    async def _place(self, body: bytes) -> Placement:
        if self._placement is not None:  # of a caller that asks twice in one call
            self._placements.release(self._placement, now=True)
            self._placement = None
        self._is_placed = True
        try:
            path = self._headers.get(_PATH, "/")
            self._placement = await self._placements.place(
                path, self._headers, body, self._tenant, self._subset
            )
        finally:
            self._forget_body()
        return self._placement

    def _on_response(self, message: Any) -> Any:
        placement = self._placement
        if placement is None:
            return pb.ProcessingResponse(response_headers=pb.HeadersResponse())
        served = _text(message.metadata_context, LB, SERVED)
        kind = next(
            (
                header.raw_value.decode("latin-1") or header.value
                for header in message.response_headers.headers.headers
                if header.key == "content-type"
            ),
            "",
        )
        elsewhere = bool(served) and served not in (target.endpoint for target in placement.targets[:1])
        # The headers of a stream come before its prompt is computed.
        if elsewhere or not kind.startswith("text/event-stream"):
            self._placements.release(placement, now=True)
            self._placement = None
        mutation = _setting(self._shown(placement))
        return pb.ProcessingResponse(
            response_headers=pb.HeadersResponse(response=pb.CommonResponse(header_mutation=mutation))
        )

    def _on_response_body(self, body: Any) -> list[Any]:
        if body.end_of_stream and self._placement is not None:
            self._placements.release(self._placement, now=True)
            self._placement = None
        if self._response_mode != _FULL_DUPLEX:
            return [pb.ProcessingResponse(response_body=pb.BodyResponse())]
        part = pb.StreamedBodyResponse(body=body.body, end_of_stream=body.end_of_stream)
        return [pb.ProcessingResponse(response_body=pb.BodyResponse(response=_streamed(part)))]

    def _to(self, placement: Placement) -> Any:
        """What makes a request go there."""
        headers = self._shown(placement)
        if placement.targets:
            headers.append((DESTINATION, _endpoints(placement)))
            if (dp_rank := placement.targets[0].dp_rank) is not None:
                headers.append((RANK, str(dp_rank)))
        said = {name for name, _ in headers}
        mutation = _setting(headers)
        mutation.remove_headers.extend(name for name in OURS if name in self._headers and name not in said)
        return pb.CommonResponse(header_mutation=mutation)

    def _shown(self, placement: Placement) -> list[tuple[str, str]]:
        return self._placements.shown(placement, placement.targets[0] if placement.targets else None)

    def _forget_body(self) -> None:
        self._placements.let_go(self._body_nbytes, self._host)
        self._body, self._body_nbytes = bytearray(), 0

    def _forget_headers(self) -> None:
        self._placements.let_go(self._headers_nbytes, self._host)
        self._headers, self._subset, self._headers_nbytes = {}, None, 0


def _subset(metadata: Any) -> frozenset[str] | None:
    """Of ``IP:PORT``; None: none is told."""
    if SUBSET_HINT not in metadata.filter_metadata:
        return None
    fields = metadata.filter_metadata[SUBSET_HINT].fields
    if SUBSET not in fields:
        return None
    value = fields[SUBSET]
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


def _endpoints(placement: Placement) -> str:
    """Those for which the rank of the best is right, where it has one: Envoy sends the same headers to each."""
    rank = placement.targets[0].dp_rank
    return ",".join(target.endpoint for target in placement.targets if rank in (None, target.dp_rank))


@cache
def _warn_of(mode: int) -> None:
    """Once."""
    logger.warning(
        "Envoy sends bodies of requests in the mode %s, in which they are placed by load, without their prompt: set "
        "request_body_mode to BUFFERED or FULL_DUPLEX_STREAMED",
        _MODE.BodySendMode.Name(mode) if mode in _MODE.BodySendMode.values() else mode,
    )


def _metadata(placement: Placement) -> Any:
    if not placement.targets:  # Envoy chooses
        return None
    return {LB: {DESTINATION: _endpoints(placement)}}


def _setting(headers: Iterable[tuple[str, str]]) -> Any:
    return pb.HeaderMutation(
        set_headers=[
            pb.HeaderValueOption(
                header=pb.HeaderValue(key=name, raw_value=value.encode()), append_action=_OVERWRITE
            )
            for name, value in headers
        ]
    )


def _streamed(part: Any) -> Any:
    return pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=part))


def _refused(refusal: Refusal) -> Any:
    """What the client is answered, in the form of OpenAI's API."""
    reply = pb.ProcessingResponse()
    reply.immediate_response.status.code = refusal.status
    reply.immediate_response.headers.CopyFrom(_setting(refusal.headers.items()))
    reply.immediate_response.body = refusal.body
    reply.immediate_response.details = "kvpool"
    return reply
