"""Engines of which the tiers are real: vLLM's manager of tiers, its primary tier in shared memory, and ``KVPoolTier``;
requests and the device are a script.

Over 400 lines because it is one state machine.

What is "computed" for a chunk is drawn from all that names it, so bytes of another model, chunk or group are noticed
where they are read. Two kinds of pools: one with the moods of ``tests/support/lifecycle.py``, in simulated time and the
same each time; and the file store with its native threads, in a real directory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import shutil
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from kvpool import _native
from kvpool.key.key import parse_key
from kvpool.store.file import FileStore
from kvpool.transfer.mover import STORE_TIMEOUT_S
from kvpool.vllm import KVPoolTier
from kvpool.vllm.load.lookups import LOOKUP_GRACE_S
from tests.support.lifecycle import BUDGET_S, LONG_S, MAX_LOAD_S, STEP_S, World
from tests.support.secondary_tier import create_tier, spec

ROW_NBYTES = 4096  # vLLM's region wants whole pages
RECORD_NBYTES = ROW_NBYTES + _native.RECORD_HEADER_NBYTES
PART_CHUNKS = 2
STUCK_S = 3.0  # how much longer than its deadline a batch takes whose thread is inside the kernel
REST_STEPS = 2000  # on files, each waits up to 5 ms for a batch
GARBAGE = 0xEE
# Where a fault of ours is planted: once, in the middle of what a tier does. The first cost a batch or a job, the others
# the tier.
COST_A_JOB = ("_names", "_row")
STUMBLES = (
    "_lookups.collect", "_lookups.miss", "_has_rows", "_end_job", "_tell",
    "_mover._go_on_storing", "_mover._has_arrived", "_mover._start_parts", "_mover._end_jobs", *COST_A_JOB,
)  # fmt: skip


@functools.lru_cache(maxsize=4096)
def payload(model: str, block_hash: bytes, group: int) -> bytes:
    """What every engine with this model computes for a chunk."""
    return hashlib.shake_128(b"%s %d " % (model.encode(), group) + block_hash).digest(ROW_NBYTES)


def chunks(family: int, common: int, own: Sequence[int] = ()) -> list[OffloadKey]:
    """The chunks of a prompt, in order: ``common`` ones of a family, and some that no other prompt has.

    Two groups take turns, so each hash names two chunks.
    """
    numbers = [family * 100 + index // 2 for index in range(common)] + [1000 + one for one in own]
    hashes = [hashlib.sha256(b"%d" % number).digest() for number in numbers]
    return [make_offload_key(one, index % 2) for index, one in enumerate(hashes)]


# ---------------------------------------------------------------------- the pools


class ScriptedPool(World):
    """A pool in simulated time; its clients are slow, wrong or gone when they are told to."""

    budget_s = BUDGET_S
    max_load_s = MAX_LOAD_S
    at_once_s = 0.0

    def __init__(self, seed: int, capacity_nbytes: int) -> None:
        super().__init__(seed, capacity_nbytes)
        self.models: dict[bytes, str] = {}  # by the namespace's fingerprint
        self.offered: set[str] = set()  # what engines wanted to store
        self._patch.setattr("kvpool.vllm.tier.open_store", self._open_store)
        patch_parts(self._patch)

    def now_s(self) -> float:
        return self.clock.now_s

    def is_payload(self, key: str, there: memoryview) -> bool:
        return bytes(there) == payload_of(self.models, key)

    def may_hold(self, key: str) -> bool:
        return key in self.put

    def under_way(self, tier: KVPoolTier) -> list[Any]:
        """A client's batches that have not ended."""
        return [batch for batch in self.batches if batch.client is tier._store]

    def damage(self, part: float) -> None:
        for key, record in sorted(self.records._records.items()):
            if self.random.random() < part:
                self.records._records[key] = record[:-1] + bytes([record[-1] ^ 1])


