"""Engines whose model is a script, everything else of them real: vLLM's scheduler and its block pool, both halves of
the connector, one worker half a rank; and a store that is slow, wrong or gone when it is told to.

Over 400 lines because it is one scripted engine.

What the model "computes" for a token is a number that depends on its weights and on every token before it, so bytes of
other weights, another block, rank, layer or request are noticed where they are read. Time is simulated and nothing runs
beside the caller: a run is the same each time, and minutes of a pool that is away take milliseconds.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import pickle
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlockCopy,
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvpool import _native
from kvpool.errors import StoreUnavailable
from kvpool.key.key import parse_key
from kvpool.metrics import Samples, add_samples
from kvpool.store.batch import WRITER_NBYTES
from kvpool.transfer import BlockCopier
from kvpool.vllm import KVPoolConnector, KVPoolTier
from kvpool.vllm.audit.audits import Audited
from kvpool.vllm.engine import internals
from kvpool.vllm.plan import PoolMetadata
from tests.support.clock import Clock
from tests.support.devices import SlowDevice
from tests.support.memory_store import MemoryStore
from tests.support.scripted_store import NoDocuments, SelfMoving

BLOCK_TOKENS = 4
HEADS = 4  # of a model whose blocks are cut by heads, one in each part
WINDOW = 9  # tokens; blocks outside of it go back to the engine while the request runs
SMALL_BLOCK_TOKENS, SMALL_WINDOW = 2, 3  # of which hits need the last in front of each end only
POOLED_TOKENS = 2  # that a layer compresses to one; a ring keeps those that are not yet so many
REFILLED_WINDOW = 8  # whole blocks
LAYERS = 2
ELEMENT = "float32"  # two of a token's number, to audits
DEVICE_BLOCKS = 26  # of two groups
# Two steps under way are 24 small blocks, or 12 of a window that is filled again.
MORE_BLOCKS = {"states": 12, "small": 24, "ring": 6, "refilled": 16}
MAX_TOKENS = 64
MAX_DRAFTS = 3
BUDGET_S = 0.2
MAX_LOAD_S = 2.0
VOCABULARY = 50
STEP_S = 0.01
LONG_S = 40.0  # of simulated time: by then whatever is under way has ended, however badly
_MODULUS = (1 << 61) - 1
_GARBAGE = b"\xee"
MIXED = -7  # what is computed of the weights and of blocks that are of other ones: it belongs nowhere
TENSORS, WEIGHTS_AT = 12, 10  # of a rank's model, and the place of the one that has the weights


class Text:
    """A prompt and what the model says to it; for each token the number that its KV consists of."""

    def __init__(self, prompt: Sequence[int], weights: int) -> None:
        self.tokens: list[int] = []
        self.weights = weights
        self.values = np.zeros(MAX_TOKENS + MAX_DRAFTS + 1, np.int64)
        for token in prompt:
            self._append(token)
        self.prompt_tokens = self.said_tokens = len(prompt)
        self.mixed = False  # computed on blocks of other weights

    def begin_anew(self, weights: int) -> None:
        """All that was said is computed once more, of these weights."""
        said, self.tokens, self.weights, self.mixed = self.tokens[: self.said_tokens], [], weights, False
        for token in said:
            self._append(token)

    def _append(self, token: int) -> None:
        at = len(self.tokens)
        self.values[at] = _value(int(self.values[at - 1]) if at else 1 + self.weights, token)
        self.tokens.append(token)

    def grow(self, tokens: int) -> None:
        while len(self.tokens) < tokens:
            self._append(int(self.values[len(self.tokens) - 1]) % VOCABULARY)


def _value(before: int, token: int) -> int:
    return (before * 1_000_003 + token + 1) % _MODULUS


# ---------------------------------------------------------------------- the store


class World:
    """One pool, the clients that are connected to it, and the numbers of the tokens under each record's hash."""

    def __init__(self, seed: int, capacity_nbytes: int) -> None:
        self.clock = Clock()
        self.random = random.Random(seed)
        self.records = MemoryStore(capacity_nbytes)
        self.parents: dict[bytes, bytes | None] = {}  # by a record's hash: that of the one before it
        self.values: dict[
            tuple[int, bytes], np.ndarray
        ] = {}  # by weights and hash: of all tokens up to its end
        self.shape = Shape()  # of the engines
        self.weights: dict[bytes, int] = {}  # of which the blocks in a namespace are, by its fingerprint
        self.newest_weights = 0
        self.halves: dict[
            tuple[int, ...], int
        ] = {}  # numbers of weights of which not all ranks have the same
        self.doubtful: set[str] | None = None  # what may be wrong of what is stored; None: nothing may
        self.is_honest = True  # nothing wrong was ever in the pool
        self.engines = 0  # that were started
        self.batches: list[_Batch] = []
        self.put: set[str] = set()
        self.reachable = True
        # This pool stands for the one that is configured, and simulated time for the real one.
        self._patch = pytest.MonkeyPatch()
        for kind in (KVPoolConnector, KVPoolTier):
            self._patch.setattr(kind, "clock", self.clock)
        # The names of epochs, by which records are sorted, are the same each time, or no life could be replayed.
        names = SimpleNamespace(token_hex=lambda nbytes: self.random.randbytes(nbytes).hex())
        for module in ("kvpool.vllm.engine.namespace", "kvpool.vllm.tier"):
            self._patch.setattr(f"{module}.secrets", names)
        for module in ("kvpool.vllm.connector", "kvpool.vllm.worker"):
            self._patch.setattr(f"{module}.open_store", self._open_store)
        self._patch.setattr("kvpool.vllm.engine.parts.MIN_PART_NBYTES", 1)
        # Nothing runs beside the caller.
        self._patch.setattr("kvpool.transfer.audit.ThreadPoolExecutor", AtOnce)
        self._patch.setattr("kvpool.vllm.audit.floor.LEAST_PAIRS", 0)  # equal bytes are at no distance
        self._patch.setattr("kvpool.vllm.worker.start_thread", lambda thread: thread.run())
        self._patch.setattr("kvpool.vllm.worker.WorkerHalf._begin_announcing", lambda worker, namespace: None)

    def _open_store(
        self, url: str, *, threads: int, opened_by: str = "", must_answer: bool = True
    ) -> TroubledStore:
        if not self.reachable:
            raise StoreUnavailable("this rank does not reach the pool")
        return TroubledStore(self)

    def pass_time(self, seconds: float) -> None:
        """Let batches end when they are due, in order."""
        until_s = self.clock.now_s + seconds
        while due := [batch for batch in self.batches if batch.due_s <= until_s]:
            first = min(due, key=lambda batch: batch.due_s)
            self.clock.now_s = max(self.clock.now_s, first.due_s)
            self.batches.remove(first)
            try:
                first.end()
            except BaseException:
                first.answer = bytes([_native.FAULT] * len(first.keys))  # who waits for it goes on
                raise
        self.clock.now_s = until_s

    def is_payload(self, key: str, payload: memoryview) -> bool:
        """Whether this has to be in the record under a key: block by block, layer by layer.

        Behind the end of a tail anything may be.
        """
        _, fingerprint, block_hash, group, rank = parse_key(key)
        values = self.values.get((self.weights[fingerprint], block_hash))
        if values is None:
            return False
        known = len(values) % BLOCK_TOKENS if self.shape.tails else 0
        if self.shape.is_state(group):
            values, known = np.full(BLOCK_TOKENS, values[-1]), BLOCK_TOKENS
        elif known:
            values = np.append(values[-known:], np.zeros(BLOCK_TOKENS - known, np.int64))
        else:
            values = values[-self.shape.record_tokens(group) :]
        start = 0
        for block in values.reshape(-1, self.shape.block_tokens(group)):
            for layer in range(LAYERS):
                right = (block + salt(group, layer, rank)).astype(self.shape.number(group, layer))
                there = np.frombuffer(payload[start : start + right.nbytes], right.dtype)
                if not (there == right)[: known or None].all():
                    return False
                start += right.nbytes
        return start == payload.nbytes

    def lose(self, part: float) -> None:
        """Somebody empties the pool, or a part of it."""
        keys = [block.key for blocks in self.records.scan() for block in blocks]
        self.records.delete_many([key for key in sorted(keys) if self.random.random() < part])

    def close(self) -> None:
        self._patch.undo()
        self.records.close()


