"""``HttpServer``: Mooncake's RFC 1403 over HTTP, for routers that speak it, beside the index's own protocol.

It runs in the event loop of the ``IndexServer``. Bodies are read there; whatever takes long (decoding, hashing, changes
of the roster) is done in ``_threads``, of which one tenant has a part at a time. JSON is decoded with the interpreter's
lock held, 10 ms a MiB: hence ``MAX_BODY_NBYTES``.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from kvpool.discovery.admission import check_name
from kvpool.discovery.worker import Worker
from kvpool.errors import AccessDenied, ConfigError, KVPoolError, UnknownModel
from kvpool.index.client.tls import ServerTls
from kvpool.index.follow.roster import Roster
from kvpool.index.serve import limiter, rfc1403, status_page
from kvpool.index.serve.auth import EVERYTHING, Permissions, TokenAuth, WrongToken
from kvpool.index.serve.call_room import owner_of
from kvpool.index.serve.encoding import Encoding
from kvpool.index.serve.http_call import HttpCall, HttpReply, HttpRequest, Refused
from kvpool.index.serve.http_listener import HttpListener
from kvpool.index.serve.request_stats import Matched, RequestStats
from kvpool.index.serve.status import Status
from kvpool.index.serve.tenant_threads import TenantThreads
from kvpool.key.names import check_tenant

MAX_BODY_NBYTES = 8 << 20  # a million tokens; 400,000 hashes
BODY_S = 5.0
THREADS = 4
THREADS_OF_OWNER = 2

Value = TypeVar("Value")

logger = logging.getLogger("kvpool.index")

# The status, and how gRPC calls the same.
HEALTH = "/health"


_STATUSES: tuple[tuple[type[KVPoolError], int, str], ...] = (
    (WrongToken, 401, "UNAUTHENTICATED"),
    (AccessDenied, 403, "PERMISSION_DENIED"),
    (ConfigError, 400, "INVALID_ARGUMENT"),
    (UnknownModel, 404, "NOT_FOUND"),
    (KVPoolError, 429, "RESOURCE_EXHAUSTED"),  # a limit of the fleet
)


class HttpServer:
    """Serves ``roster.fleet``. Use it in one event loop: ``start``, ``stop``.

    ``stats`` counts what is answered. ``is_serving``: what ``/health`` says. ``auth``: who may do what; None: all may
    do everything. ``tls``, ``max_connection_age_s``: as of ``HttpListener``. ``status``: what the status page shows;
    None: there is no such page. The caller starts and closes it.
    """

    def __init__(
        self,
        roster: Roster,
        stats: RequestStats,
        is_serving: Callable[[], Awaitable[bool]],
        *,
        auth: TokenAuth | None = None,
        tls: ServerTls | None = None,
        max_connection_age_s: float = 0.0,
        status: Status | None = None,
    ) -> None:
        self._roster = roster
        self._status = status
        self._budget = roster.fleet.buffers
        self._stats = stats
        self._is_serving = is_serving
        self._auth = auth or TokenAuth()
        self._open_calls = limiter.of_calls()
        self._threads = TenantThreads("kvpool-http", THREADS, THREADS_OF_OWNER)
        self._changing = threading.Lock()  # of the roster: a registration adds to what it has read
        self._listener = HttpListener(self._application(), tls=tls, max_age_s=max_connection_age_s)

    async def start(self, listen: str) -> int:
        """Listen on ``HOST:PORT``; port 0: any that is free. Returns the port. Errors: ``ConfigError``."""
        return await self._listener.start(listen, "serve HTTP on")

    async def stop(self) -> None:
        """Take no more requests, give those under way a few seconds, and end."""
        await self._listener.stop()
        self._threads.close()

    # ---- requests

    def _application(self) -> Starlette:
        calls: dict[str, HttpCall] = {
            "/query": lambda body, caller: self._query(body, caller, by_hash=False),
            "/query_by_hash": lambda body, caller: self._query(body, caller, by_hash=True),
            "/register": self._register,
            "/unregister": self._unregister,
        }
        routes = [self._route(path, "POST", call) for path, call in calls.items()]
        routes.append(self._route(HEALTH, "GET", self._health))
        if self._status is not None:
            routes.append(self._route("/status/data", "GET", self._status.data))
            routes.append(self._route("/status/prompt", "POST", self._status.prompt))
            routes += status_page.routes()
        return Starlette(routes=routes, exception_handlers={HTTPException: self._no_such})

    def _route(self, path: str, method: str, call: HttpCall) -> Route:
        async def endpoint(request: Request) -> Response:
            return await self._answer(request, call)

        return Route(path, endpoint, methods=[method])

    async def _answer(self, request: Request, call: HttpCall) -> Response:
        """Every request passes here: callers without the right are refused before the body is read."""
        body = bytearray()
        owner = host = request.client.host if request.client is not None else ""
        encoding = Encoding.of(request.headers.get("content-type"))
        try:
            if request.url.path == HEALTH:  # open to all: so no body is read
                reply = await call(HttpRequest(b"", encoding, host=host), EVERYTHING)
                headers = {"connection": "close"} if _has_body(request) else {}
                return Response(reply.body, reply.status, headers, encoding.value)
            caller = self._auth.authenticate(request.headers.get("authorization"))
            owner = owner_of(caller, host)
            with self._open_calls.acquire(f"{host}:", caller.tenants):
                await self._read(request, body, owner)
                asked = HttpRequest(bytes(body), encoding, request.query_params, host)
                reply = await call(asked, caller)
            return Response(reply.body, reply.status, dict(reply.headers), encoding.value)
        except ClientDisconnect:
            return Response(status_code=400)
        except Refused as error:
            return self._refuse(encoding, error.status, error.name, str(error))
        except KVPoolError as error:
            _, status, name = next(one for one in _STATUSES if isinstance(error, one[0]))
            return self._refuse(encoding, status, name, str(error))
        except Exception:
            logger.exception("a request of %s failed", request.url.path)
            return self._refuse(encoding, 500, "INTERNAL", "the index failed to answer; its log says why")
        finally:
            if body:
                self._budget.give(len(body), owner)

    def _refuse(
        self, encoding: Encoding, status: int, name: str, line: str, headers: dict[str, str] | None = None
    ) -> Response:
        self._stats.record_refusal(name)
        # What is left of a body is not read: so the connection ends.
        return Response(
            encoding.encode({"error": line}),
            status,
            {**(headers or {}), "connection": "close"},
            encoding.value,
        )

    async def _no_such(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        line = f"{request.method} {request.url.path:.80}: {error.detail}"
        if "Allow" in headers:
            line += f"; use {headers['Allow']}"
        encoding = Encoding.of(request.headers.get("content-type"))
        return self._refuse(encoding, error.status_code, "UNIMPLEMENTED", line, headers)

    async def _read(self, request: Request, body: bytearray, owner: str) -> None:
        try:
            await asyncio.wait_for(self._read_all(request, body, owner), BODY_S)
        except (TimeoutError, asyncio.TimeoutError) as error:
            line = f"the request did not arrive within {BODY_S:g} s"
            raise Refused(408, "DEADLINE_EXCEEDED", line) from error

    async def _read_all(self, request: Request, body: bytearray, owner: str) -> None:
        """Also of what is refused the rest is read: who still sends would not see the answer.

        ``body`` is in ``owner``'s part of the memory.
        """
        refusal: Refused | None = None
        nbytes = 0
        async for chunk in request.stream():
            nbytes += len(chunk)
            if nbytes > MAX_BODY_NBYTES:
                line = f"a request has at most {MAX_BODY_NBYTES} bytes: send hashes, or ask over gRPC"
                refusal = Refused(413, "RESOURCE_EXHAUSTED", line)
            elif refusal is None and not self._budget.take(len(chunk), owner):
                line = "the index has too many requests to answer now: send it again later, or raise --max-memory"
                refusal = Refused(503, "RESOURCE_EXHAUSTED", line)
            if refusal is None:
                body += chunk
        if refusal is not None:
            raise refusal

    async def _health(self, body: HttpRequest, _: Permissions) -> HttpReply:
        if not await self._is_serving():
            raise Refused(503, "UNAVAILABLE", "this index does not answer for now")
        return HttpReply(body.encoding.encode({"status": "ok"}))

    async def _query(self, body: HttpRequest, caller: Permissions, *, by_hash: bool) -> HttpReply:
        def answer() -> tuple[HttpReply, Matched]:
            query = rfc1403.decode_query(body.raw, by_hash=by_hash, encoding=body.encoding)
            caller.check("read", query.prompt.tenant)
            rows = self._roster.fleet.lookup_tiers(query.prompt)
            reply = body.encoding.encode(rfc1403.encode_answer(query, rows))
            return HttpReply(reply), Matched.of_tiers(rows)

        with self._stats.timed_lookup() as timer:
            reply, timer.matched = await self._threads.run(owner_of(caller, body.host), answer)
            return reply

    async def _register(self, body: HttpRequest, caller: Permissions) -> HttpReply:
        def register() -> HttpReply:
            asked = rfc1403.decode_registration(body.raw, body.encoding)
            caller.check("publish", asked.tenant)
            with self._changing:
                known = self._known(asked.tenant, asked.instance)
                worker = rfc1403.with_rank(asked, known, self._roster.fleet.seed_id)
                self._roster.add(worker, "call")
            said = body.encoding.encode(rfc1403.encode_registered(asked))
            return HttpReply(said, 201 if asked.as_dynamo else 200)

        return await self._threads.run(owner_of(caller, body.host), register)

    async def _unregister(self, body: HttpRequest, caller: Permissions) -> HttpReply:
        def unregister() -> HttpReply:
            asked = rfc1403.decode_removal(body.raw, body.encoding)
            caller.check("admin", asked.tenant)
            with self._changing:
                ranks = self._remove(asked)
            if not ranks:
                raise Refused(
                    404,
                    "NOT_FOUND",
                    f'unknown instance "{asked.instance:.80}" of tenant {asked.tenant}, or no such rank of it',
                )
            return HttpReply(body.encoding.encode(rfc1403.encode_removed(asked, ranks)))

        return await self._threads.run(owner_of(caller, body.host), unregister)

    def _remove(self, asked: rfc1403.Removal) -> list[int]:
        """Which ranks have gone."""
        known = self._known(asked.tenant, asked.instance)
        if known is None:
            return []
        ranks = [one.dp_rank for one in known.publishers if asked.dp_rank in (None, one.dp_rank)]
        if ranks:
            left = None if asked.dp_rank is None else rfc1403.without_rank(known, asked.dp_rank)
            if left is None:
                self._roster.remove(known.id)
            else:
                self._roster.add(left, "call")
        return ranks

    def _known(self, tenant: str, instance: str) -> Worker | None:
        workers = self._roster.fleet.workers(tenant=check_tenant(tenant))
        name = check_name(instance)
        return next((status.worker for status in workers if status.worker.name == name), None)


def _has_body(request: Request) -> bool:
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
