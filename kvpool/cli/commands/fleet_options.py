"""Options of what follows a fleet of workers: ``kvpool index`` and ``kvpool router``."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli.commands.options import is_address, is_size
from kvpool.cli.log_lines import LogFormat, LogLevel

# The groups of options in --help, in the order in which they come.
ADDRESSES, WORKERS, PLACING = "Addresses", "Pool and workers", "Placing requests"
MEMORY, LIFE, SECURITY = "Memory and limits", "Start and end", "TLS and tokens"
LOGS = "Logs and traces"

Pool = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        envvar="KVPOOL_POOL",
        help="The pool whose workers are followed, such as valkey://HOST:6379. A URL with a password belongs in the "
        "variable: every user of the host can read a process's arguments. Without it: only the workers of --worker.",
        rich_help_panel=WORKERS,
    ),
]
PoolKeys = Annotated[
    int,
    typer.Option(
        metavar="KEYS",
        min=1,
        max=10_000_000,
        help="Keys of the pool that are checked in a second, to see what it has lost.",
        rich_help_panel=WORKERS,
    ),
]
WorkerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--worker",
        metavar="NAME=tcp://HOST:PORT,model=M,block=N[,...]",
        help="A worker that does not announce itself in the pool, such as a stock vLLM; once for each. tcp://: its KV "
        "events; block: tokens of a block. Also: address=http://HOST:PORT, where it serves requests (to send some "
        "there), replay=tcp://HOST:PORT, tenant=T, hash=ALGORITHM, ranks=N (data-parallel ones).",
        rich_help_panel=WORKERS,
    ),
]
Networks = Annotated[
    list[str] | None,
    typer.Option(
        "--worker-networks",
        metavar="[TENANT=]CIDR[,...]",
        help="Where workers that announce themselves may be, such as 10.0.0.0/8, and ipc for Unix sockets. With "
        "TENANT=, such as team=10.1.0.0/16: this tenant's are there alone, and no other's. Can be given several times. "
        "Without it: everywhere but on this host and its link; on this host, too, when --listen is loopback.",
        rich_help_panel=WORKERS,
    ),
]
WorkerCa = Annotated[
    str | None,
    typer.Option(
        "--worker-ca",
        metavar="FILE",
        help="The authority that certificates of workers at https:// are of, PEM. Without it: those of the system.",
        rich_help_panel=SECURITY,
    ),
]
MaxBlocks = Annotated[
    int,
    typer.Option(
        metavar="BLOCKS",
        min=1,
        max=1 << 32,
        help="Most distinct blocks that are known of each model; each takes 17 to 30 bytes.",
        rich_help_panel=MEMORY,
    ),
]
ReuseReports = Annotated[
    bool,
    typer.Option(
        help="Say --no-reuse-reports if no request sets vLLM's kv_cache_report_mode to full: the index is then exact "
        "about copies and sliding windows.",
        rich_help_panel=WORKERS,
    ),
]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory limit, such as 2GiB: three quarters for the tables of all models (when full, blocks that are "
        "seldom asked for are forgotten), one quarter for batches, requests and snapshots. Default: no limit for "
        "tables and snapshots, 1 GiB for the rest.",
        callback=is_size,
        rich_help_panel=MEMORY,
    ),
]
Metrics = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Where to show Prometheus metrics, at /metrics. Without it: nowhere.",
        callback=is_address,
        rich_help_panel=ADDRESSES,
    ),
]
Http = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Where to show the status page (/status), and to answer Lookup and Route in JSON "
        "(/v1/lookup, /v1/route).",
        callback=is_address,
        rich_help_panel=ADDRESSES,
    ),
]
PlaceTimeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0.001,
        max=60,
        help="Longest time to find out the tokens of a request's prompt; then it is placed by load alone. With Envoy: "
        "less than its message_timeout, which is 0.2 s unless it is set.",
        rich_help_panel=PLACING,
    ),
]
PlaceHeaders = Annotated[
    bool,
    typer.Option(
        help="Whether requests and responses get x-kvpool-... headers that say which worker was chosen, and why.",
        rich_help_panel=PLACING,
    ),
]
MaxWaiting = Annotated[
    int | None,
    typer.Option(
        metavar="REQUESTS",
        min=1,
        help="A worker with so many requests waiting gets no more; where all have as many, the answer is 429. "
        "Without it: no limit.",
        rich_help_panel=PLACING,
    ),
]
SnapshotFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Keep what is known in this file, and begin with it at the next start. Without it: begin with nothing.",
        rich_help_panel=LIFE,
    ),
]
SnapshotEvery = Annotated[
    float,
    typer.Option(
        metavar="SECONDS", min=0.1, max=86400, help="How often --snapshot is written.", rich_help_panel=LIFE
    ),
]
Bootstrap = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Begin with what the index there knows (its --listen, or a router's --grpc); if it does not answer, with "
        "--snapshot.",
        callback=is_address,
        rich_help_panel=LIFE,
    ),
]
WarmUp = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0,
        max=86400,
        help="After the start, health says no until all workers and the pool have been read, at most this long.",
        rich_help_panel=LIFE,
    ),
]
TokenizerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tokenizer",
        metavar="MODEL=FOLDER",
        help="Make the tokens of this model's texts and chats here, with the tokenizer of the folder, or of that name "
        "on the Hugging Face hub; once for each model. Without it: requests are placed by what a worker's /render "
        "says, and lookups need tokens.",
        rich_help_panel=PLACING,
    ),
]
Scrape = Annotated[
    bool,
    typer.Option(
        "--scrape/--no-scrape",
        help="Whether to read the workers' metrics, to know their load.",
        rich_help_panel=PLACING,
    ),
]
RouteCost = Annotated[
    list[str] | None,
    typer.Option(
        "--route-cost",
        metavar="NAME=NUMBER",
        help="A coefficient by which workers are ranked, in prompt tokens to compute; once for each. Default: local "
        "0.05, pool (measured, else 0.2), waiting (measured, else 1024), running 64, usage 1024; and speed, prompt "
        "tokens that a worker computes in a second, 8000.",
        rich_help_panel=PLACING,
    ),
]
Tokens = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Callers need a token of this file; kvpool token makes entries. Without it every caller that reaches a "
        "port may ask.",
        rich_help_panel=SECURITY,
    ),
]
ServerCert = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Serve TLS with this certificate and its chain, PEM; goes with --tls-key.",
        rich_help_panel=SECURITY,
    ),
]
ServerKey = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="The private key of --tls-cert, PEM.", rich_help_panel=SECURITY),
]
ClientCa = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Callers need a certificate of this authority, PEM.", rich_help_panel=SECURITY
    ),
]
Drain = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0,
        max=3600,
        help="After SIGTERM, how long requests are still answered while health says no, so that callers go elsewhere; "
        "a second SIGTERM ends it.",
        rich_help_panel=LIFE,
    ),
]
LogLevelOption = Annotated[
    LogLevel,
    typer.Option("--log-level", help="Lowest level that is logged, to standard error.", rich_help_panel=LOGS),
]
LogFormatOption = Annotated[
    LogFormat,
    typer.Option("--log-format", help="Log format: text, or json (one object a line).", rich_help_panel=LOGS),
]
Traces = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="An OpenTelemetry collector, such as http://otel:4318 (OTLP over HTTP). It gets spans of requests whose "
        "traceparent says that they are sampled. Needs the extra trace. Without it: nowhere.",
        rich_help_panel=LOGS,
    ),
]
