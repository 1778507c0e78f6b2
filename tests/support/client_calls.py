"""Calls of the ``openai``, ``anthropic`` and ``litellm`` packages, and of plain HTTP, as ``CALLS`` by name.

Over 400 lines because it is one list. Each call takes ``Clients`` and returns what its caller sees; the worker is vLLM
with the model ``NAME``.
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


class City(pydantic.BaseModel):
    city: Literal["Rome", "Oslo"]


Call = Callable[[Clients], Any]
CALLS: dict[str, Call] = {}


def call(function: Call) -> Call:
    CALLS[function.__name__] = function
    return function


# ---- completions


@call
def completion(to: Clients) -> Any:
    return to.openai.completions.create(prompt="the user asks", **ALWAYS)


@call
def completion_of_tokens(to: Clients) -> Any:
    return to.openai.completions.create(prompt=[5, 6, 7, 8], **ALWAYS)


@call
def completion_stream_with_usage(to: Clients) -> Any:
    options: Any = {"include_usage": True}
    return events_of(
        to.openai.completions.create(prompt="the user", stream=True, stream_options=options, **ALWAYS)
    )


@call
def completion_logprobs_and_echo(to: Clients) -> Any:
    return to.openai.completions.create(prompt="the user", logprobs=2, echo=True, **ALWAYS)


@call
def completion_n_of_two_prompts(to: Clients) -> Any:
    asked = {**ALWAYS, "temperature": 1.0, "seed": 7}
    return to.openai.completions.create(prompt=["the user", "the system"], n=2, **asked)


@call
def completion_stop_and_seed(to: Clients) -> Any:
    asked = {**ALWAYS, "temperature": 1.0, "max_tokens": 64}
    return to.openai.completions.create(prompt="the user", stop=["a", "w1"], seed=3, **asked)


@call
def completion_with_fields_of_vllm(to: Clients) -> Any:
    extra = {"top_k": 5, "min_tokens": 4, "ignore_eos": True, "return_token_ids": True, "priority": 0}
    return to.openai.completions.create(prompt="the user", extra_body=extra, **ALWAYS)


# ---- chats


@call
def chat(to: Clients) -> Any:
    return to.openai.chat.completions.create(messages=USER, **ALWAYS)


@call
def chat_stream_with_usage(to: Clients) -> Any:
    options: Any = {"include_usage": True, "continuous_usage_stats": False}
    return events_of(
        to.openai.chat.completions.create(messages=USER, stream=True, stream_options=options, **ALWAYS)
    )


@call
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


@call
def chat_logprobs(to: Clients) -> Any:
    return to.openai.chat.completions.create(messages=USER, logprobs=True, top_logprobs=2, **ALWAYS)


@call
def chat_n_with_penalties(to: Clients) -> Any:
    asked = {**ALWAYS, "temperature": 1.0, "seed": 5}
    return to.openai.chat.completions.create(
        messages=USER, n=3, top_p=0.9, frequency_penalty=0.5, presence_penalty=0.5,
        logit_bias={"20": -100}, **asked,
    )  # fmt: skip


@call
def chat_of_a_system_in_parts(to: Clients) -> Any:
    parts: Any = [{"type": "text", "text": "the user"}, {"type": "text", "text": "asks the system"}]
    messages: Any = [{"role": "system", "content": "the system"}, {"role": "user", "content": parts}]
    return to.openai.chat.completions.create(messages=messages, **ALWAYS)


@call
def chat_with_an_image_for_a_model_of_text(to: Clients) -> Any:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "what is this"}, image]}]
    return to.openai.chat.completions.create(messages=messages, **ALWAYS)


@call
def chat_of_tools(to: Clients) -> Any:
    return to.openai.chat.completions.create(messages=USER, tools=[TOOL], tool_choice="auto", **ALWAYS)


@call
def chat_of_a_named_tool(to: Clients) -> Any:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    return to.openai.chat.completions.create(messages=USER, tools=[TOOL], tool_choice=named, **ALWAYS)


@call
def chat_stream_of_a_required_tool(to: Clients) -> Any:
    asked = {**ALWAYS, "max_tokens": 16, "tools": [TOOL], "tool_choice": "required"}
    return events_of(to.openai.chat.completions.create(messages=USER, stream=True, **asked))


@call
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
    return to.openai.chat.completions.create(messages=messages, tools=[TOOL], **ALWAYS)


@call
def chat_of_a_json_schema(to: Clients) -> Any:
    asked = {**ALWAYS, "max_tokens": 64}
    return to.openai.chat.completions.parse(messages=USER, response_format=City, **asked)


@call
def chat_of_a_broken_schema(to: Clients) -> Any:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    return to.openai.chat.completions.create(messages=USER, response_format=schema, **ALWAYS)


@call
def chat_that_reasons(to: Clients) -> Any:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    return to.openai.chat.completions.create(messages=USER, extra_body=thinking, **ALWAYS)


@call
def chat_stream_that_reasons(to: Clients) -> Any:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    return events_of(
        to.openai.chat.completions.create(messages=USER, stream=True, extra_body=thinking, **ALWAYS)
    )


@call
def chat_in_unicode(to: Clients) -> Any:
    text = "Grüße, мир, 世界, 👩‍👩‍👧, \u202eright to left, \u0000"
    return to.openai.chat.completions.create(messages=[{"role": "user", "content": text}], **ALWAYS)


@call
def chat_of_a_large_body(to: Clients) -> Any:
    return to.openai.chat.completions.create(messages=USER, user=LARGE, **ALWAYS)


@call
def chat_of_a_body_above_16_mib(to: Clients) -> Any:
    return to.openai.chat.completions.create(messages=USER, user="u" * (17 << 20), **ALWAYS)


@call
def header_of_20_kb(to: Clients) -> Any:
    return to.openai.chat.completions.create(messages=USER, extra_headers={"x-long": "l" * 20_000}, **ALWAYS)


@call
def chat_that_is_too_long(to: Clients) -> Any:
    return to.openai.chat.completions.create(messages=[{"role": "user", "content": LARGE}], **ALWAYS)


@call
def eight_chats_at_once(to: Clients) -> Any:
    async def ask(client: openai.AsyncOpenAI) -> Any:
        patient = client.with_options(max_retries=5)  # as by default, and more: a busy machine refuses some
        chats = [patient.chat.completions.create(messages=USER, user=f"{n}", **ALWAYS) for n in range(8)]
        return await asyncio.gather(*chats)

    return to.in_async(ask)


@call
def chat_stream_in_async(to: Clients) -> Any:
    async def ask(client: openai.AsyncOpenAI) -> Any:
        stream = await client.chat.completions.create(messages=USER, stream=True, **ALWAYS)
        return events_of([event async for event in stream])

    return to.in_async(ask)


# ---- headers, other methods and paths


@call
def request_id_of_the_caller(to: Clients) -> Any:
    sent = {"x-request-id": "caller-1", "x-custom": "of the caller", "user-agent": "a caller/1"}
    raw = to.openai.chat.completions.with_raw_response.create(messages=USER, extra_headers=sent, **ALWAYS)
    return [raw.headers.get("x-request-id"), raw.parse()]


@call
def model_that_is_not_there(to: Clients) -> Any:
    return to.openai.chat.completions.create(messages=USER, **{**ALWAYS, "model": "other"})


@call
def parameter_that_is_wrong(to: Clients) -> Any:
    return to.openai.chat.completions.create(messages=USER, **{**ALWAYS, "temperature": -1.0})


@call
def request_without_messages(to: Clients) -> Any:
    return to.openai.post("/chat/completions", cast_to=object, body={"model": NAME})


@call
def json_that_is_broken(to: Clients) -> Any:
    return post(to, "/v1/chat/completions", b'{"model": "tiny", ')


@call
def body_that_is_no_json(to: Clients) -> Any:
    return post(to, "/v1/chat/completions", b"x", **{"content-type": "text/plain"})


@call
def body_that_is_empty(to: Clients) -> Any:
    return post(to, "/v1/completions", b"")


@call
def body_in_gzip(to: Clients) -> Any:
    packed = gzip.compress(json.dumps({**ALWAYS, "prompt": "the user"}).encode(), mtime=0)
    return post(to, "/v1/completions", packed, **{"content-encoding": "gzip"})


@call
def body_in_chunks(to: Clients) -> Any:
    def parts() -> Iterator[bytes]:
        yield b'{"model": "tiny", "prompt": "the user", '
        yield b'"temperature": 0, "max_tokens": 4}'

    return said(
        to.http.post("/v1/completions", content=parts(), headers={"content-type": "application/json"})
    )


@call
def method_that_is_wrong(to: Clients) -> Any:
    return said(to.http.get("/v1/chat/completions"))


@call
def path_that_is_unknown(to: Clients) -> Any:
    return to.openai.get("/nothing/of/this?a=b", cast_to=object)


@call
def path_with_a_slash_behind(to: Clients) -> Any:
    return post(to, "/v1/chat/completions/", json.dumps({**ALWAYS, "messages": USER}).encode())


@call
def head_of_the_models(to: Clients) -> Any:
    return said(to.http.head("/v1/models"))


@call
def preflight_of_a_browser(to: Clients) -> Any:
    sent = {
        "origin": "https://page.example", "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }  # fmt: skip
    return said(to.http.options("/v1/chat/completions", headers=sent))


@call
def response_in_gzip_if_the_worker_likes(to: Clients) -> Any:
    return said(to.http.get("/v1/models", headers={"accept-encoding": "gzip"}))


@call
def models(to: Clients) -> Any:
    return to.openai.models.list().data


@call
def model_by_name(to: Clients) -> Any:
    return to.openai.models.retrieve(NAME)


@call
def health(to: Clients) -> Any:
    return said(to.http.get("/health"))


@call
def tokens_in_and_out_as_engines_ask(to: Clients) -> Any:
    asked = {"model": NAME, "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "temperature": 0}}
    return post(to, "/inference/v1/generate", json.dumps(asked).encode())


@call
def version(to: Clients) -> Any:
    return said(to.http.get("/version"))


# ---- other kinds of calls


@call
def embeddings(to: Clients) -> Any:
    return to.openai.embeddings.create(model=NAME, input="the user")


@call
def pooling_score_and_rerank(to: Clients) -> Any:
    bodies: Any = {
        "/pooling": {"input": "a"}, "/classify": {"input": "a"}, "/score": {"text_1": "a", "text_2": "b"},
        "/rerank": {"query": "a", "documents": ["b"]},
    }  # fmt: skip
    return [post(to, path, json.dumps({"model": NAME, **body}).encode()) for path, body in bodies.items()]


@call
def speech(to: Clients) -> Any:
    return to.openai.audio.transcriptions.create(model=NAME, file=("a.wav", b"RIFF" + bytes(2000)))


@call
def tokenize_and_back(to: Clients) -> Any:
    made = to.http.post("/tokenize", json={"model": NAME, "prompt": "the user asks"}).json()
    return [made, post(to, "/detokenize", json.dumps({"model": NAME, "tokens": made["tokens"]}).encode())]


# ---- responses


def _ask_response(to: Clients, **more: Any) -> Any:
    asked: Any = {"model": NAME, "input": "the user asks", "max_output_tokens": 8, "temperature": 0.0}
    return to.openai.responses.create(**{**asked, **more})


@call
def response(to: Clients) -> Any:
    return _ask_response(to, instructions="the system")


@call
def response_stream(to: Clients) -> Any:
    return events_of(_ask_response(to, stream=True))


@call
def response_that_is_shown_and_continued(to: Clients) -> Any:
    first = _ask_response(to)
    shown = to.openai.responses.retrieve(first.id)
    more = _ask_response(to, input="the user asks more", previous_response_id=first.id)
    return [shown.id == first.id, shown, more.previous_response_id == first.id, more]


@call
def response_that_nobody_keeps(to: Clients) -> Any:
    return to.openai.responses.retrieve("resp_unknown")


# ---- Anthropic's API


@call
def message(to: Clients) -> Any:
    return to.anthropic.messages.create(messages=USER, system="the system", **MESSAGE)


@call
def message_stream(to: Clients) -> Any:
    return events_of(to.anthropic.messages.create(messages=USER, stream=True, **MESSAGE))


@call
def message_stream_by_its_helper(to: Clients) -> Any:
    with to.anthropic.messages.stream(messages=USER, **MESSAGE) as stream:
        return ["".join(stream.text_stream), stream.get_final_message()]


@call
def message_of_a_tool(to: Clients) -> Any:
    tool: Any = {"name": "weather", "description": "of a city", "input_schema": WEATHER}
    return to.anthropic.messages.create(
        messages=USER, tools=[tool], tool_choice={"type": "tool", "name": "weather"}, **MESSAGE
    )


@call
def message_tokens(to: Clients) -> Any:
    return to.anthropic.messages.count_tokens(model=NAME, messages=USER, system="the system")


@call
def message_of_a_model_that_is_not_there(to: Clients) -> Any:
    return to.anthropic.messages.create(messages=USER, **{**MESSAGE, "model": "other"})


@call
def message_without_a_length(to: Clients) -> Any:
    return to.anthropic.post("/v1/messages", cast_to=object, body={"model": NAME, "messages": USER})


# ---- litellm


def _litellm(to: Clients, provider: str = "openai", **more: Any) -> Any:
    import litellm

    asked: Any = {**ALWAYS, "messages": USER, **more}
    base = f"{to.url}/v1" if provider in ("openai", "hosted_vllm", "text-completion-openai") else to.url
    asked |= {"model": f"{provider}/{asked['model']}", "api_base": base, "api_key": "sk-none"}
    return litellm.completion(**asked, num_retries=0, timeout=PATIENCE_S)


@call
def litellm_chat(to: Clients) -> Any:
    return _litellm(to, tools=[TOOL])


@call
def litellm_stream_of_vllm(to: Clients) -> Any:
    return events_of(_litellm(to, "hosted_vllm", stream=True, stream_options={"include_usage": True}))


@call
def litellm_message(to: Clients) -> Any:
    return _litellm(to, "anthropic")


@call
def litellm_text(to: Clients) -> Any:
    return _litellm(to, "text-completion-openai")


@call
def litellm_chat_in_async(to: Clients) -> Any:
    import litellm

    async def ask() -> Any:
        return await litellm.acompletion(
            messages=USER, api_base=f"{to.url}/v1", api_key="sk-none", **{**ALWAYS, "model": f"openai/{NAME}"}
        )

    return asyncio.run(ask())


@call
def litellm_model_that_is_not_there(to: Clients) -> Any:
    return _litellm(to, model="other")


@call
def litellm_chat_that_is_too_long(to: Clients) -> Any:
    return _litellm(to, messages=[{"role": "user", "content": LARGE}])
