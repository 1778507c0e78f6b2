"""Two workers that ``kvpool vllm`` starts, with nothing but a pool and a model, share a hit. The pool comes late."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import child_environment, free_ports, kill_all_but_trackers
from tests.support.api_server import BLOCK_TOKENS, NAME, START_S
from tests.support.deadlines import answers, eventually
from tests.support.engine_forks import ONE_THREAD
from tests.support.engines import prompt
from tests.support.servers import Server, started

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

PROMPT = prompt(7, 1200)
SMALL = [
    "--dtype",
    "float32",
    "--enforce-eager",
    "--max-model-len",
    "2048",
    "--block-size",
    str(BLOCK_TOKENS),
]


@contextlib.contextmanager
def worker(name: str, folder: Path, pool: str, model: Path, port: int) -> Iterator[str]:
    """Its URL, until the end of the block."""
    command = [
        str(Path(sys.executable).with_name("kvpool")), "vllm", "--pool", pool, "--", "serve", str(model),
        "--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port), *SMALL,
        "--kv-cache-memory-bytes", "128M",
    ]  # fmt: skip
    # What a lookup takes on a busy machine is no fault of the test.
    settings = {"KVPOOL_START_WITHOUT_POOL": "1", "KVPOOL_LOOKUP_TIMEOUT_S": "20", "KVPOOL_COST_GATE": "0"}
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            env=child_environment({**ONE_THREAD, **settings}),
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        assert eventually(lambda: answers(f"{url}/health", process, log), within_s=START_S), log.read_text()[
            -3000:
        ]
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        kill_all_but_trackers(process.pid)
        process.wait()


def asked(url: str) -> dict[str, Any]:
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def cached(answer: dict[str, Any]) -> int:
    return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def test_two_workers_share_a_hit_in_a_pool_that_comes_after_them(llama: Path, tmp_path: Path) -> None:
    server = Server("valkey-server", tmp_path)
    first_port, second_port = free_ports(2)
    with worker("first", tmp_path, server.url, llama, first_port) as first:
        computed = asked(first)
        assert cached(computed) == 0, "there is no pool yet"
        with started(server), worker("second", tmp_path, server.url, llama, second_port) as second:
            # The first one holds the blocks, and stores them when it looks them up and the pool misses them.
            whole = len(PROMPT) // BLOCK_TOKENS
            assert eventually(lambda: asked(first) and server.client.dbsize() >= whole, within_s=300)
            loaded = asked(second)
            assert cached(loaded) == whole * BLOCK_TOKENS
            assert loaded["choices"] == computed["choices"]
            announced = [name for name in server.client.keys("*") if b":worker:" in name]
            assert eventually(lambda: len(server.client.keys("*:worker:*")) >= 2), announced
    said = (tmp_path / "first.log").read_text().splitlines()[0]
    assert said.startswith(f"kvpool runs: KVPOOL_POOL={server.url} ")
