"""``Tokenizers``: makes the tokens of prompts that come as text, in threads of its own. One event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from kvpool.index.chat import Chat
from kvpool.index.place.tokenizer import Tokenizer
from kvpool.index.prompt import Prompt

THREADS = 2  # long texts must not hold up what else takes a thread


class Tokenizers:
    """``by_model``: under the models' names."""

    def __init__(self, by_model: Mapping[str, Tokenizer] | None = None) -> None:
        self._by_model = by_model or {}
        self._threads = ThreadPoolExecutor(THREADS, "kvpool-text")

    def __contains__(self, model: str) -> bool:
        return model in self._by_model

    async def in_tokens(self, prompt: Prompt) -> Prompt:
        """The prompt with tokens in the place of its text or chat. Its model is one of these. Errors: ``ConfigError``
        for what has no tokens."""
        tokenizer = self._by_model[prompt.model]
        work = (
            partial(tokenizer.of_chat, prompt.chat)
            if isinstance(prompt.chat, Chat)
            else partial(tokenizer.of_text, prompt.text or "")
        )
        token_ids = await asyncio.get_running_loop().run_in_executor(self._threads, work)
        return replace(prompt, token_ids=token_ids, text=None, chat=None)

    def close(self) -> None:
        """Blocking, for as long as the longest text takes."""
        self._threads.shutdown(cancel_futures=True)
