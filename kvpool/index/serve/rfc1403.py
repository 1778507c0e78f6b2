"""Between Mooncake's RFC 1403 ("KV-Store Indexer API Standardization"), in JSON, and the index's values. Pure.

Two spellings are about, and a request is answered in its own: ``model`` is Mooncake's
(``docs/source/design/conductor/indexer-api-design.md`` of April 2026), ``model_name`` is that of Dynamo's standalone
indexer. ``docs/protocol.md`` says where this differs from either.

What is read here was written by other processes: it is checked for its form. What it says is judged by ``Fleet`` and
``check_worker``. Errors: ``ConfigError`` that names the field, where no other is named.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvpool.discovery.worker import DEFAULT_TENANT, MAX_DP_RANK, Publisher, Worker
from kvpool.errors import ConfigError, UnknownModel
from kvpool.index.answer import TierRow
from kvpool.index.client.messages import MAX_U32
from kvpool.index.prompt import Prompt
from kvpool.key.hashing import MAX_BLOCK_TOKENS

MAX_U64 = (1 << 64) - 1
_HASHES = ("seq_hashes", "block_hash", "block_hashes")  # Mooncake's, that of its drafts, Dynamo's


class Query(NamedTuple):
    """One question."""

    prompt: Prompt
    block_tokens: int | None  # only workers with blocks of that many; None: all
    as_dynamo: bool


class Registration(NamedTuple):
    """One rank of a worker, to be followed."""

    tenant: str
    instance: str
    model: str
    block_tokens: int
    publisher: Publisher


class Removal(NamedTuple):
    """A worker, or one rank of it, to be forgotten."""

    tenant: str
    instance: str
    dp_rank: int | None  # None: all


# ---- requests


def decode_query(raw: bytes, *, by_hash: bool) -> Query:
    """Of ``/query_by_hash``, or of ``/query``."""
    fields = _object(raw)
    model, as_dynamo = _model(fields)
    tenant = _name(fields, "tenant_id") or DEFAULT_TENANT
    block_tokens = _whole(fields, "block_size", MAX_BLOCK_TOKENS)
    instance = _name(fields, "instance_id")
    workers = [instance] if instance else None
    if by_hash:
        # lora_name and cache_salt are in the hashes already.
        prompt = Prompt(model, hashes64=_hashes(fields), tenant=tenant, workers=workers)
    else:
        prompt = Prompt(
            model,
            token_ids=_tokens(fields),
            tenant=tenant,
            lora=_lora(fields),
            cache_salt=_name(fields, "cache_salt") or None,
            workers=workers,
        )
    return Query(prompt, block_tokens, as_dynamo)


def decode_registration(raw: bytes) -> Registration:
    """Of ``/register``."""
    fields = _object(raw)
    model, _ = _model(fields)
    kind = _name(fields, "type") or "vLLM"
    if kind.lower() != "vllm":
        raise ConfigError(f'type "{kind:.40}" is not followed: only publishers of vLLM are')
    block_tokens = _whole(fields, "block_size", MAX_BLOCK_TOKENS)
    if not block_tokens:
        raise ConfigError("block_size is missing: the tokens of a block, which are the engine's --block-size")
    endpoint = _name(fields, "endpoint")
    if not endpoint:
        raise ConfigError("endpoint is missing: tcp://HOST:PORT where the rank publishes its KV events")
    publisher = Publisher(
        _whole(fields, "dp_rank", MAX_DP_RANK) or 0, endpoint, _name(fields, "replay_endpoint")
    )
    tenant = _name(fields, "tenant_id") or DEFAULT_TENANT
    return Registration(tenant, _instance(fields), model, block_tokens, publisher)


def decode_removal(raw: bytes) -> Removal:
    """Of ``/unregister``."""
    fields = _object(raw)
    tenant = _name(fields, "tenant_id") or DEFAULT_TENANT
    return Removal(tenant, _instance(fields), _whole(fields, "dp_rank", MAX_DP_RANK))


def with_rank(asked: Registration, known: Worker | None, seed_id: str) -> Worker:
    """The worker to follow: ``known`` with that rank; a new one where that is of another model or block size."""
    if known is None or (known.model, known.block_tokens) != (asked.model, asked.block_tokens):
        return Worker(
            asked.instance, asked.model, asked.block_tokens, seed_id, (asked.publisher,), asked.tenant
        )
    others = [one for one in known.publishers if one.dp_rank != asked.publisher.dp_rank]
    return _with_publishers(known, [*others, asked.publisher])


def without_rank(known: Worker, dp_rank: int) -> Worker | None:
    """The worker that is left when a rank goes; None: none."""
    left = [one for one in known.publishers if one.dp_rank != dp_rank]
    return _with_publishers(known, left) if left else None


def _with_publishers(worker: Worker, publishers: Sequence[Publisher]) -> Worker:
    ordered = tuple(sorted(publishers, key=lambda one: one.dp_rank))
    return Worker(
        worker.name, worker.model, worker.block_tokens, worker.hash_seed_id, ordered, worker.tenant,
        worker.hash_algorithm, worker.address, worker.incarnation, worker.namespace,
    )  # fmt: skip


def _object(raw: bytes) -> Mapping[str, Any]:
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        said = str(error).splitlines()[0] if str(error) else "it is no text"
        raise ConfigError(f"the request is not JSON: {said:.200}") from error
    if not isinstance(fields, dict):
        raise ConfigError("the request is not a JSON object")
    return fields


def _model(fields: Mapping[str, Any]) -> tuple[str, bool]:
    """Its name, and whether it is spelled as Dynamo does; ``modelname`` is what Mooncake's /register says."""
    given = [field for field in ("model", "modelname", "model_name") if fields.get(field) is not None]
    if len(given) != 1:
        raise ConfigError("name the model, as model or as model_name" + (" and not as both" if given else ""))
    return _name(fields, given[0]), given[0] == "model_name"


