"""``Tokenizers``: the tokens of prompts, by model, in threads that a long text does not take from others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from kvpool.errors import KVPoolError
from kvpool.index.limits import Limits, Work
from kvpool.index.place.text_work import SHORT, WHOLE, Bounds, LongText, TextWork
from kvpool.index.place.token_cache import MAX_PIECE_CHARS
from kvpool.index.place.turns import Turn, Turns
from kvpool.index.prompt import Chat, Prompt

if TYPE_CHECKING:
    from kvpool.index.names import Names
    from kvpool.index.place.tokenizer import Tokenizer

THREADS, THREADS_OF_TENANT = 4, 2  # for lookups of short texts
LONG, LONG_OF_TENANT = 16, 12  # long texts that take turns; others wait for their place
MAX_PLACED, MAX_PLACED_OF_TENANT = 64, 48  # of placements, with those that wait
# Longer pieces come too late for a placement, and are not remembered.
_PLACED = WHOLE._replace(piece_chars=MAX_PIECE_CHARS)


class Tokenizers:
    """Makes tokens of prompts. Every text is worked on in ``tokens``, within bounds that its caller gives.

    Texts beyond ``SHORT`` take turns, one at work at a time, so that short texts, and known ones, wait for none.
    What is made of a text is remembered, also if nobody waits for the rest. ``limits``: of the memory; None: their
    own. One event loop, but for ``tokens``.
    """

    def __init__(self, by_model: Mapping[str, Tokenizer] | None = None, limits: Limits | None = None) -> None:
        self._by_model, self._limits = by_model or {}, limits or Limits()
        self._short = Work(THREADS, THREADS_OF_TENANT, "kvpool-text")
        self._long = Work(LONG, LONG_OF_TENANT, "kvpool-long-text")
        self._turns = Turns()
        self._placed: Counter[str] = Counter()  # under way, by tenant

    def __contains__(self, model: str) -> bool:
        return model in self._by_model

    def model_of(self, prompt: Prompt, names: Names) -> str:
        """The model whose tokens the prompt has; they are made here if it is one of these. Any thread."""
        return prompt.model if prompt.model in self else names.model(prompt.tenant, prompt.model)

    def tokens(self, prompt: Prompt, model: str, bounds: Bounds, turn: Turn | None = None) -> Prompt:
        """The prompt in tokens of ``model``. Any thread. ``turn``: of a long text. Errors: ``ConfigError``; those of
        ``TextWork``.
        """
        tokenizer = self._by_model[model]
        with turn or nullcontext(), closing(TextWork(bounds, self._limits, turn)) as work:
            if isinstance(prompt.chat, Chat):
                token_ids = tokenizer.of_chat(prompt.chat, work)
            else:
                token_ids = tokenizer.of_text(prompt.text or "", work)
        return replace(prompt, token_ids=token_ids, text=None, chat=None)

    async def in_tokens(self, prompt: Prompt, model: str) -> Prompt:
        """``tokens``, in a thread; a long text takes turns. Errors: ``ConfigError``; ``KVPoolError`` without room."""
        try:
            return await self._short.run(prompt.tenant, lambda: self.tokens(prompt, model, SHORT))
        except LongText:
            return await self._run_long(prompt, model, WHOLE)

    async def placed(self, prompt: Prompt, model: str) -> Prompt:
        """The same of a long text that is placed. Cancelled, it goes on while no other long text is there: its next
        request needs less. Errors: also ``LongText``, of a piece that never comes in time.
        """
        tenant = prompt.tenant
        if self._placed.total() >= MAX_PLACED or self._placed[tenant] >= MAX_PLACED_OF_TENANT:
            raise KVPoolError(f"{MAX_PLACED_OF_TENANT} other long texts wait for their tokens")
        self._placed[tenant] += 1
        try:
            return await self._run_long(prompt, model, _PLACED)
        finally:
            self._placed[tenant] -= 1
            self._placed += Counter()  # without tenants that have none

    async def _run_long(self, prompt: Prompt, model: str, bounds: Bounds) -> Prompt:
        turn = Turn(self._turns, prompt.tenant, len(prompt.text or ""))
        try:
            return await self._long.run(prompt.tenant, lambda: self.tokens(prompt, model, bounds, turn))
        finally:
            turn.give_up()

    def close(self) -> None:
        """Blocks as long as the longest piece takes."""
        self._turns.close()
        self._short.close()
        self._long.close()
