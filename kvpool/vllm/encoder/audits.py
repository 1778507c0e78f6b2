"""``OutputAudits``: some outputs that the pool has are computed all the same, and compared with its records.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from vllm.logger import init_logger

from kvpool import metrics
from kvpool.key.hashing import media_hash
from kvpool.metrics import Counters
from kvpool.vllm.audit.audits import LEAST_PAUSE_S, WHILE_LEARNING
from kvpool.vllm.audit.findings import Findings, describe
from kvpool.vllm.audit.floor import Floor
from kvpool.vllm.encoder.plan import ComparedOutput
from kvpool.vllm.plan import AuditedPart, LayerDistance

logger = init_logger("vllm.kvpool")

_T = TypeVar("_T")

MAX_REPORTS = 4096  # that are awaited
ENCODER = "encoder"  # stands for the layer


class OutputAudits:
    """``share``: of outputs; 0: none. ``writer``: this engine's name in what it ``stores``."""

    def __init__(
        self,
        share: float,
        *,
        writer: bytes,
        stores: bool,
        counters: Counters,
        clock: Callable[[], float],
        random_number: Callable[[], float],
    ) -> None:
        self._share, self._counters, self._clock, self._random = share, counters, clock, random_number
        self._floor = Floor(writer if stores else None)
        self._findings = Findings(writer, clock)
        self._last_s = -LEAST_PAUSE_S
        self._keys: dict[str, str] = {}  # of those under way, by identifier

    @property
    def doubts(self) -> str:
        """Why this engine's encoder should go without the pool; empty: it should not."""
        return self._findings.doubts

    def put_away(self) -> frozenset[bytes]:
        """Writers whose records count as missing now."""
        return self._findings.put_away()

    def chooses(self) -> bool:
        """Whether the next output is to be audited."""
        now_s = self._clock()
        if (
            not self._share
            or (self._share < 1 and now_s < self._last_s + LEAST_PAUSE_S)
            or self._random() >= self._share * (1 if self._floor.is_known else WHILE_LEARNING)
        ):
            return False
        self._last_s = now_s
        return True

    def begin(self, identifier: str, key: str) -> None:
        """A worker computes an output, and compares it with the record under ``key``."""
        remember(self._keys, identifier, key)

    def judge(self, compared: ComparedOutput) -> list[str]:
        """Take what a worker found. Returns keys of records to be deleted."""
        key = self._keys.pop(compared.identifier, "")
        layers = [LayerDistance(ENCODER, compared.element, compared.difference, compared.norm)]
        judged = self._floor.judge(
            [AuditedPart(compared.why, compared.writer, () if compared.why else layers)]
        )
        self._counters.add(metrics.ENCODER_AUDITS, 1, judged.verdict)
        if judged.verdict == "same":
            self._findings.agree(judged.writers)
        if judged.verdict != "differs":
            return []
        logger.error("kvpool: of an item's encoder: %s", describe(judged, judged.writers, None))
        if self._findings.add(judged.writers, media_hash(compared.identifier)):
            logger.error(
                "kvpool: this engine's encoder doubts itself: %s. It goes without the pool until its cache of encoders "
                "is reset (reset_encoder_cache)",
                self._findings.doubts,
            )
            return []
        return [key] if key else []

    def forget_findings(self) -> None:
        self._findings.forget()

    def leave(self) -> None:
        """What comes next is of other weights."""
        self._floor.forget()
        self._findings.forget()


def remember(into: dict[str, _T], name: str, value: _T) -> None:
    """What no worker reports is forgotten when there is too much of it."""
    into[name] = value
    if len(into) > MAX_REPORTS:
        del into[next(iter(into))]
