"""Clients of one address, and what they see: values, errors, statuses, headers, without what differs each time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pydantic

PATIENCE_S = 300.0


class Clients:
    """Of one address. ``answers``: status and headers of each response, in their order."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: list[tuple[int, dict[str, str]]] = []
        self.http = httpx.Client(base_url=url, timeout=PATIENCE_S, event_hooks=self._hooks(), trust_env=False)
        common: Any = {"api_key": "sk-none", "max_retries": 0, "timeout": PATIENCE_S}
        self.openai = openai.OpenAI(base_url=f"{url}/v1", http_client=self.http, **common)
        self._http2 = httpx2.Client(timeout=PATIENCE_S, event_hooks=self._hooks(), trust_env=False)
        self.anthropic = anthropic.Anthropic(base_url=url, http_client=self._http2, **common)
        self._common = common

    def _hooks(self) -> dict[str, list[Callable[..., Any]]]:
        def answered(response: httpx.Response) -> None:
            self.answers.append((response.status_code, dict(response.headers)))

        return {"response": [answered]}

    def close(self) -> None:
        self.http.close()
        self._http2.close()

    def in_async(self, ask: Callable[[openai.AsyncOpenAI], Any]) -> Any:
        async def run() -> Any:
            async with openai.AsyncOpenAI(
                base_url=f"{self.url}/v1", http_client=httpx.AsyncClient(trust_env=False), **self._common
            ) as client:
                return await ask(client)

        return asyncio.run(run())


def seen(call: Callable[[Clients], Any], to: Clients) -> dict[str, Any]:
    """The value or the exception of a call, and the statuses and headers of its responses."""
    to.answers.clear()
    found: dict[str, Any] = {}
    try:
        found["value"] = _masked(_plain(call(to)))
    except Exception as error:  # of three packages
        found["error"] = [type(error).__name__, _masked(str(error).replace(to.url, "URL"))]
    found["statuses"] = [status for status, _ in to.answers]
    found["headers"] = [
        {name: _header(name, value) for name, value in sent.items()} for _, sent in to.answers
    ]
    return found


def _header(name: str, value: str) -> str:
    return "masked" if name in ("date", "content-length", "x-request-id") and value != "caller-1" else value


def post(to: Clients, path: str, body: bytes, **headers: str) -> Any:
    sent = {"content-type": "application/json", **headers}
    return said(to.http.post(path, content=body, headers=sent))


def said(response: httpx.Response) -> Any:
    with suppress(ValueError):
        return [response.status_code, response.json()]
    return [response.status_code, response.text]


def _plain(value: Any) -> Any:
    if isinstance(value, pydantic.BaseModel):
        return value.model_dump(mode="json")
    return [_plain(one) for one in value] if isinstance(value, list) else value


def events_of(events: Iterable[Any]) -> dict[str, Any]:
    """Events in their order, and their text: vLLM joins parts that a busy machine is late for, and so does this."""
    kept: list[Any] = []
    text: list[str] = []
    for event in map(_plain, events):
        is_part = str(event.get("type")).endswith("delta") and "stop_reason" not in event.get("delta", ())
        for choice in event.get("choices") or ():
            is_part = choice.get("finish_reason") is None and not (choice.get("delta") or {}).get("role")
            choice["delta" if "delta" in choice else "text"] = text.extend(_texts(choice)) or "joined"
        if is_part:
            text.extend(_texts(event) if "choices" not in event else ())
        else:
            kept.append({name: value for name, value in event.items() if name != "sequence_number"})
    return {"events": kept, "text": "".join(text)}


_TEXTS = ("text", "content", "reasoning", "arguments", "name", "delta", "thinking", "partial_json")


def _texts(value: Any) -> Iterator[str]:
    for name, one in value.items() if isinstance(value, dict) else ():
        if name in _TEXTS and isinstance(one, str):
            yield one
        for inner in one if isinstance(one, list) else [one]:
            yield from _texts(inner)


_MASKED = ("id", "created", "created_at", "completed_at", "item_id", "call_id", "previous_response_id")
_OF_CACHES = ("cached_tokens", "created_cache_tokens")  # an earlier call may have left the prompt there
_TIME = re.compile(r"\b\d\d:\d\d:\d\d\b")  # of a log line within an error
_ID = re.compile(r"\b((?:[a-z]+-)?[a-z]+[-_])[0-9a-f]{12,32}(?:-[0-9a-f]+)*\b")


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: f"a {type(one).__name__}"
            if (name in _MASKED and one) or (name in _OF_CACHES and one is not None)
            else _masked(one)
            for name, one in value.items()
        }
    if isinstance(value, list):
        return [_masked(one) for one in value]
    return _TIME.sub("TIME", _ID.sub(r"\1ID", value)) if isinstance(value, str) else value
