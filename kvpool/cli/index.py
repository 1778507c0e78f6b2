"""``kvpool index`` and ``kvpool router``: the index as a process, with or without a proxy."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import resource
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from kvpool.cli.index_options import load_tokenizers, parse_costs, parse_worker
from kvpool.cli.settings import IndexSettings, LogFormat, LogLevel, RouterSettings
from kvpool.discovery.networks import WorkerNetworks
from kvpool.discovery.worker import Worker
from kvpool.environment import hash_seed, index_token
from kvpool.errors import ConfigError
from kvpool.index.client.channel import check_target
from kvpool.index.cost.router import Router
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.follow import snapshot_file
from kvpool.index.front.settings import PlacingSettings
from kvpool.index.index import Beginning, Doors, Following, Index, Ports
from kvpool.index.net.connections import Connections
from kvpool.index.net.listener import is_loopback
from kvpool.index.net.tls import ServerTls, trusting
from kvpool.index.net.worker_url import parse_url
from kvpool.index.serve.auth import TokenAuth
from kvpool.text import counted, make_printable, parse_nbytes, redact

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
    index = Index(
        fleet,
        Router(fleet, costs=parse_costs(settings.route_cost), tenant_share=tenant_share),
        tokenizers=load_tokenizers(settings.tokenizer),
        doors=_doors(settings),
        following=_following(settings, named),
        beginning=Beginning(
            bootstrap=settings.bootstrap,
            token=index_token() or None,
            snapshot=None if settings.snapshot is None else Path(settings.snapshot),
            every_s=settings.snapshot_every,
            warm_up_s=settings.warm_up,
        ),
        placing=PlacingSettings(
            timeout_s=settings.place_timeout,
            max_waiting=settings.max_waiting,
            max_endpoints=settings.place_endpoints,
            shows=not settings.no_place_headers,
            session_header=settings.session_header,
        ),
        traces=settings.traces,
    )
    log_to_stderr(settings.log_level, settings.log_format)
    _allow_descriptors()
    _run(_serve(settings, index, len(named)), fast=settings.proxy is not None)


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


def _doors(settings: Settings) -> Doors:
    auth = TokenAuth(settings.tokens)
    tls = _tls(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    return Doors(
        grpc=settings.grpc,
        metrics=settings.metrics,
        http=settings.http,
        ext_proc=settings.ext_proc,
        proxy=settings.proxy,
        names=settings.http_name,
        auth=auth,
        connections=Connections(tls, settings.max_connection_age, settings.max_connection_grace),
        response_s=settings.response_timeout,
    )


def _following(settings: Settings, workers: Sequence[Worker]) -> Following:
    tls = trusting("--worker-ca", settings.worker_ca) if settings.worker_ca is not None else None
    return Following(
        workers=workers,
        pool=settings.pool,
        tenants=settings.tenants,
        keys_per_s=settings.pool_keys_per_s,
        # On a host by itself the workers are local, too.
        networks=WorkerNetworks(settings.worker_networks, loopback=is_loopback(_front(settings))),
        reads_load=not settings.no_scrape,
        tls=tls,
    )


def _front(settings: Settings) -> str:
    front = settings.proxy or settings.grpc
    assert front is not None
    return front


async def _serve(settings: Settings, index: Index, named: int) -> None:
    """``named``: workers by ``--worker``."""
    ended, now = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def end(number: int) -> None:
        if number == signal.SIGINT or ended.is_set():
            now.set()
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    gc.collect()
    gc.freeze()  # full collections over all imports stopped the index for 160 ms, and its end for half a second
    async with AsyncExitStack() as parts:
        parts.push_async_callback(_calls_end)
        parts.push_async_callback(index.stop)
        if (ports := await _started(index, ended)) is None:
            return
        if not (settings.pool or named or settings.snapshot or settings.bootstrap):
            alone = settings.proxy is not None and settings.grpc is None
            logger.warning(
                "neither --pool nor --worker is given: no worker is known, and %s",
                "all is answered with 503" if alone else "none is until one registers",
            )
        print(_ready(settings, ports, named), flush=True)
        await index.wait(ended)
        await index.leave(settings.drain, settings.finish, now)


async def _started(index: Index, ended: asyncio.Event) -> Ports | None:
    """Its ports; None: told to end before it answered, which a pool or a peer that is silent may hold up."""
    starting, waiting = asyncio.ensure_future(index.start()), asyncio.ensure_future(ended.wait())
    try:
        await asyncio.wait((starting, waiting), return_when=asyncio.FIRST_COMPLETED)
        return await starting if starting.done() else None
    finally:
        starting.cancel()
        waiting.cancel()
        await asyncio.wait((starting, waiting))


def _ready(settings: Settings, ports: Ports, named: int) -> str:
    """The line that says that it serves, and where."""
    shown = ""
    if settings.metrics is not None:
        shown = f", metrics on port {ports.metrics}"
    if settings.http is not None:
        scheme, host = "http" if settings.tls_cert is None else "https", settings.http.rpartition(":")[0]
        shown += f", HTTP on port {ports.http} (status page {scheme}://{host}:{ports.http}/status)"
    if settings.ext_proc is not None:
        shown += f", ext_proc on port {ports.ext_proc}"
    what, port = "index", ports.grpc
    if settings.proxy is not None:
        what, port = "router", ports.proxy
        if ports.grpc:
            shown += f", gRPC on port {ports.grpc}"
    host = _front(settings).rpartition(":")[0]
    workers = f"{counted(named, 'worker')} by --worker, " if named else ""  # others join by and by
    url = redact(settings.pool) if settings.pool else "none"
    return f"{what} listens on {host}:{port}, {workers}pool {url}{shown}"


async def _calls_end() -> None:
    """Wait for gRPC's tasks of last-answered calls: cancelled by the loop's end, they print a traceback."""
    if calls := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(calls, timeout=CALLS_END_S)


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