class DirectoryPool:
    """The file store in a directory, in real time: nothing can be told of when something happens, only what."""

    budget_s = 10.0  # nobody tests how fast this machine is
    max_load_s = 20.0
    at_once_s = 5.0

    def __init__(self, seed: int, capacity_nbytes: int, folder: Path) -> None:
        self.random = random.Random(seed)
        self.models: dict[bytes, str] = {}
        self.offered: set[str] = set()
        self._folder = Path(tempfile.mkdtemp(dir=folder))
        self._capacity_nbytes = capacity_nbytes
        self.records = FileStore(str(self._folder), capacity_nbytes, 1)
        self._opened: list[FileStore] = []
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr("kvpool.vllm.tier.open_store", self._open_store)
        patch_parts(self._patch)

    def _open_store(self, url: str, *, threads: int | None, must_answer: bool = True) -> FileStore:
        # A URL has no capacity as small as this.
        self._opened.append(FileStore(str(self._folder), self._capacity_nbytes, 2))
        return self._opened[-1]

    def now_s(self) -> float:
        return time.monotonic()

    def pass_time(self, seconds: float) -> None:
        """Give the stores' threads a moment, but for a step, which waits for none."""
        if seconds > STEP_S:
            time.sleep(0.002)

    def is_payload(self, key: str, there: memoryview) -> bool:
        return bytes(there) == payload_of(self.models, key)

    def may_hold(self, key: str) -> bool:
        return key in self.offered

    def under_way(self, tier: KVPoolTier) -> list[Any]:
        """Who can say."""
        return []

    def lose(self, part: float) -> None:
        keys = [block.key for blocks in self.records.scan() for block in blocks]
        self.records.delete_many([key for key in sorted(keys) if self.random.random() < part])

    def damage(self, part: float) -> None:
        # Folders come and go meanwhile, which only this walk takes as it comes.
        walk = os.walk(self._folder / "blocks")
        files = [Path(folder, name) for folder, _, names in walk for name in names]
        for file in sorted(files):
            if self.random.random() < part:
                with contextlib.suppress(FileNotFoundError), file.open("r+b") as record:
                    at = self.random.randrange(RECORD_NBYTES)
                    record.seek(at)
                    byte = record.read(1)
                    record.seek(at)
                    record.write(bytes([byte[0] ^ 1]) if byte else b"?")
                    if self.random.random() < 0.3:
                        record.truncate(at)

    def close(self) -> None:
        self._patch.undo()
        self.records.close()
        shutil.rmtree(self._folder)


Pool = ScriptedPool | DirectoryPool


def patch_parts(patch: pytest.MonkeyPatch) -> None:
    """Parts so small that a job has many, and so few at a time that they wait for each other."""
    patch.setattr("kvpool.vllm.tier.PART_NBYTES", PART_CHUNKS * ROW_NBYTES)
    patch.setattr("kvpool.transfer.memory.MAX_PARTS", 3)


def payload_of(models: dict[bytes, str], key: str) -> bytes:
    tenant, fingerprint, block_hash, group, rank = parse_key(key)
    assert (tenant, rank) == ("default", 0)
    return payload(models[fingerprint], block_hash, group)


def check_records(pool: Pool) -> int:
    """No record of the pool proves itself that holds other bytes than it should; how many there are."""
    keys = [block.key for blocks in pool.records.scan() for block in blocks]
    buffers = [bytearray(ROW_NBYTES) for _ in keys]
    found = pool.records.get_many_into(keys, buffers)
    for key, buffer, ok in zip(keys, buffers, found, strict=True):
        assert not ok or pool.is_payload(key, memoryview(buffer)), f"the pool holds wrong bytes under {key}"
    return sum(found)


# ---------------------------------------------------------------------- the tier


