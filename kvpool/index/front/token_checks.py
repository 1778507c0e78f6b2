"""``TokenChecks``: compares a few prompts' tokens an hour with those that a worker's /render makes of them.

Only prompts that a ``--tokenizer`` makes tokens of, in the background: no request waits. A prompt that differs goes to
workers' /render, and the next prompts are compared at once: one may be odd. If several differ, all of the model go
there, until the last that differed is found equal, or for ``DOUBT_ENDS_S``. After a worker's start, which may have
another template, the next prompt is compared. Each tenant has workers of its own, so what they say counts for its
prompts alone. One event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpool.errors import ConfigError, KVPoolError
from kvpool.index.fleet.start import Start
from kvpool.index.front.inference_request import InferenceRequest, prompt_key
from kvpool.index.prompt import Prompt
from kvpool.index.request_stats import RequestStats
from kvpool.index.tokens.tokenizers import Tokenizers

CHECK_S = 600.0  # between two checks of a tenant's model: from half of it to one and a half
STARTS_S = 10.0  # between two looks at the starts of its workers
DIFFERENT = 3  # prompts, after which the tokenizer is what differs
MAX_DOUBT_CHECKS = 12  # at once after a difference
DOUBT_S = 60.0  # between those of a caller who is known and had one that differs
DOUBT_ENDS_S = 3600.0
MAX_CHECKED_NBYTES = 256 << 10  # of a body: a prompt that differs is kept
MAX_MODELS = 256  # of all tenants; more are checked when others have no prompts

logger = logging.getLogger("kvpool.index")

# A worker's tokens of a request. Errors: ``KVPoolError``.
Render = Callable[[InferenceRequest], Awaitable[Prompt]]
Starts = Callable[[], Collection[Start]]  # of the workers of a tenant's model, now


@dataclass
class _Model:
    """Of a tenant. ``differ``: prompts whose tokens did since ``doubted_s``, with their callers, by what their tokens
    follow from. ``agree``: callers of prompts that did not. ``differs``: the last one that did, if it is not trusted.
    """

    name: str
    tenant: str
    starts: Collection[Start] = ()  # of its workers, at ``looked_s``
    looked_s: float = -math.inf
    due_s: float = -math.inf
    doubted_s: float = -math.inf
    differ: dict[bytes, str] = field(default_factory=dict)
    agree: set[str] = field(default_factory=set)
    checks: int = 0  # since then
    differs: InferenceRequest | None = None
    task: asyncio.Task[None] | None = None

    def trust(self) -> None:
        self.differ, self.agree, self.checks, self.differs = {}, set(), 0, None

    def look(self, now_s: float, starts: Starts) -> None:
        """Due at once if a worker has started since the last look."""
        if now_s < self.looked_s + STARTS_S:
            return
        known, self.starts, self.looked_s = self.starts, starts(), now_s
        if not set(self.starts) <= set(known):
            self.due_s = now_s

    def is_due(self, now_s: float, caller: str) -> bool:
        """In doubt at once, but for a known caller's next one: it may be alone with what differs."""
        if now_s >= self.due_s:
            return True
        if not self.differ or self.differs is not None or self.checks >= MAX_DOUBT_CHECKS:
            return False
        return (
            not caller
            or caller not in self.differ.values()
            or now_s >= self.doubted_s + DOUBT_S * (self.checks + 1)
        )

    def differs_for_all(self) -> bool:
        """Several prompts, and not of one caller alone where another's agree."""
        callers = set(self.differ.values())
        return len(self.differ) >= DIFFERENT and (len(callers) > 1 or self.agree <= callers)


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

    def trusts(self, request: InferenceRequest, model: str) -> bool:
        """Whether its tokens are made here. Any thread."""
        known = self._models.get((request.tenant, model))
        if known is None or not known.differ:
            return model in self._tokenizers
        return known.differs is None and prompt_key(request.path, request.body) not in known.differ

    def offer(
        self, request: InferenceRequest, name: str, render: Render, starts: Starts, authorization: str = ""
    ) -> None:
        """A request that was placed; checked if one is due. ``name``: of the model whose tokenizer it has.
        ``render``: with its ``authorization``, by which callers are told apart; empty: none is known.
        """
        if name not in self._tokenizers:
            return
        now_s = self._clock()
        model = self._model(request.tenant, name, now_s)
        if model is None or model.task is not None:
            return
        if model.differ and now_s >= model.doubted_s + DOUBT_ENDS_S:
            model.trust()
            model.due_s = now_s  # with another prompt
        model.look(now_s, starts)
        told = authorization.encode(errors="surrogatepass")  # bytes that are no UTF-8, too
        caller = hashlib.blake2b(told, digest_size=16).hexdigest() if told else ""
        if not model.is_due(now_s, caller):
            return
        checked = model.differs or request
        prompt = checked.prompt
        if prompt is None or prompt.token_ids is not None or len(checked.body) > MAX_CHECKED_NBYTES:
            return
        if model.differs is None and not self.trusts(checked, name):  # known to differ: another says more
            return
        model.due_s = now_s + CHECK_S * (0.5 + self._draw())
        model.checks += 1
        model.task = asyncio.create_task(self._check(model, prompt, checked, render, caller))

    def _model(self, tenant: str, name: str, now_s: float) -> _Model | None:
        """None: there is no room."""
        known = self._models.get((tenant, name))
        if known is None and len(self._models) >= MAX_MODELS:
            idle = (key for key, one in self._models.items() if one.task is None and one.due_s <= now_s)
            if (first := next(idle, None)) is None:
                return None
            del self._models[first]
        return known or self._models.setdefault((tenant, name), _Model(name, tenant))

    async def _check(
        self, model: _Model, prompt: Prompt, request: InferenceRequest, render: Render, caller: str
    ) -> None:
        try:
            mine = (await self._tokenizers.in_tokens(prompt, model.name)).token_ids
            theirs = (await render(request)).token_ids
        except ConfigError:  # a worker is asked for its tokens, anyway
            model.due_s = -math.inf
        except KVPoolError as error:
            self._stats.record_check("unanswered")
            logger.info("the tokens of --tokenizer %s were not compared: %s", model.name, error)
        else:
            self._compare(model, mine, theirs, request, caller)
        finally:
            model.task = None

    def _compare(self, model: _Model, mine: Any, theirs: Any, request: InferenceRequest, caller: str) -> None:
        if mine == theirs:
            self._stats.record_check("same")
            if model.differ:
                model.agree.add(caller)
            if model.differs is not None:
                logger.info(
                    "the tokens of --tokenizer %s are those of its workers of tenant %s again",
                    model.name,
                    model.tenant,
                )
                model.trust()
            return
        self._stats.record_check("different")
        if model.differs is not None:
            return
        if not model.differ:
            model.trust()
            model.doubted_s = self._clock()
        model.differ = {**model.differ, prompt_key(request.path, request.body): caller}
        if not model.differs_for_all():
            return
        model.differs = request
        logger.warning(
            "the tokens of --tokenizer %s are not those of its workers of tenant %s, from token %d of %d on; their "
            "prompts go to the workers' /render until they agree: give --tokenizer the folder that the workers "
            "serve, and start them without options that change chats (--chat-template), or kvpool without this "
            "--tokenizer",
            model.name, model.tenant, _common(mine, theirs), len(theirs),
        )  # fmt: skip


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))
