"""``Chat``: a prompt as the messages of a chat, in the form of a request to ``/v1/chat/completions``. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpool.errors import ConfigError

# Of the body of a request: what its template is told beside messages and tools.
_OPTIONS = ("continue_final_message", "documents", "reasoning_effort")


@dataclass(frozen=True)
class Chat:
    """Text only: a prompt with images or sound has no form as text that an index could hash.

    ``messages``: maps with ``role`` and ``content`` (text, a list of text parts, or None); ``name``; of an assistant
    ``reasoning`` and ``tool_calls``; of a tool ``tool_call_id``. Other keys are not looked at. ``tools``: as in the
    request. ``template_options``: what the template is told beside, such as ``{"enable_thinking": False}``.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    template_options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_request(cls, body: Any) -> Chat:
        """Of the body of a request, or of its messages alone. Errors: ``ConfigError``."""
        if isinstance(body, Sequence) and not isinstance(body, str | bytes):
            return cls(body)
        if not isinstance(body, Mapping) or not isinstance(body.get("messages"), Sequence):
            raise ConfigError('a chat is a list of messages, or an object with "messages"')
        options = {name: body[name] for name in _OPTIONS if body.get(name) is not None}
        if "reasoning_effort" in options:  # what vLLM tells templates that have only a switch
            options["enable_thinking"] = options["reasoning_effort"] != "none"
        options |= body.get("chat_template_kwargs") or {}
        generation = body.get("add_generation_prompt")
        return cls(
            body["messages"],
            body.get("tools"),
            True if generation is None else bool(generation),
            options,
        )


def text_parts(content: Any) -> list[str]:
    """The texts of a message's content. Errors: ``ConfigError`` for what is no text."""
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
