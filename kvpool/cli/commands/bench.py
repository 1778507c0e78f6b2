"""``kvpool bench``: what operators measure; ``python -m benchmarks``, in a checkout, races other projects."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvpool.cli.commands.options import Json, is_size
from kvpool.cli.help import Command, Group
from kvpool.errors import ConfigError
from kvpool.text import format_nbytes, parse_nbytes

MAX_BATCH_NBYTES = 8 << 30
ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True}

PoolURL = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        envvar="KVPOOL_POOL",
        help="The pool, which gets batches under keys of their own and loses them again. Without it: a directory in "
        "shared memory.",
    ),
]
Rounds = Annotated[
    int, typer.Option(metavar="COUNT", min=1, max=10_000, help="Interleaved rounds; the median counts.")
]
BatchBytes = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="Bytes of a batch, such as 64MiB, of whatever size its values are.",
        callback=is_size,
    ),
]

bench = typer.Typer(
    cls=Group,
    help="Measure this host and its pool.",
    rich_markup_mode=None,
)


@bench.callback(invoke_without_command=True)
def _help(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


@bench.command("hash", cls=Command, short_help="Block hashes of one long prompt.")
def bench_hash(
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
    from kvpool.cli.bench_hash import run_bench_hash

    run_bench_hash(tokens=tokens, block_tokens=block_size, rounds=rounds, as_json=as_json)


@bench.command("store", cls=Command, short_help="Puts, gets and existence in a pool, by value size.")
def bench_store(
    pool: PoolURL = None,
    rounds: Rounds = 9,
    batch_bytes: BatchBytes = "256MiB",
    as_json: Json = False,
    peers: Annotated[bool, typer.Option("--peers", hidden=True)] = False,
    peers_folder: Annotated[str | None, typer.Option(hidden=True)] = None,
    plot: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Puts, gets and existence in a pool by value size, and the memory that a server takes for them."""
    if peers or peers_folder is not None or plot is not None:
        raise _moved("store --peers" if plot is None else "store --plot")
    from kvpool.cli.bench_store import run_bench_store

    run_bench_store(pool=pool, rounds=rounds, batch_nbytes=batch_nbytes_of(batch_bytes), as_json=as_json)


def batch_nbytes_of(text: str) -> int:
    nbytes = parse_nbytes(text)
    if not 1 <= nbytes <= MAX_BATCH_NBYTES:
        raise ConfigError(f"--batch-bytes {text}: write a size of at most {format_nbytes(MAX_BATCH_NBYTES)}")
    return nbytes


@bench.command("device", cls=Command, short_help="Copies between KV cache and staging, and their cost.")
def bench_device(
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
    from kvpool.cli.bench_device import run_bench_device

    run_bench_device(blocks=blocks, tokens=tokens, rounds=rounds, trace=trace, as_json=as_json)


@bench.command("index", hidden=True, context_settings=ANYTHING)
@bench.command("fleet", hidden=True, context_settings=ANYTHING)
@bench.command("e2e", hidden=True, context_settings=ANYTHING)
def bench_elsewhere(context: typer.Context) -> None:
    """Only says where it went; for one version."""
    raise _moved(f"{context.info_name}")


def _moved(what: str) -> ConfigError:
    return ConfigError(
        f"bench {what} is not part of the package any more: run python -m benchmarks {what} in a checkout of kvpool"
    )
