"""Between Mooncake's RFC 1403 ("KV-Store Indexer API Standardization") and the index's values. Pure.

Two spellings are about, and a request is answered in its own: ``model`` is Mooncake's, ``model_name`` is that of
Dynamo's standalone indexer. Mooncake's answer has changed since April 2026 and its question has not: in JSON both
answers are given, in msgpack (August 2026) the later one. ``docs/reference/protocol.md`` names what is followed, and
where this differs.

What is read here was written by other processes: it is checked for its form. What it says is judged by ``Fleet`` and
``check_worker``. Errors: ``ConfigError`` that names the field, where no other is named.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvpool.discovery.worker import DEFAULT_ALGORITHM, DEFAULT_TENANT, MAX_DP_RANK, Publisher, Worker
from kvpool.errors import ConfigError, UnknownModel
from kvpool.index.answer import TierRow
from kvpool.index.prompt import Prompt
from kvpool.index.serve.encoding import HASHES, TOKENS, Encoding
from kvpool.key.hashing import MAX_BLOCK_TOKENS, seed_id

INSTANCES = "instances"
_PROFILE = {"strategy": "vllm_v1", "index_projection": "low64_be"}  # how vLLM's events name a block


class Query(NamedTuple):
    """One question."""

    prompt: Prompt
    block_tokens: int | None  # only workers with blocks of that many; None: all
    as_dynamo: bool
    encoding: Encoding = Encoding.JSON


class Registration(NamedTuple):
    """One rank of a worker, to be followed."""

    tenant: str
    instance: str
    model: str
    block_tokens: int
    publisher: Publisher
    as_dynamo: bool = False
    hash_algorithm: str = DEFAULT_ALGORITHM
    hash_seed: str = ""  # PYTHONHASHSEED of the engine; empty: that of the index


class Removal(NamedTuple):
    """A worker, or one rank of it, to be forgotten."""

    tenant: str
    instance: str
    dp_rank: int | None  # None: all
    as_dynamo: bool = False


# ---- requests


def decode_query(raw: bytes, *, by_hash: bool, encoding: Encoding = Encoding.JSON) -> Query:
    """Of ``/query_by_hash``, or of ``/query``."""
    if by_hash and encoding is Encoding.MSGPACK:
        raise ConfigError("send hashes in JSON: in msgpack there is no /query_by_hash")
    fields = encoding.decode(raw)
    model, as_dynamo = _model(fields)
    tenant = _tenant(fields)
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
    return Query(prompt, block_tokens, as_dynamo, encoding)


def decode_registration(raw: bytes, encoding: Encoding = Encoding.JSON) -> Registration:
    """Of ``/register``."""
    fields = encoding.decode(raw)
    model, as_dynamo = _model(fields)
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
    return Registration(
        _tenant(fields), _instance(fields), model, block_tokens, publisher, as_dynamo, *_hash_profile(fields)
    )


def decode_removal(raw: bytes, encoding: Encoding = Encoding.JSON) -> Removal:
    """Of ``/unregister``."""
    fields = encoding.decode(raw)
    as_dynamo = fields.get("model_name") is not None
    return Removal(_tenant(fields), _instance(fields), _whole(fields, "dp_rank", MAX_DP_RANK), as_dynamo)


def with_rank(asked: Registration, known: Worker | None, its_seed_id: str) -> Worker:
    """The worker to follow: ``known`` with that rank; a new one where that hashes otherwise, or is of another model.

    ``its_seed_id``: of the index. Errors: ``ConfigError`` for another seed, whose hashes no prompt would have here.
    """
    if asked.hash_seed and seed_id(asked.hash_seed) != its_seed_id:
        raise ConfigError(
            f"hash_profile: python_hash_seed {_shown(asked.hash_seed)} is not the seed of this index, so no prompt "
            "would match: start the index with that PYTHONHASHSEED"
        )
    if known is None or not _is_of(asked, known, its_seed_id):
        return Worker(
            asked.instance, asked.model, asked.block_tokens, its_seed_id, (asked.publisher,), asked.tenant,
            asked.hash_algorithm,
        )  # fmt: skip
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


def _is_of(asked: Registration, known: Worker, its_seed_id: str) -> bool:
    """Whether it is a rank of this worker, as far as the request says."""
    hashing = (known.hash_algorithm, known.hash_seed_id)
    return (known.model, known.block_tokens) == (asked.model, asked.block_tokens) and (
        not asked.hash_seed or hashing == (asked.hash_algorithm, its_seed_id)
    )


def _model(fields: Mapping[str, Any]) -> tuple[str, bool]:
    """Its name, and whether it is spelled as Dynamo does; ``modelname`` is what Mooncake's /register says."""
    given = [field for field in ("model", "modelname", "model_name") if fields.get(field) is not None]
    if len(given) != 1:
        raise ConfigError("name the model, as model or as model_name" + (" and not as both" if given else ""))
    return _name(fields, given[0]), given[0] == "model_name"


