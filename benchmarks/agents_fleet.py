"""``simulate``: agents' sessions on a fleet of scripted engines, placed by one policy. Simulated time; one thread.

A disturbance comes when half of the turns have come. ``kills``: the busiest worker goes with its memory, and the index
with all it knows. Callers ask again. Until the index is back, which then asks workers for replays and lists the pool,
turns go round. ``far killed``: the pool's server is killed, and stays away. ``far slow``: all ways to it are slow from
then on.
"""

from __future__ import annotations

import signal
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.agents_engine import Engine, Job
from benchmarks.agents_index import DEVICE, NEAR, POOL, RealIndex
from benchmarks.agents_model import LINK_NBYTES_S, SLOW_NBYTES_S, EngineModel
from benchmarks.agents_pool import Held, HostPool, RealPool
from benchmarks.agents_traffic import Traffic, Turn
from benchmarks.agents_turns import SimulatedTurns
from benchmarks.contest import percentile
from benchmarks.valkey_shards import ValkeyShards
from kvpool.store import open_store

INDEX_AWAY_S = 10.0

Disturbance = Literal["kills", "far killed", "far slow"]


@dataclass(frozen=True)
class Policy:
    """``places``: by turns, by load, or by load and blocks. ``sessions``: it is told which turns follow each other.
    ``has_near``: each host has a near pool before the fleet's.
    """

    name: str
    has_pool: bool
    places: Literal["turns", "load", "blocks"]
    sessions: bool = False
    has_near: bool = False


@dataclass(frozen=True)
class Pools:
    """``pool_nbytes``: of the fleet's; None: all fits. ``near_nbytes``: of each host's, for its ``host_workers``."""

    pool_nbytes: int | None
    near_nbytes: int
    host_workers: int


POLICIES = (
    Policy("none", False, "turns"),
    Policy("pool", True, "turns"),
    Policy("load", True, "load"),
    Policy("precise", False, "blocks"),
    Policy("kvpool", True, "blocks", sessions=True),
    Policy("near", True, "blocks", sessions=True, has_near=True),
)


@dataclass(frozen=True)
class Row:
    """One run. ``hits_of_ideal``: leading blocks from device or pool, over those that one endless cache would have
    given; ``hit_rate``: over all asked for, ``pool_hits`` of them from a pool: ``near_hits`` from the host's,
    ``far_hits`` from the fleet's. ``moved_gb``: from the fleet's, ``stored_gb``: into it, ``network_gb``: both.
    ``duplicate_gb``: in device memory beside the first copy, as a turn comes, on average. ``sessions_moved``: with
    turns on several workers, in all ``moves`` times; None: requests of no session. ``failed``: turns whose worker died
    under them.
    """

    policy: str
    workers: int
    turns: int
    hits_of_ideal: float
    hit_rate: float
    pool_hits: float
    near_hits: float
    far_hits: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    moved_gb: float
    stored_gb: float
    network_gb: float
    duplicate_gb: float
    sessions_moved: int | None
    moves: int | None
    failed: int
    simulated_s: float


def simulate(
    policy: Policy,
    workers: int,
    traffic: Traffic,
    model: EngineModel,
    *,
    server: str,
    folder: Path,
    pools: Pools,
    disturbance: Disturbance | None = None,
    ended: Callable[[], None] = lambda: None,
) -> Row:
    """Starts a Valkey server if there is a pool. ``ended``: called after each turn. Errors: ``KVPoolError``."""
    with ExitStack() as parts:
        pool, shard = None, None
        if policy.has_pool:
            shard = parts.enter_context(ValkeyShards(server, folder, shards=1, io_threads=1))
            most_blocks = None if pools.pool_nbytes is None else pools.pool_nbytes // model.block_nbytes
            pool = RealPool(parts.enter_context(open_store(shard.url)), traffic, most_blocks)
        fleet = _Fleet(policy, workers, traffic, model, pools, pool, shard, disturbance, ended)
        return fleet.run()


