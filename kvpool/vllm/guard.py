"""Keeps our own faults out of the engine, and ends a start that must not be with one line."""

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

logger = init_logger("vllm.kvpool")

_P = ParamSpec("_P")
_T = TypeVar("_T")

LOG_EVERY_S = 60.0  # faults of requests in between are counted, not logged


def guarded(instead: Any, *, request: str = "") -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """A method whose fault never reaches the engine: its result is ``instead`` when it raises.

    After start-up a fault of kvpool costs a recompute and never a request. The method may have left half changed what
    all requests share, so its object's ``switch_off(reason)`` switches the pool off, and the engine goes on.

    With ``request``, of ``metrics.REQUEST_FAULTS``, the method works for one request, which its first argument names.
    ``_request_faults`` counts the fault, and ``_without_pool`` takes the pool from this request alone.

    Threads: the one of the method's object.
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
    """Faults of single requests: counted, and logged once a minute. They never end the pool, however many."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._logged_at_s = -LOG_EVERY_S

    def count(self, where: str) -> None:
        """To be called in the handler of the fault. ``where``: of ``metrics.REQUEST_FAULTS``."""
        self._counters.add(metrics.REQUEST_FAULTS, 1, where)
        now_s = time.monotonic()
        if now_s - self._logged_at_s >= LOG_EVERY_S:
            self._logged_at_s = now_s
            logger.exception(
                "kvpool failed for a request, which goes on without it; see kvpool_request_faults_total"
            )


def refuse(error: Exception) -> NoReturn:
    """End the start with one line.

    vLLM starts an engine in a process of its own, where an exception would print pages of its call stack above
    the one sentence that helps; there, the sentence is all. In the caller's own process it is an exception.
    """
    sentence = f"kvpool refuses to start: {error}"
    if multiprocessing.parent_process() is not None:
        raise SystemExit(sentence)
    raise EngineRefused(sentence) from error
