"""Between the index's values and the messages of its protocol (``protos/kvpool/v1/index.proto``). Pure.

What is read here was written by other processes: it is checked for its form. What it says is judged by ``Fleet``.
Errors: ``ConfigError``, where no other is named.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from kvpool._native import read_lookup_request
from kvpool.discovery.worker import DEFAULT_ALGORITHM, DEFAULT_TENANT, Publisher, Worker
from kvpool.errors import ConfigError
from kvpool.index.answer import FleetStatus, IndexStatus, Lookup, PublisherStatus, WorkerStatus
from kvpool.index.follow.push import Ack, Pushed
from kvpool.index.place.chat import Chat, text_parts
from kvpool.index.place.load import Load, LoadSource
from kvpool.index.place.route import Pick, Route, Trust
from kvpool.key.hashing import Multimodal, len_tokens
from kvpool.key.names import check_tenant
from kvpool.v1 import index_pb2 as pb

if TYPE_CHECKING:
    from typing_extensions import Buffer

SERVICE = "kvpool.v1.IndexService"
MAX_PROMPT_NBYTES = 32 << 20  # 4 Mi block hashes
MAX_REQUEST_NBYTES = MAX_PROMPT_NBYTES + (1 << 20)
MAX_REPLY_NBYTES = 64 << 20
CHUNK_NBYTES = 1 << 20  # of a snapshot
MAX_U32 = (1 << 32) - 1
TOKEN_NBYTES = 4
MAX_TEXT_NBYTES = 4 << 20  # of a prompt as text or chat
MAX_LOADS = 32768  # in a request

_TRUST: Mapping[Trust, int] = {"exact": 1, "degraded": 2, "fallback": 3}
_LOAD_SOURCE: Mapping[LoadSource, int] = {"none": 0, "reported": 1, "scraped": 2}
_TRUST_OF = {number: name for name, number in _TRUST.items()}
_LOAD_SOURCE_OF = {number: name for name, number in _LOAD_SOURCE.items()}

Answer = TypeVar("Answer")


class Call(NamedTuple, Generic[Answer]):
    """One request, and what makes a value of its reply."""

    method: str
    request: Any
    value: Callable[[Any], Answer]

    def decode(self, reply: bytes) -> Answer:
        """Errors: ``DecodeError`` of protobuf, ``ValueError``."""
        return self.value(REPLIES[self.method].FromString(reply))


REPLIES: dict[str, Any] = {
    "Lookup": pb.LookupResponse,
    "Route": pb.RouteResponse,
    "Release": pb.ReleaseResponse,
    "RegisterWorker": pb.RegisterWorkerResponse,
    "RemoveWorker": pb.RemoveWorkerResponse,
    "ListWorkers": pb.ListWorkersResponse,
}


# ---- what a client sends


def lookup_call(
    model: str,
    *,
    token_ids: Sequence[int] | Buffer | None,
    hashes64: Buffer | None,
    text: str | None = None,
    chat: Chat | Sequence[Mapping[str, Any]] | None = None,
    tenant: str,
    lora: tuple[str, str] | None,
    cache_salt: str | None,
    multimodal: Sequence[Multimodal],
    workers: Sequence[str] | None,
) -> Call[Lookup]:
    """``Lookup``; the arguments are those of ``IndexClient.lookup``."""
    request = _question(
        pb.LookupRequest, model, tenant=tenant, lora=lora, cache_salt=cache_salt, multimodal=multimodal,
        workers=workers,
    )  # fmt: skip
    _set_prompt(request, token_ids=token_ids, hashes64=hashes64, text=text, chat=chat)
    return Call("Lookup", request, decode_lookup)


def route_call(
    model: str,
    *,
    token_ids: Sequence[int] | Buffer | None,
    hashes64: Buffer | None,
    text: str | None,
    chat: Chat | Sequence[Mapping[str, Any]] | None,
    tenant: str,
    lora: tuple[str, str] | None,
    cache_salt: str | None,
    multimodal: Sequence[Multimodal],
    workers: Sequence[str] | None,
    loads: Iterable[Load],
    most: int | None,
    reserve_s: float | None,
    prompt_tokens: int | None,
) -> Call[Route]:
    """``Route``; the arguments are those of ``IndexClient.route``."""
    request = _question(
        pb.RouteRequest, model, tenant=tenant, lora=lora, cache_salt=cache_salt, multimodal=multimodal,
        workers=workers,
    )  # fmt: skip
    _set_prompt(request, token_ids=token_ids, hashes64=hashes64, text=text, chat=chat)
    if most is not None and most < 1:
        raise ConfigError(f"most is the number of picks, 1 or more, not {most}")
    try:
        request.loads.extend(map(_encode_load, loads))
        request.most = most or 0
        request.reserve_ms = 0 if reserve_s is None else _ms("a reservation", reserve_s)
        request.prompt_tokens = prompt_tokens or 0
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"this cannot be sent to an index: {_first_line(error)}") from error
    return Call("Route", request, decode_route)


def release_call(reservation: str, tenant: str) -> Call[bool]:
    """``Release``; its answer: whether it was held."""
    try:
        request = pb.ReleaseRequest(tenant=tenant, reservation=reservation)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"this cannot be sent to an index: {_first_line(error)}") from error
    return Call("Release", request, lambda reply: bool(reply.released))


def _question(
    kind: Any,
    model: str,
    *,
    tenant: str,
    lora: tuple[str, str] | None,
    cache_salt: str | None,
    multimodal: Sequence[Multimodal],
    workers: Sequence[str] | None,
) -> Any:
    """What ``LookupRequest`` and ``RouteRequest`` have in common, but for the prompt."""
    if workers is not None and not workers:
        raise ConfigError("workers names nobody; leave it out to ask about all")
    if isinstance(workers, str):
        raise ConfigError("workers is a list of names, not text")
    name, path = _pair("lora is (name, path)", lora) if lora is not None else ("", "")
    try:
        scope = pb.Scope(
            model=model,
            tenant=tenant,
            lora_name=name,
            lora_path=path,
            cache_salt=cache_salt or "",
            multimodal=[
                pb.MultimodalItem(identifier=identifier, offset=offset, length=length)
                for identifier, offset, length in multimodal
            ],
        )
        return kind(scope=scope, workers=workers or ())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"this cannot be sent to an index: {_first_line(error)}") from error


def _set_prompt(
    request: Any,
    *,
    token_ids: Sequence[int] | Buffer | None,
    hashes64: Buffer | None,
    text: str | None,
    chat: Chat | Sequence[Mapping[str, Any]] | None,
) -> None:
    if sum(prompt is not None for prompt in (token_ids, hashes64, text, chat)) != 1:
        raise ConfigError("give a prompt as token_ids, hashes64, text or chat, and only once")
    if token_ids is not None:
        request.token_ids = pack_tokens(token_ids)
    elif hashes64 is not None:
        request.block_hashes = _pack_hashes(hashes64)
    elif text is not None:
        try:
            request.text = text
        except (TypeError, ValueError) as error:
            raise ConfigError(f"text cannot be sent to an index: {_first_line(error)}") from error
    else:
        request.chat.CopyFrom(_encode_chat(chat if isinstance(chat, Chat) else Chat.of_request(chat)))


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
            f"a chat is a list of messages with a role and a content: {_first_line(error)}"
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
        raise ConfigError(f"this worker cannot be sent to an index: {_first_line(error)}") from error
    return Call("RegisterWorker", request, lambda reply: bool(reply.replaced))


def remove_call(name: str, tenant: str) -> Call[bool]:
    """``RemoveWorker``; its answer: whether it was known."""
    try:
        request = pb.RemoveWorkerRequest(tenant=tenant, name=name)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"this cannot be sent to an index: {_first_line(error)}") from error
    return Call("RemoveWorker", request, lambda reply: bool(reply.removed))


def workers_call(tenant: str | None, model: str | None) -> Call[list[WorkerStatus]]:
    """``ListWorkers``."""
    try:
        request = pb.ListWorkersRequest(tenant=tenant or "", model=model or "")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"this cannot be sent to an index: {_first_line(error)}") from error
    return Call("ListWorkers", request, decode_workers)


def status_call(tenant: str | None, model: str | None) -> Call[FleetStatus]:
    """``ListWorkers``, with what the index says of itself."""
    return workers_call(tenant, model)._replace(value=decode_status)  # type: ignore[arg-type, return-value]


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
    columns = (
        reply.worker, reply.dp_rank, reply.address, reply.block_tokens, reply.prompt_blocks, reply.device_blocks,
        reply.local_blocks, reply.pool_blocks, reply.sequence, reply.staleness_ms, reply.stale,
    )  # fmt: skip
    if len(set(map(len, columns))) != 1:
        raise ValueError("its columns differ in length")
    return Lookup(*map(tuple, columns))


def decode_route(reply: Any) -> Route:
    """Of ``RouteResponse``. Errors: ``ValueError`` when columns differ in length, or hold what has no name."""
    lookup = decode_lookup(reply.rows)
    columns: tuple[Any, ...] = (
        reply.trust, reply.cost, reply.prefill_cost, reply.fetch_cost, reply.queue_cost, reply.running, reply.waiting,
        reply.queued_tokens, reply.kv_usage_permille, reply.reserved_cost, reply.load_source, reply.load_age_ms,
        reply.asleep,
    )  # fmt: skip
    if {len(lookup), *map(len, columns)} != {len(lookup)}:
        raise ValueError("its columns differ in length")
    try:
        picks = [
            Pick._make((row, _TRUST_OF[trust], *numbers, _LOAD_SOURCE_OF[source], age_ms, asleep))
            for row, trust, *numbers, source, age_ms, asleep in zip(lookup, *columns, strict=True)
        ]
    except KeyError as error:
        raise ValueError(f"it holds the number {error}, which has no name") from error
    return Route(tuple(picks), reply.reservation)


def decode_workers(reply: Any) -> list[WorkerStatus]:
    """Of ``ListWorkersResponse``."""
    return [
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
    ]


def decode_status(reply: Any) -> FleetStatus:
    """Of ``ListWorkersResponse``. An index of an earlier version says nothing of itself: zeros."""
    index = IndexStatus(**{name: getattr(reply.index, name) for name in IndexStatus.__dataclass_fields__})
    return FleetStatus(index, tuple(decode_workers(reply)))


# ---- what a server gets and sends


class Question(NamedTuple):
    """The arguments of ``Fleet.lookup``; and ``text`` or ``chat`` where tokens have yet to be made of them."""

    model: str
    options: dict[str, Any]
    nbytes: int  # of the prompt


def read_lookup(packed: bytes) -> Any:
    """The ``Question`` of a packed ``LookupRequest`` in its usual form, read by the native core; else the message.

    Errors: ``DecodeError`` of protobuf.
    """
    found = read_lookup_request(packed)
    if found is None:
        return pb.LookupRequest.FromString(packed)
    model, tenant, workers, in_tokens, begin, end = found
    prompt = memoryview(packed)[begin:end]
    options: dict[str, Any] = {"tenant": tenant or DEFAULT_TENANT, "workers": workers or None}
    if in_tokens:
        options["token_ids"] = prompt.cast("I")
    else:
        options["hashes64"] = prompt
    return Question(model, options, end - begin)


def decode_question(request: Any) -> Question:
    """Of ``LookupRequest``, and of ``RouteRequest``, which has the same fields."""
    prompt = request.WhichOneof("prompt")
    if prompt is None:
        raise ConfigError("a request holds a prompt: block_hashes, token_ids, text or chat")
    scope = request.scope
    options: dict[str, Any] = {
        "tenant": scope.tenant or DEFAULT_TENANT,
        "workers": list(request.workers) or None,
    }
    value = getattr(request, prompt)
    if prompt == "block_hashes":
        return Question(scope.model, {**options, "hashes64": value}, len(value))
    options |= {
        "lora": (scope.lora_name, scope.lora_path) if scope.lora_name or scope.lora_path else None,
        "cache_salt": scope.cache_salt or None,
        "multimodal": [(item.identifier, item.offset, item.length) for item in scope.multimodal],
    }
    if prompt == "token_ids":
        if len(value) % TOKEN_NBYTES:
            raise ConfigError(f"token_ids are packed u32s, 4 bytes each; {len(value)} bytes are not")
        return Question(scope.model, {**options, "token_ids": memoryview(value).cast("I")}, len(value))
    nbytes = value.ByteSize() if prompt == "chat" else len(value.encode())
    if not 1 <= nbytes <= MAX_TEXT_NBYTES:
        raise ConfigError(f"a prompt as {prompt} has 1 to {MAX_TEXT_NBYTES} bytes, not {nbytes}")
    if prompt == "chat":
        value = _decode_chat(value)
    return Question(scope.model, {**options, prompt: value}, nbytes)


def _decode_chat(message: Any) -> Chat:
    if not message.messages:
        raise ConfigError("a chat holds messages")
    options = _of_json("template_options_json", message.template_options_json, dict)
    return Chat(
        [_decode_message(one) for one in message.messages],
        _of_json("tools_json", message.tools_json, list),
        message.add_generation_prompt if message.HasField("add_generation_prompt") else True,
        options or {},
    )


def _decode_message(message: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": list(message.content)}
    for name in ("name", "reasoning", "tool_call_id"):
        if value := getattr(message, name):
            made[name] = value
    if calls := _of_json("tool_calls_json", message.tool_calls_json, list):
        made["tool_calls"] = calls
    return made


def _of_json(field: str, text: str, kind: type) -> Any:
    """None where there is no text."""
    if not text:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{field} is no JSON: {_first_line(error)}") from error
    if type(value) is not kind:
        raise ConfigError(f"{field} is a JSON {'object' if kind is dict else 'list'}")
    return value


def decode_route_options(request: Any) -> dict[str, Any]:
    """The arguments of ``Router.route`` that ``RouteRequest`` has beside those of ``decode_question``."""
    if len(request.loads) > MAX_LOADS:
        raise ConfigError(f"a request names at most {MAX_LOADS} loads, not {len(request.loads)}")
    return {
        "loads": [
            Load(
                worker=one.worker,
                dp_rank=one.dp_rank,
                running=one.running,
                waiting=one.waiting,
                queued_tokens=one.queued_tokens if one.HasField("queued_tokens") else None,
                kv_usage=one.kv_usage_permille / 1000,
            )
            for one in request.loads
        ],
        "most": request.most or None,
        "reserve_s": request.reserve_ms / 1000 if request.reserve_ms else None,
        "prompt_tokens": request.prompt_tokens or None,
    }


def encode_lookup(lookup: Lookup) -> Any:
    """``LookupResponse``."""
    return pb.LookupResponse(
        worker=lookup.workers,
        dp_rank=lookup.dp_ranks,
        address=lookup.addresses,
        block_tokens=lookup.block_tokens,
        prompt_blocks=lookup.prompt_blocks,
        device_blocks=lookup.device_blocks,
        local_blocks=lookup.local_blocks,
        pool_blocks=lookup.pool_blocks,
        sequence=lookup.sequences,
        staleness_ms=lookup.staleness_ms,
        stale=lookup.stale,
    )


def encode_route(route: Route) -> Any:
    """``RouteResponse``."""
    if not route.picks:
        return pb.RouteResponse(rows=pb.LookupResponse())
    columns: dict[str, Any] = dict(zip(Pick._fields, zip(*route.picks, strict=True), strict=True))
    columns["rows"] = encode_lookup(Lookup.of(columns.pop("row")))
    columns["trust"] = [_TRUST[one.trust] for one in route.picks]
    columns["load_source"] = [_LOAD_SOURCE[one.load_source] for one in route.picks]
    return pb.RouteResponse(reservation=route.reservation, **columns)


def encode_worker(worker: Worker) -> Any:
    """``Worker``."""
    return pb.Worker(
        name=worker.name,
        tenant=worker.tenant,
        model=worker.model,
        hash_algorithm=worker.hash_algorithm,
        hash_seed_id=worker.hash_seed_id,
        block_tokens=worker.block_tokens,
        address=worker.address,
        incarnation=worker.incarnation,
        namespace=worker.namespace,
        publishers=[
            pb.Publisher(dp_rank=one.dp_rank, events=one.events, replay=one.replay)
            for one in worker.publishers
        ],
    )


def decode_worker(message: Any, default_seed_id: str) -> Worker:
    """Of ``Worker``, with the defaults that its fields have when they are empty."""
    return Worker(
        name=message.name,
        model=message.model,
        block_tokens=message.block_tokens,
        hash_seed_id=message.hash_seed_id or default_seed_id,
        publishers=tuple(Publisher(one.dp_rank, one.events, one.replay) for one in message.publishers),
        tenant=message.tenant or DEFAULT_TENANT,
        hash_algorithm=message.hash_algorithm or DEFAULT_ALGORITHM,
        address=message.address,
        incarnation=message.incarnation,
        namespace=message.namespace,
    )


def encode_status(status: FleetStatus) -> Any:
    """``ListWorkersResponse``."""
    return pb.ListWorkersResponse(
        index=pb.IndexStatus(
            **{name: getattr(status.index, name) for name in IndexStatus.__dataclass_fields__}
        ),
        workers=[
            pb.WorkerStatus(
                worker=encode_worker(one.worker),
                source=one.source,
                lease_left_ms=one.lease_left_ms,
                publishers=[
                    pb.PublisherStatus(
                        **{name: getattr(rank, name) for name in PublisherStatus.__dataclass_fields__}
                    )
                    for rank in one.publishers
                ],
            )
            for one in status.workers
        ],
    )


def encode_batch(pushed: Pushed) -> Any:
    """``EventBatch``."""
    tenant, _, name = pushed.worker_id.partition("/")
    return pb.EventBatch(
        tenant=tenant,
        worker=name,
        dp_rank=pushed.dp_rank,
        incarnation=pushed.incarnation,
        sequence=pushed.sequence,
        payload=pushed.payload,
        answers=pushed.answers,
        last=pushed.last,
    )


def decode_batch(message: Any) -> Pushed:
    """Of ``EventBatch``."""
    return Pushed(
        f"{check_tenant(message.tenant or DEFAULT_TENANT)}/{message.worker}",
        message.dp_rank,
        message.incarnation,
        message.sequence,
        message.payload,
        message.answers,
        message.last,
    )


def encode_ack(ack: Ack) -> Any:
    """``PublishAck``."""
    tenant, _, name = ack.worker_id.partition("/")
    return pb.PublishAck(
        tenant=tenant,
        worker=name,
        dp_rank=ack.dp_rank,
        sequence=ack.sequence,
        question=ack.question,
        start=ack.start,
    )


def decode_ack(message: Any) -> Ack:
    """Of ``PublishAck``."""
    return Ack(
        f"{message.tenant}/{message.worker}",
        message.dp_rank,
        message.sequence,
        message.question,
        message.start,
    )


def _pair(what: str, pair: Any) -> tuple[str, str]:
    if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
        raise ConfigError(f"{what}, not {pair!r:.80}")
    return pair[0], pair[1]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


assert struct.calcsize("I") == TOKEN_NBYTES
