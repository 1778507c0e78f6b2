"""``Outcomes``: what the pool was to each request, and what the engine was asked for; each request counts once.

A request is admitted when the engine allocates its blocks. One that loads is counted when the load has ended, as a hit
only if it succeeded; a request that comes back after a preemption is not counted again.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvpool import _native, metrics
from kvpool.discovery.traffic import Seen, Traffic
from kvpool.key.key import Namespace
from kvpool.metrics import Counters
from kvpool.tracing import Tracing
from kvpool.vllm.request_state import RequestState

RATIOS_S = 0.1  # between two estimates of an engine that is asked
AGED_S = 10.0  # between two estimates of an engine that gets no request: old requests leave the windows


class Outcomes:
    """Counts in ``counters``. ``record_tokens``: of the blocks whose hashes are handed over.

    ``tell``: called with all windows of the traffic, ten times a second at most. ``clock``: in seconds.
    ``tracing``: takes spans of lookups and loads.
    """

    def __init__(
        self,
        counters: Counters,
        *,
        record_tokens: int,
        tell: Callable[[dict[str, Seen]], None],
        clock: Callable[[], float],
        tracing: Tracing,
    ) -> None:
        self._counters, self._record_tokens = counters, record_tokens
        self._tell, self._clock = tell, clock
        self._traffic = Traffic(clock)
        self._tracing = tracing
        self._told_at_s = self._counted_at_s = clock() - RATIOS_S
        self._counted_more = False  # since the last estimate

    def waited(self, state: RequestState, now_s: float, *, answered: bool) -> None:
        """The lookup of a request has ended, or was given up; observed once for each lookup."""
        waited_s = 0.0
        if state.waiting_since is not None:
            state.waited_s = waited_s = now_s - state.waiting_since
            state.waiting_since = None
            headers = getattr(state.request, "trace_headers", None)
            self._tracing.record("kvpool.lookup", headers, waited_s, answered=answered)
        if not state.wait_counted:
            state.wait_counted = True
            self._counters.observe(
                metrics.LOOKUP_WAIT_SECONDS, waited_s, "answered" if answered else "failed"
            )

    def admitted(
        self, state: RequestState, hashes: Sequence[bytes], namespace: Namespace | None, *, loads: bool
    ) -> None:
        """The engine has allocated blocks. ``hashes``: of the prompt's full blocks; ``loads``: a load begins."""
        if state.counted:
            return
        state.counted = True
        if namespace is not None:
            self._traffic.add(
                _native.pack_hashes(hashes),
                len(hashes[0]) if hashes else 8,
                salt=int(namespace.hex[:16], 16),
                block_tokens=self._record_tokens,
                prompt_tokens=state.request.num_prompt_tokens,
            )
        if loads:
            state.loads_first = True
        else:
            self._count(state, state.result, 0)

    def loaded(self, state: RequestState, tokens: int, *, ok: bool) -> None:
        """The load of ``tokens`` has ended."""
        self._counters.add(metrics.LOADED_TOKENS, tokens if ok else 0)
        headers = getattr(state.request, "trace_headers", None)
        self._tracing.record("kvpool.load", headers, state.load_s, tokens=tokens, loaded=ok)
        if state.loads_first:
            state.loads_first = False
            self._count(state, "hit" if ok else "load_failed", tokens if ok else 0)

    def tell_ratios(self) -> None:
        """Set the gauges of the hit ratio and its ceiling where a request was counted since the last time, and
        ``RATIOS_S`` after the last estimate with such a one; else after ``AGED_S``. An estimate takes 30 us.

        The two times are apart: a request is counted when its load ends. An estimate before that must not delay the one
        after it, which is the last of an engine that rests then.
        """
        now_s = self._clock()
        if self._counted_more and now_s - self._counted_at_s >= RATIOS_S:
            self._counted_at_s, self._counted_more = now_s, False
        elif now_s - self._told_at_s < AGED_S:
            return
        self._told_at_s = now_s
        windows = self._traffic.windows()
        for window, seen in windows.items():
            if seen.prompt_tokens:
                self._counters.set(metrics.HIT_RATIO, round(seen.hit_ratio, 4), window)
                self._counters.set(metrics.HIT_CEILING_RATIO, round(seen.ceiling, 4), window)
        self._tell(windows)

    def _count(self, state: RequestState, result: str, loaded: int) -> None:
        assert result in metrics.REQUEST_RESULTS, result
        prompt = state.request.num_prompt_tokens
        local = min(state.local_tokens, prompt)
        self._counters.add(metrics.REQUESTS, 1, result)
        self._counters.add(metrics.PROMPT_TOKENS, local, "engine_cache")
        self._counters.add(metrics.PROMPT_TOKENS, loaded, "pool")
        self._counters.add(metrics.PROMPT_TOKENS, max(0, prompt - local - loaded), "computed")
        self._traffic.spare(local + loaded)
        self._counted_more = True
