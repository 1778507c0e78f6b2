"""Converts between the index's values and the messages of ``protos/kvpool/v1/index.proto``, for both sides. Pure.

Messages come from another process: form is checked here, content in ``Fleet``. Errors: ``ConfigError``, where
no other is named. Over 400 lines because both ways of each message stand together.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from kvpool.discovery.quota import Standing
from kvpool.discovery.worker import DEFAULT_ALGORITHM, DEFAULT_TENANT, Publisher, Worker
from kvpool.errors import ConfigError
from kvpool.index.answer import (
    EngineAudits,
    FleetStatus,
    HitCurve,
    IndexStatus,
    Lookup,
    Pick,
    PublisherStatus,
    Ranking,
    Row,
    WorkerStatus,
    named_pick,
)
from kvpool.index.prompt import (
    TOKEN_NBYTES,
    Chat,
    Load,
    Prompt,
    PromptFields,
    Session,
    reasoning_of,
    text_parts,
)
from kvpool.index.protocol import bounded_json
from kvpool.key.hashing import len_tokens
from kvpool.v1 import index_pb2 as pb

if TYPE_CHECKING:
    from typing_extensions import Buffer

SERVICE = "kvpool.v1.IndexService"
MAX_PROMPT_NBYTES = 32 << 20  # 4 Mi block hashes
MAX_REQUEST_NBYTES = MAX_PROMPT_NBYTES + (1 << 20)
MAX_REPLY_NBYTES = 64 << 20
MAX_REQUESTS = 256  # prompts in one message
MAX_U32 = (1 << 32) - 1
MAX_TEXT_NBYTES = 4 << 20  # of a prompt as text or chat
MAX_TOKEN_CHARS = 1024  # of a caller's token, in a call's metadata
MAX_LOADS = 32_768  # in a request

REPLIES: dict[str, Any] = {
    "Lookup": pb.LookupResponse,
    "Route": pb.RouteResponse,
    "Release": pb.ReleaseResponse,
    "RegisterWorker": pb.RegisterWorkerResponse,
    "RemoveWorker": pb.RemoveWorkerResponse,
    "ListWorkers": pb.ListWorkersResponse,
    "HitCurve": pb.HitCurveResponse,
}


# ---- prompts


def encode_prompt(kind: Any, prompt: Prompt) -> Any:
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
        raise unsendable(error) from error
    if prompt.token_ids is not None:
        request.token_ids = pack_tokens(prompt.token_ids)
    elif prompt.hashes64 is not None:
        request.block_hashes = _pack_hashes(prompt.hashes64)
    elif isinstance(prompt.chat, Chat):
        request.chat.CopyFrom(_encode_chat(prompt.chat))
    return request


def decode_prompt(request: Any) -> Prompt:
    form = request.WhichOneof("prompt")
    if form is None:
        raise ConfigError("a request holds a prompt: block_hashes, token_ids, text or chat")
    scope, value = request.scope, getattr(request, form)
    given: PromptFields = {
        "tenant": scope.tenant or DEFAULT_TENANT,
        "workers": list(request.workers) or None,
    }
    given["multimodal"] = [(item.identifier, item.offset, item.length) for item in scope.multimodal]
    if form == "block_hashes":
        given["hashes64"] = value
        return Prompt(scope.model, **given)
    given["lora"] = (scope.lora_name, scope.lora_path) if scope.lora_name or scope.lora_path else None
    given["cache_salt"] = scope.cache_salt or None
    if form == "token_ids":
        if len(value) % TOKEN_NBYTES:
            raise ConfigError(f"token_ids are packed u32s, 4 bytes each; {len(value)} bytes are not")
        given["token_ids"] = memoryview(value).cast("I")
        return Prompt(scope.model, **given)
    nbytes = value.ByteSize() if form == "chat" else len(value.encode())
    if not 1 <= nbytes <= MAX_TEXT_NBYTES:
        raise ConfigError(f"a prompt as {form} has 1 to {MAX_TEXT_NBYTES} bytes, not {nbytes}")
    if form == "chat":
        given["chat"] = _decode_chat(value)
    else:
        given["text"] = value
    return Prompt(scope.model, **given)


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
    """None: empty text."""
    if not text:
        return None
    try:
        value = bounded_json.decode(text)
    except ConfigError as error:
        raise ConfigError(f"{field} is no JSON: {error}") from error
    if type(value) is not kind:
        raise ConfigError(f"{field} is a JSON {'object' if kind is dict else 'list'}")
    return value


def _encode_chat(chat: Chat) -> Any:
    try:
        message = pb.ChatPrompt(
            messages=[
                pb.ChatMessage(
                    role=one["role"],
                    content=text_parts(one.get("content")),
                    name=one.get("name") or "",
                    reasoning=reasoning_of(one) or "",
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


# ---- lookups and routes


def encode_lookup(lookup: Lookup) -> Any:
    columns = (getattr(lookup, column.name) for column in fields(lookup))
    reply = pb.LookupResponse(**dict(zip(Row._fields, columns, strict=True)))  # by the names of a row
    if not any(lookup.pool_media):
        reply.ClearField("pool_media")
    return reply


def decode_lookup(reply: Any) -> Lookup:
    """Errors: ``ValueError`` when columns differ in length."""
    # An index of an earlier version leaves it empty: then the larger of local and pool blocks.
    loadable = reply.loadable_blocks or tuple(map(max, reply.local_blocks, reply.pool_blocks))
    media = reply.pool_media or [0] * len(reply.worker)
    columns = [*(getattr(reply, name) for name in Row._fields[:-2]), loadable, media]
    if len(set(map(len, columns))) != 1:
        raise ValueError("its columns differ in length")
    return Lookup(*map(tuple, columns))


def encode_load(load: Load) -> Any:
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


def decode_route_options(request: Any) -> dict[str, Any]:
    """The arguments of ``Router.rank`` that ``RouteRequest`` has beside the prompt."""
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
        "limit": request.most or None,
        "reserve_s": request.reserve_ms / 1000 if request.reserve_ms else None,
        "prompt_tokens": request.prompt_tokens or None,
        "session": Session.of(
            request.scope.tenant or DEFAULT_TENANT,
            request.scope.model,
            request.session_id,
            request.prompt_cache_key,
        ),
        "takes_turn": not request.preview,
    }


def decode_route(reply: Any) -> Ranking:
    """Errors: ``ValueError`` when columns differ in length, or have an unnamed value."""
    lookup = decode_lookup(reply.rows)
    columns = [getattr(reply, name) for name in Pick._fields[1:-3]]  # the row is of ``lookup``
    # Empty: of an earlier version, or without a move or an item.
    columns += [
        reply.unreachable or [False] * len(lookup),
        reply.move_cost or [0] * len(lookup),
        reply.encode_cost or [0] * len(lookup),
    ]
    if {len(lookup), *map(len, columns)} != {len(lookup)}:
        raise ValueError("its columns differ in length")
    try:
        return Ranking(tuple(map(named_pick, zip(lookup, *columns, strict=True))), reply.reservation)
    except LookupError as error:
        raise ValueError(f"it holds a number which has no name: {error}") from error


# ---- workers


def encode_worker(worker: Worker) -> Any:
    publishers = [_copied(pb.Publisher, Publisher, one) for one in worker.publishers]
    return _copied(pb.Worker, Worker, worker, publishers=publishers)


def decode_worker(message: Any, default_seed_id: str) -> Worker:
    """Empty fields get their defaults."""
    worker: Worker = _copied(
        Worker,
        Worker,
        message,
        hash_seed_id=message.hash_seed_id or default_seed_id,
        publishers=tuple(_copied(Publisher, Publisher, one) for one in message.publishers),
        names=tuple(message.names),
        media_namespaces=tuple(message.media_namespaces),
        tenant=message.tenant or DEFAULT_TENANT,
        hash_algorithm=message.hash_algorithm or DEFAULT_ALGORITHM,
    )
    return worker


def encode_index_status(status: IndexStatus) -> Any:
    return _copied(pb.IndexStatus, IndexStatus, status)


def encode_worker_status(status: WorkerStatus) -> Any:
    return pb.WorkerStatus(
        worker=encode_worker(status.worker),
        source=status.source,
        lease_left_ms=status.lease_left_ms,
        publishers=[_copied(pb.PublisherStatus, PublisherStatus, rank) for rank in status.publishers],
    )


def encode_quota(tenant: str, standing: Standing) -> Any:
    """Of a tenant with a quota."""
    return pb.TenantQuota(tenant=tenant, quota_nbytes=standing.quota_nbytes, held_nbytes=standing.held_nbytes)


def encode_audits(audits: EngineAudits) -> Any:
    return _copied(pb.EngineAudits, EngineAudits, audits)


def decode_status(reply: Any) -> FleetStatus:
    """Of ``ListWorkersResponse``. An index of an earlier version has no status of its own: zeros."""
    workers = (
        WorkerStatus(
            worker=decode_worker(status.worker, status.worker.hash_seed_id),
            source=status.source,
            lease_left_ms=status.lease_left_ms,
            publishers=tuple(_copied(PublisherStatus, PublisherStatus, one) for one in status.publishers),
        )
        for status in reply.workers
    )
    quotas = {
        one.tenant: Standing(
            one.quota_nbytes, one.held_nbytes if one.HasField("held_nbytes") else None, is_said=True
        )
        for one in reply.quotas
    }
    audits = (
        _copied(
            EngineAudits,
            EngineAudits,
            one,
            put_away_writers=tuple(one.put_away_writers),
            found_writers=tuple(one.found_writers),
        )
        for one in reply.audits
    )
    return FleetStatus(_copied(IndexStatus, IndexStatus, reply.index), tuple(workers), quotas, tuple(audits))


def encode_curve(curve: HitCurve) -> Any:
    return _copied(pb.HitCurveResponse, HitCurve, curve)


def decode_curve(reply: Any) -> HitCurve:
    """Errors: ``ValueError``."""
    if len(reply.sizes) != len(reply.hit_rates):
        raise ValueError(f"it has {len(reply.sizes)} sizes and {len(reply.hit_rates)} hit rates")
    curve: HitCurve = _copied(
        HitCurve, HitCurve, reply, sizes=tuple(reply.sizes), hit_rates=tuple(reply.hit_rates)
    )
    return curve


def _copied(kind: Any, named: Any, one: Any, **changed: Any) -> Any:
    """A ``kind`` with the fields of ``one`` that the dataclass ``named`` has, but for ``changed``."""
    return kind(**{name: getattr(one, name) for name in named.__dataclass_fields__} | changed)


# ---- errors


def whole_ms(what: str, seconds: float) -> int:
    if not 0.001 <= seconds <= MAX_U32 / 1000:
        raise ConfigError(f"{what} is a number of seconds from 0.001 on, not {seconds:g}")
    return round(seconds * 1000)


def _pair(what: str, pair: Any) -> tuple[str, str]:
    if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
        raise ConfigError(f"{what}, not {pair!r:.80}")
    return pair[0], pair[1]


def unsendable(error: Exception) -> ConfigError:
    return ConfigError(f"this cannot be sent to an index: {first_line(error)}")


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


assert struct.calcsize("I") == TOKEN_NBYTES
