"""``Forwarding``: one request on its way to a worker, and the response on its way back. One event loop.

A worker gets its own authority as ``Host``: TLS servers and ingresses choose by it; vLLM ignores it.
"""

from __future__ import annotations

import asyncio
import logging
import posixpath
import time

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from kvpool.index.front.inference_request import engine_path
from kvpool.index.front.placement import MAX_BODY_NBYTES, OURS, RANK, Placement, Refusal, Target, hold
from kvpool.index.front.placer import Placer
from kvpool.index.front.stored_responses import is_of_responses
from kvpool.index.front.worker_answer import Answer, denies_model
from kvpool.index.limits import INFERENCE, Limits
from kvpool.index.net.header_bytes import has_control
from kvpool.index.net.listener import HttpConnection, ask_for_body
from kvpool.index.net.worker_connection import Sending, why_not
from kvpool.index.net.worker_url import parse_url
from kvpool.index.request_stats import ProxyStats, Retry

BODY_S = 30.0  # for a body to arrive: 16 MiB at 4.5 Mbit/s
LEARNS = 8  # parts of a response that are searched for its name
WHOLE_NBYTES = 64 << 10  # a response of a length up to this is sent as one

FORWARDED_FOR, FORWARDED_PROTO = "x-forwarded-for", "x-forwarded-proto"
# Of a connection, not of its messages (RFC 9110, 7.6.1).
_OF_CONNECTION = frozenset(
    (
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade",
    )
)  # fmt: skip
_NOT_FORWARDED = _OF_CONNECTION | {"content-length", "expect", "host", *OURS}
_BETWEEN_ENGINES = "/inference/"
_NAMES_URL = ("location", "content-location")
_NOT_RETURNED = _OF_CONNECTION | {*OURS}
# The worker has not begun to answer.
_UNREACHABLE = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_LOST = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)

logger = logging.getLogger("kvpool.index")


