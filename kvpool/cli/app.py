"""The commands of ``kvpool`` and how they fail: one line on standard error and a non-zero exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool.errors import ConfigError, KVPoolError
from kvpool.text import format_nbytes, missing_extra, parse_nbytes

MAX_BATCH_NBYTES = 8 << 30
PEERS_FOLDER = ".cache/peers"
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="kvpool",
    help="A shared KV cache for vLLM workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
bench = typer.Typer(
    help="Measure what is here, side by side with its peer in one run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(bench, name="bench")

# How a command gets into an index.
TokenFile = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Holds the bearer token for the index; without it KVPOOL_INDEX_TOKEN."),
]
TlsCa = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Connect with TLS; the authority of the index's certificate, PEM."),
]
TlsCert = Annotated[
    str | None, typer.Option(metavar="FILE", help="Certificate of this client, where the index demands one.")
]
TlsKey = Annotated[str | None, typer.Option(metavar="FILE", help="Private key of --tls-cert.")]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def main() -> None:
    """Entry point of the console script."""
    os.environ.setdefault(
        "GRPC_VERBOSITY", "NONE"
    )  # what it would print of a failed handshake, our line says
    try:
        code = app(standalone_mode=False)  # what a command's typer.Exit says; Ctrl-C comes as 130
        if code == EXIT_INTERRUPTED:
            _end("interrupted", EXIT_INTERRUPTED)
        sys.exit(code)
    except typer.Abort:
        _end("aborted", EXIT_INTERRUPTED)
    except ConfigError as error:
        _end(str(error), EXIT_USAGE)
    except KVPoolError as error:
        _end(str(error), EXIT_FAILED)
    except Exception as error:
        # Wrong options, as click words them; anything else is a fault of ours and keeps its trace.
        if not hasattr(error, "format_message"):
            raise
        _end(f"{error.format_message()} (kvpool --help)", EXIT_USAGE)


def _end(sentence: str, code: int) -> None:
    print(f"kvpool: {sentence}", file=sys.stderr)
    sys.exit(code)


@app.callback(invoke_without_command=True)
def _version(
    ctx: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if show_version:
        print(version("kvpool"))
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


@app.command()
def demo(
    pool: Annotated[
        str | None, typer.Option(help="URL of the store; without it a file store in a temporary folder.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="A setting of the connector, such as lookup_timeout_s=1."
        ),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", metavar="NAME=VALUE", help="An option of vllm.LLM, such as dtype=bfloat16."),
    ] = None,
    block_size: Annotated[
        int, typer.Option(help="Tokens of a block (the CPU engine takes multiples of 32).")
    ] = 128,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the folder with the logs and the pool.")] = False,
    as_json: Json = False,
) -> None:
    """The main job: a second engine reuses the KV blocks that a first one computed.

    Starts two real vLLM CPU engines, one after the other, with a tiny random model.
    """
    from kvpool.cli.demo import run_demo

    good = run_demo(
        pool=pool,
        settings=_pairs("--set", setting),
        engine_options=_pairs("--engine", engine),
        block_tokens=block_size,
        keep=keep,
        as_json=as_json,
    )
    if not good:
        raise typer.Exit(EXIT_FAILED)


def _pairs(option: str, given: list[str] | None) -> dict[str, Any]:
    """NAME=VALUE pairs; a value is JSON where it is JSON, and text elsewhere."""
    pairs: dict[str, Any] = {}
    for pair in given or []:
        name, separator, text = pair.partition("=")
        if not separator or not name:
            raise ConfigError(f'{option} "{pair}": write NAME=VALUE')
        try:
            pairs[name] = json.loads(text)
        except ValueError:
            pairs[name] = text
    return pairs


@app.command()
def doctor(
    pool: Annotated[str | None, typer.Option(help="URL of the store to examine.")] = None,
    index: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Address of the index to examine; give it again for each of its replicas, to compare them.",
        ),
    ] = None,
    tenant: Annotated[str, typer.Option(help="Whose part of the pool.")] = "default",
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    as_json: Json = False,
) -> None:
    """Say what keeps a pool, its workers or an index from working, and what to change.

    Exits with 1 when there is a problem. Writes one small block and takes it away again.
    """
    if pool is None and not index:
        raise ConfigError("name what to examine: --pool URL, --index HOST:PORT, or both")
    from kvpool.cli.doctor.doctor import run_doctor
    from kvpool.cli.index_connection import IndexConnection

    ways = (token_file, tls_ca, tls_cert, tls_key)
    indexes = [IndexConnection(target, *ways) for target in index or ()]
    if not run_doctor(pool=pool, indexes=indexes, tenant=tenant, as_json=as_json):
        raise typer.Exit(EXIT_FAILED)


@app.command()
def purge(
    pool: Annotated[str, typer.Option(help="URL of the store to delete from.")],
    tenant: Annotated[str | None, typer.Option(help="Delete all that this tenant has.")] = None,
    namespace: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="Delete this namespace; 8 digits do, 32 are all of them."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--everything", help="Delete all blocks of all tenants.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Delete blocks and announcements of a tenant, of a namespace, or all; says what, and asks first."""
    from kvpool.cli.purge import run_purge

    run_purge(pool=pool, tenant=tenant, namespace=namespace, everything=everything, yes=yes, as_json=as_json)


