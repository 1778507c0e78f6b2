"""``Offers``: what the pool has of a request's prompt, and how much of it the engine is offered.

The longest usable prefix is offered, unless the cost gate expects a recompute to be faster, or another request loads it
already: then the engine asks again and finds it in its own cache.

Threads: the engine's scheduler thread only. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.request import Request

from kvpool.vllm.audit.audits import Audits
from kvpool.vllm.engine import internals
from kvpool.vllm.engine.namespace import EngineNamespace
from kvpool.vllm.geometry import Geometry
from kvpool.vllm.load.gate import MIN_STEP_TOKENS, CostGate, Source
from kvpool.vllm.load.loads import Loads
from kvpool.vllm.load.lookups import Lookups, RequestLookup
from kvpool.vllm.load.prefetch import Prefetches
from kvpool.vllm.load.state import Found, RequestState, Span, Wait
from kvpool.vllm.requests import Asked

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
        audits: Audits,
        stores: bool,
    ) -> None:
        self._geometry, self._namespace, self._lookups, self._loads = geometry, namespace, lookups, loads
        self._prefetches, self._gate, self._stores = prefetches, gate, stores
        self._audits = audits

    def look_up(self, state: RequestState, now_s: float) -> RequestLookup | None:
        """Start the lookup of a request; None without a pool."""
        asked, found = state.asked, state.found
        tag = asked.tag
        if self._namespace.current is None or tag is None:
            return None
        if found.lookup is not None:
            found.lookup.cancel()
        found.lookup, found.lookups = None, found.lookups + 1
        if not self._lookups.are_true(asked.request):
            self.refuse(state, "fault")
            return None
        found.lookup = self._lookups.start(self._namespace.current, asked.request, tag, now_s)
        found.refused |= found.lookup is None
        return found.lookup

    def begin(self, state: RequestState) -> None:
        """The engine asks for a request: no earlier offer counts."""
        state.found.span = state.found.ended = None

    def withhold(self, state: RequestState, result: str, reason: str) -> Offer:
        """Offer nothing, for reasons outside of the pool."""
        state.found.result, state.found.reason = result, reason
        return NO_OFFER

    def refuse(self, state: RequestState, reason: str) -> None:
        """Offer nothing again."""
        state.found.refused, state.found.reason = True, reason

    def missed(self, state: RequestState, reason: str) -> None:
        """It is known why the pool has no more of a prompt."""
        if state.found.result == "miss":
            state.found.reason = reason

    def take(self, state: RequestState) -> tuple[RequestLookup | None, Span | None]:
        """The engine gave the request blocks: end its lookup and its offer."""
        found = state.found
        taken = found.lookup, found.span
        found.lookup = found.span = None
        return taken

    def forget(self, state: RequestState) -> None:
        """What the pool has is not known any more."""
        if state.found.lookup is not None:
            state.found.lookup.cancel()
        state.found.lookup = state.found.span = None

    def make(self, state: RequestState, local_tokens: int, max_tokens: int, now_s: float) -> Offer:
        """An offer beside ``local_tokens`` of the engine's own cache; a prefix ends at ``max_tokens``."""
        request, found = state.asked.request, state.found
        found.result = "no_answer"
        if self._namespace.current is None or not state.asked.checked:
            if self._in_time(found, now_s):
                return self._wait(found, now_s)
            found.reason = "unavailable" if state.asked.checked else "adapter"
            self._end_wait(found, now_s, answered=False)
            return NO_OFFER
        lookup = found.lookup
        if lookup is None or lookup.is_stale(now_s):
            lookup = self.look_up(state, now_s)
        if lookup is None:
            return NO_OFFER
        if not lookup.ended(now_s):
            return self._wait(found, now_s)
        present, hit = self.present(state, lookup, now_s), local_tokens
        if present is not None:
            longest = self._hit(state, lookup, local_tokens, max_tokens, now_s)
            if longest is None:
                return self._wait(found, now_s)
            hit = longest
        if request.num_preemptions and local_tokens and hit - local_tokens < MIN_STEP_TOKENS:
            hit = local_tokens  # memory is short, and a load holds blocks without progress
        if hit > local_tokens and self._loads.bring(request, local_tokens, hit):
            return self._wait(found, now_s)
        room = hit == local_tokens or self._loads.leave_room(request, hit)
        waits = not (room or found.crowded) and self._loads.under_way()
        if waits and self._in_time(found, now_s):
            return self._wait(found, now_s)
        self._end_wait(found, now_s, answered=present is not None)
        if present is None:
            return NO_OFFER
        found.result = "miss"
        if hit == local_tokens:
            return NO_OFFER
        if not room:
            found.result, found.crowded = "no_room", True
            return NO_OFFER
        near = self._near_end(request, lookup, local_tokens, hit)
        paid = self._paid_end(lookup, local_tokens, near, hit)
        if paid < hit:
            found.result, found.reason = "too_slow", "gate"
        if paid == local_tokens:
            found.refused = True
            return NO_OFFER
        end = self._audits.shortened(present, local_tokens, paid)
        found.span = Span(local_tokens, end, near=paid == near, found_tokens=paid if end < paid else 0)
        return end - local_tokens, end > local_tokens

    def present(self, state: RequestState, lookup: RequestLookup, now_s: float) -> Sequence[bytes] | None:
        """The answer of an ended lookup; None: it failed, and the request is offered nothing again."""
        if lookup.present is None:
            self.refuse(state, "too_slow" if lookup.late else "unavailable")
            self._lookups.failed(lookup.failure, now_s)
        else:
            self._lookups.answered()
        return lookup.present

    def answer_for_stores(
        self, state: RequestState, lookup: RequestLookup, now_s: float
    ) -> Sequence[Sequence[int]] | None:
        """A lookup's answer for the store planner, empty if it failed; None: pending."""
        return (self.present(state, lookup, now_s) or ()) if lookup.ended(now_s) else None

    def _hit(
        self, state: RequestState, lookup: RequestLookup, local_tokens: int, max_tokens: int, now_s: float
    ) -> int | None:
        """The end of the longest usable prefix; None: how much of its next block is there is not known yet."""
        present = lookup.present or ()
        hit = self._geometry.longest_hit(present, local_tokens=local_tokens, max_tokens=max_tokens)
        stop = self._geometry.junction(present, max_tokens)
        if stop > hit and self._stores:
            internals.stop_at(state.asked.request, stop)
        tail = self._tail(state.asked, lookup, max(hit, stop), now_s)
        if tail is None and self._in_time(state.found, now_s):
            return None
        return max(hit, tail or 0)

    def _tail(self, asked: Asked, lookup: RequestLookup, whole_tokens: int, now_s: float) -> int | None:
        """How many tokens the pool has with the beginning of the block behind ``whole_tokens``; None: not known yet."""
        namespace, tag = self._namespace.current, asked.tag
        if not self._geometry.has_tails or namespace is None or tag is None:
            return 0
        hash_tokens = self._geometry.hash_block_tokens
        most = min(
            asked.request.num_tokens - 1,
            internals.covered_tokens(asked.request),
            whole_tokens + self._geometry.first.block_tokens - 1,
        )
        places = range(whole_tokens // hash_tokens, most // hash_tokens)
        if not places:
            return 0
        if lookup.tails is None or lookup.tails[0] != whole_tokens:
            started = self._lookups.start_tails(namespace, asked.request, tag, places, now_s)
            if started is None:
                return 0
            lookup.tails = (whole_tokens, started)
        tails = lookup.tails[1]
        if not tails.ended(now_s):
            return None
        if tails.present is None:
            self._lookups.failed(tails.failure, now_s)
            return 0
        parts = zip(*tails.present, strict=True)
        ends = [place for place, there in zip(places, parts, strict=True) if all(there)]
        return (ends[-1] + 1) * hash_tokens if ends else 0

    def _near_end(self, request: Request, lookup: RequestLookup, local_tokens: int, hit: int) -> int:
        """The end of the part of a hit that the near pool has; ``local_tokens``: of none."""
        if self._prefetches is None:
            return local_tokens
        if self._prefetches.brought(request.request_id):
            return hit
        return self._geometry.longest_hit(lookup.near, local_tokens=local_tokens, max_tokens=hit)

    def _paid_end(self, lookup: RequestLookup, local_tokens: int, near: int, hit: int) -> int:
        """The end of the part of a hit that the cost gate admits; asked once per lookup and pool."""
        if self._gate is None:
            return hit
        paid = local_tokens
        parts: tuple[tuple[Source, int], ...] = (("near", near), ("pool", hit))
        for source, end in parts:
            if end > paid:
                if source not in lookup.admitted:
                    lookup.admitted[source] = self._gate.admits(source)
                if not lookup.admitted[source]:
                    break
                paid = end
        return paid

    def _in_time(self, found: Found, now_s: float) -> bool:
        return found.waiting_since is None or now_s - found.waiting_since < self._lookups.timeout_s

    @staticmethod
    def _wait(found: Found, now_s: float) -> Offer:
        if found.waiting_since is None:
            found.waiting_since = now_s
        return ASK_AGAIN

    @staticmethod
    def _end_wait(found: Found, now_s: float, *, answered: bool) -> None:
        seconds = None if found.waiting_since is None else now_s - found.waiting_since
        if seconds is not None:
            found.waited_s, found.waiting_since = seconds, None
        found.ended = Wait(seconds, answered)
