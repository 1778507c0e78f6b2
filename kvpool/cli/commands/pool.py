"""``kvpool doctor``, ``purge`` and ``bench store``: examine, empty and measure a pool."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli.commands.options import (
    IndexConnection,
    Json,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
    is_address,
    is_size,
)
from kvpool.cli.exits import EXIT_FAILED
from kvpool.errors import ConfigError
from kvpool.text import format_nbytes, parse_nbytes

PARTS = "What is examined"


def doctor(
    pool: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="KVPOOL_POOL",
            help="The pool, its servers and settings, and the workers that announce themselves there.",
            rich_help_panel=PARTS,
        ),
    ] = None,
    index: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            envvar="KVPOOL_INDEX",
            help="An index; once for each of its replicas, to compare them.",
            callback=is_address,
            rich_help_panel=PARTS,
        ),
    ] = None,
    front: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Where requests are sent, such as http://HOST:8080: Envoy, a gateway or kvpool router; once for each.",
            rich_help_panel=PARTS,
        ),
    ] = None,
    picker: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="An index's --ext-proc, which Envoy asks; once for each.",
            callback=is_address,
            rich_help_panel=PARTS,
        ),
    ] = None,
    tenant: Annotated[
        str,
        typer.Option(metavar="TENANT", help="Whose part of the pool.", rich_help_panel=PARTS),
    ] = "default",
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    as_json: Json = False,
) -> None:
    """Examine a deployment: what works, what does not, and what to do next; one line each, OK, WARN or FAIL.

    Exits with 1 when something fails or is missing. On a server it puts one block of 64 KiB, reads it and deletes it;
    all else is only read.
    """
    if pool is None and not index and not front and not picker:
        raise ConfigError(
            "name what to examine: --pool URL (or KVPOOL_POOL), --index HOST:PORT (or KVPOOL_INDEX), --front URL, "
            "--picker HOST:PORT"
        )
    from kvpool.cli.doctor import run_doctor

    ways = (token_file, tls_ca, tls_cert, tls_key)
    if not run_doctor(
        pool=pool,
        indexes=[IndexConnection(target, *ways) for target in index or ()],
        tenant=tenant,
        fronts=front or (),
        pickers=[IndexConnection(target, *ways) for target in picker or ()],
        tls_ca=tls_ca,
        as_json=as_json,
    ):
        raise typer.Exit(EXIT_FAILED)


def purge(
    pool: Annotated[str, typer.Option(metavar="URL", envvar="KVPOOL_POOL", help="The pool to delete from.")],
    tenant: Annotated[
        str | None, typer.Option(metavar="TENANT", help="Delete all that this tenant has.")
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="Delete this namespace; its first 8 digits do, 32 are all of them."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--everything", metavar="", help="Delete all blocks of all tenants.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", metavar="", help="Do not ask. Needed where there is no terminal.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Delete blocks and announcements of a tenant, of a namespace, or all; says what, and asks first."""
    from kvpool.cli.purge import run_purge

    run_purge(pool=pool, tenant=tenant, namespace=namespace, everything=everything, yes=yes, as_json=as_json)


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
