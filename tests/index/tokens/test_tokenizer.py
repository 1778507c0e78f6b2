"""Tokens of text and of chats: those that vLLM's own server makes, and one line for what it cannot be."""

from __future__ import annotations

import contextlib
import json
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import ConfigError
from kvpool.index import Chat
from kvpool.index.client.calls import lookup_call
from kvpool.index.front.inference_request import CHAT, read_request
from kvpool.index.prompt import Prompt
from kvpool.index.protocol.messages import decode_prompt
from kvpool.index.tokens.tokenizer import Tokenizer
from kvpool.v1 import index_pb2 as pb
from tests.support import chat_shapes
from tests.support.prompts import BODIES, NAMES, SHAPES, TEMPLATES, TEXTS, TOOLS, USER
from tests.support.tiny_tokenizer import write_tokenizer


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """The library once, without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        assert transformers.AutoTokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def vllm_tokens(vllm_server: Any) -> dict[tuple[str, str], Any]:
    """What vLLM's server makes of each body with each template, and of each text; None: it refuses."""
    return dict(zip(NAMES, vllm_server["tokens"], strict=True))


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_has_the_tokens_that_vllm_gives_it(
    template: str, vllm_tokens: dict[tuple[str, str], list[int]], tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load("m", str(write_tokenizer(tmp_path, TEMPLATES[template])))
    for name, body in BODIES.items():
        chat = Chat.of_request(body)
        assert list(tokenizer.of_chat(chat)) == vllm_tokens[template, name], name
        sent = lookup_call(Prompt("m", chat=chat)).request.SerializeToString()
        received = decode_prompt(pb.LookupRequest.FromString(sent)).chat
        assert isinstance(received, Chat)
        assert list(tokenizer.of_chat(received)) == vllm_tokens[template, name], name
    assert len({tuple(vllm_tokens[template, name]) for name in BODIES}) > 5


@pytest.mark.parametrize("value", [None, 5, "a", [], {}, ["a"], {"a": 1}, [{}], True, 1.5, "\ud800", 10**30])
def test_a_value_of_any_kind_in_any_place_has_tokens_or_one_line(value: Any, folder: Path) -> None:
    """As ``{"tools": 5}``: of another kind than its field's, it is the caller's fault, and none of ours."""
    function = {"name": "f", "description": "d", "parameters": {"a": 1}, "strict": True}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    whole = {
        "model": "m",
        "messages": [
            {"role": "assistant", "content": "x", "reasoning": "r", "tool_calls": [call]},
            {"role": "tool", "content": ["a", {"type": "text", "text": "b"}], "tool_call_id": "1"},
            {"role": "developer", "content": "x", "name": "n", "tools": []},
        ],
        "tools": [{"type": "function", "function": function, "defer_loading": True}],
        "chat_template_kwargs": {"enable_thinking": True},
        "reasoning_effort": "low",
        "documents": [{"a": "b"}],
        "kv_transfer_params": {"a": 1},
        "cache_salt": "s",
    }
    tokenizer = Tokenizer.load("m", str(folder))
    for body in _with(whole, value):
        with contextlib.suppress(ConfigError):
            prompt = read_request(CHAT, json.dumps(body).encode()).prompt
            assert prompt is None or (isinstance(prompt.chat, Chat) and tokenizer.of_chat(prompt.chat))


def _with(whole: Any, value: Any) -> Iterator[Any]:
    """Copies of it, with this value in each place."""
    yield value
    for at in whole if isinstance(whole, dict) else range(len(whole)) if isinstance(whole, list) else ():
        for one in _with(whole[at], value):
            copy = whole.copy()
            copy[at] = one
            yield copy


def test_chats_of_all_shapes_have_the_tokens_that_vllm_gives_them_or_none(
    vllm_tokens: dict[tuple[str, str], Any], tmp_path: Path
) -> None:
    """None: a worker is asked for them."""
    tokenizers = {
        name: Tokenizer.load("m", str(write_tokenizer(tmp_path / name, source)))
        for name, source in chat_shapes.TEMPLATES.items()
    }
    equal: Counter[str] = Counter()
    for number, (template, body) in enumerate(SHAPES):
        theirs = vllm_tokens["shape", str(number)]
        try:
            made = list(tokenizers[template].of_chat(Chat.of_request(body)))
        except ConfigError:
            continue
        if theirs is not None:
            assert made == theirs, json.dumps(body)
            equal[template] += 1
    assert sum(equal.values()) > len(SHAPES) * 0.7
    assert equal.keys() == chat_shapes.TEMPLATES.keys()


@pytest.mark.parametrize(
    ("file", "fields", "says"),
    [
        (
            "config.json",
            {"architectures": ["DeepseekV32ForCausalLM"]},
            "vLLM has code for DeepseekV32ForCausalLM",
        ),
        ("config.json", {"architectures": ["GptOssForCausalLM"]}, "vLLM has code for GptOssForCausalLM"),
        ("tekken.json", {"version": 1}, "vLLM has code for Mistral's tokenizers"),
        ("chat_template.json", {"chat_template": "x"}, "chat_template.json differs from the template"),
    ],
)
def test_chats_that_vllm_renders_otherwise_are_left_to_workers(
    file: str, fields: dict[str, Any], says: str, tmp_path: Path
) -> None:
    folder = write_tokenizer(tmp_path)
    path = folder / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | fields))
    tokenizer = Tokenizer.load("m", str(folder))
    with pytest.raises(ConfigError, match=f"chats of m are rendered by its workers: .*{says}"):
        tokenizer.of_chat(Chat([USER]))
    if file != "tekken.json":
        assert tokenizer.of_text("x")


