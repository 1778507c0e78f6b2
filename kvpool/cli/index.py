"""``kvpool index`` and ``kvpool router``: the index as a process, with or without a proxy."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import resource
import signal
import ssl
import sys
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from kvpool.cli.index_options import load_tokenizers, parse_costs, parse_worker
from kvpool.cli.options import IndexConnection
from kvpool.cli.settings import IndexSettings, LogFormat, LogLevel, RouterSettings
from kvpool.discovery.networks import WorkerNetworks, places_of
from kvpool.discovery.worker import DEFAULT_TENANT, Worker
from kvpool.environment import hash_seed
from kvpool.errors import ConfigError, IndexUnavailable, SnapshotRefused
from kvpool.index.client.channel import check_target
from kvpool.index.cost.router import Router
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.snapshot import MAX_NBYTES, Snapshot, unpack
from kvpool.index.follow import snapshot_file
from kvpool.index.follow.pool_follower import PoolFollower
from kvpool.index.follow.scraper import Scraper
from kvpool.index.follow.snapshot_file import SnapshotFile
from kvpool.index.follow.subscriber import Subscriber
from kvpool.index.front.endpoints import Endpoints
from kvpool.index.front.ext_proc import ExtProcServer
from kvpool.index.front.placer import Placer
from kvpool.index.front.proxy import Proxy
from kvpool.index.front.renderer import Renderer
from kvpool.index.front.settings import PlacingSettings, ProxySettings
from kvpool.index.front.token_checks import TokenChecks
from kvpool.index.front.token_makers import TokenMakers
from kvpool.index.net.connections import Connections
from kvpool.index.net.listener import is_loopback
from kvpool.index.net.resolver import Resolver
from kvpool.index.net.tls import ServerTls, trusting
from kvpool.index.net.worker_url import parse_url
from kvpool.index.request_stats import ProxyStats, RequestStats
from kvpool.index.serve.auth import TokenAuth
from kvpool.index.serve.calls import Calls
from kvpool.index.serve.health import Health
from kvpool.index.serve.http import HttpServer
from kvpool.index.serve.metrics import Exporter
from kvpool.index.serve.service import IndexServer
from kvpool.index.serve.status import Status
from kvpool.index.tokens.tokenizer import Tokenizer
from kvpool.index.tokens.tokenizers import Tokenizers
from kvpool.text import counted, make_printable, parse_nbytes, redact
from kvpool.tracing import Tracing

BOOTSTRAP_TIMEOUT_S = 30.0
CALLS_END_S = 1.0
TENANT_SHARE = 0.5  # of workers, ranks, models and reservations
# How long a thread may keep the interpreter from another. With Python's 5 ms, a lookup during a batch waits
# several times as long as it works; a tenth costs batches nothing measurable.
SWITCH_S = 0.0005

Settings = IndexSettings | RouterSettings

logger = logging.getLogger("kvpool.index")


def run_index(settings: Settings) -> None:
    """Serve until SIGTERM, and ``drain`` longer, or SIGINT. Errors: ``ConfigError``, before anything is served."""
    sys.setswitchinterval(SWITCH_S)
    tenant_share = settings.tenant_share
    if tenant_share is None:  # without tokens a caller can take any tenant's name
        tenant_share = 1.0 if settings.tokens is None else TENANT_SHARE
    max_memory_nbytes = None if settings.max_memory is None else parse_nbytes(settings.max_memory)
    fleet = Fleet(
        max_blocks=settings.max_blocks,
        max_memory_nbytes=max_memory_nbytes,
        reuse_reports=not settings.no_reuse_reports,
        seed=hash_seed(),
        tenant_share=tenant_share,
    )
    if settings.snapshot is not None:
        snapshot_file.check_place(Path(settings.snapshot))
    if settings.bootstrap is not None:
        check_target(settings.bootstrap)
    named = [parse_worker(text, fleet.seed_id) for text in settings.worker]
    if len({worker.id for worker in named}) != len(named):
        raise ConfigError("--worker: two workers of one tenant have the same name")
    if settings.proxy is not None or settings.ext_proc is not None:
        _check_addresses(named)
    router = Router(fleet, costs=parse_costs(settings.route_cost), tenant_share=tenant_share)
    loaded = load_tokenizers(settings.tokenizer)
    auth = TokenAuth(settings.tokens)
    tls = _tls(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    worker_tls = trusting("--worker-ca", settings.worker_ca) if settings.worker_ca is not None else None
    log_to_stderr(settings.log_level, settings.log_format)
    _allow_descriptors()
    _run(
        _serve(settings, fleet, named, router, loaded, auth, tls, worker_tls), fast=settings.proxy is not None
    )


def _run(serving: Coroutine[Any, Any, None], *, fast: bool) -> None:
    """``fast``: on uvloop, where it is installed."""
    if fast:
        try:
            import uvloop
        except ModuleNotFoundError:
            pass
        else:
            return uvloop.run(serving)
    return asyncio.run(serving)


def _check_addresses(workers: Sequence[Worker]) -> None:
    for worker in workers:
        try:
            parse_url(worker.address)
        except ConfigError as error:
            raise ConfigError(f"--worker {worker.name}: {error}") from error


def _tls(cert: str | None, key: str | None, client_ca: str | None) -> ServerTls | None:
    if (cert is None) != (key is None):
        raise ConfigError("--tls-cert and --tls-key go together: a certificate and its private key")
    if cert is None or key is None:
        if client_ca is not None:
            raise ConfigError("--tls-client-ca needs --tls-cert and --tls-key: there is no TLS without them")
        return None
    return ServerTls(cert, key, client_ca or "")


async def _serve(
    settings: Settings,
    fleet: Fleet,
    workers: Sequence[Worker],
    router: Router,
    by_model: Mapping[str, Tokenizer],
    auth: TokenAuth,
    tls: ServerTls | None,
    worker_tls: ssl.SSLContext | None,
) -> None:
    """Assembles an index, and takes it apart in the reverse order."""
    ended, now = asyncio.Event(), asyncio.Event()
    front = settings.proxy or settings.grpc
    assert front is not None
    complete = False  # all workers to follow are named
    pool: PoolFollower | None = None

    def is_warm() -> bool:
        return complete and (pool is None or pool.rounds > 0) and fleet.joining == 0

    def take() -> Snapshot:
        return Snapshot(time.time(), "" if pool is None else pool.life, fleet.snapshot())

    # On a host by itself the workers are local, too.
    networks = WorkerNetworks(settings.worker_networks, loopback=is_loopback(front))
    trusted = {(worker.tenant, *place) for worker in workers for place in places_of(worker)}
    file = None if settings.snapshot is None else Path(settings.snapshot)
    loop = asyncio.get_running_loop()

    def end(number: int) -> None:
        if number == signal.SIGINT or ended.is_set():
            now.set()
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    async with AsyncExitStack() as parts:
        parts.push_async_callback(_calls_end)
        if file is not None:
            parts.enter_context(snapshot_file.lock(file))
        resolver = Resolver(allows=networks.allows, trusted=trusted)
        fleet.feed, fleet.networks = Subscriber(limits=fleet.limits, resolver=resolver), networks
        parts.callback(fleet.close)
        if settings.pool is not None:
            pool = PoolFollower(
                settings.pool, fleet, keys_per_s=settings.pool_keys_per_s, tenants=settings.tenants or None
            )
            parts.callback(pool.close)
        life = None if pool is None else pool.life
        if file is not None or settings.bootstrap is not None:
            flags = {worker.id for worker in workers}
            await asyncio.to_thread(lambda: _warm_up(fleet, file, settings.bootstrap, flags, life))
        tokenizers = Tokenizers(by_model, fleet.limits)
        parts.callback(tokenizers.close)
        stats = RequestStats()
        tracing = Tracing()
        if settings.traces is not None:
            tracing = Tracing.to(
                settings.traces, "kvpool-index" if settings.proxy is None else "kvpool-router"
            )
            parts.callback(tracing.close)
        proxy_stats = None if settings.proxy is None else ProxyStats()
        exporter = Exporter(fleet, stats, pool, proxy_stats)
        parts.push_async_callback(exporter.close)
        connections = Connections(tls, settings.max_connection_age, settings.max_connection_grace)
        server = IndexServer(
            fleet,
            Calls(auth, stats, fleet.limits, None if settings.traces is None else tracing),
            router=router,
            tokenizers=tokenizers,
            pool=pool,
            take=take,
            health=Health(is_warm, settings.warm_up),
            connections=connections,
        )
        parts.push_async_callback(server.stop)
        if not settings.no_scrape:
            scraper = Scraper(fleet, router.loads, resolver=resolver, tls=worker_tls, check=router.check)
            parts.push_async_callback(scraper.close)
            scraper.start()
        port = await server.start(settings.grpc)
        shown = ""
        if settings.metrics is not None:
            shown = f", metrics on port {await exporter.serve(settings.metrics)}"
        if settings.http is not None:
            status = Status(fleet, router, tokenizers, stats, pool, server.health.is_serving)
            parts.push_async_callback(status.close)
            status.start()
            http_server = HttpServer(
                server, connections=connections, status=status,
                names=[*settings.http_name, settings.http.rpartition(":")[0]],
            )  # fmt: skip
            parts.push_async_callback(http_server.stop)
            http_port = await http_server.start(settings.http)
            page = f"{'http' if tls is None else 'https'}://{settings.http.rpartition(':')[0]}:{http_port}/status"
            shown += f", HTTP on port {http_port} (status page {page})"
        proxy: Proxy | None = None
        if settings.ext_proc is not None or settings.proxy is not None:
            renderer = Renderer(tls=worker_tls, limits=fleet.limits)
            parts.push_async_callback(renderer.close)
            placer = Placer(
                fleet,
                router,
                TokenMakers(tokenizers, renderer, TokenChecks(tokenizers, stats)),
                Endpoints(fleet, resolver),
                PlacingSettings(
                    timeout_s=settings.place_timeout,
                    max_waiting=settings.max_waiting,
                    max_endpoints=settings.place_endpoints,
                    shows=not settings.no_place_headers,
                    session_header=settings.session_header,
                ),
                stats=stats,
                serves=lambda: server.health.serves,
                tracing=tracing,
            )
            parts.callback(placer.close)
        if settings.ext_proc is not None:
            picker = ExtProcServer(placer, server.calls, server.health, connections)
            parts.push_async_callback(picker.stop)
            shown += f", ext_proc on port {await picker.start(settings.ext_proc)}"
        if settings.proxy is not None and proxy_stats is not None:
            proxy = Proxy(
                placer, fleet.limits, server.health, proxy_stats,
                ProxySettings(
                    tenant=(settings.tenants or [DEFAULT_TENANT])[0],
                    names=[*settings.http_name, settings.proxy.rpartition(":")[0]],
                    response_s=settings.response_timeout,
                ),
                tls=tls, worker_tls=worker_tls, tracing=tracing,
            )  # fmt: skip
            parts.push_async_callback(proxy.stop)
            if port:
                shown += f", gRPC on port {port}"
            port = await proxy.start(settings.proxy)
        for worker in workers:
            fleet.add(worker, "flag")
        if pool is not None:
            pool.start()
        complete = True
        gc.collect()
        gc.freeze()  # full collections over all imports stopped the index for 160 ms
        if file is not None:
            written = SnapshotFile(file, lambda: fleet.packed(take), every_s=settings.snapshot_every)
            parts.callback(written.close)
        host = front.rpartition(":")[0]
        what = "index" if proxy is None else "router"
        url = redact(settings.pool) if settings.pool else "none"
        if pool is None and not workers and file is None and settings.bootstrap is None:
            alone = proxy is not None and settings.grpc is None
            logger.warning(
                "neither --pool nor --worker is given: no worker is known, and %s",
                "all is answered with 503" if alone else "none is until one registers",
            )
        named = f"{counted(len(workers), 'worker')} by --worker, " if workers else ""  # others join by and by
        print(f"{what} listens on {host}:{port}, {named}pool {url}{shown}", flush=True)
        await server.wait(ended)
        if proxy is not None:
            proxy.leave()
        if settings.drain and not now.is_set():
            logger.info("not serving any more; calls are answered for another %g s", settings.drain)
            await server.drain(settings.drain, now)
        if proxy is not None and not now.is_set():
            await proxy.finish(settings.finish, now)


async def _calls_end() -> None:
    """Wait for gRPC's tasks of last-answered calls: cancelled by the loop's end, they print a traceback."""
    if calls := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(calls, timeout=CALLS_END_S)


def _warm_up(
    fleet: Fleet, file: Path | None, bootstrap: str | None, flags: Collection[str], life: str | None
) -> None:
    """Begin with a warm peer's snapshot, else with the file's, else empty. Blocking."""
    max_nbytes = fleet.limits.limit_of_snapshot_nbytes(MAX_NBYTES)

    def of_peer() -> Snapshot | None:
        if bootstrap is None:
            return None
        with IndexConnection(bootstrap).open() as peer:
            return unpack(peer.snapshot(timeout_s=BOOTSTRAP_TIMEOUT_S, max_nbytes=max_nbytes))

    def of_file() -> Snapshot | None:
        return None if file is None else snapshot_file.read(file, max_nbytes=max_nbytes)

    for where, get in ((bootstrap, of_peer), (file, of_file)):
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


def _allow_descriptors() -> None:
    """As many as this process may have: a publisher takes two, and 1,024 is a usual start."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class JsonLines(logging.Formatter):
    """``time`` (UTC), ``level``, ``logger``, ``message``; ``exception`` with its stack, if any."""

    def format(self, record: logging.LogRecord) -> str:
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{whole}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr(level: LogLevel, form: LogFormat) -> None:
    """kvpool logs to standard error from now on, and nowhere else. Idempotent: takes the new level and form."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonLines() if form is LogFormat.JSON else text)
    handler.addFilter(make_printable)
    logger = logging.getLogger("kvpool")
    logger.handlers = [handler]
    logger.setLevel(level.value.upper())
    logger.propagate = False
