"""Structured options of ``kvpool index`` and ``kvpool router``, as values."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import fields

from kvpool.discovery.worker import DEFAULT_ALGORITHM, DEFAULT_TENANT, Publisher, Worker, check_worker
from kvpool.errors import ConfigError
from kvpool.index.cost.router import Costs
from kvpool.index.tokens.tokenizer import Tokenizer
from kvpool.text import unknown

_FIELDS = ("model", "block", "replay", "tenant", "hash", "address", "ranks")
_NUMBER = re.compile(r"[0-9]{1,9}")


def parse_worker(text: str, seed_id: str) -> Worker:
    """``text``: of ``--worker``. Errors: ``ConfigError`` that begins with the option."""
    try:
        return check_worker(_worker(text, seed_id))
    except ConfigError as error:
        raise ConfigError(f'--worker "{text}": {error}') from error


def _worker(text: str, seed_id: str) -> Worker:
    name, separator, rest = text.partition("=")
    events, *parts = rest.split(",")
    if not separator or not name or "://" not in events:
        raise ConfigError("write NAME=tcp://HOST:PORT,model=MODEL,block=TOKENS")
    fields: dict[str, str] = {}
    for part in parts:
        field, separator, value = part.partition("=")
        if field not in _FIELDS:
            raise ConfigError(unknown("field", field, _FIELDS))
        if not value or field in fields:
            raise ConfigError(f"{field} is given twice" if value else f"{field} has no value")
        fields[field] = value
    if "model" not in fields:
        raise ConfigError("model is missing: the name that requests are sent with")
    if "block" not in fields:
        raise ConfigError("block is missing: the tokens of a block, which are the engine's --block-size")
    ranks = _whole("ranks", fields.get("ranks", "1"))
    replay = fields.get("replay", "")
    return Worker(
        name=name,
        model=fields["model"],
        block_tokens=_whole("block", fields["block"]),
        hash_seed_id=seed_id,
        publishers=tuple(
            Publisher(rank, _of_rank(events, rank), _of_rank(replay, rank))
            for rank in range(min(ranks, 2048))
        ),
        tenant=fields.get("tenant", DEFAULT_TENANT),
        hash_algorithm=fields.get("hash", DEFAULT_ALGORITHM),
        address=fields.get("address", ""),
    )


def load_tokenizers(given: Sequence[str]) -> dict[str, Tokenizer]:
    """By model. Blocking, for seconds. Errors: ``ConfigError`` that begins with the option."""
    # Each text in its own thread: in the library's pool, of one thread a core, short ones would wait for long ones.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sources: dict[str, str] = {}
    for text in given:
        # The last "=": a model's name may hold one, a folder should not.
        model, separator, source = text.rpartition("=")
        if not separator or not model or not source or model in sources:
            raise ConfigError(f'--tokenizer "{text}": write MODEL=FOLDER, once for each model')
        sources[model] = source
    try:
        return {model: Tokenizer.load(model, source) for model, source in sources.items()}
    except ConfigError as error:
        raise ConfigError(f"--tokenizer: {error}") from error


def parse_costs(given: Sequence[str]) -> Costs:
    """Errors: ``ConfigError`` that begins with the option."""
    known = [one.name for one in fields(Costs)]
    values: dict[str, float] = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            if name not in known:
                raise ConfigError(unknown("coefficient", name, known))
            values[name] = float(value)
        except ValueError as error:
            why = error if isinstance(error, ConfigError) else "write NAME=NUMBER"
            raise ConfigError(f'--route-cost "{text}": {why}') from error
    try:
        return Costs(**values)
    except ConfigError as error:
        raise ConfigError(f"--route-cost: {error}") from error


def _of_rank(endpoint: str, rank: int) -> str:
    """A rank's endpoint: vLLM adds the rank to the port (``offset_endpoint_port``)."""
    if rank == 0 or not endpoint:
        return endpoint
    host, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or _NUMBER.fullmatch(port) is None:
        raise ConfigError(f"{endpoint}: only tcp://HOST:PORT goes up by rank")
    return f"{host}:{int(port) + rank}"


def _whole(field: str, text: str) -> int:
    if _NUMBER.fullmatch(text) is None:
        raise ConfigError(f"{field} is a whole number, not {text!r:.40}")
    return int(text)
