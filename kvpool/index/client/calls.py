"""``Call``: one request to an index, and how its reply becomes a value. Pure. Errors: ``ConfigError``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from kvpool.discovery.worker import Worker
from kvpool.errors import ConfigError
from kvpool.index.answer import FleetStatus, HitCurve, Lookup, Ranking
from kvpool.index.prompt import Load, Prompt
from kvpool.index.protocol.messages import (
    MAX_PROMPT_NBYTES,
    MAX_REQUESTS,
    REPLIES,
    decode_curve,
    decode_lookup,
    decode_route,
    decode_status,
    encode_load,
    encode_prompt,
    encode_worker,
    first_line,
    unsendable,
    whole_ms,
)
from kvpool.v1 import index_pb2 as pb

PAGE_SIZE = 512  # workers per request

Answer = TypeVar("Answer")


class Call(NamedTuple, Generic[Answer]):
    method: str
    request: Any
    value: Callable[[Any], Answer]

    def decode(self, reply: bytes) -> Answer:
        """Errors: ``DecodeError`` of protobuf, ``ValueError``."""
        return self.value(REPLIES[self.method].FromString(reply))


def lookup_call(prompt: Prompt) -> Call[Lookup]:
    return Call("Lookup", encode_prompt(pb.LookupRequest, prompt), decode_lookup)


def lookups_call(prompts: Sequence[Prompt]) -> Call[list[Any]]:
    """Many prompts in one message; returns a ``LookupResponse`` for each."""
    if not 1 <= len(prompts) <= MAX_REQUESTS:
        raise ConfigError(f"one message asks about 1 to {MAX_REQUESTS} prompts, not {len(prompts)}")
    request = pb.LookupRequest(requests=[encode_prompt(pb.LookupRequest, prompt) for prompt in prompts])
    if (nbytes := request.ByteSize()) > MAX_PROMPT_NBYTES:
        raise ConfigError(f"prompts in one message have at most {MAX_PROMPT_NBYTES} bytes, not {nbytes}")

    def responses(reply: Any) -> list[Any]:
        if len(reply.responses) != len(prompts):
            raise ValueError(f"it has {len(reply.responses)} responses to {len(prompts)} requests")
        return list(reply.responses)

    return Call("Lookup", request, responses)


def route_call(
    prompt: Prompt,
    *,
    loads: Iterable[Load],
    limit: int | None,
    reserve_s: float | None,
    prompt_tokens: int | None,
    session_id: str | None,
    prompt_cache_key: str | None,
    preview: bool,
) -> Call[Ranking]:
    """Arguments as in ``IndexClient.route``."""
    request = encode_prompt(pb.RouteRequest, prompt)
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is the number of picks, 1 or more, not {limit}")
    try:
        request.loads.extend(map(encode_load, loads))
        request.most = limit or 0
        request.reserve_ms = 0 if reserve_s is None else whole_ms("a reservation", reserve_s)
        request.prompt_tokens = prompt_tokens or 0
        request.session_id, request.prompt_cache_key = session_id or "", prompt_cache_key or ""
        request.preview = preview
    except (AttributeError, TypeError, ValueError) as error:
        raise unsendable(error) from error
    return Call("Route", request, decode_route)


def release_call(reservation: str, tenant: str) -> Call[bool]:
    """Returns whether it was held."""
    request = _request(pb.ReleaseRequest, tenant=tenant, reservation=reservation)
    return Call("Release", request, lambda reply: bool(reply.released))


def register_call(worker: Worker, lease_s: float | None) -> Call[bool]:
    """Returns whether another start of that name was followed."""
    lease_ms = 0 if lease_s is None else whole_ms("a lease", lease_s)
    try:
        request = pb.RegisterWorkerRequest(worker=encode_worker(worker), lease_ms=lease_ms)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"this worker cannot be sent to an index: {first_line(error)}") from error
    return Call("RegisterWorker", request, lambda reply: bool(reply.replaced))


def remove_call(name: str, tenant: str) -> Call[bool]:
    """Returns whether it was known."""
    request = _request(pb.RemoveWorkerRequest, tenant=tenant, name=name)
    return Call("RemoveWorker", request, lambda reply: bool(reply.removed))


def status_call(tenant: str | None, model: str | None, page_token: str = "") -> Call[tuple[FleetStatus, str]]:
    """Returns a page, and the token of the next. An earlier index has one page of all."""
    request = _request(
        pb.ListWorkersRequest,
        tenant=tenant or "",
        model=model or "",
        page_size=PAGE_SIZE,
        page_token=page_token,
    )
    return Call("ListWorkers", request, lambda reply: (decode_status(reply), reply.next_page_token))


def curve_call(tenant: str | None) -> Call[HitCurve]:
    return Call("HitCurve", _request(pb.HitCurveRequest, tenant=tenant or ""), decode_curve)


def _request(kind: Any, **fields: Any) -> Any:
    try:
        return kind(**fields)
    except (TypeError, ValueError) as error:
        raise unsendable(error) from error
