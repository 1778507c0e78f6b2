"""What of a request an engine reads: its path, its body, its model and its prompt; and what it does not read."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvpool.errors import ConfigError
from kvpool.index.front.inference_request import (
    BATCH,
    CHAT,
    COMPLETIONS,
    MAX_HEADS_NBYTES,
    engine_json,
    engine_path,
    named_model,
    prompt_key,
    read_request,
)
from kvpool.index.prompt import Chat, Session
from tests.support.deadlines import eventually

SPEECH = "/v1/audio/transcriptions"


def part(head: bytes, value: bytes = b"n") -> bytes:
    return b"--x\r\n" + head + b"\r\n\r\n" + value + b"\r\n"


FIELD = b'Content-Disposition: form-data; name="model"'
OTHER = part(b'content-disposition: form-data; name="file"; filename="model.wav"', b'name="model"\r\n\r\nm')
END = b"--x--\r\n"
LIKE_PARTS = b"\r\n--xy\r\n" + FIELD + b"\r\n\r\nm"


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        ("/v1/completions", b'{"prompt": {"model": "m"}, "model": "n"}', "n"),
        ("/v1/completions", b'{"model": "m", "model": "n"}', "n"),
        ("/v1/completions", b'{"model": 7}', ""),
        ("/v1/completions", b'{"model": null}', ""),
        ("/v1/completions", b'{"model": "n"', ""),
        ("/v1/completions", b'{"model": "n", "prompt": ' + b"[" * 100_000, ""),
        ("/v1/completions", b'{"model": "\xff"}', ""),
        ("/v1/completions", b"", ""),
        ("/v1/models/n", b'{"model": "m"}', "n"),
        ("/v1/models/org/n?model=m", b"", "org/n"),
        ("/v1/models/org%2Fn", b"", "org/n"),
        ("/v1/models/%FF", b"", "\ufffd"),
        ("/v1/models", b"", ""),
        (SPEECH, OTHER + part(FIELD) + END, "n"),
        (SPEECH, part(FIELD + b"\r\ncontent-type: text/plain") + OTHER + END, "n"),
        (SPEECH, part(b"content-type: text/plain\r\ncontent-disposition: form-data; name=model; x=y") + END, "n"),
        (SPEECH, OTHER + END, ""),
        (SPEECH, part(FIELD, b"m") + part(FIELD) + END, "n"),
        (SPEECH, part(FIELD) + part(b'content-disposition: form-data; name="f"; filename="x; name=model"') + END, "n"),
        (SPEECH, part(b'content-disposition: form-data; name="f"; filename="x; name=model; y"', b"m") + END, ""),
        (SPEECH, part(b'content-disposition: form-data; name="a\\"; name=model; y"', b"m") + END, ""),
        (SPEECH, part(FIELD + b'; filename="model"', b"m") + END, ""),
        (SPEECH, part(b"x: y\r\ncontent-disposition: form-data; x=y; name=model\r\nx: y") + END, "n"),
        (SPEECH, part(FIELD) + part(FIELD), ""),
        (SPEECH, part(b'content-disposition: form-data; name="models"') + END, ""),
        (SPEECH, part(FIELD), ""),
        (SPEECH, part(FIELD, b"") + END, ""),
        (SPEECH, part(FIELD, b"n" * 4096) + END, "n" * 4096),
        (SPEECH, part(FIELD, b"n" * 4097) + END, ""),
        (SPEECH, b"\r\n\r\n" + OTHER + part(FIELD) + END, "n"),
        (SPEECH, b"x\r\n" + OTHER + part(FIELD) + END, ""),
        (SPEECH, part(b'content-disposition: form-data; name="granularities[]"') * 998 + part(FIELD) + END, "n"),
        (SPEECH, part(b"x: " + b"y" * 4000 + b"\r\n" + FIELD) + OTHER + END, "n"),
        (SPEECH, part(b"x: " + b"y" * MAX_HEADS_NBYTES + b"\r\n" + FIELD) + END, ""),
        (SPEECH, part(b"x: y") * (MAX_HEADS_NBYTES // 8) + part(FIELD) + END, ""),
        (SPEECH, part(FIELD, b"\xe9") + END, "\xe9"),
        (SPEECH, part(FIELD, b"\xc3\xa9") + END, "\xe9"),
        (SPEECH, part(FIELD) + part(b'content-disposition: form-data; name="f"', LIKE_PARTS) + END, "n"),
        (SPEECH, part(FIELD) + part(FIELD, b"m").replace(b"--x", b"--x ") + END, ""),
        (SPEECH, part(b"content-disposition: form-data; name=<model>") + END, ""),
        (SPEECH, part(b"content-disposition: form-data; name*=utf-8''model") + END, ""),
        (SPEECH, b"--" + b"x" * 100 + b"\r\n", ""),
        (SPEECH, b"--\r\n\r\n\r\n--", ""),
        (SPEECH, b"--", ""),
    ],
)  # fmt: skip
def test_what_names_a_model(path: str, body: bytes, model: str) -> None:
    assert named_model(engine_path(path), engine_json(body)) == model


@pytest.mark.parametrize(
    ("field", "is_known"),
    [
        ('"suffix": "x"', False),
        ('"kv_transfer_params": {"prompt_token_ids": [1]}', False),
        ('"kv_transfer_params": {"do_remote_decode": true}', True),
        ('"kv_transfer_params": null', True),
        ('"stream": true', True),
    ],
)
def test_a_prompt_that_an_engine_changes_has_no_tokens_here(field: str, is_known: bool) -> None:
    request = read_request("/v1/completions", f'{{"model": "m", "prompt": "x", {field}}}'.encode())
    assert (request.prompt is not None) == is_known


PROMPT = '{"model": "m", "prompt": "é世"}'
ENCODED = {
    "utf-8": PROMPT.encode(), "utf-8-sig": PROMPT.encode("utf-8-sig"), "utf-16": PROMPT.encode("utf-16"),
    "utf-16-le": PROMPT.encode("utf-16-le"), "utf-16-be": PROMPT.encode("utf-16-be"),
    "utf-32": PROMPT.encode("utf-32"), "utf-32-le": PROMPT.encode("utf-32-le"),
    "utf-32-be": PROMPT.encode("utf-32-be"),
}  # fmt: skip


@pytest.mark.parametrize("body", ENCODED.values(), ids=ENCODED.keys())
def test_a_body_is_read_in_each_encoding_that_an_engine_reads(body: bytes) -> None:
    assert json.loads(body) == json.loads(PROMPT)
    request = read_request(COMPLETIONS, engine_json(body))
    assert request.prompt is not None
    assert (request.model, request.prompt.text) == ("m", "é世")
    assert named_model(COMPLETIONS, engine_json(body)) == "m"


@pytest.mark.parametrize("body", [b"\0", b"\xff\xfe{", b"\0{\xd8\0\0}", b"\xff\xfe\0\0{", b"{}", b""])
def test_a_body_that_no_engine_reads_is_read_as_it_is(body: bytes) -> None:
    assert engine_json(body) == body


PARTS = (
    "name", "filename", "=", '"', "model", "; ", ";", "\\", " ", 'name="model"', 'filename="x; name=model; y"', "x",
    "NAME", "\t", "\xe9", "*", "<", ">",
)  # fmt: skip


@pytest.mark.vllm
@given(st.lists(st.sampled_from(PARTS), max_size=10).map("".join))
def test_the_field_of_a_part_is_the_one_that_engines_read(written: str) -> None:
    from python_multipart.multipart import parse_options_header

    head = f"form-data; {written}"
    _, read = parse_options_header(head.strip(" \t").encode("latin-1"))
    is_model = read.get(b"name") == b"model" and b"filename" not in read
    body = part(b"Content-Disposition: " + head.encode("latin-1")) + END
    assert (named_model(SPEECH, body) == "n") == is_model


@pytest.mark.parametrize("hostile", [b";", b'";', b'\\";', b'a="b";', b"a;"])
def test_the_head_of_a_part_takes_a_time_by_its_length(hostile: bytes) -> None:
    """A form of hostile heads is read within a moment: a square of their length would be minutes."""
    head = b'content-disposition: form-data; x="' + hostile * ((MAX_HEADS_NBYTES - 200) // len(hostile))
    assert named_model(SPEECH, part(head) + END) == ""


UNREADABLE = {
    "a name": b'"a\xff": 1', "text": b'"a": "\xff"', "a name of a map": b'"a": {"\xff": 1}',
    "half a pair": b'"a": "\xed\xa0\x80"', "a cut character": b'"a": "\xe4\xb8"',
}  # fmt: skip


@pytest.mark.parametrize("field", UNREADABLE.values(), ids=UNREADABLE.keys())
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, BATCH, "/v1/responses", "/v1/embeddings"])
def test_a_body_that_is_no_text_is_not_read(path: str, field: bytes) -> None:
    messages = (
        b'[[{"role": "user", "content": "x"}]]' if path == BATCH else b'[{"role": "user", "content": "x"}]'
    )
    with pytest.raises(ConfigError, match="the body cannot be read"):
        read_request(path, b'{"model": "m", "prompt": "x", "messages": ' + messages + b", " + field + b"}")


BYTES = st.recursive(
    st.sampled_from(
        [b"1", b"null", b'"m"', b'"\xff"', b'"\\ud800"', b'"\\ud83d\\ude42"', b"[", b"1e999", b"-", b'"\xc3\xa9"']
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda some: b"[" + b",".join(some) + b"]"),
        st.lists(st.tuples(st.sampled_from([b'"role"', b'"content"', b'"\xfe"', b'"a"', b""]), inner), max_size=3).map(
            lambda some: b"{" + b",".join(name + b":" + value for name, value in some) + b"}"
        ),
    ),
    max_leaves=6,
)  # fmt: skip
NAMES = (
    b"model", b"prompt", b"messages", b"tools", b"chat_template_kwargs", b"cache_salt", b"session_id", b"vllm_xargs",
    b"kv_transfer_params", b"prompt_cache_key", b"unknown", b"\xff", b"\\ud800",
)  # fmt: skip


@given(
    path=st.sampled_from([COMPLETIONS, CHAT, BATCH, "/v1/responses", "/v1/embeddings", SPEECH]),
    fields=st.lists(st.tuples(st.sampled_from(NAMES), BYTES), max_size=6),
    mess=st.sampled_from([*[b""] * 9, b"\xff", b"--x\r\n", b"\xef\xbb\xbf"]),
    cut=st.sampled_from([*[0] * 9, 1, 2, 3]),
)
@example(CHAT, [(b"\xff", b"1")], b"", 0)
def test_whatever_a_body_holds_it_is_read_whole_or_not_at_all(
    path: str, fields: list[tuple[bytes, bytes]], mess: bytes, cut: int
) -> None:
    fields = [(b"model", b'"m"'), (b"messages", b"[]"), *fields]
    body = mess + b"{" + b",".join(b'"' + name + b'":' + value for name, value in fields) + b"}"
    body = engine_json(body[: len(body) - cut])
    named_model(path, body)
    with contextlib.suppress(ConfigError):
        request = read_request(path, body)
        assert request.tokens_estimate > 0
        assert len(prompt_key(request.path, request.body)) == 16


BOTH = [{"role": "user", "content": "one"}], [{"role": "user", "content": "two"}]


def test_a_batch_of_chats_has_the_tokens_of_its_first_one() -> None:
    whole = json.dumps({"model": "m", "messages": BOTH, "top_p": 0.5, "cache_salt": "s"}).encode()
    request = read_request(BATCH, whole)
    assert (request.path, request.received, request.cache_salt) == (CHAT, whole, "s")
    assert request.prompt is not None
    assert request.prompt.chat == Chat(BOTH[0])
    assert json.loads(request.body) == {"model": "m", "messages": BOTH[0], "top_p": 0.5, "cache_salt": "s"}
    templated = read_request(BATCH, json.dumps({"messages": BOTH, "chat_template": "x"}).encode())
    assert (templated.prompt, json.loads(templated.body)["messages"]) == (None, BOTH[0])


@pytest.mark.parametrize("messages", ["3", "[3]", "{}", "[]x", "null"])
def test_a_batch_without_chats_is_not_read(messages: str) -> None:
    with pytest.raises(ConfigError, match="the body cannot be read"):
        read_request(BATCH, f'{{"messages": {messages}}}'.encode())


@pytest.mark.parametrize("model", ["", '"model": "",', '"model": null,'])
def test_a_request_without_a_model_is_for_the_only_one(model: str) -> None:
    body = f'{{{model} "prompt": "x"}}'.encode()
    assert read_request(COMPLETIONS, body, default=lambda: "only").prompt.model == "only"  # type: ignore[union-attr]
    assert read_request(COMPLETIONS, body.replace(b'""', b'"m"')).model in ("", "m")


# ---- beside the server that vLLM uses

ROUTED = {
    "/v1/completions": "/v1/completions", "/v1/completions?a=/b": "/v1/completions",
    "/v1/%63ompletions": "/v1/completions", "/v1%2Fcompletions": "/v1/completions",
    "/v1/%2563ompletions": None, "//v1/completions": None, "/v1//completions": None, "/v1/./completions": None,
    "/v1/completions/": None, "/V1/completions": None, "/v1/completions;x": None, "/v1/completions%3Fx": None,
    "/v1/%FFcompletions": None, "/v1/completions%00": None,
}  # fmt: skip


@pytest.mark.vllm
def test_paths_and_bodies_are_read_as_uvicorn_and_starlette_read_them() -> None:
    """``None``: the server routes it nowhere, or answers with a redirect."""
    with served() as port:
        for target, path in ROUTED.items():
            status, said = sent(port, target, ENCODED["utf-8"])
            assert (said.get("path") if status == 200 else None) == path, target
            assert (engine_path(target) == "/v1/completions") == (path is not None), target
        for body in ENCODED.values():
            assert sent(port, "/v1/completions", body)[1]["prompt"] == "é世"


@contextlib.contextmanager
def served() -> Iterator[int]:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def completions(request: Request) -> JSONResponse:
        return JSONResponse({"path": request.scope["path"], **await request.json()})

    app = Starlette(routes=[Route("/v1/completions", completions, methods=["POST"])])
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, loop="asyncio", log_level="error"))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        assert eventually(lambda: server.started)
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(60)
        listening.close()


def sent(port: int, target: str, body: bytes) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", target, body, {"content-type": "application/json"})
        reply = connection.getresponse()
        said = reply.read()
        return reply.status, json.loads(said) if reply.status == 200 else {}
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("fields", "header", "named", "stays"),
    [
        ({"session_id": "b", "vllm_xargs": {"session_id": "x"}, "prompt_cache_key": "k"}, "h", "b", True),
        ({"vllm_xargs": {"session_id": "x"}, "prompt_cache_key": "k"}, "h", "h", True),
        ({"vllm_xargs": {"session_id": "x"}, "prompt_cache_key": "k"}, None, "x", True),
        ({"session_id": "", "vllm_xargs": {"session_id": 7}, "prompt_cache_key": "k"}, "", "k", False),
        ({"session_id": None, "vllm_xargs": None}, None, None, False),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/responses", "/v1/embeddings"])
def test_a_session_is_named_as_engines_read_it(
    path: str, fields: dict[str, Any], header: str | None, named: str | None, stays: bool
) -> None:
    body = json.dumps({"model": "m", "prompt": "x", "messages": [], **fields}).encode()
    session = read_request(path, body, "t", session_id=header).session
    assert session == (Session.of("t", "m", named) if stays else Session.of("t", "m", None, named))


def test_a_session_changes_no_token() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    named = {**body, "session_id": "s", "prompt_cache_key": "k", "vllm_xargs": {"session_id": "s"}}
    first, second = (json.dumps(one).encode() for one in (body, named))
    assert prompt_key(CHAT, first) == prompt_key(CHAT, second)
    assert read_request(CHAT, first).prompt == read_request(CHAT, second).prompt


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.sampled_from(["", "a", "none"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=3,
)
OTHERS = (
    "add_generation_prompt", "chat_template_kwargs", "continue_final_message", "documents", "reasoning_effort", "tools",
    "temperature", "response_format", "unknown",
)  # fmt: skip


@given(
    fields=st.lists(st.tuples(st.sampled_from(OTHERS), JSON), max_size=5),
    messages=st.lists(st.lists(JSON, max_size=2), max_size=2),
    escaped=st.booleans(),
)
def test_a_chat_has_the_fields_of_its_body(
    fields: list[tuple[str, Any]], messages: list[Any], escaped: bool
) -> None:
    name = '"mess\\u0061ges"' if escaped else '"messages"'
    parts = [f"{json.dumps(name)}:{json.dumps(value)}" for name, value in fields]
    for place, value in enumerate(messages):  # twice: the last counts
        parts.insert(2 * place, f"{name}:{json.dumps(value)}")
    body = ("{" + ",".join([*parts, '"model": "m"']) + "}").encode()
    try:
        expected: Chat | None = Chat.of_request(msgspec.json.decode(body))
    except ConfigError:
        expected = None
    try:
        prompt = read_request(CHAT, body).prompt
    except ConfigError:
        assert expected is None
    else:
        assert prompt is not None
        assert prompt.chat == expected
