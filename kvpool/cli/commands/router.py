"""``kvpool router``: an OpenAI-compatible address in front of a fleet."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli.commands.fleet_options import (
    ADDRESSES,
    LIFE,
    PLACING,
    SECURITY,
    WORKERS,
    Bootstrap,
    Drain,
    Http,
    LogFormatOption,
    LogLevelOption,
    MaxBlocks,
    MaxMemory,
    MaxWaiting,
    Metrics,
    Networks,
    PlaceHeaders,
    PlaceTimeout,
    Pool,
    PoolKeys,
    ReuseReports,
    RouteCost,
    Scrape,
    ServerCert,
    ServerKey,
    SnapshotEvery,
    SnapshotFile,
    TokenizerOption,
    Traces,
    WarmUp,
    WorkerCa,
    WorkerOption,
)  # fmt: skip
from kvpool.cli.commands.options import is_address
from kvpool.cli.log_lines import LogFormat, LogLevel
from kvpool.errors import ConfigError
from kvpool.text import parse_nbytes


def router(
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where to take requests over HTTP; port 0: any that is free.",
            callback=is_address,
            rich_help_panel=ADDRESSES,
        ),
    ] = "127.0.0.1:8080",
    pool: Pool = None,
    tenant: Annotated[
        str,
        typer.Option(
            metavar="TENANT",
            help="Whose workers serve the requests; no others are followed.",
            rich_help_panel=WORKERS,
        ),
    ] = "default",
    pool_keys_per_s: PoolKeys = 20_000,
    worker: WorkerOption = None,
    worker_networks: Networks = None,
    worker_ca: WorkerCa = None,
    max_blocks: MaxBlocks = 1 << 27,
    reuse_reports: ReuseReports = True,
    max_memory: MaxMemory = None,
    metrics: Metrics = None,
    http: Http = None,
    grpc: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where to answer over gRPC as kvpool index does: for kvpool top and lookup, and the --bootstrap of "
            "another router. Without it: nowhere.",
            callback=is_address,
            rich_help_panel=ADDRESSES,
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Callers of --grpc and --http need a token of this file; kvpool token makes entries. Requests need "
            "none: workers check the keys of their callers.",
            rich_help_panel=SECURITY,
        ),
    ] = None,
    place_timeout: PlaceTimeout = 1.0,
    place_headers: PlaceHeaders = True,
    max_waiting: MaxWaiting = None,
    response_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.1,
            max=86400,
            help="Longest silence of a worker; then the answer is 504, or a response that has begun is broken off.",
            rich_help_panel=PLACING,
        ),
    ] = 600.0,
    snapshot: SnapshotFile = None,
    snapshot_every: SnapshotEvery = 60.0,
    bootstrap: Bootstrap = None,
    warm_up: WarmUp = 15.0,
    tokenizer: TokenizerOption = None,
    scrape: Scrape = True,
    route_cost: RouteCost = None,
    tls_cert: ServerCert = None,
    tls_key: ServerKey = None,
    drain: Drain = 5.0,
    finish: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            max=86400,
            help="After --drain, how long requests under way may take to end; no new ones are taken then.",
            rich_help_panel=LIFE,
        ),
    ] = 60.0,
    traces: Traces = None,
    log_level: LogLevelOption = LogLevel.INFO,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Serve OpenAI's API in front of a fleet: each request goes where its prompt costs least. Runs until SIGTERM."""
    from kvpool.cli.index import IndexSettings, run_index

    if tokens is not None and grpc is None and http is None:
        raise ConfigError("--tokens is for callers of --grpc and --http: give one of them, too")
    run_index(
        IndexSettings(
            traces=traces, log_level=log_level, log_format=log_format,
            listen=grpc, proxy=listen, pool=pool, pool_keys_per_s=pool_keys_per_s, tenants=[tenant],
            worker_networks=worker_networks or [], workers=worker or [], worker_ca=worker_ca, max_blocks=max_blocks,
            max_memory_nbytes=None if max_memory is None else parse_nbytes(max_memory),
            reuse_reports=reuse_reports, metrics=metrics, http=http,
            place_timeout_s=place_timeout, place_headers=place_headers, max_waiting=max_waiting,
            response_timeout_s=response_timeout, snapshot=snapshot, snapshot_every_s=snapshot_every,
            bootstrap=bootstrap, warm_up_s=warm_up, tokenizers=tokenizer or [], scrape=scrape,
            route_costs=route_cost or [], tokens=tokens, tls_cert=tls_cert, tls_key=tls_key, drain_s=drain,
            finish_s=finish,
        )
    )  # fmt: skip
