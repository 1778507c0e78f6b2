"""Callers who go on asking the front of a cluster, with OpenAI's own client, and what became of each request."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import openai

BLOCK_TOKENS = 128
SHARED_BLOCKS = 6
TAIL_TOKENS = 24
CONVERSATIONS = 8
CALLERS = 2
GENERATED_TOKENS = 4
PAUSE_S = 0.7  # two workers on two cores restart in the time that callers leave
ASK_TIMEOUT_S = 60.0


class Answer(NamedTuple):
    """Of one request. ``error``: empty where it was answered. Times by ``time.monotonic()``."""

    began_s: float
    ended_s: float
    error: str = ""
    worker: str = ""
    reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    token_ids: tuple[int, ...] = ()


class Front:
    """OpenAI's client of it. ``retries``: by the client."""

    def __init__(self, url: str, model: str, *, retries: int = 0) -> None:
        self._model = model
        self._client = openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=retries, timeout=ASK_TIMEOUT_S
        )

    def close(self) -> None:
        self._client.close()

    def ask(self, text: str, tokens: int = GENERATED_TOKENS) -> Answer:
        """A greedy completion."""
        began_s = time.monotonic()
        try:
            raw = self._client.completions.with_raw_response.create(
                model=self._model,
                prompt=text,
                max_tokens=tokens,
                temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            reply: Any = raw.parse()
        except openai.APIError as failure:
            cause = f" ({failure.__cause__})" if failure.__cause__ else ""
            return Answer(began_s, time.monotonic(), f"{type(failure).__name__}: {failure}{cause}")
        details = reply.usage.prompt_tokens_details
        return Answer(
            began_s,
            time.monotonic(),
            "",
            raw.headers.get("x-kvpool-worker", ""),
            raw.headers.get("x-kvpool-reason", ""),
            reply.usage.prompt_tokens,
            (details and details.cached_tokens) or 0,
            tuple(reply.choices[0].token_ids),
        )


def words(seed: str, count: int) -> str:
    """A text of ``count`` tokens of the tiny model, whose tokenizer takes numbers of several digits apart."""
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(3, 10)}" for _ in range(count))


class Traffic:
    """Conversations that go on: each request has the blocks of one of them, and a tail that is new."""

    def __init__(self) -> None:
        self._answers: list[Answer] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def answers(self, from_s: float = 0.0, to_s: float = float("inf")) -> list[Answer]:
        """Of the requests that began in this time and have ended."""
        with self._lock:
            return [answer for answer in self._answers if from_s <= answer.began_s < to_s]

    def _call(self, front: Front, number: int) -> None:
        draw = random.Random(number)
        count = 0
        while not self._ended.is_set():
            count += 1
            shared = words(f"conversation {draw.randrange(CONVERSATIONS)}", SHARED_BLOCKS * BLOCK_TOKENS)
            answer = front.ask(f"{shared} {words(f'{number} {count} {time.time()}', TAIL_TOKENS)}")
            with self._lock:
                self._answers.append(answer)
            self._ended.wait(PAUSE_S)

    @classmethod
    @contextmanager
    def running(cls, url: str, model: str, *, retries: int = 0) -> Iterator[Traffic]:
        """Until the end of the block."""
        traffic = cls()
        front = Front(url, model, retries=retries)
        callers = [threading.Thread(target=traffic._call, args=(front, number)) for number in range(CALLERS)]
        for caller in callers:
            caller.start()
        try:
            yield traffic
        finally:
            traffic._ended.set()
            for caller in callers:
                caller.join(2 * ASK_TIMEOUT_S)
            front.close()


def hit_ratio(answers: Iterable[Answer]) -> float:
    """Share of the prompts' tokens that were not computed."""
    good = [answer for answer in answers if not answer.error]
    return sum(answer.cached_tokens for answer in good) / max(1, sum(answer.prompt_tokens for answer in good))
