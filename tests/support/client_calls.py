"""Calls of the ``openai``, ``anthropic`` and ``litellm`` packages, and of plain HTTP, as ``CALLS`` by name.

Each call takes ``Clients`` and returns what its caller sees; the worker is vLLM with the model ``NAME``.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import openai
import pydantic

from tests.support.clients import PATIENCE_S, Clients, events_of, post, said

NAME = "tiny"
ALWAYS: Any = {"model": NAME, "temperature": 0.0, "max_tokens": 8}
MESSAGE: Any = {"model": NAME, "max_tokens": 8, "extra_body": {"temperature": 0.0}}  # of Anthropic's API
USER: Any = [{"role": "user", "content": "the user asks the system"}]
LARGE = "of a large body " * 14_000  # 220 KB
WEATHER: Any = {
    "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": WEATHER},
}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}


class City(pydantic.BaseModel):
    city: Literal["Rome", "Oslo"]


Call = Callable[[Clients], Any]


def _completion(to: Clients, prompt: Any = "the user", **more: Any) -> Any:
    answer = to.openai.completions.create(prompt=prompt, **{**ALWAYS, **more})
    return events_of(answer) if "stream" in more else answer


def _chat(to: Clients, messages: Any = USER, **more: Any) -> Any:
    answer = to.openai.chat.completions.create(messages=messages, **{**ALWAYS, **more})
    return events_of(answer) if "stream" in more else answer


def _response(to: Clients, **more: Any) -> Any:
    asked: Any = {"model": NAME, "input": "the user asks", "max_output_tokens": 8, "temperature": 0.0}
    answer = to.openai.responses.create(**{**asked, **more})
    return events_of(answer) if "stream" in more else answer


def _message(to: Clients, **more: Any) -> Any:
    answer = to.anthropic.messages.create(messages=USER, **{**MESSAGE, **more})
    return events_of(answer) if "stream" in more else answer


def _litellm(to: Clients, provider: str = "openai", **more: Any) -> Any:
    import litellm

    asked: Any = {**ALWAYS, "messages": USER, **more}
    base = f"{to.url}/v1" if provider in ("openai", "hosted_vllm", "text-completion-openai") else to.url
    asked |= {"model": f"{provider}/{asked['model']}", "api_base": base, "api_key": "sk-none"}
    return litellm.completion(**asked, num_retries=0, timeout=PATIENCE_S)


def chat_stream_by_its_helper(to: Clients) -> Any:
    asked = {
        "model": NAME,
        "temperature": 0.0,
        "messages": USER,
        "stop": ["w"],
        "extra_body": {"min_tokens": 4},
    }
    with to.openai.chat.completions.stream(**asked) as stream:
        return [sorted({event.type for event in stream}), stream.get_final_completion()]


def chat_of_a_system_in_parts(to: Clients) -> Any:
    parts: Any = [{"type": "text", "text": "the user"}, {"type": "text", "text": "asks the system"}]
    messages: Any = [{"role": "system", "content": "the system"}, {"role": "user", "content": parts}]
    return _chat(to, messages=messages)


def chat_with_an_image_for_a_model_of_text(to: Clients) -> Any:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "what is this"}, image]}]
    return _chat(to, messages=messages)


def chat_with_a_tool_s_result(to: Clients) -> Any:
    called = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
    }
    messages: Any = [
        *USER, {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a tool says 42"},
    ]  # fmt: skip
    return _chat(to, messages=messages, tools=[TOOL])


def eight_chats_at_once(to: Clients) -> Any:
    async def ask(client: openai.AsyncOpenAI) -> Any:
        patient = client.with_options(max_retries=5)  # as by default, and more: a busy machine refuses some
        chats = [patient.chat.completions.create(messages=USER, user=f"{n}", **ALWAYS) for n in range(8)]
        return await asyncio.gather(*chats)

    return to.in_async(ask)


def chat_stream_in_async(to: Clients) -> Any:
    async def ask(client: openai.AsyncOpenAI) -> Any:
        stream = await client.chat.completions.create(messages=USER, stream=True, **ALWAYS)
        return events_of([event async for event in stream])

    return to.in_async(ask)


def request_id_of_the_caller(to: Clients) -> Any:
    sent = {"x-request-id": "caller-1", "x-custom": "of the caller", "user-agent": "a caller/1"}
    raw = to.openai.chat.completions.with_raw_response.create(messages=USER, extra_headers=sent, **ALWAYS)
    return [raw.headers.get("x-request-id"), raw.parse()]


def body_in_chunks(to: Clients) -> Any:
    def parts() -> Iterator[bytes]:
        yield b'{"model": "tiny", "prompt": "the user", '
        yield b'"temperature": 0, "max_tokens": 4}'

    return said(
        to.http.post("/v1/completions", content=parts(), headers={"content-type": "application/json"})
    )


def pooling_score_and_rerank(to: Clients) -> Any:
    bodies: Any = {
        "/pooling": {"input": "a"}, "/classify": {"input": "a"}, "/score": {"text_1": "a", "text_2": "b"},
        "/rerank": {"query": "a", "documents": ["b"]},
    }  # fmt: skip
    return [post(to, path, json.dumps({"model": NAME, **body}).encode()) for path, body in bodies.items()]


def tokenize_and_back(to: Clients) -> Any:
    made = to.http.post("/tokenize", json={"model": NAME, "prompt": "the user asks"}).json()
    return [made, post(to, "/detokenize", json.dumps({"model": NAME, "tokens": made["tokens"]}).encode())]


def response_that_is_shown_and_continued(to: Clients) -> Any:
    first = _response(to)
    shown = to.openai.responses.retrieve(first.id)
    more = _response(to, input="the user asks more", previous_response_id=first.id)
    return [shown.id == first.id, shown, more.previous_response_id == first.id, more]


def message_stream_by_its_helper(to: Clients) -> Any:
    with to.anthropic.messages.stream(messages=USER, **MESSAGE) as stream:
        return ["".join(stream.text_stream), stream.get_final_message()]


def message_of_a_tool(to: Clients) -> Any:
    tool: Any = {"name": "weather", "description": "of a city", "input_schema": WEATHER}
    return _message(to, tools=[tool], tool_choice={"type": "tool", "name": "weather"})


def litellm_chat_in_async(to: Clients) -> Any:
    import litellm

    async def ask() -> Any:
        return await litellm.acompletion(
            messages=USER, api_base=f"{to.url}/v1", api_key="sk-none", **{**ALWAYS, "model": f"openai/{NAME}"}
        )

    return asyncio.run(ask())


CALLS: dict[str, Call] = {
    "completion": lambda to: _completion(to, "the user asks"),
    "completion_of_tokens": lambda to: _completion(to, [5, 6, 7, 8]),
    "completion_stream_with_usage": lambda to: _completion(
        to, stream=True, stream_options={"include_usage": True}
    ),
    "completion_logprobs_and_echo": lambda to: _completion(to, logprobs=2, echo=True),
    "completion_n_of_two_prompts": lambda to: _completion(
        to, ["the user", "the system"], n=2, temperature=1.0, seed=7
    ),
    "completion_stop_and_seed": lambda to: _completion(
        to, stop=["a", "w1"], seed=3, temperature=1.0, max_tokens=64
    ),
    "completion_with_fields_of_vllm": lambda to: _completion(to, extra_body={
        "top_k": 5, "min_tokens": 4, "ignore_eos": True, "return_token_ids": True, "priority": 0,
    }),
    # Chats.
    "chat": _chat,
    "chat_stream_with_usage": lambda to: _chat(
        to, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": False}
    ),
    "chat_stream_by_its_helper": chat_stream_by_its_helper,
    "chat_logprobs": lambda to: _chat(to, logprobs=True, top_logprobs=2),
    "chat_n_with_penalties": lambda to: _chat(
        to, n=3, top_p=0.9, frequency_penalty=0.5, presence_penalty=0.5, logit_bias={"20": -100}, temperature=1.0,
        seed=5,
    ),
    "chat_of_a_system_in_parts": chat_of_a_system_in_parts,
    "chat_with_an_image_for_a_model_of_text": chat_with_an_image_for_a_model_of_text,
    "chat_of_tools": lambda to: _chat(to, tools=[TOOL], tool_choice="auto"),
    "chat_of_a_named_tool": lambda to: _chat(
        to, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "weather"}}
    ),
    "chat_stream_of_a_required_tool": lambda to: _chat(
        to, stream=True, max_tokens=16, tools=[TOOL], tool_choice="required"
    ),
    "chat_with_a_tool_s_result": chat_with_a_tool_s_result,
    "chat_of_a_json_schema": lambda to: to.openai.chat.completions.parse(
        messages=USER, response_format=City, **{**ALWAYS, "max_tokens": 64}
    ),
    "chat_of_a_broken_schema": lambda to: _chat(
        to, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    ),
    "chat_that_reasons": lambda to: _chat(to, extra_body=THINKING),
    "chat_stream_that_reasons": lambda to: _chat(to, stream=True, extra_body=THINKING),
    "chat_in_unicode": lambda to: _chat(
        to, [{"role": "user", "content": "Grüße, мир, 世界, 👩‍👩‍👧, \u202eright to left, \u0000"}]
    ),
    "chat_of_a_large_body": lambda to: _chat(to, user=LARGE),
    "chat_of_a_body_above_16_mib": lambda to: _chat(to, user="u" * (17 << 20)),
    "header_of_20_kb": lambda to: _chat(to, extra_headers={"x-long": "l" * 20_000}),
    "chat_that_is_too_long": lambda to: _chat(to, [{"role": "user", "content": LARGE}]),
    "eight_chats_at_once": eight_chats_at_once,
    "chat_stream_in_async": chat_stream_in_async,
    # Headers, other methods and paths.
    "request_id_of_the_caller": request_id_of_the_caller,
    "model_that_is_not_there": lambda to: _chat(to, model="other"),
    "parameter_that_is_wrong": lambda to: _chat(to, temperature=-1.0),
    "request_without_messages": lambda to: to.openai.post(
        "/chat/completions", cast_to=object, body={"model": NAME}
    ),
    "json_that_is_broken": lambda to: post(to, "/v1/chat/completions", b'{"model": "tiny", '),
    "body_that_is_no_json": lambda to: post(
        to, "/v1/chat/completions", b"x", **{"content-type": "text/plain"}
    ),
    "body_that_is_empty": lambda to: post(to, "/v1/completions", b""),
    "body_in_gzip": lambda to: post(
        to, "/v1/completions", gzip.compress(json.dumps({**ALWAYS, "prompt": "the user"}).encode(), mtime=0),
        **{"content-encoding": "gzip"},
    ),
    "body_in_chunks": body_in_chunks,
    "method_that_is_wrong": lambda to: said(to.http.get("/v1/chat/completions")),
    "path_that_is_unknown": lambda to: to.openai.get("/nothing/of/this?a=b", cast_to=object),
    "path_with_a_slash_behind": lambda to: post(
        to, "/v1/chat/completions/", json.dumps({**ALWAYS, "messages": USER}).encode()
    ),
    "head_of_the_models": lambda to: said(to.http.head("/v1/models")),
    "preflight_of_a_browser": lambda to: said(to.http.options("/v1/chat/completions", headers={
        "origin": "https://page.example", "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    })),
    "response_in_gzip_if_the_worker_likes": lambda to: said(
        to.http.get("/v1/models", headers={"accept-encoding": "gzip"})
    ),
    "models": lambda to: to.openai.models.list().data,
    "model_by_name": lambda to: to.openai.models.retrieve(NAME),
    "health": lambda to: said(to.http.get("/health")),
    "tokens_in_and_out_as_engines_ask": lambda to: post(to, "/inference/v1/generate", json.dumps(
        {"model": NAME, "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "temperature": 0}}
    ).encode()),
    "version": lambda to: said(to.http.get("/version")),
    # Other kinds of calls.
    "embeddings": lambda to: to.openai.embeddings.create(model=NAME, input="the user"),
    "pooling_score_and_rerank": pooling_score_and_rerank,
    "speech": lambda to: to.openai.audio.transcriptions.create(
        model=NAME, file=("a.wav", b"RIFF" + bytes(2000))
    ),
    "tokenize_and_back": tokenize_and_back,
    # Responses.
    "response": lambda to: _response(to, instructions="the system"),
    "response_stream": lambda to: _response(to, stream=True),
    "response_that_is_shown_and_continued": response_that_is_shown_and_continued,
    "response_that_nobody_keeps": lambda to: to.openai.responses.retrieve("resp_unknown"),
    # Anthropic's API.
    "message": lambda to: _message(to, system="the system"),
    "message_stream": lambda to: _message(to, stream=True),
    "message_stream_by_its_helper": message_stream_by_its_helper,
    "message_of_a_tool": message_of_a_tool,
    "message_tokens": lambda to: to.anthropic.messages.count_tokens(
        model=NAME, messages=USER, system="the system"
    ),
    "message_of_a_model_that_is_not_there": lambda to: _message(to, model="other"),
    "message_without_a_length": lambda to: to.anthropic.post(
        "/v1/messages", cast_to=object, body={"model": NAME, "messages": USER}
    ),
    # By litellm.
    "litellm_chat": lambda to: _litellm(to, tools=[TOOL]),
    "litellm_stream_of_vllm": lambda to: events_of(
        _litellm(to, "hosted_vllm", stream=True, stream_options={"include_usage": True})
    ),
    "litellm_message": lambda to: _litellm(to, "anthropic"),
    "litellm_text": lambda to: _litellm(to, "text-completion-openai"),
    "litellm_chat_in_async": litellm_chat_in_async,
    "litellm_model_that_is_not_there": lambda to: _litellm(to, model="other"),
    "litellm_chat_that_is_too_long": lambda to: _litellm(to, messages=[{"role": "user", "content": LARGE}]),
}  # fmt: skip
