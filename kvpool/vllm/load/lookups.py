"""``Lookups``: existence checks, one for the prefix of each request.

Threads: the engine's scheduler thread only. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress

from vllm.logger import init_logger
from vllm.v1.request import Request

from kvpool import _native, metrics
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.key.key import MIN_HASH_NBYTES, Namespace
from kvpool.metrics import Counters
from kvpool.store import LookupBatch, LookupGroup, Store
from kvpool.store.batch import END_OF_ALL
from kvpool.vllm.engine import internals
from kvpool.vllm.engine.adapters import pool_hashes
from kvpool.vllm.engine.proofs import HashProofs
from kvpool.vllm.geometry import Geometry
from kvpool.vllm.load.gate import Source
from kvpool.vllm.load.seen import Record

logger = init_logger("vllm.kvpool")

FRESH_S = 10.0  # older answers are refreshed before an offer
LOOKUP_GRACE_S = 0.25  # grace of a lookup that stops after its own deadline
WARN_EVERY_S = 60.0  # between two warnings of an unstable pool
MAX_LACKING = 64  # records of a group that say why a hit is not longer


class RequestLookup:
    """One lookup in flight, or its answer. ``asked``: by group, which records it asks for (``Geometry.reached``).

    ``present``, after success: by group a byte per record, 1: present in the pool, or needed by no hit. Under full
    attention most records after the first miss were skipped and count as missing. ``near``: the same of the nearer of
    two pools. ``failure``: why it failed; else ""; ``late``: after all of its time. ``tails``: the lookup of the tails
    behind so many tokens of whole blocks. ``admitted``: what the cost gate said to the hit.
    """

    def __init__(
        self,
        lookup: LookupBatch,
        asked: Sequence[bytes],
        started_s: float,
        timeout_s: float,
        groups: Sequence[LookupGroup] = (),
    ) -> None:
        self._lookup, self._asked, self._groups = lookup, asked, groups
        self._started_s, self._ends_s = started_s, started_s + timeout_s
        self._gives_up_s = self._ends_s + LOOKUP_GRACE_S
        self._found: Sequence[bytes] = ()  # by group: of the records that were asked for
        self.present: list[bytes] | None = None
        self.failure, self.late = "", False
        self.tails: tuple[int, RequestLookup] | None = None
        self.admitted: dict[Source, bool] = {}

    def ended(self, now_s: float) -> bool:
        """Whether the answer, or its failure, is known. Never blocks."""
        if self.present is None and not self.failure:
            if self._lookup.done():
                try:
                    self._found = self._lookup.records()
                    self.present = list(map(_spread, self._found, self._asked))
                except StoreUnavailable:
                    self.failure = "store_unavailable"
                    self.late = now_s >= self._ends_s
            elif now_s > self._gives_up_s:
                self.failure, self.late = "timeout", True
                self._lookup.cancel()
        return self.present is not None or bool(self.failure)

    @property
    def near(self) -> list[bytes]:
        return list(map(_spread, self._lookup.near(), self._asked))

    def answers(self) -> Iterable[tuple[LookupGroup, bytes]]:
        """What was asked for, with a byte per record: 1: the pool is known to have it."""
        found = self._found or [bytes(group.records) for group in self._groups]
        return zip(self._groups, found, strict=True)

    def lacking(self, hit_tokens: int) -> list[Record]:
        """The absent records for which no hit was longer than ``hit_tokens``.

        Under full attention the first one, of the group that ends first: what is behind it is unknown. Of windows and
        states the last ones before that.
        """
        ends = END_OF_ALL
        lacking: list[Record] = []
        whole = [one for one in self.answers() if not one[0].sliding_window]
        for group, there in whole:
            if (at := there.find(0, hit_tokens // group.record_tokens)) >= 0:
                ends = min(ends, at * group.record_tokens)
        for group, there in whole:
            at = ends // group.record_tokens
            if at < len(there) and not there[at]:
                lacking.append(_one(group, at))
        for group, there in self.answers():
            if group.sliding_window:
                begin, end = hit_tokens // group.record_tokens, min(len(there), ends // group.record_tokens)
                while len(lacking) < MAX_LACKING and (end := there.rfind(0, begin, end)) >= 0:
                    lacking.append(_one(group, end))
        return lacking

    def is_stale(self, now_s: float) -> bool:
        return self.present is not None and now_s - self._started_s > FRESH_S

    def cancel(self) -> None:
        """Give up the answer. Never blocks."""
        self._lookup.cancel()


class Lookups:
    """Asks ``store`` for requests' prompts. ``timeout_s``: how long a request waits for the pool, in all."""

    def __init__(
        self, store: Store, geometry: Geometry, proofs: HashProofs, *, timeout_s: float, counters: Counters
    ) -> None:
        self._store, self._geometry, self._proofs = store, geometry, proofs
        self.timeout_s, self._counters = timeout_s, counters
        self._is_away, self._warned_at = False, -WARN_EVERY_S  # as logged

    def learn(self, parts: Mapping[int, int]) -> None:
        """Take from the workers how many parts a rank makes of a record, by group; before the first lookup."""
        self._geometry = self._geometry.with_parts(parts)

    def are_true(self, request: Request) -> bool:
        """Whether a request's hashes find the KV of its own tokens."""
        return not internals.is_resumable(request) or self._proofs.is_true(request)

    def start(self, namespace: Namespace, request: Request, tag: bytes, now_s: float) -> RequestLookup | None:
        """Start the lookup of a request; ``tag``: its adapter's, or empty. None: no pool."""
        lookup = self._submit(namespace, *self.records(request, tag), now_s)
        if lookup is not None:
            self._counters.add(metrics.LOOKUP_REQUESTS)
        return lookup

    def records(self, request: Request, tag: bytes) -> tuple[list[LookupGroup], list[bytes]]:
        """By group, the records of a request that a hit may need, and a byte for each of all: 1: it is one of them."""
        geometry = self._geometry
        hashes = [geometry.record_hashes(request.block_hashes, group) for group in geometry.groups]
        asked = groups_to_ask(geometry, hashes)
        wanted = [_repeated(each, len(known)) for each, known in zip(geometry.reached, hashes, strict=True)]
        if tag:
            asked = [one._replace(hashes=pool_hashes(one.hashes, one.hash_nbytes, tag)) for one in asked]
        return asked, wanted

    def start_tails(
        self, namespace: Namespace, request: Request, tag: bytes, places: range, now_s: float
    ) -> RequestLookup | None:
        """Start the lookup of tails that end with these of the request's hashes. None: no pool."""
        hashes = request.block_hashes[places.start : places.stop]
        nbytes = len(hashes[0])
        packed = _native.pack_hashes(hashes)
        if tag:
            packed = pool_hashes(packed, nbytes, tag)
        asked = [
            LookupGroup(
                packed, nbytes, index, len(group.all_parts(self._geometry.ranks)), 1, sliding_window=True
            )
            for index, group in enumerate(self._geometry.groups)
            if not group.scratch
        ]
        return self._submit(namespace, asked, [b"\1" * len(places)] * len(asked), now_s)

    def _submit(
        self, namespace: Namespace, asked: Sequence[LookupGroup], wanted: Sequence[bytes], now_s: float
    ) -> RequestLookup | None:
        try:
            lookup = self._store.submit_lookup(namespace, asked, timeout_s=self.timeout_s)
        except StoreUnavailable:
            self.failed("store_unavailable", now_s)
            return None
        self._counters.add(metrics.LOOKUP_BLOCKS, sum(group.records * group.ranks for group in asked))
        return RequestLookup(lookup, wanted, now_s, self.timeout_s, asked)

    def answered(self) -> None:
        if self._is_away:
            self._is_away = False
            logger.info("kvpool: the pool answers again")

    def failed(self, cause: str, now_s: float) -> None:
        self._counters.add(metrics.LOOKUP_FAILURES, 1, cause)
        if not self._is_away and now_s - self._warned_at >= WARN_EVERY_S:
            self._is_away, self._warned_at = True, now_s
            logger.warning(
                "kvpool: the pool gives no answer (%s), so prompts are computed; see kvpool_lookup_failures_total",
                cause,
            )


