"""``Calls``: rights, limits, deadlines and refusals of every call of an index. One event loop.

Each call names its right, and the tenant of each request (``Method``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvpool.errors import AccessDenied, ConfigError, KVPoolError, UnknownModel
from kvpool.index import limits
from kvpool.index.limits import CallMemory, Kind, Limits
from kvpool.index.protocol.messages import MAX_REQUEST_NBYTES
from kvpool.index.protocol.packed import check_fields
from kvpool.index.request_stats import RequestStats
from kvpool.index.serve.auth import Permissions, Right, TokenAuth, WrongToken
from kvpool.tracing import HEADERS, Tracing

REQUEST_S = 10.0  # for a request to arrive: 33 MiB at 28 Mbit/s
LATE_S = 0.5  # after which an arriving request needs room for the largest
SMALL_NBYTES = 128 << 10  # a smaller request is answered at once, in the event loop
COPIES = 2  # of a request, while it is answered
ADVICE = "send it again later, ask for less, or raise --max-memory"

logger = logging.getLogger("kvpool.index")


class NotWarm(KVPoolError):
    """There is no snapshot yet."""


class NotTaken(KVPoolError):
    """A caller does not read, or does not send."""


_CODES: tuple[tuple[type[KVPoolError], grpc.StatusCode], ...] = (
    (WrongToken, grpc.StatusCode.UNAUTHENTICATED),
    (AccessDenied, grpc.StatusCode.PERMISSION_DENIED),
    (NotWarm, grpc.StatusCode.FAILED_PRECONDITION),
    (NotTaken, grpc.StatusCode.DEADLINE_EXCEEDED),
    (ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
    (UnknownModel, grpc.StatusCode.NOT_FOUND),
    (KVPoolError, grpc.StatusCode.RESOURCE_EXHAUSTED),  # a limit of the fleet
)


class Method(NamedTuple):
    """One call of the protocol: its right, and the tenant of a request.

    ``tenant``: None: none in particular, so ``answer`` leaves out workers of tenants that the caller may not
    see. ``read``: parses the bytes for the others; None: ``request.FromString``, for a message of few fields.
    """

    request: Any
    right: Right
    tenant: Callable[[Any], str | None]
    answer: Callable[[Any, Permissions], Awaitable[Any]]
    read: Callable[[bytes], Any] | None = None


Handler = Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]


class Calls:
    """Makes handlers that authenticate by ``auth`` and count refusals in ``stats``.

    ``held``: counts large messages and open calls.

    Every method is registered as stream-in: for others gRPC receives up to 33 MiB before a handler sees the token.
    """

    def __init__(
        self, auth: TokenAuth, stats: RequestStats, held: Limits, tracing: Tracing | None = None
    ) -> None:
        self.auth, self.stats, self.limits = auth, stats, held
        self._tracing = tracing
        self._streams: set[asyncio.Task[None]] = set()
        self._late: set[asyncio.Task[None]] = set()  # ending calls whose request did not arrive
        self._stopping = False

    def unary(self, name: str, method: Method) -> Handler:
        """The handler of a call with one request: the token is checked before the request, its tenant after.

        A call is open until its reply is read, and the task ends then.
        """

        async def serve(_: Any, context: grpc.aio.ServicerContext) -> Any:
            opened = ExitStack()
            task = asyncio.current_task()
            assert task is not None
            task.add_done_callback(lambda _: opened.close())
            try:
                caller = self.caller(method.right, context)
                opened.enter_context(self.limits.calls(limits.CALLS, context.peer(), caller.tenants))
                memory = self.memory(caller, context)
                packed = await self.receive(name, context, memory)
                with self._span(name, context):
                    reply = await self.answer(method, packed, caller, memory)
                del packed
                take_reply(memory, len(reply) if isinstance(reply, bytes) else reply.ByteSize())
                return reply
            except grpc.aio.AbortError:  # the request came too late
                raise
            except Exception as error:
                return await self._refuse(name, context, error)

        return serve

    def _span(self, name: str, context: grpc.aio.ServicerContext) -> AbstractContextManager[object]:
        if self._tracing is None:
            return nullcontext()
        sent = {key: value for key, value in context.invocation_metadata() or () if key in HEADERS}
        return self._tracing.span(f"kvpool.{name}", sent)

    def caller(self, right: Right, context: grpc.aio.ServicerContext) -> Permissions:
        """The caller's present permissions: tokens may change while a stream is open. Errors: ``AccessDenied``."""
        caller = self.auth.authenticate(_authorization(context))
        caller.check(right, None)
        return caller

    def memory(self, caller: Permissions, context: grpc.aio.ServicerContext) -> CallMemory:
        """For the large messages of a call; called in its task.

        Uncounted: small messages, a reply under construction, and an arriving request, whose size gRPC hides.
        Limits of calls and streams, and ``LATE_S`` for slow requests, bound these.
        """
        return CallMemory(self.limits, owner_of(caller, context.peer().rpartition(":")[0]))

    async def answer(
        self, method: Method, packed: bytes, caller: Permissions, memory: CallMemory | None
    ) -> Any:
        """The reply to a message of an authorized caller. ``memory``: None: already taken. Errors: for ``explain``."""
        if memory is not None and len(packed) > SMALL_NBYTES:
            async with memory.waiting(COPIES * len(packed)) as has_room:
                if not has_room:
                    raise KVPoolError(f"there is no room for a request of {len(packed)} bytes now: {ADVICE}")
                return await self.answer(method, packed, caller, None)
        request = self.read(method, packed)
        caller.check(method.right, method.tenant(request))
        return await method.answer(request, caller)

    def read(self, method: Method, packed: bytes) -> Any:
        """Errors: ``ConfigError`` for a malformed message."""
        try:
            if method.read is not None:
                return method.read(packed)
            check_fields(packed, method.request.DESCRIPTOR)
            return method.request.FromString(packed)
        except DecodeError:
            raise ConfigError(f"the request is not a {method.request.DESCRIPTOR.full_name}") from None

    def without_token(
        self, name: str, answer: Callable[[grpc.aio.ServicerContext], Awaitable[Any]]
    ) -> Handler:
        """The handler of a call with one request that every caller may make. ``answer`` bounds its cost."""

        async def serve(_: Any, context: grpc.aio.ServicerContext) -> Any:
            try:
                return await answer(context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                return await self._refuse(name, context, error)

        return serve

    async def receive(
        self, name: str, context: grpc.aio.ServicerContext, memory: CallMemory | None = None
    ) -> bytes:
        """The one request of a call; the call ends without it after ``REQUEST_S``.

        ``memory``: without room for the largest request, the call ends after ``LATE_S``. Errors: ``ConfigError``
        without a request.
        """
        with ExitStack() as timers:
            if memory is not None:
                late = asyncio.get_running_loop().call_later
                timers.callback(late(LATE_S, self._check_room, name, context, memory).cancel)
            packed = await self.next_message(name, context)
        if memory is not None:
            memory.give()
        if packed is grpc.aio.EOF:
            raise ConfigError("the call ended without a request")
        return bytes(packed)

    async def next_message(
        self,
        name: str,
        context: grpc.aio.ServicerContext,
        what: str = "request",
        seconds: float | None = None,
    ) -> Any:
        """The next message, or ``grpc.aio.EOF``; the call ends without either after ``seconds``; None: ``REQUEST_S``.

        ``what``: for that error. The status ends the read: gRPC never frees the buffers of a cancelled read.
        """
        seconds = REQUEST_S if seconds is None else seconds
        error = NotTaken(f"the {what} did not arrive within {seconds:g} s")
        timer = asyncio.get_running_loop().call_later(seconds, self._end_late, name, context, error)
        try:
            return await context.read()
        finally:
            timer.cancel()

    def _check_room(self, name: str, context: grpc.aio.ServicerContext, memory: CallMemory) -> None:
        if not memory.take(self.limits.limit_of_request_nbytes(MAX_REQUEST_NBYTES)):
            error = KVPoolError("too many requests are arriving slowly: send it again later")
            self._end_late(name, context, error)

    def _end_late(self, name: str, context: grpc.aio.ServicerContext, error: KVPoolError) -> None:
        task = asyncio.ensure_future(self._refuse(name, context, error))
        self._late.add(task)
        task.add_done_callback(self._ended_late)

    def _ended_late(self, task: asyncio.Task[None]) -> None:
        self._late.discard(task)
        if not task.cancelled():
            task.exception()  # AbortError, which the read of the call raises, too

    def stream(
        self,
        name: str,
        right: Right | None,
        serve: Callable[[grpc.aio.ServicerContext], Awaitable[None]],
        kind: Kind | None = None,
    ) -> Handler:
        """The handler of a call with streams: a caller without the right is refused before the first message.

        ``right``: None: no token, with a limit of its own. ``kind``: None: of all streams.
        """

        async def served(_: Any, context: grpc.aio.ServicerContext) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._streams.add(task)
            try:
                if right is None:
                    opened = self.limits.calls(limits.WATCHES, context.peer(), None)
                else:
                    caller = self.caller(right, context)
                    opened = self.limits.calls(kind or limits.STREAMS, context.peer(), caller.tenants)
                with opened:
                    await serve(context)
            except grpc.aio.AbortError:  # a message of it was refused
                raise
            except grpc.aio.InternalError:  # a read or a write saw the call's end before this task
                await _abort(context, grpc.StatusCode.CANCELLED, "the caller has gone")
            except Exception as error:
                await self._refuse(name, context, error)
            except asyncio.CancelledError:
                if not self._stopping:
                    raise
                await _abort(context, grpc.StatusCode.UNAVAILABLE, "this index ends")
            finally:
                self._streams.discard(task)

        return served

    def end_streams(self) -> None:
        """Each would go on for as long as its caller likes."""
        self._stopping = True
        for stream in self._streams:
            stream.cancel()

    async def _refuse(self, name: str, context: grpc.aio.ServicerContext, error: Exception) -> None:
        await _abort(context, *self.explain(name, error))

    def explain(self, name: str, error: Exception) -> tuple[grpc.StatusCode, str]:
        """Errors of ours become a status code and one line, faults of ours a line in our log; both are counted."""
        code, text = grpc.StatusCode.INTERNAL, "the index failed to answer; its log says why"
        if isinstance(error, KVPoolError):
            code = next(code for kind, code in _CODES if isinstance(error, kind))
            text = str(error)
            # gRPC keeps the error of a call in a cycle with the call: the frames that hold its request would stay.
            error.__traceback__ = error.__context__ = None
        else:
            logger.error("a call of %s failed", name, exc_info=error)
        self.stats.record_refusal(code.name)
        return code, text


async def _abort(context: grpc.aio.ServicerContext, code: grpc.StatusCode, text: str) -> None:
    try:
        await context.abort(code, text)
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError as error:  # the caller has gone, or reads nothing
        raise asyncio.CancelledError from error


def owner_of(caller: Permissions, host: str) -> str:
    """The owner of a caller's limits: callers of all tenants share that of their host."""
    return host if caller.tenants is None else ",".join(sorted(caller.tenants))


def take_reply(memory: CallMemory, nbytes: int) -> None:
    """Before sending. Errors: ``KVPoolError``, at once: a waiting reply takes memory, too."""
    if nbytes > SMALL_NBYTES and not memory.take(nbytes):
        raise KVPoolError(f"there is no room for a reply of {nbytes} bytes now: {ADVICE}")


def _authorization(context: grpc.aio.ServicerContext) -> str | None:
    return next(
        (str(value) for key, value in context.invocation_metadata() or () if key == "authorization"), None
    )
