"""``IndexServer``: the index's protocol over gRPC, with health and reflection beside it.

Handlers run in one event loop; ``_threads`` add and remove workers. ``Calls`` authenticates every call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, AsyncExitStack
from typing import Any, TypeVar

import grpc
import grpc.aio

from kvpool.discovery.worker import DEFAULT_TENANT, PUSH_GONE, check_name
from kvpool.errors import ConfigError, KVPoolError
from kvpool.index.answer import IndexStatus
from kvpool.index.cost.router import Router
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.snapshot import Snapshot
from kvpool.index.follow.pool_follower import PoolFollower
from kvpool.index.net.connections import PLAIN, Connections
from kvpool.index.net.listener import is_loopback
from kvpool.index.protocol.messages import (
    MAX_REQUEST_NBYTES,
    REPLIES,
    SERVICE,
    decode_worker,
    encode_curve,
)
from kvpool.index.request_stats import RequestStats
from kvpool.index.serve import worker_pages
from kvpool.index.serve.auth import ALL_TENANTS, Permissions, Right, TokenAuth
from kvpool.index.serve.calls import Calls, Method, NotTaken, NotWarm
from kvpool.index.serve.grpc_server import REFLECTION, open_server, reflection_handlers
from kvpool.index.serve.health import HEALTH, Health
from kvpool.index.serve.lookup_calls import LookupCalls
from kvpool.index.tokens.tokenizers import Tokenizers
from kvpool.key.key import check_tenant
from kvpool.v1 import index_pb2 as pb

THREADS = 4
TICK_S = 0.25  # delay after the end of a lease
STOP_TIMEOUT_S = 5.0
CHUNK_NBYTES = 1 << 20  # of a snapshot
CHUNK_TIMEOUT_S = 30.0  # for a caller to take one chunk

Value = TypeVar("Value")

logger = logging.getLogger("kvpool.index")


class IndexServer:
    """Serves ``fleet``. One event loop: ``start``, ``wait``, ``stop``.

    ``calls``: None: every caller may do everything, and nothing is traced. ``router``: of the same fleet; None: its
    only loads are those that routers report. ``tokenizers``: for prompts as text; the caller closes them. ``take``:
    makes a snapshot, in any thread. ``health``: None: it serves at once. Files of tokens and of TLS are reloaded.
    ``calls``, ``methods``, ``health``: for other ports of the same index.
    """

    def __init__(
        self,
        fleet: Fleet,
        calls: Calls | None = None,
        *,
        router: Router | None = None,
        tokenizers: Tokenizers | None = None,
        pool: PoolFollower | None = None,
        take: Callable[[], Snapshot] | None = None,
        health: Health | None = None,
        connections: Connections = PLAIN,
    ) -> None:
        self._fleet = fleet
        self.calls = calls or Calls(TokenAuth(), RequestStats(), fleet.limits)
        self._stats, self._auth = self.calls.stats, self.calls.auth
        self._router = router or Router(fleet)
        self._pool, self._connections = pool, connections
        self._lookups = LookupCalls(self.calls, fleet, self._router, tokenizers or Tokenizers())
        self.methods = self._methods()
        self._instance_id = uuid.uuid4().hex
        self._server: grpc.aio.Server | None = None
        self._ticker: asyncio.Task[None] | None = None
        self.health = health or Health()
        self._threads = ThreadPoolExecutor(THREADS, "kvpool-index")
        self._take = take
        self._taking = asyncio.Lock()

    async def start(self, listen: str | None) -> int:
        """``listen``: ``HOST:PORT``; port 0: any free one; None: nowhere. Returns the port; 0: none. Errors:
        ``ConfigError``.
        """
        bound = 0
        if listen is not None:
            bound = self._open(listen)
        await self.health.begin()
        if self._server is not None:
            await self._server.start()
        self._ticker = asyncio.create_task(self._tick())
        return bound

    def _open(self, listen: str) -> int:
        handlers = {SERVICE: self._handlers(), HEALTH: self.health.handlers(self.calls)}
        if self._auth.is_open:
            handlers[REFLECTION] = reflection_handlers(self.calls)
        most_nbytes = self._fleet.limits.limit_of_request_nbytes(MAX_REQUEST_NBYTES)
        self._server, bound = open_server(
            listen,
            handlers,
            self._connections,
            request_nbytes=most_nbytes,
        )
        self._warn(listen)
        return bound

    async def wait(self, ended: asyncio.Event) -> None:
        """Serve until ``ended``. Raises the error that ends the checks of leases."""
        assert self._ticker is not None
        waiting = asyncio.ensure_future(ended.wait())
        try:
            await asyncio.wait((waiting, self._ticker), return_when=asyncio.FIRST_COMPLETED)
            if self._ticker.done():
                await self._ticker
        finally:
            waiting.cancel()

    async def drain(self, seconds: float, now: asyncio.Event) -> None:
        """Report "not serving", and answer for so long, or until ``now``: a load balancer sends callers elsewhere."""
        await self.health.end()
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(now.wait(), seconds)

    async def stop(self) -> None:
        """Report "not serving", refuse new calls, and end; running calls have a few seconds."""
        await self.health.end()
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        if self._server is not None:
            stopped = asyncio.ensure_future(self._server.stop(STOP_TIMEOUT_S))
            self.calls.end_streams()
            await stopped
        self._threads.shutdown()
        self._lookups.close()

    def _warn(self, listen: str) -> None:
        """Log dangers from others on the network."""
        if is_loopback(listen):
            return
        if self._auth.is_open:
            logger.warning(
                "every client that reaches %s may ask about every tenant, and register and remove workers: give it "
                "--tokens, or keep the port behind a network policy",
                listen,
            )
        elif self._connections.tls is None:
            logger.warning(
                "tokens cross the network in the clear to %s: give it --tls-cert and --tls-key", listen
            )

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self._in_thread(self._tend)
            if not self.health.serves:
                await self.health.update()

    def _tend(self) -> None:
        self._fleet.expire()
        self._auth.reload()
        if self._connections.tls is not None:
            self._connections.tls.reload()

    # ---- calls

    def _methods(self) -> dict[str, Method]:
        return {
            **self._lookups.methods,
            "Release": Method(pb.ReleaseRequest, "read", _tenant_of, self._release),
            "RegisterWorker": Method(
                pb.RegisterWorkerRequest,
                "publish",
                lambda request: _tenant_of(request.worker),
                self._register,
            ),
            "RemoveWorker": Method(pb.RemoveWorkerRequest, "admin", _tenant_of, self._remove),
            "ListWorkers": Method(
                pb.ListWorkersRequest, "read", lambda request: request.tenant or None, self._list
            ),
            "HitCurve": Method(
                pb.HitCurveRequest, "read", lambda request: request.tenant or ALL_TENANTS, self._hit_curve
            ),
        }

    def _handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        handlers = {
            name: grpc.stream_unary_rpc_method_handler(
                self.calls.unary(name, method),
                # their answers are packed already
                response_serializer=None if name in ("Lookup", "Route") else REPLIES[name].SerializeToString,
            )
            for name, method in self.methods.items()
        }
        streams: tuple[tuple[str, Right, Any], ...] = (
            ("LookupStream", "read", self._lookups.serve),
            ("Snapshot", "admin", self._snapshot),
        )
        for name, right, stream in streams:
            handlers[name] = grpc.stream_stream_rpc_method_handler(self.calls.stream(name, right, stream))
        handlers["Publish"] = grpc.stream_stream_rpc_method_handler(_publish_gone)
        return handlers

    async def _release(self, request: Any, _: Permissions) -> Any:
        tenant = check_tenant(_tenant_of(request))
        return pb.ReleaseResponse(released=self._router.release(tenant, request.reservation))

    async def _register(self, request: Any, _: Permissions) -> Any:
        if not request.HasField("worker"):
            raise ConfigError("a RegisterWorkerRequest holds a worker")
        worker = decode_worker(request.worker, self._fleet.seed_id)
        lease_s = request.lease_ms / 1000 if request.lease_ms else None
        added = await self._in_thread(lambda: self._fleet.add(worker, "call", lease_s))
        return pb.RegisterWorkerResponse(replaced=added == "replaced")

    async def _remove(self, request: Any, _: Permissions) -> Any:
        tenant = check_tenant(_tenant_of(request))
        worker_id = f"{tenant}/{check_name(request.name)}"
        removed = await self._in_thread(lambda: self._fleet.remove(worker_id))
        return pb.RemoveWorkerResponse(removed=removed)

    async def _list(self, request: Any, caller: Permissions) -> Any:
        quotas = {} if self._pool is None else self._pool.standings
        audits = () if self._pool is None else self._pool.audits
        return await self._in_thread(
            lambda: worker_pages.list_workers(
                self._fleet, request, caller, self._status(caller), quotas, audits
            )
        )

    async def _hit_curve(self, request: Any, _: Permissions) -> Any:
        curves = {} if self._pool is None else self._pool.curves
        return encode_curve(curves[request.tenant]) if request.tenant in curves else pb.HitCurveResponse()

    def _status(self, caller: Permissions) -> IndexStatus:
        told, totals = self._stats.totals(), self._fleet.totals()
        index = IndexStatus(
            int((time.monotonic() - self._stats.started_s) * 1000), instance_id=self._instance_id
        )
        if caller.sees(ALL_TENANTS):  # sums over all of them
            servers = [] if self._pool is None else self._pool.servers
            index = IndexStatus(
                index.uptime_ms, told.lookups, *told.matched, held_blocks=totals.blocks,
                held_pool_blocks=totals.pool_blocks, memory_nbytes=totals.memory_nbytes,
                instance_id=self._instance_id, placements=told.placed.requests,
                placed_prompt_blocks=told.placed.prompt_blocks, placed_matched_blocks=told.placed.matched_blocks,
                pool_servers=len(servers), pool_servers_away=sum(not one.up for one in servers),
            )  # fmt: skip
        return index

    async def _snapshot(self, context: grpc.aio.ServicerContext) -> None:
        """The index's state, in chunks, for another index at its start. One at a time."""
        async with AsyncExitStack() as held:

            async def take(_: Any, __: Permissions) -> list[bytes]:
                if self._take is None or not self.health.serves:
                    raise NotWarm("this index has nothing to give: it is not warm itself")
                if self._taking.locked():
                    raise KVPoolError("another snapshot is under way: ask later")
                await held.enter_async_context(self._taking)
                packed = self._fleet.packed(self._take)
                packing = self._threads.submit(packed.__enter__)
                # A caller may go while it is packed.
                held.callback(packing.add_done_callback, lambda done: _end(packed, done))
                return await asyncio.wrap_future(packing)

            method = Method(pb.SnapshotRequest, "admin", lambda _: ALL_TENANTS, take)
            request = await self.calls.receive("Snapshot", context)
            caller = self.calls.caller(method.right, context)
            memory = self.calls.memory(caller, context)
            for part in await self.calls.answer(method, request, caller, memory):
                for at in range(0, len(part), CHUNK_NBYTES):
                    chunk = pb.SnapshotChunk(data=part[at : at + CHUNK_NBYTES]).SerializeToString()
                    try:
                        await asyncio.wait_for(context.write(chunk), CHUNK_TIMEOUT_S)
                    except (TimeoutError, asyncio.TimeoutError):
                        raise NotTaken("the caller did not take its snapshot") from None

    async def _in_thread(self, work: Callable[[], Value]) -> Value:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _end(packed: AbstractContextManager[Any], packing: Future[Any]) -> None:
    if not packing.cancelled() and packing.exception() is None:
        packed.__exit__(None, None, None)


async def _publish_gone(_: Any, context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, PUSH_GONE)


def _tenant_of(named: Any) -> str:
    tenant: str = named.tenant or DEFAULT_TENANT
    return tenant
