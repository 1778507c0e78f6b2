"""``InferenceRequest``: what a request to an OpenAI-compatible server says that matters for placing it. Pure.

Only what is needed is decoded. A request that cannot be read is placed all the same, by load: what is wrong with it is
for the engine to say.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, NamedTuple

import msgspec

from kvpool.errors import ConfigError
from kvpool.index import bounded_json
from kvpool.index.chat import Chat

# Whose prompts an engine can say the tokens of, at the path with "/render" behind it (vLLM 0.32).
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RENDERED = frozenset((COMPLETIONS, CHAT, "/v1/responses", "/v1/messages"))

MAX_READ_NBYTES = 4 << 20  # of a body: larger ones hold images or sound, and take long to decode
BYTES_PER_TOKEN = 4  # of a prompt whose tokens are not known

# With these an engine makes other tokens than a tokenizer by itself.
_RENDERED_BY_ENGINE = frozenset(
    ("add_special_tokens", "chat_template", "mm_processor_kwargs", "prompt_embeds", "truncate_prompt_tokens")
)
# What does not change the tokens of a prompt: two requests that differ in these alone have the same ones.
_NOT_OF_PROMPT = frozenset(
    (
        "best_of", "frequency_penalty", "logprobs", "max_completion_tokens", "max_output_tokens", "max_tokens",
        "metadata", "min_p", "min_tokens", "n", "presence_penalty", "repetition_penalty", "seed", "stop",
        "stop_token_ids", "store", "stream", "stream_options", "temperature", "top_k", "top_logprobs", "top_p", "user",
    )
)  # fmt: skip
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_PROMPT = msgspec.json.Decoder(str | list[_Token])  # ten times as fast as a look at each token in Python
_PROMPTS = msgspec.json.Decoder(list[str | list[_Token]])


class Unreadable(ConfigError):
    """This is no request that could be placed by its prompt; says why."""


class InferenceRequest(NamedTuple):
    """``model``: as the request names it; empty: it names none. ``token_ids``, ``text`` or ``chat``: its prompt, the
    first one of several; none of them: it is not one that is read here. ``is_rendered_by_engine``: only an engine knows
    its tokens. ``nbytes``: of its body.
    """

    path: str
    nbytes: int
    model: str = ""
    token_ids: list[int] | None = None
    text: str | None = None
    chat: Chat | None = None
    cache_salt: str | None = None
    is_rendered_by_engine: bool = False

    @property
    def tokens_estimate(self) -> int:
        """Of the prompt, at least 1."""
        return max(1, len(self.token_ids) if self.token_ids is not None else self.nbytes // BYTES_PER_TOKEN)


def read_request(path: str, body: bytes) -> InferenceRequest:
    """The request whose ``body`` was sent to ``path``. Errors: ``Unreadable``; it can still be placed by load."""
    path = path.partition("?")[0]
    if len(body) > MAX_READ_NBYTES:
        raise Unreadable(f"a body of {len(body)} bytes is not read, {MAX_READ_NBYTES} at most")
    try:
        bounded_json.check(body)
        fields = _FIELDS.decode(body)
        model = _text(fields, "model") or ""
        if path not in RENDERED:
            return InferenceRequest(path, len(body), model)
        request = InferenceRequest(
            path,
            len(body),
            model,
            cache_salt=_text(fields, "cache_salt"),
            is_rendered_by_engine=path not in (COMPLETIONS, CHAT)
            or bool(_RENDERED_BY_ENGINE & fields.keys()),
        )
        return _with_prompt(request, fields)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ConfigError) as error:
        raise Unreadable(f"the body cannot be read: {error!s:.200}") from error


def _with_prompt(request: InferenceRequest, fields: dict[str, msgspec.Raw]) -> InferenceRequest:
    if request.is_rendered_by_engine:
        return request
    if request.path == CHAT:
        body: dict[str, Any] = {
            name: msgspec.json.decode(raw) for name, raw in fields.items() if name not in _NOT_OF_PROMPT
        }
        return request._replace(chat=Chat.of_request(body))
    raw = fields.get("prompt", b"null")
    try:
        prompt = _PROMPT.decode(raw)
    except msgspec.ValidationError:
        prompt = next(iter(_PROMPTS.decode(raw)), "")  # of several prompts, which go to one worker
    if isinstance(prompt, str):
        return request._replace(text=prompt)
    if prompt:
        return request._replace(token_ids=prompt)
    raise Unreadable("prompt is no text and no list of token ids")


def _text(fields: dict[str, msgspec.Raw], name: str) -> str | None:
    raw = fields.get(name)
    return None if raw is None else msgspec.json.decode(raw, type=str | None)


def prompt_key(path: str, body: bytes) -> bytes:
    """The same for two requests with the same tokens; ``body`` is one that ``read_request`` has read."""
    fields = _FIELDS.decode(body)
    digest = hashlib.blake2b(path.encode(), digest_size=16)
    for name in sorted(fields.keys() - _NOT_OF_PROMPT):
        digest.update(b"\0" + name.encode() + b"\0")
        digest.update(fields[name])
    return digest.digest()
