"""What a request asks for, and its own wishes for the pool.

A request opts out by ``"kv_transfer_params": {"kvpool": {"load": false, "store": false}}``. Invalid
parameters disable the pool for it, because a misspelt opt-out is an opt-out.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from vllm.logger import init_logger
from vllm.v1.request import Request

from kvpool.text import unknown
from kvpool.vllm.engine.adapters import AdapterCheck, pool_hash
from kvpool.vllm.engine.hints import MAX_KEEP_S, NO_HINTS, Hints
from kvpool.vllm.plan import AdapterWeights

logger = init_logger("vllm.kvpool")


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


@dataclass(frozen=True)
class Asked:
    """What a request asks for, known at its arrival. ``opted_out``: of loads, by its own parameters."""

    request: Request
    params: RequestParams
    hints: Hints = NO_HINTS
    adapter: AdapterCheck | None = None
    opted_out: bool = False

    @property
    def has_pool(self) -> bool:
        """Whether it may load or store."""
        return self.params.load or self.params.store

    @property
    def checked(self) -> bool:
        return self.adapter is None or self.adapter.done

    @property
    def identified(self) -> bool:
        """Whether its blocks' hashes in the pool are known."""
        return self.tag is not None

    @property
    def tag(self) -> bytes | None:
        """Of its adapter; empty: it has none. None: unknown."""
        return b"" if self.adapter is None else self.adapter.tag

    @property
    def adapter_weights(self) -> AdapterWeights | None:
        """That its blocks are of; None: it has no adapter, or their hashes in the pool are unknown."""
        return None if self.adapter is None else self.adapter.weights

    @property
    def pool_hash(self) -> Callable[[bytes], bytes] | None:
        """Maps a block's hash to the hash in its key. None: unknown."""
        if self.adapter is None:
            return bytes
        tag = self.adapter.tag if self.adapter.done else None
        return None if tag is None else functools.partial(pool_hash, tag=tag)


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
