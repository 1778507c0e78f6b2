"""Existence checks: what is asked for a request, whether there is an answer, and what it says.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from vllm.logger import init_logger
from vllm.v1.request import Request

from kvpool import _native, metrics
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.key.key import MIN_HASH_NBYTES, Namespace
from kvpool.metrics import Counters
from kvpool.store import Lookup, LookupGroup, Store
from kvpool.vllm import internals
from kvpool.vllm.adapters import pool_hashes
from kvpool.vllm.plan import Group

logger = init_logger("vllm.kvpool")

FRESH_S = 10.0  # an answer that is older is asked again before it is offered
LOOKUP_GRACE_S = 0.25  # how long after its own deadline a lookup may still be stopping
WARN_EVERY_S = 60.0  # between two warnings of a pool that comes and goes


class RequestLookup:
    """One lookup under way, or its answer.

    ``present``, after success: by group a byte for each record, 1 where the pool has it. Behind the first record that
    is missing under full attention, most were not asked for and count as missing. ``failure``: why there will be no
    answer; "" else.
    """

    def __init__(self, lookup: Lookup, started_s: float, timeout_s: float) -> None:
        self._lookup, self._started_s = lookup, started_s
        self._gives_up_s = started_s + timeout_s + LOOKUP_GRACE_S
        self.present: list[bytes] | None = None
        self.failure = ""

    def ended(self, now_s: float) -> bool:
        """Whether there is an answer, or there will be none. Never blocks."""
        if self.present is None and not self.failure:
            if self._lookup.done():
                try:
                    self.present = self._lookup.wait()
                except StoreUnavailable:
                    self.failure = "store_unavailable"
            elif now_s > self._gives_up_s:
                self.failure = "timeout"
                self._lookup.cancel()
        return self.present is not None or bool(self.failure)

    def is_stale(self, now_s: float) -> bool:
        """Whether the pool is to be asked again before anything is offered."""
        return self.present is not None and now_s - self._started_s > FRESH_S

    def cancel(self) -> None:
        """Its answer is not wanted any more. Never blocks."""
        self._lookup.cancel()


class Lookups:
    """Asks ``store`` what it holds of requests' prompts, for one engine of ``ranks`` ranks."""

    def __init__(
        self,
        store: Store,
        groups: Sequence[Group],
        *,
        ranks: int,
        hash_block_tokens: int,
        timeout_s: float,
        counters: Counters,
    ) -> None:
        self._store, self._groups, self._ranks = store, list(groups), ranks
        self._hash_block_tokens, self._timeout_s, self._counters = hash_block_tokens, timeout_s, counters
        self._is_away = False  # as logged
        self._warned_at = -WARN_EVERY_S

    def start(self, namespace: Namespace, request: Request, tag: bytes) -> RequestLookup | None:
        """Start the lookup of a request; ``tag`` is of its adapter, or empty. None: there is no pool to ask."""
        hashes = [internals.record_hashes(request, self._hash_block_tokens, group) for group in self._groups]
        asked = groups_to_ask(self._groups, hashes, self._ranks)
        if tag:
            asked = [one._replace(hashes=pool_hashes(one.hashes, one.hash_nbytes, tag)) for one in asked]
        try:
            lookup = self._store.submit_lookup(namespace, asked, timeout_s=self._timeout_s)
        except StoreUnavailable:
            self.failed("store_unavailable")
            return None
        self._counters.add(metrics.LOOKUP_REQUESTS)
        self._counters.add(metrics.LOOKUP_BLOCKS, sum(group.records * group.ranks for group in asked))
        return RequestLookup(lookup, time.monotonic(), self._timeout_s)

    def answered(self) -> None:
        """A lookup has its answer."""
        if self._is_away:
            self._is_away = False
            logger.info("kvpool: the pool answers again")

    def failed(self, cause: str) -> None:
        """A lookup gets no answer."""
        self._counters.add(metrics.LOOKUP_FAILURES, 1, cause)
        now = time.monotonic()
        if not self._is_away and now - self._warned_at >= WARN_EVERY_S:
            self._is_away, self._warned_at = True, now
            logger.warning(
                "kvpool: the pool gives no answer (%s), so prompts are computed; see kvpool_lookup_failures_total",
                cause,
            )


def groups_to_ask(
    groups: Sequence[Group], hashes: Sequence[Sequence[bytes]], ranks: int
) -> list[LookupGroup]:
    """What is to be asked for a prompt. ``hashes``: by group, those of its records. ``ranks``: of the engine.

    Errors: ``ConfigError``.
    """
    asked = []
    for index, (group, known) in enumerate(zip(groups, hashes, strict=True)):
        try:
            packed = _native.pack_hashes(known)
        except ValueError as error:
            raise ConfigError(f"a request cannot be looked up: {error}") from error
        asked.append(
            LookupGroup(
                group=index,
                hashes=packed,
                hash_nbytes=len(known[0]) if known else MIN_HASH_NBYTES,
                ranks=len(group.key_ranks(ranks)),
                record_tokens=group.record_tokens,
                sliding_window=group.window is not None,
            )
        )
    return asked
