"""``PoolCost``: what a token from the pool costs an engine, in tokens to compute, as its cost gate timed it. Pure."""

from __future__ import annotations

from kvpool.index.place.metrics_page import GateCounters

HALF_LIFE_S = 600.0  # after so long what was timed counts half
MIN_TOKENS = 4096.0  # from the pool, and computed, that have to be timed first
NOTHING = GateCounters(0.0, 0.0, 0.0, 0.0)


class PoolCost:
    """Of one engine. ``value``: from 0 to 1, for an engine does not load what it computes sooner; None: not known."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._last = NOTHING
        self._last_s: float | None = None
        self._sums = NOTHING

    def update(self, counters: GateCounters, now_s: float) -> None:
        """``counters``: as they stand now; where one has gone back, the engine has begun anew."""
        if self._last_s is None or any(now < last for now, last in zip(counters, self._last, strict=True)):
            self._sums = counters
        else:
            kept = 0.5 ** ((now_s - self._last_s) / HALF_LIFE_S)
            self._sums = GateCounters(
                *(
                    total * kept + now - last
                    for total, now, last in zip(self._sums, counters, self._last, strict=True)
                )
            )
        self._last, self._last_s = counters, now_s
        sums = self._sums
        if min(sums.load_tokens, sums.prefill_tokens) < MIN_TOKENS or sums.prefill_s <= 0:
            return
        self.value = min(1.0, (sums.load_s / sums.load_tokens) / (sums.prefill_s / sums.prefill_tokens))