class Forwarding:
    """``run`` it once. ``is_broken``: the worker broke off, and the client's connection ended."""

    def __init__(
        self,
        request: web.BaseRequest,
        session: aiohttp.ClientSession,
        placer: Placer,
        limits: Limits,
        stats: ProxyStats,
        tenant: str,
    ) -> None:
        self._request, self._session, self._placer, self._limits = request, session, placer, limits
        self._stats, self._tenant, self._host = stats, tenant, request.remote or ""
        self._began_s = time.perf_counter()
        self._body = b""
        self._held_nbytes = 0  # of the body
        self._placement: Placement | None = None  # with a reservation to release
        self._learns = 0  # parts of the response that may still name it
        self.is_broken = False

    async def run(self) -> web.StreamResponse:
        """The response; its last bytes are still to be sent. Errors: ``Refusal``."""
        url = self._request.rel_url
        if not url.raw_path.startswith("/") or self._request.method == "CONNECT":
            raise Refusal(400, "a request names a path, such as /v1/chat/completions")
        if _is_between_engines(url.raw_path):
            raise Refusal(404, "paths under /inference/ are for engines")
        try:
            await self._read()
            placement = await self._place()
            reply, placement, target = await self._send(placement)
            try:
                return await self._relay(reply, placement, target)
            finally:
                reply.release()
        finally:
            self._release()
            self._forget_body()

    # ---- the request

    @property
    def _prompt(self) -> bytes:
        """The body that places it: engines take prompts by POST, and answer OPTIONS without a key."""
        return self._body if self._request.method == "POST" else b""

    async def _place(self) -> Placement:
        """A placement with targets. Errors: ``Refusal``."""
        path = self._request.rel_url.raw_path
        placement = self._placement = await self._placer.place(
            path, self._request.headers, self._prompt, self._tenant
        )
        if not placement.targets:
            if placement.reason == "failed":
                raise Refusal(500, "the router failed to place the request; its log says why")
            raise Refusal(503, placement.detail)
        return placement

    async def _read(self) -> None:
        """The body. Errors: ``Refusal``."""
        content = self._request.content
        if (self._request.content_length or 0) > MAX_BODY_NBYTES:
            raise Refusal(413, f"a request has at most {MAX_BODY_NBYTES} bytes")
        await ask_for_body(self._request)
        try:
            if content.is_eof():  # the usual case
                await self._read_parts()
            else:
                await asyncio.wait_for(self._read_parts(), BODY_S)
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise Refusal(408, f"the request's body did not arrive within {BODY_S:g} s") from error
        except (aiohttp.ClientPayloadError, web.RequestPayloadError) as error:
            raise Refusal(400, f"the request's body cannot be read: {error!s:.200}") from error

    async def _read_parts(self) -> None:
        parts: list[bytes] = []
        while part := await self._request.content.readany():
            self._hold(len(part))
            parts.append(part)
        self._body = b"".join(parts)

    def _hold(self, nbytes: int) -> None:
        hold(self._limits, self._held_nbytes, nbytes, self._host)
        self._held_nbytes += nbytes

    def _forget_body(self) -> None:
        self._limits.give(self._held_nbytes, INFERENCE, host=self._host)
        self._body, self._held_nbytes = b"", 0

    # ---- to a worker

    async def _send(self, placement: Placement) -> tuple[aiohttp.ClientResponse, Placement, Target]:
        """The first response, its placement and its worker. Errors: ``Refusal``."""
        left, tried = list(placement.targets), set()
        headers, path = self._forwarded(), engine_path(self._request.rel_url.raw_path)
        may_repeat = may_place = True
        while True:
            target = left.pop(0)
            tried.add(target.worker)
            sending = Sending(self._body, is_again=not may_repeat)
            retry: Retry
            try:
                reply = await self._ask(placement, target, headers, sending)
                self._placer.record(placement, target, reply.status)
            except _UNREACHABLE as error:
                self._placer.record(placement, target)
                retry, why = "unreachable", why_not(error)
            except _LOST as error:
                if not (sending.is_reused and may_repeat):
                    self._lost(placement, target, sending)
                retry, why = "lost", why_not(error)
                if sending.is_late:
                    raise Refusal(504, f"worker {target.worker} has not taken the request in time") from error
                if sending.is_reused and may_repeat:  # the worker may have closed it at that moment, as idle
                    may_repeat = False
                    left = left or [target]
                elif sending.is_whole:  # a request that broke an engine could break the next
                    raise Refusal(
                        502, f"worker {target.worker} has ended the connection without an answer: {why}"
                    ) from error
            except aiohttp.ServerTimeoutError as error:
                self._placer.judge(placement, target, served=False)
                raise Refusal(504, f"worker {target.worker} has not answered in time") from error
            except (aiohttp.ClientError, ValueError) as error:
                self._placer.judge(placement, target, served=False)
                raise _no_http(target, why_not(error)) from error
            else:
                if not 200 <= reply.status <= 599:  # such as 101, for a request that asks for no upgrade
                    reply.close()
                    raise Refusal(502, f"worker {target.worker} answers with HTTP status {reply.status}")
                if has_control(reply.reason or "", reply.headers):
                    reply.close()
                    raise _no_http(target, "its head holds control characters")
                # Another worker may keep the response that it names, or serve its model.
                lacks_model = reply.status == 404 and await self._lacks_model(reply, target)
                elsewhere = lacks_model or (reply.status == 404 and is_of_responses(path))
                if lacks_model and self._denied(placement, target) and not left and may_place:
                    may_place = False  # once more: others may serve the name that all of these have listed
                    self._release()
                    placement = await self._place()
                    left = [one for one in placement.targets if one.worker not in tried]
                if not (elsewhere or reply.status in (429, 503)) or not left:
                    return reply, placement, target
                reply.release()
                retry = "404" if elsewhere else "503" if reply.status == 503 else "429"
                why = f"it answers with {reply.status}"
            self._release()
            if not left:
                raise Refusal(503, f"worker {target.worker} cannot be reached: {why}")
            self._stats.record_retry(retry)

    def _lost(self, placement: Placement, target: Target, sending: Sending) -> None:
        """The connection has ended. What an engine had as a whole may have ended it."""
        if sending.is_whole:
            self._placer.judge(placement, target, served=False)
        else:
            self._placer.record(placement, target)

    def _denied(self, placement: Placement, target: Target) -> bool:
        """Whether the worker listed the name that it now denies."""
        return self._placer.names.deny(f"{self._tenant}/{target.worker}", placement.model)

    async def _lacks_model(self, reply: aiohttp.ClientResponse, target: Target) -> bool:
        """Whether an answer of 404 is for the request's model. Errors: ``Refusal``."""
        if not _is_short(reply):
            return False
        try:
            return denies_model(await reply.read())
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise Refusal(502, _incomplete(target, error)) from error

    def _forwarded(self) -> CIMultiDict[str]:
        """The request's headers with its origin, as proxies write it: only the last address is certain."""
        headers = _without(self._request.headers, _NOT_FORWARDED)
        came_by = [*headers.popall(FORWARDED_FOR, ()), self._request.remote or "unknown"]
        headers[FORWARDED_FOR] = ", ".join(came_by)
        headers[FORWARDED_PROTO] = self._request.scheme
        return headers

    async def _ask(
        self, placement: Placement, target: Target, headers: CIMultiDict[str], sending: Sending
    ) -> aiohttp.ClientResponse:
        at = parse_url(target.address)
        sent = headers.copy()
        sent["host"] = at.authority
        if target.dp_rank is not None:
            sent[RANK] = str(target.dp_rank)
        sent.extend(self._placer.headers(placement, target))
        url = self._request.rel_url
        has_body = bool(self._body) or "content-length" in self._request.headers
        try:
            return await self._session.request(
                self._request.method,
                URL.build(
                    scheme=at.scheme,
                    authority=target.endpoint,
                    path=url.raw_path,
                    query_string=url.raw_query_string,
                    encoded=True,
                ),
                data=sending if has_body else None,
                headers=sent,
                allow_redirects=False,
                server_hostname=at.host if at.is_tls else None,
            )
        except BaseException:
            sending.abort()
            raise

    # ---- to the client

    async def _relay(
        self, reply: aiohttp.ClientResponse, placement: Placement, target: Target
    ) -> web.StreamResponse:
        headers = _without(reply.headers, _NOT_RETURNED)
        if reply.status // 100 == 2:  # whom the worker refuses learns nothing of what others' prompts hold
            headers.extend(self._placer.headers(placement, target))
        headers.setdefault("server", "kvpool")
        for name in _NAMES_URL:
            if name in headers:
                headers[name] = _without_worker(headers[name], target)
        path, status = engine_path(self._request.rel_url.raw_path), reply.status
        self._learns = LEARNS if status // 100 == 2 and is_of_responses(path) else 0
        answer = Answer(status, reply.headers.get("content-type", ""))
        has_body = self._request.method != "HEAD" and reply.status not in (204, 304)
        if has_body and _is_short(reply):
            try:
                body = await reply.read()
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
                self._placer.judge(placement, target, served=False)
                raise Refusal(502, _incomplete(target, error)) from error
            self._read_answer(answer, placement, target, body)
            self._judge(answer, placement, target)
            headers.pop("content-length", None)
            return web.Response(body=body, status=reply.status, reason=reply.reason, headers=headers)
        response = web.StreamResponse(status=reply.status, reason=reply.reason, headers=headers)
        await response.prepare(self._request)
        while part := await self._read_part(reply, target):
            self._read_answer(answer, placement, target, part)
            await response.write(part)
        self._judge(answer, placement, target)
        return response

    def _judge(self, answer: Answer, placement: Placement, target: Target) -> None:
        if (served := answer.served(is_broken=self.is_broken)) is not None:
            self._placer.judge(placement, target, served=served)

    def _read_answer(self, answer: Answer, placement: Placement, target: Target, part: bytes) -> None:
        had_begun = answer.has_begun
        answer.read(part)
        if answer.has_begun and not had_begun:
            self._begun()
            if answer.served(is_broken=False):
                self._placer.begun(placement, target)
        if answer.has_begun and self._learns:
            known = self._placer.stored.learn(self._tenant, target.worker, part)
            self._learns = 0 if known else self._learns - 1

    async def _read_part(self, reply: aiohttp.ClientResponse, target: Target) -> bytes:
        """The next bytes of the response; empty at its end, and where the worker breaks off."""
        try:
            return await reply.content.readany()
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            logger.info("worker %s has broken off a response: %s", target.worker, why_not(error))
            self.is_broken = True
            connection = self._request.protocol
            assert isinstance(connection, HttpConnection)
            connection.break_off(self._request.version)
            return b""

    def _begun(self) -> None:
        """The first byte of an answer is there, so the prompt is computed."""
        self._stats.record_first_byte(time.perf_counter() - self._began_s)
        self._release()
        self._forget_body()

    def _release(self) -> None:
        if self._placement is not None:
            self._placer.release(self._placement)
            self._placement = None


