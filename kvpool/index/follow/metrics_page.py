"""``read_page``: the load of a vLLM server's engines, from its metrics page. Pure.

Names and labels are those of ``vllm/v1/metrics/loggers.py``: gauges with the labels ``model_name`` and
``engine``, the data-parallel rank. Pages are untrusted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kvpool import metrics
from kvpool.errors import KVPoolError

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
USAGE = "vllm:kv_cache_usage_perc"
SLEEP = "vllm:engine_sleep_state"
CACHE = "vllm:cache_config_info"  # its labels say

MAX_SAMPLES = 16384  # eleven of each engine
MAX_REQUESTS = (1 << 31) - 1
MAX_TOKENS = (1 << 53) - 1

HALF_LIFE_S = 600.0  # of measured times
MIN_TOKENS = 4096.0  # loaded, and computed, before a cost is known

# A page is long, mostly histograms; only lines with one of these beginnings are parsed.
_GATE = tuple(
    metric.name
    for metric in (
        metrics.GATE_LOAD_TOKENS, metrics.GATE_LOAD_SECONDS, metrics.GATE_PREFILL_TOKENS, metrics.GATE_PREFILL_SECONDS,
    )
)  # fmt: skip
_NEAR = (metrics.GATE_NEAR_TOKENS.name, metrics.GATE_NEAR_SECONDS.name)  # earlier versions have none
_NAMES = (RUNNING, WAITING, USAGE, SLEEP, CACHE, *_GATE, *_NEAR)
_LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="([^"\\]*(?:\\.[^"\\]*)*)"'
_LABELS = re.compile(_LABEL)
_REST = re.compile(rf"((?:{_LABEL},?)*)\}}[ \t]+(\S+)(?:[ \t]+\S+)?[ \t\r]*")  # behind the name and "{"
_ENGINE = re.compile(r"[0-9]{1,5}")
_WHOLE = re.compile(r"[0-9]{1,18}")


class BadPage(KVPoolError):
    """No metrics page of a vLLM server."""


class GateCounters(NamedTuple):
    """The connector's cost gate since the engine began: tokens from the pool, computed ones, and from near; sums."""

    load_tokens: float
    load_s: float
    prefill_tokens: float
    prefill_s: float
    near_tokens: float = 0.0
    near_s: float = 0.0


class EngineLoad(NamedTuple):
    """One engine. ``kv_usage``: 0 to 1. ``asleep``: no work until it wakes. ``gate``: None: no cost gate.
    ``capacity_tokens``: of its KV cache; None: unknown.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    asleep: bool = False
    gate: GateCounters | None = None
    capacity_tokens: int | None = None


def read_page(page: bytes) -> dict[int, EngineLoad]:
    """The engines on ``page``, by number. Errors: ``BadPage``, with no engine."""
    values: dict[tuple[str, int], float] = {}
    for name, engine, value in _samples(page):
        if (name, engine) in values and name != CACHE:  # each of its processes may have one
            raise BadPage(f"{name} is there twice for engine {engine}")
        values[name, engine] = value
    engines = {engine for name, engine in values if name == RUNNING}
    if not engines:
        raise BadPage(f"there is no {RUNNING}")
    return {
        engine: EngineLoad(
            running=_requests(values[RUNNING, engine]),
            waiting=_requests(values.get((WAITING, engine), 0.0)),
            kv_usage=min(values.get((USAGE, engine), 0.0), 1.0),
            asleep=values.get((SLEEP, engine), 1.0) == 0,
            gate=_gate(values, engine),
            capacity_tokens=min(int(values.get((CACHE, engine), 0.0)), MAX_TOKENS) or None,
        )
        for engine in sorted(engines)
    }


def _gate(values: Mapping[tuple[str, int], float], engine: int) -> GateCounters | None:
    found = [values.get((name, engine)) for name in _GATE]
    if None in found:
        return None
    return GateCounters(
        *(value or 0.0 for value in found), *(values.get((name, engine), 0.0) for name in _NEAR)
    )


def _samples(page: bytes) -> Iterator[tuple[str, int, float]]:
    for count, (name, rest) in enumerate(_lines(page)):
        if count == MAX_SAMPLES:
            raise BadPage(f"it has more than {MAX_SAMPLES} lines that count")
        try:
            match = _REST.fullmatch(rest.decode())
            if match is None:
                raise ValueError(f"a line of {name}")
            labels, value = dict(_LABELS.findall(match[1])), float(match[4])
        except ValueError as error:
            raise BadPage(f"it cannot be parsed: {(str(error).splitlines() or ['?'])[0]:.120}") from error
        if name == SLEEP and labels.get("sleep_state") != "awake":
            continue  # how it sleeps; one kind has no name of its own
        engine = labels.get("engine", "")
        if _ENGINE.fullmatch(engine) is None:
            raise BadPage(f"{name} names no engine by its number")
        if not 0 <= value < float("inf"):
            raise BadPage(f"{name} cannot be {value:g}")
        if name == CACHE and not (value := _capacity(labels)):
            continue  # of a process that does not know it
        yield name, int(engine), value


def _capacity(labels: Mapping[str, str]) -> float:
    """Tokens; 0: not said. Newer versions say them: several groups of layers share the blocks."""

    def whole(name: str) -> float:
        text = labels.get(name, "")
        return float(text) if _WHOLE.fullmatch(text) else 0.0

    return whole("kv_cache_size_tokens") or whole("num_gpu_blocks") * whole("block_size")


def _lines(page: bytes) -> Iterator[tuple[str, bytes]]:
    """Names, and the rest of the line behind "{". ``bytes.find``: a regular expression takes 20 times as long."""
    text = b"\n" + page
    for name in _NAMES:
        begin = f"\n{name}{{".encode()
        at = text.find(begin)
        while at >= 0:
            end = text.find(b"\n", at + 1)
            yield name, text[at + len(begin) : end if end >= 0 else len(text)]
            at = text.find(begin, end) if end >= 0 else -1


def _requests(value: float) -> int:
    return min(int(value), MAX_REQUESTS)


_NOTHING = GateCounters(0.0, 0.0, 0.0, 0.0)


class LoadCosts:
    """Of one engine. ``pool``, ``near``: of a token from there, from 0 to 1, as an engine computes blocks that are
    slower to load. ``speed``: tokens that it computes in a second. None: unknown.
    """

    def __init__(self) -> None:
        self.pool: float | None = None
        self.near: float | None = None
        self.speed: float | None = None
        self._last = _NOTHING
        self._last_s: float | None = None
        self._sums = _NOTHING

    def update(self, counters: GateCounters, now_s: float) -> None:
        """A smaller counter means a new engine."""
        if self._last_s is None or any(now < last for now, last in zip(counters, self._last, strict=True)):
            self._sums = counters
        else:
            kept = 0.5 ** ((now_s - self._last_s) / HALF_LIFE_S)
            self._sums = GateCounters(
                *(
                    total * kept + now - last
                    for total, now, last in zip(self._sums, counters, self._last, strict=True)
                )
            )
        self._last, self._last_s = counters, now_s
        sums = self._sums
        if sums.prefill_tokens < MIN_TOKENS or sums.prefill_s <= 0:
            self.speed = None  # of an engine that is avoided for being slow, too, until it is tried again
            return
        each_s = sums.prefill_s / sums.prefill_tokens
        self.speed = 1 / each_s
        if sums.load_tokens >= MIN_TOKENS:
            self.pool = min(1.0, sums.load_s / sums.load_tokens / each_s)
        if sums.near_tokens >= MIN_TOKENS:
            self.near = min(1.0, sums.near_s / sums.near_tokens / each_s)
