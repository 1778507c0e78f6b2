"""``Renderer``: the tokens of a request's prompt, rendered by a worker.

vLLM renders the tokens of a request, images and code templates included, at the request's path with
``/render`` behind it (``vllm/entrypoints/scale_out/render``). One event loop.
"""

from __future__ import annotations

import asyncio
import io
import logging
import math
import ssl
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import aiohttp
import msgspec

from kvpool import _native
from kvpool.errors import ConfigError, KVPoolError
from kvpool.index.fleet.start import Start
from kvpool.index.front.inference_request import RENDERED, InferenceRequest, prompt_key
from kvpool.index.front.worker_answer import denies_model
from kvpool.index.limits import INFERENCE, Limits, Work
from kvpool.index.net.worker_connection import KEEP_ALIVE_S, WorkerConnector, why_not
from kvpool.index.net.worker_url import Url
from kvpool.index.prompt import MAX_PROMPT_TOKENS, Prompt
from kvpool.index.protocol import bounded_json
from kvpool.index.request_stats import Promptless
from kvpool.text import counted

if TYPE_CHECKING:
    from kvpool.key.hashing import Multimodal

RENDER_S = 10.0  # of a worker's reply; a request waits less
# For a connection: leaves time for another, where a request may wait for a second.
CONNECT_S = 0.25
HANDSHAKE_S = 1.0  # the same with TLS: vLLM shakes hands between the steps of its API server
MAX_RENDERED_NBYTES = 32 << 20
INLINE_NBYTES = 64 << 10  # of a reply, above which a thread decodes it: 10,000 tokens, in 1 ms
MAX_KEPT_NBYTES = 64 << 20  # of remembered tokens
ENTRY_NBYTES = 1024  # of memory beside them
MAX_UNDER_WAY = 160  # renders; further ones wait in line
MAX_OF_TENANT = 120
MIN_WAIT_S = 0.01  # in that line
REFUSED_S = 300.0  # memory of a prompt that a worker does not render
WARN_S = 60.0  # between warnings of slow renders
WITHOUT_S = 30.0  # memory of a model's missing /render at a path
AWAY_S = 5.0  # before an unreachable worker is tried again
MAX_AWAY = 1024  # endpoints, and models without /render at a path
MAX_TIMES = 1024  # of renders, by tenant and model
_NO_RENDER = (403, 404, 405)  # 403: vLLM without --enable-scale-out
_REFUSES = (400, 413, 422, 501)  # for a request's content; 501: such as a data URL without an image
# Of images only names and places are answered (0.04 MiB for four of 720p, else 29): vLLM 0.32, and an older name.
# Versions that know neither ignore both.
_NO_PIXELS = b',"mm_payload":"none","return_mm_kwargs":false}'
_NOT_REACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)

logger = logging.getLogger("kvpool.index")


_Key = TypeVar("_Key")
# Returns a worker, at none of the given endpoints, with few of the renders that are counted by worker; and its start.
Choose = Callable[[Collection[str], Counter[str]], Awaitable[tuple[Url, Start]]]
Lasts = Callable[[Start], bool]


class NoTokens(KVPoolError):
    """The tokens of a prompt are unknown, or late. ``lasts``: the same prompt would get the same answer."""

    def __init__(self, reason: Promptless, text: str, *, lasts: bool = False) -> None:
        super().__init__(text)
        self.reason, self.lasts = reason, lasts


class _Unanswered(NoTokens):
    """A worker has failed; another may answer."""


