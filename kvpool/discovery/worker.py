"""``Worker``: what the index has to know of a vLLM worker to follow it, and who is told what it publishes.

Everything here is immutable; nothing blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

DEFAULT_TENANT = "default"
MAX_DP_RANK = 65535
MAX_WORKERS = 16384  # that one index follows
DEFAULT_ALGORITHM = "sha256_cbor"


@dataclass(frozen=True)
class Publisher:
    """Where one data-parallel rank publishes its KV events (``vllm/distributed/kv_events.py``).

    ``events``: ``tcp://HOST:PORT`` of its PUB socket; ``push``: it brings them; empty: they are switched off.
    ``replay``: of its ROUTER socket; empty: it has none.
    """

    dp_rank: int
    events: str
    replay: str = ""


@dataclass(frozen=True)
class Worker:
    """One worker, known by tenant and name.

    ``block_tokens``: tokens of a block that is hashed. ``hash_seed_id``: ``kvpool.key.hashing.seed_id`` of the seed
    it hashes with. ``address``: where it serves requests, such as ``http://10.0.0.7:8000``; empty: not known.
    ``incarnation``: another text at each start; empty: the index finds out by itself. ``namespace``: 32 hex
    digits, whose blocks in the pool it can load; empty: none.
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
    """The last batch of a rank that was applied: its number, and its digest (``kvpool.index.rank``)."""

    sequence: int
    batch_digest: int
