"""``kvpool demo``, ``doctor`` and ``purge``: a pool tried, examined and emptied."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from kvpool.cli.commands.options import Json, TlsCa, TlsCert, TlsKey, TokenFile, is_address
from kvpool.cli.exits import EXIT_FAILED
from kvpool.errors import ConfigError


def demo(
    pool: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The pool. Default: a directory in a temporary folder; KVPOOL_POOL is not used.",
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A setting of the connector, such as lookup_timeout_s=1; once for each.",
        ),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            metavar="NAME=VALUE",
            help="An option of vllm.LLM, such as dtype=bfloat16; once for each.",
        ),
    ] = None,
    block_size: Annotated[
        int,
        typer.Option(metavar="TOKENS", help="Tokens of a block (the CPU engine takes multiples of 32)."),
    ] = 128,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep", help="Keep the folder with the logs and the pool. Without it: the logs, if it fails."
        ),
    ] = False,
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
    from kvpool.cli.index_connection import IndexConnection

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
        bool, typer.Option("--everything", help="Delete all blocks of all tenants.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask. Needed where there is no terminal.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Delete blocks and announcements of a tenant, of a namespace, or all; says what, and asks first."""
    from kvpool.cli.purge import run_purge

    run_purge(pool=pool, tenant=tenant, namespace=namespace, everything=everything, yes=yes, as_json=as_json)