class _Made(NamedTuple):
    """By one start of a worker, for another may have another template: a prompt, or why there is none, until
    ``until_s``.
    """

    answer: Prompt | NoTokens
    start: Start
    until_s: float = math.inf

    @property
    def nbytes(self) -> int:
        return ENTRY_NBYTES + (self.answer.nbytes if isinstance(self.answer, Prompt) else 0)

    def prompt(self) -> Prompt:
        """Errors: ``NoTokens``."""
        if isinstance(self.answer, NoTokens):
            raise NoTokens(self.answer.reason, str(self.answer))
        return self.answer


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
    """Remembers the tokens of prompts, late ones included, while the start of the worker that made them lasts; also
    which prompts a worker does not render.

    ``tls``: for https; None: the system's authorities. ``limits``: counts undecoded replies, and bodies of renders;
    None: its own. ``clock``: monotonic, in seconds.
    """

    def __init__(
        self,
        *,
        tls: ssl.SSLContext | None = None,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tls, self._limits, self._clock = tls, limits or Limits(), clock
        self._known: OrderedDict[tuple[str, bytes], _Made] = OrderedDict()
        self._known_nbytes = 0
        self._under_way: dict[tuple[str, bytes], asyncio.Task[_Made]] = {}
        self._turns = Work(MAX_UNDER_WAY, MAX_OF_TENANT)
        self._renders: Counter[str] = Counter()  # under way, by worker
        # A render of late, by tenant and model; the oldest first.
        self._took_s: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._missed, self._warned_s = 0, -math.inf  # prompts since the last warning, and when that was
        # Ends of the memory, the oldest first: by tenant, model and path, and by a worker's endpoint.
        self._without: dict[tuple[str, str, str], float] = {}
        self._away: dict[str, float] = {}
        self._warned: dict[tuple[str, str, str], float] = {}  # as _without, when it was said
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        for task in self._under_way.values():
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)
        self._turns.close()
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
            raise NoTokens("no-prompt", f"requests to {request.path:.60} are placed by load")
        key = (request.tenant, prompt_key(request.path, body))
        known = self._known.get(key)
        if known is not None and lasts(known.start) and self._clock() < known.until_s:
            self._known.move_to_end(key)
            return known.prompt()
        task = self._under_way.get(key)
        if task is None:
            sent = {name: headers[name] for name in ("authorization",) if name in headers}
            task = asyncio.create_task(self._in_turn(request, body, sent, choose, timeout_s))
            self._under_way[key] = task
            task.add_done_callback(partial(self._made, key))
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            raise NoTokens("late", f"its tokens were not made within {timeout_s:g} s")
        return task.result().prompt()

    def _made(self, key: tuple[str, bytes], task: asyncio.Task[_Made]) -> None:
        del self._under_way[key]
        if task.cancelled() or task.exception() is not None:
            return
        if (former := self._known.pop(key, None)) is not None:
            self._known_nbytes -= former.nbytes
        self._known[key] = task.result()
        self._known_nbytes += task.result().nbytes
        while self._known_nbytes > MAX_KEPT_NBYTES:
            self._known_nbytes -= self._known.popitem(last=False)[1].nbytes

    def warn(self, request: InferenceRequest, error: NoTokens) -> None:
        """Of a request that ``error`` leaves to be placed by load: where workers have no /render, and of slow ones."""
        if error.reason in ("late", "busy"):
            self._warn_of_slow(request.model)
        elif error.reason == "no-render":
            key = (request.tenant, request.model, request.path)
            if key not in self._warned:
                logger.warning(
                    "requests for %s that only a worker makes into tokens are placed by load: %s; for texts start "
                    "kvpool with --tokenizer %s=FOLDER, else the workers with --enable-scale-out",
                    request.model, str(error), request.model,
                )  # fmt: skip
            _put(self._warned, key, self._clock())

    def _warn_of_slow(self, model: str) -> None:
        self._missed += 1
        if (now_s := self._clock()) - self._warned_s < WARN_S:
            return
        logger.warning(
            "placed by load, for workers did not make their tokens in time: %s, the last of %s; start kvpool with "
            "--tokenizer %s=FOLDER, or raise --place-timeout",
            counted(self._missed, "prompt"), model, model,
        )  # fmt: skip
        self._missed, self._warned_s = 0, now_s

    async def _in_turn(
        self,
        request: InferenceRequest,
        body: bytes,
        headers: Mapping[str, str],
        choose: Choose,
        timeout_s: float,
    ) -> _Made:
        """Waits in line as long as the tokens can still come in time: what is late costs others their turn."""
        async with AsyncExitStack() as turn:
            left_s = max(MIN_WAIT_S, timeout_s - self._took_s.get((request.tenant, request.model), 0.0))
            try:
                await asyncio.wait_for(turn.enter_async_context(self._turns.turn(request.tenant)), left_s)
            except (TimeoutError, asyncio.TimeoutError):
                raise NoTokens("busy", "the workers make the tokens of other prompts") from None
            if not self._limits.take(len(body), INFERENCE):
                raise NoTokens("busy", "there is no room for another prompt")
            try:
                return await self._make(request, body, headers, choose)
            finally:
                self._limits.give(len(body), INFERENCE)

    async def _make(
        self, request: InferenceRequest, body: bytes, headers: Mapping[str, str], choose: Choose
    ) -> _Made:
        """By a worker, or by a second after a failure."""
        now_s = self._clock()
        if self._without.get((request.tenant, request.model, request.path), 0.0) > now_s:
            raise NoTokens("no-render", f"the workers of {request.model} have no {request.path}/render")
        without = {endpoint for endpoint, until_s in self._away.items() if now_s < until_s}
        is_second = False
        try:
            while True:
                worker, start = await choose(without, self._renders)
                self._renders[start.worker_id] += 1
                try:
                    began_s = self._clock()
                    made = _Made(await self._ask(request, body, headers, worker), start)
                    self._note_time((request.tenant, request.model), self._clock() - began_s)
                    return made
                except (aiohttp.ClientConnectionError, _Unanswered) as error:
                    # Long after its time: this loop was late, as in a burst, and says nothing of the worker.
                    late_s = 2 * (HANDSHAKE_S if worker.is_tls else CONNECT_S)
                    is_ours = isinstance(error, aiohttp.ConnectionTimeoutError) and (
                        self._clock() - began_s > late_s
                    )
                    if isinstance(error, _NOT_REACHED) and not is_ours:
                        self._set_aside(worker.endpoint)
                    if is_second:
                        raise
                    is_second = True
                    if not is_ours:
                        without.add(worker.endpoint)
                except NoTokens as error:
                    if not error.lasts:
                        raise
                    return _Made(error, start, self._clock() + REFUSED_S)
                finally:
                    self._renders[start.worker_id] -= 1
                    self._renders += Counter()  # without the zeros
        except (aiohttp.ClientError, TimeoutError, asyncio.TimeoutError) as error:
            raise NoTokens("no-answer", f"no worker answers with its tokens: {why_not(error)}") from error

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
            data=io.BytesIO(without_pixels(body)),
            headers={**headers, "content-type": "application/json"},
            timeout=aiohttp.ClientTimeout(RENDER_S, sock_connect=connect_s),
            allow_redirects=False,
            server_hostname=worker.host,
        ) as reply:
            key = (request.tenant, request.model, request.path)
            said = f"{url} answers with HTTP status {reply.status}"
            is_short = (reply.content_length or MAX_RENDERED_NBYTES) <= INLINE_NBYTES
            if reply.status == 404 and is_short and denies_model(await reply.read()):  # others may serve it
                raise _Unanswered("no-answer", said)
            if reply.status in _NO_RENDER:
                _put(self._without, key, self._clock() + WITHOUT_S)
                raise NoTokens("no-render", said)
            if reply.status >= 500 and reply.status not in _REFUSES:
                raise _Unanswered("no-answer", said)
            if reply.status != 200:
                raise NoTokens("refused", said, lasts=reply.status in _REFUSES)
            self._without.pop(key, None)
            self._warned.pop(key, None)
            packed = bytearray()
            try:
                while part := await reply.content.readany():
                    if len(packed) + len(part) > MAX_RENDERED_NBYTES:
                        text = f"{url} answers with more than {MAX_RENDERED_NBYTES} bytes"
                        raise NoTokens("large-answer", text, lasts=True)
                    if not self._limits.take(len(part), INFERENCE):
                        raise NoTokens("busy", f"there is no room for the answer of {url}")
                    packed += part
                if len(packed) <= INLINE_NBYTES:
                    return _prompt(request, packed)
                return await asyncio.to_thread(_prompt, request, packed)
            finally:
                self._limits.give(len(packed), INFERENCE)

    def _note_time(self, of: tuple[str, str], took_s: float) -> None:
        known_s = self._took_s.pop(of, 0.0)
        self._took_s[of] = known_s + (took_s - known_s) / 8
        if len(self._took_s) > MAX_TIMES:
            self._took_s.popitem(last=False)

    def _set_aside(self, endpoint: str) -> None:
        """No renders there for ``AWAY_S``."""
        _put(self._away, endpoint, self._clock() + AWAY_S)


