"""The worker's half of the encoders' connector: what the pool has goes to the encoder's cache, what was computed out.

Outputs from the pool come with the step, verified: here nothing can fail that an engine depends on. The first rank
copies what it computes to host memory, and a thread stores it, or compares it with the pool's record. Nothing waits
for that thread.

Threads: the worker's model thread; ``kvpool-encoder`` has the copies.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from vllm.logger import init_logger

from kvpool import _native, metrics
from kvpool.config import EncoderConfig
from kvpool.discovery.facts import KEEP_EVERY_S, announce_facts, keep_facts
from kvpool.errors import KVPoolError, StoreUnavailable
from kvpool.key.key import Namespace
from kvpool.metrics import Counters
from kvpool.store import Store, open_store
from kvpool.transfer.audit import NUMBERS
from kvpool.transfer.device import Event, device_of
from kvpool.vllm.encoder.plan import ComparedOutput, EncoderMetadata, EncoderWorkerMetadata, Stored
from kvpool.vllm.engine import internals
from kvpool.vllm.engine.guard import guarded
from kvpool.vllm.engine.measure import UnsureKeys, WeightsMeasure
from kvpool.vllm.plan import Measured

logger = init_logger("vllm.kvpool")

STORE_TIMEOUT_S = 5.0  # nothing waits for a store
COPY_TIMEOUT_S = 30.0  # of a copy to the host, which takes milliseconds
COPY_PAUSE_S = 1e-3
CLOSE_S = 5.0  # wait of a shutdown for what is under way
LOOK_EVERY_S = 0.1  # of the watch, at a few tensors

Cache = dict[str, torch.Tensor]


class EncoderWorker:
    """``stores``: this rank writes what all of them compute, for it is the same. ``model``: its display name.

    ``alone``: no other connector tells how the pool is. ``tell``: takes the namespaces of outputs, 32 hex digits each,
    when they change; must not block.
    """

    def __init__(
        self,
        config: EncoderConfig,
        *,
        stores: bool,
        model: str = "",
        alone: bool = True,
        tell: Callable[[tuple[str, ...]], None] = lambda _: None,
    ) -> None:
        self._model, self._alone = model, alone
        self._spaces: tuple[Namespace, ...] = ()  # as last told
        self._kept_s = 0.0  # when their facts were written last
        self._stores, self._room_nbytes = stores, config.staging_nbytes
        self._store: Store | None = None
        self._broken = False
        self._tell = tell
        self._measure: WeightsMeasure | str = "nothing was measured"
        self._unsure = UnsureKeys()
        self._looked_at_s = 0.0
        self._report = EncoderWorkerMetadata()
        self._seen: EncoderMetadata | None = None
        # Of the last step: vLLM's V2 runner tells an engine that only loads of none of its outputs.
        self._unsaved: dict[str, Stored] = {}
        self._lock = threading.Lock()  # of what the thread changes: the two below
        self._waiting_nbytes = 0
        self._compared: list[ComparedOutput] = []
        self.counters = Counters()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvpool-encoder")
        if stores:
            try:
                self._store = open_store(config.pool, threads=config.threads or 1, must_answer=False)
            except KVPoolError as error:
                self.switch_off(str(error))

    def measure(self, worker: Any, why_not: str) -> Measured:
        """What this rank's encoder holds now. Waits for the device."""
        if why_not:
            return Measured(why=why_not)
        try:
            measure = WeightsMeasure(internals.encoder_tensors(worker))
            digest = measure.take()
        except Exception as error:  # never reaches the engine
            self._measure = str(error) or type(error).__name__
            return Measured(why=self._measure)
        self._measure = measure
        self._unsure.clear()
        return Measured(digest)

    def load(self, step: EncoderMetadata, cache: Cache, device: torch.device) -> None:
        """Put the step's outputs into the engine's ``cache``; idempotent per step."""
        if step is self._seen:
            return
        self._seen = step
        for identifier, (payload, shape) in step.loads.items():
            # Else it is memory of vLLM's queue between processes, which may be written again.
            own = payload if payload.flags.owndata and payload.flags.writeable else payload.copy()
            flat = torch.from_numpy(own).view(getattr(torch, shape.dtype))
            cache[identifier] = flat.view(shape.rows, shape.width).to(device)
        self._begin(step, cache)

    @guarded(None)
    def _begin(self, step: EncoderMetadata, cache: Cache) -> None:
        if step.spaces is not None:
            self.hear(step.spaces)
        for identifier, wanted in self._unsaved.items():
            self._take(identifier, wanted, cache)
        self._unsaved = dict(step.stores)
        if self._store is not None and step.writer:
            self._store.writer = step.writer
        if step.silent:
            self._unsure.condemn()
        self._keep_facts()
        if step.watch:
            self._look()
        wrong = [*step.wrong, *(self._unsure.take() if self._unsure.condemned else ())]
        if wrong and self._store is not None:
            self._behind(self._delete, self._store, wrong)

    def hear(self, spaces: Sequence[Namespace]) -> None:
        """What the scheduler's half says of where outputs are."""
        new = [space for space in spaces if space not in self._spaces]
        self._spaces = tuple(spaces)
        self._tell(tuple(space.hex for space in spaces))
        self._keep_facts(new)

    def _keep_facts(self, new: Sequence[Namespace] = ()) -> None:
        """So that other workers can say why they do not share; a server may evict what is not written again."""
        now_s = time.monotonic()
        if self._store is None or not (new or (self._spaces and now_s >= self._kept_s + KEEP_EVERY_S)):
            return
        self._kept_s = now_s
        self._behind(self._write_facts, self._store, self._spaces, frozenset(new))

    def _write_facts(self, store: Store, spaces: Sequence[Namespace], new: frozenset[Namespace]) -> None:
        with contextlib.suppress(KVPoolError):
            for space in spaces:
                if space not in new:
                    keep_facts(store, space, self._model)
                    continue
                for sentence in announce_facts(store, space, self._model):
                    logger.warning("kvpool: of encoders' outputs: %s", sentence)

    def _look(self) -> None:
        """Look at the next part of the weights."""
        now_s = time.monotonic()
        if isinstance(self._measure, str) or now_s < self._looked_at_s + LOOK_EVERY_S:
            return
        self._looked_at_s = now_s
        try:
            same = self._measure.look()
        except (KVPoolError, RuntimeError):  # the model is being built anew
            same = False
        if same:
            self._unsure.rotate()
        elif same is not None:
            self._report.differs = True
            self._measure = "its weights have changed"

    @guarded(None)
    def save(self, step: EncoderMetadata, cache: Cache, identifier: str) -> None:
        """The engine has computed an output."""
        self._unsaved.pop(identifier, None)
        if (wanted := step.stores.get(identifier)) is not None:
            self._take(identifier, wanted, cache)

    def _take(self, identifier: str, wanted: Stored, cache: Cache) -> None:
        output = cache.get(identifier)
        if output is None or not self._stores or self._store is None or self._broken:
            return
        shape = wanted.shape
        dtype = str(output.dtype).removeprefix("torch.")
        is_asked = not wanted.key and wanted.record is None
        if output.dim() == 2 and (is_asked or (output.shape[1], dtype) != (shape.width, shape.dtype)):
            self._report.forms[identifier] = int(output.shape[1]), dtype
        if is_asked:
            return
        if tuple(output.shape) != (shape.rows, shape.width) or dtype != shape.dtype or not output.numel():
            self.counters.add(metrics.ENCODER_STORE_SKIPPED, 1, "unusable")
            self._ended(identifier, wanted, "gone")
            return
        nbytes = output.numel() * output.element_size()
        with self._lock:
            has_room = self._waiting_nbytes + nbytes <= self._room_nbytes
            self._waiting_nbytes += nbytes if has_room else 0
        if not has_room:
            self.counters.add(metrics.ENCODER_STORE_SKIPPED, 1, "staging_full")
            self._ended(identifier, wanted, "gone")
            return
        device = device_of(output.device)
        host = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=device.pinned)
        host.copy_(output.detach().contiguous().view(torch.uint8).flatten(), non_blocking=device.pinned)
        if wanted.key and wanted.record is None:
            self._unsure.stored([wanted.key])
        self._behind(self._handle, self._store, identifier, wanted, host, device.mark())

    def _behind(self, call: Any, *arguments: Any) -> None:
        future: Future[None] = self._thread.submit(call, *arguments)
        future.add_done_callback(self._said)

    def _said(self, future: Future[None]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            logger.warning("kvpool failed behind an encoder", exc_info=error)

    # The thread.

    def _handle(
        self, store: Store, identifier: str, wanted: Stored, host: torch.Tensor, copied: Event
    ) -> None:
        try:
            until_s = time.monotonic() + COPY_TIMEOUT_S
            while not copied.query():
                if time.monotonic() > until_s:
                    self._ended(identifier, wanted, "gone")
                    return
                time.sleep(COPY_PAUSE_S)
            view = host.numpy().data.cast("B")
            if wanted.record is not None:
                self._compare(identifier, wanted, view)
            else:
                self._put(store, wanted.key, view)
        finally:
            with self._lock:
                self._waiting_nbytes -= host.numel()

    def _put(self, store: Store, key: str, view: memoryview) -> None:
        try:
            (status,) = store.submit_put_absent([key], [view], timeout_s=STORE_TIMEOUT_S).results()
        except StoreUnavailable:
            self.counters.add(metrics.ENCODER_STORE_SKIPPED, 1, "store_unavailable")
            return
        if status == _native.OK:
            self.counters.add(metrics.ENCODER_STORED)
            self.counters.add(metrics.ENCODER_STORED_BYTES, view.nbytes)
        else:
            there = status == _native.PRESENT
            self.counters.add(metrics.ENCODER_STORE_SKIPPED, 1, "already_there" if there else "pool_full")

    def _compare(self, identifier: str, wanted: Stored, ours: memoryview) -> None:
        element = wanted.shape.dtype
        if element not in NUMBERS or wanted.record is None:
            self._ended(identifier, wanted, "gone")
            return
        theirs = wanted.record.data.cast("B")
        ((difference, norm),) = _native.distances(ours, theirs, [(element, ours.nbytes)])
        with self._lock:
            self._compared.append(ComparedOutput(identifier, "", wanted.writer, element, difference, norm))

    def _ended(self, identifier: str, wanted: Stored, why: str) -> None:
        if wanted.record is not None:
            with self._lock:
                self._compared.append(ComparedOutput(identifier, why, wanted.writer))

    def _delete(self, store: Store, keys: list[str]) -> None:
        with contextlib.suppress(StoreUnavailable):
            store.delete_many(keys)

    # Reports.

    def take_report(self) -> EncoderWorkerMetadata | None:
        report, self._report = self._report, EncoderWorkerMetadata()
        with self._lock:
            report.compared, self._compared = self._compared, []
        if self._alone and self._store is not None:
            self._store.count_health(self.counters)
        report.samples = self.counters.take()
        return None if report.is_empty() else report

    def switch_off(self, reason: str) -> None:
        if not self._broken:
            self._broken = True
            self._report.broken = reason

    def close(self) -> None:
        """Wait for what is under way, at most ``CLOSE_S``."""
        self.hear(())
        until_s = time.monotonic() + CLOSE_S
        while self._waiting_nbytes and time.monotonic() < until_s:
            time.sleep(COPY_PAUSE_S)
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._store is not None:
            self._store.close()
