"""``Renderer``: the tokens of a request's prompt, rendered by a worker.

vLLM renders the tokens of a request, images and code templates included, at the request's path with
``/render`` behind it (``vllm/entrypoints/scale_out/render``). One event loop.
"""

from __future__ import annotations

import asyncio
import io
import logging
import ssl
import time
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from kvpool import _native
from kvpool.errors import KVPoolError
from kvpool.index.limits import INFERENCE, Limits
from kvpool.index.place.endpoints import Url
from kvpool.index.place.inference_request import RENDERED, InferenceRequest, prompt_key
from kvpool.index.place.worker_connection import WorkerConnector, why_not
from kvpool.index.prompt import MAX_PROMPT_TOKENS, Prompt

if TYPE_CHECKING:
    from kvpool.key.hashing import Multimodal

RENDER_S = 10.0  # of a worker's reply; a request waits less
# For a connection: leaves time for another, where a request may wait for a second.
CONNECT_S = 0.25
HANDSHAKE_S = 1.0  # the same with TLS: vLLM shakes hands between the steps of its API server
KEEP_ALIVE_S = 4.0  # less than the 5 s after which vLLM closes an idle connection
MAX_RENDERED_NBYTES = 32 << 20
INLINE_NBYTES = 64 << 10  # of a reply, above which a thread decodes it: 10,000 tokens, in 1 ms
MAX_KEPT_NBYTES = 64 << 20  # of remembered tokens
ENTRY_NBYTES = 1024  # of memory beside them
MAX_UNDER_WAY = 64
WITHOUT_S = 30.0  # memory of a model's missing /render at a path
AWAY_S = 5.0  # before an unreachable worker is tried again
MAX_AWAY = 1024
_NO_RENDER = (403, 404, 405)  # 403: vLLM without --enable-scale-out
_NOT_OF_THIS = 501  # of vLLM, for a request's content, such as a data URL without an image
_NOT_REACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)

logger = logging.getLogger("kvpool.index")


Start = tuple[str, str]  # a worker's id and incarnation: another start may have another template
# Returns a worker, at none of the given endpoints, and its start.
Choose = Callable[[Collection[str]], Awaitable[tuple[Url, Start]]]
Lasts = Callable[[Start], bool]


class NoTokens(KVPoolError):
    """The tokens of a prompt are unknown, or late."""


class _Unanswered(NoTokens):
    """A worker has failed; another may answer."""


class _Range(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str]] = msgspec.field(default_factory=dict)
    mm_placeholders: dict[str, list[_Range]] = msgspec.field(default_factory=dict)


class _Rendered(msgspec.Struct):
    # Read without the interpreter's lock: with an object for each, a million took 0.2 s.
    token_ids: msgspec.Raw
    features: _Features | None = None
    cache_salt: str | None = None


_RENDERED = msgspec.json.Decoder(_Rendered | list[_Rendered])