def _instance(fields: Mapping[str, Any]) -> str:
    if not (instance := _name(fields, "instance_id")):
        raise ConfigError("instance_id is missing: the name of the worker")
    return instance


def _name(fields: Mapping[str, Any], field: str) -> str:
    """Text, or a whole number, which some write; empty: not given."""
    value = fields.get(field)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ConfigError(f"{field} is text, not {json.dumps(value):.40}")
    return str(value)


def _whole(fields: Mapping[str, Any], field: str, limit: int) -> int | None:
    value = fields.get(field)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= limit:
        raise ConfigError(f"{field} is a whole number from 0 to {limit}, not {json.dumps(value):.40}")
    return value


def _lora(fields: Mapping[str, Any]) -> tuple[str, str] | None:
    if fields.get("lora_id") not in (None, -1):
        raise ConfigError("lora_id does not say which adapter it is: send lora_name and lora_path, or hashes")
    name, path = _name(fields, "lora_name"), _name(fields, "lora_path")
    if not name:
        return None
    if not path:
        raise ConfigError(
            "lora_path is missing: engines hash an adapter by its name and path; or send hashes"
        )
    return name, path


def _tokens(fields: Mapping[str, Any]) -> array[int]:
    tokens = _numbers(fields, "token_ids")
    try:
        return array("I", tokens)
    except OverflowError as error:
        raise ConfigError(f"token_ids are whole numbers from 0 to {MAX_U32}") from error


def _hashes(fields: Mapping[str, Any]) -> array[int]:
    given = [field for field in _HASHES if fields.get(field) is not None]
    if len(given) != 1:
        raise ConfigError("give the hashes, once, as seq_hashes")
    hashes = _numbers(fields, given[0])
    try:
        # Some languages have no unsigned numbers.
        return array("Q", hashes if min(hashes) >= 0 else [_unsigned(number) for number in hashes])
    except OverflowError as error:
        raise ConfigError(f"{given[0]} are whole numbers from 0 to {MAX_U64}") from error


def _unsigned(number: int) -> int:
    return number & MAX_U64 if -(1 << 63) <= number < 0 else number


def _numbers(fields: Mapping[str, Any], field: str) -> list[int]:
    numbers = fields.get(field)
    if not isinstance(numbers, list) or not numbers or set(map(type, numbers)) != {int}:
        raise ConfigError(f"{field} is a list of whole numbers with one at least")
    return numbers


# ---- answers


def encode_answer(query: Query, rows: Sequence[TierRow]) -> dict[str, Any]:
    """In matched tokens, by instance. Errors: ``UnknownModel`` when no worker has blocks of that size."""
    wanted = [row for row in rows if query.block_tokens in (None, row.block_tokens)]
    if rows and not wanted:
        sizes = ", ".join(map(str, sorted({row.block_tokens for row in rows})))
        raise UnknownModel(
            f'no worker of model "{query.prompt.model}" has blocks of {query.block_tokens} tokens; known are {sizes}'
        )
    instances: dict[str, list[TierRow]] = {}
    for row in wanted:
        instances.setdefault(row.worker, []).append(row)
    if not query.as_dynamo:
        return {query.prompt.tenant: {name: _mooncake(ranks) for name, ranks in instances.items()}}
    return {
        "scores": {name: _by_rank(ranks) for name, ranks in instances.items()},
        "frequencies": [],
        "tree_sizes": {},
        "instances": {name: _dynamo(ranks) for name, ranks in instances.items()},
    }


def _mooncake(ranks: Sequence[TierRow]) -> dict[str, Any]:
    return {
        "longest_matched": _most(ranks, "local_blocks", "pool_blocks"),
        "GPU": _most(ranks, "device_blocks"),
        "DP": _by_rank(ranks),
        "CPU": _most(ranks, "host_blocks"),
        "DISK": _most(ranks, "disk_blocks"),
        "POOL": _most(ranks, "pool_blocks"),
    }


def _dynamo(ranks: Sequence[TierRow]) -> dict[str, Any]:
    """Each tier reaches at least as far as those before it; the pool counts as the last one."""
    longest = _most(ranks, "local_blocks", "pool_blocks")
    return {
        "longest_matched": longest,
        "gpu": _most(ranks, "device_blocks"),
        "dp": _by_rank(ranks),
        "cpu": _most(ranks, "device_blocks", "host_blocks"),
        "disk": longest,
    }


def _by_rank(ranks: Sequence[TierRow]) -> dict[str, int]:
    return {str(row.dp_rank): row.device_blocks * row.block_tokens for row in ranks}


def _most(ranks: Sequence[TierRow], *tiers: str) -> int:
    return max(int(getattr(row, tier)) * row.block_tokens for row in ranks for tier in tiers)
