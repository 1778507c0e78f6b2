"""``InferenceRequest``: the fields of an OpenAI-compatible request that placing needs. Pure.

Other fields stay undecoded. An unreadable request is placed by load: its engine reports the fault.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple
from urllib.parse import unquote

import msgspec

from kvpool.discovery.worker import DEFAULT_TENANT
from kvpool.errors import ConfigError
from kvpool.index.prompt import TOKEN_NBYTES, Chat, Prompt, Session
from kvpool.index.protocol import bounded_json
from kvpool.index.request_stats import Promptless
from kvpool.index.tokens.token_estimate import FORM, estimate

# An engine renders the tokens of these paths, under "/render" behind the path (vLLM 0.32).
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RENDERED = frozenset((COMPLETIONS, CHAT, "/v1/responses", "/v1/messages", "/cohere/v2/chat"))
# By path, as OpenTelemetry calls them.
OPERATIONS = {
    COMPLETIONS: "text_completion",
    "/v1/embeddings": "embeddings",
    **dict.fromkeys((CHAT, "/v1/responses", "/v1/messages"), "chat"),
}
BATCH = "/v1/chat/completions/batch"  # of chats, whose options are those of a chat
# Whose answers an engine computes: only these prove that one works, or does not.
COMPUTED = RENDERED | {
    BATCH, "/classify", "/generative_scoring", "/invocations", "/pooling", "/rerank", "/score",
    "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/embeddings", "/v1/rerank", "/v1/score", "/v2/embed",
    "/v2/rerank",
}  # fmt: skip
MARKED_NBYTES = 64 << 10  # of either end of a body
MODELS = "/v1/models/"  # with the name behind it

MAX_READ_NBYTES = 4 << 20  # of a body: larger ones hold images or sound, and take long to decode
MAX_DELIMITER_NBYTES = 80  # 70 and its dashes (RFC 2046, 5.1.1)
MAX_HEADS_NBYTES = 128 << 10  # of a form's parts together; an engine takes 1,000 fields
_HEAD_END = b"\r\n\r\n"
MAX_NAME_NBYTES = 4096

# With these an engine's tokens differ from a bare tokenizer's.
_RENDERED_BY_ENGINE = frozenset(
    (
        "add_special_tokens", "chat_template", "mm_processor_kwargs", "prompt_embeds", "suffix",
        "truncate_prompt_tokens",
    )
)  # fmt: skip
# Fields that do not change the tokens.
_NOT_OF_PROMPT = frozenset(
    (
        "best_of", "frequency_penalty", "logprobs", "max_completion_tokens", "max_output_tokens", "max_tokens",
        "metadata", "min_p", "min_tokens", "n", "presence_penalty", "prompt_cache_key", "repetition_penalty", "seed",
        "session_id", "stop", "stop_token_ids", "store", "stream", "stream_options", "temperature", "top_k",
        "top_logprobs", "top_p", "user", "vllm_xargs",
    )
)  # fmt: skip
# Fields that change the tokens of a chat, beside its messages.
_OF_CHAT = (
    "add_generation_prompt", "chat_template_kwargs", "continue_final_message", "documents", "reasoning_effort", "tools",
)  # fmt: skip
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
# Of a chat, whose messages are most of it: they are read at once, other fields as above.
_ABSENT = msgspec.Raw()
_CHAT_FIELDS = msgspec.json.Decoder(
    msgspec.defstruct(
        "_ChatFields",
        [
            ("messages", Any, None),
            *(
                (name, msgspec.Raw, _ABSENT)
                for name in (
                    *_OF_CHAT, *sorted(_RENDERED_BY_ENGINE), "cache_salt", "kv_transfer_params", "model",
                    "prompt_cache_key", "session_id", "vllm_xargs",
                )
            ),
        ],
    )
)  # fmt: skip
_TOKENS = "prompt_token_ids"  # in kv_transfer_params: an engine takes them in place of the prompt
_PARAMS = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)
_RAWS = msgspec.json.Decoder(list[msgspec.Raw])
_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_PROMPT = msgspec.json.Decoder(str | list[_Token])  # ten times as fast as a check of each token in Python
_PROMPTS = msgspec.json.Decoder(list[str | list[_Token]])


class _Named(msgspec.Struct):
    model: str = ""


_NAMED = msgspec.json.Decoder(_Named)


def engine_path(target: str) -> str:
    """The path by which an engine routes a request: uvicorn decodes escapes, once; starlette compares the rest."""
    return unquote(target.partition("?")[0])


def engine_json(body: bytes) -> bytes:
    """JSON in UTF-8. Engines read it by Python's ``json``: also with a byte-order mark, in UTF-16 and in UTF-32."""
    encoding = json.detect_encoding(body[:4])
    if encoding == "utf-8":
        return body
    try:
        return body.decode(encoding).encode()
    except UnicodeError:
        return body