def _tenant(fields: Mapping[str, Any]) -> str:
    """``routing_group`` is what Dynamo calls it since 1.3."""
    tenant, group = _name(fields, "tenant_id"), _name(fields, "routing_group")
    if tenant and group and tenant != group:
        raise ConfigError("tenant_id and routing_group mean the same here, and differ: send one of them")
    return tenant or group or DEFAULT_TENANT


def _hash_profile(fields: Mapping[str, Any]) -> tuple[str, str]:
    """The algorithm and the seed, as Mooncake's conductor asks for them since July 2026; who says none has ours."""
    profile = fields.get("hash_profile")
    if profile is None:
        return DEFAULT_ALGORITHM, ""
    if not isinstance(profile, dict):
        raise ConfigError(f"hash_profile is an object, not {_shown(profile)}")
    for field, followed in _PROFILE.items():
        if (said := _name(profile, field)) != followed:
            raise ConfigError(f"hash_profile: {field} {_shown(said)} is not followed: only {followed} is")
    algorithm, seed = _name(profile, "algorithm"), _name(profile, "python_hash_seed")
    if not algorithm or not seed:
        raise ConfigError("hash_profile needs algorithm and python_hash_seed: the engine's PYTHONHASHSEED")
    return algorithm, seed


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
        raise ConfigError(f"{field} is text, not {_shown(value)}")
    return str(value)


def _whole(fields: Mapping[str, Any], field: str, limit: int) -> int | None:
    value = fields.get(field)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= limit:
        raise ConfigError(f"{field} is a whole number from 0 to {limit}, not {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    """What was said, in one line; of lists and the like, which may be deep, their type."""
    if value is None or isinstance(value, str | int | float):
        return f"{json.dumps(value):.40}"
    return type(value).__name__


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
    if not isinstance(tokens := fields.get(TOKENS), array):
        raise ConfigError(f"{TOKENS} is a list of whole numbers")
    return tokens


def _hashes(fields: Mapping[str, Any]) -> array[int]:
    given = [hashes for field in HASHES if (hashes := fields.get(field)) is not None]
    if len(given) != 1:
        raise ConfigError("give the hashes, once, as seq_hashes")
    (hashes,) = given
    assert isinstance(hashes, array)
    return hashes


# ---- answers


def encode_registered(asked: Registration) -> dict[str, Any]:
    """That a rank is followed."""
    if asked.as_dynamo:
        return {"status": "ok"}
    return {"status": "registered successfully", "instance_id": asked.instance}


def encode_removed(asked: Removal, ranks: Sequence[int]) -> dict[str, Any]:
    """That these ranks are not followed any more."""
    if asked.as_dynamo:
        return {"status": "ok"}
    removed = [f"{asked.instance}|{asked.tenant}|{rank}" for rank in ranks]
    return {"status": "unregistered successfully", "removed_instances": removed}


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
    if query.as_dynamo:
        return {
            "scores": {name: _by_rank(ranks) for name, ranks in instances.items()},
            "frequencies": [],
            "tree_sizes": {},
            INSTANCES: {name: _cumulative(ranks) for name, ranks in instances.items()},
        }
    today = {name: _conductor(ranks) for name, ranks in instances.items()}
    if query.encoding is Encoding.MSGPACK:
        return {INSTANCES: today}
    of_april = {name: _by_medium(ranks) for name, ranks in instances.items()}
    if query.prompt.tenant == INSTANCES:  # one place for two answers, which have no field with two meanings
        return {INSTANCES: {name: of_april[name] | today[name] for name in today}}
    return {query.prompt.tenant: of_april, INSTANCES: today}


def _by_medium(ranks: Sequence[TierRow]) -> dict[str, Any]:
    """As Mooncake's page of April 2026 has it: each medium by itself."""
    return {
        "longest_matched": _most(ranks, "loadable_blocks"),
        "GPU": _most(ranks, "device_blocks"),
        "DP": _by_rank(ranks),
        "CPU": _most(ranks, "host_blocks"),
        "DISK": _most(ranks, "disk_blocks"),
        "POOL": _most(ranks, "pool_blocks"),
    }


def _conductor(ranks: Sequence[TierRow]) -> dict[str, Any]:
    """As Mooncake's conductor has it since July 2026: the same of each rank."""
    by_rank = {str(row.dp_rank): _tiers([row]) for row in ranks}
    return {**_cumulative(ranks), "rank_matches": by_rank}


def _cumulative(ranks: Sequence[TierRow]) -> dict[str, Any]:
    tiers = _tiers(ranks)
    return {"longest_matched": tiers["disk"], "dp": _by_rank(ranks), **tiers}


def _tiers(ranks: Sequence[TierRow]) -> dict[str, int]:
    """Each tier from the beginning on through those before it; the pool counts as the last one, where it goes on."""
    return {
        "gpu": _most(ranks, "device_blocks"),
        "cpu": _most(ranks, "memory_blocks"),
        "disk": _most(ranks, "loadable_blocks"),
    }


def _by_rank(ranks: Sequence[TierRow]) -> dict[str, int]:
    return {str(row.dp_rank): row.device_blocks * row.block_tokens for row in ranks}


def _most(ranks: Sequence[TierRow], tier: str) -> int:
    return max(int(getattr(row, tier)) * row.block_tokens for row in ranks)
