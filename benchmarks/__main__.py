"""``python -m benchmarks``: kvpool, its peers and plain loops, side by side in one run.

Over 400 lines because each command declares its options here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvpool.cli.commands import batch_nbytes_of
from kvpool.cli.exits import EXIT_FAILED, run
from kvpool.cli.options import Json
from kvpool.cli.settings import BatchBytes, PoolURL, Rounds
from kvpool.errors import ConfigError
from kvpool.text import parse_nbytes

PEERS_FOLDER = ".cache/peers"

app = typer.Typer(
    help="Measure what is here, side by side with its peer in one run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


Server = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="A valkey-server; else that of scripts/servers, or on the PATH."),
]


@app.command("hash")
def hash_(
    tokens: Annotated[
        int, typer.Option(metavar="TOKENS", min=1, max=1 << 24, help="Tokens of the prompt.")
    ] = 131072,
    block_size: Annotated[
        int, typer.Option(metavar="TOKENS", min=1, max=1 << 16, help="Tokens of a block.")
    ] = 16,
    rounds: Rounds = 25,
    as_json: Json = False,
) -> None:
    """Block hashes of one long prompt, beside vLLM's own function where vLLM is installed."""
    from benchmarks.hash import run_hash

    run_hash(tokens=tokens, block_tokens=block_size, rounds=rounds, as_json=as_json)


