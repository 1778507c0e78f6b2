"""Measures on the device that is here what kvpool does to it: copies, their cost to an engine, calls that wait."""

from kvpool.transfer.measure.arena import Arena, accelerator
from kvpool.transfer.measure.caches import BLOCK_TOKENS, CACHES, LAYOUTS, Cache
from kvpool.transfer.measure.calls import CallsMeasured, measure_calls
from kvpool.transfer.measure.copies import (
    TARGET_FROM_NBYTES,
    TARGET_OVER_PLAIN,
    CopiesMeasured,
    measure_copies,
)
from kvpool.transfer.measure.engine import TARGET_SLOWER, EngineMeasured, measure_engine

__all__ = [
    "BLOCK_TOKENS",
    "CACHES",
    "LAYOUTS",
    "TARGET_FROM_NBYTES",
    "TARGET_OVER_PLAIN",
    "TARGET_SLOWER",
    "Arena",
    "Cache",
    "CallsMeasured",
    "CopiesMeasured",
    "EngineMeasured",
    "accelerator",
    "measure_calls",
    "measure_copies",
    "measure_engine",
]
