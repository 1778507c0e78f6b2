"""The command line ``kvpool``: its commands, each defined in ``kvpool.cli.commands``."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Annotated

import typer

from kvpool.cli.commands.bench import bench
from kvpool.cli.commands.index import index, lookup, token, top
from kvpool.cli.commands.pool import demo, doctor, purge
from kvpool.cli.commands.router import router
from kvpool.cli.exits import run

app = typer.Typer(
    name="kvpool",
    help="A shared KV cache for vLLM workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (demo, doctor, purge, index, router, token, lookup, top):
    app.command()(command)
app.add_typer(bench, name="bench")


def main() -> None:
    """Entry point of the console script."""
    # gRPC would print a failed handshake; our own line reports it.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    run(app, "kvpool")


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
