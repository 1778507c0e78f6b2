"""Names and adapters of a real vLLM: learnt from its ``/v1/models``, and its blocks found by them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import free_ports
from kvpool.index import Publisher, Worker
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.follow.subscriber import Subscriber
from kvpool.key.hashing import seed_id
from tests.support.api_server import BLOCK_TOKENS, NAME, ApiServer
from tests.support.deadlines import eventually
from tests.support.engines import connector_config, prompt, write_adapter
from tests.support.fleets import serving
from tests.support.http_client import Reply, get, post
from tests.support.names import reading

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("grpc_started")]

PROMPT = prompt(1, 700)
OPTIONS = (
    "--skip-tokenizer-init", "--served-model-name", NAME, "gpt-4", "--enable-lora", "--max-lora-rank", "8",
)  # fmt: skip


def test_requests_by_each_name_and_adapter_find_their_blocks(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    port, events, replay = free_ports(3)
    pool = connector_config(f"file://{tmp_path}/pool", {})
    adapter = {"lora_name": "sql", "lora_path": str(write_adapter(tmp_path / "sql", llama, 1))}
    with ApiServer("a", llama, port, events, replay, pool, OPTIONS).running(tmp_path) as url:
        publisher = Publisher(0, f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}")
        worker = Worker("a", NAME, BLOCK_TOKENS, seed_id(None), (publisher,), address=url)
        fleet = Fleet(feed=Subscriber())
        try:
            fleet.add(worker, "flag")
            with serving(fleet, place={"timeout_s": 60}, proxy={}) as index, reading(fleet):
                front, knows = f"http://{index.proxy}", fleet.names.knows
                assert eventually(lambda: knows("default", "gpt-4"))
                assert ask(front, {"model": "sql"}).status == 404
                assert post(url, adapter, "/v1/load_lora_adapter").status == 200
                assert eventually(lambda: knows("default", "sql"))
                for name in ("gpt-4", "sql"):
                    assert ask(front, {"model": name}).headers["x-kvpool-reason"] == "load", name
                    assert eventually(lambda name=name: matched(ask(front, {"model": name})) == 5), name
                assert matched(ask(front, {})) == 5
                assert matched(ask(front, {"model": "sql"}, "utf-16", "/v1/%63ompletions")) == 5
                listed = json.loads(get(f"{front}/v1/models").body)["data"]
                assert sorted(one["id"] for one in listed) == ["gpt-4", "sql", NAME]
                assert post(url, adapter, "/v1/unload_lora_adapter").status == 200
                assert eventually(lambda: not knows("default", "sql"))
        finally:
            fleet.close()


def ask(front: str, named: dict[str, Any], encoding: str = "utf-8", path: str = "/v1/completions") -> Reply:
    body = {**named, "prompt": PROMPT, "max_tokens": 2, "detokenize": False}
    return post(front, json.dumps(body).encode(encoding), path)


def matched(reply: Reply) -> int:
    assert reply.status == 200, reply.body
    return int(reply.headers["x-kvpool-matched-blocks"])
