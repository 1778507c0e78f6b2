"""``Prompt``: of a lookup or route, also as a request's ``Chat``; its ``Session``; ``Load`` beside it. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from kvpool.discovery.worker import DEFAULT_TENANT, MAX_WORKERS
from kvpool.errors import ConfigError
from kvpool.key.hashing import Multimodal, len_tokens

if TYPE_CHECKING:
    from typing_extensions import Buffer

TOKEN_NBYTES = 4  # of a token in a request
MAX_PROMPT_BLOCKS = 1 << 22
NO_BLOCKS = memoryview(b"")  # hashes64 of a request that is placed by load
MAX_PROMPT_TOKENS = 1 << 22
_MOST = (1 << 32) - 1
_MOST_TOKENS = (1 << 53) - 1
# Fields of a request that its template reads beside messages and tools. Of equal names vLLM takes the request's, not
# ``chat_template_kwargs``'; the first two have a default, which counts, too.
_WITH_DEFAULT = ("add_generation_prompt", "continue_final_message")
_OPTIONS = ("documents", "reasoning_effort")
# Pydantic's, with which vLLM reads requests.
_TRUE = frozenset((True, 1, "1", "on", "t", "true", "y", "yes"))
_FALSE = frozenset((False, 0, "0", "f", "false", "n", "no", "off"))


@dataclass(frozen=True)
class Chat:
    """Text only: prompts with images or sound have no text form to hash.

    ``messages``: maps with ``role`` and ``content`` (text, a list of text parts, or None); ``name``; of an
    assistant ``reasoning`` (or ``reasoning_content``) and ``tool_calls``; of a tool ``tool_call_id``. ``tools``: as
    in the request. ``template_options``: more arguments of the template, such as ``{"enable_thinking": False}``.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    template_options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_request(cls, body: Any) -> Chat:
        """``body``: of a request, or its messages alone. Errors: ``ConfigError``."""
        if isinstance(body, Sequence) and not isinstance(body, str | bytes):
            return cls(body)
        if not isinstance(body, Mapping) or not isinstance(body.get("messages"), Sequence):
            raise ConfigError('a chat is a list of messages, or an object with "messages"')
        given = body.get("chat_template_kwargs") or {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"chat_template_kwargs is an object, not {given!r:.40}")
        options = {name: value for name, value in given.items() if name not in _WITH_DEFAULT}
        effort = body.get("reasoning_effort")
        if effort is not None and "enable_thinking" not in options:  # for templates that have only a switch
            options["enable_thinking"] = effort != "none"
        options |= {name: body[name] for name in _OPTIONS if body.get(name) is not None}
        generation, continues = (_flag(body, name) for name in _WITH_DEFAULT)
        if continues is not None:
            options["continue_final_message"] = continues
        return cls(body["messages"], body.get("tools"), True if generation is None else generation, options)


def _flag(body: Mapping[str, Any], name: str) -> bool | None:
    """As vLLM reads it. Errors: ``ConfigError``."""
    value = body.get(name)
    if value is None:
        return None
    known = value.lower() if isinstance(value, str) else value
    if isinstance(known, bool | int | float | str) and known in _TRUE | _FALSE:
        return known in _TRUE
    raise ConfigError(f"{name} is true or false, not {value!r:.40}")


def reasoning_of(message: Mapping[str, Any]) -> Any:
    """Of an assistant: ``reasoning_content`` is its former name."""
    reasoning = message.get("reasoning")
    return message.get("reasoning_content") if reasoning is None else reasoning


