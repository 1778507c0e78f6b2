"""Between the index's values and the messages of its protocol: what the index reads, and what it answers. Pure.

What is read here was written by other processes: it is checked for its form. ``Fleet`` checks what it says.
Errors: ``ConfigError``, where no other is named.
"""

from __future__ import annotations

from typing import Any

from kvpool.discovery.worker import DEFAULT_TENANT
from kvpool.errors import ConfigError
from kvpool.index import bounded_json
from kvpool.index.answer import IndexStatus, Lookup, PublisherStatus, WorkerStatus
from kvpool.index.client.messages import encode_worker
from kvpool.index.place.load import Load
from kvpool.index.prompt import TOKEN_NBYTES, Chat, Prompt, PromptFields
from kvpool.v1 import index_pb2 as pb

CHUNK_NBYTES = 1 << 20  # of a snapshot
MAX_TEXT_NBYTES = 4 << 20  # of a prompt as text or chat
MAX_LOADS = 32768  # in a request


def decode_prompt(request: Any) -> Prompt:
    """Of ``LookupRequest``, and of ``RouteRequest``, which has the same fields."""
    form = request.WhichOneof("prompt")
    if form is None:
        raise ConfigError("a request holds a prompt: block_hashes, token_ids, text or chat")
    scope, value = request.scope, getattr(request, form)
    fields: PromptFields = {
        "tenant": scope.tenant or DEFAULT_TENANT,
        "workers": list(request.workers) or None,
    }
    if form == "block_hashes":
        fields["hashes64"] = value
        return Prompt(scope.model, **fields)
    fields["lora"] = (scope.lora_name, scope.lora_path) if scope.lora_name or scope.lora_path else None
    fields["cache_salt"] = scope.cache_salt or None
    fields["multimodal"] = [(item.identifier, item.offset, item.length) for item in scope.multimodal]
    if form == "token_ids":
        if len(value) % TOKEN_NBYTES:
            raise ConfigError(f"token_ids are packed u32s, 4 bytes each; {len(value)} bytes are not")
        fields["token_ids"] = memoryview(value).cast("I")
        return Prompt(scope.model, **fields)
    nbytes = value.ByteSize() if form == "chat" else len(value.encode())
    if not 1 <= nbytes <= MAX_TEXT_NBYTES:
        raise ConfigError(f"a prompt as {form} has 1 to {MAX_TEXT_NBYTES} bytes, not {nbytes}")
    if form == "chat":
        fields["chat"] = _decode_chat(value)
    else:
        fields["text"] = value
    return Prompt(scope.model, **fields)


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
        value = bounded_json.decode(text)
    except ConfigError as error:
        raise ConfigError(f"{field} is no JSON: {error}") from error
    if type(value) is not kind:
        raise ConfigError(f"{field} is a JSON {'object' if kind is dict else 'list'}")
    return value


def decode_route_options(request: Any) -> dict[str, Any]:
    """The arguments of ``Router.route`` that ``RouteRequest`` has beside the prompt."""
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
        loadable_blocks=lookup.loadable_blocks,
    )


def encode_index_status(status: IndexStatus) -> Any:
    """``IndexStatus``."""
    return pb.IndexStatus(**{name: getattr(status, name) for name in IndexStatus.__dataclass_fields__})


def encode_worker_status(status: WorkerStatus) -> Any:
    """``WorkerStatus``."""
    return pb.WorkerStatus(
        worker=encode_worker(status.worker),
        source=status.source,
        lease_left_ms=status.lease_left_ms,
        publishers=[
            pb.PublisherStatus(**{name: getattr(rank, name) for name in PublisherStatus.__dataclass_fields__})
            for rank in status.publishers
        ],
    )
