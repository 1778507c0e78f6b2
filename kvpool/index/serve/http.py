"""``HttpServer``: the status page, and ``Lookup`` and ``Route`` in JSON, for ``curl`` and for browsers.

A JSON body becomes gRPC's packed message, by protobuf's mapping, so bounds and rights are gRPC's. It runs
in the event loop of the ``IndexServer``. ``_work`` parses and prints messages, with a part per tenant and the
interpreter's lock held: hence ``MAX_OBJECTS`` and ``MAX_VALUES``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from google.protobuf import json_format

from kvpool.errors import ConfigError
from kvpool.index import limits
from kvpool.index.limits import CallMemory, Work
from kvpool.index.net.connections import PLAIN, Connections
from kvpool.index.net.listener import (
    JSON,
    HttpListener,
    HttpRequest,
    Refused,
    ask_for_body,
    json_reply,
    refused_reply,
)
from kvpool.index.protocol import bounded_json, json_message
from kvpool.index.protocol.messages import REPLIES
from kvpool.index.serve import pages
from kvpool.index.serve.auth import EVERYTHING, Permissions
from kvpool.index.serve.calls import owner_of, take_reply
from kvpool.index.serve.service import IndexServer
from kvpool.index.serve.status import Status, file_replies

MAX_BODY_NBYTES = 8 << 20  # 1.5 million tokens, in base64
MAX_OBJECTS, MAX_VALUES = 1 << 12, 1 << 16  # protobuf prints up to 60 us for an object, 3 for a value
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

_STATUSES = {  # by gRPC's name
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "INVALID_ARGUMENT": 400,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 429,  # a limit of the fleet
}

HttpCall = Callable[[HttpRequest, Permissions], Awaitable[web.Response]]


class HttpServer:
    """The index over HTTP. One event loop: ``start``, ``stop``.

    ``status``: None: no page; the caller starts and closes it. ``names``: by which callers may ask
    an index without tokens, beside addresses and private names.
    """

    def __init__(
        self,
        index: IndexServer,
        *,
        connections: Connections = PLAIN,
        status: Status | None = None,
        names: Collection[str] = (),
    ) -> None:
        self._index, self._names = index, {name.lower() for name in names}
        self._limits, self._stats = index.calls.limits, index.calls.stats
        self._work = Work(THREADS, THREADS_OF_OWNER, "kvpool-http")
        self._listener = HttpListener(
            self._answer, self._limits, tls=connections.tls, max_age_s=connections.age_s
        )
        self._calls: dict[str, tuple[str, HttpCall]] = {HEALTH: ("GET", self._health)}
        self._calls |= {path: ("POST", partial(self._call, name)) for path, name in CALLS.items()}
        self._files: dict[str, Callable[[], web.Response]] = {}
        if status is not None:
            self._calls |= {"/status/data": ("GET", status.data), "/status/prompt": ("POST", status.prompt)}
            self._files = file_replies()

    async def start(self, listen: str) -> int:
        """Listen on ``HOST:PORT``; port 0: any free one. Returns the port. Errors: ``ConfigError``."""
        return await self._listener.start(listen, "serve HTTP on")

    async def stop(self) -> None:
        """Refuse new requests; running ones have a few seconds."""
        await self._listener.stop()
        self._work.close()

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        """Callers without the right are refused before the body is read."""
        body = bytearray()
        owner = host = request.remote or ""
        try:
            if (file := self._files.get(request.path)) is not None and request.method in ("GET", "HEAD"):
                return file()
            call = self._routed(request)
            if request.path == HEALTH:  # open to all: so no body is read
                return await call(HttpRequest(b"", host=host), EVERYTHING)
            caller = self._index.calls.auth.authenticate(request.headers.get("authorization"))
            name = pages.foreign_name(request.headers, self._names)
            if name and self._index.calls.auth.is_open:  # a page has no token
                line = f"this index is not called {name}: start it with --http-name, or ask its address"
                raise Refused(403, "PERMISSION_DENIED", line)
            if request.method == "POST":
                _check_site(request)
            owner = owner_of(caller, host)
            with self._limits.calls(limits.HTTP_CALLS, f"{host}:", caller.tenants):
                await self._read(request, body, owner)
                return await call(HttpRequest(bytes(body), dict(request.query.items()), host), caller)
        except Refused as error:
            self._stats.record_refusal(error.name)
            return refused_reply(error.status, str(error), error.headers)
        except ConnectionError:  # the client has gone
            raise
        except Exception as error:
            code, line = self._index.calls.explain(request.path, error)
            return refused_reply(_STATUSES.get(code.name, 500), line)
        finally:
            if body:
                self._limits.give(len(body), owner)

    def _routed(self, request: web.BaseRequest) -> HttpCall:
        """Errors: ``Refused``."""
        path, asked = request.path, ascii(f"{request.method} {request.path:.80}")[1:-1]
        if path in GONE:
            raise Refused(410, "UNIMPLEMENTED", GONE[path])
        allowed, call = self._calls.get(path, ("GET" if path in self._files else "", None))
        if not allowed:
            raise Refused(404, "UNIMPLEMENTED", f"{asked}: Not Found")
        if call is None or (request.method != allowed and (request.method, allowed) != ("HEAD", "GET")):
            raise Refused(
                405, "UNIMPLEMENTED", f"{asked}: Method Not Allowed; use {allowed}", {"allow": allowed}
            )
        return call

    async def _read(self, request: web.BaseRequest, body: bytearray, owner: str) -> None:
        try:
            await asyncio.wait_for(self._read_all(request, body, owner), BODY_S)
        except web.RequestPayloadError as error:
            raise ConfigError(f"the request's body cannot be read: {error!s:.200}") from error
        except (TimeoutError, asyncio.TimeoutError) as error:
            line = f"the request did not arrive within {BODY_S:g} s"
            raise Refused(408, "DEADLINE_EXCEEDED", line) from error

    async def _read_all(self, request: web.BaseRequest, body: bytearray, owner: str) -> None:
        """Also reads the rest of a refused body: a caller that still sends would not see the answer.

        ``body`` is in ``owner``'s part of the memory.
        """
        refusal: Refused | None = None
        nbytes = 0
        await ask_for_body(request)
        while chunk := await request.content.readany():
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

    async def _health(self, _: HttpRequest, __: Permissions) -> web.Response:
        if not self._index.health.is_serving():
            raise Refused(503, "UNAVAILABLE", "this index does not answer for now")
        return json_reply(msgspec.json.encode({"status": "ok"}))

    async def _call(self, name: str, request: HttpRequest, caller: Permissions) -> web.Response:
        method, owner = self._index.methods[name], owner_of(caller, request.host)
        caller.check(method.right, None)
        memory = CallMemory(self._limits, owner)
        packed = await self._work.run(owner, lambda: _pack(method.request, request.raw))
        reply = await self._index.calls.answer(method, packed, caller, memory)
        take_reply(memory, len(reply))
        return json_reply(await self._work.run(owner, lambda: _print(REPLIES[name], reply)))


def _pack(kind: Any, raw: bytes) -> bytes:
    """``raw``: JSON. Errors: ``ConfigError``."""
    try:
        fields = bounded_json.decode(raw, MAX_VALUES, MAX_OBJECTS)
        if not isinstance(fields, dict):
            raise ConfigError("write an object")
        message = kind()
        json_message.read(fields, message)
        packed: bytes = message.SerializeToString()
        return packed
    except ConfigError as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"it is no {kind.DESCRIPTOR.name} in JSON: {said:.200}") from error


def _print(kind: Any, packed: bytes) -> bytes:
    fields = json_format.MessageToDict(kind.FromString(packed), preserving_proto_field_name=True)
    return msgspec.json.encode(fields)


def _check_site(request: web.BaseRequest) -> None:
    """Refuse browsers' requests from pages of other sites: a ``Route`` reserves. Errors: ``Refused``."""
    if not pages.is_json(request.headers):
        raise Refused(415, "INVALID_ARGUMENT", f"send JSON, with Content-Type: {JSON}")
    if pages.is_of_another_site(request.headers):
        raise Refused(403, "PERMISSION_DENIED", "pages of other sites may not call an index")
