"""``Tokenizer``: vLLM's tokens of text and chats, for one model.

As vLLM 0.32 makes them for a Hugging Face tokenizer in ``/v1/completions`` and ``/v1/chat/completions``
(``vllm/renderers/hf.py``, ``chat_utils.py``); a test compares both. What is not followed here is a ``ConfigError``:
the tokens of such a chat are asked of a worker.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpool.errors import ConfigError, KVPoolError
from kvpool.files import open_file, read_file
from kvpool.index.prompt import Chat, reasoning_of, text_parts
from kvpool.index.tokens.text_work import MAX_RENDERED_CHARS, TextWork, TooMuchText, working
from kvpool.index.tokens.token_cache import TokenCache
from kvpool.index.tokens.tool_arguments import ToolArguments
from kvpool.text import missing_extra

if TYPE_CHECKING:
    from kvpool.index.tokens.chat_template import ChatTemplate

_ROLES = ("assistant", "developer", "system", "tool", "user")
_PLAIN_ROLES = ("assistant", "user")  # of which nothing is read but role and text
_BILLING = "x-anthropic-billing-header"  # a first line that differs in each request; vLLM leaves it out
# Arguments of the library's method that a caller must not pass.
_RESERVED = frozenset(
    (
        "add_generation_prompt", "chat_template", "conversation", "max_length", "messages", "padding",
        "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools",
        "truncation",
    )
)  # fmt: skip
_UNSET = (None, "auto")  # vLLM's, in a template's options
# Options that are arguments of the library's method, not variables of the template.
_ARGUMENTS = frozenset(("continue_final_message", "documents"))
# Fields of other parts than text: on a text, they are not the template's business.
_OF_PARTS = frozenset(
    (
        "audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil", "image_url", "input_audio",
        "name", "prompt_cache_breakpoint", "refusal", "text", "thinking", "type", "uuid", "video_embeds", "video_url",
    )
)  # fmt: skip
# Chats of these are rendered by code in vLLM, not by a template.
_RENDERED_BY_CODE = ("DeepseekV32", "DeepseekV4", "GptOss", "Inkling", "KimiK3", "MoonshotKimia")
_TOOL_ARGUMENTS = ToolArguments()  # of all models
_READ = (".jinja", ".json", ".model", ".txt")  # of a model's folder
MAX_FILE_NBYTES = 16 << 20  # of a configuration


class Tokenizer:
    """Made by ``load``. Any thread; a call takes time with its text's length, and leaves the interpreter's lock to
    others. ``work``: what it may take; None: unbounded.
    """

    def __init__(self, model: str, tokenizer: Any, why_not: str = "") -> None:
        """``why_not``: chats are made; empty: they are."""
        self._model, self._why_not = model, why_not
        self._tokenizer = tokenizer
        # The first call sets fields that later calls only read.
        self._before, self._behind = _ends(self._plain("a", special=True), self._plain("a"))
        self._cache = TokenCache(self._plain_fast, tokenizer.added_tokens_decoder.values())

    @classmethod
    def load(cls, model: str, source: str) -> Tokenizer:
        """From a folder, or by a name on the Hugging Face hub (its cache, where ``HF_HUB_OFFLINE`` is set).

        Blocking, for seconds. Errors: ``ConfigError``.
        """
        try:
            import transformers
        except ModuleNotFoundError as error:
            raise missing_extra(error) from error
        try:
            _check_files(Path(source))
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
            why_not = _why_no_chats(source, tokenizer)
        except Exception as error:  # of many kinds: files, the hub, unknown classes
            raise ConfigError(f"no tokenizer for {model} in {source}: {_why(source, error)}") from error
        if not tokenizer.is_fast:
            raise ConfigError(f"the tokenizer in {source} is not a fast one: send token ids for {model}")
        return cls(model, tokenizer, why_not)

    def of_text(self, text: str, work: TextWork | None = None) -> array[int]:
        """As for the ``prompt`` of ``/v1/completions``: with the tokenizer's special tokens. Errors: of ``work``."""
        tokens = self._encode(text, work or TextWork())
        return self._before + tokens + self._behind

    def of_chat(self, chat: Chat, work: TextWork | None = None) -> array[int]:
        """As for the ``messages`` of ``/v1/chat/completions``. Errors: ``ConfigError``, also the template's own; of
        ``TextWork``.
        """
        work = work or TextWork()
        if self._why_not:
            raise ConfigError(f"chats of {self._model} are rendered by its workers: {self._why_not}")
        if reserved := sorted(_RESERVED & chat.template_options.keys()):
            raise ConfigError(f"the template options of a chat cannot hold {', '.join(reserved)}")
        tools = None if chat.tools is None else [_tool(tool) for tool in _list("tools", chat.tools)]
        template = self._template(tools)
        work.step(_parts(chat.messages))
        conversation = [_message(message, template.takes_parts) for message in chat.messages]
        if not template.knows_developers:
            conversation = _without_developer(conversation)
        read = template.variables | _ARGUMENTS
        options = {
            name: value
            for name, value in chat.template_options.items()
            if name in read and value not in _UNSET
        }
        with working(work):
            text = self._render(template, conversation, tools, chat.add_generation_prompt, options)
        if len(text) > MAX_RENDERED_CHARS:
            raise TooMuchText(f"the chat template makes {len(text)} characters of this chat")
        return self._encode(text, work)

    def _plain(self, text: str, *, special: bool = False) -> list[int]:
        tokens: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return tokens

    def _plain_fast(self, text: str) -> list[int]:
        # The core of _plain, with its settings. Of one text ``encode`` makes the same, but with the interpreter's lock
        # held: for seconds of 4 MiB.
        (made,) = self._tokenizer.backend_tokenizer.encode_batch_fast([text], add_special_tokens=False)
        tokens: list[int] = made.ids
        return tokens

    def _encode(self, text: str, work: TextWork) -> array[int]:
        try:
            return self._cache.tokens(text, work)
        except (TypeError, UnicodeEncodeError) as error:  # half of a surrogate pair, not valid text in Rust
            raise ConfigError("the prompt is not Unicode text") from error

    def _template(self, tools: list[dict[str, Any]] | None) -> ChatTemplate:
        from kvpool.index.tokens.chat_template import ChatTemplate  # it imports jinja2, of the extra

        try:
            source: str = self._tokenizer.get_chat_template(None, tools=tools)
        except ValueError as error:
            raise ConfigError(
                f"the tokenizer of {self._model} has no chat template: send text or token ids"
            ) from error
        try:
            return ChatTemplate.of(source)
        except Exception as error:  # of Jinja, or of a library that compiles templates otherwise
            raise ConfigError(
                f"the chat template of {self._model} cannot be read: {_first_line(error)}"
            ) from error

    def _render(
        self,
        template: ChatTemplate,
        conversation: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        options: Mapping[str, Any],
    ) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                conversation, tools=tools, chat_template=template.source, tokenize=False,
                add_generation_prompt=add_generation_prompt, **options,
            )  # fmt: skip
        except KVPoolError:  # of its work
            raise
        except Exception as error:  # a template's error concerns its input
            raise ConfigError(
                f"the chat template of {self._model} refuses this chat: {_first_line(error)}"
            ) from error
        return text