@app.command()
def index(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to serve; port 0: any that is free.")
    ] = "127.0.0.1:50051",
    pool: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Follow the workers that announce themselves in this store."),
    ] = None,
    pool_keys_per_s: Annotated[
        int,
        typer.Option(
            metavar="KEYS",
            min=1,
            max=10_000_000,
            help="Keys of the pool looked at in a second, to see what it lost.",
        ),
    ] = 20_000,
    worker: Annotated[
        list[str] | None,
        typer.Option(
            "--worker",
            metavar="NAME=tcp://HOST:PORT,model=M,block=N[,...]",
            help="Follow a worker that does not, such as a stock vLLM. Also: replay=tcp://HOST:PORT, tenant=T, "
            "hash=ALGORITHM, address=URL, ranks=N.",
        ),
    ] = None,
    max_blocks: Annotated[
        int, typer.Option(min=1, max=1 << 32, help="Distinct blocks of each model; 17 to 30 bytes each.")
    ] = 1 << 27,
    reuse_reports: Annotated[
        bool,
        typer.Option(
            help="Whether a request may run with vLLM's kv_cache_report_mode full; if none does, copies and sliding "
            "windows are known exactly."
        ),
    ] = True,
    max_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Of the tables of all models, such as 2GiB; cold blocks make room."
        ),
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Show Prometheus metrics there.")
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Answer Mooncake's RFC 1403 (/query, /query_by_hash) there."),
    ] = None,
    snapshot: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Keep what is known in this file, and begin with it at the next start."
        ),
    ] = None,
    snapshot_every: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, max=86400, help="How often the file is written.")
    ] = 60.0,
    bootstrap: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Begin with what the index there knows, if it answers."),
    ] = None,
    warm_up: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0, max=86400, help="Longest time until health says that the index serves."
        ),
    ] = 15.0,
    tokenizer: Annotated[
        list[str] | None,
        typer.Option(
            "--tokenizer",
            metavar="MODEL=FOLDER",
            help="Take prompts of this model as text and chats, too; also a name on the Hugging Face hub.",
        ),
    ] = None,
    scrape: Annotated[
        bool, typer.Option("--scrape/--no-scrape", help="Read the workers' own metrics, for Route.")
    ] = True,
    route_cost: Annotated[
        list[str] | None,
        typer.Option(
            "--route-cost",
            metavar="NAME=NUMBER",
            help="A coefficient of Route: local, pool, waiting, running or usage.",
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Ask callers for a token of this file; kvpool token makes entries."
        ),
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option(metavar="FILE", help="Serve TLS with this certificate and its chain, PEM.")
    ] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="Its private key, PEM.")] = None,
    tls_client_ca: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Demand of callers a certificate of this authority, PEM."),
    ] = None,
) -> None:
    """Serve the prefix index: which worker holds how much of a prompt. Runs until SIGTERM or Ctrl-C."""
    with _extra():
        from kvpool.cli.index import IndexSettings, run_index

    run_index(
        IndexSettings(
            listen=listen, pool=pool, pool_keys_per_s=pool_keys_per_s, workers=worker or [], max_blocks=max_blocks,
            max_memory_nbytes=None if max_memory is None else parse_nbytes(max_memory),
            reuse_reports=reuse_reports, metrics=metrics, http=http, snapshot=snapshot,
            snapshot_every_s=snapshot_every, bootstrap=bootstrap, warm_up_s=warm_up, tokenizers=tokenizer or [],
            scrape=scrape, route_costs=route_cost or [], tokens=tokens, tls_cert=tls_cert, tls_key=tls_key,
            tls_client_ca=tls_client_ca,
        )
    )  # fmt: skip


