"""``AdapterLoads``: what a worker holds of each adapter, measured when vLLM takes it in.

All ways to an adapter end there: options, calls, resolvers, a trainer's tensors, and the step that lacks it. A block is
moved only while the worker holds the tensors that the scheduler calls it by.

Threads: the worker's, which is vLLM's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from vllm.logger import init_logger

from kvpool.vllm.engine import internals
from kvpool.vllm.engine.adapters import GONE, MAX_ADAPTERS, UNREADABLE
from kvpool.vllm.engine.measure import digest_of_all
from kvpool.vllm.plan import AdapterWeights

logger = init_logger("vllm.kvpool")


class AdapterLoads:
    """``rank``: of this worker. ``news``: what a number of vLLM's has become: a digest, ``UNREADABLE`` or ``GONE``.

    ``reader``: of what vLLM has not loaded (``internals.adapter_reader``).
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._digests: dict[int, str] = {}  # by vLLM's number: what it stands for now
        self.news: dict[int, str] = {}
        self.reader: Callable[[Any], Iterable[tuple[str, torch.Tensor]]] | None = None
        self._shows = internals.watch_adapter_loads(self)

    def has(self, adapter: AdapterWeights) -> bool:
        """Whether what is computed for this adapter is of these weights."""
        return self._digests.get(adapter.number) == adapter.digests[self._rank]

    def may_have(self, adapter: AdapterWeights) -> bool:
        """Whether it is, or vLLM loads it when it is first computed for."""
        return self._shows and (adapter.number not in self._digests or self.has(adapter))

    def loaded(self, number: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """vLLM takes an adapter in. Never raises."""
        self._digests.pop(number, None)
        self._digests[number] = self.news[number] = _digest(number, tensors)
        if len(self._digests) > MAX_ADAPTERS:
            self._digests.pop(next(iter(self._digests)))

    def removed(self, number: int) -> None:
        """The number stands for nothing now."""
        if self._digests.pop(number, None) is not None:
            self.news[number] = GONE

    def look(self, lora_request: Any) -> None:
        """Say what this worker holds of a request's adapter, and read it if it holds none, as its next step would."""
        number = int(lora_request.lora_int_id)
        if number in self._digests:
            self.news[number] = self._digests[number]
        elif self.reader is None or not self._shows:
            self.news[number] = UNREADABLE
        else:
            try:
                self.news[number] = _digest(number, self.reader(lora_request))
            except Exception as error:  # vLLM's own attempt will say it
                logger.info("kvpool: adapter %s cannot be read: %s", lora_request.lora_name, error)
                self.news[number] = UNREADABLE


def _digest(number: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    try:
        return digest_of_all(tensors)
    except Exception:  # never reaches the engine
        logger.warning("kvpool cannot measure adapter %d, which goes without the pool", number, exc_info=True)
        return UNREADABLE
