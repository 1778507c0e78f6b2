"""Between the index's values and the messages of its protocol: what clients send, and what they get. Pure.

Errors: ``ConfigError``, where no other is named.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from kvpool.discovery.worker import Worker
from kvpool.errors import ConfigError
from kvpool.index.answer import FleetStatus, IndexStatus, Lookup, PublisherStatus, WorkerStatus
from kvpool.index.client.messages import (
    LOAD_SOURCE,
    MAX_PROMPT_NBYTES,
    MAX_REQUESTS,
    MAX_U32,
    REPLIES,
    TRUST,
    decode_worker,
    encode_worker,
    first_line,
)
from kvpool.index.place.load import Load
from kvpool.index.place.ranking import Pick, Ranking
from kvpool.index.prompt import TOKEN_NBYTES, Chat, Prompt, text_parts
from kvpool.key.hashing import len_tokens
from kvpool.v1 import index_pb2 as pb

if TYPE_CHECKING:
    from typing_extensions import Buffer

PAGE_SIZE = 512  # workers that are asked for at once

_TRUST_OF = {number: name for name, number in TRUST.items()}
_LOAD_SOURCE_OF = {number: name for name, number in LOAD_SOURCE.items()}

Answer = TypeVar("Answer")


class Call(NamedTuple, Generic[Answer]):
    """One request, and what makes a value of its reply."""

    method: str
    request: Any
    value: Callable[[Any], Answer]

    def decode(self, reply: bytes) -> Answer:
        """Errors: ``DecodeError`` of protobuf, ``ValueError``."""
        return self.value(REPLIES[self.method].FromString(reply))


# ---- what a client sends


def lookup_call(prompt: Prompt) -> Call[Lookup]:
    """``Lookup``."""
    return Call("Lookup", _encode_prompt(pb.LookupRequest, prompt), decode_lookup)


def lookups_call(prompts: Sequence[Prompt]) -> Call[list[Any]]:
    """``Lookup`` of many prompts in one message; its answer: a ``LookupResponse`` for each."""
    if not 1 <= len(prompts) <= MAX_REQUESTS:
        raise ConfigError(f"one message asks about 1 to {MAX_REQUESTS} prompts, not {len(prompts)}")
    request = pb.LookupRequest(requests=[_encode_prompt(pb.LookupRequest, prompt) for prompt in prompts])
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
) -> Call[Ranking]:
    """``Route``; the arguments are those of ``IndexClient.route``."""
    request = _encode_prompt(pb.RouteRequest, prompt)
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is the number of picks, 1 or more, not {limit}")
    try:
        request.loads.extend(map(_encode_load, loads))
        request.most = limit or 0
        request.reserve_ms = 0 if reserve_s is None else _ms("a reservation", reserve_s)
        request.prompt_tokens = prompt_tokens or 0
    except (AttributeError, TypeError, ValueError) as error:
        raise _unsendable(error) from error
    return Call("Route", request, decode_route)


def release_call(reservation: str, tenant: str) -> Call[bool]:
    """``Release``; its answer: whether it was held."""
    try:
        request = pb.ReleaseRequest(tenant=tenant, reservation=reservation)
    except (TypeError, ValueError) as error:
        raise _unsendable(error) from error
    return Call("Release", request, lambda reply: bool(reply.released))


def _encode_prompt(kind: Any, prompt: Prompt) -> Any:
    """``LookupRequest``, or a ``RouteRequest`` with the fields that both have."""
    if prompt.workers is not None and not prompt.workers:
        raise ConfigError("workers is empty; leave it out to ask about all")
    name, path = ("", "") if prompt.lora is None else _pair("lora is (name, path)", prompt.lora)
    try:
        request = kind(
            scope=pb.Scope(
                model=prompt.model,
                tenant=prompt.tenant,
                lora_name=name,
                lora_path=path,
                cache_salt=prompt.cache_salt or "",
                multimodal=[
                    pb.MultimodalItem(identifier=identifier, offset=offset, length=length)
                    for identifier, offset, length in prompt.multimodal
                ],
            ),
            workers=prompt.workers or (),
        )
        if prompt.text is not None:
            request.text = prompt.text
    except (TypeError, ValueError) as error:
        raise _unsendable(error) from error
    if prompt.token_ids is not None:
        request.token_ids = pack_tokens(prompt.token_ids)
    elif prompt.hashes64 is not None:
        request.block_hashes = _pack_hashes(prompt.hashes64)
    elif isinstance(prompt.chat, Chat):
        request.chat.CopyFrom(_encode_chat(prompt.chat))
    return request


def _encode_chat(chat: Chat) -> Any:
    try:
        message = pb.ChatPrompt(
            messages=[
                pb.ChatMessage(
                    role=one["role"],
                    content=text_parts(one.get("content")),
                    name=one.get("name") or "",
                    reasoning=one.get("reasoning") or "",
                    tool_calls_json=_json(one.get("tool_calls")),
                    tool_call_id=one.get("tool_call_id") or "",
                )
                for one in chat.messages
            ],
            tools_json="" if chat.tools is None else json.dumps(list(chat.tools)),
            template_options_json=_json(dict(chat.template_options)),
        )
        if not chat.add_generation_prompt:
            message.add_generation_prompt = False
    except ConfigError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"a chat is a list of messages with a role and a content: {first_line(error)}"
        ) from error
    return message


def _json(value: Any) -> str:
    return json.dumps(value) if value else ""


def _encode_load(load: Load) -> Any:
    message = pb.RankLoad(
        worker=load.worker,
        dp_rank=load.dp_rank,
        running=load.running,
        waiting=load.waiting,
        kv_usage_permille=round(load.kv_usage * 1000),
    )
    if load.queued_tokens is not None:
        message.queued_tokens = load.queued_tokens
    return message


def _ms(what: str, seconds: float) -> int:
    if not 0.001 <= seconds <= MAX_U32 / 1000:
        raise ConfigError(f"{what} is a number of seconds from 0.001 on, not {seconds:g}")
    return round(seconds * 1000)


def register_call(worker: Worker, lease_s: float | None) -> Call[bool]:
    """``RegisterWorker``; its answer: whether another start of that name was followed."""
    lease_ms = 0 if lease_s is None else _ms("a lease", lease_s)
    try:
        request = pb.RegisterWorkerRequest(worker=encode_worker(worker), lease_ms=lease_ms)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"this worker cannot be sent to an index: {first_line(error)}") from error
    return Call("RegisterWorker", request, lambda reply: bool(reply.replaced))


def remove_call(name: str, tenant: str) -> Call[bool]:
    """``RemoveWorker``; its answer: whether it was known."""
    try:
        request = pb.RemoveWorkerRequest(tenant=tenant, name=name)
    except (TypeError, ValueError) as error:
        raise _unsendable(error) from error
    return Call("RemoveWorker", request, lambda reply: bool(reply.removed))


def status_call(tenant: str | None, model: str | None, page_token: str = "") -> Call[tuple[FleetStatus, str]]:
    """``ListWorkers``; its answer: a page, and the token of the next one. An earlier index has one page of all."""
    try:
        request = pb.ListWorkersRequest(
            tenant=tenant or "", model=model or "", page_size=PAGE_SIZE, page_token=page_token
        )
    except (TypeError, ValueError) as error:
        raise _unsendable(error) from error
    return Call("ListWorkers", request, lambda reply: (decode_status(reply), reply.next_page_token))


def pack_tokens(token_ids: Sequence[int] | Buffer) -> bytes:
    """Packed little-endian u32. ``token_ids``: ints, or a contiguous buffer of them (16, 32 or 64 bits)."""
    if len_tokens(token_ids) * TOKEN_NBYTES > MAX_PROMPT_NBYTES:
        raise ConfigError(f"a prompt of {len_tokens(token_ids)} tokens is too long to be sent to an index")
    if isinstance(token_ids, list):
        values: Any = token_ids
    else:
        try:
            view = memoryview(token_ids)  # type: ignore[arg-type]
        except TypeError:
            values = token_ids
        else:
            if view.format == "I":
                return view.tobytes()
            if view.format not in tuple("hHilLqQ") or view.ndim != 1:
                raise ConfigError("token_ids is a sequence or a buffer of ints of 16, 32 or 64 bits")
            values = view.tolist()
    try:
        return array("I", values).tobytes()
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"token ids are whole numbers from 0 to {MAX_U32}: {error}") from error


def _pack_hashes(hashes64: Buffer) -> bytes:
    try:
        view = memoryview(hashes64)
    except TypeError as error:
        raise ConfigError("hashes64 is what BlockHasher.hashes64 returns: bytes, 8 a block") from error
    if view.nbytes % 8 or view.nbytes > MAX_PROMPT_NBYTES:
        raise ConfigError(
            f"hashes64 has 8 bytes a block, at most {MAX_PROMPT_NBYTES} in all, not {view.nbytes}"
        )
    return view.tobytes()


# ---- what a client gets


def decode_lookup(reply: Any) -> Lookup:
    """Of ``LookupResponse``. Errors: ``ValueError`` when columns differ in length."""
    # An index of an earlier version does not say it: then it is what the worker or the pool has by itself.
    loadable = reply.loadable_blocks or tuple(map(max, reply.local_blocks, reply.pool_blocks))
    columns = (
        reply.worker, reply.dp_rank, reply.address, reply.block_tokens, reply.prompt_blocks, reply.device_blocks,
        reply.local_blocks, reply.pool_blocks, reply.sequence, reply.staleness_ms, reply.stale, loadable,
    )  # fmt: skip
    if len(set(map(len, columns))) != 1:
        raise ValueError("its columns differ in length")
    return Lookup(*map(tuple, columns))


def decode_route(reply: Any) -> Ranking:
    """Of ``RouteResponse``. Errors: ``ValueError`` when columns differ in length, or hold what has no name."""
    lookup = decode_lookup(reply.rows)
    columns: tuple[Any, ...] = (
        reply.trust, reply.cost, reply.prefill_cost, reply.fetch_cost, reply.queue_cost, reply.running, reply.waiting,
        reply.queued_tokens, reply.kv_usage_permille, reply.reserved_cost, reply.load_source, reply.load_age_ms,
        reply.asleep, reply.unreachable or [False] * len(lookup),
    )  # fmt: skip
    if {len(lookup), *map(len, columns)} != {len(lookup)}:
        raise ValueError("its columns differ in length")
    try:
        picks = [
            Pick._make(
                (row, _TRUST_OF[trust], *numbers, _LOAD_SOURCE_OF[source], age_ms, asleep, unreachable)
            )
            for row, trust, *numbers, source, age_ms, asleep, unreachable in zip(
                lookup, *columns, strict=True
            )
        ]
    except KeyError as error:
        raise ValueError(f"it holds the number {error}, which has no name") from error
    return Ranking(tuple(picks), reply.reservation)


def decode_status(reply: Any) -> FleetStatus:
    """Of ``ListWorkersResponse``. An index of an earlier version says nothing of itself: zeros."""
    index = IndexStatus(**{name: getattr(reply.index, name) for name in IndexStatus.__dataclass_fields__})
    workers = (
        WorkerStatus(
            worker=decode_worker(status.worker, status.worker.hash_seed_id),
            source=status.source,
            lease_left_ms=status.lease_left_ms,
            publishers=tuple(
                PublisherStatus(**{name: getattr(one, name) for name in PublisherStatus.__dataclass_fields__})
                for one in status.publishers
            ),
        )
        for status in reply.workers
    )
    return FleetStatus(index, tuple(workers))


def _pair(what: str, pair: Any) -> tuple[str, str]:
    if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
        raise ConfigError(f"{what}, not {pair!r:.80}")
    return pair[0], pair[1]


def _unsendable(error: Exception) -> ConfigError:
    return ConfigError(f"this cannot be sent to an index: {first_line(error)}")


assert struct.calcsize("I") == TOKEN_NBYTES
