"""``AdapterLoads``: what a worker holds of each adapter, digested when vLLM takes it in.

The digest is the adapter's own, in vLLM's memory, and goes with it (``internals.HeldAdapters``). A block is moved only
while the worker holds the tensors that the scheduler calls it by.

Threads: the worker's, which is vLLM's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.logger import init_logger

from kvpool.vllm.engine import internals
from kvpool.vllm.engine.adapters import GONE, UNDIGESTED, UNREADABLE
from kvpool.vllm.engine.measure import digest_of_all
from kvpool.vllm.plan import AdapterWeights

logger = init_logger("vllm.kvpool")


class AdapterLoads:
    """``rank``: of this worker. ``held``: set when the KV cache is registered; None: nothing is known of adapters."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.held: internals.HeldAdapters | None = None
        self._told: dict[int, str] = {}  # by vLLM's number, as the scheduler has it
        self._looked: dict[int, str] = {}  # since the last report
        self._shows = internals.digest_adapters(digest_adapter)

    def has(self, adapter: AdapterWeights) -> bool:
        """Whether what is computed for this adapter is of these weights."""
        return self._digest_of(adapter.number) == adapter.digests[self._rank]

    def may_have(self, adapter: AdapterWeights) -> bool:
        """Whether it is, or will be when vLLM asks for what was read ahead."""
        if self._digest_of(adapter.number) is not None or self.held is None:
            return self.has(adapter)
        ahead = self.held.ahead(adapter.number, adapter.name, adapter.path)
        return ahead == adapter.digests[self._rank]

    def look(self, lora_request: Any) -> None:
        """Say what this worker holds of a request's adapter, and read it if it holds none, as its next step would."""
        number = int(lora_request.lora_int_id)
        digest = self._digest_of(number)
        if digest is None and self.held is not None and self._shows:
            try:
                digest = self.held.read(lora_request)
            except Exception as error:  # vLLM's own attempt will say it
                logger.info("kvpool: adapter %s cannot be read: %s", lora_request.lora_name, error)
        self._looked[number] = UNREADABLE if digest is None else digest

    def tell_all(self) -> None:
        """The next news are of all that is held: the scheduler has forgotten the earlier ones."""
        self._told = {}

    def take_news(self) -> dict[int, str]:
        """What has changed since the last call, by number: a digest, or what stands in its place."""
        now = {} if self.held is None else self.held.digests()
        news = {number: digest for number, digest in now.items() if self._told.get(number) != digest}
        news |= dict.fromkeys(self._told.keys() - now.keys() - self._looked.keys(), GONE)
        self._told, looked, self._looked = now, self._looked, {}
        return looked | news

    def _digest_of(self, number: int) -> str | None:
        return None if self.held is None else self.held.digests().get(number)


def digest_adapter(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Never raises."""
    try:
        return digest_of_all(tensors)
    except Exception:
        logger.warning("kvpool cannot digest an adapter, which goes without the pool", exc_info=True)
        return UNDIGESTED
