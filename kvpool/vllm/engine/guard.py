"""Keeps kvpool's faults out of the engine, and refuses a start in one line."""

from __future__ import annotations

import functools
import multiprocessing
import time
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar

from vllm.logger import init_logger

from kvpool import metrics
from kvpool.errors import EngineRefused
from kvpool.metrics import Counters
from kvpool.text import make_printable

logger = init_logger("vllm.kvpool")
logger.addFilter(make_printable)  # of the logger itself, which all of kvpool.vllm has

_P = ParamSpec("_P")
_T = TypeVar("_T")

LOG_EVERY_S = 60.0  # faults in between are counted, not logged


def guarded(instead: Any, *, request: str = "") -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Decorate a method so that its faults never reach the engine: it returns ``instead``.

    After start-up a fault of kvpool costs a recompute, never a request. Shared state may be half changed, so
    the object's ``switch_off(reason)`` disables the pool.

    With ``request``, of ``metrics.REQUEST_FAULTS``, the method serves one request, its first argument.
    ``_request_faults`` counts the fault, and ``_without_pool`` disables the pool for this request alone.

    Threads: of the method's object.
    """

    def decorate(call: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(call)
        def run(*arguments: _P.args, **named: _P.kwargs) -> _T:
            try:
                return call(*arguments, **named)
            except Exception as error:
                half: Any = arguments[0]
                if request:
                    half._request_faults.count(request)
                    half._without_pool(arguments[1])
                else:
                    logger.exception("kvpool failed inside the engine")
                    half.switch_off(f"{type(error).__name__}: {error}")
                result: _T = instead
                return result

        return run

    return decorate


class RequestFaults:
    """Counts faults of single requests, and logs once a minute. They never disable the pool."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._logged_at_s = -LOG_EVERY_S

    def count(self, where: str) -> None:
        """Call it while handling the fault. ``where``: of ``metrics.REQUEST_FAULTS``."""
        self._counters.add(metrics.REQUEST_FAULTS, 1, where)
        now_s = time.monotonic()
        if now_s - self._logged_at_s >= LOG_EVERY_S:
            self._logged_at_s = now_s
            logger.exception(
                "kvpool failed for a request, which goes on without it; see kvpool_request_faults_total"
            )


def refuse(error: Exception) -> NoReturn:
    """End the start with one line.

    vLLM's engine process would bury an exception's sentence under pages of call stack, so there it prints the
    sentence alone. In the caller's own process it raises.
    """
    sentence = f"kvpool refuses to start: {error}"
    if multiprocessing.parent_process() is not None:
        raise SystemExit(sentence)
    raise EngineRefused(sentence) from error