class AtOnce:
    """Threads that are done when they are asked."""

    def __init__(self, *arguments: object, **named: object) -> None: ...

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(call(*arguments))
        return done

    def shutdown(self, *, wait: bool, cancel_futures: bool) -> None: ...


STATES = 2  # the group of states


def salt(group: int, layer: int, rank: int) -> int:
    return 1 + layer + 10 * group + 100 * rank


MOODS = ("slow", "stuck", "faulting", "refusing", "losing", "full")


@dataclass
class _Batch:
    """One batch; what it does, it does when it ends, whoever looks."""

    client: TroubledStore
    operation: int
    keys: list[str]
    views: list[memoryview]
    mood: str
    due_s: float
    deadline_s: float
    answer: bytes | None = None
    cancelled: bool = False
    written_by: bytes = b""  # what a read found

    def done(self) -> bool:
        return self.answer is not None

    def wait(self, timeout_s: float) -> bool:
        world = self.client.world
        if not self.done():
            world.pass_time(min(timeout_s, max(0.0, self.due_s - world.clock.now_s)))
        return self.done()

    def cancel(self) -> None:
        if not self.done() and not self.cancelled:
            self.cancelled = True
            if self.mood != "stuck":  # a thread inside the kernel ends when the kernel lets it
                self.due_s = min(self.due_s, self.client.world.clock.now_s + 0.002)

    def given_up(self) -> bool:
        return self.cancelled or self.client.world.clock.now_s >= self.deadline_s

    def writers(self) -> bytes:
        return self.written_by or bytes(WRITER_NBYTES * len(self.keys))

    def results(self) -> bytes:
        assert self.answer is not None
        return self.answer

    def error(self) -> str | None:
        return "made up"

    def end(self) -> None:
        world = self.client.world
        if self.operation == _native.PUT_ABSENT:
            self._check_source()
        if self.cancelled or self.mood in ("faulting", "stuck") or world.clock.now_s >= self.deadline_s:
            self._spoil()
            late = _native.CANCELLED if self.cancelled else _native.TIMED_OUT
            self.answer = bytes([_native.FAULT if self.mood == "faulting" else late] * len(self.keys))
        elif self.operation == _native.PUT_ABSENT:
            there = world.records.touch_many(self.keys)
            new = [place for place, present in enumerate(there) if not present]
            kept = dict.fromkeys(range(len(self.keys)), _native.PRESENT)
            if self.mood == "full":
                kept |= dict.fromkeys(new, _native.NO_ROOM)
            else:
                world.records.writer = self.client.writer
                ended = world.records.put_many([self.keys[at] for at in new], [self.views[at] for at in new])
                kept |= {at: _native.OK if ok else _native.NO_ROOM for at, ok in zip(new, ended, strict=True)}
                world.put.update(self.keys[at] for at in new if kept[at] == _native.OK)
            self.answer = bytes(kept.values())
        elif self.operation == _native.DELETE:
            world.records.delete_many(self.keys)
            self.answer = bytes([_native.OK] * len(self.keys))
        else:
            if self.mood == "losing" and self.operation == _native.GET:
                world.records.delete_many([key for key in self.keys if world.random.random() < 0.5])
            if self.operation == _native.GET:
                got = world.records.submit_get(self.keys, self.views, timeout_s=1)
                found, self.written_by = got.wait(), b"".join(got.writers())
            else:
                found = world.records.touch_many(self.keys)
            self.answer = bytes(_native.OK if ok else _native.MISS for ok in found)

    def _check_source(self) -> None:
        """Whoever sends a buffer must leave it alone until the batch has ended, also if nobody waits for it."""
        world = self.client.world
        for key, view in zip(self.keys, self.views, strict=True):
            if not world.is_payload(key, view):
                assert world.doubtful is not None, f"a buffer changed while it was sent: {key}"
                world.doubtful.add(key)

    def _spoil(self) -> None:
        """Who did not end well may have written anything."""
        if self.operation == _native.GET:
            for view in self.views:
                view[:] = _GARBAGE * view.nbytes


class TroubledStore(SelfMoving):
    """A client of the world's pool, in a mood that is good until it is told otherwise."""

    def __init__(self, world: World) -> None:
        super().__init__("troubled", NoDocuments())
        self.world, self.clock = world, world.clock.monotonic
        self.be("good", 0)

    def be(self, mood: str, seconds: float) -> None:
        """In this mood for so long, and good again then."""
        self._mood, self._until_s = mood, self.world.clock.now_s + seconds

    @property
    def mood(self) -> str:
        return self._mood if self.world.clock.now_s < self._until_s else "good"

    def begin(self, op: int, keys: Sequence[str], views: Sequence[Any] | None, timeout_s: float) -> _Batch:
        if self.mood == "refusing":
            raise StoreUnavailable("the pool is away")
        now_s, draw = self.world.clock.now_s, self.world.random
        deadline_s = now_s + timeout_s
        due_s = now_s + draw.choice((0.0, 0.001, 0.02))
        if self.mood == "slow":
            due_s = min(deadline_s, now_s + draw.random() * 2 * timeout_s)
        elif self.mood == "late":
            due_s = now_s + timeout_s / 2
        elif self.mood == "stuck":
            due_s = deadline_s + draw.random() * 3
        batch = _Batch(self, op, list(keys), list(views or ()), self.mood, due_s, deadline_s)
        self.world.batches.append(batch)
        self.world.pass_time(0)
        return batch

    def under_way(self) -> list[_Batch]:
        return [batch for batch in self.world.batches if batch.client is self]

    def _close(self) -> None:
        for batch in self.under_way():
            batch.cancel()
        while batches := self.under_way():
            batches[0].wait(LONG_S)


# ---------------------------------------------------------------------- the engine


class LateDevice(SlowDevice):
    """A device whose copies end in some later step; the engine's stream is the caller."""

    def __init__(self) -> None:
        super().__init__(1 << 16)
        self.halted = False

    def follow(self, event: Any) -> None:
        """What is computed from here on comes after all copies."""
        self.go_on()


