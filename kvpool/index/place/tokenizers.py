"""``Tokenizers``: the tokens of prompts, by model, in threads that a long text does not take from others."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from kvpool.index.limits import Limits, Work
from kvpool.index.place.text_work import SHORT, WHOLE, Bounds, LongText, TextWork
from kvpool.index.place.token_cache import MAX_PIECE_CHARS
from kvpool.index.prompt import Chat, Prompt

if TYPE_CHECKING:
    from kvpool.index.names import Names
    from kvpool.index.place.tokenizer import Tokenizer

THREADS, THREADS_OF_TENANT = 4, 2  # for lookups of short texts
# Longer pieces come too late for a placement, and are not remembered.
_PLACED = WHOLE._replace(piece_chars=MAX_PIECE_CHARS)


class Tokenizers:
    """Makes tokens of prompts. Every text is worked on in ``tokens``, within bounds that its caller gives.

    A text beyond ``SHORT`` waits for others like it: one thread makes their tokens, so that those of short texts, and
    of known ones, wait for none. ``limits``: of the memory; None: their own. One event loop, but for ``tokens``.
    """

    def __init__(self, by_model: Mapping[str, Tokenizer] | None = None, limits: Limits | None = None) -> None:
        self._by_model, self._limits = by_model or {}, limits or Limits()
        self._short = Work(THREADS, THREADS_OF_TENANT, "kvpool-text")
        self._long = Work(1, 1, "kvpool-long-text")
        self._long_under_way = 0

    def __contains__(self, model: str) -> bool:
        return model in self._by_model

    def model_of(self, prompt: Prompt, names: Names) -> str:
        """The model whose tokens the prompt has; they are made here if it is one of these. Any thread."""
        return prompt.model if prompt.model in self else names.model(prompt.tenant, prompt.model)

    def tokens(self, prompt: Prompt, model: str, bounds: Bounds) -> Prompt:
        """The prompt in tokens of ``model``. Any thread. Errors: ``ConfigError``; those of ``TextWork``."""
        tokenizer = self._by_model[model]
        with closing(TextWork(bounds, self._limits)) as work:
            if isinstance(prompt.chat, Chat):
                token_ids = tokenizer.of_chat(prompt.chat, work)
            else:
                token_ids = tokenizer.of_text(prompt.text or "", work)
        return replace(prompt, token_ids=token_ids, text=None, chat=None)

    async def in_tokens(self, prompt: Prompt, model: str) -> Prompt:
        """``tokens``, in a thread; a long text waits in line. Errors: ``ConfigError``; ``KVPoolError`` without room."""
        try:
            return await self._short.run(prompt.tenant, lambda: self.tokens(prompt, model, SHORT))
        except LongText:
            return await self._run_long(prompt, model, WHOLE)

    async def placed(self, prompt: Prompt, model: str) -> Prompt:
        """The same of a long text that is placed; what is made of it is remembered, as its next request needs less.
        Errors: also ``LongText``, at once: others are worked on, or it never comes in time.
        """
        if self._long_under_way:
            raise LongText("the tokens of another long text are made")
        return await self._run_long(prompt, model, _PLACED)

    async def _run_long(self, prompt: Prompt, model: str, bounds: Bounds) -> Prompt:
        self._long_under_way += 1
        try:
            return await self._long.run(prompt.tenant, lambda: self.tokens(prompt, model, bounds))
        finally:
            self._long_under_way -= 1

    def close(self) -> None:
        """Blocks as long as the longest text takes."""
        self._short.close()
        self._long.close()