class WatchedTier(KVPoolTier):
    """The tier as it is, and a look at all that goes in and comes out."""

    engine: TieredEngine
    reason = ""  # why it has switched itself off

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        with self.engine.at_once("lookup"):
            answer = super().lookup(key, req_context)
        self.engine.answered(key, req_context.req_id, answer)
        return answer

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        with self.engine.at_once("on_schedule_end"):
            super().on_schedule_end(context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        with self.engine.at_once("on_request_finished"):
            super().on_request_finished(req_context)
        self.engine.asked.pop(req_context.req_id, None)
        self.engine.refused.pop(req_context.req_id, None)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self.engine.begins(job_metadata, is_load=True)
        with self.engine.at_once("submit_load"):
            super().submit_load(job_metadata)

    def submit_store(self, job_metadata: TransferJob) -> None:
        self.engine.begins(job_metadata, is_load=False)
        with self.engine.at_once("submit_store"):
            super().submit_store(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        stumbled = self.engine.stumbled
        with self.engine.at_once("get_finished_jobs"):
            results = list(super().get_finished_jobs())
        for result in results:
            self.engine.ended(result)
        self.engine.check_batches()
        if self.engine.stumbled == stumbled:  # else the next call ends the jobs
            self.engine.check_overdue()
        return results

    def drain_jobs(self) -> None:
        # Every job has a deadline, and every batch of it one of its own; what a thread is stuck in has none of ours.
        with self.engine.within(2 * STORE_TIMEOUT_S + STUCK_S + 2, "drain_jobs"):
            super().drain_jobs()
        assert not self.engine.touched(), "a drained tier touches memory"
        assert not self.has_pending_work()

    def take_events(self) -> Iterable[OffloadingEvent]:
        events = list(super().take_events())
        for event in events:
            self.engine.told(event)
        return events

    def shutdown(self) -> None:
        with self.engine.within(STORE_TIMEOUT_S + STUCK_S + 2, "shutdown"):
            super().shutdown()
        assert self._store._closed
        assert not self.engine.touched(), "a tier that was shut down touches memory"

    def _begin_epoch(self) -> None:
        super()._begin_epoch()
        models, fingerprint = self.engine.pool.models, self._namespace.fingerprint
        assert fingerprint not in models, "somebody had this namespace before"
        models[fingerprint] = self.engine.model

    def switch_off(self, reason: str) -> None:
        self.reason = self.reason or reason
        super().switch_off(reason)


# ---------------------------------------------------------------------- the engine


@dataclass
class Flight:
    """A job that was submitted and is not reported yet."""

    is_load: bool
    keys: list[OffloadKey]
    rows: list[int]
    began_s: float
    names: dict[OffloadKey, str]  # in the epoch in which it began


@dataclass
class Copy:
    """Between device and main memory, under way; the rows are pinned."""

    request: Asking
    is_load: bool
    keys: list[OffloadKey]
    rows: list[int]


@dataclass
class Asking:
    """A request, as the scheduler half of vLLM's offloading connector sees it."""

    context: ReqContext
    keys: list[OffloadKey]
    stage: str = "asks"  # loads, computes, stores, idles
    hits: int = 0


@dataclass(repr=False)
class TieredEngine:
    """One engine on the pool. Whatever the tier promises is checked where it could be broken."""

    pool: Pool
    rows_count: int
    model: str = "model"
    changes: bool = False  # its weights are others after each reset

    rows: np.ndarray = field(init=False)  # the primary tier
    known: np.ndarray = field(init=False)  # what has to be in them, but where a load is under way
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        described = spec(chunk_nbytes=ROW_NBYTES)
        self._region = SharedOffloadRegion(
            engine_id=uuid.uuid4().hex,
            num_chunks=self.rows_count,
            rank=None,
            kv_bytes_per_chunk=ROW_NBYTES,
            cpu_page_size=ROW_NBYTES,
        )
        primary = CPUPrimaryTierOffloadingManager(self.rows_count, self._region, enable_events=True)
        tier = create_tier(
            {
                "type": "WatchedTier",
                "module_path": __name__,
                "pool": "file:///unused",
                "model_id": self.model,
                "lookup_timeout_s": self.pool.budget_s,
                "max_load_s": self.pool.max_load_s,
                "weights_never_change": not self.changes,
            },
            primary.get_kv_memoryview(),
            described,
        )
        assert isinstance(tier, WatchedTier)
        self.tier, tier.engine = tier, self
        self.manager = TieringOffloadingManager(primary, [tier])
        self._memory = self._region.mmap_obj
        self.rows = np.frombuffer(self._memory, np.uint8).reshape(self.rows_count, ROW_NBYTES)
        self.known = self.rows.copy()
        fingerprint = tier._namespace.fingerprint
        assert self.pool.models.setdefault(fingerprint, self.model) == self.model, "two models share"
        self.requests: dict[str, Asking] = {}
        self.new: list[str] = []
        self.copies: list[Copy] = []
        self.jobs: dict[int, Flight] = {}
        self.stumbled = 0  # faults that were planted, and happened
        self.submitted: set[int] = set()
        self.promoted: set[OffloadKey] = set()
        self.asked: dict[str, dict[OffloadKey, float]] = {}  # request: what it asked for, and when first
        self.refused: dict[str, set[OffloadKey]] = {}  # request: what must not be offered to it again

    # What the scheduler does.

    def add(self, name: str, keys: list[OffloadKey]) -> None:
        context = ReqContext(name)
        self.manager.on_new_request(context)
        self.requests[name] = Asking(context, keys)
        self.new.append(name)

    def finish(self, name: str) -> None:
        """At any stage; what is under way for it goes on."""
        self.manager.on_request_finished(self.requests.pop(name).context)

    def step(self) -> None:
        self.counts["steps"] += 1
        self._end_copies()
        for request in list(self.requests.values()):
            self._go_on(request)
        new, self.new = self.new, []
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=new, preempted_req_ids=()))
        list(self.manager.take_events())
        self.pool.pass_time(STEP_S)
        self.check()

    def _go_on(self, request: Asking) -> None:
        if request.stage == "asks":
            waits = False
            for key in request.keys:
                answer = self.manager.lookup(key, request.context)
                if answer is LookupResult.MISS:
                    break
                waits |= answer is not LookupResult.HIT
                request.hits += answer is LookupResult.HIT and not waits
            if waits:
                request.hits = 0
            elif request.hits:
                self.manager.touch(request.keys[: request.hits], request.context)
                self._copy(request, request.keys[: request.hits], "loads")
            else:
                request.stage = "computes"
        elif request.stage == "computes":
            wanted = request.keys[request.hits :]
            prepared = self.manager.prepare_store(wanted, request.context) if wanted else None
            request.stage = "idles"
            if prepared is not None and prepared.keys_to_store:
                rows = [int(row) for row in prepared.store_spec.chunk_ids]
                for row in rows:  # the device writes from now on
                    self._write(row, GARBAGE)
                request.stage = "stores"
                self.copies.append(Copy(request, False, list(prepared.keys_to_store), rows))

    def _copy(self, request: Asking, keys: list[OffloadKey], stage: str) -> None:
        spec = self.manager.prepare_load(keys, request.context)
        request.stage = stage
        self.copies.append(Copy(request, True, keys, [int(row) for row in spec.chunk_ids]))

    def _end_copies(self) -> None:
        for copy in [copy for copy in self.copies if self.pool.random.random() < 0.6]:
            self.copies.remove(copy)
            if copy.is_load:
                for key, row in zip(copy.keys, copy.rows, strict=True):
                    assert self.rows[row].tobytes() == self._payload(key), "a request is given wrong bytes"
                self.manager.complete_load(copy.keys, copy.request.context)
                copy.request.stage = "computes"
            else:
                success = self.pool.random.random() < 0.95
                for key, row in zip(copy.keys, copy.rows, strict=True):
                    self._write(row, np.frombuffer(self._payload(key), np.uint8) if success else GARBAGE)
                self.manager.complete_store(copy.keys, copy.request.context, success)
                copy.request.stage = "idles"

    def store_again(self, name: str) -> None:
        """One more job for chunks of a request that are in main memory, as when another tier wants them, too."""
        context = self.requests[name].context
        there = [
            key
            for key in self.requests[name].keys
            if self.manager.primary_tier.lookup(key, context) is LookupResult.HIT
        ]
        if there:
            self.tier.submit_store(self.manager.create_store_job(there, context, 0))

    def drain(self) -> None:
        self.tier.drain_jobs()
        self.manager._process_finished_jobs()
        assert not self.jobs, "a drained tier has all results at hand"

    def reset(self) -> None:
        """Sleep, and waking up with empty memory; vLLM hears no more of copies from before."""
        self.copies.clear()
        for request in self.requests.values():
            request.stage = "asks" if request.stage in ("asks", "loads") else "idles"
            request.hits = 0
        self.manager.reset_cache()
        assert not self.jobs, "a tier was drained, and owes a result"
        if self.changes:
            self.model += ", changed"
            self.pool.models[self.tier._namespace.fingerprint] = self.model
        for row in range(self.rows_count):
            self._write(row, GARBAGE)

    def shut_down(self) -> None:
        """At once, whatever is under way; afterwards nobody may hold the memory any more."""
        del self.rows
        self.manager.shutdown()
        assert self._memory.closed, "somebody holds the engine's memory"

    def abandon(self) -> None:
        """Give back what is left of an engine, whatever went wrong before."""
        self.__dict__.pop("rows", None)
        with contextlib.suppress(Exception):
            self.manager.shutdown()
        self._region.cleanup()

    # What goes in and comes out of the tier.

    def begins(self, job: TransferJob, *, is_load: bool) -> None:
        keys, rows = list(job.keys), [int(row) for row in job.chunk_ids]
        assert job.job_id not in self.submitted
        self.submitted.add(job.job_id)
        names = {key: self._name(key) for key in keys}
        self.jobs[job.job_id] = Flight(is_load, keys, rows, self.pool.now_s(), names)
        if is_load:
            self.promoted.update(keys)
            for row in rows:
                self._write(row, GARBAGE)
        else:
            self.pool.offered.update(names.values())

    def ended(self, result: JobResult) -> None:
        flight = self.jobs.pop(result.job_id, None)
        assert flight is not None, f"job {result.job_id} was reported twice, or is nobody's"
        good = flight.keys if result.success else list(result.successful_keys or ())
        assert not (result.success and result.successful_keys)
        assert len(set(good)) == len(good)
        assert set(good) <= set(flight.keys)
        kind = "loads" if flight.is_load else "stores"
        self.counts[f"{kind} {'good' if result.success else 'in part' if good else 'failed'}"] += 1
        if not flight.is_load:
            assert result.successful_keys is None
            for key in good:
                assert self.pool.may_hold(flight.names[key]), "stored, it says, and never was"
            return
        assert result.transfer_bytes == len(good) * ROW_NBYTES
        for key, row in zip(flight.keys, flight.rows, strict=True):
            if key in good:
                assert self.rows[row].tobytes() == self._payload(key), "loaded, it says, and is not"
            else:
                for name, asked in self.asked.items():
                    if key in asked:
                        self.refused.setdefault(name, set()).add(key)
            self.known[row] = self.rows[row]

    def answered(self, key: OffloadKey, name: str, answer: LookupResult) -> None:
        asked_s = self.asked.setdefault(name, {}).setdefault(key, self.pool.now_s())
        self.counts[f"answers {answer.name}"] += 1
        assert answer in (LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY)
        if answer is LookupResult.HIT:
            assert self.pool.may_hold(self._name(key)), "a hit of what nobody has stored"
        if answer is LookupResult.RETRY:
            waited_s = self.pool.now_s() - asked_s
            assert waited_s <= self.pool.budget_s + LOOKUP_GRACE_S + self.pool.at_once_s, "a lookup hangs"
        if key in self.refused.get(name, ()):
            assert answer is LookupResult.MISS, "a chunk is offered again whose load failed"

    def told(self, event: OffloadingEvent) -> None:
        assert event.medium is Medium.STORAGE
        self.counts[f"events {'removed' if event.removed else 'stored'}"] += 1
        for key in event.keys:
            if event.removed:
                assert key in self.promoted, "a chunk is gone, it says, for which it has not looked"
            else:
                assert self.pool.may_hold(self._name(key)), "a chunk is announced that nobody has stored"

    # What has to hold.

    @contextlib.contextmanager
    def within(self, seconds: float, what: str) -> Iterator[None]:
        start_s = self.pool.now_s()
        yield
        took_s = self.pool.now_s() - start_s
        assert took_s <= seconds + self.pool.at_once_s, f"{what} took {took_s:.3f} s"

    def at_once(self, what: str) -> contextlib.AbstractContextManager[None]:
        return self.within(0, what)

    def touched(self) -> list[Any]:
        """Batches under way that read or write rows."""
        return [batch for batch in self.pool.under_way(self.tier) if batch.views]

    def check_batches(self) -> None:
        """Memory is touched for jobs that are not reported, and a load's rows by one batch at a time."""
        written: Counter[int] = Counter()
        read: Counter[int] = Counter()
        for batch in self.touched():
            rows = [self._row(view) for view in batch.views]
            (written if batch.operation == _native.GET else read).update(rows)
        loads = Counter(row for one in self.jobs.values() if one.is_load for row in one.rows)
        stores = Counter(row for one in self.jobs.values() if not one.is_load for row in one.rows)
        assert written <= loads, "a row is written for no load"
        assert read <= stores, "a row is read for no store"

    def check_overdue(self) -> None:
        """A job that is late is kept by a batch that has not ended, and by nothing else."""
        kept = {part.job.name for part in self.tier._mover._parts}
        for job_id, flight in self.jobs.items():
            limit_s = (self.pool.max_load_s if flight.is_load else STORE_TIMEOUT_S) + self.pool.at_once_s
            late = self.pool.now_s() - flight.began_s > limit_s + 0.001
            assert not late or job_id in kept, f"job {job_id} is forgotten"

    def check(self) -> None:
        """What holds at any time."""
        self.check_batches()
        free = {row for one in self.jobs.values() if one.is_load for row in one.rows}
        rows = [row for row in range(self.rows_count) if row not in free]
        assert (self.rows[rows] == self.known[rows]).all(), "a row was written that no load holds"
        assert self.tier.reason in ("", "ZeroDivisionError: planted"), self.tier.reason

    def rest(self) -> None:
        """Let an engine do all that is left to do; nothing may be left over."""
        for name in list(self.requests):
            self.finish(name)
        self.pool.pass_time(LONG_S)
        for _ in range(REST_STEPS):
            if not self._left():
                return
            self.step()
            self.pool.pass_time(0.1)
        raise AssertionError(f"left over: {self._left()}")

    def _left(self) -> dict[str, Any]:
        tier, manager = self.tier, self.manager
        left = {
            "jobs": self.jobs, "jobs of the manager": manager._jobs, "requests of the manager": manager._req_state,
            "copies": self.copies, "jobs of the tier": tier._jobs, "jobs of the mover": tier._mover._jobs,
            "parts": tier._mover._parts, "results": tier._results, "questions": tier._lookups._questions,
            "batches": tier._lookups._batches, "probes": tier._lookups._probes, "askers": tier._lookups._asked_by,
            "events": tier._events,
        }  # fmt: skip
        return {what: some for what, some in left.items() if some}

    def stumble(self, where: str) -> None:
        """The next call of one of the tier's own functions fails as no function of ours should."""

        *path, name = where.split(".")
        holder = getattr(self.tier, path[0]) if path else self.tier

        def stumbling(*arguments: Any, **more: Any) -> Any:
            delattr(holder, name)
            self.stumbled += 1
            raise ZeroDivisionError("planted")

        setattr(holder, name, stumbling)

    def _write(self, row: int, what: Any) -> None:
        self.rows[row] = self.known[row] = what

    def _row(self, view: memoryview) -> int:
        address = np.frombuffer(view, np.uint8).ctypes.data
        row, rest = divmod(int(address - self.rows.ctypes.data), ROW_NBYTES)
        assert not rest
        assert view.nbytes == ROW_NBYTES
        return row

    def _payload(self, key: OffloadKey) -> bytes:
        return payload(self.model, get_offload_block_hash(key), get_offload_group_idx(key))

    def _name(self, key: OffloadKey) -> str:
        """Under which the pool keeps a chunk of this model."""
        block_hash, group = get_offload_block_hash(key).hex(), get_offload_group_idx(key)
        return f"kvpool:default:{self.tier._namespace.hex}:{block_hash}:{group}:0"
