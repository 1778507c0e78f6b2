"""Workers for the tests of the fleet, the service and its clients."""

from __future__ import annotations

from typing import Any

from kvpool.hashing import seed_id
from kvpool.index import Publisher, Worker


class Clock:
    """Seconds that stand still until a test moves them."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def a_worker(name: str = "w", *, ranks: int = 1, port: int = 5557, **fields: Any) -> Worker:
    publishers = tuple(
        Publisher(rank, f"tcp://127.0.0.1:{port + rank}", f"tcp://127.0.0.1:{port + 100 + rank}")
        for rank in range(ranks)
    )
    known: dict[str, Any] = {
        "model": "m", "block_tokens": 16, "hash_seed_id": seed_id(None), "publishers": publishers,
        "address": f"http://{name}:8000",
    }  # fmt: skip
    return Worker(name=name, **{**known, **fields})
