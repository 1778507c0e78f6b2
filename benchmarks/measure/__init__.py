"""Measures kvpool on the present device: copies, their cost to an engine, blocking calls."""

from benchmarks.measure.arena import Arena, accelerator
from benchmarks.measure.caches import BLOCK_TOKENS, CACHES, LAYOUTS, Cache
from benchmarks.measure.calls import CallsMeasured, measure_calls
from benchmarks.measure.copies import (
    TARGET_FROM_NBYTES,
    TARGET_OVER_PLAIN,
    CopiesMeasured,
    measure_copies,
)
from benchmarks.measure.engine import TARGET_SLOWER, EngineMeasured, measure_engine

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