@app.command()
def token(
    name: Annotated[str, typer.Argument(help="Whom it is for; a name in the file of tokens.")],
    token_file: Annotated[
        str,
        typer.Option(metavar="FILE", help="Where the token is written, a new file, for that caller alone."),
    ],
    right: Annotated[
        list[str] | None, typer.Option("--right", help="ask, publish or administer; give it again for more.")
    ] = None,
    tenant: Annotated[
        list[str] | None, typer.Option("--tenant", help="For whose workers; give it again for more; *: all.")
    ] = None,
) -> None:
    """Make a bearer token for an index, and print the entry for its file of tokens: kvpool token ... >> tokens.toml."""
    from kvpool.cli.token import run_token

    run_token(name=name, rights=right or ["ask"], tenants=tenant or ["default"], token_file=token_file)


@app.command()
def lookup(
    model: Annotated[str, typer.Option(help="The model's name, as requests are sent with.")],
    index_: Annotated[
        str, typer.Option("--index", metavar="HOST:PORT", help="Where the index serves.")
    ] = "127.0.0.1:50051",
    token_ids: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="The prompt as token ids: JSON, or separated by spaces or commas; -: stdin."
        ),
    ] = None,
    hashes: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The prompt as 64-bit block hashes, decimal or 0x...; -: stdin."),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The prompt as text, for an index with a --tokenizer; -: stdin."),
    ] = None,
    chat: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The same as a chat: JSON, messages or the body of a request for /v1/chat/completions; -: stdin.",
        ),
    ] = None,
    tenant: Annotated[str, typer.Option(help="Whose workers.")] = "default",
    lora_name: Annotated[str | None, typer.Option(help="Of the adapter of the request.")] = None,
    lora_path: Annotated[str | None, typer.Option(help="Of the adapter of the request.")] = None,
    cache_salt: Annotated[str | None, typer.Option(help="Of the request.")] = None,
    worker: Annotated[
        list[str] | None,
        typer.Option("--worker", metavar="NAME", help="Only this one; give it again for more."),
    ] = None,
    route: Annotated[
        bool, typer.Option("--route", help="Rank the workers by what the prompt would cost, and say why.")
    ] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest wait for the answer.")] = 5.0,
    most: Annotated[
        int, typer.Option(min=0, help="Most rows of the table; 0: all. JSON always has all.")
    ] = 40,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    as_json: Json = False,
) -> None:
    """Ask an index how many leading blocks of a prompt each worker holds."""
    with _extra():
        from kvpool.cli.index_connection import IndexConnection
        from kvpool.cli.lookup import run_lookup

    index = IndexConnection(index_, token_file, tls_ca, tls_cert, tls_key)
    run_lookup(
        model=model, index=index, token_ids=token_ids, hashes=hashes, text=text, chat=chat, tenant=tenant,
        lora_name=lora_name, lora_path=lora_path, cache_salt=cache_salt, workers=worker, route=route,
        timeout_s=timeout, most=most, as_json=as_json,
    )  # fmt: skip