@app.command("device")
def device(
    blocks: Annotated[
        int | None,
        typer.Option(
            metavar="BLOCKS",
            min=1,
            max=1 << 14,
            help="Blocks that are copied at once; without it as many as 256 MiB hold, 4 MiB on the CPU.",
        ),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            metavar="TOKENS",
            min=1,
            max=1024,
            help="Tokens of a block; once for each size. Without it: 16, 64 and 128.",
        ),
    ] = None,
    rounds: Rounds = 25,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the trace of our calls here, for chrome://tracing or Perfetto."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Copies between KV cache and staging beside plain ones, what they cost an engine, and calls that wait.

    KV caches of five models as vLLM lays them out, on the accelerator that torch finds, else on the CPU. On a GPU it
    takes minutes, half of the memory that is free there (at most 32 GiB) and 3 GiB of pinned host memory.
    """
    from benchmarks.device import run_device

    run_device(blocks=blocks, tokens=tokens, rounds=rounds, trace=trace, as_json=as_json)


@app.command("store")
def store(
    pool: PoolURL = None,
    shards: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=16,
            help="In place of --pool: so many Valkey servers on loopback, started for it; several are a cluster.",
        ),
    ] = None,
    server: Server = None,
    rounds: Rounds = 9,
    batch_bytes: BatchBytes = "256MiB",
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
    try:
        from benchmarks.store import run_store
    except ModuleNotFoundError as error:
        if error.name != "kvpool_bare":
            raise
        raise ConfigError("the bare loops are not built: make bench does it") from error

    if pool is not None and shards is not None:
        raise ConfigError("--shards starts the pool's servers: leave --pool away")
    run_store(
        pool=pool,
        shards=shards,
        server=server,
        rounds=rounds,
        batch_nbytes=batch_nbytes_of(batch_bytes),
        peers=Path(peers_folder) if peers else None,
        plot=Path(plot) if plot else None,
        as_json=as_json,
    )


@app.command("near-far")
def near_far(
    waiting: Annotated[
        int, typer.Option(min=0, max=1 << 20, help="Keys that wait for a dead far pool.")
    ] = 65_536,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="The median counts.")] = 9,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """A near pool before a far one: gets near beside a dead far pool, living shards beside a dead one, CPU of a put."""
    from benchmarks.near_far import run_near_far

    run_near_far(waiting=waiting, rounds=rounds, server=server, as_json=as_json)


@app.command("index")
def index(
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
    from benchmarks.index import run_index

    run_index(
        blocks=blocks, workers=workers or [8, 64, 256], rounds=rounds,
        peers=Path(peers_folder) if peers else None, as_json=as_json,
    )  # fmt: skip


@app.command("fleet")
def fleet(
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
    from benchmarks.fleet import run_fleet

    run_fleet(
        workers=workers, routers=routers or [1, 2, 4, 8], requests=requests, seed=seed,
        plot=Path(plot) if plot else None, as_json=as_json,
    )  # fmt: skip


@app.command("route")
def route(
    workers: Annotated[int, typer.Option(min=2, max=64, help="Behind each front.")] = 8,
    replicas: Annotated[
        list[int] | None,
        typer.Option(
            min=1, max=16, help="Replicas of a front, for conversations; give it again for another number."
        ),
    ] = None,
    conversations: Annotated[int, typer.Option(min=8, max=10_000, help="Of six turns.")] = 96,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="The median counts.")] = 3,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=600, help="Longest measurement of speed, of one caller and of many.")
    ] = 4.0,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only fronts whose names begin so; give it again for more."),
    ] = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="vllm-router, smg and Dynamo's frontend, too.")
    ] = False,
    peers_folder: Annotated[
        str, typer.Option(metavar="FOLDER", help="Their environments, made by make bench-peers.")
    ] = PEERS_FOLDER,
    as_json: Json = False,
) -> None:
    """What stands in front of a fleet: Envoy with kvpool's index, others' routers, round robin.

    Scripted workers, each a process, behind each in turn: hits of conversations, added latency, requests a second and
    CPU at 2, 220 and 740 KB, and a worker that is restarted.
    """
    from benchmarks.route import run_route

    run_route(
        workers=workers, replicas=replicas or [1, 2, 4, 8], conversations=conversations, rounds=rounds, seconds=seconds,
        only=only or [], peers=Path(peers_folder) if peers else None, as_json=as_json,
    )  # fmt: skip


@app.command("e2e")
def e2e(
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
    from benchmarks.e2e import run_e2e

    good = run_e2e(
        pool=pool, chats=chats, documents=documents, probes=probes, prompt_tokens=prompt_tokens, width=width,
        layers=layers, seed=seed, host_tier=host_tier, peers=Path(peers_folder) if peers else None,
        plot=Path(plot) if plot else None, as_json=as_json,
    )  # fmt: skip
    if not good:
        raise typer.Exit(EXIT_FAILED)


@app.command("lengths")
def lengths(
    prompt_tokens: Annotated[
        list[int] | None,
        typer.Option(min=256, max=16_384, help="Tokens of prompts; give it again for another length."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Prompts of each length.")] = 5,
    width: Annotated[int, typer.Option(min=256, max=8192, help="Of the model; a multiple of 256.")] = 768,
    layers: Annotated[int, typer.Option(min=1, max=64, help="Of the model.")] = 8,
    scripted_tokens: Annotated[
        int | None,
        typer.Option(
            min=64,
            max=100_000,
            help="Scripted devices in place of engines: one prompt, 70 KB a token.",
        ),
    ] = None,
    link_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="A second, between scripted devices and the server. Without it: loopback."
        ),
    ] = None,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Time to the first token by prompt length: computed, from the engine's own cache, near, far, and from one pool.

    Starts a Valkey server and vLLM CPU engines with a small random model, or scripted devices. Exits with 1 when tokens
    or bytes differ, or when a prompt did not come from the pool.
    """
    if scripted_tokens is not None:
        from benchmarks.first_token_scripted import run_scripted

        link_nbytes_s = None if link_bytes is None else parse_nbytes(link_bytes)
        if not run_scripted(
            server=server, tokens=scripted_tokens, rounds=rounds, link_nbytes_s=link_nbytes_s, as_json=as_json
        ):
            raise typer.Exit(EXIT_FAILED)
        return
    from benchmarks.first_token import run_lengths

    if not run_lengths(
        server=server, lengths=prompt_tokens or [512, 1024, 2048, 4096], rounds=rounds, width=width, layers=layers,
        as_json=as_json,
    ):  # fmt: skip
        raise typer.Exit(EXIT_FAILED)


