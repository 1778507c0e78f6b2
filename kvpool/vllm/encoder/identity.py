"""In which namespace an engine's outputs of encoders are: by all that changes what an encoder makes of an item.

    start ── weights named by files ──► shares
    shares ── a call that may write ──► as before if the encoder's weights are, else named by those in memory

A language model may be trained beside a frozen encoder: what is measured is the encoder alone.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

from kvpool.errors import EngineRefused
from kvpool.key.key import EPOCH_FACT, MEMORY_FACT, Fact, Namespace
from kvpool.vllm.engine import support
from kvpool.vllm.engine.identity import model_facts
from kvpool.vllm.engine.namespace import READS, WRITES, facts_of_weights
from kvpool.vllm.plan import Measured

logger = init_logger("vllm.kvpool")

_REMOVE = "remove --ec-transfer-config, or give kvpool vllm --ec-transfer-config '{}'"

IDENTIFIER_NBYTES = 32


def refuse_unsupported(config: VllmConfig) -> None:
    """Check the configuration. Errors: ``EngineRefused``, one sentence with the setting to change."""
    if config.model_config.is_encoder_decoder:
        raise EngineRefused(
            "what the encoder of an encoder-decoder model makes of an item stays in its request, so there is nothing "
            f"to share; {_REMOVE}"
        )
    if config.model_config.multimodal_config is None:
        raise EngineRefused(f"the model has no encoder; {_REMOVE}")
    if support.counts_items(config):
        raise EngineRefused(
            "without prefix caching and a processor's cache vLLM counts images and does not hash them, so other images "
            "have the same name; remove --mm-processor-cache-gb 0, or --no-enable-prefix-caching"
        )


def encoder_facts(config: VllmConfig, weights: Mapping[str, Fact]) -> dict[str, Fact]:
    """Every fact that changes an output, but its shape. ``weights``: from ``weights_of``. Errors: ``ConfigError``."""
    multimodal = config.model_config.multimodal_config
    return {
        "engine": "vllm",
        "kind": "encoder",
        **model_facts(config.model_config),
        "media_hash": str(getattr(multimodal, "mm_hasher_algorithm", "")),
        "encoder_attention": str(getattr(multimodal, "mm_encoder_attn_backend", None)),
        "device": current_platform.device_type,
        **weights,
    }


class EncoderNamespaces:
    """``measure``: of the encoder's weights, by worker; waits. ``leave``: is called when they are others."""

    def __init__(
        self,
        tenant: str,
        facts: Mapping[str, Fact],
        measure: Callable[[], Sequence[Measured]],
        *,
        is_asleep: Callable[[], bool],
        leave: Callable[[], None],
    ) -> None:
        self._tenant, self._facts = tenant, dict(facts)
        self._measure, self._is_asleep, self._leave = measure, is_asleep, leave
        self._start = self._now = self._joined()
        self._named: dict[str, Fact] = {}
        self._asks = ""  # what was called since the last measure; empty: nothing
        self._spaces: dict[str, Namespace] = {}  # by form

    @property
    def asks(self) -> bool:
        """Whether nobody has looked yet what a call has made of the weights."""
        return bool(self._asks)

    def of(self, form: str) -> Namespace | None:
        """Of outputs whose rows are of this ``form``: their width and type. None: the weights are away."""
        if self._asks and not self._settle():
            return None
        if form not in self._spaces:
            facts = facts_of_weights(self._facts, self._named)
            self._spaces[form] = Namespace(self._tenant, {**facts, "output_row": form})
        return self._spaces[form]

    def called(self, method: str) -> bool:
        """Somebody called a method of the workers. Returns whether it may have changed their weights."""
        if method in READS:
            return False
        self._asks = method
        return True

    def _settle(self) -> bool:
        if self._is_asleep():
            return False
        cause, weights = self._asks, self._joined()
        self._asks = ""  # not before: a measure may fail
        if not weights and not self._start and cause not in WRITES:
            return True  # it was never measured, and nothing says that it has changed
        if not weights:
            weights = f"alone {secrets.token_hex(8)}"
        if weights == self._now:
            return True
        self._now = weights
        self._spaces.clear()
        self._leave()
        if weights.startswith("alone "):
            self._named = {EPOCH_FACT: weights.removeprefix("alone ")}
        else:
            self._named = {} if weights == self._start else {MEMORY_FACT: weights}
        logger.info(
            "kvpool: after %s the encoder's weights are %s",
            cause,
            "those of its start again"
            if not self._named
            else "unknown: its outputs are shared with no other engine"
            if EPOCH_FACT in self._named
            else "others than before: its outputs are shared with engines that hold the same",
        )
        return True

    def _joined(self) -> str:
        """One name of what all workers hold; empty: one of them cannot say."""
        answers = self._measure()
        for rank, one in enumerate(answers):
            if one.why:
                logger.warning("kvpool: rank %d cannot measure its encoder's weights: %s", rank, one.why)
                return ""
        # All ranks encode the same, but each may hold a part of the weights.
        return hashlib.sha256(" ".join(one.digest for one in answers).encode()).hexdigest()[:32]
