"""``Index``: all of an index, for ``kvpool index``, ``kvpool router``, and routers in Python.

It owns its parts: ``start`` puts them together, ``stop`` takes them apart in the reverse order. One event loop;
``fleet`` and ``router`` answer any thread.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvpool.discovery.networks import WorkerNetworks, places_of
from kvpool.discovery.worker import DEFAULT_TENANT, Worker
from kvpool.errors import IndexUnavailable, SnapshotRefused
from kvpool.index.client.client import IndexClient
from kvpool.index.cost.router import Router
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.snapshot import MAX_NBYTES, Snapshot, unpack
from kvpool.index.follow import snapshot_file
from kvpool.index.follow.pool_follower import PoolFollower
from kvpool.index.follow.pool_reconciler import DEFAULT_KEYS_PER_S
from kvpool.index.follow.scraper import Scraper
from kvpool.index.follow.snapshot_file import SnapshotFile
from kvpool.index.follow.subscriber import Subscriber
from kvpool.index.front.endpoints import Endpoints
from kvpool.index.front.ext_proc import ExtProcServer
from kvpool.index.front.placer import Placer
from kvpool.index.front.proxy import Proxy
from kvpool.index.front.renderer import Renderer
from kvpool.index.front.settings import RESPONSE_S, PlacingSettings, ProxySettings
from kvpool.index.front.token_checks import TokenChecks
from kvpool.index.front.token_makers import TokenMakers
from kvpool.index.net.connections import PLAIN, Connections
from kvpool.index.net.resolver import Resolver
from kvpool.index.request_stats import ProxyStats, RequestStats
from kvpool.index.serve.auth import TokenAuth
from kvpool.index.serve.calls import Calls
from kvpool.index.serve.health import WARM_UP_S, Health
from kvpool.index.serve.http import HttpServer
from kvpool.index.serve.metrics import Exporter
from kvpool.index.serve.service import IndexServer
from kvpool.index.serve.status import Status
from kvpool.index.tokens.tokenizer import Tokenizer
from kvpool.index.tokens.tokenizers import Tokenizers
from kvpool.tracing import Tracing

BOOTSTRAP_TIMEOUT_S = 30.0

logger = logging.getLogger("kvpool.index")


@dataclass(frozen=True, kw_only=True)
class Following:
    """Whom an index follows. ``workers``: these, until they are removed. ``pool``: the URL of a pool: the workers that
    announce themselves there, of ``tenants`` (empty: of all), and its blocks, of which it checks ``keys_per_s``.
    ``networks``: where workers may be whom ``workers`` does not name; None: anywhere. ``reads_load``: from workers'
    metrics. ``tls``: for workers at https; None: the system's authorities.
    """

    workers: Sequence[Worker] = ()
    pool: str | None = None
    tenants: Sequence[str] = ()
    keys_per_s: int = DEFAULT_KEYS_PER_S
    networks: WorkerNetworks | None = None
    reads_load: bool = True
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What an index begins with: what the index at ``bootstrap`` (``HOST:PORT``, asked with ``token``) knows, else the
    file ``snapshot``, else nothing. The file is written every ``every_s`` seconds. ``warm_up_s``: as in ``Health``.
    """

    bootstrap: str | None = None
    token: str | None = field(default=None, repr=False)
    snapshot: Path | None = None
    every_s: float = 60.0
    warm_up_s: float = WARM_UP_S


@dataclass(frozen=True, kw_only=True)
class Doors:
    """Where an index listens, each ``HOST:PORT``, port 0: any free one; None: nowhere. ``http``: status page and JSON;
    ``ext_proc``: for Envoy; ``proxy``: for requests themselves, of the first of ``Following.tenants``.

    ``names``: by which browsers' pages may ask, beside addresses and private names. ``auth``: of gRPC, HTTP and
    ``ext_proc``. ``response_s``: longest silence of a proxy's worker.
    """

    grpc: str | None = None
    metrics: str | None = None
    http: str | None = None
    ext_proc: str | None = None
    proxy: str | None = None
    names: Collection[str] = ()
    auth: TokenAuth = field(default_factory=TokenAuth)
    connections: Connections = PLAIN
    response_s: float = RESPONSE_S


class Ports(NamedTuple):
    """Of ``Doors``; 0: none."""

    grpc: int = 0
    metrics: int = 0
    http: int = 0
    ext_proc: int = 0
    proxy: int = 0


