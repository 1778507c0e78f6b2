"""Texts and template options of callers, against an index in a process of its own: others are answered meanwhile, and
its memory stays within ``--max-memory``.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.index_process import Index, peak_nbytes, running
from tests.support.tiny_tokenizer import write_tokenizer

WAIT_S = 120.0
MIB = 1 << 20
TWICE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), TWICE)
    worker = "w=tcp://127.0.0.1:9,model=m,block=16,address=http://127.0.0.1:9"
    options = ("--max-memory", "1GiB", "--no-scrape", "--http", "127.0.0.1:0")
    with running(*options, "--tokenizer", f"m={folder}", "--worker", worker) as process:
        assert ask(process, {"text": "hello"})[0] == 200
        yield process


def ask(index: Index, prompt: dict[str, Any]) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", index.http_port, timeout=WAIT_S)
    try:
        body = json.dumps({"scope": {"model": "m"}, **prompt})
        connection.request("POST", "/v1/lookup", body, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def test_others_are_answered_while_a_text_without_blanks_is_made_into_tokens(index: Index) -> None:
    answers: list[tuple[int, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(ask(index, {"text": "x" * 1_200_000})))
    asking.start()
    answered = 0
    while asking.is_alive():
        assert ask(index, {"text": "hello"})[0] == 200
        answered += asking.is_alive()
    asking.join()
    assert answers[0][0] == 200
    assert answered > 3


def test_template_options_that_multiply_are_refused_before_they_take_memory(index: Index) -> None:
    before = peak_nbytes(index)
    message = {"role": "user", "content": ["x"]}
    options = json.dumps({"eos_token": "e" * (MIB // 2)})
    chat = {"messages": [message] * 800, "template_options_json": options}
    status, answer = ask(index, {"chat": chat})
    assert status in (400, 429)
    assert "the chat template makes more than" in answer["error"] or "there is no room" in answer["error"]
    assert peak_nbytes(index) - before < 128 * MIB
    chat["template_options_json"] = json.dumps({"eos_token": "e"})
    assert ask(index, {"chat": chat})[0] == 200
