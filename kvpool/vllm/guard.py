"""Keeps our own faults out of the engine, and ends a start that must not be with one line."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import NoReturn, TypeVar

from vllm.logger import init_logger

from kvpool.errors import EngineRefused

logger = init_logger("vllm.kvpool")

_T = TypeVar("_T")


class Guard:
    """Runs calls of ours inside the engine; ``ended`` is told, once, the reason when one of them raises.

    After start-up a fault of kvpool costs a recompute and never a request: the pool is switched off and the engine
    goes on. Threads: the one of the half that owns it.
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


def refuse(error: Exception) -> NoReturn:
    """End the start with one line.

    vLLM starts an engine in a process of its own, where an exception would print pages of its call stack above
    the one sentence that helps; there, the sentence is all. In the caller's own process it is an exception.
    """
    sentence = f"kvpool refuses to start: {error}"
    if multiprocessing.parent_process() is not None:
        raise SystemExit(sentence)
    raise EngineRefused(sentence) from error
