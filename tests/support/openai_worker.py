"""A worker as a front of a fleet meets it: OpenAI's API over HTTP, with answers that say who gave them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from aiohttp import web

from kvpool.index import Worker
from kvpool.index.follow.metrics_page import EngineLoad
from tests.support.fleets import a_worker
from tests.support.metrics_pages import page

Render = Callable[[dict[str, Any]], list[int]]


def render_bytes(body: dict[str, Any]) -> list[int]:
    """A byte is a token."""
    prompt = body.get("prompt", body.get("input"))
    if isinstance(prompt, list):
        prompt = prompt[0]
    if prompt is None:
        prompt = "".join(f"{message['role']}: {message['content']}\n" for message in body["messages"])
    return list(prompt.encode())


def card(name: str, **more: Any) -> dict[str, Any]:
    """Of a model, as vLLM lists it."""
    return {"id": name, "object": "model", "created": 7, "owned_by": "vllm", **more}


def adapter(name: str, path: str, of: str) -> dict[str, Any]:
    return card(name, root=path, parent=of)


class ScriptedWorker:
    """``bodies``: of the requests that it served. ``lists_read``: of its models, by an index, for itself.

    ``hold``: answers wait for it; ``hold_parts``: so do those of a stream behind the first. ``given_up``: requests
    whose caller has gone. ``reply``: the body of an answer; None: what it was asked. ``render``: None: there is none;
    ``hold_render``: renders wait for it; ``features``: of their answers, with ``pixels_nbytes`` where all is asked
    for. ``tls``: to serve with.
    """

    def __init__(
        self, name: str, port: int = 0, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1"
    ) -> None:
        self.name, self.port, self._tls, self._host = name, port, tls, host
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.rendered = self.lists_read = 0
        self.engine = EngineLoad()
        self.render: Render | None = render_bytes
        self.render_status = 200
        self.render_delay_s = 0.0
        self.hold_render = threading.Event()
        self.hold_render.set()
        self.pixels_nbytes = 0
        self.features: dict[str, Any] | None = None
        self.status = self.health_status = 200
        self.given_up = 0
        self.responses: set[str] = set()  # that it keeps
        self.cards: list[dict[str, Any]] | None = None  # of its models; None: it takes every name
        self.reply: bytes | None = None
        self.reply_headers: dict[str, str] = {}
        self.hold = threading.Event()
        self.hold.set()
        self.hold_parts = threading.Event()
        self.hold_parts.set()
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def at(self) -> str:
        return f"{self._host}:{self.port}"

    def seen(self) -> dict[str, str]:
        """The headers of the last request that it served, in lower case."""
        return {name.lower(): value for name, value in self.headers[-1].items()}

    def worker(self, **fields: Any) -> Worker:
        return a_worker(self.name, port=self.port, **{"address": f"http://{self.at}", **fields})

    def start(self) -> None:
        self._ready.clear()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(60)

    def stop(self) -> None:
        """Its connections end at once, as those of a process that is killed."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._done.set)
            self._thread.join(60)
            self._loop = None

    async def _serve(self) -> None:
        self._loop, self._done = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=32 << 20, handler_args={"auto_decompress": False})
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/{path:.*}/render", self._render)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
        await runner.setup()
        listening = socket.create_server((self._host, self.port))
        await web.SockSite(runner, listening, ssl_context=self._tls).start()
        self.port = runner.addresses[0][1]
        self._ready.set()
        await self._done.wait()
        # asyncio leaves a connection open that it accepted just before its server is closed: none comes from here on,
        # and each that came begins.
        self._loop.remove_reader(listening)
        await asyncio.sleep(0)
        await runner.cleanup()
        # What is accepted, or in the middle of a TLS handshake, is no connection of aiohttp's yet.
        if accepting := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(accepting, timeout=5)
        for transport in list(getattr(self._loop, "_transports", {}).values()):
            transport.abort()
        await asyncio.sleep(0.01)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=self.health_status)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=page({0: self.engine}))

    async def _tokenize(self, request: web.Request) -> web.Response:
        tokens = render_bytes(await request.json())
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": 1 << 20})

    async def _render(self, request: web.Request) -> web.Response:
        self.rendered += 1
        if (missing := self._missing(await request.read())) is not None:
            return missing
        await asyncio.sleep(self.render_delay_s)
        await _set(self.hold_render)
        if self.render is None or self.render_status != 200:
            return web.Response(status=404 if self.render is None else self.render_status)
        body = await request.json()
        made: dict[str, Any] = {"token_ids": self.render(body), "features": self.features}
        if self.pixels_nbytes and body.get("mm_payload") != "none":
            made["features"] = {"kwargs_data": {"image": ["A" * self.pixels_nbytes]}}
        return web.json_response([made] if request.path == "/v1/completions/render" else made)

    def _keeps(self, path: str, body: bytes, said: dict[str, Any]) -> bool:
        """Whether it has the response that a request names, if any; a new one gets a name."""
        _, _, named = path.removeprefix("/v1/responses").partition("/")
        if named:
            said["id"] = named.partition("/")[0]
            return said["id"] in self.responses
        previous = json.loads(body).get("previous_response_id")
        said["id"] = f"resp_{self.name}{len(self.responses)}"
        self.responses.add(said["id"])
        return previous is None or previous in self.responses

    def _missing(self, body: bytes) -> web.Response | None:
        """vLLM's answer for a model that it does not serve."""
        try:
            name = json.loads(body).get("model")
        except (ValueError, AttributeError, RecursionError):
            return None
        if not name or self.cards is None or name in (one["id"] for one in self.cards):
            return None
        said = f"The model `{name}` does not exist. Valid aliases: {self.cards[0]['id']}."
        error = {"message": said, "type": "NotFoundError", "param": "model", "code": 404}
        return web.json_response({"error": error}, status=404)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._answered(request)
        except (asyncio.CancelledError, ConnectionError):
            self.given_up += 1
            raise

    async def _answered(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path == "/v1/models" and request.headers.get("accept") == "text/plain":
            self.lists_read += 1
        else:
            self.bodies.append(body)
            self.headers.append(dict(request.headers))
        await _set(self.hold)
        said: dict[str, Any] = {
            "worker": self.name, "sha256": hashlib.sha256(body).hexdigest(), "path": request.path,
        }  # fmt: skip
        if request.path == "/v1/models":
            said |= {"object": "list", "data": self.cards or [card("m", root="m")]}
        elif (missing := self._missing(body)) is not None:
            return missing
        try:
            streams = bool(json.loads(body).get("stream"))
        except (ValueError, AttributeError, RecursionError):
            streams = False
        if self.reply is not None:
            return web.Response(body=self.reply, status=self.status, headers=self.reply_headers)
        if request.path.startswith("/v1/responses") and not self._keeps(request.path, body, said):
            return web.json_response({**said, "error": "Response not found"}, status=404)
        if not streams:
            return web.json_response(said, status=self.status, headers=self.reply_headers)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(3):
            if number:
                await _set(self.hold_parts)
            await response.write(f"data: {json.dumps({**said, 'number': number})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


async def _set(event: threading.Event) -> None:
    while not event.is_set():
        await asyncio.sleep(0.01)


@contextmanager
def scripted(*names: str) -> Iterator[list[ScriptedWorker]]:
    """Workers of these names until the end of the block."""
    workers = [ScriptedWorker(name) for name in names]
    try:
        for worker in workers:
            worker.start()
        yield workers
    finally:
        for worker in workers:
            worker.hold.set()
            worker.hold_parts.set()
            worker.hold_render.set()
            worker.stop()


@contextmanager
def that_accepts_nothing() -> Iterator[int]:
    """The port of a host whose answer never comes."""
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for client in (first, second):  # the kernel drops what comes behind these
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        yield full.getsockname()[1]


class BadWorker:
    """One that misbehaves: ``talk`` has each of its connections."""

    def __init__(self, name: str, talk: Callable[[socket.socket], object]) -> None:
        self.name, self._talk = name, talk
        self.connections = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def worker(self) -> Any:
        return ScriptedWorker(self.name, self.port).worker()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(client)
            thread = threading.Thread(target=self._serve, args=(client,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            self._talk(client)

    def stop(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for client in self._open:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60)
