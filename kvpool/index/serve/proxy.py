"""``Proxy``: an OpenAI-compatible address in front of a fleet's workers, for those who have no Envoy.

A request is read whole, placed, and sent to the best target of its placement; to the next one as long as no byte of a
response has come. A response passes as it comes. HTTP/1.1 on either side. One event loop.
"""

from __future__ import annotations

import asyncio
import ssl

import aiohttp
from aiohttp import web

from kvpool.errors import KVPoolError
from kvpool.index.client.tls import ServerTls
from kvpool.index.serve.health import Health
from kvpool.index.serve.limiter import of_requests
from kvpool.index.serve.listening import open_listening
from kvpool.index.serve.placements import Placements, Refusal
from kvpool.index.serve.proxy_connection import HEAD_S, ConnectionCount, ProxyConnection, refused
from kvpool.index.serve.proxy_forwarding import RESPONSE_S, Forwarding
from kvpool.index.serve.proxy_models import ModelLists
from kvpool.index.serve.proxy_sending import WorkerConnector
from kvpool.index.serve.proxy_stats import ProxyStats
from kvpool.tracing import Span, Tracing

HEALTH, MODELS = "/health", "/v1/models"
BACKLOG = 1024
CONNECT_S = 1.0  # for a worker to accept a connection; then the next one is tried
WORKER_KEEP_ALIVE_S = 4.0  # less than the 5 s after which vLLM closes a connection that is idle
STOP_TIMEOUT_S = 1.0


class Proxy:
    """Use it in one event loop: ``start``, ``leave`` and ``finish`` before its end, ``stop``.

    ``health``: of the index, for ``/health``. ``tenant``: whose workers serve. ``tls``: None: without.
    ``worker_tls``: for workers at https; None: with the system's authorities. ``response_s``: longest silence of a
    worker. ``tracing``: of requests, each until the end of its response.
    """

    def __init__(
        self,
        placements: Placements,
        health: Health,
        stats: ProxyStats,
        *,
        tenant: str,
        tls: ServerTls | None = None,
        worker_tls: ssl.SSLContext | None = None,
        response_s: float = RESPONSE_S,
        tracing: Tracing | None = None,
    ) -> None:
        self._placements, self._health, self._stats = placements, health, stats
        self._tenant, self._tls, self._worker_tls = tenant, tls, worker_tls
        self._tracing = tracing or Tracing()
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=response_s)
        self._limiter = of_requests()
        self._count = ConnectionCount()
        self._model_lists = ModelLists()
        self._under_way = 0
        self._leaving = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._manager: web.Server | None = None
        self._listening: asyncio.AbstractServer | None = None
        self._session: aiohttp.ClientSession | None = None

    async def start(self, listen: str) -> int:
        """Listen on ``HOST:PORT``; port 0: any that is free. Returns the port. Errors: ``ConfigError``."""
        opened = open_listening(listen, "listen on")
        opened.setblocking(False)
        loop = asyncio.get_running_loop()
        # limits: of requests under way; auto_decompress: bytes pass as they are; cookies are the clients' own
        self._session = aiohttp.ClientSession(
            connector=WorkerConnector(keepalive_s=WORKER_KEEP_ALIVE_S, tls=self._worker_tls),
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )
        manager = self._manager = web.Server(self._serve, handler_cancellation=True)
        self._listening = await loop.create_server(
            lambda: ProxyConnection(manager, self._count, loop),
            sock=opened,
            backlog=BACKLOG,
            ssl=None if self._tls is None else self._tls.context,
            ssl_handshake_timeout=None if self._tls is None else HEAD_S,
        )
        return int(opened.getsockname()[1])

    def leave(self) -> None:
        """From now on a response ends its connection, so that clients go elsewhere."""
        self._leaving = True

    async def finish(self, seconds: float, now: asyncio.Event) -> None:
        """Take no more connections, and give requests under way so long to end, or until ``now``."""
        self.leave()
        if self._listening is not None:
            self._listening.close()
        waits = [asyncio.ensure_future(event.wait()) for event in (self._idle, now)]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def stop(self) -> None:
        """End everything that is under way."""
        if self._listening is not None:
            self._listening.close()
        if self._manager is not None:
            self._manager.pre_shutdown()
            await self._manager.shutdown(STOP_TIMEOUT_S)
        await self._model_lists.close()
        if self._session is not None:
            await self._session.close()

    # ---- requests

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, ProxyConnection)
        connection.begin()
        try:
            with self._tracing.span("kvpool.request", request.headers) as span:
                span.set(path=request.path, method=request.method)
                response = await self._respond(request, span)
            if self._leaving:
                response.force_close()
            return response
        finally:
            connection.end()

    async def _respond(self, request: web.BaseRequest, span: Span) -> web.StreamResponse:
        assert self._session is not None
        if request.path == HEALTH and request.method in ("GET", "HEAD"):
            if await self._health.is_serving():
                return web.json_response({"status": "ok"}, headers={"server": "kvpool"})
            return refused(Refusal(503, "this router does not serve for now"))
        self._stats.begin()
        self._under_way += 1
        self._idle.clear()
        outcome = "gone"
        try:
            with self._limiter.acquire(f"{request.remote}:0", None):

                def forward() -> Forwarding:
                    assert self._session is not None
                    return Forwarding(request, self._session, self._placements, self._stats, self._tenant)

                forwarding = forward()
                response: web.StreamResponse
                if (
                    request.path == MODELS
                    and request.method == "GET"
                    and len(models := self._placements.models(self._tenant)) > 1
                ):
                    response = await self._model_lists.get(request, models, forward)
                else:
                    response = await forwarding.run()
            outcome = "broken" if forwarding.is_broken else f"{response.status // 100}xx"
            return response
        except Refusal as refusal:
            outcome = "refused"
            return refused(refusal)
        except KVPoolError as error:  # of the limiter
            outcome = "refused"
            return refused(Refusal(429, str(error)))
        finally:
            span.set(outcome=outcome)
            self._stats.end(outcome)
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()
