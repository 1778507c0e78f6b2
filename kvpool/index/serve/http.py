"""``HttpServer``: the status page, and ``Lookup`` and ``Route`` in JSON, for ``curl`` and for browsers.

A JSON body becomes gRPC's packed message, by protobuf's own mapping, so bounds and rights are gRPC's. It runs
in the event loop of the ``IndexServer``. ``_work`` parses and prints messages, with a part per tenant and the
interpreter's lock held: hence ``MAX_OBJECTS`` and ``MAX_VALUES``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from google.protobuf import json_format
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from kvpool.errors import AccessDenied, ConfigError, KVPoolError, UnknownModel
from kvpool.index import bounded_json, limits
from kvpool.index.client.tls import ServerTls
from kvpool.index.limits import CallMemory, Work
from kvpool.index.protocol.messages import REPLIES
from kvpool.index.serve.auth import EVERYTHING, Permissions, WrongToken
from kvpool.index.serve.calls import owner_of, take_reply
from kvpool.index.serve.listener import JSON, HttpListener, HttpReply, HttpRequest, Refused
from kvpool.index.serve.service import IndexServer
from kvpool.index.serve.status import Status, file_routes

MAX_BODY_NBYTES = 8 << 20  # 1.5 million tokens, in base64
MAX_OBJECTS, MAX_VALUES, MAX_DEPTH = (
    1 << 12,
    1 << 16,
    8,
)  # protobuf takes up to 60 us for an object, 3 for a value
BODY_S = 5.0
THREADS, THREADS_OF_OWNER = 4, 2
HEALTH = "/health"
CALLS = {"/v1/lookup": "Lookup", "/v1/route": "Route"}
_ASK = "RFC 1403 is not served any more: ask POST /v1/lookup, or gRPC"
GONE = {
    "/query": _ASK,
    "/query_by_hash": _ASK,
    "/register": "call RegisterWorker of gRPC, or let the worker announce itself",
    "/unregister": "call RemoveWorker of gRPC",
}

# HTTP status and gRPC's name.
_STATUSES: tuple[tuple[type[KVPoolError], int, str], ...] = (
    (WrongToken, 401, "UNAUTHENTICATED"),
    (AccessDenied, 403, "PERMISSION_DENIED"),
    (ConfigError, 400, "INVALID_ARGUMENT"),
    (UnknownModel, 404, "NOT_FOUND"),
    (KVPoolError, 429, "RESOURCE_EXHAUSTED"),  # a limit of the fleet
)

HttpCall = Callable[[HttpRequest, Permissions], Awaitable[HttpReply]]

logger = logging.getLogger("kvpool.index")


class HttpServer:
    """The index over HTTP. One event loop: ``start``, ``stop``.

    ``tls``, ``max_connection_age_s``: as in ``HttpListener``. ``status``: None: no page; the caller starts
    and closes it.
    """

    def __init__(
        self,
        index: IndexServer,
        *,
        tls: ServerTls | None = None,
        max_connection_age_s: float = 0.0,
        status: Status | None = None,
    ) -> None:
        self._index, self._status = index, status
        self._limits, self._stats = index.calls.limits, index.calls.stats
        self._work = Work(THREADS, THREADS_OF_OWNER, "kvpool-http")
        self._listener = HttpListener(self._application(), tls=tls, max_age_s=max_connection_age_s)

    async def start(self, listen: str) -> int:
        """Listen on ``HOST:PORT``; port 0: any free one. Returns the port. Errors: ``ConfigError``."""
        return await self._listener.start(listen, "serve HTTP on")

    async def stop(self) -> None:
        """Refuse new requests; running ones have a few seconds."""
        await self._listener.stop()
        self._work.close()

    def _application(self) -> Starlette:
        posts: dict[str, HttpCall] = {path: partial(self._call, name) for path, name in CALLS.items()}
        gets: dict[str, HttpCall] = {HEALTH: self._health}
        pages: list[Route] = []
        if self._status is not None:
            gets["/status/data"], posts["/status/prompt"] = self._status.data, self._status.prompt
            pages = file_routes()
        routes = [
            Route(path, partial(self._answer, call), methods=[method])
            for method, calls in (("GET", gets), ("POST", posts))
            for path, call in calls.items()
        ]
        gone = [Route(path, self._gone, methods=["GET", "POST"]) for path in GONE]
        return Starlette(routes=[*routes, *gone, *pages], exception_handlers={HTTPException: self._no_such})

    async def _answer(self, call: HttpCall, request: Request) -> Response:
        """Callers without the right are refused before the body is read."""
        body = bytearray()
        owner = host = request.client.host if request.client is not None else ""
        try:
            if request.url.path == HEALTH:  # open to all: so no body is read
                reply = await call(HttpRequest(b"", host=host), EVERYTHING)
                headers = {"connection": "close"} if _has_body(request) else {}
                return Response(reply.body, reply.status, headers, JSON)
            caller = self._index.calls.auth.authenticate(request.headers.get("authorization"))
            if request.method == "POST":
                _check_site(request)
            owner = owner_of(caller, host)
            with self._limits.calls(limits.HTTP_CALLS, f"{host}:", caller.tenants):
                await self._read(request, body, owner)
                reply = await call(HttpRequest(bytes(body), request.query_params, host), caller)
            return Response(reply.body, reply.status, dict(reply.headers), JSON)
        except ClientDisconnect:
            return Response(status_code=400)
        except Refused as error:
            return self._refuse(error.status, error.name, str(error))
        except KVPoolError as error:
            _, status, name = next(one for one in _STATUSES if isinstance(error, one[0]))
            return self._refuse(status, name, str(error))
        except Exception:
            logger.exception("a request of %s failed", request.url.path)
            return self._refuse(500, "INTERNAL", "the index failed to answer; its log says why")
        finally:
            if body:
                self._limits.give(len(body), owner)

    def _refuse(self, status: int, name: str, line: str, headers: dict[str, str] | None = None) -> Response:
        self._stats.record_refusal(name)
        # The rest of a body stays unread: so the connection ends.
        headers = {**(headers or {}), "connection": "close"}
        return Response(msgspec.json.encode({"error": line}), status, headers, JSON)

    async def _gone(self, request: Request) -> Response:
        return self._refuse(410, "UNIMPLEMENTED", GONE[request.url.path])

    async def _no_such(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        line = f"{request.method} {request.url.path:.80}: {error.detail}"
        if "Allow" in headers:
            line += f"; use {headers['Allow']}"
        return self._refuse(error.status_code, "UNIMPLEMENTED", line, headers)

    async def _read(self, request: Request, body: bytearray, owner: str) -> None:
        try:
            await asyncio.wait_for(self._read_all(request, body, owner), BODY_S)
        except (TimeoutError, asyncio.TimeoutError) as error:
            line = f"the request did not arrive within {BODY_S:g} s"
            raise Refused(408, "DEADLINE_EXCEEDED", line) from error

    async def _read_all(self, request: Request, body: bytearray, owner: str) -> None:
        """Also reads the rest of a refused body: a caller that still sends would not see the answer.

        ``body`` is in ``owner``'s part of the memory.
        """
        refusal: Refused | None = None
        nbytes = 0
        async for chunk in request.stream():
            nbytes += len(chunk)
            if nbytes > MAX_BODY_NBYTES:
                line = f"a request has at most {MAX_BODY_NBYTES} bytes: send hashes, or ask over gRPC"
                refusal = Refused(413, "RESOURCE_EXHAUSTED", line)
            elif refusal is None and not self._limits.take(len(chunk), owner):
                line = "the index has too many requests to answer now: send it again later, or raise --max-memory"
                refusal = Refused(503, "RESOURCE_EXHAUSTED", line)
            if refusal is None:
                body += chunk
        if refusal is not None:
            raise refusal

    async def _health(self, _: HttpRequest, __: Permissions) -> HttpReply:
        if not await self._index.is_serving():
            raise Refused(503, "UNAVAILABLE", "this index does not answer for now")
        return HttpReply(msgspec.json.encode({"status": "ok"}))

    async def _call(self, name: str, request: HttpRequest, caller: Permissions) -> HttpReply:
        method, owner = self._index.methods[name], owner_of(caller, request.host)
        caller.check(method.right, None)
        memory = CallMemory(self._limits, owner)
        packed = await self._work.run(owner, lambda: _pack(method.request, request.raw))
        reply = await self._index.calls.answer(method, packed, caller, memory)
        take_reply(memory, len(reply))
        return HttpReply(await self._work.run(owner, lambda: _print(REPLIES[name], reply)))


def _pack(kind: Any, raw: bytes) -> bytes:
    """``raw``: JSON. Errors: ``ConfigError``."""
    try:
        fields = bounded_json.decode(raw, MAX_VALUES, MAX_OBJECTS)
        if not isinstance(fields, dict):
            raise ConfigError("write an object")
        message = json_format.ParseDict(fields, kind(), max_recursion_depth=MAX_DEPTH)
        packed: bytes = message.SerializeToString()
        return packed
    except (ConfigError, json_format.ParseError, AttributeError, TypeError, ValueError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"it is no {kind.DESCRIPTOR.name} in JSON: {said:.200}") from error


def _print(kind: Any, packed: bytes) -> bytes:
    fields = json_format.MessageToDict(kind.FromString(packed), preserving_proto_field_name=True)
    return msgspec.json.encode(fields)


def _check_site(request: Request) -> None:
    """Refuse browsers' requests from pages of other sites: a ``Route`` reserves. Errors: ``Refused``."""
    headers = request.headers
    if headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise Refused(415, "INVALID_ARGUMENT", f"send JSON, with Content-Type: {JSON}")
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is None and origin is not None and origin.partition("://")[2] != headers.get("host"):
        site = "cross-site"  # of a browser without the header
    if site not in (None, "same-origin"):
        raise Refused(403, "PERMISSION_DENIED", "pages of other sites may not call an index")


def _has_body(request: Request) -> bool:
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
