"""Two engines that split the work: one computes prompts and stores them, the other loads them and generates.

They are OpenAI-compatible servers behind Envoy with an index, by the recipe of ``docs/how-to/prefill-decode.md``.
"""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from demo.engine_process import connector_config, free_ports
from demo.index_process import IndexProcess
from kvpool import IndexClient
from tests.compose.traffic import words
from tests.support import api_server, envoy
from tests.support.api_server import ApiServer
from tests.support.deadlines import eventually
from tests.support.engines import BLOCK_TOKENS, GENERATED_TOKENS, PATIENT
from tests.support.recipes import split_chat, split_front

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


PROMPTS = [words(f"of two engines, {number}", 700 + 130 * number) for number in range(3)]


def asked(text: str) -> dict[str, Any]:
    return {
        "model": api_server.NAME, "messages": [{"role": "user", "content": text}],
        "max_completion_tokens": GENERATED_TOKENS, "temperature": 0.0,
    }  # fmt: skip


def with_chats(model: Path, folder: Path) -> Path:
    """The model with a chat template, in a folder of its own."""
    shutil.copytree(model, folder)
    settings = folder / "tokenizer_config.json"
    template = "{% for message in messages %}w5 {{ message.content }} {% endfor %}w6"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": template}))
    return folder


class Split:
    """An engine that prefills and one that decodes, behind Envoy and an index; ``in_pool``: their pool's records."""

    def __init__(self, llama: Path, folder: Path, parts: ExitStack) -> None:
        self._pool, model = folder / "pool", with_chats(llama, folder / "model")
        self.urls, self.names = [], []
        for name, role in (("prefills", "kv_producer"), ("decodes", "kv_consumer")):
            config = {**connector_config(f"file://{self._pool}", PATIENT), "kv_role": role}
            engine = ApiServer(name, model, *free_ports(3), config)
            self.urls.append(parts.enter_context(engine.running(folder)))
            self.names.append(f"127.0.0.1:{engine.events}")
        picker, listen, admin = free_ports(3)
        options = ("--ext-proc", f"127.0.0.1:{picker}", "--tokenizer", f"{api_server.NAME}={model}")
        index = parts.enter_context(IndexProcess(folder, f"file://{self._pool}", options))
        groups = [[url.removeprefix("http://")] for url in self.urls]
        config_of_front = split_front(*groups, f"127.0.0.1:{picker}", listen, admin)
        front = parts.enter_context(envoy.started(folder, config_of_front, listen=listen, admin=admin))
        known = parts.enter_context(IndexClient(index.address, 60))
        assert eventually(lambda: len(known.workers()) == 2)
        for cluster in ("workers", "prefill", "picker"):
            assert eventually(lambda cluster=cluster: front.healthy(cluster) == 1), cluster  # type: ignore[misc]
        self.url = front.url

    def in_pool(self) -> int:
        return len(list(self._pool.glob("blocks/*/*")))


def test_a_front_sends_prompts_to_one_engine_and_answers_from_the_other(llama: Path, tmp_path: Path) -> None:
    with ExitStack() as parts:
        split = Split(llama, tmp_path, parts)
        decodes = split.urls[1]
        chats = f"{decodes}/v1/chat/completions"
        expected = [httpx.post(chats, json=asked(text), timeout=300).json() for text in PROMPTS]
        blocks = [one["usage"]["prompt_tokens"] // BLOCK_TOKENS for one in expected]
        assert split.in_pool() == 0, "the engine that decodes stores nothing"
        httpx.post(f"{decodes}/reset_prefix_cache", timeout=60).raise_for_status()

        served_by: list[str] = []

        def heard(response: httpx.Response) -> None:
            served_by.append(response.headers["x-kvpool-worker"])
            if (
                "x-kvpool-stage" in response.request.headers
            ):  # an answer may come before its blocks are stored
                stored = sum(blocks[: len(served_by) // 2 + 1])
                assert eventually(lambda: split.in_pool() == stored)

        http = parts.enter_context(httpx.Client(event_hooks={"response": [heard]}))
        client = openai.OpenAI(base_url=f"{split.url}/v1", api_key="none", http_client=http)
        for text, one, whole in zip(PROMPTS, expected, blocks, strict=True):
            answer = split_chat()(client, **asked(text)).model_dump()
            assert answer["choices"][0]["message"]["content"] == one["choices"][0]["message"]["content"]
            loaded = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert loaded == whole * BLOCK_TOKENS, "all whole blocks come from the pool"
        assert served_by == split.names * len(PROMPTS)
