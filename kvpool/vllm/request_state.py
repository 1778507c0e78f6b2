"""``RequestState``: what the scheduler half knows of one request. Threads: the engine's scheduler thread only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from vllm.v1.request import Request

from kvpool.vllm.adapters import AdapterCheck, pool_hash
from kvpool.vllm.lookups import RequestLookup
from kvpool.vllm.request_params import RequestParams


@dataclass
class RequestState:
    request: Request
    params: RequestParams
    adapter: AdapterCheck | None = None
    lookup: RequestLookup | None = None  # the latest one
    waiting_since: float | None = None  # when the engine was first told to ask again later
    waited_s: float = 0.0
    wait_counted: bool = False  # the time that was waited for ``lookup``
    result: str = "no_answer"  # why nothing is offered: of ``metrics.REQUEST_RESULTS``
    local_tokens: int = 0  # of its prompt, in the engine's own cache
    counted: bool = False  # among the requests of the metrics
    loads_first: bool = False  # it is counted when its load has ended
    offered: tuple[int, int] | None = None  # (local tokens, tokens with the pool)
    loading: bool = False
    admitted: bool = False  # the cost gate lets it load what its lookup has found
    load_tokens: int = 0  # of the load under way
    load_s: float = 0.0
    refused: bool = (
        False  # not offered again: a load or its lookup failed, or a load is slower than computing
    )

    @property
    def checked(self) -> bool:
        """Whether it is known of which adapter it is, or that this cannot be known."""
        return self.adapter is None or self.adapter.done

    @property
    def identified(self) -> bool:
        """Whether it is known under which hashes its blocks are in the pool."""
        return self.adapter is None or self.adapter.tag is not None

    @property
    def pool_hash(self) -> Callable[[bytes], bytes] | None:
        """Makes the hash in a key of that of one of its blocks. None: it is not known how."""
        if self.adapter is None:
            return bytes
        tag = self.adapter.tag if self.adapter.done else None  # another thread may set it to None
        return None if tag is None else functools.partial(pool_hash, tag=tag)