class Renderer:
    """Remembers the tokens of prompts, late ones included, while the start of the worker that made them lasts.

    ``tls``: for https; None: the system's authorities. ``limits``: counts undecoded replies; None: its own.
    """

    def __init__(self, *, tls: ssl.SSLContext | None = None, limits: Limits | None = None) -> None:
        self._tls, self._limits = tls, limits or Limits()
        self._known: OrderedDict[tuple[str, bytes], tuple[Prompt, Start]] = OrderedDict()
        self._known_nbytes = 0
        self._under_way: dict[tuple[str, bytes], asyncio.Task[tuple[Prompt, Start]]] = {}
        self._without: dict[tuple[str, str, str], float] = {}  # end of the memory, by tenant, model and path
        self._away: dict[str, float] = {}  # end of the memory, by a worker's endpoint; the oldest first
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        for task in self._under_way.values():
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def prompt(
        self,
        request: InferenceRequest,
        body: bytes,
        headers: Mapping[str, str],
        choose: Choose,
        lasts: Lasts,
        timeout_s: float,
    ) -> Prompt:
        """The prompt in tokens. ``headers``: of the request; a worker gets its authorization. ``lasts``: whether a
        start does. Errors: ``NoTokens``.
        """
        if request.path not in RENDERED:
            raise NoTokens(f"requests to {request.path:.60} are placed by load")
        key = (request.tenant, prompt_key(request.path, body))
        if (known := self._known.get(key)) is not None and lasts(known[1]):
            self._known.move_to_end(key)
            return known[0]
        task = self._under_way.get(key)
        if task is None:
            if len(self._under_way) >= MAX_UNDER_WAY:
                raise NoTokens(f"the tokens of {MAX_UNDER_WAY} other prompts are being made")
            sent = {name: headers[name] for name in ("authorization",) if name in headers}
            task = asyncio.create_task(self._make(request, body, sent, choose))
            self._under_way[key] = task
            task.add_done_callback(partial(self._made, key))
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            raise NoTokens(f"its tokens were not made within {timeout_s:g} s")
        return task.result()[0]

    def _made(self, key: tuple[str, bytes], task: asyncio.Task[tuple[Prompt, Start]]) -> None:
        del self._under_way[key]
        if task.cancelled() or task.exception() is not None:
            return
        if (former := self._known.pop(key, None)) is not None:
            self._known_nbytes -= former[0].nbytes + ENTRY_NBYTES
        self._known[key] = task.result()
        self._known_nbytes += task.result()[0].nbytes + ENTRY_NBYTES
        while self._known_nbytes > MAX_KEPT_NBYTES:
            self._known_nbytes -= self._known.popitem(last=False)[1][0].nbytes + ENTRY_NBYTES

    async def _make(
        self, request: InferenceRequest, body: bytes, headers: Mapping[str, str], choose: Choose
    ) -> tuple[Prompt, Start]:
        """By a worker, or by a second after a failure."""
        now_s = time.monotonic()
        if self._without.get((request.tenant, request.model, request.path), 0.0) > now_s:
            raise NoTokens(f"the workers of {request.model} have no {request.path}/render")
        without = {endpoint for endpoint, until_s in self._away.items() if now_s < until_s}
        is_second = False
        try:
            while True:
                worker, start = await choose(without)
                try:
                    return await self._ask(request, body, headers, worker), start
                except (aiohttp.ClientConnectionError, _Unanswered) as error:
                    if isinstance(error, _NOT_REACHED):
                        self._set_aside(worker.endpoint)
                    if is_second:
                        raise
                is_second = True
                without.add(worker.endpoint)
        except (aiohttp.ClientError, TimeoutError, asyncio.TimeoutError, msgspec.MsgspecError) as error:
            raise NoTokens(f"no worker answers with its tokens: {why_not(error)}") from error

    async def _ask(
        self, request: InferenceRequest, body: bytes, headers: Mapping[str, str], worker: Url
    ) -> Prompt:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=WorkerConnector(limit=MAX_UNDER_WAY, keepalive_s=KEEP_ALIVE_S, tls=self._tls),
                auto_decompress=False,
                trust_env=False,
            )
        url = f"{worker.scheme}://{worker.endpoint}{request.path}/render"
        connect_s = HANDSHAKE_S if worker.is_tls else CONNECT_S
        async with self._session.post(
            url,
            data=io.BytesIO(body),
            headers={**headers, "content-type": "application/json"},
            timeout=aiohttp.ClientTimeout(RENDER_S, sock_connect=connect_s),
            allow_redirects=False,
            server_hostname=worker.host,
        ) as reply:
            key = (request.tenant, request.model, request.path)
            if reply.status in _NO_RENDER:
                if key not in self._without:
                    logger.warning(
                        "%s of %s answers with HTTP status %d, so texts are placed by load: start kvpool with "
                        "--tokenizer, or the workers with --enable-scale-out",
                        url, request.model, reply.status,
                    )  # fmt: skip
                self._without[key] = time.monotonic() + WITHOUT_S
            elif reply.status >= 500 and reply.status != _NOT_OF_THIS:
                raise _Unanswered(f"{url} answers with HTTP status {reply.status}")
            if reply.status != 200:
                raise NoTokens(f"{url} answers with HTTP status {reply.status}")
            self._without.pop(key, None)
            packed = bytearray()
            try:
                while part := await reply.content.readany():
                    if len(packed) + len(part) > MAX_RENDERED_NBYTES:
                        raise NoTokens(f"{url} answers with more than {MAX_RENDERED_NBYTES} bytes")
                    if not self._limits.take(len(part), INFERENCE):
                        raise NoTokens(f"there is no room for the answer of {url}")
                    packed += part
                if len(packed) <= INLINE_NBYTES:
                    return _prompt(request, packed)
                return await asyncio.to_thread(_prompt, request, packed)
            finally:
                self._limits.give(len(packed), INFERENCE)

    def _set_aside(self, endpoint: str) -> None:
        """No renders there for ``AWAY_S``."""
        self._away.pop(endpoint, None)
        self._away[endpoint] = time.monotonic() + AWAY_S
        if len(self._away) > MAX_AWAY:
            del self._away[next(iter(self._away))]


def _prompt(request: InferenceRequest, packed: bytearray) -> Prompt:
    rendered: Any = _RENDERED.decode(packed)
    one = rendered
    if isinstance(rendered, list):
        if not rendered:
            raise NoTokens("a worker answers with no tokens for it")
        one = rendered[0]
    tokens = array("I")
    try:
        tokens.frombytes(_native.read_token_list(one.token_ids, MAX_PROMPT_TOKENS))
    except ValueError as error:
        raise NoTokens(f"a worker answers with a list that holds no tokens: {error}") from error
    salt = one.cache_salt or request.cache_salt
    return Prompt(
        request.model, tokens, tenant=request.tenant, cache_salt=salt or None, multimodal=_items(one.features)
    )


def _items(features: _Features | None) -> list[Multimodal]:
    """In the order of their places, as the engine hashes them."""
    if features is None:
        return []
    items = [
        (name, place.offset, place.length)
        for modality, names in features.mm_hashes.items()
        for name, place in zip(names, features.mm_placeholders.get(modality, ()), strict=False)
    ]
    return sorted(items, key=lambda item: item[1])