@app.command("outage")
def outage(
    prompt_tokens: Annotated[int, typer.Option(min=256, max=16_384, help="Tokens of a prompt.")] = 1024,
    phase_s: Annotated[int, typer.Option(min=2, max=600, help="Seconds, and prompts, of each phase.")] = 15,
    width: Annotated[int, typer.Option(min=256, max=8192, help="Of the model; a multiple of 256.")] = 768,
    layers: Annotated[int, typer.Option(min=1, max=64, help="Of the model.")] = 8,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Time to the first token while the pool's server is stopped, continued and killed: a new prompt each second.

    Starts a Valkey server and vLLM CPU engines with a small random model. Exits with 1 when tokens differ, or when the
    pool was not used again.
    """
    from benchmarks.first_token import run_outage

    if not run_outage(
        server=server,
        prompt_tokens=prompt_tokens,
        phase_s=phase_s,
        width=width,
        layers=layers,
        as_json=as_json,
    ):
        raise typer.Exit(EXIT_FAILED)


@app.command("audits")
def audits(
    honest: Annotated[
        int, typer.Option(min=0, max=1 << 20, metavar="N", help="Honest hits, in place of wrong ones.")
    ] = 0,
    cost: Annotated[
        int, typer.Option(min=0, max=1000, metavar="ROUNDS", help="What audits cost, in place of that.")
    ] = 0,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Engines with this in family or dtype; give it again for more."),
    ] = None,
    as_json: Json = False,
) -> None:
    """What audits of hits find: wrong hits of many kinds, right by name and checksum, on small real engines.

    Starts vLLM CPU engines with small random models. Exits with 1 when a fault is not found, or an honest hit is.
    """
    from benchmarks.audits import run_audits

    if not run_audits(honest=honest, cost=cost, only=only or [], as_json=as_json):
        raise typer.Exit(EXIT_FAILED)


@app.command("encoder")
def encoder(
    images: Annotated[int, typer.Option(min=2, max=1000, help="New ones, each in a new prompt.")] = 24,
    side: Annotated[
        int, typer.Option(min=28, max=420, metavar="PIXELS", help="Of an image; a multiple of 14.")
    ] = 224,
    vision_width: Annotated[
        int, typer.Option(min=128, max=4096, help="Of the model's encoder; a multiple of 128.")
    ] = 512,
    vision_layers: Annotated[int, typer.Option(min=2, max=64, help="Of the model's encoder.")] = 8,
    width: Annotated[int, typer.Option(min=256, max=8192, help="Of the model; a multiple of 256.")] = 512,
    layers: Annotated[int, typer.Option(min=1, max=64, help="Of the model.")] = 4,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """An image asked of two workers: runs of the encoder, first tokens and bytes, beside vLLM's own connectors.

    Starts a Valkey server, and vLLM CPU engines with a small random vision model: without a connector, with vLLM's own
    folder of outputs, and with kvpool on a folder and on the server. And what kvpool takes of a scheduler's step. Exits
    with 1 when tokens differ, or when outputs did not come from the pool.
    """
    from benchmarks.encoder import Sizes, run_encoder

    sizes = Sizes(side, vision_width, vision_layers, width, layers)
    if not run_encoder(server=server, images=images, sizes=sizes, as_json=as_json):
        raise typer.Exit(EXIT_FAILED)


@app.command("agents")
def agents(
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Of sessions or requests, as kvpool size reads; give it again for more. Without it: made-up sessions.",
        ),
    ] = None,
    workers: Annotated[
        list[int] | None,
        typer.Option(min=1, max=256, help="Of a fleet; give it again for another.  [default: 8, 16, 64]"),
    ] = None,
    sessions: Annotated[
        int, typer.Option(min=1, max=4096, help="The first of a trace; or made up. Requests all count.")
    ] = 80,
    apart: Annotated[
        float, typer.Option(min=0, max=1e6, metavar="S", help="Seconds between the beginnings of sessions.")
    ] = 60.0,
    cache_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Of a worker's KV cache, 96 KiB a token.")
    ] = "100GB",
    pool_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of the fleet's pool. Without it: it holds all.")
    ] = None,
    near_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Of a host's near pool.")] = "1TB",
    host_workers: Annotated[int, typer.Option(min=1, max=256, help="Workers of a host.")] = 8,
    only: Annotated[
        list[str] | None, typer.Option(metavar="POLICY", help="Only this one; give it again for more.")
    ] = None,
    engines: Annotated[
        bool, typer.Option("--engines", help="Real CPU engines, too, with short sessions.")
    ] = False,
    peers: Annotated[
        bool, typer.Option("--peers", help="vllm-router and smg, too, in real time on a small fleet.")
    ] = False,
    peers_folder: Annotated[
        str, typer.Option(metavar="FOLDER", help="Their environments, made by make bench-peers.")
    ] = PEERS_FOLDER,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Sessions of agents on simulated workers, with a real index and a real pool, under six policies.

    none: in turns, without a pool; pool: in turns; load: by least load; precise: by load and blocks, without a pool;
    kvpool: by load, blocks and sessions; near: so, with a near pool of each host. Starts Valkey servers on loopback.
    """
    from benchmarks.agents import run_agents
    from benchmarks.agents_fleet import Pools

    run_agents(
        traces=trace or [], workers=workers or [8, 16, 64], sessions=sessions, apart_s=apart,
        cache_nbytes=parse_nbytes(cache_bytes), only=only or [], engines=engines,
        pools=Pools(None if pool_bytes is None else parse_nbytes(pool_bytes), parse_nbytes(near_bytes), host_workers),
        peers=Path(peers_folder) if peers else None, server=server, as_json=as_json,
    )  # fmt: skip


@app.command("pools")
def pools(
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Of sessions or requests, as kvpool size reads. Without it: made-up sessions.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Whose KV cache it is, in 16 bits, as kvpool size reads it. Without it: 96 KiB a token.",
        ),
    ] = None,
    sessions: Annotated[
        int,
        typer.Option(min=1, max=4096, help="A trace that has fewer begins again, with other blocks."),
    ] = 160,
    apart: Annotated[
        float, typer.Option(min=0, max=1e6, metavar="S", help="Seconds between the beginnings of sessions.")
    ] = 60.0,
    workers: Annotated[
        int, typer.Option(min=0, max=256, help="Engines; each keeps its sessions. 0: they have no cache.")
    ] = 0,
    cache_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Of an engine's KV cache.")] = "100GB",
    near: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZE", help="Of a near pool; give it again for another.  [default: 250GB]"),
    ] = None,
    far: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZE", help="Of the far pool; give it again for another.  [default: 2TB]"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Hits of a near pool before a far one by their sizes, of one endless pool's, and what is written far for them.

    Each alone; then both, where all goes far, and where only what is used a second time does. Nothing is stored.
    """
    from benchmarks.pools import Engines, run_pools

    run_pools(
        trace=trace, model=model, sessions=sessions, apart_s=apart,
        engines=Engines(workers, parse_nbytes(cache_bytes)), near=[*map(parse_nbytes, near or ["250GB"])],
        far=[*map(parse_nbytes, far or ["2TB"])], as_json=as_json,
    )  # fmt: skip


@app.command("placing")
def placing(
    workers: Annotated[
        list[int] | None,
        typer.Option(min=2, max=256, help="Of a fleet; give it again for another.  [default: 8, 32]"),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, max=100, help="Samples of sessions; figures are their means.")
    ] = 3,
    only: Annotated[
        list[str] | None, typer.Option(metavar="POLICY", help="Only this one; give it again for more.")
    ] = None,
    befalls: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT", help="Only this: nothing, death, slow or small; give it again for more."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """kvpool's router beside simpler policies, on simulated workers, with and without a pool.

    kvpool: by load, blocks and sessions; hash: of the session; fewest: where the fewest sessions are, and there for
    good; bounded: by the hash, while that worker has no more than 1.25 times the mean of requests; precise: by load
    and blocks; load: the fewest requests. Nothing befalls the fleet, a worker dies, one is ten times slower, or caches
    have room for half of the sessions.
    """
    from benchmarks.placing import run_placing

    run_placing(
        workers=workers or [8, 32], seeds=seeds, only=only or [], befalls=befalls or [], as_json=as_json
    )


@app.command("gpu")
def gpu(
    server: Server = None,
    small: Annotated[bool, typer.Option("--small", help="A dry run: three rows of 32 MiB, seconds.")] = False,
    max_seconds: Annotated[
        float, typer.Option(min=1, max=3600, help="No row begins after so many seconds.")
    ] = 480.0,
    as_json: Json = False,
) -> None:
    """KV cache -> pool -> KV cache on this machine: GB/s by shards, io-threads, record size and threads.

    On the accelerator that torch finds, else on the CPU. Starts Valkey servers of its own on loopback. Exits with 1
    when a row was not measured, or when other bytes came back.
    """
    from benchmarks.gpu import run_gpu

    if not run_gpu(server=server, small=small, max_s=max_seconds, as_json=as_json):
        raise typer.Exit(EXIT_FAILED)


@app.command("keep")
def keep_result(
    file: Annotated[Path, typer.Argument(help="The JSON file, of benchmarks/results.")],
    command: Annotated[list[str], typer.Argument(help="The benchmark and its options, behind --.")],
    note: Annotated[str, typer.Option(help="What else one has to know of the run.")] = "",
) -> None:
    """Run a benchmark and keep its figures, with the machine and the command, for make plots."""
    from benchmarks.keep import keep

    keep(file, command, note)


@app.command("plots")
def plots(
    folder: Annotated[Path, typer.Argument(help="Where the SVGs go.")] = Path("docs/assets/plots"),
) -> None:
    """Draw the pictures of the documentation from benchmarks/results."""
    from benchmarks.plots import draw_all

    for path in draw_all(folder):
        print(path)


if __name__ == "__main__":
    run(app, "python -m benchmarks")
