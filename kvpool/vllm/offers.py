"""``Offers``: what the pool has of a request's prompt, and how much of it the engine is offered.

The longest usable prefix is offered, unless the cost gate expects a recompute to be faster, or another request loads it
already: then the engine asks again and finds it in its own cache.

Threads: the engine's scheduler thread only. Nothing here waits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvpool.vllm import internals
from kvpool.vllm.gate import MIN_STEP_TOKENS, CostGate, Source
from kvpool.vllm.geometry import Geometry
from kvpool.vllm.identity import EngineNamespace
from kvpool.vllm.loads import Loads
from kvpool.vllm.lookups import Lookups, RequestLookup
from kvpool.vllm.metrics import Outcomes
from kvpool.vllm.prefetch import Prefetches
from kvpool.vllm.requests import RequestState

Offer = tuple[int | None, bool]  # tokens that the pool adds, None: ask again later; the load is asynchronous
NO_OFFER: Offer = (0, False)
ASK_AGAIN: Offer = (None, False)


class Offers:
    """Decides what the engine is offered of requests' prefixes.

    ``prefetches``: None without a near pool. ``gate``: None: every load is offered. ``stores``: the engine stores, so a
    step of a prompt may end where another prompt left it.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        namespace: EngineNamespace,
        lookups: Lookups,
        loads: Loads,
        prefetches: Prefetches | None,
        gate: CostGate | None,
        outcomes: Outcomes,
        stores: bool,
    ) -> None:
        self._geometry, self._namespace, self._lookups, self._loads = geometry, namespace, lookups, loads
        self._prefetches, self._gate, self._outcomes, self._stores = prefetches, gate, outcomes, stores

    def look_up(self, state: RequestState) -> RequestLookup | None:
        """Start the lookup of a request; None without a pool."""
        tag = state.adapter.tag if state.adapter is not None else b""  # another thread may set it to None
        if self._namespace.current is None or tag is None:
            return None
        if state.lookup is not None:
            state.lookup.cancel()
        state.lookup, state.wait_counted = None, False
        state.tails, state.admitted = None, {}
        if not self._lookups.are_true(state.request):
            state.refused, state.reason = True, "fault"
            return None
        state.lookup = self._lookups.start(self._namespace.current, state.request, tag)
        state.refused |= state.lookup is None
        return state.lookup

    def make(self, state: RequestState, local_tokens: int, max_tokens: int) -> Offer:
        """An offer beside ``local_tokens`` of the engine's own cache; a prefix ends at ``max_tokens``."""
        request = state.request
        now = time.monotonic()
        state.result = "no_answer"
        if self._namespace.current is None or not state.checked:
            if self._in_time(state, now):
                return self._wait(state, now)
            state.reason = "unavailable" if state.checked else "adapter"
            self._outcomes.waited(state, now, answered=False)
            return NO_OFFER
        lookup = state.lookup
        if lookup is None or lookup.is_stale(now):
            lookup = self.look_up(state)
        if lookup is None:
            return NO_OFFER
        if not lookup.ended(now):
            return self._wait(state, now)
        present, hit = self.present(state, lookup), local_tokens
        if present is not None:
            found = self._hit(state, present, local_tokens, max_tokens, now)
            if found is None:
                return self._wait(state, now)
            hit = found
        if request.num_preemptions and local_tokens and hit - local_tokens < MIN_STEP_TOKENS:
            hit = local_tokens  # memory is short, and a load holds blocks without progress
        if hit > local_tokens and self._loads.bring(request, local_tokens, hit):
            return self._wait(state, now)
        room = hit == local_tokens or self._loads.leave_room(request, hit)
        waits = not (room or state.crowded) and self._loads.under_way()
        if waits and self._in_time(state, now):
            return self._wait(state, now)
        self._outcomes.waited(state, now, answered=present is not None)
        if present is None:
            return NO_OFFER
        state.result = "miss"
        if hit == local_tokens:
            return NO_OFFER
        if not room:
            state.result, state.crowded = "no_room", True
            return NO_OFFER
        near = self._near_end(state, lookup, local_tokens, hit)
        paid = self._paid_end(state, local_tokens, near, hit)
        if paid < hit:
            state.result, state.reason = "too_slow", "gate"
        if paid == local_tokens:
            state.refused = True
            return NO_OFFER
        state.offered, state.near_only = (local_tokens, paid), paid == near
        return paid - local_tokens, True

    def present(self, state: RequestState, lookup: RequestLookup) -> Sequence[bytes] | None:
        """The answer of an ended lookup; None: it failed, and the request is offered nothing again."""
        if lookup.present is None:
            state.refused, state.reason = True, "too_slow" if lookup.late else "unavailable"
            self._lookups.failed(lookup.failure)
        else:
            self._lookups.answered()
        return lookup.present

    def answer_for_stores(self, state: RequestState, lookup: RequestLookup) -> Sequence[Sequence[int]] | None:
        """A lookup's answer for the store planner, empty if it failed; None: pending."""
        return (self.present(state, lookup) or ()) if lookup.ended(time.monotonic()) else None

    def _hit(
        self, state: RequestState, present: Sequence[bytes], local_tokens: int, max_tokens: int, now: float
    ) -> int | None:
        """The end of the longest usable prefix; None: how much of its next block is there is not known yet."""
        hit = self._geometry.longest_hit(present, local_tokens=local_tokens, max_tokens=max_tokens)
        stop = self._geometry.junction(present, max_tokens)
        if stop > hit and self._stores:
            internals.stop_at(state.request, stop)
        tail = self._tail(state, max(hit, stop), now)
        if tail is None and self._in_time(state, now):
            return None
        return max(hit, tail or 0)

    def _tail(self, state: RequestState, whole_tokens: int, now: float) -> int | None:
        """How many tokens the pool has with the beginning of the block behind ``whole_tokens``; None: not known yet."""
        namespace, tag = self._namespace.current, state.adapter.tag if state.adapter is not None else b""
        if not self._geometry.has_tails or namespace is None or tag is None:
            return 0
        hash_tokens = self._geometry.hash_block_tokens
        most = min(
            state.request.num_tokens - 1,
            internals.covered_tokens(state.request),
            whole_tokens + self._geometry.first.block_tokens - 1,
        )
        places = range(whole_tokens // hash_tokens, most // hash_tokens)
        if not places:
            return 0
        if state.tails is None or state.tails[0] != whole_tokens:
            lookup = self._lookups.start_tails(namespace, state.request, tag, places)
            if lookup is None:
                return 0
            state.tails = (whole_tokens, lookup)
        lookup = state.tails[1]
        if not lookup.ended(now):
            return None
        if lookup.present is None:
            self._lookups.failed(lookup.failure)
            return 0
        parts = zip(*lookup.present, strict=True)
        ends = [place for place, there in zip(places, parts, strict=True) if all(there)]
        return (ends[-1] + 1) * hash_tokens if ends else 0

    def _near_end(self, state: RequestState, lookup: RequestLookup, local_tokens: int, hit: int) -> int:
        """The end of the part of a hit that the near pool has; ``local_tokens``: of none."""
        if self._prefetches is None:
            return local_tokens
        if self._prefetches.brought(state.request.request_id):
            return hit
        return self._geometry.longest_hit(lookup.near, local_tokens=local_tokens, max_tokens=hit)

    def _paid_end(self, state: RequestState, local_tokens: int, near: int, hit: int) -> int:
        """The end of the part of a hit that the cost gate admits; asked once per lookup and pool."""
        if self._gate is None:
            return hit
        paid = local_tokens
        parts: tuple[tuple[Source, int], ...] = (("near", near), ("pool", hit))
        for source, end in parts:
            if end > paid:
                if source not in state.admitted:
                    state.admitted[source] = self._gate.admits(source)
                if not state.admitted[source]:
                    break
                paid = end
        return paid

    def _in_time(self, state: RequestState, now: float) -> bool:
        return state.waiting_since is None or now - state.waiting_since < self._lookups.timeout_s

    @staticmethod
    def _wait(state: RequestState, now: float) -> Offer:
        if state.waiting_since is None:
            state.waiting_since = now
        return ASK_AGAIN
