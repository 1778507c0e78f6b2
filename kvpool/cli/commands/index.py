"""``kvpool index``, ``token``, ``lookup`` and ``top``: the prefix index served, asked and watched."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli.commands.fleet_options import (
    ADDRESSES,
    LIFE,
    MEMORY,
    PLACING,
    WORKERS,
    Bootstrap,
    ClientCa,
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
    Tokens,
    Traces,
    WarmUp,
    WorkerCa,
    WorkerOption,
)
from kvpool.cli.commands.options import ACCESS, Index, Json, TlsCa, TlsCert, TlsKey, TokenFile, is_address
from kvpool.cli.log_lines import LogFormat, LogLevel
from kvpool.text import parse_nbytes


def index(
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where to serve gRPC; port 0: any that is free.",
            callback=is_address,
            rich_help_panel=ADDRESSES,
        ),
    ] = "127.0.0.1:50051",
    pool: Pool = None,
    tenant: Annotated[
        list[str] | None,
        typer.Option(
            "--tenant",
            metavar="TENANT",
            help="Follow only this tenant's workers in the pool; once for each tenant. Default: all tenants in the "
            "pool's list. A tenant whose pool user has rights to its own keys only is not in that list: name it here.",
            rich_help_panel=WORKERS,
        ),
    ] = None,
    pool_keys_per_s: PoolKeys = 20_000,
    worker: WorkerOption = None,
    worker_networks: Networks = None,
    max_blocks: MaxBlocks = 1 << 27,
    reuse_reports: ReuseReports = True,
    max_memory: MaxMemory = None,
    metrics: Metrics = None,
    http: Http = None,
    ext_proc: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where to be Envoy's endpoint picker (ext_proc): it asks there where to send each request. With TLS "
            "and tokens as --listen; deploy/envoy.yaml is for it.",
            callback=is_address,
            rich_help_panel=ADDRESSES,
        ),
    ] = None,
    place_timeout: PlaceTimeout = 0.15,
    place_headers: PlaceHeaders = True,
    place_endpoints: Annotated[
        int,
        typer.Option(
            metavar="COUNT",
            min=1,
            max=4,
            help="Workers named for a request, best first, for the proxy to try in turn; 1 for a proxy that takes no "
            "list, such as an Envoy cluster of type ORIGINAL_DST.",
            rich_help_panel=PLACING,
        ),
    ] = 4,
    max_waiting: MaxWaiting = None,
    snapshot: SnapshotFile = None,
    snapshot_every: SnapshotEvery = 60.0,
    bootstrap: Bootstrap = None,
    warm_up: WarmUp = 15.0,
    tokenizer: TokenizerOption = None,
    scrape: Scrape = True,
    route_cost: RouteCost = None,
    tenant_share: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            min=0.001,
            max=1,
            help="Part of all workers, ranks, models and reservations that one tenant may have. Without it: 0.5 with "
            "--tokens, else 1.",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    tokens: Tokens = None,
    tls_cert: ServerCert = None,
    tls_key: ServerKey = None,
    tls_client_ca: ClientCa = None,
    worker_ca: WorkerCa = None,
    drain: Drain = 5.0,
    max_connection_age: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            max=86400,
            help="Age at which connections over gRPC and HTTP are ended, so that callers spread over new replicas; "
            "0: never.",
            rich_help_panel=LIFE,
        ),
    ] = 1800.0,
    max_connection_grace: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            max=86400,
            help="How long streams of such a connection may still go on; 0: for as long as they like.",
            rich_help_panel=LIFE,
        ),
    ] = 0.0,
    traces: Traces = None,
    log_level: LogLevelOption = LogLevel.INFO,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Serve the prefix index: which worker holds how much of a prompt. Runs until SIGTERM or Ctrl-C."""
    from kvpool.cli.index import IndexSettings, run_index

    run_index(
        IndexSettings(
            traces=traces, log_level=log_level, log_format=log_format,
            listen=listen, pool=pool, pool_keys_per_s=pool_keys_per_s, tenants=tenant or [],
            worker_networks=worker_networks or [], worker_ca=worker_ca,
            workers=worker or [], max_blocks=max_blocks,
            max_memory_nbytes=None if max_memory is None else parse_nbytes(max_memory),
            reuse_reports=reuse_reports, metrics=metrics, http=http, ext_proc=ext_proc,
            place_timeout_s=place_timeout, place_headers=place_headers, max_endpoints=place_endpoints,
            max_waiting=max_waiting, snapshot=snapshot, snapshot_every_s=snapshot_every, bootstrap=bootstrap,
            warm_up_s=warm_up, tokenizers=tokenizer or [], scrape=scrape, route_costs=route_cost or [],
            tokens=tokens, tls_cert=tls_cert, tls_key=tls_key, tls_client_ca=tls_client_ca,
            tenant_share=tenant_share, drain_s=drain,
            max_connection_age_s=max_connection_age, max_connection_grace_s=max_connection_grace,
        )
    )  # fmt: skip