def _is_between_engines(raw_path: str) -> bool:
    """Of --enable-scale-out: callers could end each other's requests there. However it is spelled."""
    path = "/" + engine_path(raw_path).replace("\\", "/").lstrip("/")
    return posixpath.normpath(path).startswith(_BETWEEN_ENGINES)


def _is_short(reply: aiohttp.ClientResponse) -> bool:
    return reply.content_length is not None and reply.content_length <= WHOLE_NBYTES


def _without(headers: CIMultiDictProxy[str], names: frozenset[str]) -> CIMultiDict[str]:
    """Without ``names`` and the names that ``connection`` lists."""
    if "connection" in headers:
        named = ",".join(headers.getall("connection")).split(",")
        names = names | {name.strip().lower() for name in named}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in names)


def _without_worker(named: str, target: Target) -> str:
    """A URL of the worker as a path, which the client resolves by the router's address; others as they are."""
    at = parse_url(target.address)
    try:
        url = URL(named, encoded=True)
        if not url.host or f"{url.host}:{url.port or at.port}" not in (
            f"{at.host}:{at.port}",
            target.endpoint,
        ):
            return named
    except ValueError:
        return named
    return "/" + str(url.relative()).lstrip("/")  # two slashes would begin another authority


def _no_http(target: Target, why: str) -> Refusal:
    text = f"the answer of worker {target.worker} is no HTTP: {why}"
    logger.info("%s", text)
    return Refusal(502, text)


def _incomplete(target: Target, error: BaseException) -> str:
    return f"worker {target.worker} did not complete its response: {why_not(error)}"
