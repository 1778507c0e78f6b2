"""Dynamo's frontend in ``python -m benchmarks route``, and its scripted worker: ``python -m
benchmarks.route_dynamo PACKAGES``, with settings as JSON on stdin. ``PACKAGES``: Dynamo's installation.

Dynamo does not forward HTTP: it discovers workers in a folder, and sends them tokens by its own TCP protocol.
It relays KV events from their ZMQ sockets, as for vLLM. Cache, times and events are those of
``benchmarks.route_worker``. An answer begins with the worker's name, because Dynamo passes on no fingerprint.

One event loop, into which Dynamo's threads call.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.route_traffic import BLOCK_TOKENS, MODEL
from benchmarks.route_worker import CHUNK_S, CHUNKS, Worker, serve
from kvpool.errors import ConfigError, KVPoolError

ENDPOINT = "generate"
FOUND_TIMEOUT_S = 30.0
LONGEST_TOKENS = 1 << 20
_KEPT: list[Any] = []  # Dynamo's objects, which work until collected


def installed(peers: Path) -> tuple[Path, Path]:
    """Its interpreter and packages, below the folder of peers' environments. Errors: ``ConfigError``."""
    folder = peers / "dynamo"
    found = sorted(folder.glob("lib/python*/site-packages/dynamo/frontend"))
    if not found:
        raise ConfigError(
            f"there is no frontend of Dynamo in {folder}: make bench-peers makes it, in a clone of kvpool"
        )
    return folder / "bin" / "python", found[0].parents[1].resolve()


def command(python: Path, listen: int) -> list[str]:
    return [
        str(python), "-m", "dynamo.frontend", "--http-host=127.0.0.1", f"--http-port={listen}", "--router-mode=kv",
    ]  # fmt: skip


def environment(folder: Path) -> dict[str, str]:
    """Environment of workers and frontends that meet in ``folder``, without etcd and NATS."""
    return {
        "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(folder / "dynamo"), "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq", "DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1", "DYN_LOG": "warn",
    }  # fmt: skip


def wait_found(url: str, count: int) -> None:
    """Wait until the frontend at ``url`` serves the model with ``count`` workers. Errors: ``KVPoolError``."""
    ends_s = time.monotonic() + FOUND_TIMEOUT_S
    while not _ask(f"{url}/v1/models")["data"] or _workers(url) < count:
        if time.monotonic() > ends_s:
            raise KVPoolError("Dynamo's frontend does not find a worker")
        time.sleep(0.05)


def _workers(url: str) -> int:
    return sum(one["endpoint"] == ENDPOINT for one in _ask(f"{url}/health")["instances"])


def _ask(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=FOUND_TIMEOUT_S) as reply:  # noqa: S310 - loopback
        return json.loads(reply.read())


def words(worker: Worker) -> list[list[int]]:
    """The tokens of each part of its answers, as many parts as ``route_worker``'s."""
    more = CHUNKS - 1 if worker.settings.token_s else 0
    return [worker.tokens(worker.settings.name), *[worker.tokens("text")] * more]


async def answer(worker: Worker, said: list[list[int]], request: Any) -> AsyncIterator[dict[str, Any]]:
    """The answer's parts, at the times of ``route_worker``. ``said``: ``words``."""
    prompt = worker.plan.prompts[request["sampling_options"]["seed"]]
    cached, queued_s, work_s = worker.prefill(prompt)
    async with worker.answering(prompt, queued_s):
        await asyncio.sleep(work_s)
        for tokens in said[:-1]:
            yield {"token_ids": tokens}
            await asyncio.sleep(CHUNK_S)
        yield {
            "token_ids": said[-1], "finish_reason": "stop",
            "completion_usage": {
                "prompt_tokens": prompt.tokens, "completion_tokens": CHUNKS, "total_tokens": prompt.tokens + CHUNKS,
                "prompt_tokens_details": {"cached_tokens": cached},
            },
        }  # fmt: skip


async def join(worker: Worker) -> None:
    """Register the worker, and relay its KV events. The rest are defaults of Dynamo's vLLM worker."""
    from dynamo import llm, runtime

    settings = worker.settings
    joined = runtime.DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    endpoint = joined.endpoint(f"bench.backend.{ENDPOINT}")
    relay = llm.KvEventPublisher(
        endpoint, kv_block_size=BLOCK_TOKENS, zmq_endpoint=f"tcp://127.0.0.1:{settings.ports[1]}",
        enable_local_indexer=True,
    )  # fmt: skip
    handler = partial(answer, worker, words(worker))
    served = asyncio.ensure_future(endpoint.serve_endpoint(handler, graceful_shutdown=False))
    config = llm.ModelRuntimeConfig()
    config.context_length, config.total_kv_blocks = LONGEST_TOKENS, settings.blocks
    config.enable_local_indexer = config.kv_event_publishing_enabled = True
    await llm.register_model(
        llm.ModelInput.Tokens, llm.ModelType.Chat, endpoint, settings.tokenizer, MODEL,
        kv_cache_block_size=BLOCK_TOKENS, runtime_config=config, worker_type=llm.WorkerType.Aggregated,
    )  # fmt: skip
    _KEPT.extend((joined, relay, served))


if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    serve(join)
