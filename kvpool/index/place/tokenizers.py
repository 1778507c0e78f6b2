"""``Tokenizers``: makes the tokens of prompts that come as text, in threads of its own. One event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

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

    def tokens(self, prompt: Prompt) -> Prompt:
        """The prompt with tokens in the place of its text or chat. Its model is one of these. Any thread; takes as long
        as its text is. Errors: ``ConfigError`` for what has no tokens."""
        tokenizer = self._by_model[prompt.model]
        if isinstance(prompt.chat, Chat):
            token_ids = tokenizer.of_chat(prompt.chat)
        else:
            token_ids = tokenizer.of_text(prompt.text or "")
        return replace(prompt, token_ids=token_ids, text=None, chat=None)

    async def in_tokens(self, prompt: Prompt) -> Prompt:
        """``tokens``, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.tokens, prompt)

    def close(self) -> None:
        """Blocking, for as long as the longest text takes."""
        self._threads.shutdown(cancel_futures=True)