class _Fleet(SimulatedTurns):
    def __init__(
        self,
        policy: Policy,
        workers: int,
        traffic: Traffic,
        model: EngineModel,
        pools: Pools,
        pool: RealPool | None,
        shard: ValkeyShards | None,
        disturbance: Disturbance | None,
        ended: Callable[[], None],
    ) -> None:
        super().__init__(workers, traffic)
        self._policy, self._model, self._pool = policy, model, pool
        self._shard, self._disturbance, self._told_of_end = shard, disturbance, ended
        self._link_nbytes_s = LINK_NBYTES_S
        hosts: dict[int, HostPool] = {}
        if pool is not None:
            for host in range(-(-workers // pools.host_workers)):
                near = Held(pools.near_nbytes // model.block_nbytes) if policy.has_near else None
                hosts[host] = HostPool(near, pool)
        host_of = {name: at // pools.host_workers for at, name in enumerate(self.names)}
        self._pool_of = {name: hosts.get(host) for name, host in host_of.items()}
        self._nears = {name: f"{host:032x}" for name, host in host_of.items()} if policy.has_near else {}
        self._index: RealIndex | None = None
        if policy.places != "turns":
            self._index = self._new_index()
        self._gone: list[Engine] = []
        for name in self.names:
            self.start(name)
        self._turn = 0
        self._reservations: dict[Job, str] = {}
        self._copies = [0] * len(traffic.hashes)
        self._duplicates, self._duplicates_seen = 0, 0
        self._failed = self._asked = self._near = self._far = 0

    def run(self) -> Row:
        self.play()
        block_gb = self._model.block_nbytes / 1e9
        moved = [engine.moved for engine in (*self._gone, *self.engines.values())]
        moved_gb, stored_gb = (
            sum(blocks) * block_gb
            for blocks in zip(*((one.loaded_blocks, one.put_blocks) for one in moved), strict=True)
        )
        ttfts = sorted(self.ttfts)
        are_sessions = self.traffic.are_sessions
        return Row(
            policy=self._policy.name,
            workers=len(self.names),
            turns=len(ttfts),
            hits_of_ideal=self.hits / max(1, self.ideal),
            hit_rate=self.hits / max(1, self._asked),
            pool_hits=(self._near + self._far) / max(1, self._asked),
            near_hits=self._near / max(1, self._asked),
            far_hits=self._far / max(1, self._asked),
            ttft_p50_s=statistics.median(ttfts),
            ttft_p90_s=percentile(ttfts, 0.9),
            ttft_p99_s=percentile(ttfts, 0.99),
            moved_gb=moved_gb,
            stored_gb=stored_gb,
            network_gb=moved_gb + stored_gb,
            duplicate_gb=self._duplicates_seen / self.came * block_gb,
            sessions_moved=len(self.moves) if are_sessions else None,
            moves=self.moves.total() if are_sessions else None,
            failed=self._failed,
            simulated_s=self.clock(),
        )

    # ---- turns

    def come(self, turn: Turn) -> None:
        self._duplicates_seen += self._duplicates
        self._asked += len(turn.blocks)
        super().come(turn)

    def place(self, job: Job) -> str:
        if self._index is not None:
            name, self._reservations[job] = self._index.place(
                job.turn, self.engines.values(), by_blocks=self._policy.places == "blocks",
                by_session=self._policy.sessions and self.traffic.are_sessions,
            )  # fmt: skip
            return name
        while True:
            name = self.names[self._turn % len(self.names)]
            self._turn += 1
            if name in self.engines:
                return name

    def left(self, job: Job, name: str) -> None:
        if (reservation := self._reservations.pop(job, None)) is not None and self._index is not None:
            self._index.release(reservation)

    def ended(self, engine: Engine, job: Job) -> None:
        self._near += job.near
        self._far += job.far
        super().ended(engine, job)
        self._told_of_end()

    # ---- what engines tell

    def changed(
        self, engine: Engine, stored: Sequence[int], evicted: Sequence[int], after: int | None
    ) -> None:
        copies = self._copies
        for block in stored:
            self._duplicates += copies[block] > 0
            copies[block] += 1
        self._forget(evicted)
        self._tell(engine, DEVICE, stored, evicted, after)

    def put(self, engine: Engine, stored: Sequence[int]) -> None:
        self._tell(engine, POOL, stored, (), None)

    def near_changed(self, engine: Engine, stored: Sequence[int], evicted: Sequence[int]) -> None:
        """Told at once; a real engine lists its near pool every 5 s."""
        self._tell(engine, NEAR, stored, evicted, None)

    def far_evicted(self, blocks: Sequence[int]) -> None:
        if self._index is not None and self._policy.places == "blocks":
            self._index.pool_lost(blocks)

    def _tell(
        self, engine: Engine, medium: str, stored: Sequence[int], removed: Sequence[int], after: int | None
    ) -> None:
        if self._policy.places != "blocks":
            return
        batch = self.logs[engine.name].write(self.clock(), medium, stored, removed, after)
        if self._index is not None:
            self._index.tell(engine.name, batch)

    def _forget(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._copies[block] -= 1
            self._duplicates -= self._copies[block] > 0

    # ---- what dies

    def new_engine(self, name: str) -> Engine:
        engine = Engine(name, self._model, self.clock, self._pool_of[name], self)
        engine.slow_far(self._link_nbytes_s)
        if self._index is not None:
            self._index.join(name, ())
        return engine

    def half_came(self) -> None:
        if self._disturbance == "kills":
            self._kill()
        elif self._disturbance == "far slow":
            self._link_nbytes_s = SLOW_NBYTES_S
            for engine in self.engines.values():
                engine.slow_far(SLOW_NBYTES_S)
        elif self._disturbance and self._pool is not None and self._shard is not None:
            self._pool.die()
            self._shard.signal(signal.SIGKILL)
            for engine in self.engines.values():
                engine.lose_far()

    def _kill(self) -> None:
        index, self._index = self._index, None
        before = len(self.at)
        engine = self.kill_busiest()
        self._failed += before - len(self.at)
        self._gone.append(engine)
        self._forget(engine.cache.held())
        if index is not None:
            self.clock.after(INDEX_AWAY_S, self._index_again)

    def _new_index(self) -> RealIndex:
        capacity_tokens = self._model.blocks * self._model.block_tokens
        namespace = self._pool.namespace.hex if self._pool else ""
        return RealIndex(self.clock, self.traffic, namespace, self._nears, capacity_tokens)

    def _index_again(self) -> None:
        self._index = self._new_index()
        for name in self.engines:
            self._index.join(name, self.logs[name].kept)
        if self._pool is not None and self._policy.places == "blocks":
            self._index.learn_pool(self._pool)
