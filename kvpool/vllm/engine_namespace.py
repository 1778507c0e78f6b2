"""``EngineNamespace``: the namespace of one engine, from the facts of its ranks and the epoch of its weights.

When the weights may have changed, the engine goes on in a namespace that no other engine has and this one never had.
Until it has no blocks of other weights in its own cache it goes without the pool (``awaits_reset``).

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from vllm.logger import init_logger

from kvpool import metrics
from kvpool.key.key import Fact, Namespace
from kvpool.metrics import Counters
from kvpool.vllm.plan import PoolMetadata
from kvpool.vllm.stages import facts_of_engine, facts_of_epoch, why_ranks_differ

logger = init_logger("vllm.kvpool")

_CAUSES = {
    "reset": "the caches were reset, perhaps for other weights",
    "reload": "the weights were loaded anew",
}


class EngineNamespace:
    """``current``: None until every rank has reported its facts. ``tenant``: of the settings."""

    def __init__(self, tenant: str, *, ranks: int, stages: int, counters: Counters) -> None:
        self._tenant, self._ranks, self._stages, self._counters = tenant, ranks, stages, counters
        self.current: Namespace | None = None
        self.awaits_reset = False  # the engine's cache holds blocks of other weights
        self._rank_facts: dict[int, dict[str, Fact]] = {}
        self._facts: dict[str, Fact] = {}  # of all ranks together
        self._facts_to_send: dict[str, Fact] = {}  # to the workers, with the next step
        self._epoch = ""  # of the weights; empty: those that the engine started with
        self._epoch_to_send = ""
        self._steps_planned = 0
        self._computed_since = 0  # the first step with tokens since the last reset; 0: there was none

    def add_to(self, step: PoolMetadata, *, computes: bool) -> None:
        """Number a step, and send with it what the workers have to know. ``computes``: it has tokens."""
        self._steps_planned += 1
        step.number = self._steps_planned
        step.facts, self._facts_to_send = self._facts_to_send, {}
        step.epoch, self._epoch_to_send = self._epoch_to_send, ""
        if computes and not self._computed_since:
            self._computed_since = self._steps_planned

    def learn(self, facts: Mapping[int, dict[str, Fact]]) -> str:
        """Take in the facts of ranks. Returns why there can be no namespace: the ranks of a stage differ; else ""."""
        self._rank_facts |= facts
        if self.current is not None or len(self._rank_facts) < self._ranks:
            return ""
        ranks = [self._rank_facts[rank] for rank in range(self._ranks)]
        of_engine = facts_of_engine(ranks, self._stages)
        if of_engine is None:
            return why_ranks_differ(ranks, self._stages)
        self._facts = of_engine
        self.current = Namespace(self._tenant, facts_of_epoch(of_engine, self._epoch))
        if self._stages > 1:
            self._facts_to_send = of_engine  # a rank knows those of its own stage only
        return ""

    def reset(self, *, in_use: bool) -> None:
        """The caches were reset. ``in_use``: the engine still holds blocks, so vLLM has kept its own cache."""
        self.awaits_reset = in_use
        if not in_use:
            self._computed_since = 0
        self._begin_epoch("reset")
        if in_use:
            # vLLM answers False to the caller of the reset then.
            logger.warning(
                "kvpool: the engine holds blocks of before the reset: it goes without the pool until it is "
                "reset again, and answers True"
            )

    def reloaded(self, step: int) -> None:
        """The workers had other weights in ``step`` than in the one before. They move nothing until an epoch begins."""
        if not self._computed_since or self._computed_since >= step:
            self._begin_epoch("reload")
        elif not self.awaits_reset:
            self.awaits_reset = True
            self._counters.add(metrics.EPOCHS, 1, "reload")
            logger.error(
                "kvpool: the weights of this engine were loaded anew while its cache holds blocks of the earlier ones: "
                "it goes without the pool until its caches are reset (reset_prefix_cache with reset_connector=True)"
            )

    def _begin_epoch(self, cause: str) -> None:
        """Change the namespace, from the next step on; what was planned before goes to the pool under the old one."""
        self._epoch = self._epoch_to_send = secrets.token_hex(8)
        self._counters.add(metrics.EPOCHS, 1, cause)
        if self._facts:
            self.current = Namespace(self._tenant, facts_of_epoch(self._facts, self._epoch))
        logger.warning(
            "kvpool: %s: until this engine restarts it goes on in a namespace of its own, %s, and shares with no "
            "other one; where its weights never change in place, set weights_never_change to true",
            _CAUSES[cause],
            self.current.hex[:8] if self.current else "not known yet",
        )
