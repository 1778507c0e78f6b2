"""The worker's half of the connector: one rank's KV cache, its staging slots, and the transfers between.

The scheduler holds a stored block until this rank reports its bytes staged, once per tag. The first of the
ranks with equal bytes stores them; the others report success at once. After start-up nothing here raises into
the engine: a fault disables the pool for this rank, fails every promised load, and the engine recomputes.

A step that asks what weights this rank holds (``PoolMetadata.measure``) ends its loads in flight, and nothing moves
until a step says how they are named (``weights``). Earlier stores go to the old namespace. The watch
(``engine.measure``) leaves it by itself when it finds other weights. The scheduler then has every rank delete what it
stored since it last found all of its own the same (``silent``): one rank's blocks depend on the weights of all.

Over 400 lines because all that reaches this rank's memory stands together.

While the engine sleeps its memory is away (``let_go`` to ``take_back``): nothing of it is copied or measured. Its
tensors come back under the same addresses, so copiers keep their views; staging is the host's, and stays.

Threads: the worker's model thread only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from vllm.logger import init_logger

from kvpool.clock import REAL, Clock
from kvpool.config import PoolConfig
from kvpool.errors import EngineRefused, KVPoolError
from kvpool.key.key import Fact, Namespace
from kvpool.metrics import Counters, Samples
from kvpool.store import Store, open_store
from kvpool.text import counted
from kvpool.threads import start_thread
from kvpool.transfer import Block, BlockCopier, Finished, KVCacheMover, Moved
from kvpool.transfer.memory import default_nbytes, slot_size
from kvpool.vllm.audit.rank import RankAudits
from kvpool.vllm.engine.adapter_loads import AdapterLoads
from kvpool.vllm.engine.adapters import UNREADABLE
from kvpool.vllm.engine.guard import RequestFaults, guarded
from kvpool.vllm.engine.measure import UnsureKeys, WeightsMeasure
from kvpool.vllm.engine.namespace import facts_of_weights
from kvpool.vllm.engine.part_tags import PartTags
from kvpool.vllm.engine.parts import cut
from kvpool.vllm.geometry import Geometry, Group
from kvpool.vllm.plan import (
    AdapterWeights,
    AuditedPart,
    BlockRef,
    LoadPlan,
    Measured,
    PoolMetadata,
    PoolWorkerMetadata,
    count,
)
from kvpool.vllm.tell.announcement import Announcement, EngineAnnouncer

logger = init_logger("vllm.kvpool")

IDLE_WAIT_S = 0.002  # wait of an empty step for a load in flight, instead of spinning
DRAIN_S = 5.0  # wait of a shutdown for stores in flight
LET_GO_S = 5.0  # wait of a sleep for copies in flight, which take milliseconds
MAX_NAMED = 16  # writers of a load
LOOK_EVERY_S = 0.1  # of the watch, at ``measure.LOOKED_AT`` tensors


@dataclass
class _Load:
    """In flight."""

    records: list[tuple[bytes, int]]  # (hash, group) of each part
    blocks: Sequence[BlockRef]
    started: float
    audited: bool
    outdated: bool = False  # of other weights


class WorkerHalf:
    """One rank's side of the pool. ``facts`` and ``layers`` come with ``register``.

    With several pipeline stages, ``facts`` are of its own stage; those of all come with a step.
    ``adapters``: None: blocks of adapters are not moved.
    """

    def __init__(
        self,
        config: PoolConfig,
        geometry: Geometry,
        *,
        rank: int,
        model: str = "",
        adapters: AdapterLoads | None = None,
        clock: Clock = REAL,
    ) -> None:
        self._config, self._geometry, self._groups = config, geometry, list(geometry.groups)
        # Of the groups in the pool, the places of their first parts among the mover's copiers.
        self._places: dict[int, int] = {}
        self._rank, self._model = rank, model  # its display name
        self._store: Store | None = None
        self._mover: KVCacheMover | None = None
        self._namespace: Namespace | None = None  # None: nothing is stored or loaded
        self._said: Namespace | None = None  # in the log, the last one
        self._facts: dict[str, Fact] = {}  # of all stages, at the start
        self._weights: dict[str, Fact] = {}  # ``PoolMetadata.weights``
        self._awaits_weights = False  # they are not named yet
        self._question = 0  # what weights it holds, not answered yet; 0: none is open
        self._is_away = False  # the engine's memory
        self._measure: WeightsMeasure | str = ""
        self._looked_at = 0.0
        self._unsure = UnsureKeys()
        self._unsure_tags: frozenset[int] = frozenset()  # of them, under way when they were condemned
        self._announcer: EngineAnnouncer | None = None  # of the first rank
        self._report = PoolWorkerMetadata()
        self._submitted: PoolMetadata | None = None
        self._loads: dict[str, _Load] = {}  # in flight, by request
        self._failed: set[str] = set()  # loads that ended without a transfer
        self._storing = PartTags(1)
        self._audits: RankAudits | None = None
        self._polled_at = 0.0
        self._faulty = False  # an exception of a transfer was logged
        self._adapters, self._clock = adapters, clock
        self.counters = Counters()
        self._request_faults = RequestFaults(self.counters)

    @property
    def slots_in_use(self) -> int:
        return self._mover.slots_in_use if self._mover else 0

    def register(
        self,
        layers: Sequence[Sequence[torch.Tensor]],
        facts: dict[str, Fact],
        describe: Callable[[str], Announcement] | None = None,
        measure: WeightsMeasure | str = "no model is shown",
        shared: Sequence[Group] | None = None,
        names: Sequence[Sequence[str]] | None = None,
        elements: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """Take the KV cache of this rank, by group and layer, and open the pool.

        ``describe``: the engine's announcement, given its namespace; None: none. ``measure``: of its weights, or
        why there is none. ``shared``: the groups with their parts (``parts``). ``names``: of the layers,
        ``elements``: of their numbers (``elements_of``). Blocks for at most the store's own deadline. The scheduler
        learns of a pool that cannot be opened.
        """
        self._groups = list(shared or self._groups)
        names = names or [
            [f"{index}.{place}" for place in range(len(one))] for index, one in enumerate(layers)
        ]
        most_parts = max(group.parts for group in self._groups)
        self._storing = PartTags(most_parts)
        try:
            namespace = Namespace(self._config.tenant, facts)
            self._store = open_store(
                self._config.pool,
                threads=self._config.threads,
                opened_by=self._config.worker or self._config.tenant,
                must_answer=not self._config.start_without_pool,
            )
            copiers: list[BlockCopier] = []
            layer_names: list[Sequence[str]] = []  # by copier
            for index, group in enumerate(self._groups):
                if not group.scratch:
                    self._places[index] = len(copiers)
                    parts = cut(layers[index], group.parts)
                    of_group = elements[index] if elements else None
                    copiers += [BlockCopier(part, group.blocks_per_record, of_group) for part in parts]
                    layer_names += [names[index]] * len(parts)
            self._mover = KVCacheMover(
                self._store,
                copiers,
                staging_nbytes=self._staging_nbytes(copiers, most_parts),
                max_store_nbytes_per_s=self._config.max_store_nbytes_per_s,
                counters=self.counters,
                clock=self._clock,
            )
            self._audits = RankAudits(self._mover, layer_names, self._config.audit_keep)
        except KVPoolError as error:
            self.switch_off(str(error))
            return
        self._report.facts[self._rank] = facts
        self._report.store_slots = self._mover.store_slots // most_parts
        self._report.part_nbytes = {
            (index, part): copiers[place].payload_nbytes
            for index, place in self._places.items()
            for part in self._groups[index].own_parts(self._rank)
        }
        if shared is not None:
            self._report.parts = {index: group.parts for index, group in enumerate(shared)}
        if self._rank == 0:
            self._announcer = EngineAnnouncer(self._config, self._model, describe)
        self._measure = measure
        self._report.measured[self._rank, 0] = self._measured()
        if self._geometry.pipeline_parallel == 1:
            self._facts, self._namespace = facts, namespace
            self._begin_announcing(namespace)

    def _staging_nbytes(self, copiers: Sequence[BlockCopier], most_parts: int) -> int:
        groups = [self._groups[index] for index in self._places]
        step_parts = sum(
            group.parts * -(-self._geometry.step_tokens // group.record_tokens) for group in groups
        )
        slot_nbytes = max(copier.payload_nbytes for copier in copiers)
        wanted = self._config.staging_nbytes or default_nbytes(step_parts, slot_nbytes)
        return max(wanted, 2 * most_parts * slot_size(slot_nbytes))  # two records

    def _measured(self) -> Measured:
        if isinstance(self._measure, str):
            return Measured(why=self._measure)
        try:
            return Measured(self._measure.take(), nan=self._measure.has_nan())
        except EngineRefused as error:
            return Measured(why=str(error))
        except Exception as error:  # never reaches the engine
            logger.warning("kvpool: rank %d failed to measure its weights", self._rank, exc_info=True)
            return Measured(why=str(error) or type(error).__name__)

    @guarded(None)
    def _asked(self, question: int) -> None:
        """Stop all transfers: it is to be measured."""
        self._question, self._awaits_weights = question, True
        self._leave()

    @guarded(None)
    def _answer(self) -> None:
        question, self._question = self._question, 0
        self._report.measured[self._rank, question] = self._measured()

    @guarded(None)
    def _watch(self) -> None:
        """Look at the next part of the weights, and leave the namespace if they are not what was measured."""
        now = self._clock.monotonic()
        if self._namespace is None or isinstance(self._measure, str) or now < self._looked_at + LOOK_EVERY_S:
            return
        self._looked_at = now
        try:
            same = self._measure.look()
        except (EngineRefused, RuntimeError):  # the model is being built anew
            same = False
        if same:
            self._unsure.rotate()
        elif same is not None:
            logger.error(
                "kvpool: rank %d: %s is not what was measured", self._rank, self._measure.other or "the model"
            )
            self._awaits_weights = True
            self._leave()
            self._report.differs = True

    def _leave(self) -> None:
        """Stop all transfers: those in flight into this engine's memory have other weights."""
        self._namespace = None
        if self._announcer is not None:
            self._announcer.leave()
        for request_id, load in self._loads.items():
            load.outdated = True
            if self._mover is not None:
                self._mover.cancel(request_id)

    @guarded(None)
    def _join(self, step: PoolMetadata) -> None:
        """Take the facts of all stages, or how the weights are named now."""
        self._leave()  # even if broken: this rank announces its engine
        if self._mover is None:
            return
        self._facts = step.facts or self._facts
        if step.weights is not None:
            self._weights, self._awaits_weights = step.weights, False
            self._unsure.clear()
        if not self._facts or self._awaits_weights:
            return
        self._namespace = Namespace(self._config.tenant, facts_of_weights(self._facts, self._weights))
        self._begin_announcing(self._namespace)

    def _begin_announcing(self, namespace: Namespace) -> None:
        if self._announcer is None or self._store is None:
            return
        if namespace != self._said:
            self._said = namespace
            staging = mover.staging if (mover := self._mover) else None
            logger.info(
                "kvpool: namespace %s, tenant %s, store %s, lookup timeout %g s, staging %d MiB (%d slots, %s)",
                namespace.hex,
                self._config.tenant,
                self._store,
                self._config.lookup_timeout_s,
                (staging.tensor.nbytes if staging else 0) >> 20,
                staging.slots if staging else 0,
                "as set"
                if self._config.staging_nbytes
                else f"for steps of {self._geometry.step_tokens} tokens",
            )
        self._announcer.enter(self._store, namespace)

    @guarded(None)
    def let_go(self) -> None:
        """The engine's memory is about to go: fail loads, and let copies end, within ``LET_GO_S``. Idempotent."""
        self._is_away = True
        if self._mover is not None and not self._mover.let_go(LET_GO_S):
            self.switch_off(f"copies of KV blocks did not end within {LET_GO_S:g} s before the engine slept")

    def take_back(self) -> None:
        """The engine's memory is back, with anything in it. Idempotent."""
        self._is_away = False

    def start_loads(self, step: PoolMetadata) -> None:
        """Submit the step's loads; idempotent per step."""
        if step is self._submitted:
            return
        self._submitted = step
        self._report.timed = step.timed
        if step.writer and self._store is not None:
            self._store.writer = step.writer
        self._look_at_adapters(step)
        if step.silent:
            self._unsure.condemn()
            self._unsure_tags = self._storing.tags
        if step.facts or step.weights is not None:
            self._join(step)
        if step.off and self._announcer is not None and self._store is not None:
            self._announcer.enter(self._store, None)
        if step.measure:
            self._asked(step.measure)
        if self._question and not self._is_away:
            self._answer()
        elif step.watch and not self._is_away:
            self._watch()
        self._put_away(step)
        for plan in step.loads:
            self._failed.add(plan.request_id)
            if self._mover is None or self._namespace is None or self._is_away or not plan.blocks:
                continue
            if self._foreign(plan.blocks, computed=False):
                self._report.load_causes[plan.request_id] = "adapter"
                continue
            if not (blocks := self._blocks_to_load(plan.blocks)):
                continue
            records = [
                (ref.block_hash, ref.group)
                for ref in plan.blocks
                for _ in range(self._groups[ref.group].parts)
            ]
            now = self._clock.monotonic()
            self._loads[plan.request_id] = _Load(records, plan.blocks, now, plan.audited)
            self._failed.discard(plan.request_id)
            self._load(plan, blocks)
        for request_id in step.cancelled:
            if self._mover is not None:
                self._mover.cancel(request_id)

    @guarded(None)
    def _put_away(self, step: PoolMetadata) -> None:
        if self._mover is None:
            return
        if step.put_away is not None:
            self._mover.put_away = step.put_away
        own = [ref for ref in step.wrong if self._groups[ref.group].stored_by(self._rank)]
        if own and self._namespace is not None:
            self._mover.auditor.delete([block.key for block in self._blocks(own)])
        if self._audits is not None:
            for number, what in step.found.items():
                self._audits.keep(number, what, self._rank)

    @guarded(None)
    def _look_at_adapters(self, step: PoolMetadata) -> None:
        if step.tell_adapters and self._adapters is not None:
            self._adapters.tell_all()
        for lora_request in step.adapters:
            if self._adapters is None:
                self._report.adapters[self._rank, int(lora_request.lora_int_id)] = UNREADABLE
            else:
                self._adapters.look(lora_request)

    def _foreign(self, blocks: Iterable[BlockRef], *, computed: bool) -> set[AdapterWeights]:
        """Adapters of blocks that are of other files here; ``computed``: the blocks are."""
        wanted = {block.adapter for block in blocks if block.adapter is not None}
        if self._adapters is None:
            return wanted
        is_same = self._adapters.has if computed else self._adapters.may_have
        return {one for one in wanted if not is_same(one)}

    @guarded(None)
    def _load(self, plan: LoadPlan, blocks: Sequence[Block]) -> None:
        assert self._mover is not None
        self._mover.load(
            plan.request_id,
            blocks,
            timeout_s=plan.stall_timeout_s,
            max_s=self._config.max_load_s,
            priority=plan.priority,
        )

    def start_audits(self, step: PoolMetadata) -> None:
        """Copy and compare what the step has computed; each number is reported once as staged and as ended."""
        audits, step.audits = step.audits, {}
        for number, refs in audits.items():
            if not self._begin_audit(number, refs):
                count(self._report.audit_staged, [number])
                count(self._report.audit_ended, [number])

    @guarded(False)
    def _begin_audit(self, number: int, refs: Sequence[BlockRef]) -> bool:
        own = [ref for ref in refs if self._groups[ref.group].stored_by(self._rank)]
        usable = own and self._namespace is not None and not self._is_away
        blocks = self._blocks_to_audit(own) if usable and not self._foreign(own, computed=True) else ()
        if blocks and self._audits is not None:
            self._audits.begin(number, blocks)
            return True
        if own:  # what the other ranks find is not the whole record
            self._report.audited.setdefault(number, []).append(AuditedPart("gone"))
        return False

    def start_stores(self, step: PoolMetadata) -> None:
        stores, tags, step.stores, step.tags = step.stores, step.tags, [], []
        if not stores:
            return
        if self._mover is None or self._namespace is None or self._is_away:
            count(self._report.staged, tags)
            count(self._report.dropped, tags)
            return
        foreign = self._foreign(stores, computed=True)
        own: dict[int, BlockRef] = {}
        for block, tag in zip(stores, tags, strict=True):
            if block.adapter in foreign:
                count(self._report.staged, [tag])
                count(self._report.dropped, [tag])
            elif self._groups[block.group].stored_by(self._rank):
                own[tag] = block
            else:
                count(self._report.staged, [tag])
                count(self._report.stored, [tag])
        if blocks := self._blocks_to_store(list(own.values())):
            parts = {tag: self._groups[block.group].parts for tag, block in own.items()}
            self._stage(blocks, self._storing.begin(parts))
        else:
            count(self._report.staged, list(own))
            count(self._report.dropped, list(own))

    @guarded(None)
    def _stage(self, blocks: Sequence[Block], tags: list[int]) -> None:
        assert self._mover is not None
        self._mover.stage(blocks, tags)
        if not isinstance(self._measure, str):
            self._unsure.stored(block.key for block in blocks)
        if self._config.store_policy == "write_back":
            self._mover.hold_engine()  # the scheduler holds none of these: the next step may overwrite them

    def poll(self, idle: bool) -> tuple[set[str], set[str]]:
        """(ended loads, the failed ones among them) since the last call."""
        ended, failed = set(self._failed), set(self._failed)
        self._failed.clear()
        if self._mover is not None:
            finished = self._moved(self._mover, IDLE_WAIT_S if idle else 0.0)
            seen_at, self._polled_at = self._polled_at, self._clock.monotonic()
            if finished is not None:
                self._note_loads(finished, seen_at, ended, failed)
                self._note_stores(finished)
            self._note_audits()
            if self._unsure.condemned and self._unsure_tags.isdisjoint(self._storing.tags):
                self._delete_unsure()
        return ended, failed

    @guarded(None)
    def _delete_unsure(self) -> None:
        assert self._store is not None
        keys = self._unsure.take()
        logger.warning(
            "kvpool: rank %d deletes %s, stored since it last saw all weights unchanged",
            self._rank,
            counted(len(keys), "record"),
        )
        start_thread(
            threading.Thread(target=_delete, args=(self._store, keys), name="kvpool-delete", daemon=True)
        )

    @guarded(None)
    def _note_audits(self) -> None:
        if self._audits is not None:
            self._audits.report(self._report)

    @guarded(None)
    def _moved(self, mover: KVCacheMover, wait_s: float) -> Finished | None:
        return mover.poll(wait_s)

    def _note_loads(self, finished: Finished, seen_at: float, ended: set[str], failed: set[str]) -> None:
        for moved in finished.loads:
            job = str(moved.job)
            ended.add(job)
            load = self._loads.pop(job, None)
            if load is not None:
                # A lower bound: it may have ended early in a long step.
                self._report.load_s[job] = max(0.0, seen_at - load.started)
                self._report.load_near[job] = moved.near
                if load.audited:
                    self._report.load_writers[job] = set(sorted(moved.writers)[:MAX_NAMED])
            if not moved.ok or (load is not None and load.outdated):
                failed.add(job)
                self._report.load_causes[job] = moved.cause
                self._log_fault(moved)
            elif load is not None and self._foreign(load.blocks, computed=False):
                failed.add(job)
                self._report.load_causes[job] = "adapter"
            if load is not None and not load.outdated:
                self._report.missing.update(load.records[place] for place in moved.missing)

    def _note_stores(self, finished: Finished) -> None:
        count(self._report.staged, self._storing.staged(finished.staged))
        for tag, ok in self._storing.ended(finished.stored):
            count(self._report.stored if ok else self._report.dropped, [tag])
        self._report.refused |= self._storing.of(finished.refused)
        for store in finished.stores:
            self._log_fault(store)

    def _log_fault(self, moved: Moved) -> None:
        """Log the first exception other than an absent pool's."""
        if moved.cause == "fault" and not self._faulty:
            self._faulty = True
            logger.error("kvpool failed to move blocks, which counts as a miss", exc_info=moved.error)

    def take_report(self) -> PoolWorkerMetadata | None:
        self._report.asked = self._announcer is not None and self._announcer.asked
        if self._adapters is not None:
            news = self._adapters.take_news()
            self._report.adapters |= {(self._rank, number): one for number, one in news.items()}
        if self._report.is_empty():
            return None
        report, self._report = self._report, PoolWorkerMetadata()
        return report

    def stats(self) -> Samples:
        if self._store is not None:
            self._store.count_health(self.counters)
        return self.counters.take()

    def close(self) -> None:
        """Let stores in flight end, within a few seconds, and release everything."""
        if self._announcer is not None and self._store is not None:
            self._announcer.close(self._store)
            self._announcer = None
        self._end_stores()
        if self._store is not None:
            if keys := self._unsure.take():
                _delete(self._store, keys)
            self._store.close()
        self._mover = self._store = None

    @guarded(None)
    def _end_stores(self) -> None:
        if self._mover is not None:
            self._mover.drain(DRAIN_S)
            self._mover.close()

    # Blocks with their keys; none if any block cannot have a key.

    @guarded((), request="load")
    def _blocks_to_load(self, refs: Sequence[BlockRef]) -> Sequence[Block]:
        return self._blocks(refs)

    @guarded((), request="audit")
    def _blocks_to_audit(self, refs: Sequence[BlockRef]) -> Sequence[Block]:
        return self._blocks(refs)

    @guarded((), request="store")
    def _blocks_to_store(self, refs: Sequence[BlockRef]) -> Sequence[Block]:
        return self._blocks(refs)

    def _without_pool(self, refs: Sequence[BlockRef]) -> None:
        """Report blocks without keys as failed, or drop them."""

    def _blocks(self, refs: Sequence[BlockRef]) -> list[Block]:
        assert self._namespace is not None
        keys: dict[int, list[list[str]]] = {}  # by part
        for group in {ref.group for ref in refs}:
            hashes = [ref.block_hash for ref in refs if ref.group == group]
            parts = self._groups[group].own_parts(self._rank)
            keys[group] = [self._namespace.keys(hashes, group, part)[::-1] for part in parts]
        return [
            Block(of_part.pop(), self._places[ref.group] + part, ref.block_ids, joined=part > 0)
            for ref in refs
            for part, of_part in enumerate(keys[ref.group])
        ]

    def switch_off(self, reason: str) -> None:
        """Disable the pool, and report ``reason`` to the scheduler."""
        self._report.broken[self._rank] = reason
        self._failed |= self._loads.keys()
        self._loads.clear()
        mover, self._mover = self._mover, None
        if mover is not None:
            try:
                mover.close()  # the engine's further work waits for copies in flight
            except Exception:
                logger.exception("kvpool could not end its copies")
        audits, self._audits = self._audits, None
        if audits is not None:
            audits.give_up(self._report)
        unstaged, given_up = self._storing.give_up()
        count(self._report.staged, unstaged)
        count(self._report.dropped, given_up)


def _delete(store: Store, keys: Sequence[str]) -> None:
    try:
        store.delete_many(keys)
    except KVPoolError as error:
        namespace = keys[0].split(":")[2]
        logger.error(
            "kvpool could not delete %s that may be of other weights than their namespace (%s): run kvpool purge "
            "--namespace %s when the pool is back, before others load them",
            counted(len(keys), "record"),
            error,
            namespace,
        )