def test_text_has_the_tokens_that_vllm_gives_it(
    folder: Path, vllm_tokens: dict[tuple[str, str], list[int]]
) -> None:
    tokenizer = Tokenizer.load("m", str(folder))
    for text in TEXTS:
        assert list(tokenizer.of_text(text)) == vllm_tokens["text", text]
    assert tokenizer.of_text("x")[0] == 0, "the token that the tokenizer adds"


def test_any_thread_may_ask(folder: Path) -> None:
    tokenizer = Tokenizer.load("m", str(folder))
    chat = Chat([{"role": "user", "content": "the user asks " * 50}])
    expected, found = (tokenizer.of_chat(chat), tokenizer.of_text("x y " * 100)), []

    def ask() -> None:
        for _ in range(30):
            found.append((tokenizer.of_chat(chat), tokenizer.of_text("x y " * 100)) == expected)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 180


def test_where_there_is_no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="no tokenizer for m in") as caught:
        Tokenizer.load("m", str(tmp_path))
    assert "\n" not in str(caught.value)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="no tokenizer for m in"):
        Tokenizer.load("m", str(tmp_path))


@pytest.mark.parametrize(
    ("chat", "says"),
    [
        (Chat([]), "refuses this chat"),
        (Chat([{"content": "x"}]), "a message has a role"),
        (Chat([{"role": "user", "content": 7}]), "text or a list of parts"),
        (Chat([{"role": "user", "content": [{"type": "image_url"}]}]), "send what is not as token ids"),
        (Chat([USER], template_options={"tokenize": True}), "cannot hold tokenize"),
        (Chat([USER], template_options={"chat_template": "x"}), "cannot hold chat_template"),
        (Chat([USER], tools=[{"type": "function"}]), "a tool is a function with a name"),
        (Chat([{"role": "assistant", "tool_calls": [{"type": "custom"}]}]), "a tool call is of a function"),
        (Chat([{"role": "user", "content": "\ud800"}]), "not Unicode text"),
        (Chat([USER], tools=[{"function": {"name": "f"}, "defer_loading": 1}]), "are true or false"),
        (Chat([{"role": "developer", "content": "x", "tools": TOOLS}]), "a developer's own tools"),
        (Chat([{"role": "user", "content": [{"type": "text", "text": "x", "uuid": "1"}]}]), "more than text"),
        (Chat([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}]),
         "the arguments of a tool call cannot be read"),
    ],
)  # fmt: skip
def test_chats_that_make_no_sense(folder: Path, chat: Chat, says: str) -> None:
    tokenizer = Tokenizer.load("m", str(folder))
    with pytest.raises(ConfigError, match=says) as caught:
        tokenizer.of_chat(chat)
    assert "\n" not in str(caught.value)


def test_a_template_that_refuses_says_why(tmp_path: Path) -> None:
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('begin with a user') }}{% endif %}x"
    tokenizer = Tokenizer.load("m", str(write_tokenizer(tmp_path, template)))
    with pytest.raises(ConfigError, match="the chat template of m refuses this chat: begin with a user"):
        tokenizer.of_chat(Chat([{"role": "tool", "content": "x"}]))


def test_a_tokenizer_without_a_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load("m", str(write_tokenizer(tmp_path, None)))
    assert tokenizer.of_text("x")
    with pytest.raises(ConfigError, match="the tokenizer of m has no chat template"):
        tokenizer.of_chat(Chat([{"role": "user", "content": "x"}]))


def test_a_chat_of_a_request() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "documents": [{"text": "y"}]}
    chat = Chat.of_request({**body, "chat_template_kwargs": {"a": 1}, "add_generation_prompt": None})
    assert chat == Chat(body["messages"], TOOLS, True, {"documents": [{"text": "y"}], "a": 1})
    assert Chat.of_request(body["messages"]) == Chat(body["messages"])
    for wrong in ("x", {}, {"messages": 3}, 3, None):
        with pytest.raises(ConfigError, match="a chat is"):
            Chat.of_request(wrong)