@app.command()
def top(
    index_: Annotated[
        str, typer.Option("--index", metavar="HOST:PORT", help="Where the index serves.")
    ] = "127.0.0.1:50051",
    tenant: Annotated[str | None, typer.Option(help="Only workers of this tenant.")] = None,
    model: Annotated[str | None, typer.Option(help="Only workers of this model.")] = None,
    sort: Annotated[
        str, typer.Option(help="name, device, host, disk, batches, lag, gaps or resets.")
    ] = "name",
    most: Annotated[
        int, typer.Option(min=0, help="Most rows of a table that is not live; 0: all. JSON always has all.")
    ] = 0,
    interval: Annotated[
        float, typer.Option(min=0.2, max=3600, metavar="SECONDS", help="Time between two looks.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, and exit.")] = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a look instead of a table.")
    ] = False,
) -> None:
    """Watch an index: its workers, what they hold, how far behind it is, hit ratios. Runs until Ctrl-C."""
    with _extra():
        from kvpool.cli.index_connection import IndexConnection
        from kvpool.cli.top import run_top

    run_top(
        index=IndexConnection(index_, token_file, tls_ca, tls_cert, tls_key), tenant=tenant, model=model, sort=sort,
        most=most, interval_s=interval, once=once, as_json=as_json,
    )  # fmt: skip


@contextmanager
def _extra() -> Iterator[None]:
    """A package that is not installed is one line, with the extra that brings it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing_extra(error) from error


@bench.command("hash")
def bench_hash(
    tokens: Annotated[int, typer.Option(min=1, max=1 << 24, help="Tokens of the prompt.")] = 131072,
    block_size: Annotated[int, typer.Option(min=1, max=1 << 16, help="Tokens of a block.")] = 16,
    rounds: Annotated[
        int, typer.Option(min=1, max=10_000, help="Interleaved rounds; the median counts.")
    ] = 25,
    as_json: Json = False,
) -> None:
    """Block hashes of one long prompt, beside vLLM's own function where vLLM is installed."""
    from kvpool.cli.bench_hash import run_bench_hash

    run_bench_hash(tokens=tokens, block_tokens=block_size, rounds=rounds, as_json=as_json)


