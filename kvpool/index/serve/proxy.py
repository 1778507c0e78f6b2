"""``Proxy``: an OpenAI-compatible address in front of a fleet's workers, without Envoy.

A request is read whole, placed, and sent to the best target of its placement; to the next target until a byte
of a response has come. Responses pass as they come. HTTP/1.1 on either side. One event loop.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import aiohttp
import msgspec
from aiohttp import web

from kvpool.errors import ConfigError, KVPoolError
from kvpool.index import bounded_json, limits
from kvpool.index.client.tls import ServerTls
from kvpool.index.limits import Kind, Limits
from kvpool.index.names import Name
from kvpool.index.place.placement import Refusal
from kvpool.index.place.placer import Placer
from kvpool.index.place.worker_connection import WorkerConnector
from kvpool.index.request_stats import ProxyStats
from kvpool.index.serve import pages
from kvpool.index.serve.health import Health
from kvpool.index.serve.listener import SERVER, HttpListener
from kvpool.index.serve.proxy_forwarding import RESPONSE_S, Forwarding, Reply
from kvpool.tracing import Span, Tracing

HEALTH, MODELS = "/health", "/v1/models"
CONNECTIONS = Kind("connections", "keep fewer open", 8192, 4096, 8192)  # a load balancer is one host
CONNECT_S = 1.0  # for a worker to accept a connection, before the next one is tried
WORKER_KEEP_ALIVE_S = 4.0  # less than the 5 s after which vLLM closes an idle connection
LIST_S = 2.0  # for all workers
MAX_ASKED = 64  # models
MAX_LISTED = 4096  # names beside them
MAX_LIST_NBYTES = 256 << 10  # of a worker: one of 500 adapters
AT_ONCE = 16
KEEP_S = 1.0  # lifetime of an answer, for equal requests
MAX_KEPT = 16  # answers
# Headers that do not determine the list of a worker; any other could be a key.
_NOT_OF_KEY = frozenset(
    (
        "accept", "accept-encoding", "accept-language", "cache-control", "connection", "content-type", "host", "pragma",
        "traceparent", "tracestate", "user-agent", "x-forwarded-for", "x-forwarded-proto", "x-request-id",
    )
)  # fmt: skip


class Proxy:
    """One event loop: ``start``, ``leave`` and ``finish`` before its end, ``stop``.

    ``health``: of the index, for ``/health``. ``tenant``: of the workers. ``names``: by which browsers' pages may
    ask, beside addresses and private names. ``tls``: None: without.
    ``worker_tls``: for workers at https; None: the system's authorities. ``response_s``: longest silence of a
    worker. ``tracing``: of requests, each until the end of its response.
    """

    def __init__(
        self,
        placer: Placer,
        limits: Limits,
        health: Health,
        stats: ProxyStats,
        *,
        tenant: str,
        names: Collection[str] = (),
        tls: ServerTls | None = None,
        worker_tls: ssl.SSLContext | None = None,
        response_s: float = RESPONSE_S,
        tracing: Tracing | None = None,
    ) -> None:
        self._placer, self._limits, self._health, self._stats = placer, limits, health, stats
        self._tenant, self._worker_tls = tenant, worker_tls
        self._names = {name.lower() for name in names}
        self._tracing = tracing or Tracing()
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=response_s)
        self._model_lists = ModelLists()
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
        # limits: of requests under way; auto_decompress: bytes pass as they are; cookies are the clients' own
        self._session = aiohttp.ClientSession(
            connector=WorkerConnector(keepalive_s=WORKER_KEEP_ALIVE_S, tls=self._worker_tls),
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
        await self._model_lists.close()
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
                response: web.StreamResponse
                if lists_models and (listing := self._listing()) is not None:
                    response = await self._model_lists.get(listing, request, self._forwarding)
                else:
                    response = await forwarding.run()
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

    def _listing(self) -> _Listing | None:
        """None: one model and no other name, so that any worker lists all."""
        models = self._placer.models(self._tenant)
        others = self._placer.names.others(self._tenant, MAX_LISTED)
        if not models or (len(models) == 1 and not others):
            return None
        return _Listing(tuple(models), tuple(others))

    def _forwarding(self, request: web.BaseRequest) -> Forwarding:
        assert self._session is not None
        return Forwarding(request, self._session, self._placer, self._limits, self._stats, self._tenant)


def _refused(refusal: Refusal) -> web.Response:
    return web.Response(body=refusal.body, status=refusal.status, headers={**refusal.headers, **SERVER})


class _List(msgspec.Struct):
    data: list[dict[str, Any]]


_LIST = msgspec.json.Decoder(_List)


class _Listing(NamedTuple):
    """``others``: names beside the models, each with its model."""

    models: tuple[str, ...]
    others: tuple[tuple[Name, str], ...]


_Key = tuple[str, _Listing, tuple[tuple[str, str], ...]]


class ModelLists:
    """The reply to ``GET /v1/models`` before workers that serve several names, remembered for ``KEEP_S``.

    Only workers know lengths and callers' keys: one worker of each model gets the request, and their lists are
    merged with the names of other workers. ``_known``: by request, replies and those under way.
    """

    def __init__(self) -> None:
        self._known: dict[_Key, asyncio.Task[Reply]] = {}

    async def get(
        self,
        listing: _Listing,
        request: web.BaseRequest,
        forwarding: Callable[[web.BaseRequest], Forwarding],
    ) -> web.Response:
        """Errors: ``Refusal``; no worker has answered."""
        sent = ((name.lower(), value) for name, value in request.headers.items())
        asked = sorted(one for one in sent if one[0] not in _NOT_OF_KEY)
        key = (request.query_string, listing, tuple(asked))
        task = self._known.get(key)
        if task is None:
            task = asyncio.create_task(_model_list(listing, lambda: forwarding(request)))
            self._known[key] = task
            task.add_done_callback(partial(self._keep, key))
        reply = await asyncio.shield(task)
        return web.Response(
            body=reply.body, status=reply.status, headers={"content-type": reply.kind, **SERVER}
        )

    async def close(self) -> None:
        tasks = [task for task in self._known.values() if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _keep(self, key: _Key, task: asyncio.Task[Reply]) -> None:
        if task.cancelled() or task.exception() is not None or len(self._known) > MAX_KEPT:
            del self._known[key]
        else:
            asyncio.get_running_loop().call_later(KEEP_S, self._known.pop, key)


async def _model_list(listing: _Listing, forward: Callable[[], Forwarding]) -> Reply:
    """The lists of the workers of all models, each name once, in the form of OpenAI's API.

    A model without an answer in time is listed by its name. A model whose worker refuses, as for want of a
    key, is left out; if all refuse, that is the answer. Errors: ``Refusal``; none has answered.
    """
    models, turn = listing.models, asyncio.Semaphore(AT_ONCE)

    async def ask(model: str) -> Reply | Refusal:
        async with turn:
            try:
                return await forward().fetch(msgspec.json.encode({"model": model}), MAX_LIST_NBYTES)
            except Refusal as refusal:
                return refusal

    asked = {model: asyncio.ensure_future(ask(model)) for model in models[:MAX_ASKED]}
    try:
        await asyncio.wait(asked.values(), timeout=LIST_S)
    finally:
        for task in asked.values():
            task.cancel()
        await asyncio.gather(*asked.values(), return_exceptions=True)
    late = Refusal(503, f"no worker has listed its models within {LIST_S:g} s")
    replies = {model: late if task.cancelled() else task.result() for model, task in asked.items()}
    whole = [one for one in replies.values() if isinstance(one, Reply)]
    if not whole:
        raise next(one for one in replies.values() if isinstance(one, Refusal))
    if all(map(_refuses, whole)):
        return whole[0]
    listed: dict[str, dict[str, Any]] = {}
    for model in models:
        for one in _listed(model, replies.get(model)):
            listed.setdefault(one["id"], one)
    for name, model in listing.others:
        if not _refuses(replies.get(model)):
            of = {"root": name.adapter, "parent": model} if name.adapter else {}
            listed.setdefault(name.text, _card(name.text) | of)
    body = msgspec.json.encode({"object": "list", "data": list(listed.values())})
    return Reply(200, "application/json", body)


def _refuses(answer: Reply | Refusal | None) -> bool:
    return isinstance(answer, Reply) and 400 <= answer.status < 500


def _card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "kvpool"}


def _listed(model: str, answer: Reply | Refusal | None) -> list[dict[str, Any]]:
    if _refuses(answer):
        return []
    if isinstance(answer, Reply) and answer.status == 200:
        try:
            bounded_json.check(answer.body)
            return [one for one in _LIST.decode(answer.body).data if isinstance(one.get("id"), str)]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ConfigError):
            pass
    return [_card(model)]
