"""``python -m demo``: the program of ``make demo``."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from kvpool.cli.exits import EXIT_FAILED, run
from kvpool.cli.options import Json
from kvpool.errors import ConfigError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
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
    from demo.two_engines import run_demo

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
    """NAME=VALUE pairs; values are JSON if valid, else text."""
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


if __name__ == "__main__":
    run(app, "python -m demo")
