"""What one request asks of the pool: ``"kv_transfer_params": {"kvpool": {"load": false, "store": false}}``.

A request that asks for something that is not understood goes without the pool: who misspells an opt-out has
opted out.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from vllm.logger import init_logger

from kvpool.text import unknown

logger = init_logger("vllm.kvpool")

FIELD = "kvpool"
MAX_SHOWN_CHARS = 200


class RequestParams(BaseModel):
    """``load``, ``store``: whether the pool may be used so. ``priority``: as vLLM's, lower comes first.

    Requests of a lower number load first where staging slots are short, and lose their stores last.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    load: bool = True
    store: bool = True
    priority: int = Field(default=0, ge=-(1 << 31), lt=1 << 31)


WITHOUT_POOL = RequestParams(load=False, store=False)


class ParamsReader:
    """Reads the parameters of requests; says once that it did not understand some. Never raises."""

    def __init__(self) -> None:
        self._said = False

    def read(self, transfer_params: object) -> RequestParams:
        """What a request's ``kv_transfer_params`` say of the pool; what is not under ``kvpool`` is for others."""
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
