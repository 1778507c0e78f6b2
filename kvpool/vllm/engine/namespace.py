"""``EngineNamespace``: in which namespace an engine is, by the weights that its workers hold.

    start ── facts and measures of all ranks ──► shares: the namespace is named by files
    shares ── its audits find many others wrong ──► off, until a reset or other weights
    shares ── a reset, a call that may write, the watch ──► asks: nothing is looked up, loaded or stored
    asks ── the measures of all ranks ──► shares: as before if they are as before, else the namespace is named by them
                                      ──► off: the engine's cache has blocks of other weights, or the weights are NaN
    off ── a reset, a call that may write ──► asks

An engine of which a rank cannot measure takes each reset and reload for other weights, and goes on in a namespace that
nobody else has.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping

from vllm.logger import init_logger

from kvpool import metrics
from kvpool.errors import EngineRefused
from kvpool.key.key import EPOCH_FACT, MEMORY_FACT, Fact, Namespace
from kvpool.metrics import Counters
from kvpool.vllm.engine.identity import facts_of_engine
from kvpool.vllm.geometry import Geometry
from kvpool.vllm.plan import Measured, PoolMetadata

logger = init_logger("vllm.kvpool")

# Of a stage's facts: what files say of the weights, which those in memory replace.
_OF_FILES = frozenset(("weights", "revision", "drafts_weights", "drafts_revision", "fp8_scales"))
# After these an engine that is not measured is taken to have other weights.
WRITES = frozenset((
    "reset", "reload_weights", "load_weights", "update_weights", "start_weight_update", "finish_weight_update",
    "reset_weights",
))  # fmt: skip
# Of vLLM's own calls, those that read alone.
READS = frozenset((
    "compute_weight_checksums", "get_model_inspection", "update_max_model_len", "init_weight_transfer_engine",
    "shutdown_weight_transfer_engine",
))  # fmt: skip
_EMPTIES = ("sleep", "discard")  # vLLM resets its caches before, unless the workers are called themselves
_SILENT = "a silent change"
_SEVERAL = "several"  # weights of which the engine's cache has blocks; or their bytes are gone


class EngineNamespace:
    """``current``: None while nothing may be looked up, loaded or stored. ``tenant``: of the settings.

    ``is_asleep``: whether the workers' memory is away. ``leave``: is called when blocks under way are of other weights
    than what comes next.
    """

    def __init__(
        self,
        tenant: str,
        geometry: Geometry,
        counters: Counters,
        *,
        is_asleep: Callable[[], bool] = lambda: False,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self._tenant, self._counters, self._is_asleep, self._leave = tenant, counters, is_asleep, leave
        self._ranks, self._pipeline_parallel = geometry.ranks, geometry.pipeline_parallel
        self.current: Namespace | None = None
        self.is_off = False  # until the next measure
        self.is_doubted = False  # by its audits, until a reset or other weights
        self._rank_facts: dict[int, dict[str, Fact]] = {}
        self._facts: dict[str, Fact] = {}  # of all ranks together, at the start
        self._facts_to_send: dict[str, Fact] = {}  # to the workers, with the next step
        self._weights_to_send: dict[str, Fact] | None = None
        self._silent_to_send = self._off_to_send = False
        self._steps_planned = 0
        self._start = ""  # the measure of the weights that files name; empty: not measured
        self._now = ""  # of the last answer
        self._shared = ""  # of the namespace that it is in, or was last
        self._cached: str | None = None  # of what the engine's cache has blocks; None: it has none
        self._question = 0  # the number of the last one
        self._cause = ""  # of the open question; empty: none is open
        self._version = (
            ""  # of the weights, by vLLM, as long as the log has not said it; nothing depends on it
        )
        self._last = ""  # what was called last
        self._is_sent = False
        self._is_told = False  # a call since the last measure may have written weights
        self._computed = False  # since the open question, or loaded
        self._answers: dict[int, Measured] = {}  # to it, by rank
        self._at_start: dict[int, Measured] = {}

    @property
    def asks(self) -> bool:
        """Whether the workers have not said yet what they hold."""
        return bool(self._cause)

    @property
    def wants_step(self) -> bool:
        """Whether an idle engine should step, so that its workers are asked, can answer, and announce the namespace."""
        has_news = self.asks or self._off_to_send or self._weights_to_send is not None
        return has_news and bool(self._facts) and not self._is_asleep()

    def add_to(self, step: PoolMetadata) -> None:
        """Number a step, and add news and questions for the workers."""
        self._steps_planned += 1
        step.number = self._steps_planned
        step.facts, self._facts_to_send = self._facts_to_send, {}
        step.weights, self._weights_to_send = self._weights_to_send, None
        step.silent, self._silent_to_send = self._silent_to_send, False
        step.off, self._off_to_send = self._off_to_send, False
        awake = not self._is_asleep()
        if self.asks and not self._is_sent and awake:
            step.measure, self._is_sent = self._question, True
        step.watch = bool(self._start) and not self.asks and awake
        if step.idle and not step.loads:  # nothing comes into the engine's cache
            return
        if self.asks:
            self._computed = True
        else:
            self._has_blocks_of(self._now)

    def learn(
        self, facts: Mapping[int, dict[str, Fact]], measured: Mapping[tuple[int, int], Measured]
    ) -> str:
        """Take the ranks' facts and measures. Returns why no namespace fits: ranks of a stage differ; else ""."""
        for (rank, number), one in measured.items():
            if not number:
                self._at_start[rank] = one
            elif number == self._question:
                self._answers[rank] = one
        self._rank_facts |= facts
        if not self._facts and len(self._rank_facts) == self._ranks:
            ranks = [self._rank_facts[rank] for rank in range(self._ranks)]
            try:
                self._facts = facts_of_engine(ranks, self._pipeline_parallel)
            except EngineRefused as error:
                return str(error)
            if self._pipeline_parallel > 1:
                self._facts_to_send = self._facts  # a rank knows only its own stage's
            self._start = self._now = self._shared = self._joined(self._at_start)
            if self._cached == "":  # by the first steps, before this was known
                self._cached = self._now
            if not self.asks:
                self._enter()
        if self.asks and self._facts and len(self._answers) == self._ranks:
            self._settle(self._joined(self._answers))
        return ""

    def _joined(self, measured: Mapping[int, Measured]) -> str:
        """One name of what all ranks hold; empty: a rank cannot say."""
        for rank, one in sorted(measured.items()):
            if one.why:
                logger.warning(
                    "kvpool: rank %d cannot measure its weights in memory: %s. So a reset of the caches or a reload "
                    "counts as other weights, and from then on this engine shares with nobody until it restarts",
                    rank,
                    one.why,
                )
                return ""
        said = " ".join(one.digest for _, one in sorted(measured.items()))
        return hashlib.sha256(said.encode()).hexdigest()[:32] if len(measured) == self._ranks else ""

    def reset(self, *, in_use: bool) -> None:
        """The caches were reset. ``in_use``: the engine still holds blocks, so vLLM kept its cache."""
        if not in_use:
            self._cached, self._computed, self.is_doubted = None, False, False
        self._ask("reset")

    def called(self, method: str) -> bool:
        """Somebody called a method of the workers. Returns whether it may have changed their weights."""
        emptied = method in _EMPTIES and (self._computed or self._cached is not None)
        if emptied:
            self._cached, self._computed = _SEVERAL, False
        may_write = method not in READS and (self._start or not self._facts or emptied or method in WRITES)
        if may_write:
            self._is_told = True
            self._ask(method)
        return bool(may_write)

    def named(self, version: str) -> None:
        """Somebody gave the weights a version (vLLM's ``weight_version``), which is said beside their namespace."""
        self._version = version
        if self.current is not None:
            self._say_version()

    def differs(self) -> None:
        """A worker's watch found other weights than those of the last measure, and no call has said so."""
        if self._cause != _SILENT:
            logger.error(
                "kvpool: the weights of this engine changed without a call of vLLM's. What it stored in the last "
                "seconds may be of either weights, and is deleted; what it loaded may be of the wrong ones. Change "
                "weights by collective_rpc, of which kvpool hears"
            )
            self._counters.add(metrics.WEIGHTS, 1, "silent")
            self._silent_to_send = True  # to all ranks: what each has computed depends on the weights of all
        self._cached = _SEVERAL
        if not self.asks:
            self._ask(_SILENT)

    def doubt(self, why: str) -> None:
        """This engine may compute wrong blocks: it goes without the pool until its caches are reset."""
        logger.error(
            "kvpool: this engine doubts itself: %s. It goes without the pool until its caches are reset "
            "(reset_prefix_cache with reset_connector=True, over HTTP with reset_external=true)",
            why,
        )
        self.is_doubted = True
        if not self.asks:
            self.current, self.is_off, self._off_to_send = None, True, True
            self._leave()

    def _ask(self, cause: str) -> None:
        if self._computed:  # between two questions, of weights that nobody has measured
            self._cached, self._computed = _SEVERAL, False
        self._question += 1
        self._last = cause
        if self._cause not in WRITES:  # of what nobody measured in between
            self._cause = cause
        self._is_sent, self._answers = False, {}
        self.current, self.is_off = None, False
        if self._facts and not self._start:
            self._settle("")

    def _has_blocks_of(self, weights: str) -> None:
        self._cached = weights if self._cached in (None, weights) else _SEVERAL

    def _settle(self, weights: str) -> None:
        """The workers hold these; empty: nobody knows which, and it is taken for others."""
        cause, self._cause = self._cause, ""
        is_told, self._is_told = self._is_told, False
        if not weights and not self._start and cause not in WRITES:
            weights = self._now  # it was never measured, and nothing says that it has changed
        elif not weights:
            weights, self._start = f"alone {secrets.token_hex(8)}", ""
        if self._computed:
            self._computed = False
            self._has_blocks_of(weights)
        same, self._now = weights == self._now, weights
        if not same:
            self.is_doubted = False
            self._leave()
            if self._start and cause == "reset" and not is_told:
                logger.warning(
                    "kvpool: the weights of this engine were other ones when it was reset, and no call has written "
                    "them: what it stored in the last seconds before may be of either, and is deleted"
                )
                self._silent_to_send = True
        nan = any(one.nan and not self._at_start[rank].nan for rank, one in self._answers.items())
        self.is_off = nan or self.is_doubted or self._cached not in (None, weights)
        stays, self._shared = weights == self._shared, self._shared if self.is_off else weights
        self._counters.add(metrics.WEIGHTS, 1, "off" if self.is_off else "same" if stays else "other")
        self._off_to_send = self.is_off
        if self.is_off:
            logger.error(
                "kvpool: after %s %s. It goes without the pool until its caches are reset (reset_prefix_cache with "
                "reset_connector=True, over HTTP with reset_external=true)",
                self._last,
                "weights of this engine are NaN: load others"
                if nan
                else "this engine still doubts itself, for its weights are as before"
                if self.is_doubted
                else "this engine's cache has blocks that its weights have not computed",
            )
        else:
            self._enter()
            self._say(stays=stays)
            if self._version:
                self._say_version()

    def _enter(self) -> None:
        named: dict[str, Fact] = {}
        if self._now.startswith("alone "):
            named = {EPOCH_FACT: self._now.removeprefix("alone ")}
        elif self._now != self._start:
            named = {MEMORY_FACT: self._now}
        self.current = Namespace(self._tenant, facts_of_weights(self._facts, named))
        if self._question:
            self._weights_to_send = named

    def _say(self, *, stays: bool) -> None:
        assert self.current is not None
        where = self.current.hex[:8]
        if EPOCH_FACT in self.current.facts and not stays:
            logger.warning(
                "kvpool: after %s nobody knows what weights this engine holds: it goes on in a namespace of its own, "
                "%s, and shares with no other engine until it restarts",
                self._last,
                where,
            )
            return
        if stays:
            known = "as before"
        else:
            known = "those of its start again" if self._now == self._start else "others than before"
            where += ", with all engines that hold the same"
        logger.info(
            "kvpool: after %s this engine's weights are %s: it is in namespace %s", self._last, known, where
        )

    def _say_version(self) -> None:
        assert self.current is not None
        version, self._version = self._version, ""
        logger.info(
            "kvpool: the weights of namespace %s are version %.80r by vLLM's name, which kvpool shows and does not use",
            self.current.hex[:8],
            version,
        )


def facts_of_weights(facts: Mapping[str, Fact], weights: Mapping[str, Fact]) -> dict[str, Fact]:
    """An engine's facts with these weights: ``PoolMetadata.weights``; empty: those of the start."""
    if MEMORY_FACT in weights:  # however they came there
        facts = {name: value for name, value in facts.items() if name.rpartition(".")[2] not in _OF_FILES}
    return {**facts, **weights}