class InferenceRequest(NamedTuple):
    """``path``: by which its tokens are made. ``received``: its body as it came. ``workers``: candidates by name;
    None: all. ``model``: as the request names it; empty: none. ``prompt``: the first of several; None: only an engine
    knows its tokens. ``body``: for ``path``, with the first of several chats. ``session``: None: it names none.
    """

    path: str
    received: bytes
    tenant: str = DEFAULT_TENANT
    workers: Sequence[str] | None = None
    model: str = ""
    prompt: Prompt | None = None
    cache_salt: str | None = None
    body: bytes = b""
    session: Session | None = None

    @property
    def tokens_estimate(self) -> int:
        """Of the prompt, at least 1: exact for token ids, else by the bytes of the body."""
        nbytes = 0 if self.prompt is None else self.prompt.nbytes
        return nbytes // TOKEN_NBYTES if nbytes else estimate(self.received)


def read_request(
    path: str,
    body: bytes,
    tenant: str = DEFAULT_TENANT,
    workers: Sequence[str] | None = None,
    default: Callable[[], str] = str,
    session_id: str | None = None,
) -> InferenceRequest:
    """``path``, ``body``: of ``engine_path``, ``engine_json``. ``default``: asked for the model where it names none.
    ``session_id``: of a header. Errors: ``ConfigError``; such a request can still be placed by load.
    """
    if len(body) > MAX_READ_NBYTES:
        raise ConfigError(f"a body of {len(body)} bytes is not read, {MAX_READ_NBYTES} at most")
    try:
        bounded_json.check(body)
        body.decode()  # a decoder checks only what it reads, but an engine reads all
        received, messages = body, None
        if path == BATCH:
            path, body = CHAT, _first_of_batch(body)
        if path == CHAT:
            messages, fields = _chat_fields(body)
        else:
            fields = _FIELDS.decode(body)
        model = _text(fields, "model") or default()
        session = _session(fields, tenant, model, session_id)
        request = InferenceRequest(path, received, tenant, workers, model, body=body, session=session)
        if path not in RENDERED:
            return request
        request = request._replace(cache_salt=_text(fields, "cache_salt"))
        if path not in (COMPLETIONS, CHAT) or _RENDERED_BY_ENGINE & fields.keys():
            return request
        if _TOKENS in (_PARAMS.decode(fields.get("kv_transfer_params", b"null")) or ()):
            return request
        return request._replace(prompt=_prompt(request, fields, messages))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ConfigError) as error:
        raise ConfigError(f"the body cannot be read: {error!s:.200}") from error


def why_unread(body: bytes) -> Promptless:
    """Of a body that ``read_request`` does not read."""
    if not body:
        return "no-body"
    return "too-large" if len(body) > MAX_READ_NBYTES else "unreadable"


def _first_of_batch(body: bytes) -> bytes:
    fields = _FIELDS.decode(body)
    chats = _RAWS.decode(fields.get("messages", b"[]"))
    fields["messages"] = chats[0] if chats else msgspec.Raw(b"[]")
    return msgspec.json.encode(fields)


def _chat_fields(body: bytes) -> tuple[Any, dict[str, msgspec.Raw]]:
    """Its messages, and the other fields that placing reads."""
    read: Any = _CHAT_FIELDS.decode(body)
    names = read.__struct_fields__[1:]
    return read.messages, {name: raw for name in names if (raw := getattr(read, name)) is not _ABSENT}


def _prompt(request: InferenceRequest, fields: dict[str, msgspec.Raw], messages: Any) -> Prompt:
    text: str | None = None
    token_ids: list[int] | None = None
    chat: Chat | None = None
    if request.path == CHAT:
        body = {name: msgspec.json.decode(fields[name]) for name in _OF_CHAT if name in fields}
        chat = Chat.of_request({**body, "messages": messages})
    else:
        raw = fields.get("prompt", b"null")
        try:
            prompt = _PROMPT.decode(raw)
        except msgspec.ValidationError:
            prompt = next(iter(_PROMPTS.decode(raw)), "")  # of several prompts, which go to one worker
        if isinstance(prompt, str):
            text = prompt
        elif prompt:
            token_ids = prompt
        else:
            raise ConfigError("prompt is an empty list: send text or token ids")
    return Prompt(
        request.model, token_ids, text=text, chat=chat, tenant=request.tenant,
        cache_salt=request.cache_salt or None, workers=request.workers,
    )  # fmt: skip


