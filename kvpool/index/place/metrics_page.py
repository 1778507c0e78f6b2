"""``read_page``: what the metrics page of a vLLM server says about the load of its engines. Pure.

Names and labels are those of ``vllm/v1/metrics/loggers.py``: gauges with the labels ``model_name`` and ``engine``,
the number of the data-parallel rank. What is read was written by another process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from kvpool.errors import KVPoolError

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
USAGE = "vllm:kv_cache_usage_perc"
SLEEP = "vllm:engine_sleep_state"

MAX_SAMPLES = 8192  # six of each engine
MAX_REQUESTS = (1 << 31) - 1

# A page is long, histograms mostly; only these lines of it are parsed.
_LINES = re.compile(
    rb"^(?:%s)\{[^\n]*" % b"|".join(re.escape(name.encode()) for name in (RUNNING, WAITING, USAGE, SLEEP)),
    re.MULTILINE,
)
_ENGINE = re.compile(r"[0-9]{1,5}")


class BadPage(KVPoolError):
    """This is no metrics page of a vLLM server; says why, in one line."""


class Engine(NamedTuple):
    """One engine. ``kv_usage``: from 0 to 1. ``asleep``: it does no work until it is woken."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    asleep: bool = False


def read_page(page: bytes) -> dict[int, Engine]:
    """The engines on ``page``, by number. Errors: ``BadPage``; nothing of a page is taken then."""
    values: dict[tuple[str, int], float] = {}
    for name, engine, value in _samples(page):
        if (name, engine) in values:
            raise BadPage(f"{name} is there twice for engine {engine}")
        values[name, engine] = value
    engines = {engine for name, engine in values if name == RUNNING}
    if not engines:
        raise BadPage(f"there is no {RUNNING}")
    return {
        engine: Engine(
            running=_requests(values[RUNNING, engine]),
            waiting=_requests(values.get((WAITING, engine), 0.0)),
            kv_usage=min(values.get((USAGE, engine), 0.0), 1.0),
            asleep=values.get((SLEEP, engine), 1.0) == 0,
        )
        for engine in sorted(engines)
    }


def _samples(page: bytes) -> Iterator[tuple[str, int, float]]:
    lines = _LINES.findall(page)
    if len(lines) > MAX_SAMPLES:
        raise BadPage(f"it has more than {MAX_SAMPLES} lines that count")
    try:
        families = list(text_string_to_metric_families(b"\n".join(lines).decode() + "\n"))
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise BadPage(f"it cannot be parsed: {(str(error).splitlines() or ['?'])[0]:.120}") from error
    for family in families:
        for sample in family.samples:
            if sample.name == SLEEP and sample.labels.get("sleep_state") != "awake":
                continue  # how it sleeps; one of the kinds has no name of its own
            engine = sample.labels.get("engine", "")
            if _ENGINE.fullmatch(engine) is None:
                raise BadPage(f"{sample.name} names no engine by its number")
            if not 0 <= sample.value < float("inf"):
                raise BadPage(f"{sample.name} cannot be {sample.value:g}")
            yield sample.name, int(engine), sample.value


def _requests(value: float) -> int:
    return min(int(value), MAX_REQUESTS)
