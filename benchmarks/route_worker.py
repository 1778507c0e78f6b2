"""A scripted vLLM worker of ``python -m benchmarks route``: ``python -m benchmarks.route_worker``, with its
settings as JSON on stdin.

It answers OpenAI's API and publishes KV events as vLLM does, from an LRU prefix cache. Only time is
simulated: a prompt takes ``token_s`` per uncached token, prompts run one after the other. An answer's usage
has the cached tokens, as with vLLM's --enable-prompt-tokens-details, and its ``system_fingerprint`` the
worker's name. ``/render`` really tokenizes.

One event loop; ``Publishers`` answers replays in a thread, another thread tokenizes.
"""

from __future__ import annotations

import asyncio
import json
import signal
import struct
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httptools
import uvloop

from benchmarks.publisher import Publishers
from benchmarks.route_traffic import BLOCK_TOKENS, MODEL, TOKENIZER_FILE, Plan, Prompt, number_of

FLUSH_S = 0.01  # between two batches of KV events; vLLM sends one per step
CHUNKS = 16  # of a streamed answer
CHUNK_S = 0.025


@dataclass(frozen=True)
class Settings:
    """``plan``, ``tokenizer``: files. ``ports``: of HTTP, KV events and their replay. ``blocks``: cache size."""

    name: str
    ports: tuple[int, int, int]
    plan: str
    tokenizer: str
    blocks: int
    token_s: float

    def as_json(self) -> str:
        return json.dumps(asdict(self))


class PrefixCache:
    """The least recently used segments leave first, a prompt's last ones first, so prefixes stay whole."""

    def __init__(self, plan: Plan, blocks: int) -> None:
        self._plan, self._blocks = plan, blocks
        self._held: OrderedDict[int, None] = OrderedDict()  # next to be evicted first
        self.blocks = 0
        self.events: list[bytes] = []  # to be published

    def take(self, prompt: Prompt) -> int:
        """Cache a computed prompt and its answer. Returns the tokens that were cached."""
        held, segments = self._held, self._plan.segments
        cached = 0
        missing: list[int] = []
        for number in prompt.segments:
            if number in held and not missing:
                cached += segments[number].blocks
            else:
                missing.append(number)
        for number in missing:
            if number not in held:
                self.blocks += segments[number].blocks
                self.events.append(segments[number].stored)
        for number in reversed(prompt.segments):
            held[number] = None
            held.move_to_end(number)
        while self.blocks > self._blocks:
            number, _ = held.popitem(last=False)
            self.blocks -= segments[number].blocks
            self.events.append(segments[number].removed)
        return min(cached, prompt.blocks) * BLOCK_TOKENS


