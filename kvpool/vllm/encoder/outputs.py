"""``Outputs``: what requests want of the pool, from the question to verified bytes in this process's memory.

    seen ── asks ──► asked ── the pool has it ──► there ── a request needs it now ──► comes ── verified ──► held
    asked, there, comes ── no answer, no room, gone, put away ──► absent

vLLM takes a yes for a promise: an engine that lacks an output it was promised ends. So only what is held is promised.
What no request wants any more is dropped, and what the engine has taken is the engine's.

Threads: the engine's scheduler thread only. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from vllm.logger import init_logger

from kvpool.errors import StoreUnavailable
from kvpool.store import Batch, Store
from kvpool.store.batch import FOUND, GRACE_S
from kvpool.vllm.encoder.plan import Payload, Shape

logger = init_logger("vllm.kvpool")

ASKED, THERE, COMES, HELD, ABSENT = "asked", "there", "comes", "held", "absent"
AGAIN_S = 1.0  # what the pool lacked so long ago is asked for again by the next request
WARN_EVERY_S = 60.0
MAX_ITEMS = 1 << 16  # that are followed; requests with more encode


@dataclass(eq=False)
class Output:
    """Of an item. ``why``: it is absent, of ``metrics.ENCODER_MISS_REASONS``; ``in_pool``: as last heard."""

    identifier: str
    key: str
    shape: Shape
    nbytes: int
    state: str = ASKED
    why: str = ""
    since_s: float = 0.0  # it is absent
    in_pool: bool = False
    wanted: set[str] = field(default_factory=set)  # by requests
    question: _Question | None = None
    get: Batch | None = None
    gives_up_s: float = 0.0
    payload: Payload | None = None
    writer: bytes = b""
    audited: bool = False

    @property
    def is_settled(self) -> bool:
        return self.state in (HELD, ABSENT)


@dataclass(eq=False)
class _Question:
    batch: Batch
    outputs: Sequence[Output]
    gives_up_s: float


class Outputs:
    """``room_nbytes``: of host memory. ``put_away``: writers whose records count as missing."""

    def __init__(
        self,
        store: Store,
        *,
        room_nbytes: int,
        lookup_timeout_s: float,
        max_load_s: float,
        is_audited: Callable[[], bool],
        put_away: Callable[[], frozenset[bytes]],
        clock: Callable[[], float],
    ) -> None:
        self._store, self._room_nbytes = store, room_nbytes
        self._lookup_timeout_s, self._load_s = lookup_timeout_s, max(max_load_s, lookup_timeout_s)
        self._is_audited, self._put_away, self._clock = is_audited, put_away, clock
        self._outputs: dict[str, Output] = {}
        # Dropped, but a thread of the store may still write to their memory.
        self._stopping: list[Output] = []
        self.wrong: list[str] = []  # keys of records to be deleted
        self._warned_s = -WARN_EVERY_S
        self.taken_nbytes = 0

    def __len__(self) -> int:
        return len(self._outputs)

    def of(self, identifier: str) -> Output | None:
        return self._outputs.get(identifier)

    def want(self, request_id: str, items: Iterable[tuple[str, str, Shape, int]]) -> None:
        """A request has these items: (identifier, key, shape, bytes). Asks the pool for those not asked for yet."""
        now_s, new = self._clock(), []
        for identifier, key, shape, nbytes in items:
            output = self._outputs.get(identifier)
            if output is not None and output.shape != shape:
                self._end(output, "fault", now_s)  # two items under one name: neither is taken from the pool
                output.wanted.add(request_id)
                continue
            if output is None or (
                output.state == ABSENT and now_s > output.since_s + AGAIN_S and output.why != "fault"
            ):
                wanted = set() if output is None else output.wanted
                if output is None and len(self._outputs) >= MAX_ITEMS:
                    continue
                output = Output(identifier, key, shape, nbytes, wanted=wanted)
                self._outputs[identifier] = output
                new.append(output)
            output.wanted.add(request_id)
        if new:
            self._ask(new, now_s)

    def _ask(self, outputs: Sequence[Output], now_s: float) -> None:
        try:
            batch = self._store.submit_touch(
                [output.key for output in outputs], timeout_s=self._lookup_timeout_s
            )
        except StoreUnavailable as error:
            self._away(error, now_s)
            for output in outputs:
                self._end(output, "unavailable", now_s)
            return
        question = _Question(batch, outputs, now_s + self._lookup_timeout_s + GRACE_S)
        for output in outputs:
            output.question = question

    def advance(self, output: Output, *, needed: bool, waits: bool = False) -> None:
        """Take what has come. ``needed``: a request goes on with its bytes, so they are fetched.

        ``waits``: for room; else it is absent without.
        """
        now_s = self._clock()
        if output.state == ASKED and output.question is not None:
            self._answered(output.question, now_s)
        if output.state == THERE and needed:
            self._fetch(output, now_s, waits)
        if output.state == COMES:
            self._arrived(output, now_s)

    def _answered(self, question: _Question, now_s: float) -> None:
        if not question.batch.done():
            if now_s > question.gives_up_s:
                question.batch.cancel()
                for output in question.outputs:
                    if output.state == ASKED:
                        self._end(output, "too_slow", now_s)
            return
        try:
            found = [status in FOUND for status in question.batch.results()]
        except StoreUnavailable as error:
            self._away(error, now_s)
            found, why = [False] * len(question.outputs), "unavailable"
        else:
            why = "absent"
        for output, there in zip(question.outputs, found, strict=True):
            output.question = None
            if output.state != ASKED:
                continue
            output.in_pool = there
            if there:
                output.state = THERE
            else:
                self._end(output, why, now_s)

    def _fetch(self, output: Output, now_s: float, waits: bool) -> None:
        self._reap()
        if self.taken_nbytes + output.nbytes > self._room_nbytes:
            if not waits:
                self._end(output, "no_room", now_s)
            return
        payload = np.empty(output.nbytes, np.uint8)
        try:
            output.get = self._store.submit_get(
                [output.key],
                [payload.data.cast("B")],
                timeout_s=self._lookup_timeout_s,
                max_s=self._load_s,
            )
        except StoreUnavailable as error:
            self._away(error, now_s)
            self._end(output, "unavailable", now_s)
            return
        output.state, output.payload = COMES, payload
        output.gives_up_s = now_s + self._load_s + GRACE_S
        self.taken_nbytes += output.nbytes

    def _arrived(self, output: Output, now_s: float) -> None:
        assert output.get is not None
        if not output.get.done():
            if now_s > output.gives_up_s:
                self._end(output, "too_slow", now_s)
            return
        get = output.get
        try:
            (found,) = get.wait()
        except StoreUnavailable as error:
            self._away(error, now_s)
            self._end(output, "unavailable", now_s)
            return
        output.get = None
        if not found:
            output.in_pool = False
            self._end(output, "absent", now_s)
            return
        (output.writer,) = get.writers()
        if output.writer in self._put_away():
            self.wrong.append(output.key)
            output.in_pool = False
            self._end(output, "put_away", now_s)
            return
        output.state, output.audited = HELD, self._is_audited()

    def _end(self, output: Output, why: str, now_s: float) -> None:
        """It does not come from the pool."""
        self._free(output)
        output.state, output.why, output.since_s = ABSENT, why, now_s

    def _free(self, output: Output) -> None:
        if output.payload is None:
            return
        if output.get is not None:
            output.get.cancel()
            stopping = Output(output.identifier, output.key, output.shape, output.nbytes)
            stopping.get, stopping.payload = output.get, output.payload
            self._stopping.append(stopping)
            self._reap()
        else:
            self.taken_nbytes -= output.nbytes
        output.payload = output.get = None

    def _reap(self) -> None:
        for stopping in [one for one in self._stopping if one.get is not None and one.get.done()]:
            self._stopping.remove(stopping)
            self.taken_nbytes -= stopping.nbytes

    def take(self, identifier: str) -> Output | None:
        """The engine has this output now, or computes it: it is not followed any more."""
        output = self._outputs.pop(identifier, None)
        if output is not None and output.payload is not None and output.get is None:
            self.taken_nbytes -= output.nbytes
        elif output is not None:
            self._free(output)
        return output

    def leave(self, request_id: str, identifiers: Iterable[str]) -> None:
        """A request is over."""
        for identifier in identifiers:
            if (output := self._outputs.get(identifier)) is not None:
                output.wanted.discard(request_id)
                if not output.wanted:
                    self._free(output)
                    del self._outputs[identifier]

    def forget(self) -> None:
        """All of it is of other weights."""
        for output in self._outputs.values():
            self._free(output)
        self._outputs.clear()

    def _away(self, error: StoreUnavailable, now_s: float) -> None:
        if now_s >= self._warned_s + WARN_EVERY_S:
            self._warned_s = now_s
            logger.warning("kvpool: the pool gives no answer, so items are encoded: %s", error)
