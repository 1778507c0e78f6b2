"""The command line ``kvpool``: its commands, each defined in ``kvpool.cli.commands``."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvpool import __version__
from kvpool.cli.commands import (
    bench_store,
    capacity,
    doctor,
    index,
    lookup,
    purge,
    quota,
    router,
    size,
    token,
    top,
)
from kvpool.cli.exits import run
from kvpool.cli.vllm import vllm

EPILOG = "\n\n".join((
    "Begin with kvpool doctor --pool URL.",
    "Variables: KVPOOL_POOL for --pool, KVPOOL_INDEX for --index, and KVPOOL_INDEX_TOKEN for the token of an index. A "
    "URL with a password belongs in the variable: every user of a host can read its processes' arguments.",
    "Exit codes: 0: done. 1: something is missing, does not answer or has failed. 2: the command line is wrong. With "
    '--json a failure is {"error": ...} on standard output.',
))  # fmt: skip


class _Untyped:
    """No ``<bool>`` behind flags in --help."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for one in found:
            if one.metavar is None and getattr(one, "is_flag", False):
                one.metavar = ""
        return found


class _Command(_Untyped, TyperCommand):
    pass


class _Group(_Untyped, TyperGroup):
    pass


def _group(name: str, text: str, epilog: str | None = None) -> typer.Typer:
    return typer.Typer(
        name=name, cls=_Group, help=text, epilog=epilog, invoke_without_command=True, pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]}, rich_markup_mode="rich",
    )  # fmt: skip


app = _group(
    "kvpool",
    "kvpool: a shared KV cache for fleets of vLLM workers, and an index for their routers.",
    EPILOG,
)
bench = _group("bench", "Measure a pool.")
SERVE, LOOK, MAINTAIN = "Serve", "Look", "Maintain"
for command, panel, text in (
    (index, SERVE, "Serve the index: which worker holds how much of a prompt."),
    (router, SERVE, "Serve OpenAI's API in front of the workers."),
    (doctor, LOOK, "Examine a deployment: what works, what not, what to do."),
    (top, LOOK, "Watch an index: its workers and what they hold."),
    (lookup, LOOK, "Ask an index who holds how much of a prompt."),
    (size, LOOK, "What a pool of any size would hold of the requests."),
    (purge, MAINTAIN, "Delete a tenant's blocks, a namespace's, or all."),
    (quota, MAINTAIN, "Say how many bytes a tenant may hold."),
    (capacity, MAINTAIN, "Say how many bytes a directory may hold."),
    (token, MAINTAIN, "Make a bearer token for callers of an index."),
):
    app.command(cls=_Command, rich_help_panel=panel, short_help=text)(command)
# Options behind "serve" are vLLM's, with or without the --.
app.command(
    cls=_Command, rich_help_panel=SERVE, short_help="Start a vLLM worker that shares a pool.",
    context_settings={"allow_extra_args": True, "allow_interspersed_args": False},
    options_metavar="[--pool URL] -- serve MODEL [OPTION]...",
)(vllm)  # fmt: skip
bench.command("store", cls=_Command, short_help="Puts, gets and existence by value size.")(bench_store)
app.add_typer(bench, rich_help_panel=MAINTAIN, short_help="Measure a pool.")


def main() -> None:
    # gRPC would print a failed handshake; our own line reports it.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    run(app, "kvpool")


@bench.callback()
def _bench(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


@app.callback()
def _kvpool(
    ctx: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", metavar="", help="Print the version and exit.")
    ] = False,
) -> None:
    if show_version:
        print(__version__)
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