class Worker:
    def __init__(self, settings: Settings, publishers: Publishers) -> None:
        import tokenizers

        self.settings = settings
        self.plan = Plan.unpack(Path(settings.plan).read_bytes())
        self.cache = PrefixCache(self.plan, settings.blocks)
        self.running = self.waiting = 0
        self.used_blocks = 0  # of running requests: vLLM counts unused cached blocks as free
        self._publishers = publishers
        self._free_at_s = 0.0
        self._flush_due = False
        self._tokenizer = tokenizers.Tokenizer.from_file(str(Path(settings.tokenizer) / TOKENIZER_FILE))
        self._thread = ThreadPoolExecutor(1)

    def prefill(self, prompt: Prompt) -> tuple[int, float, float]:
        """Take a prompt: its cached tokens, the seconds in the queue, and those from then to its first token."""
        cached = self.cache.take(prompt)
        if self.cache.events and not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_later(FLUSH_S, self._flush)
        if not self.settings.token_s:
            return cached, 0.0, 0.0
        now_s = time.monotonic()
        work_s = (prompt.tokens - cached) * self.settings.token_s
        begins_s = max(self._free_at_s, now_s)
        self._free_at_s = begins_s + work_s
        return cached, begins_s - now_s, work_s

    @asynccontextmanager
    async def answering(self, prompt: Prompt, queued_s: float) -> AsyncIterator[None]:
        """Wait for the prompt's start, and count it as running until the end."""
        self.waiting += 1
        try:
            await asyncio.sleep(queued_s)
        finally:
            self.waiting -= 1
        self.running += 1
        self.used_blocks += prompt.blocks
        try:
            yield
        finally:
            self.running -= 1
            self.used_blocks -= prompt.blocks

    def tokens(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _flush(self) -> None:
        self._flush_due = False
        events, self.cache.events = self.cache.events, []
        head = b"\x93\xcb" + struct.pack(">d", time.time()) + b"\xdd" + struct.pack(">I", len(events))
        self._publishers.publish(0, head + b"".join(events) + b"\x00")

    def metrics(self) -> bytes:
        labels = f'engine="0",model_name="{MODEL}"'
        gauges = {
            "num_requests_running": self.running, "num_requests_waiting": self.waiting,
            "kv_cache_usage_perc": min(1.0, self.used_blocks / self.settings.blocks),
        }  # fmt: skip
        return "".join(f"vllm:{name}{{{labels}}} {float(value)}\n" for name, value in gauges.items()).encode()

    async def render(self, body: bytes) -> list[int]:
        def tokens() -> list[int]:
            text = "".join(
                f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n"
                for one in json.loads(body)["messages"]
            )
            return self.tokens(text + "<|im_start|>assistant\n")

        return await asyncio.get_running_loop().run_in_executor(self._thread, tokens)


class Connection(asyncio.Protocol):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._parser: Any = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._body: list[bytes] = []
        self._url = b""
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, _: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_message_begin(self) -> None:
        self._body = []

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"expect" and value.lower() == b"100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, part: bytes) -> None:
        self._body.append(part)

    def on_message_complete(self) -> None:
        path = self._url.partition(b"?")[0]
        worker = self._worker
        body = b"".join(self._body)
        self._body = []
        if path == b"/v1/chat/completions":
            self._complete(body)
        elif path in (b"/health", b"/ping"):
            self._answer(b"")
        elif path == b"/metrics":
            self._answer(worker.metrics(), b"text/plain")
        elif path == b"/v1/models":
            model = {
                "id": MODEL,
                "object": "model",
                "owned_by": "vllm",
                "root": MODEL,
                "max_model_len": 1 << 20,
            }
            self._answer(json.dumps({"object": "list", "data": [model]}).encode())
        elif path == b"/version":
            self._answer(b'{"version":"0.32.0"}')
        elif path in (b"/v1/chat/completions/render", b"/tokenize"):
            self._task = asyncio.ensure_future(self._render(body, path == b"/tokenize"))
        else:
            print(f"{worker.settings.name}: {self._url!r}", file=sys.stderr)
            self._answer(b'{"error":{"message":"not found","code":404}}', status=b"404 Not Found")

    def _complete(self, body: bytes) -> None:
        worker = self._worker
        try:
            number = number_of(body)
            prompt = worker.plan.prompts[number]
        except (ValueError, IndexError) as error:
            self._answer(json.dumps({"error": {"message": str(error)}}).encode(), status=b"400 Bad Request")
            return
        cached, queued_s, work_s = worker.prefill(prompt)
        usage = (
            b'{"prompt_tokens":%d,"completion_tokens":16,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}'
        ) % (prompt.tokens, prompt.tokens + 16, cached)
        if b'"stream":true' in body[:400] or b'"stream":true' in body[-400:]:
            self._task = asyncio.ensure_future(self._stream(number, prompt, usage, queued_s, work_s))
        else:
            self._answer(
                self._chunk(number, b"chat.completion", b"message", b'"content":"text"', b'"stop"', usage)
            )

    async def _stream(
        self, number: int, prompt: Prompt, usage: bytes, queued_s: float, work_s: float
    ) -> None:
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        async with self._worker.answering(prompt, queued_s):
            await asyncio.sleep(work_s)
            for at in range(CHUNKS):
                if at:
                    await asyncio.sleep(CHUNK_S)
                last = at + 1 == CHUNKS
                self._write_chunk(
                    self._chunk(
                        number, b"chat.completion.chunk", b"delta", b'"content":"text"', b'"stop"' if last else b"null",
                        usage if last else b"null",
                    )
                )  # fmt: skip
            self._write_chunk(b"[DONE]")
            self._transport.write(b"0\r\n\r\n")

    async def _render(self, body: bytes, tokenizes: bool) -> None:
        ids = await self._worker.render(body)
        name = "tokens" if tokenizes else "token_ids"
        self._answer(json.dumps({name: ids, "count": len(ids)}, separators=(",", ":")).encode())

    def _chunk(
        self, number: int, kind: bytes, holder: bytes, said: bytes, ends: bytes, usage: bytes
    ) -> bytes:
        return (
            b'{"id":"c-%d","object":"%s","created":1,"model":"%s","system_fingerprint":"%s","choices":[{"index":0,'
            b'"%s":{"role":"assistant",%s},"finish_reason":%s}],"usage":%s}'
        ) % (number, kind, MODEL.encode(), self._worker.settings.name.encode(), holder, said, ends, usage)

    def _write_chunk(self, said: bytes) -> None:
        line = b"data: " + said + b"\n\n"
        self._transport.write(b"%x\r\n%s\r\n" % (len(line), line))

    def _answer(self, body: bytes, kind: bytes = b"application/json", status: bytes = b"200 OK") -> None:
        self._transport.write(
            b"HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s"
            % (status, kind, len(body), body)
        )


async def _serve(
    settings: Settings, publishers: Publishers, join: Callable[[Worker], Awaitable[None]] | None
) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    worker = Worker(settings, publishers)
    if join is not None:
        await join(worker)
    server = await loop.create_server(
        lambda: Connection(worker), "127.0.0.1", settings.ports[0], reuse_address=True, backlog=1024
    )
    print("ready", flush=True)
    await ended.wait()
    server.close()


def serve(join: Callable[[Worker], Awaitable[None]] | None = None) -> None:
    """Serve until SIGTERM, with the settings on stdin. ``join``: registers the worker before that."""
    told = json.loads(sys.stdin.read())
    settings = Settings(**{**told, "ports": tuple(told["ports"])})
    with Publishers(1, ports=[settings.ports[1:]]) as publishers:
        uvloop.install()
        asyncio.run(_serve(settings, publishers, join))


if __name__ == "__main__":
    serve()
