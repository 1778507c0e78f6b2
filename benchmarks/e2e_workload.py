"""The requests of ``python -m benchmarks e2e``, drawn from one seed: growing chats, and shared documents.

A chat's prompt is the chat so far. Answers are part of it, so the first engine's fix all prompts
(``Conversations``). A document's prompt is the document and a question. Requests of all chats and documents
are mixed, with a chat's turns in order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from demo.tiny_model import FIRST_WORD, VOCABULARY

Kind = Literal["chat", "document"]

TURNS = 4  # of a chat
SYSTEM_TOKENS = 260  # common start of all chats
SAID_TOKENS = (120, 400)  # of the user, per turn
QUESTIONS = 3  # about each document
QUESTION_TOKENS = (20, 60)


@dataclass(frozen=True)
class Request:
    """``said``: the new text: the user's words or a question. ``session``: of its kind."""

    kind: Kind
    session: int
    said: tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """``probes``: prompts of a document's length without a common prefix. ``warm_up``: such, asked first."""

    system: tuple[int, ...]
    documents: tuple[tuple[int, ...], ...]
    requests: tuple[Request, ...]
    probes: tuple[tuple[int, ...], ...]
    warm_up: tuple[int, ...]


def draw_workload(*, seed: int, chats: int, documents: int, prompt_tokens: int, probes: int) -> Workload:
    """Deterministic. ``prompt_tokens``: of a document, and of a probe."""
    draw = random.Random(seed)

    def words(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(FIRST_WORD, VOCABULARY) for _ in range(count))

    sessions: list[tuple[Kind, int]] = [("chat", chat) for chat in range(chats) for _ in range(TURNS)]
    sessions += [("document", document) for document in range(documents) for _ in range(QUESTIONS)]
    draw.shuffle(sessions)
    lengths = {"chat": SAID_TOKENS, "document": QUESTION_TOKENS}
    return Workload(
        system=words(SYSTEM_TOKENS),
        documents=tuple(words(prompt_tokens) for _ in range(documents)),
        requests=tuple(
            Request(kind, session, words(draw.randint(*lengths[kind]))) for kind, session in sessions
        ),
        probes=tuple(words(prompt_tokens) for _ in range(probes)),
        warm_up=words(prompt_tokens),
    )


class Conversations:
    """The chats so far: builds each prompt, and takes its answer before the next."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._chats: dict[int, list[int]] = {}

    def prompt(self, request: Request) -> list[int]:
        if request.kind == "document":
            return [*self._workload.documents[request.session], *request.said]
        return [*self._chats.get(request.session, self._workload.system), *request.said]

    def answered(self, request: Request, prompt: Sequence[int], answer: Sequence[int]) -> None:
        if request.kind == "chat":
            self._chats[request.session] = [*prompt, *answer]


def longest_prompt_tokens(prompt_tokens: int, answer_tokens: int) -> int:
    """The longest prompt, for answers of ``answer_tokens``."""
    chat = SYSTEM_TOKENS + TURNS * SAID_TOKENS[1] + (TURNS - 1) * answer_tokens
    return max(chat, prompt_tokens + QUESTION_TOKENS[1])