@bench.command("store")
def bench_store(
    pool: Annotated[
        str | None, typer.Option(help="URL of the store; without it a file store in shared memory.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, max=10_000, help="Interleaved rounds; the median counts.")
    ] = 9,
    batch_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes of a batch, of whatever size its values are.")
    ] = "256MiB",
    peers: Annotated[
        bool, typer.Option("--peers", help="LMCache, GLIDE and redis-py by themselves, too.")
    ] = False,
    peers_folder: Annotated[
        str, typer.Option(metavar="FOLDER", help="Their environments, made by make bench-peers.")
    ] = PEERS_FOLDER,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a PNG of GB/s over value size.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Puts and gets by value size, idle and beside a busy interpreter, next to a bare native loop and other clients.

    On a server: kvpool's own stores over Valkey GLIDE and redis-py. In a directory: a plain Python loop over files.
    """
    from kvpool.cli.bench_store import run_bench_store

    run_bench_store(
        pool=pool,
        rounds=rounds,
        batch_nbytes=_batch_nbytes(batch_bytes),
        peers=Path(peers_folder) if peers else None,
        plot=Path(plot) if plot else None,
        as_json=as_json,
    )


def _batch_nbytes(text: str) -> int:
    nbytes = parse_nbytes(text)
    if not 1 <= nbytes <= MAX_BATCH_NBYTES:
        raise ConfigError(f"--batch-bytes {text}: write a size of at most {format_nbytes(MAX_BATCH_NBYTES)}")
    return nbytes


@bench.command("device")
def bench_device(
    blocks: Annotated[int, typer.Option(min=1, max=1 << 14, help="Blocks that are copied at once.")] = 64,
    rounds: Annotated[
        int, typer.Option(min=1, max=10_000, help="Interleaved rounds; the median counts.")
    ] = 25,
    as_json: Json = False,
) -> None:
    """Copies between KV cache and staging, beside one plain copy of as many bytes and a matrix product.

    Blocks of 16 tokens of Llama-3-8B and DeepSeek-V3, on the accelerator that torch finds, else on the CPU.
    """
    with _extra():
        from kvpool.cli.bench_device import run_bench_device

    run_bench_device(blocks=blocks, rounds=rounds, as_json=as_json)


@bench.command("index")
def bench_index(
    blocks: Annotated[
        int,
        typer.Option(
            min=8192, max=1 << 26, help="Distinct blocks in the table; rounded to prompts of 8,192."
        ),
    ] = 1_000_000,
    workers: Annotated[
        list[int] | None, typer.Option(min=1, max=4096, help="Workers; give it again for another table.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, max=10_000, help="Rounds of asking all prompts; the median counts.")
    ] = 20,
    peers: Annotated[bool, typer.Option("--peers", help="Dynamo's RadixTree and HTTP indexer, too.")] = False,
    peers_folder: Annotated[
        str, typer.Option(metavar="FOLDER", help="Their environments, made by make bench-peers.")
    ] = PEERS_FOLDER,
    as_json: Json = False,
) -> None:
    """The prefix index beside a plain Python dictionary and Dynamo's: ingest, lookups and memory.

    With the extra "index" also over gRPC beside an echo, and fed over ZMQ.
    """
    from kvpool.cli.bench_index import run_bench_index

    run_bench_index(
        blocks=blocks, workers=workers or [8, 64, 256], rounds=rounds,
        peers=Path(peers_folder) if peers else None, as_json=as_json,
    )  # fmt: skip


@bench.command("fleet")
def bench_fleet(
    workers: Annotated[int, typer.Option(min=2, max=4096, help="Simulated workers.")] = 240,
    routers: Annotated[
        list[int] | None,
        typer.Option(
            min=1, max=64, help="Routers that share the requests; give it again for another number."
        ),
    ] = None,
    requests: Annotated[
        int, typer.Option(min=10, max=10_000_000, help="Requests of each run, after as many to warm up.")
    ] = 4000,
    seed: Annotated[int, typer.Option(min=0, help="Of the sessions.")] = 5,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a PNG of hits and imbalance over routers.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What routers make of the prefix index: sessions on a simulated fleet, placed by four policies.

    At random, by least load, by what each router has placed itself, and by asking one real index that all share, which
    the simulated workers tell over ZMQ what they store and evict.
    """
    with _extra():
        from kvpool.cli.bench_fleet import run_bench_fleet

    run_bench_fleet(
        workers=workers, routers=routers or [1, 2, 4, 8], requests=requests, seed=seed,
        plot=Path(plot) if plot else None, as_json=as_json,
    )  # fmt: skip


@bench.command("e2e")
def bench_e2e(
    pool: Annotated[
        str | None, typer.Option(help="URL of the store; without it a file store in a temporary folder.")
    ] = None,
    chats: Annotated[int, typer.Option(min=1, max=1000, help="Chats of four turns.")] = 5,
    documents: Annotated[int, typer.Option(min=1, max=1000, help="Documents, three questions each.")] = 4,
    probes: Annotated[
        int, typer.Option(min=1, max=1000, help="Prompts for the ratios to recomputing and to a local hit.")
    ] = 7,
    prompt_tokens: Annotated[
        int, typer.Option(min=256, max=8000, help="Tokens of a document, and of a probe.")
    ] = 2068,
    width: Annotated[int, typer.Option(min=256, max=8192, help="Of the model; a multiple of 256.")] = 768,
    layers: Annotated[int, typer.Option(min=1, max=64, help="Of the model.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of the workload.")] = 7,
    host_tier: Annotated[
        bool, typer.Option("--host-tier/--no-host-tier", help="Try vLLM's own host tier, too.")
    ] = True,
    peers: Annotated[bool, typer.Option("--peers", help="Try LMCache, too.")] = False,
    peers_folder: Annotated[
        str, typer.Option(metavar="FOLDER", help="Where it is; make bench-peers puts it there.")
    ] = PEERS_FOLDER,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a PNG of times to the first token.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Real engines on chats and shared documents: without a pool, with vLLM's host tier, kvpool and LMCache.

    Starts vLLM CPU engines with a small random model. Exits with 1 when an engine's tokens are not those of the others,
    or when prompts were not found in the pool.
    """
    from kvpool.cli.bench_e2e import run_bench_e2e

    good = run_bench_e2e(
        pool=pool, chats=chats, documents=documents, probes=probes, prompt_tokens=prompt_tokens, width=width,
        layers=layers, seed=seed, host_tier=host_tier, peers=Path(peers_folder) if peers else None,
        plot=Path(plot) if plot else None, as_json=as_json,
    )  # fmt: skip
    if not good:
        raise typer.Exit(EXIT_FAILED)
