"""The commands. Each imports its work when called: ``kvpool --help`` stays fast."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated

import typer

from kvpool.cli.exits import EXIT_FAILED
from kvpool.cli.options import IndexConnection, Json, default_pool, option, takes
from kvpool.cli.settings import (
    BatchBytes,
    CapacityOptions,
    DoctorOptions,
    IndexSettings,
    LookupOptions,
    PoolURL,
    PurgeOptions,
    QuotaOptions,
    Rounds,
    RouterSettings,
    SizeOptions,
    TopOptions,
)
from kvpool.errors import ConfigError
from kvpool.text import format_nbytes, parse_nbytes

MAX_BATCH_NBYTES = 8 << 30


@takes(IndexSettings)
def index(settings: IndexSettings) -> None:
    """Serve the prefix index: which worker holds how much of a prompt. Runs until SIGTERM or Ctrl-C."""
    from kvpool.cli.index import run_index

    run_index(settings)


@takes(RouterSettings)
def router(settings: RouterSettings) -> None:
    """Serve OpenAI's API in front of a fleet: each request goes where its prompt costs least. Runs until SIGTERM."""
    from kvpool.cli.index import run_index

    if settings.tokens is not None and settings.grpc is None and settings.http is None:
        raise ConfigError("--tokens is for callers of --grpc and --http: give one of them, too")
    run_index(settings)


# fmt: off
def token(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whom it is for; a name in the file of tokens.")],
    token_file: Annotated[str, option(None, "FILE",
        "Where the token is written, a new file, for that caller alone.")],
    right: Annotated[list[str] | None, option(None, "RIGHT",
        "What it allows: read, publish or admin; once for each. Without it: read.",
        autocompletion=lambda: ["read", "publish", "admin"])] = None,
    tenant: Annotated[list[str] | None, option(None, "TENANT",
        "For whose workers; once for each; *: for all. Without it: default.")] = None,
) -> None:
    # fmt: on
    """Make a bearer token for an index, and print the entry for its file of tokens.

    For example: kvpool token router-1 --token-file router-1.token >> tokens.toml
    """
    from kvpool.index.serve.auth import make_token

    made, entry = make_token(name, right or ["read"], tenant or ["default"])
    try:
        descriptor = os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"--token-file {token_file}: {error.strerror}; name a new file") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(made + "\n")
    print(entry)


@takes(LookupOptions)
def lookup(options: LookupOptions) -> None:
    """Ask an index how many leading blocks of a prompt each worker holds."""
    from kvpool.cli.lookup import run_lookup

    run_lookup(options, _index(options))


@takes(TopOptions)
def top(options: TopOptions) -> None:
    """Watch an index: its workers, what they hold, how far behind it is, hit ratios. Runs until Ctrl-C."""
    from kvpool.cli.top import run_top

    run_top(options, _index(options))


def _index(of: LookupOptions | TopOptions | SizeOptions) -> IndexConnection:
    return IndexConnection(of.index, of.token_file, of.tls_ca, of.tls_cert, of.tls_key)


@takes(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Examine a deployment: what works, what does not, and what to do next; one line each, OK, WARN or FAIL.

    Exits with 1 when something fails or is missing. On a server it puts one block of 64 KiB, reads it and deletes it;
    all else is only read.
    """
    if options.pool is None and not (options.index or options.front or options.picker):
        if (pool := default_pool()) is None:
            raise ConfigError(
                "name what to examine: --pool URL (or KVPOOL_POOL), --index HOST:PORT (or KVPOOL_INDEX), --front URL, "
                "--picker HOST:PORT"
            )
        options = replace(options, pool=pool)
    from kvpool.cli.doctor.doctor import run_doctor

    if not run_doctor(options):
        raise typer.Exit(EXIT_FAILED)


@takes(PurgeOptions)
def purge(options: PurgeOptions) -> None:
    """Delete blocks and announcements of a tenant, a namespace or all, or a writer's blocks; says what, and asks."""
    from kvpool.cli.purge import run_purge

    run_purge(options)


@takes(QuotaOptions)
def quota(options: QuotaOptions) -> None:
    """Say how many bytes a tenant may hold in a pool, or show it. Over its quota its workers store nothing new."""
    from kvpool.cli.quota import run_quota

    run_quota(options)


@takes(CapacityOptions)
def capacity(options: CapacityOptions) -> None:
    """Show how many bytes a directory may hold, or change it for all its processes; they follow within a second."""
    from kvpool.cli.capacity import run_capacity

    run_capacity(options)


@takes(SizeOptions)
def size(options: SizeOptions) -> None:
    """What a pool of any size would have held of the engines' requests, or of a trace: the hit rate against blocks.

    With --model: the bytes of a token and a record, and the link and disk below which computing is faster.
    """
    from kvpool.cli.size import run_size

    run_size(options, _index(options))


def bench_store(
    pool: PoolURL = None, rounds: Rounds = 9, batch_bytes: BatchBytes = "256MiB", as_json: Json = False
) -> None:
    """Puts, gets and existence in a pool by value size, and the memory that a server takes for them."""
    from kvpool.cli.bench_store import run_bench_store

    run_bench_store(pool=pool, rounds=rounds, batch_nbytes=batch_nbytes_of(batch_bytes), as_json=as_json)


def batch_nbytes_of(text: str) -> int:
    nbytes = parse_nbytes(text)
    if not 1 <= nbytes <= MAX_BATCH_NBYTES:
        raise ConfigError(f"--batch-bytes {text}: write a size of at most {format_nbytes(MAX_BATCH_NBYTES)}")
    return nbytes
