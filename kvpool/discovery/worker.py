"""``Worker``: the address card of a vLLM worker that the index follows. Immutable; nothing blocks.

``check_worker`` rejects those that it cannot follow: their names enter logs, endpoints are dialled.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from kvpool.errors import ConfigError
from kvpool.key.hashing import ALGORITHMS, MAX_BLOCK_TOKENS, BlockHasher
from kvpool.key.key import check_tenant

DEFAULT_TENANT = "default"
MAX_DP_RANK = 65535
MAX_WORKERS = 16384  # of one index
DEFAULT_ALGORITHM = "sha256_cbor"
MAX_NAME_NBYTES = 256
MAX_TEXT_NBYTES = 1024  # of a model's name, an address, an endpoint
MAX_SERVED = 64  # names of a worker beside its model's
MAX_SERVED_NBYTES = 8192  # of all of them
MAX_PUBLISHERS = 1024
MAX_MEDIA = 8  # namespaces of a worker's encoder: one for each width and type of outputs
PUSH_GONE = (
    "events are no longer pushed: name the publisher's tcp://HOST:PORT, or let the worker announce itself"
)

_SEED_ID = re.compile(r"[0-9a-f]{16}")
_HEX32 = re.compile(r"[0-9a-f]{32}")
_ENDPOINT = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\s:/@\[\]]+):(?P<port>[0-9]{1,5})|ipc://\S+")
_EVERY_ADDRESS = ("*", "0.0.0.0", "[::]")  # noqa: S104 - to refuse it


@dataclass(frozen=True)
class Publisher:
    """Where one data-parallel rank publishes its KV events (``vllm/distributed/kv_events.py``).

    ``events``: ``tcp://HOST:PORT`` of its PUB socket; ``push``: events are pushed to the index; empty: events
    are off. ``replay``: of its ROUTER socket; empty: none.
    """

    dp_rank: int
    events: str
    replay: str = ""


@dataclass(frozen=True)
class Worker:
    """One worker, identified by tenant and name.

    ``block_tokens``: tokens of a hashed block. ``hash_seed_id``: ``kvpool.key.hashing.seed_id`` of its seed.
    ``address``: of its API, such as ``http://10.0.0.7:8000``; empty: unknown. ``incarnation``: differs at
    each start; empty: the index detects restarts. ``namespace``: 32 hex digits, of the pool blocks it can
    load; empty: none. ``names``: by which requests may call ``model``, too: vLLM's further served names. ``near``: 32
    hex digits of its near pool, which all engines of a host share (``kvpool.store.file.pool_id``); empty: none.
    ``media_namespaces``: alike ``namespace``, of the outputs of encoders that it can load.
    """

    name: str
    model: str
    block_tokens: int
    hash_seed_id: str
    publishers: tuple[Publisher, ...]
    tenant: str = DEFAULT_TENANT
    hash_algorithm: str = DEFAULT_ALGORITHM
    address: str = ""
    incarnation: str = ""
    namespace: str = ""
    names: tuple[str, ...] = ()
    near: str = ""
    media_namespaces: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """``TENANT/NAME``."""
        return f"{self.tenant}/{self.name}"

    @property
    def label(self) -> str:
        """For people: its name, and where it serves."""
        return f"{self.name} at {self.address}" if self.address else self.name


class Position(NamedTuple):
    """Number and digest (``kvpool.index.fleet.rank``) of the last applied batch of a rank."""

    sequence: int
    batch_digest: int


def check_name(name: str) -> str:
    """Return ``name`` if a worker may have it. Errors: ``ConfigError``."""
    return check_text("a worker's name", name, MAX_NAME_NBYTES, empty=False)


def check_worker(worker: Worker) -> Worker:
    """Return ``worker`` if the index can follow it. Errors: ``ConfigError`` that names the field."""
    check_name(worker.name)
    check_tenant(worker.tenant)
    who = f"worker {worker.name}"
    check_text(f"{who}: model", worker.model, MAX_TEXT_NBYTES, empty=False)
    check_text(f"{who}: address", worker.address, MAX_TEXT_NBYTES)
    check_text(f"{who}: incarnation", worker.incarnation, MAX_NAME_NBYTES)
    block_tokens = worker.block_tokens
    if type(block_tokens) is not int or not 1 <= block_tokens <= MAX_BLOCK_TOKENS:
        raise ConfigError(
            f"{who}: block_tokens is a whole number from 1 to {MAX_BLOCK_TOKENS}, the engine's --block-size, "
            f"not {block_tokens!r:.40}"
        )
    if worker.hash_algorithm not in ALGORITHMS:
        try:
            BlockHasher(block_tokens, worker.hash_algorithm)
        except ConfigError as error:
            raise ConfigError(f"{who}: {error}") from error
    if _SEED_ID.fullmatch(worker.hash_seed_id) is None:
        raise ConfigError(f"{who}: hash_seed_id is 16 hex digits, not {worker.hash_seed_id!r:.40}")
    for field in ("namespace", "near"):
        if (text := getattr(worker, field)) and _HEX32.fullmatch(text) is None:
            raise ConfigError(f"{who}: {field} is 32 hex digits or nothing, not {text!r:.60}")
    if not isinstance(worker.names, tuple) or len(worker.names) > MAX_SERVED:
        raise ConfigError(f"{who}: names are up to {MAX_SERVED}, beside the model's")
    for name in worker.names:
        check_text(f"{who}: names", name, MAX_TEXT_NBYTES, empty=False)
    if sum(len(name.encode()) for name in worker.names) > MAX_SERVED_NBYTES:
        raise ConfigError(f"{who}: names have at most {MAX_SERVED_NBYTES} bytes in all")
    if not are_media(worker.media_namespaces):
        raise ConfigError(
            f"{who}: media_namespaces are up to {MAX_MEDIA} different ones of 32 hex digits each"
        )
    if not 1 <= len(worker.publishers) <= MAX_PUBLISHERS:
        raise ConfigError(
            f"{who} has {len(worker.publishers)} publishers: name 1 to {MAX_PUBLISHERS}, one for each rank"
        )
    for publisher in worker.publishers:
        _check_publisher(who, publisher)
    if len({publisher.dp_rank for publisher in worker.publishers}) != len(worker.publishers):
        raise ConfigError(f"{who}: two publishers have the same dp_rank")
    return worker


def are_media(namespaces: tuple[str, ...]) -> bool:
    """Whether a worker may name these."""
    return (
        isinstance(namespaces, tuple)
        and len({*namespaces}) == len(namespaces) <= MAX_MEDIA
        and all(isinstance(one, str) and _HEX32.fullmatch(one) for one in namespaces)
    )


def _check_publisher(who: str, publisher: Publisher) -> None:
    rank = publisher.dp_rank
    if type(rank) is not int or not 0 <= rank <= MAX_DP_RANK:
        raise ConfigError(f"{who}: dp_rank is a whole number from 0 to {MAX_DP_RANK}, not {rank!r:.40}")
    if publisher.events == "push":
        raise ConfigError(f"{who}: {PUSH_GONE}")
    if publisher.events or publisher.replay:  # both empty: events are off
        _endpoint(f"{who}: events", publisher.events)
    if publisher.replay:
        _endpoint(f"{who}: replay", publisher.replay)


def _endpoint(what: str, endpoint: str) -> None:
    check_text(what, endpoint, MAX_TEXT_NBYTES)
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or (match["port"] is not None and not 1 <= int(match["port"]) <= 65535):
        raise ConfigError(f"{what}: write tcp://HOST:PORT, not {endpoint!r:.80}")
    if match["host"] in _EVERY_ADDRESS:
        raise ConfigError(
            f"{what}: {endpoint} is where the worker listens; write the host by which the index reaches it"
        )


def check_text(what: str, text: str, most_nbytes: int, *, empty: bool = True) -> str:
    """Errors: ``ConfigError``, for what no announcement may say."""
    if not isinstance(text, str):
        raise ConfigError(f"{what} is text, not {type(text).__name__}")
    try:
        nbytes = len(text.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"{what} is not Unicode text") from None
    if nbytes > most_nbytes or not (text or empty):
        raise ConfigError(f"{what} has {0 if empty else 1} to {most_nbytes} bytes, not {nbytes}")
    if not text.isprintable():
        raise ConfigError(f"{what} holds characters that cannot be printed")
    return text
