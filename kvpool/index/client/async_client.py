"""``AsyncIndexClient``: asks an index, from one event loop. ``scripts/sync-client`` makes ``client.py`` of this."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from kvpool.discovery.worker import DEFAULT_TENANT, Worker
from kvpool.errors import ConfigError, IndexUnavailable, KVPoolError
from kvpool.index.answer import FleetStatus, HitCurve, Lookup, Ranking, WorkerStatus
from kvpool.index.client import calls, channel
from kvpool.index.client.calls import Answer, Call
from kvpool.index.client.channel import Access
from kvpool.index.client.stream import LookupStream  # async only
from kvpool.index.fleet.snapshot import MAX_NBYTES as MAX_SNAPSHOT_NBYTES
from kvpool.index.prompt import Load, Prompt, PromptFields, as_prompt

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AsyncIndexClient:
    """A connection to the index at ``HOST:PORT``, opened by the first call and again after a loss.

    ``token``: the bearer token; None: none. ``tls_ca``: PEM file of the authorities of the index's
    certificate; None: no TLS, and a token crosses the network in the clear. ``tls_cert``, ``tls_key``: of
    this client, for an index that demands a certificate. ``timeout_s``: the default deadline.

    Made, used and closed in one event loop.

    Errors, of every call: ``ConfigError`` for a wrong argument, ``UnknownModel``, ``IndexUnavailable``
    without a reply in time, ``AccessDenied`` for a missing right. A router goes on without an index then.
    """

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
        self, model: str | Prompt, *, timeout_s: float | None = None, **fields: Unpack[PromptFields]
    ) -> Lookup:
        """How many leading blocks of a prompt each worker of its model holds: a row for every candidate rank.

        ``model``: a ``Prompt``, or a name with the fields of one. The index hashes ``token_ids`` for each kind
        of worker; ``hashes64`` match as they are. ``text`` and ``chat`` need the model's tokenizer at the index.
        """
        return await self._answer(calls.lookup_call(as_prompt(model, fields)), timeout_s)

    async def lookup_many(
        self, prompts: Sequence[Prompt], *, timeout_s: float | None = None
    ) -> list[Lookup | KVPoolError]:
        """``lookup`` of up to 256 prompts in one message: for each its reply or its own error.

        Errors: of all prompts, so also ``ConfigError`` of an index of an earlier version.
        """
        replies = await self._answer(calls.lookups_call(prompts), timeout_s)
        return [channel.answer(self._target, self._timeout_s, reply) for reply in replies]

    async def route(
        self,
        model: str | Prompt,
        *,
        loads: Iterable[Load] = (),
        limit: int | None = None,
        reserve_s: float | None = None,
        prompt_tokens: int | None = None,
        session_id: str | None = None,
        prompt_cache_key: str | None = None,
        preview: bool = False,
        timeout_s: float | None = None,
        **fields: Unpack[PromptFields],
    ) -> Ranking:
        """The ranks by a prompt's cost there, the cheapest first, with the terms of each cost.

        The prompt as in ``lookup``. ``loads``: known loads of candidates; the index keeps them and also reads
        workers' metrics itself. ``limit``: most picks; None: all. ``reserve_s``: count this prompt as load of
        the first pick for so long, for other routers; ``release`` ends it sooner. ``prompt_tokens``: of the
        whole prompt, if given as hashes; None: of its full blocks. ``session_id``: of requests that follow each
        other: the next finds the blocks of this one. ``prompt_cache_key``: shared by requests that go to the same
        of equal ranks. ``preview``: only look: nothing is picked, reserved or counted as a placement.
        """
        if "most" in fields:
            raise ConfigError("route takes limit= in place of most=")
        prompt = as_prompt(model, fields)
        call = calls.route_call(
            prompt,
            loads=loads,
            limit=limit,
            reserve_s=reserve_s,
            prompt_tokens=prompt_tokens,
            session_id=session_id,
            prompt_cache_key=prompt_cache_key,
            preview=preview,
        )
        return await self._answer(call, timeout_s)

    async def release(
        self, reservation: str, *, tenant: str = DEFAULT_TENANT, timeout_s: float | None = None
    ) -> bool:
        """End a reservation of ``route``: the request is over, or its load shows. False: it has ended by itself."""
        return await self._answer(calls.release_call(reservation, tenant), timeout_s)

    # async only: begin

    def stream(self) -> LookupStream:
        """Many lookups over one call, at half the cost of a call each. Close it, or use ``with``.

        Never blocks. Errors: ``IndexUnavailable`` for a closed client; a missing index fails the first lookup.
        """
        if self._closed:
            raise channel.closed(self._target)
        call = channel.open_stream(self._channel, self._access)
        return LookupStream(self._target, call, self._timeout_s)

    def publisher(self, *_: object, **__: object) -> None:
        """Errors: ``ConfigError``: events are no longer pushed."""
        raise channel.no_push()

    # async only: end

    async def workers(
        self, *, tenant: str | None = None, model: str | None = None, timeout_s: float | None = None
    ) -> list[WorkerStatus]:
        """Status of each worker, by tenant and name. ``tenant``, ``model``: filters; None: all."""
        status = await self.status(tenant=tenant, model=model, timeout_s=timeout_s)
        return list(status.workers)

    async def status(
        self, *, tenant: str | None = None, model: str | None = None, timeout_s: float | None = None
    ) -> FleetStatus:
        """``workers``, the index's own hit ratios, blocks and memory, tenants' quotas, and what engines' audits found.

        Workers come in pages, all within the deadline.
        """
        limit_s = self._timeout_s if timeout_s is None else channel.check_timeout_s(timeout_s)
        until_s = time.monotonic() + limit_s
        status, page_token = await self._answer(calls.status_call(tenant, model), limit_s)
        workers = [*status.workers]
        while page_token:
            if (left_s := until_s - time.monotonic()) <= 0:
                raise channel.late(self._target, limit_s)
            page, page_token = await self._answer(calls.status_call(tenant, model, page_token), left_s)
            workers += page.workers
        return FleetStatus(status.index, tuple(workers), status.quotas, status.audits)

    async def hit_curve(self, tenant: str | None = None, *, timeout_s: float | None = None) -> HitCurve:
        """What a pool of any size would have had of the engines' requests. ``tenant``: of its alone; None: of all.

        Without points: the index knows no request, or has no pool.
        """
        return await self._answer(calls.curve_call(tenant), timeout_s)

    async def register(
        self, worker: Worker, lease_s: float | None = None, *, timeout_s: float | None = None
    ) -> bool:
        """Have the index follow a worker without an announcement, for ``lease_s`` seconds or until removed.

        Call again before the lease ends. An empty ``hash_seed_id`` is that of the index. True: another start
        of this worker was followed, and is forgotten.
        """
        return await self._answer(calls.register_call(worker, lease_s), timeout_s)

    async def remove(
        self,
        name: str,
        *,
        tenant: str = DEFAULT_TENANT,
        timeout_s: float | None = None,
    ) -> bool:
        """Forget a worker and its blocks, until its next announcement; False: unknown."""
        return await self._answer(calls.remove_call(name, tenant), timeout_s)

    async def snapshot(self, *, timeout_s: float | None = None, max_nbytes: int | None = None) -> bytearray:
        """The index's state, for ``kvpool.index.fleet.snapshot.unpack``; its bytes are not checked here.

        For a starting index. Errors: also ``IndexUnavailable`` if not warm, or above ``max_nbytes``.
        """
        most_nbytes = MAX_SNAPSHOT_NBYTES if max_nbytes is None else max_nbytes
        limit_s = self._timeout_s if timeout_s is None else channel.check_timeout_s(timeout_s)
        if self._closed:
            raise channel.closed(self._target)
        found = bytearray()
        try:
            call = channel.open_snapshot(self._channel, self._access, limit_s)
            async for chunk in call:
                found += chunk.data
                if len(found) > most_nbytes:
                    call.cancel()
                    raise IndexUnavailable(
                        f"the snapshot of {self._target} has more than {most_nbytes} bytes: an index reads it with a "
                        "larger --max-memory"
                    )
        except grpc.RpcError as error:
            raise channel.error_of(self._target, limit_s, error) from error
        except grpc.aio.UsageError as error:  # closed just now, by another caller
            raise channel.closed(self._target) from error
        return found

    async def close(self) -> None:
        """End the connection and its calls. Idempotent."""
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
        except grpc.aio.UsageError as error:  # closed just now, by another caller
            raise channel.closed(self._target) from error
        return channel.read(self._target, call, reply)
