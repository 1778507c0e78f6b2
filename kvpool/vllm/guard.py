"""Keeps our own faults out of the engine, and ends a start that must not be with one line."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

from vllm.logger import init_logger

from kvpool import metrics
from kvpool.errors import EngineRefused
from kvpool.metrics import Counters

logger = init_logger("vllm.kvpool")

_T = TypeVar("_T")


SAY_EVERY_S = 60.0  # faults of requests in between are counted, not logged


class Guard:
    """Runs calls of ours for the whole engine; ``ended`` is told the reason when one of them raises.

    After start-up a fault of kvpool costs a recompute and never a request: such a call may have left what all requests
    share half changed, so the pool is switched off and the engine goes on. Threads: the one of the half that owns it.
    """

    def __init__(self, ended: Callable[[str], None]) -> None:
        self._ended = ended

    def run(self, call: Callable[[], _T], instead: _T) -> _T:
        """The result of ``call``, or ``instead`` when it raises."""
        try:
            return call()
        except Exception as error:
            logger.exception("kvpool failed inside the engine")
            self._ended(f"{type(error).__name__}: {error}")
            return instead


class RequestGuard:
    """Runs calls of ours on behalf of one request. One that raises costs this request the pool, and no other.

    Such faults are counted, and never end the pool, however many there are. Threads: the one of the half that owns it.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._said_at = -SAY_EVERY_S

    def run(self, where: str, call: Callable[[], _T], instead: _T) -> tuple[_T, bool]:
        """(the result of ``call``, True), or (``instead``, False) when it raises. ``where``: of ``REQUEST_FAULTS``."""
        try:
            return call(), True
        except Exception:
            self._counters.add(metrics.REQUEST_FAULTS, 1, where)
            now_s = time.monotonic()
            if now_s - self._said_at >= SAY_EVERY_S:
                self._said_at = now_s
                logger.exception(
                    "kvpool failed for a request, which goes on without it; see kvpool_request_faults_total"
                )
            return instead, False


def refuse(error: Exception) -> NoReturn:
    """End the start with one line.

    vLLM starts an engine in a process of its own, where an exception would print pages of its call stack above
    the one sentence that helps; there, the sentence is all. In the caller's own process it is an exception.
    """
    sentence = f"kvpool refuses to start: {error}"
    if multiprocessing.parent_process() is not None:
        raise SystemExit(sentence)
    raise EngineRefused(sentence) from error
