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
SEARCHES = 8  # oracle, reconciler, file store, near and far, devices, lifecycles: connector, its audits, tier
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


def live(kind: type[Life], check: Callable[[dict[str, float]], None], *, examples: int, steps: int) -> None:
    """So many lives of at most so many steps, and again up to nine times while ``check`` of all counts fails.

    Lives differ with every run, even from one seed: Hypothesis draws constants of the modules that are loaded.
    """
    _search(kind, check, examples, steps, seconds=0, tries=10)


def live_long(kind: type[Life], check: Callable[[dict[str, float]], None]) -> None:
    """As ``live``, for ``SEARCH_S`` seconds at least; a slow machine lives a few lives more than that, not fifty."""
    _search(kind, check, examples=10, steps=100, seconds=SEARCH_S, tries=50)


def _search(
    kind: type[Life],
    check: Callable[[dict[str, float]], None],
    examples: int,
    steps: int,
    seconds: float,
    tries: int,
) -> None:
    counted = type(kind.__name__, (kind,), {"counts": (counts := Counter[str]())})
    end_s, tries_left = time.monotonic() + seconds, tries
    while True:
        run_state_machine_as_test(
            counted,
            settings=settings(
                max_examples=examples, stateful_step_count=steps, database=None, deadline=None,
                derandomize=False,  # as it is where CI is set: then all tries are one
                suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
                phases=(Phase.generate, Phase.shrink),
            ),
        )  # fmt: skip
        if time.monotonic() < end_s:
            continue
        tries_left -= 1
        try:
            check(counts)
        except AssertionError:
            if not tries_left:
                raise
        else:
            return
