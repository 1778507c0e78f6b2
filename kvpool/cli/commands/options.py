"""Options that several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

ACCESS = "Access to the index"

# How a command gets into an index.
Index = Annotated[
    str,
    typer.Option(
        "--index",
        metavar="HOST:PORT",
        envvar="KVPOOL_INDEX",
        help="Where the index serves.",
        rich_help_panel=ACCESS,
    ),
]
TokenFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Holds the bearer token for the index. Without it: KVPOOL_INDEX_TOKEN, if that is set.",
        rich_help_panel=ACCESS,
    ),
]
TlsCa = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Connect with TLS; the authority of the index's certificate, PEM. Without it: no TLS.",
        rich_help_panel=ACCESS,
    ),
]
TlsCert = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Certificate of this client, where the index demands one, PEM.",
        rich_help_panel=ACCESS,
    ),
]
TlsKey = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="The private key of --tls-cert, PEM.", rich_help_panel=ACCESS),
]

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of tables, of a failure too.")
]
