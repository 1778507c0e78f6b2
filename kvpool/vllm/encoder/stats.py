"""Metrics of the encoders' connector in vLLM, which takes them from 0.31 on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool import metrics
from kvpool.vllm.tell.metrics import SampleStats, ShownMetrics

if TYPE_CHECKING:
    from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats
else:
    try:
        from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats
    except ImportError:  # 0.30 has none
        ECConnectorPromMetrics = ECConnectorStats = object


@dataclass
class EncoderStats(SampleStats, ECConnectorStats):
    """Of ``KVPoolECConnector``."""


class EncoderPromMetrics(ShownMetrics, ECConnectorPromMetrics):
    METRICS = metrics.ENCODER


class PoolOfEncoders(EncoderPromMetrics):
    """Of an engine without another connector: also how the pool is, and what hints did."""

    METRICS = (*metrics.ENCODER, *metrics.OF_STORES, *metrics.OF_HINTS)
