"""``Tokenizers``: the tokens of prompts, by model, in threads that a long text does not take from others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from kvpool.errors import KVPoolError
from kvpool.index.limits import Limits, Work
from kvpool.index.prompt import Chat, Prompt
from kvpool.index.tokens.text_work import SHORT, WHOLE, Bounds, LongText, TextWork
from kvpool.index.tokens.token_cache import MAX_PIECE_CHARS
from kvpool.index.tokens.turns import Turn, Turns

if TYPE_CHECKING:
    from kvpool.index.tokens.tokenizer import Tokenizer

THREADS, THREADS_OF_TENANT = 4, 2  # for lookups of short texts
LONG, LONG_OF_TENANT = 16, 12  # long texts of lookups that take turns; others wait for their place
PLACED, PLACED_OF_TENANT = 64, 48  # of placements; of more the longest goes without
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
        self._placing = Work(PLACED, PLACED_OF_TENANT, "kvpool-long-placed")
        self._turns = Turns()
        self._placed: list[Turn] = []  # those that somebody waits for

    def __contains__(self, model: str) -> bool:
        return model in self._by_model

    def model_of(self, prompt: Prompt, named: Callable[[str, str], str]) -> str:
        """The model whose tokens the prompt has; they are made here if it is one of these. Any thread.

        ``named``: ``Names.model``.
        """
        return prompt.model if prompt.model in self else named(prompt.tenant, prompt.model)

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
            turn = Turn(self._turns, prompt.tenant, len(prompt.text or ""))
            return await self._run(self._long, prompt, model, WHOLE, turn)

    async def placed(self, prompt: Prompt, model: str, nbytes: int) -> Prompt:
        """The same of a long text that is placed, of a body of so many bytes. Cancelled, it goes on while no other long
        text is there: its next request needs less. Errors: also ``LongText``, of a piece that never comes in time, and
        where shorter texts take its place.
        """
        turn = Turn(self._turns, prompt.tenant, len(prompt.text or "") or nbytes)
        self._make_place(turn)
        self._placed.append(turn)
        try:
            return await self._run(self._placing, prompt, model, _PLACED, turn)
        finally:
            if turn in self._placed:
                self._placed.remove(turn)

    def _make_place(self, turn: Turn) -> None:
        """The longest text would have its turn last: it comes too late, whoever waits. Errors: ``KVPoolError``."""
        mine = [one for one in self._placed if one.tenant == turn.tenant]
        if len(mine) >= PLACED_OF_TENANT:
            longest = max(mine, key=lambda one: one.left)
            if longest.left > turn.left:
                self._placed.remove(longest)
                return longest.give_up()
        elif len(self._placed) < PLACED:
            return None
        raise KVPoolError(f"{len(mine)} other long texts wait for their tokens")

    async def _run(self, work: Work, prompt: Prompt, model: str, bounds: Bounds, turn: Turn) -> Prompt:
        try:
            return await work.run(prompt.tenant, lambda: self.tokens(prompt, model, bounds, turn))
        finally:
            turn.give_up()

    def close(self) -> None:
        """Blocks as long as the longest piece takes."""
        self._turns.close()
        for work in (self._short, self._long, self._placing):
            work.close()