def _session(
    fields: dict[str, msgspec.Raw], tenant: str, model: str, of_header: str | None
) -> Session | None:
    """In the engine's order (``_get_session_id`` in vllm/entrypoints/generate/base/serving.py)."""
    named = _text(fields, "session_id") or of_header
    if not named and "vllm_xargs" in fields:
        value = msgspec.json.decode(fields["vllm_xargs"], type=dict[str, Any] | None) or {}
        named = value.get("session_id")
    session_id = named if isinstance(named, str) else None
    return Session.of(tenant, model, session_id, _text(fields, "prompt_cache_key"))


def _text(fields: dict[str, msgspec.Raw], name: str) -> str | None:
    raw = fields.get(name)
    return None if raw is None else msgspec.json.decode(raw, type=str | None)


def mark_of(tenant: str, path: str, body: bytes, session: Session | None) -> bytes:
    """Equal for requests of a session, and for one that is sent again; empty: no engine computes its answer."""
    if path not in COMPUTED or not body:
        return b""
    if session is not None and session.stays:
        return tenant.encode() + session.digest
    digest = hashlib.blake2b(b"%d" % len(body), digest_size=16)
    digest.update(body[:MARKED_NBYTES])
    digest.update(body[max(MARKED_NBYTES, len(body) - MARKED_NBYTES) :])
    return tenant.encode() + digest.digest()


def prompt_key(path: str, body: bytes) -> bytes:
    """Equal for requests with equal tokens; ``read_request`` has read ``body``."""
    fields = _FIELDS.decode(body)
    digest = hashlib.blake2b(path.encode(), digest_size=16)
    for name in sorted(fields.keys() - _NOT_OF_PROMPT):
        digest.update(b"\0" + name.encode() + b"\0")
        digest.update(fields[name])
    return digest.digest()


def named_model(path: str, body: bytes) -> str:
    """The request's model; empty: unreadable. Other fields are skipped.

    JSON takes 0.6 ms a MiB of text, at most 3.6 (numbers of one digit); a form 1 to 2 ms a MiB, at most 8
    (delimiters that are none); both hold the interpreter's lock, for bodies of up to 16 MiB. The heads of a form's
    parts take 0.2 s at most, without it.
    """
    if path.startswith(MODELS):
        return path[len(MODELS) :]
    if begin := FORM.match(body):
        return _model_of_form(body, begin.end() - 2)
    try:
        return _NAMED.decode(body).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


def _model_of_form(body: bytes, at: int) -> str:
    """The last field ``model`` of ``multipart/form-data``, as of an audio file; its first line, at ``at``, is the
    delimiter. Empty: also where engines' parsers differ.
    """
    begin, at = at, body.find(b"\r\n", at, at + MAX_DELIMITER_NBYTES)
    if at < 0:
        return ""
    delimiter = re.compile(rb"\r\n" + re.escape(body[begin:at]) + rb"(?=\r\n|--|[ \t])")
    model, left = b"", MAX_HEADS_NBYTES
    while (head_end := body.find(_HEAD_END, at, at + left)) >= 0:
        head, value = body[at:head_end], head_end + len(_HEAD_END)
        left -= value - at
        end = delimiter.search(body, value)
        if end is None:
            return ""
        if _field_of(head) == "model":
            model = body[value : min(end.start(), value + MAX_NAME_NBYTES + 1)]
        at = end.end()
        if body.startswith(b"--", at):
            return "" if len(model) > MAX_NAME_NBYTES else _text_of_form(model)
        if not body.startswith(b"\r\n", at):
            return ""
    return ""


def _text_of_form(value: bytes) -> str:
    """As engines read it (starlette), where the request names no other encoding."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _field_of(head: bytes) -> str:
    """Which field a part of a form is, as engines read it (python-multipart); empty: none, or a file."""
    disposition = b""
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-disposition":
            disposition = value
    named = dict(_parameters(disposition.decode("latin-1")))
    return "" if "filename" in named else named.get("name", "")


def _parameters(disposition: str) -> Iterator[tuple[str, str]]:
    """A ``;`` amid quotes is text. Linear, as who sends it may have written thousands."""
    parameters: list[list[str]] = []
    is_amid = False
    for piece in disposition.split(";"):
        if is_amid:
            parameters[-1].append(piece)
        else:
            parameters.append([piece])
        is_amid ^= (piece.count('"') - piece.count('\\"')) % 2 == 1
    for pieces in parameters[1:]:
        name, _, value = ";".join(pieces).partition("=")
        name, value = name.strip(" \t").lower(), value.strip(" \t")
        if len(value) >= 2 and value[0] == value[-1] == '"':
            value = value[1:-1].replace("\\\\", "\\").replace('\\"', '"')
        if "*" not in name:  # of RFC 2231, which forms do not know
            yield name, value
