"""``Calls``: what every call of an index passes: the check of rights, and how a refusal is reported.

A call cannot be served without saying which right it takes and about which tenant it is (``Method``). One event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvpool.errors import AccessDenied, ConfigError, KVPoolError, UnknownModel
from kvpool.index.follow.push import NotRegistered
from kvpool.index.serve.auth import Permissions, Right, TokenAuth, WrongToken
from kvpool.index.serve.request_stats import RequestStats
from kvpool.index.serve.stream_limiter import StreamLimiter

logger = logging.getLogger("kvpool.index")


class NotWarm(KVPoolError):
    """There is no snapshot yet."""


class NotTaken(KVPoolError):
    """A caller does not read."""


_CODES: tuple[tuple[type[KVPoolError], grpc.StatusCode], ...] = (
    (WrongToken, grpc.StatusCode.UNAUTHENTICATED),
    (AccessDenied, grpc.StatusCode.PERMISSION_DENIED),
    (NotRegistered, grpc.StatusCode.FAILED_PRECONDITION),
    (NotWarm, grpc.StatusCode.FAILED_PRECONDITION),
    (NotTaken, grpc.StatusCode.DEADLINE_EXCEEDED),
    (ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
    (UnknownModel, grpc.StatusCode.NOT_FOUND),
    (KVPoolError, grpc.StatusCode.RESOURCE_EXHAUSTED),  # a limit of the fleet
)


class Method(NamedTuple):
    """One call of the protocol: which right it takes, and about whose workers a request is.

    ``tenant``: None: of no tenant in particular, so ``answer`` itself leaves out workers that the caller may not see.
    ``read``: makes of the bytes what the others are given; None: ``request.FromString``.
    """

    request: Any
    right: Right
    tenant: Callable[[Any], str | None]
    answer: Callable[[Any, Permissions], Awaitable[Any]]
    read: Callable[[bytes], Any] | None = None


class Calls:
    """Makes handlers that ask ``auth`` first who the caller is, and count refusals in ``stats``."""

    def __init__(self, auth: TokenAuth, stats: RequestStats) -> None:
        self._auth = auth
        self._stats = stats
        self._stream_limiter = StreamLimiter()
        self._streams: set[asyncio.Task[None]] = set()
        self._stopping = False

    def answering(
        self, name: str, method: Method
    ) -> Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]:
        """The handler of one call, or of one message of a stream that ends with the first that is refused."""

        async def answer(packed: bytes, context: grpc.aio.ServicerContext) -> Any:
            try:
                return await self.answer(method, packed, self.caller(method.right, context))
            except Exception as error:
                return await self._refuse(name, context, error)

        return answer

    def caller(self, right: Right, context: grpc.aio.ServicerContext) -> Permissions:
        """Who calls, at this moment: tokens may change while a stream is open. Errors: ``AccessDenied``."""
        caller = self._auth.authenticate(_authorization(context))
        caller.check(right, None)
        return caller

    async def answer(self, method: Method, packed: bytes, caller: Permissions) -> Any:
        """What is answered to one message of a caller that has the right. Errors: for ``explain``."""
        request = self.read(method, packed)
        caller.check(method.right, method.tenant(request))
        return await method.answer(request, caller)

    def read(self, method: Method, packed: bytes) -> Any:
        """What ``method`` is given. Errors: ``ConfigError`` for what is no such message."""
        try:
            return (method.read or method.request.FromString)(packed)
        except DecodeError:
            raise ConfigError(f"the request is not a {method.request.DESCRIPTOR.full_name}") from None

    def stream(
        self, name: str, serve: Callable[[grpc.aio.ServicerContext], Awaitable[None]]
    ) -> Callable[[Any, grpc.aio.ServicerContext], Awaitable[None]]:
        """The handler of a call with streams: a caller without the right is refused before the first message."""

        async def served(_: Any, context: grpc.aio.ServicerContext) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._streams.add(task)
            try:
                self._auth.authenticate(_authorization(context))
                with self._stream_limiter.acquire(context.peer()):
                    await serve(context)
            except grpc.aio.AbortError:  # a message of it was refused
                raise
            except grpc.aio.InternalError:  # a read or a write was told of its call's end before this task
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
        """End a call."""
        await _abort(context, *self.explain(name, error))

    def explain(self, name: str, error: Exception) -> tuple[grpc.StatusCode, str]:
        """Errors of ours become a status code and one line, faults of ours a line in our log; both are counted."""
        code, text = grpc.StatusCode.INTERNAL, "the index failed to answer; its log says why"
        if isinstance(error, KVPoolError):
            code = next(code for kind, code in _CODES if isinstance(error, kind))
            text = str(error)
        else:
            logger.error("a call of %s failed", name, exc_info=error)
        self._stats.record_refusal(code.name)
        return code, text


async def _abort(context: grpc.aio.ServicerContext, code: grpc.StatusCode, text: str) -> None:
    try:
        await context.abort(code, text)
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError as error:  # the caller has gone, or reads nothing
        raise asyncio.CancelledError from error


def _authorization(context: grpc.aio.ServicerContext) -> str | None:
    return next(
        (str(value) for key, value in context.invocation_metadata() or () if key == "authorization"), None
    )
