"""``Traffic``: conversations for ``python -m benchmarks route``, and an engine's view of them. Pure.

A conversation begins with a system prompt and grows with every turn. Texts, tokens, block hashes and KV
events are made before the measurement: a worker finds them by a request's ``seed``. A ``Segment`` is an
engine's new blocks of one turn; a prompt is a row of segments, of which a worker holds a prefix.
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from kvpool.key.hashing import BlockHasher
from tests.support.tiny_tokenizer import write_tokenizer

MODEL = "bench"
BLOCK_TOKENS = 16
ANSWER_WORDS = 24
SAID_WORDS = 120  # per message of a conversation sized in bytes
TOKENIZER_FILE = "tokenizer.json"
# Only special tokens split a text for separate tokenization.
TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
_START, _END = "<|im_start|>", "<|im_end|>"
_WORDS = (
    "the",
    "user",
    "asks",
    "system",
    "assistant",
    "answers",
    "tool",
    "says",
    "role",
    "content",
    "type",
    "text",
)


class Segment(NamedTuple):
    """``stored``, ``removed``: the packed KV event of these blocks."""

    blocks: int
    stored: bytes
    removed: bytes


class Prompt(NamedTuple):
    """``segments``: those of earlier turns, and the segment that its answer completes, which begins within
    the prompt. ``blocks``: filled by the prompt, ``earlier`` of them from earlier turns.
    """

    segments: tuple[int, ...]
    tokens: int
    blocks: int
    earlier: int


@dataclass
class Plan:
    """The workers' knowledge of all prompts, by number."""

    segments: list[Segment] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb((self.segments, self.prompts))
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> Plan:
        segments, prompts = msgpack.unpackb(packed, use_list=False)
        return cls([Segment(*one) for one in segments], [Prompt(*one) for one in prompts])


class Turn(NamedTuple):
    """One request. ``number``: of its prompt. ``messages``: as JSON."""

    number: int
    messages: Sequence[bytes]

    def body(self, *, stream: bool, session_id: str = "") -> bytes:
        """For ``/v1/chat/completions``."""
        streams = b'"stream":true,"stream_options":{"include_usage":true},' if stream else b""
        session = b'"session_id":"%s",' % session_id.encode() if session_id else b""
        return b'{"model":"%s","messages":[%s],"max_tokens":16,%s%s"seed":%d}' % (
            MODEL.encode(), b",".join(self.messages), streams, session, self.number,
        )  # fmt: skip


def number_of(body: bytes) -> int:
    """The prompt's number in a body, even if a proxy rewrote it. Errors: ``ValueError``."""
    at = body.rfind(b'"seed":')
    if at < 0:
        raise ValueError("the request has no seed, so it is none of the benchmark")
    digits = body[at + 7 : at + 20].lstrip()
    return int(digits[: next((end for end, one in enumerate(digits) if not 48 <= one <= 57), len(digits))])


class Traffic:
    """Grows ``plan`` with each call. Deterministic by ``seed``."""

    def __init__(self, folder: Path, seed: int) -> None:
        import tokenizers

        self.folder = write_tokenizer(folder, TEMPLATE)
        self.plan = Plan()
        self._draw = random.Random(seed)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        self._hasher = BlockHasher(BLOCK_TOKENS)

    def words(self, count: int) -> str:
        """A text of about five bytes and one token a word."""
        return " ".join(self._draw.choices(_WORDS, k=count))

    def conversations(
        self, count: int, *, systems: int, system_words: int, turns: int, words: int
    ) -> list[list[Turn]]:
        """``count`` conversations of ``turns`` turns of ``words`` words, each after one of ``systems`` texts."""
        begun = [self._begin(self.words(system_words)) for _ in range(systems)]
        return [
            self._turns(begun[number % systems], [self.words(words) for _ in range(turns)])
            for number in range(count)
        ]

    def sessions(self, count: int, *, system_words: int, words: Sequence[int]) -> list[list[Turn]]:
        """``count`` conversations after one text, with a turn of so many words each."""
        begun = self._begin(self.words(system_words))
        return [self._turns(begun, [self.words(each) for each in words]) for _ in range(count)]

    def follow_ups(
        self, conversations: int, *, nbytes: int, turns: int, words: int = SAID_WORDS
    ) -> list[Turn]:
        """Distinct requests with bodies of about ``nbytes``: ``turns`` short questions per conversation, each
        after its whole history of messages of ``words``; conversations alternate.
        """
        asked = []
        for _ in range(conversations):
            said = _Said([], [], [], 0).with_message("system", self.words(words), self._tokens)
            while said.nbytes < nbytes:
                said = said.with_message("user", self.words(words), self._tokens)
                said = said.with_message("assistant", self.words(words), self._tokens)
            said = self._closed(said)
            asked.append([self._turns(said, [self.words(12)])[0] for _ in range(turns)])
        return [turn for turns_now in zip(*asked, strict=True) for turn in turns_now]

    # ---- one conversation

    def _begin(self, system: str) -> _Said:
        return self._closed(_Said([], [], [], 0).with_message("system", system, self._tokens))

    def _turns(self, begun: _Said, questions: Iterable[str]) -> list[Turn]:
        said = begun
        turns = []
        for question in questions:
            earlier = said.blocks
            asked = said.with_message("user", question, self._tokens)
            tokens = len(asked.tokens) + len(self._tokens(_START + "assistant\n"))
            answered = asked.with_message("assistant", self.words(ANSWER_WORDS), self._tokens)
            said = self._closed(answered)
            self.plan.prompts.append(Prompt(tuple(said.segments), tokens, tokens // BLOCK_TOKENS, earlier))
            turns.append(Turn(len(self.plan.prompts) - 1, asked.messages))
        return turns

    def _closed(self, said: _Said) -> _Said:
        packed = self._hasher.hashes64(array("I", said.tokens))
        hashes = list(memoryview(packed).cast("Q"))
        own = hashes[said.blocks :]
        event = {
            "type": "BlockStored", "block_hashes": own,
            "parent_block_hash": hashes[said.blocks - 1] if said.blocks else None,
            "token_ids": said.tokens[said.blocks * BLOCK_TOKENS : len(hashes) * BLOCK_TOKENS],
            "block_size": BLOCK_TOKENS, "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }  # fmt: skip
        removed = {"type": "BlockRemoved", "block_hashes": own, "medium": "GPU", "group_idx": 0}
        self.plan.segments.append(Segment(len(own), msgpack.packb(event), msgpack.packb(removed)))
        number = len(self.plan.segments) - 1
        return said._replace(segments=[*said.segments, number], blocks=len(hashes))

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


class _Said(NamedTuple):
    """A conversation so far. ``blocks``: in its segments."""

    messages: Sequence[bytes]
    tokens: list[int]
    segments: Sequence[int]
    blocks: int

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.messages))

    def with_message(self, role: str, content: str, tokens_of: Any) -> _Said:
        packed = json.dumps({"role": role, "content": content}, separators=(",", ":")).encode()
        text = f"{_START}{role}\n{content}{_END}\n"
        return self._replace(messages=[*self.messages, packed], tokens=[*self.tokens, *tokens_of(text)])