def groups_to_ask(geometry: Geometry, hashes: Sequence[Sequence[bytes]]) -> list[LookupGroup]:
    """The groups of a prompt's lookup; ``hashes``: by group, of its records. Errors: ``ConfigError``."""
    asked = []
    of_each = zip(geometry.groups, hashes, geometry.reached, strict=True)
    for index, (group, known, pattern) in enumerate(of_each):
        if (count := pattern.count(1)) < len(pattern):
            known = list(compress(known, _repeated(pattern, len(known))))
        try:
            packed = _native.pack_hashes(known)
        except ValueError as error:
            raise ConfigError(f"a request cannot be looked up: {error}") from error
        asked.append(
            LookupGroup(
                group=index,
                hashes=packed,
                hash_nbytes=len(known[0]) if known else MIN_HASH_NBYTES,
                ranks=len(group.all_parts(geometry.ranks)),
                # As if they were evenly spread: none is taken to begin behind where it does.
                record_tokens=group.record_tokens * len(pattern) // max(count, 1),
                sliding_window=not group.needs_all,
            )
        )
    return asked


def _one(group: LookupGroup, record: int) -> Record:
    start = record * group.hash_nbytes
    return group.hashes[start : start + group.hash_nbytes], group.group


def _repeated(pattern: bytes, count: int) -> bytes:
    return (pattern * (count // len(pattern) + 1))[:count]


def _spread(present: bytes, asked: bytes) -> bytes:
    """The answers for the records that were asked for, among all."""
    if asked.find(0) < 0:
        return present
    found, answers = bytearray(b"\1" * len(asked)), iter(present)
    for place in compress(range(len(asked)), asked):
        found[place] = next(answers)
    return bytes(found)