@dataclass
class Rank:
    """One worker: its KV cache and its half of the connector."""

    index: int
    caches: dict[str, torch.Tensor]
    numbers: list[list[np.ndarray]]  # the same memory, by group and layer, head by head
    connector: KVPoolConnector
    loading: dict[str, set[tuple[int, int]]] = field(default_factory=dict)  # request: (group, block)
    fault: str = ""  # what is to go wrong once: "gather" or "scatter"
    device: LateDevice | None = None
    is_away: bool = False  # the memory of its KV cache

    @property
    def store(self) -> TroubledStore | None:
        assert self.connector._worker is not None
        store = self.connector._worker._store
        assert store is None or isinstance(store, TroubledStore)
        return store


@dataclass
class Running:
    """What a model runner keeps of a request."""

    text: Text
    tables: list[list[int]]
    tokens: int  # of the prompt, and those that were sampled
    computed: int  # of them; what is planned ahead counts drafts as accepted
    drafts: list[int] = field(default_factory=list)  # of the next step
    replay_start: int = (
        0  # from here on it is computed again, so far as the window that is filled again reaches
    )
    written: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # by this step, drafts with it


@dataclass
class Shape:
    """How an engine is set up; engines of one world are set up alike."""

    ranks: int = 1  # all stages together
    overlapping: bool = False
    windowed: bool = False
    slots: int = 6
    blocks_per_record: int = 1
    latent: bool = False  # the first group is MLA, of which every rank holds the same bytes
    drafts: int = 0  # tokens that are guessed ahead in each step, some of them wrong
    stages: int = 1  # of a pipeline, each with LAYERS layers of its own
    late: bool = False  # copies end in a later step
    states: bool = False  # a third group, of recurrent layers; the second is of full attention, or windowed
    small: bool = False  # a second group, of latent vectors in small blocks with a small window
    indexed: bool = False  # the last layer of the first group is an indexer, whose rows are shorter
    tails: bool = False  # hits end inside of blocks, too; with states
    ring: bool = False  # a second group, of a ring; behind it one of states, or of full attention
    refilled: bool = False  # before them all a window of latent vectors that is filled again behind a hit
    cut: bool = False  # by heads, so that engines of other numbers of ranks share; of these it has HEADS
    audited: bool = False  # each hit whose last block is one to compare

    @property
    def heads(self) -> int:
        """That a rank has; each is as a layer of its own, to what is checked."""
        return HEADS // self.ranks if self.cut else 1

    @property
    def first(self) -> int:
        """The first group in the pool."""
        return int(self.refilled)

    @property
    def ring_group(self) -> int:
        return self.first + 1

    def block_tokens(self, group: int) -> int:
        if self.is_ring(group):
            return POOLED_TOKENS * -(-(POOLED_TOKENS + self.drafts) // POOLED_TOKENS)
        return SMALL_BLOCK_TOKENS if self.small and group == 1 else BLOCK_TOKENS

    def record_tokens(self, group: int) -> int:
        return self.block_tokens(group) * (1 if self.is_state(group) else self.blocks_per_record)

    def is_state(self, group: int) -> bool:
        return self.states and group == STATES

    def is_ring(self, group: int) -> bool:
        return self.ring and group == self.ring_group

    def is_scratch(self, group: int) -> bool:
        return self.is_ring(group) or group < self.first

    @property
    def align_tokens(self) -> int:
        """Where the engine's hits end."""
        return math.lcm(BLOCK_TOKENS, self.block_tokens(self.ring_group))

    @property
    def hash_tokens(self) -> int:
        return SMALL_BLOCK_TOKENS if self.small or self.tails else BLOCK_TOKENS

    @property
    def device_blocks(self) -> int:
        """So few that requests are preempted, and enough for each by itself."""
        return DEVICE_BLOCKS + sum(more for name, more in MORE_BLOCKS.items() if getattr(self, name))

    def number(self, group: int, layer: int) -> type[np.integer[Any]]:
        """What a layer has of a token."""
        return np.int32 if self.indexed and group == self.first and layer == LAYERS - 1 else np.int64

    def window(self, group: int) -> int | None:
        if self.is_state(group):
            return 2
        if group < self.first:
            return REFILLED_WINDOW
        if group == 1 and (self.small or self.windowed):
            return SMALL_WINDOW if self.small else WINDOW
        return None

    @property
    def stage_ranks(self) -> int:
        return self.ranks // self.stages

    def part(self, group: int, rank: int) -> int:
        """The number under which the pool has what a rank holds of a group."""
        return rank // self.stage_ranks if self.latent and (group == self.first or self.small) else rank

    def parts(self, group: int) -> int:
        return HEADS if self.cut else self.part(group, self.ranks - 1) + 1

    def salt(self, group: int, layer: int, rank: int) -> int:
        """``layer``: of ``Rank.numbers``."""
        if self.cut:
            layer, head = divmod(layer, self.heads)
            return salt(group, layer, rank * self.heads + head)
        return salt(group, layer, self.part(group, rank))


class ScriptedEngine:
    """One engine on the world's pool. Whatever kvpool promises is checked where it could be broken."""

    def __init__(
        self, world: World, config: VllmConfig, shape: Shape, without_pool: int | None = None
    ) -> None:
        self.world, self.shape, self.config = world, shape, config
        world.shape = shape
        world.engines += 1
        config.kv_transfer_config.engine_id = f"engine {world.engines}"
        self.held = [0] * shape.ranks  # weights, by rank
        self.memory = 0  # of its weights, what blocks do not depend on
        self.mixed: int | None = None  # weights of which it has blocks beside its own; None: it has none
        self.silent: int | None = None  # weights that it had before a change that nothing has shown yet
        self.is_asleep = False  # as the executor says, which does not hear of a call to the workers alone
        self.weights_away = False
        self.touched: set[str] = set()  # memory that was away; what is raised at that, kvpool keeps to itself
        self.told: Callable[[str], None]  # of calls that may write weights
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvpool.vllm.engine.internals.watch_engine_calls", self._watch_calls)
            self._start(without_pool)

    def _watch_calls(self, told: Callable[[str], None], named: Callable[[str], None]) -> Callable[[], bool]:
        self.told = told
        return lambda: self.is_asleep

    @property
    def weights(self) -> int:
        """What it computes with, all ranks together."""
        if len(set(self.held)) == 1:
            return self.held[0]
        return self.world.halves.setdefault(tuple(self.held), -1 - len(self.world.halves))

    @weights.setter
    def weights(self, weights: int) -> None:
        self.held = [weights] * self.shape.ranks

    def _tensors(self, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
        if self.weights_away:
            self.touched.add("weights")
        for place in range(TENSORS):
            held = [self.held[rank], self.memory] if place == WEIGHTS_AT else []
            yield f"layer{place}", torch.tensor([place, *held])

    def _start(self, without_pool: int | None) -> None:
        kind = AsyncScheduler if self.shape.overlapping else Scheduler
        self.scheduler = kind(
            self.config,
            generate_scheduler_kv_cache_config([cache_config(self.shape, stage=0)]),
            StructuredOutputManager(self.config),
            block_size=self.shape.align_tokens,
            hash_block_size=self.shape.hash_tokens,
            log_stats=False,
        )
        if self.shape.refilled:  # only these workers fill a window again
            self.scheduler.use_v2_model_runner = True
        self.connector = self.scheduler.connector
        assert isinstance(self.connector, KVPoolConnector)
        assert self.connector._scheduler is not None
        self.planner = self.connector._scheduler
        self.planner.stats = dict  # type: ignore[method-assign]  # what is counted is for ``counters``
        self.stores = self.planner._store_planner
        self._watch_offers()
        self._watch_audits()
        self.ranks = [self._rank(index, index == without_pool) for index in range(self.shape.ranks)]
        self.aggregator = KVOutputAggregator(self.shape.ranks)
        self.queue: deque[list[Any]] = deque()  # [what was planned, what came out of it or None], oldest last
        self.texts: dict[str, Text] = {}
        self.running: dict[str, Running] = {}
        self.failed: set[str] = set()
        self.steps = 0
        self.loads = self.loads_failed = self.hits = self.begun_inside = self.starved = 0
        self.accepted = self.rejected = 0
        self.tags: dict[int, tuple[bytes, int]] = {}  # hash and group of what was to be stored
        self.dropped: set[tuple[bytes, int]] = set()  # of it, what a rank has dropped
        self.stored_again = 0
        self.verdicts: Counter[str] = Counter()
        self._hashed: dict[str, int] = {}

    def _rank(self, index: int, without_pool: bool) -> Rank:
        stage, of_stage = divmod(index, self.shape.stage_ranks)
        cache = cache_config(self.shape, stage)
        tensors = {
            name: torch.from_numpy(
                np.zeros(
                    (cache.num_blocks, self.shape.heads, self.shape.block_tokens(group), 1),
                    self.shape.number(group, layer),
                )
            )
            for group, one in enumerate(cache.kv_cache_groups)
            for layer, name in enumerate(one.layer_names)
        }
        numbers = [
            [
                tensors[name].numpy()[:, head, :, 0]
                for name in group.layer_names
                for head in range(self.shape.heads)
            ]
            for group in cache.kv_cache_groups
        ]
        engine = self

        class Watched(BlockCopier):
            """Moves bytes as ever, after a look at whose blocks they are. To audits these are numbers."""

            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                self.pieces = [(ELEMENT, nbytes) for _, nbytes in self.pieces]

            def gather(self, block_ids: Sequence[int], *rest: Any) -> None:
                engine._touch(rank, "gather")
                engine._stumble(rank, "gather")
                super().gather(block_ids, *rest)

            def scatter(self, block_ids: Sequence[int], *rest: Any) -> None:
                engine._touch(rank, "scatter")
                engine._stumble(rank, "scatter")
                engine._check_scatter(rank, block_ids)
                super().scatter(block_ids, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "kvpool.vllm.engine.internals.get_pp_group", lambda: SimpleNamespace(rank_in_group=stage)
            )
            tensor_parallel = SimpleNamespace(rank_in_group=of_stage)
            patch.setattr("kvpool.vllm.engine.internals.get_tp_group", lambda: tensor_parallel)
            patch.setattr("kvpool.vllm.worker.BlockCopier", Watched)
            device = LateDevice() if self.shape.late else None
            if device is not None:
                patch.setattr("kvpool.transfer.kv_cache.device_of", lambda _: device)
            connector = KVPoolConnector(self.config, KVConnectorRole.WORKER, cache)
            worker = connector._worker
            assert worker is not None
            slot_nbytes = 64 * (-(-self.shape.blocks_per_record * LAYERS * BLOCK_TOKENS * 8 // 64))
            worker._config = worker._config.model_copy(
                update={"staging_nbytes": self.shape.slots * slot_nbytes}
            )
            rank = Rank(index, tensors, numbers, connector, device=device)
            tensors_of = functools.partial(self._tensors, index)
            patch.setattr("kvpool.vllm.engine.internals.model_tensors", lambda: tensors_of)
            self.world.reachable = not without_pool
            connector.register_kv_caches(tensors)
            self.world.reachable = True
        return rank

    # What the engine core does.

    def add(self, name: str, prompt: Sequence[int], max_tokens: int) -> None:
        self.texts[name] = Text(prompt, self.weights if self.mixed is None else self.mixed)
        self.scheduler.add_request(
            Request(
                name,
                list(prompt),
                SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                None,
                block_hasher=get_request_block_hasher(self.shape.hash_tokens, sha256_cbor),
            )
        )

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def live(self) -> list[str]:
        return [name for name, one in self.scheduler.requests.items() if not one.is_finished()]

    def plan(self) -> None:
        """Schedule one more step, unless as many are under way as may overlap."""
        most = max(2 if self.shape.overlapping else 1, self.shape.stages)
        if len(self.queue) < most and self.scheduler.has_requests():
            for request in self.scheduler.requests.values():
                self._learn(request)
            planned = self.scheduler.schedule()
            for new in planned.scheduled_new_reqs:  # the list grows with the request
                new.prefill_token_ids = new.prefill_token_ids and list(new.prefill_token_ids)
            self._check_stores(planned)
            self.queue.appendleft([planned, None])

    def execute(self) -> None:
        """The workers take the oldest step that they have not taken yet."""
        for step in reversed(self.queue):
            if step[1] is None:
                step[1] = self._execute(step[0])
                return

    def take(self) -> None:
        """The scheduler hears what came out of the oldest step."""
        if self.queue and self.queue[-1][1] is not None:
            planned, output = self.queue.pop()
            heard = output.kv_connector_output
            self.failed |= heard.failed_recving or set()
            self.loads += len(heard.finished_recving or ())
            self.loads_failed += len(heard.failed_recving or ())
            if (report := heard.kv_connector_worker_meta) is not None:
                self.dropped.update(self.tags[tag] for tag in report.dropped if tag in self.tags)
            self.scheduler.update_from_output(planned, output)
            if self.shape.drafts and not self.shape.overlapping:  # else the workers keep them to themselves
                names = [name for name in planned.num_scheduled_tokens if name in self.running]
                drafts = [self.running[name].drafts for name in names]
                self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
            for request in self.scheduler.requests.values():
                self._learn(request)

    def step(self) -> None:
        self.steps += 1
        self.plan()
        self.execute()
        self.take()
        self.world.pass_time(STEP_S)
        self.check()

    def drain(self) -> None:
        """Step until nothing is left to do."""
        for _ in range(20_000):
            if not self.queue and not self.scheduler.has_requests():
                return
            if (starving := self._starving()) is not None:
                self.starved += 1
                self.abort(starving)
            self.step()
        raise AssertionError(f"the engine does not come to rest: {self.scheduler.requests}")

    def _starving(self) -> str | None:
        """The request that vLLM 0.32 can never schedule: its load has failed, so its blocks were given back, and those
        that it needs now are held by requests whose loads have ended, which stand behind it in one queue.

        It takes a cache as small as this one, where nothing runs that could end. None: there is none.
        """
        scheduler = self.scheduler
        holding = list(getattr(scheduler, "kv_holding_waiting", ()))
        # An engine that overlaps its steps has one out at any time: such as these compute nothing and copy nothing.
        computes = any(planned.total_num_scheduled_tokens for planned, _ in self.queue)
        if scheduler.running or computes or self.stores._queue._pending or len(holding) < 2:
            return None
        first, *behind = holding
        loaded = scheduler.finished_recving_kv_req_ids
        if any(scheduler.kv_cache_manager.get_block_ids(first.request_id)):
            return None
        return first.request_id if all(one.request_id in loaded for one in behind) else None

    def reset(self, *, running: bool, connector: bool) -> None:
        """``reset_prefix_cache``; vLLM itself refuses to reset running requests while a step is out, or while one that
        loads, or waits after its load, holds blocks."""
        scheduler = self.scheduler
        busy = self.queue or any(
            one not in scheduler.running and any(scheduler.kv_cache_manager.get_block_ids(name))
            for name, one in scheduler.requests.items()
        )
        held = any(pending.unstaged for pending in self.stores._queue._pending.values())
        held |= any(audit.blocks for audit in self.planner._audits._audits.values())
        assert self.queue or not held or self.shape.late, "a block is held"
        self._reset(running and not busy and not held, connector)
        if connector:
            self.dropped.clear()

    def _reset(self, running: bool, connector: bool) -> bool:
        if done := self.scheduler.reset_prefix_cache(running, connector):
            self.mixed = None
            self._begin_anew()
        return done

    def _begin_anew(self) -> None:
        for name in self.live():
            self.texts[name].begin_anew(self.weights)
            self._hashed[name] = 0

    def write_weights(self, weights: int, ranks: Sequence[int] = (), told: str = "update_weights") -> None:
        """Write them over those of some ranks, or of all, whatever runs: as a call does, behind the steps under way.

        ``told``: the method that was called; empty: none.
        """
        while any(output is None for _, output in self.queue):
            self.execute()
        before = self.weights
        for rank in ranks or range(self.shape.ranks):
            self.held[rank] = weights
        if self.weights != before:
            pool = self.scheduler.kv_cache_manager.block_pool
            if internals.is_in_use(pool) or internals.cached_blocks(pool):
                self.mixed = before if self.mixed is None else self.mixed
            else:
                self._begin_anew()
            self.silent = None if told else before
            self.world.is_honest &= bool(told)
            if not told and (namespace := self.planner._namespace.current) is not None:
                self.world.weights.setdefault(namespace.fingerprint, before)
        if told:
            self.told(told)

    def sleep(self, *, drained: bool = True, steps: int = 0) -> None:
        """With the requests aborted, ``steps`` meanwhile, and waking up with empty memory."""
        self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self.fall_asleep(drained=drained)
        for _ in range(steps):
            self.step()
        self.wake_up()
        if not drained:
            self.drain()
            assert self._reset(True, True)

    def fall_asleep(self, *, drained: bool = True) -> None:
        """As ``EngineCore.sleep`` does it, of either level; else the workers' own, whatever is under way.

        vLLM waits for the device before, but not where the KV cache alone is discarded. Here it never does.
        """
        if drained:
            self.scheduler.set_pause_state(PauseState.PAUSED_NEW)
            self.drain()
            assert self._reset(True, True), "vLLM ends the call to sleep with an error"
        while any(output is None for _, output in self.queue):  # its workers are called after these
            self.execute()
        for rank in self.ranks:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(self.world.clock, "sleep", partial(self._wait, rank.device))
                rank.connector.unregister_kv_caches()
            rank.is_away = True
            for cache in rank.caches.values():
                cache.fill_(-1)
        self.weights_away, self.is_asleep = True, drained
        self.told("sleep")

    def wake_up(self) -> None:
        """The KV cache before the weights, where the executor knows of the sleep."""
        self.weights_away = self.is_asleep
        for rank in self.ranks:
            for cache in rank.caches.values():
                cache.fill_(-2)
            rank.is_away = False
            rank.connector.restore_kv_caches()
        if self.is_asleep:
            self.told("wake_up")
            self.step()
        self.weights_away = self.is_asleep = False
        self.told("wake_up")
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _wait(self, device: LateDevice | None, seconds: float) -> None:
        """Somebody waits for the device, which goes on meanwhile."""
        self.world.pass_time(seconds)
        if device is not None and not device.halted:
            device.go_on()

    def load_weights(self, *, seen: bool, reset_before: bool = False, connector: bool = True) -> None:
        """Other weights in place of those that were there, while nothing is to be done; and a reset before or after.

        ``seen``: by ``reload_weights`` of vLLM. ``connector``: the reset after them is one of the connector, too.
        """
        self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self.drain()
        if reset_before:
            assert self._reset(False, True)
        self.world.newest_weights += 1
        self.weights = self.world.newest_weights
        if seen:
            self.told("reload_weights")
        if not reset_before:
            assert self._reset(False, connector)

    def pause(self, seconds: float) -> None:
        """Level 0 with the requests kept: no step for a while."""
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        self.world.pass_time(seconds)
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def shut_down(self) -> None:
        """At once, whatever is under way; afterwards nothing may touch the memory any more."""
        stores = [rank.store for rank in self.ranks] + [self.connector._store]
        for rank in self.ranks:
            rank.connector.shutdown()
            rank.loading.clear()
        self.scheduler.shutdown()
        for store in stores:
            assert store is None or (store._closed and not store.under_way())
        assert not self.planner._requests
        self.world.pass_time(LONG_S)

    def counters(self) -> dict[str, float]:
        """kvpool's own, over both halves."""
        sums: Samples = dict(self.planner.counters.take())
        for rank in self.ranks:
            assert rank.connector._worker is not None
            add_samples(sums, rank.connector._worker.counters.take())
        return {key: len(sample) if isinstance(sample, list) else sample for key, sample in sums.items()}

    # What the workers do.

    def _execute(self, planned: SchedulerOutput) -> ModelRunnerOutput:
        self._update_running(planned)
        names = list(planned.num_scheduled_tokens)
        cached = planned.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in planned.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        outputs: list[ModelRunnerOutput | None] = []
        sampled = []
        for name in names:
            computed[name] = min(computed[name], self.running[name].computed)
            drafted = len(planned.scheduled_spec_decode_tokens.get(name, ()))
            sampled.append(self._sample(name, computed[name], planned.num_scheduled_tokens[name], drafted))
        for rank in self.ranks:
            self._copy(rank, planned.kv_cache_block_copies or ())
            metadata = pickle.loads(pickle.dumps(planned.kv_connector_metadata))  # each process gets its own
            assert isinstance(metadata, PoolMetadata)
            connector = rank.connector
            connector.bind_connector_metadata(metadata)
            first = self.shape.first
            for load in metadata.loads:
                assert not any(self.shape.is_scratch(record.group) for record in load.blocks)
                assert load.request_id not in rank.loading, "one request is loaded twice at a time"
                rank.loading[load.request_id] = {
                    (record.group, block) for record in load.blocks for block in record.block_ids if block
                }
                self.begun_inside += any(
                    0 in record.block_ids for record in load.blocks if record.group == first
                )
            for name in names:
                self.running[name].text.mixed |= self.mixed is not None
                self._forward(rank, name, computed[name], planned.num_scheduled_tokens[name])
            connector.start_load_kv(None)  # type: ignore[arg-type]
            if self.world.random.random() < 0.1:
                connector.start_load_kv(None)  # type: ignore[arg-type]
            self._check_namespace(rank)
            connector.wait_for_save()
            if rank.device is not None and not rank.device.halted and self.world.random.random() < 0.5:
                rank.device.go_on()
            ended = connector.get_transfer_results(planned.finished_req_ids)
            output = KVConnectorOutput(
                finished_sending=ended.finished_sending,
                finished_recving=ended.finished_recving,
                failed_recving=ended.failed_recving,
                kv_connector_worker_meta=connector.build_connector_worker_meta(),
            )
            connector.clear_connector_metadata()
            assert not ended.finished_sending
            assert ended.failed_recving <= ended.finished_recving
            for name in ended.finished_recving:
                assert name in rank.loading, f"{name} was reported twice, or was never loaded"
                self._check_loaded(rank, name, ok=name not in ended.failed_recving)
                del rank.loading[name]
            index = {name: at for at, name in enumerate(names)}
            tokens = [list(one) for one in sampled]
            outputs.append(ModelRunnerOutput(names, index, tokens, kv_connector_output=output))
        together = self.aggregator.aggregate(outputs)
        assert together is not None
        return together

    def _update_running(self, planned: SchedulerOutput) -> None:
        for name in planned.finished_req_ids:
            self.running.pop(name, None)
        for new in planned.scheduled_new_reqs:
            text = self.texts[new.req_id]
            tokens = len(new.prefill_token_ids or ()) or text.prompt_tokens
            tables = [list(ids) for ids in new.block_ids]
            running = Running(text, tables, tokens, new.num_computed_tokens, replay_start=new.replay_start)
            self.running[new.req_id] = running
        cached = planned.scheduled_cached_reqs
        told = (cached.req_ids, cached.new_block_ids, cached.num_output_tokens, cached.num_computed_tokens)
        for name, new_ids, outputs, computed in zip(*told, strict=True):
            running = self.running[name]
            if name in cached.resumed_req_ids:
                assert new_ids is not None
                running.tables = [list(ids) for ids in new_ids]
                running.tokens, running.computed = running.text.prompt_tokens + outputs, computed
                running.drafts = []
            elif new_ids is not None:
                for table, ids in zip(running.tables, new_ids, strict=True):
                    table.extend(ids)

    def _sample(self, name: str, computed: int, tokens: int, drafted: int) -> list[int]:
        """What a step makes of a request: the drafts that were right, and one token more; nothing in a prompt."""
        running = self.running[name]
        text, known = running.text, running.tokens
        drafts = running.drafts[:drafted]
        drafts += [-1] * (drafted - len(drafts))  # vLLM fills up the step of a request that has just arrived
        end = computed + tokens
        text.grow(end + 1)
        running.written = text.values[computed:end].copy()
        for index, draft in enumerate(drafts):
            at = known + index - computed
            running.written[at] = _value(int(running.written[at - 1]), draft)
        assert end - drafted <= known, "a token is computed before it is known"
        running.computed, running.drafts = end, []
        if end - drafted < known:
            assert not drafted
            return []
        right = 0
        while right < drafted and drafts[right] == text.tokens[known + right]:
            right += 1
        self.accepted, self.rejected = self.accepted + right, self.rejected + drafted - right
        running.tokens += right + 1
        text.said_tokens = max(text.said_tokens, running.tokens)
        running.computed -= drafted - right
        running.drafts = self._guess(text, running.tokens)
        return text.tokens[known : running.tokens]

    def _guess(self, text: Text, tokens: int) -> list[int]:
        """What comes next, or something else."""
        draw, count = self.world.random, self.shape.drafts
        if not count:
            return []
        text.grow(tokens + count)
        if not self.shape.overlapping:  # there the scheduler has reserved the place for all of them already
            count = draw.randrange(count + 1)
        return [
            (token + (draw.random() < 0.3)) % VOCABULARY for token in text.tokens[tokens : tokens + count]
        ]

    def _copy(self, rank: Rank, copies: Sequence[KVCacheBlockCopy]) -> None:
        """What a request goes on with, and others have, it gets a copy of."""
        busy = {block for blocks in rank.loading.values() for _, block in blocks}
        for before, after in copies:
            assert not {before, after} & busy, "a block is copied that is loaded"
            for numbers in itertools.chain.from_iterable(rank.numbers):
                numbers[after] = numbers[before]

    def _forward(self, rank: Rank, name: str, computed: int, tokens: int) -> None:
        """Read what attention would read, then write what the model would write."""
        running = self.running[name]
        busy = {block for blocks in rank.loading.values() for block in blocks}
        for group, table in enumerate(running.tables):
            window, block_tokens = self.shape.window(group), self.shape.block_tokens(group)
            first = 0 if window is None else max(0, computed - window + 1)
            end = computed + tokens
            if self.shape.is_state(group):
                self._advance(rank, running, computed, end, busy)
                continue
            if self.shape.is_ring(group):
                self._go_round(rank, running, computed, end, busy)
                continue
            known = computed  # tokens whose bytes have to be there
            if running.replay_start and self.shape.is_scratch(group):
                first = max(first, running.replay_start)
            elif running.replay_start:  # it writes none of the blocks of the hit
                known = max(known, min(end, running.replay_start + REFILLED_WINDOW))
            places = np.arange(first, end)
            blocks = np.array(table)[places // block_tokens]
            assert (blocks > 0).all(), "the engine took a block away that the next token sees"
            assert not busy & {(group, int(block)) for block in blocks}, f"{name} uses blocks that are loaded"
            for layer, numbers in enumerate(rank.numbers[group]):
                wanted = np.concatenate((running.text.values[first:computed], running.written))
                wanted += self.shape.salt(group, layer, rank.index)
                at = (blocks, places % block_tokens)
                if running.text.mixed:
                    numbers[at] = MIXED
                    continue
                done = known - first
                read = numbers[at][:done]
                wanted = wanted.astype(numbers.dtype)
                assert (read == wanted[:done]).all(), f"rank {rank.index} reads wrong bytes for {name}"
                numbers[at] = wanted

    def _advance(
        self, rank: Rank, running: Running, computed: int, end: int, busy: set[tuple[int, int]]
    ) -> None:
        """Read the state before a step, and write the one behind it, each in the last block that it covers."""
        table = running.tables[STATES]
        for layer, numbers in enumerate(rank.numbers[STATES]):
            own = self.shape.salt(STATES, layer, rank.index)
            for tokens, value in ((computed, running.text.values[computed - 1]), (end, running.written[-1])):
                block = table[(tokens - 1) // BLOCK_TOKENS] if tokens else 0
                assert bool(block) == bool(tokens), "the engine took a state away that the next token needs"
                assert (STATES, block) not in busy, "a state is used that is loaded"
                if running.text.mixed:
                    numbers[block] = MIXED
                elif tokens == end:
                    numbers[block] = value + own
                elif tokens:
                    assert (numbers[block] == value + own).all(), f"rank {rank.index} reads a wrong state"

    def _go_round(
        self, rank: Rank, running: Running, computed: int, end: int, busy: set[tuple[int, int]]
    ) -> None:
        """Read what is not compressed yet, and keep a step's last tokens; hits end where nothing is left over."""
        ring = self.shape.ring_group
        (block,) = running.tables[ring]
        assert block, "the engine took the ring away"
        assert (ring, block) not in busy, "a ring is used that is loaded"
        size = self.shape.block_tokens(ring)
        left = np.arange(computed // POOLED_TOKENS * POOLED_TOKENS, computed)
        kept = np.arange(max(computed, end - size), end)
        for layer, numbers in enumerate(rank.numbers[ring]):
            own = self.shape.salt(ring, layer, rank.index)
            if running.text.mixed:
                numbers[block][kept % size] = MIXED
                continue
            read = numbers[block][left % size]
            assert (read == running.text.values[left] + own).all(), f"rank {rank.index} reads a wrong ring"
            numbers[block][kept % size] = running.written[kept - computed] + own

    # What has to hold.

    def _learn(self, request: Request) -> None:
        """Note which bytes belong under the hashes of a request, and that it says what the model says."""
        name = request.request_id
        text, tokens = self.texts[name], list(request.all_token_ids)
        text.grow(len(tokens))
        assert tokens == text.tokens[: len(tokens)], f"{name} was told another token than the model's"
        for index in range(self._hashed.get(name, 0), len(request.block_hashes)):
            values = text.values[: (index + 1) * self.shape.hash_tokens].copy()
            known = self.world.values.setdefault((text.weights, request.block_hashes[index]), values)
            assert (known == values).all()
            record_tokens = self.shape.record_tokens(self.shape.first)
            before = (len(values) - 1) // record_tokens * record_tokens // self.shape.hash_tokens
            self.world.parents[request.block_hashes[index]] = (
                request.block_hashes[before - 1] if before else None
            )
        self._hashed[name] = len(request.block_hashes)

    def _check_stores(self, planned: SchedulerOutput) -> None:
        """With full attention nothing is stored behind what this engine has dropped, unless that is there by now."""
        step = planned.kv_connector_metadata
        assert isinstance(step, PoolMetadata)
        if step.weights is not None:  # what was dropped before is of no namespace that is used any more
            self.tags.clear()
            self.dropped.clear()
        for block, tag in zip(step.stores, step.tags, strict=True):
            assert not self.shape.is_scratch(block.group), "what belongs to one request is stored"
            self.tags[tag] = (block.block_hash, block.group)
            was_there = self.in_pool(block.block_hash, block.group)
            self.stored_again += was_there and not self.in_pool(block.block_hash, block.group, now=True)
            parent = self.world.parents[block.block_hash]
            if self.shape.window(block.group) or parent is None or (parent, block.group) not in self.dropped:
                continue
            on_its_way = (parent, block.group) in self.stores._queue._under_way
            assert on_its_way or self.in_pool(parent, block.group), "a record is stored behind a gap"

    def in_pool(self, block_hash: bytes, group: int, *, now: bool = False) -> bool:
        """Whether every part of a record is in the pool, or was at some time."""
        if (namespace := self.planner._namespace.current) is None:
            return False
        keys = [namespace.key(block_hash, group, part) for part in range(self.shape.parts(group))]
        return all(self.world.records.contains_many(keys)) if now else self.world.put >= set(keys)

    def _watch_offers(self) -> None:
        assert self.connector is not None
        ask = self.connector.get_num_new_matched_tokens
        taken = self.connector.take_events

        def asked(request: Request, local_tokens: int) -> tuple[int | None, bool]:
            answer = ask(request, local_tokens)
            if request.request_id in self.failed:
                assert answer == (0, False), "a load that failed is offered again"
            self.hits += bool(answer[0])
            return answer

        def told() -> Any:
            events = list(taken() or ())
            for event in events:
                if isinstance(event, BlockStored) and event.medium == "STORAGE":
                    self._check_event(event)
            return events

        self.connector.get_num_new_matched_tokens = asked  # type: ignore[method-assign]
        self.connector.take_events = told  # type: ignore[method-assign]

    def _watch_audits(self) -> None:
        note = self.planner._note_audit

        def noted(audited: Audited) -> None:
            self.verdicts[audited.judged.verdict] += 1
            note(audited)

        self.planner._note_audit = noted  # type: ignore[method-assign]

    def _check_event(self, event: BlockStored) -> None:
        (told,) = event.block_hashes
        assert isinstance(told, int)
        (block_hash,) = {one for _, one in self.world.values if int.from_bytes(one[-8:], "big") == told}
        namespace = self.planner._namespace.current
        if namespace is None:  # it is of the one before, until the workers have answered
            return
        group = event.group_idx or 0
        for part in range(self.shape.parts(group)):
            (key,) = namespace.keys([block_hash], group, part)
            assert key in self.world.put, "a block is announced that is not on every rank"

    def _check_namespace(self, rank: Rank) -> None:
        """What a rank moves in this step is of one kind of weights, as is all else in its namespace."""
        assert rank.connector._worker is not None
        if (namespace := rank.connector._worker._namespace) is not None:
            if self.silent is not None and self.world.weights.get(namespace.fingerprint) == self.silent:
                return
            weights = self.world.weights.setdefault(namespace.fingerprint, self.weights)
            assert weights == self.weights, "blocks of other weights are in this namespace"

    def _check_loaded(self, rank: Rank, name: str, *, ok: bool) -> None:
        """A load is reported when it is over: nothing writes any more, and its bytes are those of its hashes."""
        if not ok:
            return
        if self.silent is not None:
            self.mixed = self.silent if self.mixed is None else self.mixed
            return
        tables = self.scheduler.kv_cache_manager.get_block_ids(name)
        hit = self.scheduler.requests[name].num_computed_tokens
        for group, block in rank.loading[name]:
            block_tokens = self.shape.block_tokens(group)
            start = tables[group].index(block) * block_tokens
            wanted = self.texts[name].values[start : min(start + block_tokens, hit)]
            assert len(wanted), "a block is loaded behind the hit"
            if self.shape.is_state(group):
                wanted = np.full(BLOCK_TOKENS, wanted[-1])
            for layer, numbers in enumerate(rank.numbers[group]):
                right = (wanted + self.shape.salt(group, layer, rank.index)).astype(numbers.dtype)
                assert (numbers[block][: len(right)] == right).all(), "wrong bytes"

    def _check_scatter(self, rank: Rank, block_ids: Sequence[int]) -> None:
        """Blocks may be written for a load that is not reported yet, and that holds them alone."""
        loading = {block: name for name, blocks in rank.loading.items() for _, block in blocks}
        for block in filter(None, block_ids):
            assert block in loading, f"block {block} is written for a load that is over"
            self._check_owned(loading[block], block)

    def _check_owned(self, name: str, block: int) -> None:
        manager = self.scheduler.kv_cache_manager
        assert name in self.scheduler.requests, f"{name} was given up while its blocks are written"
        tables = manager.get_block_ids(name)
        assert any(block in table for table in tables), f"{name} does not hold block {block} any more"
        assert manager.block_pool.blocks[block].ref_cnt == 1, f"block {block} is not {name}'s alone"

    def _touch(self, rank: Rank, where: str) -> None:
        if rank.is_away:
            self.touched.add(where)

    def _stumble(self, rank: Rank, where: str) -> None:
        if rank.fault == where:
            rank.fault = ""
            raise ZeroDivisionError("planted")

    def check(self) -> None:
        """What holds at any time."""
        assert not self.touched, "memory was read or written that a sleep had taken away"
        assert not (self.world.is_honest and self.verdicts["differs"]), (
            "an honest block is taken for a wrong one"
        )
        for rank in self.ranks:
            for name, blocks in rank.loading.items():
                for _, block in blocks:
                    self._check_owned(name, block)
            worker = rank.connector._worker
            assert worker is not None
            if (mover := worker._mover) is not None:
                held = [slot for part in [*mover._parts, *mover._stopping] for slot in part.slots]
                held += [
                    slot
                    for audit in [*mover.auditor._audits, *mover.auditor._stuck]
                    for slot in (audit.ours, audit.theirs)
                ]
                assert len(set(held)) == len(held), "two transfers share a slot"
                assert not set(held) & set(mover.staging._free), "a slot in use is free"
                assert len(held) + mover.staging.free == mover.staging.slots, "a slot is lost"
                free = set(mover.staging._free)
                assert rank.store is not None
                for batch in rank.store.under_way():
                    for view in batch.views:
                        assert self._slot(mover.staging, view) not in free, "a slot is free that is written"

    @staticmethod
    def _slot(staging: Any, view: memoryview) -> int:
        address = np.frombuffer(view, np.uint8).ctypes.data
        return int((address - staging.tensor.data_ptr()) // staging.slot_nbytes)

    def rest(self) -> None:
        """Let it do all that is left to do; nothing may be left over."""
        self.drain()
        # An engine without work does not look after what ended late: it does with the next request.
        for number in range(3):  # as many things as a store waits for, one after the other
            self.world.pass_time(LONG_S)
            self.add(f"last{self.steps}-{number}", [1, 2, 3], 1)
            self.drain()
        self.check()
        assert not self.scheduler.requests
        assert not self.planner._requests
        assert not self.stores._queue._pending
        assert not self.stores._held._references
        assert not self.planner._audits._audits, "an audit has not ended"
        assert not self.planner._audits._of_request
        assert not self.stores._late_answers
        assert not self.planner._new_loads
        assert not self.aggregator._recv_remaining_count
        assert not self.aggregator._failed_recving_pending
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.shape.device_blocks - 1, (
            "blocks are lost"
        )  # one is the null block
        for rank in self.ranks:
            assert not rank.loading, "loads were never reported"
            worker = rank.connector._worker
            assert worker is not None
            assert not worker._loads
            assert not worker._failed
            assert worker._audits is None or not (worker._audits._audits or worker._audits._blocks)
            assert worker._mover is None or not worker._mover.busy
            assert not worker.slots_in_use


def cache_config(shape: Shape, stage: int) -> KVCacheConfig:
    common: dict[str, Any] = {
        "block_size": BLOCK_TOKENS,
        "num_kv_heads": 1,
        "head_size": 32,
        "dtype": torch.float32,
    }
    if shape.cut:
        common |= {"num_kv_heads": shape.heads, "head_size": 1, "head_size_v": 0, "dtype": torch.int64}
    specs = [MLAAttentionSpec(**common, max_tp_shards=1) if shape.latent else FullAttentionSpec(**common)]
    if shape.small:
        small = common | {"block_size": SMALL_BLOCK_TOKENS, "sliding_window": SMALL_WINDOW}
        specs.append(SlidingWindowMLASpec(**small, max_tp_shards=1))
    if shape.windowed:
        specs.append(SlidingWindowSpec(**common, sliding_window=WINDOW))
    if shape.ring:
        ring = common | {"block_size": shape.block_tokens(shape.ring_group)}
        specs.append(CircularBufferSpec(**ring, head_size_v=0))
    if shape.refilled:
        window = {"sliding_window": REFILLED_WINDOW, "bounded_replay": True}
        specs.insert(0, SlidingWindowMLASpec(**common, **window, max_tp_shards=1))
    if shape.ring and not shape.states:
        specs.append(FullAttentionSpec(**common))
    if shape.states:
        if not shape.windowed and not shape.ring:
            specs.append(FullAttentionSpec(**common))
        state = {"shapes": ((BLOCK_TOKENS,),), "dtypes": (torch.int64,), "mamba_cache_mode": "align"}
        specs.append(MambaSpec(block_size=BLOCK_TOKENS, page_size_padded=specs[0].page_size_bytes, **state))
    groups = [
        KVCacheGroupSpec([f"group{index}.layer{stage * LAYERS + layer}" for layer in range(LAYERS)], spec)
        for index, spec in enumerate(specs)
    ]
    if shape.indexed:
        indexer = {"head_size": 16, "cache_role": SparseCacheRole.INDEXER}
        of_layers = dict.fromkeys(groups[0].layer_names, specs[0])
        of_layers[groups[0].layer_names[-1]] = dataclasses.replace(specs[0], **indexer)
        rows = UniformTypeKVCacheSpecs(block_size=BLOCK_TOKENS, kv_cache_specs=of_layers)
        groups[0] = KVCacheGroupSpec(groups[0].layer_names, rows)
    return KVCacheConfig(
        num_blocks=shape.device_blocks, kv_cache_tensors=[], kv_cache_groups=groups,
        cache_hit_alignment_tokens=shape.hash_tokens if shape.tails else None,
    )  # fmt: skip


def prepare(config: VllmConfig, shape: Shape) -> VllmConfig:
    """Make an engine's configuration that of a scripted one."""
    init_none_hash(sha256_cbor)
    config.cache_config.block_size = BLOCK_TOKENS
    config.cache_config.num_gpu_blocks = shape.device_blocks
    config.parallel_config.tensor_parallel_size = shape.stage_ranks
    config.parallel_config.pipeline_parallel_size = shape.stages
    config.scheduler_config.async_scheduling = shape.overlapping
    config.cache_config.prefix_match_unit = shape.hash_tokens if shape.tails else None
    config.cache_config.mamba_cache_mode = "align" if shape.states else "none"
    assert config.kv_transfer_config is not None
    settings = config.kv_transfer_config.kv_connector_extra_config
    settings["blocks_per_record"] = shape.blocks_per_record
    settings["share_across_tp"] = HEADS if shape.cut else None
    settings["audit_share"] = float(shape.audited)
    return config


Configured = Callable[[Shape], Any]


def configuration(engine_config: Callable[..., Any], drafts: int) -> Any:
    speculation = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 2}
    return engine_config(
        speculative_config=speculation if drafts else None,
        block_size=128,
        max_model_len=128,
        max_num_batched_tokens=24,
        max_num_seqs=4,
        enable_chunked_prefill=True,
        kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},
        transfer={
            "kv_connector_extra_config": {
                "pool": "file:///unused",
                "lookup_timeout_s": BUDGET_S,
                "max_load_s": MAX_LOAD_S,
            }
        },
    )
