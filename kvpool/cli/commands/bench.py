"""``kvpool bench``: a pool measured; ``python -m benchmarks``, in a checkout, measures the rest."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli.commands.options import Json, is_size
from kvpool.cli.help import Command, Group
from kvpool.errors import ConfigError
from kvpool.text import format_nbytes, parse_nbytes

MAX_BATCH_NBYTES = 8 << 30

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
    help="Measure a pool.",
    rich_markup_mode=None,
)


@bench.callback(invoke_without_command=True)
def _help(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


@bench.command("store", cls=Command, short_help="Puts, gets and existence in a pool, by value size.")
def bench_store(
    pool: PoolURL = None,
    rounds: Rounds = 9,
    batch_bytes: BatchBytes = "256MiB",
    as_json: Json = False,
) -> None:
    """Puts, gets and existence in a pool by value size, and the memory that a server takes for them."""
    from kvpool.cli.bench_store import run_bench_store

    run_bench_store(pool=pool, rounds=rounds, batch_nbytes=batch_nbytes_of(batch_bytes), as_json=as_json)


def batch_nbytes_of(text: str) -> int:
    nbytes = parse_nbytes(text)
    if not 1 <= nbytes <= MAX_BATCH_NBYTES:
        raise ConfigError(f"--batch-bytes {text}: write a size of at most {format_nbytes(MAX_BATCH_NBYTES)}")
    return nbytes