def text_parts(content: Any) -> list[str]:
    """The texts of a message's content. Errors: ``ConfigError`` for other parts."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, Sequence):
        raise ConfigError(f"the content of a message is text or a list of parts, not {content!r:.40}")
    return [_text_part(part) for part in content]


def _text_part(part: Any) -> str:
    text = part
    if isinstance(part, Mapping):
        text = part.get("text") if part.get("type", "text") == "text" else None
    if not isinstance(text, str):
        raise ConfigError(f"a part of a message is text, not {part!r:.60}: send what is not as token ids")
    return text


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in one of four forms, and its candidate workers.

    ``model``: as requests name it. One of: ``token_ids``, ints from 0 to 2**32 - 1 or a buffer of ints;
    ``hashes64`` of ``BlockHasher.hashes64``; ``text``, as for ``/v1/completions``; ``chat``, a ``Chat`` or
    the messages of one for ``/v1/chat/completions``. ``lora``, ``cache_salt`` and ``multimodal`` enter the
    hash of tokens, as in ``BlockHasher``; of hashes, too, ``multimodal`` says whose outputs of encoders are looked
    for. ``workers``: candidates by name, unknown ones have no row; None: all of the model. Errors: ``ConfigError`` for
    none or several forms, or an invalid chat.
    """

    model: str
    token_ids: Sequence[int] | Buffer | None = None
    hashes64: Buffer | None = None
    text: str | None = None
    chat: Chat | Sequence[Mapping[str, Any]] | None = None
    tenant: str = DEFAULT_TENANT
    lora: tuple[str, str] | None = None
    cache_salt: str | None = None
    multimodal: Sequence[Multimodal] = ()
    workers: Sequence[str] | None = None

    def __post_init__(self) -> None:
        tokens, hashes, text, chat = self.token_ids, self.hashes64, self.text, self.chat
        # Not a generator: a Prompt is made for every lookup.
        if (tokens is not None) + (hashes is not None) + (text is not None) + (chat is not None) != 1:
            raise ConfigError("give a prompt as token_ids, hashes64, text or chat, and only once")
        if isinstance(self.workers, str):
            raise ConfigError("workers is a list of names, not text")
        if chat is not None and not isinstance(chat, Chat):
            object.__setattr__(self, "chat", Chat.of_request(chat))

    def candidates(self) -> frozenset[str] | None:
        """Errors: ``ConfigError`` for more than an index can follow."""
        if self.workers is None:
            return None
        if len(self.workers) > MAX_WORKERS:
            raise ConfigError(f"at most {MAX_WORKERS} candidates can be asked about, not {len(self.workers)}")
        return frozenset(self.workers)

    @property
    def nbytes(self) -> int:
        """Of its hashes or tokens in a request; 0 for text or a chat."""
        if self.hashes64 is not None:
            return memoryview(self.hashes64).nbytes
        return 0 if self.token_ids is None else len_tokens(self.token_ids) * TOKEN_NBYTES

    def checked_hashes(self) -> memoryview | None:
        """Its hashes; None: a prompt in tokens. Errors: ``ConfigError``."""
        if self.token_ids is not None:
            count = len_tokens(self.token_ids)
            if not 1 <= count <= MAX_PROMPT_TOKENS:
                raise ConfigError(f"a prompt has 1 to {MAX_PROMPT_TOKENS} tokens, not {count}")
            return None
        if self.hashes64 is NO_BLOCKS:
            return NO_BLOCKS
        if self.hashes64 is None:
            raise ConfigError("make tokens of a text or a chat first: give token_ids or hashes64")
        try:
            hashes = memoryview(self.hashes64).cast("B")
        except TypeError as error:
            raise ConfigError(f"hashes64 is a contiguous buffer: {error}") from error
        if hashes.nbytes % 8:
            raise ConfigError(f"block hashes are packed u64s, 8 bytes each; {hashes.nbytes} bytes are not")
        if not 1 <= hashes.nbytes // 8 <= MAX_PROMPT_BLOCKS:
            raise ConfigError(f"a prompt has 1 to {MAX_PROMPT_BLOCKS} blocks, not {hashes.nbytes // 8}")
        return hashes


class PromptFields(TypedDict, total=False):
    """The fields of a ``Prompt`` but its model, as keyword arguments."""

    token_ids: Sequence[int] | Buffer | None
    hashes64: Buffer | None
    text: str | None
    chat: Chat | Sequence[Mapping[str, Any]] | None
    tenant: str
    lora: tuple[str, str] | None
    cache_salt: str | None
    multimodal: Sequence[Multimodal]
    workers: Sequence[str] | None


def as_prompt(model: str | Prompt, fields: PromptFields) -> Prompt:
    """``model`` if it is a prompt, else a prompt of these fields. Errors: ``ConfigError``."""
    if not isinstance(model, Prompt):
        return Prompt(model, **fields)
    if fields:
        raise ConfigError(f"a Prompt says all; leave out {', '.join(fields)}")
    return model


class Session(NamedTuple):
    """A session's name with its model: one name for two models is two sessions, since their prompts differ.

    ``stays``: its requests follow each other. False: they share only a name, as all users of an application do.
    """

    tenant: str
    digest: bytes
    stays: bool = True

    @classmethod
    def of(
        cls, tenant: str, model: str, session_id: str | None, prompt_cache_key: str | None = None
    ) -> Session | None:
        """None: neither is named."""
        if not (name := session_id or prompt_cache_key):
            return None
        named = f"{model}\0{name}".encode(errors="surrogatepass")
        return cls(tenant, hashlib.blake2b(named, digest_size=16).digest(), bool(session_id))

    @property
    def seed(self) -> int:
        return int.from_bytes(self.digest[:8], "little")


@dataclass(frozen=True)
class Load:
    """Work of one data-parallel rank of one worker.

    ``running``, ``waiting``: requests. ``queued_tokens``: prompt tokens that wait; None: unknown.
    ``kv_usage``: 0 to 1 (the KV cache is full). Errors: ``ConfigError``.
    """

    worker: str
    dp_rank: int = 0
    running: int = 0
    waiting: int = 0
    queued_tokens: int | None = None
    kv_usage: float = 0.0

    def __post_init__(self) -> None:
        for name, most in (
            ("dp_rank", _MOST), ("running", _MOST), ("waiting", _MOST), ("queued_tokens", _MOST_TOKENS),
        ):  # fmt: skip
            value = getattr(self, name)
            if not (value is None and name == "queued_tokens") and (
                type(value) is not int or not 0 <= value <= most
            ):
                raise ConfigError(f"load of {self.worker:.80}: {name} is a whole number, not {value!r:.40}")
        if isinstance(self.kv_usage, bool) or not 0 <= self.kv_usage <= 1:
            raise ConfigError(
                f"load of {self.worker:.80}: kv_usage is from 0 to 1, not {self.kv_usage!r:.40}"
            )
