"""The real index and the real pool of ``python -m benchmarks agents``, in one process, under a simulated clock.

Batches of KV events are packed as vLLM packs them, and come to ``Fleet`` through ``Sequence`` and ``Rank``, without a
socket between. ``Router`` places, with the loads and costs of workers' gauges as the scraper reads them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgpack

from benchmarks.agents_engine import Engine
from benchmarks.agents_pool import TENANT, RealPool
from benchmarks.agents_traffic import Traffic, Turn
from kvpool.discovery.worker import Publisher, Worker
from kvpool.errors import KVPoolError
from kvpool.index.cost.router import Costs, Router
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.sequence import Sequence as BatchSequence
from kvpool.index.follow.metrics_page import GateCounters, LoadCosts
from kvpool.index.follow.pool_reconciler import MAX_KEYS_PER_S, PoolReconciler
from kvpool.index.front.placer import RESERVE_S
from kvpool.index.prompt import NO_BLOCKS, Load, Prompt, Session
from kvpool.key.hashing import seed_id

MODEL = "agents"
DEVICE, NEAR, POOL = "GPU", "CPU", "STORAGE"  # media of KV events
KEPT_BATCHES = 10_000  # by a publisher, for replays: vLLM's default
PUBLISHER = Publisher(0, "tcp://127.0.0.1:1", "tcp://127.0.0.1:2")  # nobody dials them
RECONCILE_TIMEOUT_S = 120.0


def _removed(hashes: Sequence[int], medium: str) -> dict[str, Any]:
    return {
        "type": "BlockRemoved",
        "block_hashes": hashes,
        "medium": medium,
        "group_idx": 0,
        **_owner(medium),
    }


def _owner(medium: str) -> dict[str, str]:
    return {"ownership": "kvpool"} if medium == NEAR else {}


class EventLog:
    """A worker's batches, as its publisher numbers and keeps them."""

    def __init__(self, traffic: Traffic) -> None:
        self._hashes, self._block_tokens = traffic.hashes, traffic.block_tokens
        self._next = 0
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT_BATCHES)

    def write(
        self, at_s: float, medium: str, stored: Sequence[int], removed: Sequence[int], after: int | None
    ) -> tuple[int, bytes]:
        events: list[dict[str, Any]] = []
        if removed:
            events.append(_removed(self._of(removed), medium))
        if stored:
            parent = None if after is None else int(self._hashes[after])
            events.append(
                {
                    "type": "BlockStored", "block_hashes": self._of(stored), "parent_block_hash": parent,
                    "token_ids": [], "block_size": self._block_tokens, "lora_id": None, "medium": medium,
                    "lora_name": None, "group_idx": 0, "kv_cache_spec_kind": "full_attention", **_owner(medium),
                }
            )  # fmt: skip
        batch = self._next, msgpack.packb([at_s, events, 0])
        self._next += 1
        self.kept.append(batch)
        return batch

    def _of(self, blocks: Sequence[int]) -> list[int]:
        hashes: list[int] = self._hashes[list(blocks)].tolist()
        return hashes


class RealIndex:
    """``namespace``: of the workers' pool, 32 hex digits; empty: they have none. ``nears``: of each worker, the near
    pool of its host, alike; absent: none. ``capacity_tokens``: of each one's KV cache. ``costs``: None: the
    router's own.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        traffic: Traffic,
        namespace: str,
        nears: Mapping[str, str],
        capacity_tokens: int,
        costs: Costs | None = None,
    ) -> None:
        self._nears = nears
        self._clock, self._traffic, self._capacity_tokens = clock, traffic, capacity_tokens
        self._namespace = namespace
        self._fleet = Fleet(clock=clock)
        self._router = Router(self._fleet, costs=costs, clock=clock)
        self._sequences: dict[str, BatchSequence] = {}
        self._costs: dict[str, LoadCosts] = {}
        self._starts = 0

    def join(self, name: str, kept: Iterable[tuple[int, bytes]]) -> None:
        """A worker has started, or is found, with the batches that it still has."""
        self._starts += 1
        worker = Worker(
            name, MODEL, self._traffic.block_tokens, seed_id(None), (PUBLISHER,),
            incarnation=str(self._starts), namespace=self._namespace, near=self._nears.get(name, ""),
        )  # fmt: skip
        self._fleet.add(worker, "call")
        rank = self._fleet.rank(worker.id, 0)
        assert rank is not None
        sequence = self._sequences[name] = BatchSequence(rank, can_replay=True)
        self._costs[name] = LoadCosts()
        self._router.loads.size(worker.id, 0, self._capacity_tokens)
        for number, payload in kept:
            sequence.replayed(number, payload)
        sequence.replay_ended()

    def leave(self, name: str) -> None:
        self._fleet.remove(f"{TENANT}/{name}")
        self._sequences.pop(name).close()

    def tell(self, name: str, batch: tuple[int, bytes]) -> None:
        if (sequence := self._sequences.get(name)) is not None:
            sequence.live(*batch)

    def pool_lost(self, blocks: Sequence[int]) -> None:
        """The pool has evicted them, and its server's notices say so."""
        batch = msgpack.packb([0.0, [_removed(self._traffic.hashes[list(blocks)].tolist(), POOL)], None])
        for pool in self._fleet.pools():
            pool.table.apply(pool.holder, batch, pool=pool.holder)

    def learn_pool(self, pool: RealPool) -> None:
        """What the pool has, as after a start. Blocks for a round. Errors: ``KVPoolError``."""
        reconciler = PoolReconciler(self._fleet, pool.store, keys_per_s=MAX_KEYS_PER_S)
        try:
            ends_s = time.monotonic() + RECONCILE_TIMEOUT_S
            while not reconciler.totals().rounds:
                if time.monotonic() > ends_s:
                    raise KVPoolError(f"the pool was not listed within {RECONCILE_TIMEOUT_S:g} s")
                time.sleep(0.01)
        finally:
            reconciler.close()

    def place(
        self, turn: Turn, engines: Iterable[Engine], *, by_blocks: bool, by_session: bool
    ) -> tuple[str, str]:
        """The worker's name, and the reservation, for ``release``. ``engines``: their gauges count."""
        for engine in engines:
            self._read(engine)
        hashes = self._traffic.hashes[turn.blocks].tobytes() if by_blocks and len(turn.blocks) else NO_BLOCKS
        ranking = self._router.rank(
            Prompt(MODEL, hashes64=hashes), limit=1, reserve_s=RESERVE_S, prompt_tokens=turn.tokens,
            session=Session.of(TENANT, MODEL, f"{turn.session}") if by_session else None, until_computed=True,
        )  # fmt: skip
        return ranking.unpack().picks[0].worker, ranking.reservation

    def release(self, reservation: str) -> None:
        if reservation:
            self._router.release(TENANT, reservation)

    def _read(self, engine: Engine) -> None:
        id_, look, moved = f"{TENANT}/{engine.name}", engine.look(), engine.moved
        load = Load(engine.name, 0, look.running, look.waiting, None, look.usage)
        self._router.loads.scrape(id_, load, asleep=False)
        cost = self._costs[engine.name]
        counters = GateCounters(
            moved.load_tokens,
            moved.load_s,
            moved.prefill_tokens,
            moved.prefill_s,
            moved.near_tokens,
            moved.near_s,
        )
        cost.update(counters, self._clock())
        if self._namespace:  # else it has no connector, whose cost gate measures
            self._router.loads.measure(id_, 0, cost.pool, cost.near, cost.speed)
