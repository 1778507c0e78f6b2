"""``kvpool demo``, ``doctor`` and ``purge``: a pool tried, examined and emptied."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from kvpool.cli.commands.options import Json, TlsCa, TlsCert, TlsKey, TokenFile
from kvpool.cli.exits import EXIT_FAILED
from kvpool.errors import ConfigError


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
    from kvpool.cli.doctor import run_doctor
    from kvpool.cli.index_connection import IndexConnection

    ways = (token_file, tls_ca, tls_cert, tls_key)
    indexes = [IndexConnection(target, *ways) for target in index or ()]
    if not run_doctor(pool=pool, indexes=indexes, tenant=tenant, as_json=as_json):
        raise typer.Exit(EXIT_FAILED)


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
