"""``Proxy``: an OpenAI-compatible address in front of a fleet's workers, without Envoy.

A request is read whole, placed, and sent to the best target of its placement; to the next target until a byte
of a response has come. Responses pass as they come. HTTP/1.1 on either side. One event loop.
"""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from kvpool.errors import KVPoolError
from kvpool.index import limits
from kvpool.index.fleet.names import Name
from kvpool.index.front.placement import Refusal
from kvpool.index.front.placer import Placer
from kvpool.index.front.proxy_forwarding import Forwarding
from kvpool.index.front.settings import ProxySettings
from kvpool.index.limits import Kind, Limits
from kvpool.index.net import header_bytes
from kvpool.index.net.listener import SERVER, HttpListener
from kvpool.index.net.tls import ServerTls
from kvpool.index.net.worker_connection import KEEP_ALIVE_S, WorkerConnector
from kvpool.index.request_stats import ProxyStats
from kvpool.index.serve import pages
from kvpool.index.serve.health import Health
from kvpool.tracing import Span, Tracing

HEALTH, MODELS = "/health", "/v1/models"
CONNECTIONS = Kind("connections", "keep fewer open", 8192, 4096, 8192)  # a load balancer is one host
CONNECT_S = 1.0  # for a worker to accept a connection, before the next one is tried
LIST_S = 1.0  # lifetime of a list of models
MAX_LISTED = 4096  # names beside them


class Proxy:
    """One event loop: ``start``, ``leave`` and ``finish`` before its end, ``stop``.

    ``health``: of the index, for ``/health``. ``tls``: None: without. ``worker_tls``: for workers at https; None: the
    system's authorities. ``tracing``: of requests, each until the end of its response.
    """

    def __init__(
        self,
        placer: Placer,
        limits: Limits,
        health: Health,
        stats: ProxyStats,
        settings: ProxySettings,
        *,
        tls: ServerTls | None = None,
        worker_tls: ssl.SSLContext | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._placer, self._limits, self._health, self._stats = placer, limits, health, stats
        self._tenant, self._worker_tls = settings.tenant, worker_tls
        self._names = {name.lower() for name in settings.names}
        self._tracing = tracing or Tracing()
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_S, sock_read=settings.response_s
        )
        self._listed, self._listed_s = b"", -math.inf  # of models, and when it was made
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._listener = HttpListener(
            self._serve,
            self._limits,
            tls=tls,
            has_deadline=False,
            connections=CONNECTIONS,
            refused=lambda status, line: _refused(Refusal(status, line)),
        )
        self._session: aiohttp.ClientSession | None = None

    async def start(self, listen: str) -> int:
        """Listen on ``HOST:PORT``; port 0: any free one. Returns the port. Errors: ``ConfigError``."""
        header_bytes.keep()
        # limits: of requests under way; auto_decompress: bytes pass as they are; cookies are the clients' own
        self._session = aiohttp.ClientSession(
            connector=WorkerConnector(keepalive_s=KEEP_ALIVE_S, tls=self._worker_tls),
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )
        return await self._listener.start(listen, "listen on")

    def leave(self) -> None:
        """From now on a response ends its connection, so that clients go elsewhere."""
        self._listener.leave()

    async def finish(self, seconds: float, now: asyncio.Event) -> None:
        """Refuse connections; running requests have ``seconds``, or until ``now``."""
        self.leave()
        self._listener.close()
        waits = [asyncio.ensure_future(event.wait()) for event in (self._idle, now)]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def stop(self) -> None:
        await self._listener.stop()
        if self._session is not None:
            await self._session.close()

    # ---- requests

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        with self._tracing.span("kvpool.request", request.headers) as span:
            span.set(path=request.path, method=request.method)
            return await self._respond(request, span)

    async def _respond(self, request: web.BaseRequest, span: Span) -> web.StreamResponse:
        if request.path == HEALTH and request.method in ("GET", "HEAD"):
            if self._health.is_serving():
                return web.json_response({"status": "ok"}, headers=SERVER)
            return _refused(Refusal(503, "this router does not serve for now"))
        self._stats.begin()
        self._under_way += 1
        self._idle.clear()
        outcome = "gone"
        try:
            self._check_page(request)
            with self._limits.calls(limits.REQUESTS, f"{request.remote}:0", None):
                forwarding = self._forwarding(request)
                lists_models = request.path == MODELS and request.method == "GET"
                response = (self._list_models() if lists_models else None) or await forwarding.run()
            outcome = "broken" if forwarding.is_broken else f"{response.status // 100}xx"
            return response
        except Refusal as refusal:
            outcome = "refused"
            return _refused(refusal)
        except KVPoolError as error:  # of the limits
            outcome = "refused"
            return _refused(Refusal(429, str(error)))
        finally:
            span.set(outcome=outcome)
            self._stats.end(outcome)
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    def _check_page(self, request: web.BaseRequest) -> None:
        """Refuse what changes a worker's state, from pages that may not: vLLM's own calls for operators take any body,
        and no key. Browsers name the ``Origin`` of such requests, others have none. Errors: ``Refusal``.
        """
        headers = request.headers
        if request.method in ("GET", "HEAD", "OPTIONS") or "origin" not in headers:
            return
        if name := pages.foreign_name(headers, self._names):
            raise Refusal(
                403,
                f"this router is not called {name} by pages: start it with --http-name, or ask its address",
            )
        if pages.is_of_another_site(headers) and pages.is_simple(headers):
            raise Refusal(403, "pages of other sites send JSON or a key to a router")

    def _list_models(self) -> web.Response | None:
        """The names that workers serve; nobody is asked for them. None: at most one, which a worker lists itself."""
        now_s = time.monotonic()
        if now_s - self._listed_s > LIST_S:
            names = self._placer.names.listed(self._tenant, MAX_LISTED)
            cards = [_card(name, model) for name, model in names]
            whole = msgspec.json.encode({"object": "list", "data": cards})
            self._listed, self._listed_s = whole if len(cards) > 1 else b"", now_s
        if not self._listed:
            return None
        return web.Response(body=self._listed, headers=SERVER, content_type="application/json")

    def _forwarding(self, request: web.BaseRequest) -> Forwarding:
        assert self._session is not None
        return Forwarding(request, self._session, self._placer, self._limits, self._stats, self._tenant)


def _refused(refusal: Refusal) -> web.Response:
    return web.Response(body=refusal.body, status=refusal.status, headers={**refusal.headers, **SERVER})


def _card(name: Name, model: str) -> dict[str, Any]:
    """As OpenAI's clients and vLLM's know it."""
    card: dict[str, Any] = {"id": name.text, "object": "model", "created": 0, "owned_by": "kvpool"}
    if name.max_model_len:
        card["max_model_len"] = name.max_model_len
    return card | ({"root": name.adapter, "parent": model} if name.adapter else {})
