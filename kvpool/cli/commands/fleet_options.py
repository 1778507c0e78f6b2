"""Options of what follows a fleet of workers: ``kvpool index`` and ``kvpool router``."""

from __future__ import annotations

from typing import Annotated

import typer

Pool = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        envvar="KVPOOL_POOL",
        help="Follow the workers that announce themselves in this store. Name one with a password in the variable: "
        "every user of the host can read a process's arguments.",
    ),
]
PoolKeys = Annotated[
    int,
    typer.Option(
        metavar="KEYS",
        min=1,
        max=10_000_000,
        help="Keys of the pool looked at in a second, to see what it lost.",
    ),
]
WorkerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--worker",
        metavar="NAME=tcp://HOST:PORT,model=M,block=N[,...]",
        help="Follow a worker that does not, such as a stock vLLM. Also: replay=tcp://HOST:PORT, tenant=T, "
        "hash=ALGORITHM, address=URL, ranks=N.",
    ),
]
Networks = Annotated[
    list[str] | None,
    typer.Option(
        "--worker-networks",
        metavar="CIDR",
        help="Where workers are that no --worker names, such as 10.0.0.0/8, and ipc for Unix sockets; once for "
        "each. Without: everywhere but on the index's host and link; on its host, too, when --listen is loopback.",
    ),
]
MaxBlocks = Annotated[
    int, typer.Option(min=1, max=1 << 32, help="Distinct blocks of each model; 17 to 30 bytes each.")
]
ReuseReports = Annotated[
    bool,
    typer.Option(
        help="Whether a request may run with vLLM's kv_cache_report_mode full; if none does, copies and sliding "
        "windows are known exactly."
    ),
]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Of the index, such as 2GiB: three quarters for the tables of all models, where cold blocks make "
        "room, one for what is on its way and for snapshots. Without it: no limit for tables and snapshots, 1 GiB for "
        "the rest.",
    ),
]
Metrics = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Show Prometheus metrics there.")]
PlaceTimeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0.001,
        max=60,
        help="Longest time to find out the tokens of a request; then it is placed by load. Less than the proxy's "
        "own limit: Envoy's message_timeout is 0.2 s unless it is set.",
    ),
]
PlaceHeaders = Annotated[
    bool,
    typer.Option(help="Whether requests and responses say in x-kvpool-... headers where they went, and why."),
]
MaxWaiting = Annotated[
    int | None,
    typer.Option(
        metavar="REQUESTS",
        min=1,
        help="Requests that may wait at a worker: where all have as many, a request is answered with 429.",
    ),
]
SnapshotFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Keep what is known in this file, and begin with it at the next start."
    ),
]
SnapshotEvery = Annotated[
    float, typer.Option(metavar="SECONDS", min=0.1, max=86400, help="How often the file is written.")
]
Bootstrap = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Begin with what the index there knows, if it answers."),
]
WarmUp = Annotated[
    float,
    typer.Option(
        metavar="SECONDS", min=0, max=86400, help="Longest time until health says that the index serves."
    ),
]
TokenizerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tokenizer",
        metavar="MODEL=FOLDER",
        help="Take prompts of this model as text and chats, too; also a name on the Hugging Face hub.",
    ),
]
Scrape = Annotated[
    bool, typer.Option("--scrape/--no-scrape", help="Read the workers' own metrics, for Route.")
]
RouteCost = Annotated[
    list[str] | None,
    typer.Option(
        "--route-cost",
        metavar="NAME=NUMBER",
        help="A coefficient of Route: local, pool, waiting, running or usage.",
    ),
]
Tokens = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Ask callers for a token of this file; kvpool token makes entries."),
]
ServerCert = Annotated[
    str | None, typer.Option(metavar="FILE", help="Serve TLS with this certificate and its chain, PEM.")
]
ServerKey = Annotated[str | None, typer.Option(metavar="FILE", help="Its private key, PEM.")]
ClientCa = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Demand of callers a certificate of this authority, PEM."),
]
Drain = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0,
        max=3600,
        help="After SIGTERM, how long calls are answered while health says that the index does not serve; a second "
        "SIGTERM ends it.",
    ),
]
