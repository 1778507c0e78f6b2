"""What is started once: gRPC, which keeps a thread and descriptors of its own for the whole process and has them
before anything is counted; and vLLM's own server, in a process of its own, for what it makes of prompts.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def grpc_started() -> None:
    from kvpool import IndexUnavailable
    from kvpool.index.client.async_client import AsyncIndexClient
    from kvpool.index.client.client import IndexClient
    from tests.index.fleets import serving

    async def ask(target: str) -> None:
        async with AsyncIndexClient(target) as client:
            await client.workers(timeout_s=20)

    with serving() as served:
        asyncio.run(ask(served.target))
        with IndexClient(served.target, timeout_s=20) as client:
            client.workers()
    with IndexClient("127.0.0.1:1") as client, pytest.raises(IndexUnavailable):
        client.workers()


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """See ``tests.vllm_server``: tokens of the cases of ``test_tokenizer``, and metrics pages."""
    from tests.index.place.test_tokenizer import CASES
    from tests.index.tiny_tokenizer import write_tokenizer

    folder = str(write_tokenizer(tmp_path_factory.mktemp("server")))
    cases = [(template, kind, {"model": folder, **body}) for template, kind, body in CASES]
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.vllm_server", folder],
        input=json.dumps(cases), capture_output=True, text=True, timeout=240, check=False,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, Any] = json.loads(ended.stdout)
    return found
