"""How long soak tests go on, and how a stateful driver is run: briefly, or on and on."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, run_state_machine_as_test

# Seconds that all searches together go on; each has its share.
SOAK_S = float(os.environ.get("SOAK_S", "60"))
SEARCHES = 6  # oracle, reconciler, file store, devices, lifecycles of connector and tier
SEARCH_S = SOAK_S / SEARCHES
LONG_SOAK = pytest.mark.skipif(SOAK_S < 300, reason="too long for a short soak: SOAK_S=300 runs it")
ENGINES = st.integers(0, 1)
NUMBERS = st.integers(0, 5)
RARELY = st.sampled_from((False, False, False, False, True))


class Life(RuleBasedStateMachine):
    """A driver of ``engines`` that counts what happens, so that a test can see that much did."""

    counts: dict[str, float]

    def add(self, name: str, amount: float = 1) -> None:
        counts = type(self).counts
        counts[name] = counts.get(name, 0) + amount

    @invariant()
    def all_is_well(self) -> None:
        self.add("rules")
        for engine in getattr(self, "engines", ()):
            engine.check()


def live(kind: type[Life], *, examples: int, steps: int) -> dict[str, float]:
    """Run so many lives of at most so many steps; what was counted."""
    counted = type(kind.__name__, (kind,), {"counts": {}})
    run_state_machine_as_test(
        counted,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, database=None, deadline=None,
            suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink),
        ),
    )  # fmt: skip
    return counted.counts


def live_briefly(kind: type[Life], check: Callable[[dict[str, float]], None], *, examples: int) -> None:
    """So many lives of 40 steps, and as many again up to nine times while ``check`` of all counts fails.

    Lives differ with every run, even from one seed: Hypothesis draws constants of the modules that are loaded.
    """
    counts: Counter[str] = Counter()
    for tries_left in reversed(range(10)):
        counts.update(live(kind, examples=examples, steps=40))
        try:
            check(counts)
        except AssertionError:
            if not tries_left:
                raise
        else:
            break


def live_long(kind: type[Life]) -> Counter[str]:
    """As ``live``, for ``SEARCH_S`` seconds."""
    counts: Counter[str] = Counter()
    end_s = time.monotonic() + SEARCH_S
    while time.monotonic() < end_s:
        counts.update(live(kind, examples=50, steps=100))
    return counts
