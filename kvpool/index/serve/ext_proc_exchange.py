"""``Exchange``: one request and its response, as Envoy's external processing asks about them.

Messages are those of ``external_processor.proto``; which of them come, and what is answered to each, goes by the modes
that Envoy is configured with, and says in the first. One event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec

from kvpool.errors import KVPoolError
from kvpool.index.place.placer import Placement
from kvpool.v1 import ext_proc_pb2 as pb

DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
LB, SUBSET_HINT = "envoy.lb", "envoy.lb.subset_hint"
WORKER, MATCHED, BLOCKS, REASON = (
    "x-kvpool-worker", "x-kvpool-matched-blocks", "x-kvpool-prompt-blocks", "x-kvpool-reason",
)  # fmt: skip
RANK = "x-data-parallel-rank"  # vllm/entrypoints/serve/engine/serving.py
# Not for a client to say.
OURS = (DESTINATION, WORKER, MATCHED, BLOCKS, REASON)

MAX_BODY_NBYTES = 16 << 20
PART_NBYTES = 62 << 10  # of a body that is handed back: Envoy takes no more in one message
RETRY_AFTER_S = 1

_MODE = pb.ProcessingMode
_FULL_DUPLEX = _MODE.FULL_DUPLEX_STREAMED
_OVERWRITE = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


class Picker(Protocol):
    """What an exchange asks of the server."""

    def hold(self, nbytes: int) -> bool:
        """Take room for so much of a body; False: there is none."""

    def let_go(self, nbytes: int) -> None:
        """Of what was held."""

    async def place(
        self, headers: Mapping[str, str], body: bytes, tenant: str, subset: frozenset[str] | None
    ) -> Placement | Refusal:
        """Where a request goes, or what is answered in the place of a worker."""

    def release(self, placement: Placement, *, now: bool) -> None:
        """End its reservation: its worker has answered (``now``), or its metrics will show it."""

    def shown(self, placement: Placement) -> list[tuple[str, str]]:
        """The headers that say where a request went, and why."""


class Refusal(KVPoolError):
    """What is answered in the place of a worker: an HTTP status, and why."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Exchange:
    """One request and its response: what has come of it, and what is answered to each message."""

    def __init__(self, server: Picker, tenant: str) -> None:
        self._server, self._tenant = server, tenant
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self._subset: frozenset[str] | None = None
        self._mode = _MODE.BUFFERED
        self._response_mode = _MODE.NONE
        self._placement: Placement | None = None  # whose reservation is still to be ended

    def close(self) -> None:
        """Envoy asks no more about it."""
        self._forget_body()
        if self._placement is not None:
            self._server.release(self._placement, now=False)
            self._placement = None

    async def answer(self, message: Any) -> list[Any]:
        """The replies to one message."""
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
        self._headers = {
            header.key: (header.raw_value or header.value.encode()).decode("latin-1")
            for header in message.request_headers.headers.headers
        }
        self._subset = _subset(message.metadata_context)
        if message.request_headers.end_of_stream or self._mode not in (
            _MODE.BUFFERED, _MODE.BUFFERED_PARTIAL, _FULL_DUPLEX,
        ):  # fmt: skip
            placed = await self._place()
            if isinstance(placed, Refusal):
                return [_refused(placed)]
            return [
                pb.ProcessingResponse(
                    request_headers=pb.HeadersResponse(response=self._to(placed)),
                    dynamic_metadata=_metadata(placed),
                )
            ]
        if self._mode == _FULL_DUPLEX:  # the answer waits for the body
            return []
        return [pb.ProcessingResponse(request_headers=pb.HeadersResponse())]

    async def _on_body(self, body: Any) -> list[Any]:
        if len(self._body) + len(body.body) > MAX_BODY_NBYTES:
            return [_refused(Refusal(413, f"a request has at most {MAX_BODY_NBYTES} bytes"))]
        if not self._server.hold(len(body.body)):
            return [_refused(Refusal(503, "too many requests are being read: send it again later"))]
        self._body += body.body
        if self._mode == _FULL_DUPLEX:
            return await self._placed_streamed(end_of_stream=True) if body.end_of_stream else []
        placed = await self._place()
        if isinstance(placed, Refusal):
            return [_refused(placed)]
        return [
            pb.ProcessingResponse(
                request_body=pb.BodyResponse(response=self._to(placed)), dynamic_metadata=_metadata(placed)
            )
        ]

    async def _placed_streamed(self, *, end_of_stream: bool) -> list[Any]:
        """The answer to the headers, and the body handed back."""
        body = bytes(self._body)
        placed = await self._place()
        if isinstance(placed, Refusal):
            return [_refused(placed)]
        replies = [
            pb.ProcessingResponse(
                request_headers=pb.HeadersResponse(response=self._to(placed)),
                dynamic_metadata=_metadata(placed),
            )
        ]
        for at in range(0, max(len(body), 1), PART_NBYTES):
            part = pb.StreamedBodyResponse(
                body=body[at : at + PART_NBYTES],
                end_of_stream=end_of_stream and at + PART_NBYTES >= len(body),
            )
            replies.append(pb.ProcessingResponse(request_body=pb.BodyResponse(response=_streamed(part))))
        return replies

    async def _place(self) -> Placement | Refusal:
        body = bytes(self._body)
        try:
            placed = await self._server.place(self._headers, body, self._tenant, self._subset)
        finally:
            self._forget_body()
        if isinstance(placed, Placement):
            self._placement = placed
        return placed

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
        elsewhere = bool(served) and served not in placement.endpoints[:1]
        # The headers of a stream come before its prompt is computed.
        if elsewhere or not kind.startswith("text/event-stream"):
            self._server.release(placement, now=True)
            self._placement = None
        mutation = _setting(self._server.shown(placement))
        return pb.ProcessingResponse(
            response_headers=pb.HeadersResponse(response=pb.CommonResponse(header_mutation=mutation))
        )

    def _on_response_body(self, body: Any) -> list[Any]:
        if body.end_of_stream and self._placement is not None:
            self._server.release(self._placement, now=True)
            self._placement = None
        if self._response_mode != _FULL_DUPLEX:
            return [pb.ProcessingResponse(response_body=pb.BodyResponse())]
        part = pb.StreamedBodyResponse(body=body.body, end_of_stream=body.end_of_stream)
        return [pb.ProcessingResponse(response_body=pb.BodyResponse(response=_streamed(part)))]

    def _to(self, placement: Placement) -> Any:
        """What makes a request go there."""
        headers = self._server.shown(placement)
        if placement.endpoints:
            headers.append((DESTINATION, ",".join(placement.endpoints)))
        if placement.dp_rank is not None:
            headers.append((RANK, str(placement.dp_rank)))
        said = {name for name, _ in headers}
        mutation = _setting(headers)
        mutation.remove_headers.extend(name for name in OURS if name in self._headers and name not in said)
        return pb.CommonResponse(header_mutation=mutation)

    def _forget_body(self) -> None:
        self._server.let_go(len(self._body))
        self._body = bytearray()


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


def _metadata(placement: Placement) -> Any:
    if not placement.endpoints:
        return None
    return {LB: {DESTINATION: ",".join(placement.endpoints)}}


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
    kind = {413: "BadRequestError", 429: "RateLimitError"}.get(refusal.status, "ServiceUnavailableError")
    error = {"message": str(refusal), "type": kind, "param": None, "code": refusal.status}
    headers = [("content-type", "application/json")]
    if refusal.status != 413:
        headers.append(("retry-after", str(RETRY_AFTER_S)))
    reply = pb.ProcessingResponse()
    reply.immediate_response.status.code = refusal.status
    reply.immediate_response.headers.CopyFrom(_setting(headers))
    reply.immediate_response.body = msgspec.json.encode({"error": error})
    reply.immediate_response.details = "kvpool"
    return reply