def token(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Whom it is for; a name in the file of tokens.")
    ],
    token_file: Annotated[
        str,
        typer.Option(metavar="FILE", help="Where the token is written, a new file, for that caller alone."),
    ],
    right: Annotated[
        list[str] | None,
        typer.Option(
            "--right",
            metavar="RIGHT",
            autocompletion=lambda: ["read", "publish", "admin"],
            help="What it allows: read, publish or admin; once for each. Without it: read.",
        ),
    ] = None,
    tenant: Annotated[
        list[str] | None,
        typer.Option(
            "--tenant",
            metavar="TENANT",
            help="For whose workers; once for each; *: for all. Without it: default.",
        ),
    ] = None,
) -> None:
    """Make a bearer token for an index, and print the entry for its file of tokens.

    For example: kvpool token router-1 --token-file router-1.token >> tokens.toml
    """
    from kvpool.cli.token import run_token

    run_token(name=name, rights=right or ["read"], tenants=tenant or ["default"], token_file=token_file)


PROMPT = "Prompt, in one of four forms"
ANSWER = "Answer"


def lookup(
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL", help="The model, by the name that requests use.", rich_help_panel=PROMPT
        ),
    ],
    token_ids: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The prompt's token ids: JSON, or separated by spaces or commas; -: standard input.",
            rich_help_panel=PROMPT,
        ),
    ] = None,
    hashes: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The prompt's 64-bit block hashes, decimal or 0x...; -: standard input.",
            rich_help_panel=PROMPT,
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The prompt's text, for an index with a --tokenizer; -: standard input.",
            rich_help_panel=PROMPT,
        ),
    ] = None,
    chat: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The prompt as a chat: JSON, messages or the body of a request for /v1/chat/completions; -: standard "
            "input.",
            rich_help_panel=PROMPT,
        ),
    ] = None,
    lora_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name of the request's LoRA adapter; needs --lora-path.",
            rich_help_panel=PROMPT,
        ),
    ] = None,
    lora_path: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Path of the adapter, as on its worker.", rich_help_panel=PROMPT),
    ] = None,
    cache_salt: Annotated[
        str | None, typer.Option(metavar="SALT", help="The request's cache_salt.", rich_help_panel=PROMPT)
    ] = None,
    tenant: Annotated[
        str, typer.Option(metavar="TENANT", help="Whose workers are asked about.", rich_help_panel=ANSWER)
    ] = "default",
    worker: Annotated[
        list[str] | None,
        typer.Option(
            "--worker",
            metavar="NAME",
            help="Only this worker; once for each. Without it: all of the model.",
            rich_help_panel=ANSWER,
        ),
    ] = None,
    route: Annotated[
        bool,
        typer.Option(
            "--route",
            help="Rank the workers by what the prompt would cost, and say why.",
            rich_help_panel=ANSWER,
        ),
    ] = False,
    most: Annotated[
        int,
        typer.Option(
            metavar="ROWS",
            min=0,
            help="Most rows of the table; 0: all. JSON always has all.",
            rich_help_panel=ANSWER,
        ),
    ] = 40,
    as_json: Json = False,
    index_: Index = "127.0.0.1:50051",
    timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.001,
            max=3600,
            help="Longest wait for the answer.",
            rich_help_panel=ACCESS,
        ),
    ] = 5.0,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Ask an index how many leading blocks of a prompt each worker holds."""
    from kvpool.cli.index_connection import IndexConnection
    from kvpool.cli.lookup import run_lookup

    index = IndexConnection(index_, token_file, tls_ca, tls_cert, tls_key)
    run_lookup(
        model=model, index=index, token_ids=token_ids, hashes=hashes, text=text, chat=chat, tenant=tenant,
        lora_name=lora_name, lora_path=lora_path, cache_salt=cache_salt, workers=worker, route=route,
        timeout_s=timeout, most=most, as_json=as_json,
    )  # fmt: skip


ORDERS = ("name", "device", "host", "disk", "batches", "lag", "gaps", "resets")


def top(
    tenant: Annotated[
        str | None,
        typer.Option(
            metavar="TENANT", help="Only workers of this tenant. Without it: all.", rich_help_panel=ANSWER
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Only workers of this model. Without it: all.", rich_help_panel=ANSWER
        ),
    ] = None,
    sort: Annotated[
        str,
        typer.Option(
            metavar="COLUMN",
            autocompletion=lambda: list(ORDERS),
            help=f"Order of the rows: {', '.join(ORDERS[:-1])} or {ORDERS[-1]}.",
            rich_help_panel=ANSWER,
        ),
    ] = "name",
    most: Annotated[
        int,
        typer.Option(
            metavar="ROWS",
            min=0,
            help="Most rows of a table that is not live; 0: all. JSON always has all.",
            rich_help_panel=ANSWER,
        ),
    ] = 0,
    interval: Annotated[
        float,
        typer.Option(
            min=0.2, max=3600, metavar="SECONDS", help="Time between two looks.", rich_help_panel=ANSWER
        ),
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look once, and exit.", rich_help_panel=ANSWER)
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object a look instead of tables, of a failure too."),
    ] = False,
    index_: Index = "127.0.0.1:50051",
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Watch an index: its workers, what they hold, how far behind it is, hit ratios. Runs until Ctrl-C."""
    from kvpool.cli.index_connection import IndexConnection
    from kvpool.cli.top import run_top

    run_top(
        index=IndexConnection(index_, token_file, tls_ca, tls_cert, tls_key), tenant=tenant, model=model, sort=sort,
        most=most, interval_s=interval, once=once, as_json=as_json,
    )  # fmt: skip
