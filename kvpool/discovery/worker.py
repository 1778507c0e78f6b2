"""``Worker``: the address card of a vLLM worker that the index follows. Immutable; nothing blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

DEFAULT_TENANT = "default"
MAX_DP_RANK = 65535
MAX_WORKERS = 16384  # of one index
DEFAULT_ALGORITHM = "sha256_cbor"


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
    load; empty: none.
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

    @property
    def id(self) -> str:
        """``TENANT/NAME``."""
        return f"{self.tenant}/{self.name}"


class Position(NamedTuple):
    """Number and digest (``kvpool.index.rank``) of the last applied batch of a rank."""

    sequence: int
    batch_digest: int
