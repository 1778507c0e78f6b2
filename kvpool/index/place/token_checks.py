"""``TokenChecks``: compares a few prompts' tokens an hour with those that a worker's /render makes of them.

Only prompts that a ``--tokenizer`` makes tokens of, in the background: no request waits. After a difference the
model's prompts go to workers' /render, until the prompt that differed is found equal. Each tenant has workers of its
own, so what they say counts for its prompts alone. One event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvpool.errors import ConfigError, KVPoolError
from kvpool.index.place.inference_request import InferenceRequest
from kvpool.index.place.tokenizers import Tokenizers
from kvpool.index.prompt import Prompt
from kvpool.index.request_stats import RequestStats

CHECK_S = 600.0  # between two checks of a tenant's model: from half of it to one and a half
MAX_CHECKED_NBYTES = 256 << 10  # of a body: a prompt that differs is kept
MAX_MODELS = 256  # of all tenants; more are checked when others have no prompts

logger = logging.getLogger("kvpool.index")

# A worker's tokens of a request. Errors: ``KVPoolError``.
Render = Callable[[InferenceRequest], Awaitable[Prompt]]


@dataclass
class _Model:
    """Of a tenant. ``differs``: the request whose tokens did; None: none did."""

    name: str
    tenant: str
    due_s: float = -math.inf
    differs: InferenceRequest | None = None
    task: asyncio.Task[None] | None = None


class TokenChecks:
    """``clock``: monotonic, in seconds. ``draw``: from 0 to 1, when the next check is due."""

    def __init__(
        self,
        tokenizers: Tokenizers,
        stats: RequestStats,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._tokenizers, self._stats, self._clock, self._draw = tokenizers, stats, clock, draw
        self._models: dict[tuple[str, str], _Model] = {}  # by tenant and name; those with a tokenizer

    def close(self) -> None:
        for model in self._models.values():
            if model.task is not None:
                model.task.cancel()

    def trusts(self, tenant: str, model: str) -> bool:
        """Whether its tokens are made here. Any thread."""
        known = self._models.get((tenant, model))
        return model in self._tokenizers and (known is None or known.differs is None)

    def offer(self, request: InferenceRequest, name: str, render: Render) -> None:
        """A request that was placed; checked if one is due. ``name``: of the model whose tokenizer it has.
        ``render``: with this request's authorization.
        """
        if name not in self._tokenizers:
            return
        now_s = self._clock()
        model = self._model(request.tenant, name, now_s)
        if model is None or now_s < model.due_s or model.task is not None:
            return
        checked = model.differs or request
        prompt = checked.prompt
        if prompt is None or prompt.token_ids is not None or len(checked.body) > MAX_CHECKED_NBYTES:
            return
        model.due_s = now_s + CHECK_S * (0.5 + self._draw())
        model.task = asyncio.create_task(self._check(model, prompt, checked, render))

    def _model(self, tenant: str, name: str, now_s: float) -> _Model | None:
        """None: there is no room."""
        known = self._models.get((tenant, name))
        if known is None and len(self._models) >= MAX_MODELS:
            idle = (key for key, one in self._models.items() if one.task is None and one.due_s <= now_s)
            if (first := next(idle, None)) is None:
                return None
            del self._models[first]
        return known or self._models.setdefault((tenant, name), _Model(name, tenant))

    async def _check(self, model: _Model, prompt: Prompt, request: InferenceRequest, render: Render) -> None:
        try:
            mine = (await self._tokenizers.in_tokens(prompt, model.name)).token_ids
            theirs = (await render(request)).token_ids
        except ConfigError:  # a worker is asked for its tokens, anyway
            model.due_s = -math.inf
        except KVPoolError as error:
            self._stats.record_check("unanswered")
            logger.info("the tokens of --tokenizer %s were not compared: %s", model.name, error)
        else:
            self._compare(model, mine, theirs, request)
        finally:
            model.task = None

    def _compare(self, model: _Model, mine: Any, theirs: Any, request: InferenceRequest) -> None:
        if mine == theirs:
            self._stats.record_check("same")
            if model.differs is not None:
                logger.info(
                    "the tokens of --tokenizer %s are those of its workers of tenant %s again",
                    model.name,
                    model.tenant,
                )
            model.differs = None
            return
        self._stats.record_check("different")
        if model.differs is None:
            logger.warning(
                "the tokens of --tokenizer %s are not those of its workers of tenant %s, from token %d of %d on; their "
                "prompts go to the workers' /render until they agree: give --tokenizer the folder that the workers "
                "serve, and start them without options that change chats (--chat-template), or kvpool without this "
                "--tokenizer",
                model.name, model.tenant, _common(mine, theirs), len(theirs),
            )  # fmt: skip
        model.differs = request


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))
