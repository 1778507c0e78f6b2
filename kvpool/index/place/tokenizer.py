"""``Tokenizer``: vLLM's tokens of text and chats, for one model.

As vLLM 0.32 makes them for a Hugging Face tokenizer in ``/v1/completions`` and ``/v1/chat/completions``
(``vllm/renderers/hf.py``, ``chat_utils.py``); a test compares both. Models with renderers of their own in
vLLM (Mistral's tokenizer, gpt-oss, DeepSeek V3.2) are excluded.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvpool.errors import ConfigError
from kvpool.index.place.token_cache import TokenCache
from kvpool.index.prompt import Chat, Prompt, text_parts
from kvpool.text import missing_extra

_ROLES = ("assistant", "developer", "system", "tool", "user")
_BILLING = "x-anthropic-billing-header"  # a first line that differs in each request; vLLM leaves it out
# Arguments of the library's method that a caller must not pass.
_RESERVED = frozenset(
    (
        "add_generation_prompt", "chat_template", "conversation", "max_length", "messages", "padding",
        "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools",
        "truncation",
    )
)  # fmt: skip
_PROBE = "kvpool"
THREADS = 2  # long texts must not hold up other work in threads


class Tokenizer:
    """Made by ``load``. Any thread; a call takes time with its text's length."""

    def __init__(self, model: str, tokenizer: Any) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._takes_parts: dict[str, bool] = {}  # by template; concurrent writes are equal
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
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except Exception as error:  # of many kinds: files, the hub, unknown classes
            raise ConfigError(f"no tokenizer for {model} in {source}: {_why(source, error)}") from error
        if not tokenizer.is_fast:
            raise ConfigError(f"the tokenizer in {source} is not a fast one: send token ids for {model}")
        return cls(model, tokenizer)

    def of_text(self, text: str) -> array[int]:
        """As for the ``prompt`` of ``/v1/completions``: with the tokenizer's special tokens."""
        tokens = self._encode(text)
        return self._before + tokens + self._behind

    def of_chat(self, chat: Chat) -> array[int]:
        """As for the ``messages`` of ``/v1/chat/completions``. Errors: ``ConfigError``, also the template's own."""
        if reserved := sorted(_RESERVED & chat.template_options.keys()):
            raise ConfigError(f"the template options of a chat cannot hold {', '.join(reserved)}")
        tools = None if chat.tools is None else [_tool(tool) for tool in chat.tools]
        template = self._template(tools)
        conversation = [_message(message, self._parts(template)) for message in chat.messages]
        if not any(quoted in template for quoted in ('"developer"', "'developer'")):
            conversation = _without_developer(conversation)
        options = {name: value for name, value in chat.template_options.items() if value is not None}
        text = self._render(template, conversation, tools, chat.add_generation_prompt, options)
        return self._encode(text)

    def _plain(self, text: str, *, special: bool = False) -> list[int]:
        tokens: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return tokens

    def _plain_fast(self, text: str) -> list[int]:
        # The core of _plain, with its settings: a call saves 20 us, and a hop to a pool of threads.
        tokens: list[int] = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    def _encode(self, text: str) -> array[int]:
        try:
            return self._cache.tokens(text)
        except (TypeError, UnicodeEncodeError) as error:  # half of a surrogate pair, not valid text in Rust
            raise ConfigError("the prompt is not Unicode text") from error

    def _template(self, tools: list[dict[str, Any]] | None) -> str:
        try:
            template: str = self._tokenizer.get_chat_template(None, tools=tools)
        except ValueError as error:
            raise ConfigError(
                f"the tokenizer of {self._model} has no chat template: send text or token ids"
            ) from error
        return template

    def _render(
        self,
        template: str,
        conversation: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        options: Mapping[str, Any],
    ) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                conversation, tools=tools, chat_template=template, tokenize=False,
                add_generation_prompt=add_generation_prompt, **options,
            )  # fmt: skip
        except Exception as error:  # a template's error concerns its input
            raise ConfigError(
                f"the chat template of {self._model} refuses this chat: {_first_line(error)}"
            ) from error
        return text

    def _parts(self, template: str) -> bool:
        """Whether the template takes content as a list of parts: vLLM reads its loops, we try."""
        takes = self._takes_parts.get(template)
        if takes is None:
            parts = [{"type": "text", "text": _PROBE}]
            try:
                text = self._render(template, [{"role": "user", "content": parts}], None, False, {})
            except ConfigError:
                takes = False
            else:
                takes = _PROBE in text and str(parts[0]) not in text and json.dumps(parts[0]) not in text
            self._takes_parts[template] = takes
        return takes


class Tokenizers:
    def __init__(self, by_model: Mapping[str, Tokenizer] | None = None) -> None:
        self._by_model = by_model or {}
        self._threads = ThreadPoolExecutor(THREADS, "kvpool-text")

    def __contains__(self, model: str) -> bool:
        return model in self._by_model

    def tokens(self, prompt: Prompt) -> Prompt:
        """The prompt in tokens. Any thread; time grows with the text. Errors: ``ConfigError``."""
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
        """Blocks as long as the longest text takes."""
        self._threads.shutdown(cancel_futures=True)


def _ends(whole: list[int], body: list[int]) -> tuple[array[int], array[int]]:
    """A tokenizer's own tokens before and behind a text. Errors: ``ConfigError`` for any other change."""
    for at in range(len(whole) - len(body) + 1):
        if whole[at : at + len(body)] == body:
            return array("I", whole[:at]), array("I", whole[at + len(body) :])
    raise ConfigError("the tokenizer changes a text where it adds special tokens: send token ids")


def _message(message: Any, in_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ConfigError(f"a message has a role ({', '.join(_ROLES)}) and a content, not {message!r:.60}")
    role = message["role"]
    texts = text_parts(message.get("content"))
    if role == "system":
        texts = [text for text in map(_without_billing, texts) if text is not None]
    made: dict[str, Any] = {"role": role}
    if in_parts and role != "tool":  # vLLM joins a tool's parts under any template
        made["content"] = [{"type": "text", "text": text} for text in texts]
    else:
        made["content"] = "\n".join(texts)
    if role == "assistant":
        if calls := message.get("tool_calls"):
            made["tool_calls"] = [_tool_call(call) for call in calls]
        if (reasoning := message.get("reasoning")) is not None:
            made |= {"reasoning": reasoning, "reasoning_content": reasoning}
    elif role == "tool" and "tool_call_id" in message:
        made["tool_call_id"] = message["tool_call_id"]
    elif role == "developer":
        made["tools"] = None
    if isinstance(message.get("name"), str):
        made["name"] = message["name"]
    return made


def _without_billing(text: str) -> str | None:
    if not text.startswith(_BILLING):
        return text
    return text.partition("\n")[2] or None


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise ConfigError(f"a tool call is of a function, not {call!r:.60}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except ValueError:
            arguments = {}  # as in vLLM: a bad call of the past does not end a conversation
    if not isinstance(arguments, Mapping):
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}


def _tool(tool: Any) -> dict[str, Any]:
    """With the fields of vLLM's request model, in its order."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(f"a tool is a function with a name, not {tool!r:.60}")
    made = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        made["strict"] = function["strict"]
    return {"type": "function", "function": made}


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


def _why(source: str, error: Exception) -> str:
    """The fault, in a line: transformers' own words for a folder are about names on the hub, or end in a list."""
    folder = Path(source)
    if folder.is_dir() and not any(folder.glob("*tok*")):
        return "it holds no tokenizer.json: name the folder of the model"
    if folder.is_absolute() and not folder.exists():
        return "the folder does not exist"
    return _first_line(error)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
