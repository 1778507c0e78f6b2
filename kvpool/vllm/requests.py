"""The scheduler half's state of a request, and the request's own wishes for the pool.

A request opts out by ``"kv_transfer_params": {"kvpool": {"load": false, "store": false}}``. Invalid
parameters disable the pool for it, because a misspelt opt-out is an opt-out.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from vllm.logger import init_logger
from vllm.v1.request import Request

from kvpool.text import unknown
from kvpool.vllm.adapters import AdapterCheck, pool_hash
from kvpool.vllm.gate import Source
from kvpool.vllm.hints import MAX_KEEP_S, NO_HINTS, Hints
from kvpool.vllm.lookups import RequestLookup
from kvpool.vllm.plan import AdapterFiles

logger = init_logger("vllm.kvpool")


@dataclass
class RequestState:
    request: Request
    params: RequestParams
    hints: Hints = NO_HINTS
    adapter: AdapterCheck | None = None
    lookup: RequestLookup | None = None  # the latest
    tails: tuple[int, RequestLookup] | None = None  # behind so many tokens of whole blocks
    waiting_since: float | None = None  # first "ask again later" to the engine
    waited_s: float = 0.0
    wait_counted: bool = False  # the wait for ``lookup`` was observed
    result: str = "no_answer"  # why nothing is offered: of ``metrics.REQUEST_RESULTS``
    opted_out: bool = False
    reason: str = "unavailable"  # why no more is loaded: of ``metrics.MISS_REASONS``
    usable_tokens: int = 0  # of its prompt, at most, from the engine's cache and the pool
    local_tokens: int = 0  # of its prompt, in the engine's own cache
    counted: bool = False  # in the metrics
    loads_first: bool = False  # counted at the end of its load
    offered: tuple[int, int] | None = None  # (local tokens, tokens with the pool)
    loading: bool = False
    crowded: bool = False  # it waited its time for room; while it waits, vLLM gives memory to others
    admitted: dict[Source, bool] = field(default_factory=dict)  # what the cost gate said to its lookup's hit
    load_tokens: int = 0  # of the load in flight
    load_s: float = 0.0
    load_near: float = 0.0  # share of it that came from the near pool
    near_only: bool = False  # the lookup found all of the offer near
    refused: bool = (
        False  # not offered again: a load or its lookup failed, or a load is slower than computing
    )

    @property
    def checked(self) -> bool:
        return self.adapter is None or self.adapter.done

    @property
    def identified(self) -> bool:
        """Whether its blocks' hashes in the pool are known."""
        return self.adapter is None or self.adapter.tag is not None

    @property
    def adapter_files(self) -> AdapterFiles | None:
        """That its blocks are of; None: it has no adapter, or their hashes in the pool are unknown."""
        return None if self.adapter is None else self.adapter.files

    @property
    def pool_hash(self) -> Callable[[bytes], bytes] | None:
        """Maps a block's hash to the hash in its key. None: unknown."""
        if self.adapter is None:
            return bytes
        tag = self.adapter.tag if self.adapter.done else None  # another thread may set it to None
        return None if tag is None else functools.partial(pool_hash, tag=tag)


FIELD = "kvpool"
MAX_SHOWN_CHARS = 200


class RequestParams(BaseModel):
    """Permitted uses, and hints; a lower ``priority``, as vLLM's, gets scarce slots first and loses its stores last."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    load: bool = True
    store: bool = True
    priority: int = Field(default=0, ge=-(1 << 31), lt=1 << 31)
    keep_s: float = Field(default=0.0, ge=0, le=MAX_KEEP_S)
    done: bool = False
    prefetch: bool = False

    @property
    def hints(self) -> Hints:
        return Hints(self.keep_s, self.done, self.prefetch, self.priority)


WITHOUT_POOL = RequestParams(load=False, store=False)


class ParamsReader:
    """Reads the parameters of requests; logs invalid ones once. Never raises."""

    def __init__(self) -> None:
        self._said = False

    def read(self, transfer_params: object) -> RequestParams:
        """The pool parameters of ``kv_transfer_params``; keys beside ``kvpool`` are ignored."""
        asked: Any = transfer_params.get(FIELD, {}) if isinstance(transfer_params, Mapping) else {}
        if asked == {}:
            return RequestParams()
        if not isinstance(asked, Mapping):
            return self._refused(f"{asked!r:.80} is not an object such as {{'store': false}}")
        for name in asked:
            if name not in RequestParams.model_fields:
                return self._refused(unknown("field", str(name), RequestParams.model_fields))
        try:
            return RequestParams(**asked)
        except ValidationError as error:
            first = error.errors()[0]
            problem = first["msg"].removeprefix("Input ")
            return self._refused(f"{first['loc'][0]} {problem}, got {first['input']!r:.80}")

    def _refused(self, problem: str) -> RequestParams:
        if not self._said:
            self._said = True
            logger.warning(
                "kvpool: a request goes without the pool, for its kv_transfer_params say of %s: %s "
                "(said once; later ones are not reported)",
                FIELD,
                problem[:MAX_SHOWN_CHARS],
            )
        return WITHOUT_POOL
