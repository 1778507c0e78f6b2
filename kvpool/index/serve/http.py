"""``HttpServer``: Mooncake's RFC 1403 over HTTP, for routers that speak it, beside the index's own protocol.

It runs in the event loop of the ``IndexServer``. Bodies are read there; whatever takes long (decoding, hashing, changes
of the roster) is done in ``_threads``. JSON is decoded with the interpreter's lock held, 10 ms a MiB: hence
``MAX_BODY_NBYTES``.

uvicorn bounds neither how long a request may take to arrive nor how many connections there are: ``_Connection`` does.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvpool.discovery.admission import check_name
from kvpool.discovery.worker import Worker
from kvpool.errors import AccessDenied, ConfigError, KVPoolError, UnknownModel
from kvpool.index.client.tls import ServerTls
from kvpool.index.follow.roster import Roster
from kvpool.index.serve import rfc1403, status_page
from kvpool.index.serve.auth import EVERYTHING, Permissions, TokenAuth, WrongToken
from kvpool.index.serve.call_room import owner_of
from kvpool.index.serve.encoding import Encoding
from kvpool.index.serve.http_call import HttpCall, HttpReply, HttpRequest, Refused
from kvpool.index.serve.listening import open_listening
from kvpool.index.serve.request_stats import Matched, RequestStats
from kvpool.index.serve.status import Status
from kvpool.key.names import check_tenant

MAX_BODY_NBYTES = 8 << 20  # a million tokens; 400,000 hashes
MAX_HEAD_NBYTES = 16 << 10
MAX_CONNECTIONS = 1024
MAX_CONNECTIONS_OF_HOST = 256
HEAD_S = 5.0  # how long a request's line and headers may take
BODY_S = 5.0
REQUEST_S = 30.0  # from its headers to its answer
KEEP_ALIVE_S = 30
STOP_TIMEOUT_S = 5
THREADS = 2

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
    do everything. ``tls``: None: without. ``status``: what the status page shows; None: there is no such page. The
    caller starts and closes it.
    """

    def __init__(
        self,
        roster: Roster,
        stats: RequestStats,
        is_serving: Callable[[], Awaitable[bool]],
        *,
        auth: TokenAuth | None = None,
        tls: ServerTls | None = None,
        status: Status | None = None,
    ) -> None:
        self._roster = roster
        self._status = status
        self._budget = roster.fleet.buffers
        self._stats = stats
        self._is_serving = is_serving
        self._auth = auth or TokenAuth()
        self._tls = tls
        self._threads = ThreadPoolExecutor(THREADS, "kvpool-http")
        self._changing = asyncio.Lock()  # a registration adds to what it has read
        self._socket: socket.socket | None = None
        self._server: uvicorn.Server | None = None

    async def start(self, listen: str) -> int:
        """Listen on ``HOST:PORT``; port 0: any that is free. Returns the port. Errors: ``ConfigError``."""
        self._socket = open_listening(listen, "serve HTTP on")
        self._socket.setblocking(False)
        config = uvicorn.Config(
            self._application(),
            http=_Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="critical",  # it warns of every request that is no HTTP
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
            h11_max_incomplete_event_size=MAX_HEAD_NBYTES,
        )
        config.load()
        config.ssl = None if self._tls is None else self._tls.context
        server = uvicorn.Server(config)
        # Not serve(): it takes over the signals of the process.
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[self._socket])
        self._server = server
        return int(self._socket.getsockname()[1])

    async def stop(self) -> None:
        """Take no more requests, give those under way a few seconds, and end."""
        if self._server is not None:
            await self._server.shutdown(sockets=[] if self._socket is None else [self._socket])
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
        elif self._socket is not None:
            self._socket.close()
        self._threads.shutdown()

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
            caller = EVERYTHING  # health is open to all
            if request.url.path != HEALTH:
                caller = self._auth.authenticate(request.headers.get("authorization"))
                owner = owner_of(caller, owner)
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
            reply, timer.matched = await self._in_thread(answer)
            return reply

    async def _register(self, body: HttpRequest, caller: Permissions) -> HttpReply:
        def register() -> HttpReply:
            asked = rfc1403.decode_registration(body.raw, body.encoding)
            caller.check("publish", asked.tenant)
            known = self._known(asked.tenant, asked.instance)
            worker = rfc1403.with_rank(asked, known, self._roster.fleet.seed_id)
            self._roster.add(worker, "call")
            said = body.encoding.encode(rfc1403.encode_registered(asked))
            return HttpReply(said, 201 if asked.as_dynamo else 200)

        async with self._changing:
            return await self._in_thread(register)

    async def _unregister(self, body: HttpRequest, caller: Permissions) -> HttpReply:
        def unregister() -> HttpReply:
            asked = rfc1403.decode_removal(body.raw, body.encoding)
            caller.check("admin", asked.tenant)
            known = self._known(asked.tenant, asked.instance)
            if known is None:
                ranks = []
            elif asked.dp_rank is None:
                ranks = [one.dp_rank for one in known.publishers]
            else:
                ranks = [one.dp_rank for one in known.publishers if one.dp_rank == asked.dp_rank]
            if known is not None and ranks:
                left = None if asked.dp_rank is None else rfc1403.without_rank(known, asked.dp_rank)
                if left is None:
                    self._roster.remove(known.id)
                else:
                    self._roster.add(left, "call")
            if not ranks:
                raise Refused(
                    404,
                    "NOT_FOUND",
                    f'unknown instance "{asked.instance:.80}" of tenant {asked.tenant}, or no such rank of it',
                )
            return HttpReply(body.encoding.encode(rfc1403.encode_removed(asked, ranks)))

        async with self._changing:
            return await self._in_thread(unregister)

    def _known(self, tenant: str, instance: str) -> Worker | None:
        workers = self._roster.fleet.workers(tenant=check_tenant(tenant))
        name = check_name(instance)
        return next((status.worker for status in workers if status.worker.name == name), None)

    async def _in_thread(self, work: Callable[[], Value]) -> Value:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


class _Connection(H11Protocol):
    """uvicorn's, with ends to its patience. ``_ends``: the timer that closes it, one at a time."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._ends: asyncio.TimerHandle | None = None
        self._in_request = False
        hosts = [one.client and one.client[0] for one in self.connections if isinstance(one, _Connection)]
        of_host = hosts.count(self.client and self.client[0])
        if len(self.connections) > MAX_CONNECTIONS or of_host > MAX_CONNECTIONS_OF_HOST:
            transport.abort()
        else:
            self._end_after(HEAD_S)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        in_request = self.cycle is not None and not self.cycle.response_complete
        if in_request != self._in_request or self._ends is None:
            self._in_request = in_request
            self._end_after(REQUEST_S if in_request else HEAD_S)

    def on_response_complete(self) -> None:
        self._cancel()  # from now on uvicorn's timer for idle connections runs
        super().on_response_complete()
        self._in_request = not self.cycle.response_complete  # the next one was there already
        if self._in_request:
            self._end_after(REQUEST_S)

    def timeout_keep_alive_handler(self) -> None:
        self.transport.abort()  # not close(): that waits for a client that does not read

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def _end_after(self, seconds: float) -> None:
        self._cancel()
        self._ends = self.loop.call_later(seconds, self.transport.abort)

    def _cancel(self) -> None:
        if self._ends is not None:
            self._ends.cancel()
            self._ends = None