class Index:
    """``start`` it once, then ``stop``; also an async context manager.

    ``fleet``: what is known; None: an unbounded one of workers without ``PYTHONHASHSEED``. ``router``: of the same
    fleet. ``stop`` closes the fleet. ``tokenizers``: by model. ``traces``: URL of a collector of spans; None: nowhere.
    """

    def __init__(
        self,
        fleet: Fleet | None = None,
        router: Router | None = None,
        *,
        tokenizers: Mapping[str, Tokenizer] | None = None,
        following: Following | None = None,
        beginning: Beginning | None = None,
        doors: Doors | None = None,
        placing: PlacingSettings | None = None,
        traces: str | None = None,
    ) -> None:
        self.fleet = fleet or Fleet()
        self.router = router or Router(self.fleet)
        self._following, self._beginning = following or Following(), beginning or Beginning()
        self._doors, self._placing = doors or Doors(), placing or PlacingSettings()
        self._by_model, self._traces = tokenizers, traces
        self._stats, self._proxy_stats = RequestStats(), ProxyStats()
        self._resolver = Resolver()  # of any address, without networks
        self._pool: PoolFollower | None = None
        self._server: IndexServer | None = None
        self._proxy: Proxy | None = None
        self._is_complete = False  # all workers to follow are named
        self._is_begun = False
        self._changing = asyncio.Lock()  # held by ``start`` and ``stop``
        self._parts, self._asked = AsyncExitStack(), ExitStack()

    async def __aenter__(self) -> Index:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> Ports:
        """Follow, listen and answer. Blocks for seconds on a pool that is away. Errors: ``ConfigError``; then nothing
        of it runs. ``RuntimeError``: it was started or stopped before, or its fleet was closed.
        """
        feed = self.fleet.feed
        if self._is_begun or (feed is not None and not feed.is_alive):
            raise RuntimeError(
                "an index starts once, and so does its fleet: make another Index, with another Fleet"
            )
        self._is_begun = True
        async with self._changing, AsyncExitStack() as parts:
            await self._learn(parts)
            ports = await self._open(parts)
            for worker in self._following.workers:
                self.fleet.add(worker, "flag")
            if self._pool is not None:
                self._pool.start()
            self._is_complete = True
            if (path := self._beginning.snapshot) is not None:
                file = SnapshotFile(
                    path, lambda: self.fleet.packed(self._take), every_s=self._beginning.every_s
                )
                parts.callback(file.close)
            self._parts = parts.pop_all()
        return ports

    async def wait(self, ended: asyncio.Event) -> None:
        """Serve until ``ended``. Errors: what ends the feed of events."""
        assert self._server is not None
        await self._server.wait(ended)

    async def leave(self, drain_s: float, finish_s: float, now: asyncio.Event) -> None:
        """Report "not serving", and answer for ``drain_s``; then a proxy takes no new requests, and those under way
        have ``finish_s``. ``now`` ends either.
        """
        assert self._server is not None
        if self._proxy is not None:
            self._proxy.leave()
        if drain_s and not now.is_set():
            logger.info("not serving any more; calls are answered for another %g s", drain_s)
            await self._server.drain(drain_s, now)
        if self._proxy is not None and not now.is_set():
            await self._proxy.finish(finish_s, now)

    async def stop(self) -> None:
        """End all, behind a start that is under way; running calls have a few seconds. Idempotent. Blocks as ``start``
        does.
        """
        self._is_begun = True
        self._asked.close()
        async with self._changing:
            await self._parts.aclose()

    # ---- parts

    async def _learn(self, parts: AsyncExitStack) -> None:
        """Feed, pool and what was known before."""
        following, beginning, fleet = self._following, self._beginning, self.fleet
        if beginning.snapshot is not None:
            parts.enter_context(snapshot_file.lock(beginning.snapshot))
        trusted = {(worker.tenant, *place) for worker in following.workers for place in places_of(worker)}
        if (networks := following.networks) is not None:
            fleet.networks = networks
            self._resolver = Resolver(allows=networks.allows, trusted=trusted)
        if fleet.feed is None:
            fleet.feed = Subscriber(limits=fleet.limits, resolver=self._resolver)
        parts.callback(fleet.close)
        if following.pool is not None:
            self._pool = PoolFollower(
                following.pool, fleet, keys_per_s=following.keys_per_s, tenants=following.tenants or None
            )
            parts.callback(self._pool.close)
        if beginning.snapshot is not None or beginning.bootstrap is not None:
            with ExitStack() as self._asked:  # when it closes, a thread that still waits for the peer ends
                peer: IndexClient | None = None
                if beginning.bootstrap is not None:
                    peer = self._asked.enter_context(IndexClient(beginning.bootstrap, token=beginning.token))
                await asyncio.to_thread(self._warm_up, peer)

    async def _open(self, parts: AsyncExitStack) -> Ports:
        """Everything that answers."""
        doors, fleet = self._doors, self.fleet
        tokenizers = Tokenizers(self._by_model, fleet.limits)
        parts.callback(tokenizers.close)
        tracing = Tracing()
        if self._traces is not None:
            tracing = Tracing.to(self._traces, "kvpool-index" if doors.proxy is None else "kvpool-router")
            parts.callback(tracing.close)
        proxy_stats = None if doors.proxy is None else self._proxy_stats
        exporter = Exporter(fleet, self._stats, self._pool, proxy_stats)
        parts.push_async_callback(exporter.close)
        self._server = server = IndexServer(
            fleet,
            Calls(doors.auth, self._stats, fleet.limits, None if self._traces is None else tracing),
            router=self.router,
            tokenizers=tokenizers,
            pool=self._pool,
            take=self._take,
            health=Health(self._is_warm, self._beginning.warm_up_s),
            connections=doors.connections,
        )
        parts.push_async_callback(server.stop)
        if self._following.reads_load:
            loads, tls = self.router.loads, self._following.tls
            scraper = Scraper(fleet, loads, resolver=self._resolver, tls=tls, check=self.router.check)
            parts.push_async_callback(scraper.close)
            scraper.start()
        ports = Ports(grpc=await server.start(doors.grpc))
        if doors.metrics is not None:
            ports = ports._replace(metrics=await exporter.serve(doors.metrics))
        if doors.http is not None:
            ports = ports._replace(http=await self._open_http(doors.http, server, tokenizers, parts))
        if doors.ext_proc is None and doors.proxy is None:
            return ports
        placer = self._placer(server, tokenizers, tracing, parts)
        if doors.ext_proc is not None:
            picker = ExtProcServer(placer, server.calls, server.health, doors.connections)
            parts.push_async_callback(picker.stop)
            ports = ports._replace(ext_proc=await picker.start(doors.ext_proc))
        if doors.proxy is not None:
            settings = ProxySettings(
                tenant=next(iter(self._following.tenants), DEFAULT_TENANT),
                names=[*doors.names, doors.proxy.rpartition(":")[0]],
                response_s=doors.response_s,
            )
            self._proxy = Proxy(
                placer, fleet.limits, server.health, self._proxy_stats, settings,
                tls=doors.connections.tls, worker_tls=self._following.tls, tracing=tracing,
            )  # fmt: skip
            parts.push_async_callback(self._proxy.stop)
            ports = ports._replace(proxy=await self._proxy.start(doors.proxy))
        return ports

    async def _open_http(
        self, listen: str, server: IndexServer, tokenizers: Tokenizers, parts: AsyncExitStack
    ) -> int:
        status = Status(
            self.fleet, self.router, tokenizers, self._stats, self._pool, server.health.is_serving
        )
        parts.push_async_callback(status.close)
        status.start()
        names = [*self._doors.names, listen.rpartition(":")[0]]
        http = HttpServer(server, connections=self._doors.connections, status=status, names=names)
        parts.push_async_callback(http.stop)
        return await http.start(listen)

    def _placer(
        self, server: IndexServer, tokenizers: Tokenizers, tracing: Tracing, parts: AsyncExitStack
    ) -> Placer:
        renderer = Renderer(tls=self._following.tls, limits=self.fleet.limits)
        parts.push_async_callback(renderer.close)
        placer = Placer(
            self.fleet,
            self.router,
            TokenMakers(tokenizers, renderer, TokenChecks(tokenizers, self._stats)),
            Endpoints(self.fleet, self._resolver),
            self._placing,
            stats=self._stats,
            serves=lambda: server.health.serves,
            tracing=tracing,
        )
        parts.callback(placer.close)
        return placer

    # ---- what is known

    def _is_warm(self) -> bool:
        return self._is_complete and (self._pool is None or self._pool.rounds > 0) and self.fleet.joining == 0

    def _take(self) -> Snapshot:
        """Any thread."""
        return Snapshot(time.time(), "" if self._pool is None else self._pool.life, self.fleet.snapshot())

    def _warm_up(self, peer: IndexClient | None) -> None:
        """Begin with a warm peer's snapshot, else with the file's, else empty. Blocking."""
        beginning, fleet = self._beginning, self.fleet
        max_nbytes = fleet.limits.limit_of_snapshot_nbytes(MAX_NBYTES)

        def of_peer() -> Snapshot | None:
            if peer is None:
                return None
            return unpack(peer.snapshot(timeout_s=BOOTSTRAP_TIMEOUT_S, max_nbytes=max_nbytes))

        def of_file() -> Snapshot | None:
            path = beginning.snapshot
            return None if path is None else snapshot_file.read(path, max_nbytes=max_nbytes)

        flags = {worker.id for worker in self._following.workers}
        life = None if self._pool is None else self._pool.life
        for where, get in ((beginning.bootstrap, of_peer), (beginning.snapshot, of_file)):
            try:
                snapshot = get()
                if snapshot is None:
                    continue
                age_s = snapshot_file.age(snapshot)
                fleet.restore(snapshot, age_s=age_s, flags=flags, life=life)
            except (IndexUnavailable, SnapshotRefused) as error:
                logger.warning("no snapshot is taken over: %s", error)
                continue
            totals = fleet.totals()
            logger.info(
                "%d workers with %d blocks are back from %s, %.0f s old; each is credited when it has proved itself",
                totals.workers,
                totals.blocks,
                where,
                age_s,
            )
            return
