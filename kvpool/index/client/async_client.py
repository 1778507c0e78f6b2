"""``AsyncIndexClient``: asks an index, from one event loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from kvpool.discovery.worker import DEFAULT_TENANT, Worker
from kvpool.index.answer import FleetStatus, Lookup, WorkerStatus
from kvpool.index.client import channel, codec
from kvpool.index.client.access import Access
from kvpool.index.client.codec import Answer, Call
from kvpool.index.client.publisher import EventPublisher
from kvpool.index.client.stream import LookupStream
from kvpool.index.place.chat import Chat
from kvpool.index.place.load import Load
from kvpool.index.place.route import Route
from kvpool.key.hashing import Multimodal

if TYPE_CHECKING:
    from typing_extensions import Buffer

DEFAULT_LEASE_S = 10.0


class AsyncIndexClient:
    """``IndexClient`` for one event loop: made, used and closed in it. Same arguments, answers and errors."""

    def __init__(
        self,
        target: str,
        timeout_s: float = channel.DEFAULT_TIMEOUT_S,
        *,
        token: str | None = None,
        tls_ca: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
    ) -> None:
        self._target = channel.check_target(target)
        self._timeout_s = channel.check_timeout_s(timeout_s)
        self._access = Access(token, tls_ca, tls_cert, tls_key)
        self._channel = self._access.open(grpc.aio, target, channel.OPTIONS)
        self._calls = channel.open_calls(self._channel, self._access)
        self._closed = False

    async def lookup(
        self,
        model: str,
        *,
        token_ids: Sequence[int] | Buffer | None = None,
        hashes64: Buffer | None = None,
        text: str | None = None,
        chat: Chat | Sequence[Mapping[str, Any]] | None = None,
        tenant: str = DEFAULT_TENANT,
        lora: tuple[str, str] | None = None,
        cache_salt: str | None = None,
        multimodal: Sequence[Multimodal] = (),
        workers: Sequence[str] | None = None,
        timeout_s: float | None = None,
    ) -> Lookup:
        """As ``IndexClient.lookup``."""
        call = codec.lookup_call(
            model, token_ids=token_ids, hashes64=hashes64, text=text, chat=chat, tenant=tenant, lora=lora,
            cache_salt=cache_salt, multimodal=multimodal, workers=workers,
        )  # fmt: skip
        return await self._answer(call, timeout_s)

    async def route(
        self,
        model: str,
        *,
        token_ids: Sequence[int] | Buffer | None = None,
        hashes64: Buffer | None = None,
        text: str | None = None,
        chat: Chat | Sequence[Mapping[str, Any]] | None = None,
        tenant: str = DEFAULT_TENANT,
        lora: tuple[str, str] | None = None,
        cache_salt: str | None = None,
        multimodal: Sequence[Multimodal] = (),
        workers: Sequence[str] | None = None,
        loads: Iterable[Load] = (),
        most: int | None = None,
        reserve_s: float | None = None,
        prompt_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> Route:
        """As ``IndexClient.route``."""
        call = codec.route_call(
            model, token_ids=token_ids, hashes64=hashes64, text=text, chat=chat, tenant=tenant, lora=lora,
            cache_salt=cache_salt, multimodal=multimodal, workers=workers, loads=loads, most=most,
            reserve_s=reserve_s, prompt_tokens=prompt_tokens,
        )  # fmt: skip
        return await self._answer(call, timeout_s)

    async def release(
        self, reservation: str, *, tenant: str = DEFAULT_TENANT, timeout_s: float | None = None
    ) -> bool:
        """As ``IndexClient.release``."""
        return await self._answer(codec.release_call(reservation, tenant), timeout_s)

    def stream(self) -> LookupStream:
        """Many lookups over one call, for half the cost of a call each. Close it, or use it as a context manager.

        Never blocks. Errors: ``IndexUnavailable`` when this client is closed; whether an index is there is found out
        by the first lookup.
        """
        if self._closed:
            raise channel.closed(self._target)
        call = channel.open_stream(self._channel, self._access)
        return LookupStream(self._target, call, self._timeout_s)

    def publisher(self, worker: Worker, lease_s: float = DEFAULT_LEASE_S) -> EventPublisher:
        """Push the events of a worker of this caller, under a lease. Close it, or use it as a context manager.

        ``worker``: with an incarnation, another one at each start, and events ``push`` of every publisher. Never
        blocks. Errors: ``ConfigError``; ``IndexUnavailable`` when this client is closed.
        """
        if self._closed:
            raise channel.closed(self._target)
        return EventPublisher(
            self._target,
            self.register,
            partial(channel.open_stream, self._channel, self._access, "Publish"),
            worker,
            lease_s,
        )

    async def workers(
        self, *, tenant: str | None = None, model: str | None = None, timeout_s: float | None = None
    ) -> list[WorkerStatus]:
        """As ``IndexClient.workers``."""
        return await self._answer(codec.workers_call(tenant, model), timeout_s)

    async def status(
        self, *, tenant: str | None = None, model: str | None = None, timeout_s: float | None = None
    ) -> FleetStatus:
        """As ``IndexClient.status``."""
        return await self._answer(codec.status_call(tenant, model), timeout_s)

    async def register(
        self, worker: Worker, lease_s: float | None = None, *, timeout_s: float | None = None
    ) -> bool:
        """As ``IndexClient.register``."""
        return await self._answer(codec.register_call(worker, lease_s), timeout_s)

    async def remove(
        self, name: str, *, tenant: str = DEFAULT_TENANT, timeout_s: float | None = None
    ) -> bool:
        """As ``IndexClient.remove``."""
        return await self._answer(codec.remove_call(name, tenant), timeout_s)

    async def close(self) -> None:
        """End the connection, and calls under way with it. May be called again."""
        self._closed = True
        await self._channel.close()

    async def __aenter__(self) -> AsyncIndexClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncIndexClient({self._target!r})"

    async def _answer(self, call: Call[Answer], timeout_s: float | None) -> Answer:
        limit_s = self._timeout_s if timeout_s is None else channel.check_timeout_s(timeout_s)
        if self._closed:
            raise channel.closed(self._target)
        try:
            reply = await self._calls[call.method](call.request, timeout=limit_s)
        except grpc.RpcError as error:
            if self._closed:
                raise channel.closed(self._target) from error
            raise channel.error_of(self._target, limit_s, error) from error
        except grpc.aio.UsageError as error:  # closed by another task, just now
            raise channel.closed(self._target) from error
        return channel.read(self._target, call, reply)
