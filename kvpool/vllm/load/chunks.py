"""``ChunkLookups``: existence checks of the tier's chunks.

A step's questions are batched at its end and answered in a later step. A chunk is remembered while a request that asked
for it lives.

Threads: the engine's scheduler thread only. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import OffloadKey, get_offload_block_hash, get_offload_group_idx

from kvpool import metrics
from kvpool.key.key import MAX_HASH_NBYTES, MAX_INDEX, MIN_HASH_NBYTES
from kvpool.metrics import Counters
from kvpool.store import Batch, Store
from kvpool.transfer.mover import STORE_TIMEOUT_S
from kvpool.vllm.load.lookups import LOOKUP_GRACE_S

ASK_KEYS = 1 << 16  # per batch; a store takes 2^20, and long requests have more
MAX_TOUCHES = 1 << 16  # pending uses of chunks; more are dropped


@dataclass(slots=True)
class _Probe:
    asked_at: float
    present: bool | None = None
    requests: set[str] = field(default_factory=set)


class ChunkLookups:
    """``names``: the keys of chunks in the pool. ``cause``: maps an exception to a failed batch's label."""

    def __init__(
        self,
        store: Store,
        names: Callable[[Collection[OffloadKey]], list[str]],
        *,
        timeout_s: float,
        counters: Counters,
        cause: Callable[[Exception], str],
        clock: Callable[[], float],
    ) -> None:
        self._store, self._names, self._timeout_s, self._clock = store, names, timeout_s, clock
        self._counters, self._cause = counters, cause
        self._probes: dict[OffloadKey, _Probe] = {}
        self._asked_by: dict[str, set[OffloadKey]] = {}
        self._questions: list[OffloadKey] = []
        self._batches: list[tuple[list[OffloadKey], Batch]] = []
        self._touches: dict[OffloadKey, None] = {}
        self._touching: list[Batch] = []

    def lookup(self, key: OffloadKey, request_id: str) -> bool | None:
        """Whether the pool has it; None: unknown, ask again in a later step."""
        self.collect()
        now = self._clock()
        probe = self._probes.get(key)
        if probe is None:
            probe = self._probes[key] = _Probe(now)
            self._questions.append(key)
        probe.requests.add(request_id)
        self._asked_by.setdefault(request_id, set()).add(key)
        if probe.present is None and now - probe.asked_at > self._timeout_s + LOOKUP_GRACE_S:
            probe.present = False
            self._counters.add(metrics.LOOKUP_FAILURES, 1, "timeout")
        return probe.present

    def forget(self, request_id: str) -> None:
        for key in self._asked_by.pop(request_id, ()):
            probe = self._probes[key]
            probe.requests.discard(request_id)
            if not probe.requests:
                del self._probes[key]  # a later answer is dropped

    def touch(self, keys: Collection[OffloadKey]) -> None:
        """Count these as used, with the next ``send``."""
        for key in keys:
            if len(self._touches) >= MAX_TOUCHES:
                return
            if is_spellable(key) and key not in self._probes:  # a question already counts as use
                self._touches[key] = None

    def send(self) -> None:
        questions = self._take_questions()
        for first in range(0, len(questions), ASK_KEYS):
            self._ask(questions[first : first + ASK_KEYS])
        self._send_touches()

    def collect(self) -> None:
        for batch in [batch for batch in self._batches if batch[1].done()]:
            self._batches.remove(batch)
            keys, transfer = batch
            try:
                answers = transfer.wait()
            except Exception as error:
                self._unanswered(keys, self._cause(error))
                continue
            for key, present in zip(keys, answers, strict=True):
                probe = self._probes.get(key)
                if probe is not None and probe.present is None:
                    probe.present = present

    def miss(self, keys: Iterable[OffloadKey]) -> None:
        """Offer these to no present request any more."""
        for key in keys:
            if (probe := self._probes.get(key)) is not None:
                probe.present = False

    def restart(self) -> None:
        """The namespace changed: answer each question with a miss."""
        self.miss(self._probes)
        for _, transfer in self._batches:
            transfer.cancel()
        self._batches.clear()
        self._questions.clear()
        self._touches.clear()

    def drop_questions(self) -> None:
        self._questions.clear()

    def clear(self) -> None:
        self._batches.clear()
        self._touching.clear()

    def _take_questions(self) -> list[OffloadKey]:
        questions, self._questions = dict.fromkeys(self._questions), []
        return [key for key in questions if key in self._probes]

    def _ask(self, keys: list[OffloadKey]) -> None:
        """Ask whether the pool has these, which counts them as used."""
        spelled = [key for key in keys if is_spellable(key)]
        if len(spelled) < len(keys):
            self._unanswered([key for key in keys if not is_spellable(key)], "fault")
        if not spelled:
            return
        self._counters.add(metrics.LOOKUP_BLOCKS, len(spelled))
        try:
            transfer = self._store.submit_touch(self._names(spelled), timeout_s=self._timeout_s)
        except Exception as error:
            self._unanswered(spelled, self._cause(error))
        else:
            self._batches.append((spelled, transfer))

    def _send_touches(self) -> None:
        """Count the engine's uses. One batch at a time, whose answer is ignored."""
        self._touching = [transfer for transfer in self._touching if not transfer.done()]
        if not self._touches or self._touching:
            return
        try:
            names = self._names(self._touches)
            self._touching.append(self._store.submit_touch(names, timeout_s=STORE_TIMEOUT_S))
        except Exception as error:
            self._cause(error)
        self._touches.clear()

    def _unanswered(self, keys: Iterable[OffloadKey], cause: str) -> None:
        self._counters.add(metrics.LOOKUP_FAILURES, 1, cause)
        self.miss(keys)


def is_spellable(key: OffloadKey) -> bool:
    """Whether a chunk has a key: its hash is one of vLLM's block hashes."""
    return (
        MIN_HASH_NBYTES <= len(get_offload_block_hash(key)) <= MAX_HASH_NBYTES
        and get_offload_group_idx(key) <= MAX_INDEX
    )