def _parts(messages: Sequence[Any]) -> int:
    """Of all messages, which are read one by one."""
    lists = (
        value
        for message in messages
        if isinstance(message, Mapping)
        for name in ("content", "tool_calls")
        if isinstance(value := message.get(name), list)
    )
    return len(messages) + sum(map(len, lists))


def _ends(whole: list[int], body: list[int]) -> tuple[array[int], array[int]]:
    """A tokenizer's own tokens before and behind a text. Errors: ``ConfigError`` for any other change."""
    for at in range(len(whole) - len(body) + 1):
        if whole[at : at + len(body)] == body:
            return array("I", whole[:at]), array("I", whole[at + len(body) :])
    raise ConfigError("the tokenizer changes a text where it adds special tokens: send token ids")


def _message(message: Any, takes_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ConfigError(f"a message has a role ({', '.join(_ROLES)}) and a content, not {message!r:.60}")
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        if len(message) == 2 and role in _PLAIN_ROLES and not takes_parts:  # most, of hundreds in a chat
            return {"role": role, "content": content}
        parts = [{"type": "text", "text": content}]
    else:
        texts = zip(text_parts(content), _extras(content), strict=True)
        parts = [{"type": "text", "text": text, **extra} for text, extra in texts]
    if role == "system":
        parts = [kept for part in parts if (kept := _without_billing(part)) is not None]
    made: dict[str, Any] = {"role": role, "content": parts}
    if not takes_parts:  # vLLM leaves out empty texts only here
        made["content"] = "\n".join(part["text"] for part in parts if part["text"])
    elif role == "tool":
        made["content"] = "\n".join(part["text"] for part in parts)
    if role == "assistant":
        if calls := message.get("tool_calls"):
            made["tool_calls"] = [_tool_call(call) for call in _list("tool_calls", calls)]
        if (reasoning := reasoning_of(message)) is not None:
            made |= {"reasoning": reasoning, "reasoning_content": reasoning}
    elif role == "tool" and "tool_call_id" in message:
        made["tool_call_id"] = message["tool_call_id"]
    for name in ("name", "task"):
        if isinstance(value := message.get(name), str):
            made[name] = value
    if role == "developer":
        if message.get("tools"):
            raise ConfigError("a developer's own tools are known to workers only")
        made["tools"] = message.get("tools")
    return made


def _extras(content: Any) -> list[dict[str, Any]]:
    """Each part's own fields, which templates may read."""
    found = [{} if isinstance(part, str) else dict(part) for part in content or ()]
    if any(part.keys() & _OF_PARTS - {"type", "text"} for part in found):
        raise ConfigError("a part that is more than text has no tokens here")
    return [{name: part[name] for name in part if name not in _OF_PARTS} for part in found]


def _without_billing(part: dict[str, Any]) -> dict[str, Any] | None:
    text: str = part["text"]
    if not text.startswith(_BILLING):
        return part
    rest = text.partition("\n")[2]
    return {**part, "text": rest} if rest else None


def _list(name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, Sequence):
        raise ConfigError(f"{name} is a list, not {value!r:.40}")
    return value


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise ConfigError(f"a tool call is of a function, not {call!r:.60}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = _TOOL_ARGUMENTS.read(arguments) if arguments else {}
        except json.JSONDecodeError:
            arguments = {}  # as in vLLM: a bad call of the past does not end a conversation
        except (RecursionError, ValueError) as error:  # nested too deeply; a number of thousands of digits
            raise ConfigError(f"the arguments of a tool call cannot be read: {error!s:.60}") from error
    if not isinstance(arguments, Mapping):
        arguments = {}
    # The order of vLLM's request model, in which templates may dump a call; fields that it does not know follow.
    return _ordered(
        {**call, "function": _ordered({**function, "arguments": arguments}, "arguments", "name")},
        "id", "function", "type",
    )  # fmt: skip


def _ordered(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """These first, if they are there."""
    return {name: fields[name] for name in names if name in fields} | dict(fields)


def _tool(tool: Any) -> dict[str, Any]:
    """With the fields of vLLM's request model, in its order."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(f"a tool is a function with a name, not {tool!r:.60}")
    deferred = tool.get("defer_loading")
    own = function.get("defer_loading")
    switches = {"strict": function.get("strict"), "defer_loading": deferred if own is None else own}
    if any(type(value) not in (bool, type(None)) for value in (*switches.values(), deferred)):
        raise ConfigError("strict and defer_loading of a tool are true or false")
    made = {name: function.get(name) for name in ("name", "description", "parameters")}
    made |= {name: value for name, value in switches.items() if value is not None}
    whole = {"type": "function", "function": made}
    return whole if deferred is None else {**whole, "defer_loading": deferred}


def _without_developer(conversation: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For a template without the role: its messages merge into a system message at the beginning."""
    if all(message["role"] != "developer" for message in conversation):
        return list(conversation)
    renamed = [
        {**{name: value for name, value in message.items() if name != "tools"}, "role": "system"}
        if message["role"] == "developer"
        else message
        for message in conversation
    ]
    places = [place for place, message in enumerate(renamed) if message["role"] == "system"]
    if places == [0]:
        return renamed
    texts = ["\n".join(text_parts(renamed[place]["content"])) for place in places]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in renamed if message["role"] != "system")]


def _why_no_chats(source: str, tokenizer: Any) -> str:
    """Why vLLM renders this model's chats otherwise than with the tokenizer's template; empty: it does not."""
    for architecture in _file_of(source, "config.json").get("architectures") or ():
        if str(architecture).startswith(_RENDERED_BY_CODE):
            return f"vLLM has code for {architecture}"
    if _file_of(source, "tekken.json"):
        return "vLLM has code for Mistral's tokenizers"
    # vLLM prefers a processor's template for chats without tools.
    template = _file_of(source, "chat_template.json").get("chat_template")
    if template is not None and template != tokenizer.chat_template:
        return "its chat_template.json differs from the template of its tokenizer"
    return ""


def _file_of(source: str, name: str) -> dict[str, Any]:
    """A JSON object of the model; empty: it has none."""
    from transformers.utils.hub import cached_file

    path = cached_file(
        source, name,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )  # fmt: skip
    found = {} if path is None else json.loads(read_file(path, MAX_FILE_NBYTES))
    return found if isinstance(found, dict) else {}


def _check_files(folder: Path) -> None:
    """transformers opens each that it knows, and would wait for a pipe. Errors: ``OSError``."""
    for one in folder.iterdir() if folder.is_dir() else ():
        if one.suffix in _READ and not one.is_dir():
            open_file(one).close()


def _why(source: str, error: Exception) -> str:
    """The fault, in a line: transformers' own words for a folder are about names on the hub, or end in a list."""
    folder = Path(source)
    if folder.is_dir() and not any(folder.glob("*tok*")):
        return "it holds no tokenizer.json: name the folder of the model"
    if folder.is_absolute() and not folder.exists():
        return "the folder does not exist"
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return _first_line(error)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