def _put(ends_s: dict[_Key, float], key: _Key, end_s: float) -> None:
    """As the latest of ``MAX_AWAY``."""
    ends_s.pop(key, None)
    ends_s[key] = end_s
    if len(ends_s) > MAX_AWAY:
        del ends_s[next(iter(ends_s))]


def without_pixels(body: bytes) -> bytes:
    """The body of a request that ``read_request`` has read, for /render."""
    return body.rstrip()[:-1] + _NO_PIXELS


def _prompt(request: InferenceRequest, packed: bytearray) -> Prompt:
    """Errors: ``NoTokens``."""
    try:
        bounded_json.check(packed, MAX_PROMPT_TOKENS + bounded_json.MAX_VALUES)
        rendered: Any = _RENDERED.decode(packed)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ConfigError) as error:
        text = f"a worker's answer cannot be read: {error!s:.200}"
        raise NoTokens("no-answer", text, lasts=True) from error
    one = rendered
    if isinstance(rendered, list):
        if not rendered:
            raise NoTokens("no-answer", "a worker answers with no tokens for it", lasts=True)
        one = rendered[0]
    tokens = array("I")
    try:
        tokens.frombytes(_native.read_token_list(one.token_ids, MAX_PROMPT_TOKENS))
    except ValueError as error:
        text = f"a worker answers with a list that holds no tokens: {error}"
        raise NoTokens("no-answer", text, lasts=True) from error
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
