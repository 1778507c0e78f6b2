"""``kvpool lookup`` and ``top``: query and watch an index."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli.commands.options import (
    ACCESS,
    Index,
    IndexConnection,
    Json,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
)

PROMPT = "Prompt, in one of four forms"
ANSWER = "Answer"


def lookup(
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL", help="The model, by the name that requests use.", rich_help_panel=PROMPT
        ),
    ],
    token_ids: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The prompt's token ids: JSON, or separated by spaces or commas; -: standard input.",
            rich_help_panel=PROMPT,
        ),
    ] = None,
    hashes: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The prompt's 64-bit block hashes, decimal or 0x...; -: standard input.",
            rich_help_panel=PROMPT,
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The prompt's text, for an index with a --tokenizer; -: standard input.",
            rich_help_panel=PROMPT,
        ),
    ] = None,
    chat: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The prompt as a chat: JSON, messages or the body of a request for /v1/chat/completions; -: standard "
            "input.",
            rich_help_panel=PROMPT,
        ),
    ] = None,
    lora_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name of the request's LoRA adapter; needs --lora-path.",
            rich_help_panel=PROMPT,
        ),
    ] = None,
    lora_path: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Path of the adapter, as on its worker.", rich_help_panel=PROMPT),
    ] = None,
    cache_salt: Annotated[
        str | None, typer.Option(metavar="SALT", help="The request's cache_salt.", rich_help_panel=PROMPT)
    ] = None,
    tenant: Annotated[
        str, typer.Option(metavar="TENANT", help="Whose workers are asked about.", rich_help_panel=ANSWER)
    ] = "default",
    worker: Annotated[
        list[str] | None,
        typer.Option(
            "--worker",
            metavar="NAME",
            help="Only this worker; once for each. Without it: all of the model.",
            rich_help_panel=ANSWER,
        ),
    ] = None,
    route: Annotated[
        bool,
        typer.Option(
            "--route",
            metavar="",
            help="Rank the workers by what the prompt would cost, and say why.",
            rich_help_panel=ANSWER,
        ),
    ] = False,
    most: Annotated[
        int,
        typer.Option(
            metavar="ROWS",
            min=0,
            help="Most rows of the table; 0: all. JSON always has all.",
            rich_help_panel=ANSWER,
        ),
    ] = 40,
    as_json: Json = False,
    index_: Index = "127.0.0.1:50051",
    timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.001,
            max=3600,
            help="Longest wait for the answer.",
            rich_help_panel=ACCESS,
        ),
    ] = 5.0,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Ask an index how many leading blocks of a prompt each worker holds."""
    from kvpool.cli.lookup import run_lookup

    index = IndexConnection(index_, token_file, tls_ca, tls_cert, tls_key)
    run_lookup(
        model=model, index=index, token_ids=token_ids, hashes=hashes, text=text, chat=chat, tenant=tenant,
        lora_name=lora_name, lora_path=lora_path, cache_salt=cache_salt, workers=worker, route=route,
        timeout_s=timeout, most=most, as_json=as_json,
    )  # fmt: skip


ORDERS = ("name", "device", "host", "disk", "batches", "lag", "gaps", "resets")


def top(
    tenant: Annotated[
        str | None,
        typer.Option(
            metavar="TENANT", help="Only workers of this tenant. Without it: all.", rich_help_panel=ANSWER
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Only workers of this model. Without it: all.", rich_help_panel=ANSWER
        ),
    ] = None,
    sort: Annotated[
        str,
        typer.Option(
            metavar="COLUMN",
            autocompletion=lambda: list(ORDERS),
            help=f"Order of the rows: {', '.join(ORDERS[:-1])} or {ORDERS[-1]}.",
            rich_help_panel=ANSWER,
        ),
    ] = "name",
    most: Annotated[
        int,
        typer.Option(
            metavar="ROWS",
            min=0,
            help="Most rows of a table that is not live; 0: all. JSON always has all.",
            rich_help_panel=ANSWER,
        ),
    ] = 0,
    interval: Annotated[
        float,
        typer.Option(
            min=0.2, max=3600, metavar="SECONDS", help="Time between two looks.", rich_help_panel=ANSWER
        ),
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", metavar="", help="Look once, and exit.", rich_help_panel=ANSWER)
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", metavar="", help="Print one JSON object a look instead of tables, of a failure too."
        ),
    ] = False,
    index_: Index = "127.0.0.1:50051",
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Watch an index: its workers, what they hold, how far behind it is, hit ratios. Runs until Ctrl-C."""
    from kvpool.cli.top import run_top

    run_top(
        index=IndexConnection(index_, token_file, tls_ca, tls_cert, tls_key), tenant=tenant, model=model, sort=sort,
        most=most, interval_s=interval, once=once, as_json=as_json,
    )  # fmt: skip
