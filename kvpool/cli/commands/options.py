"""Options that several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

# How a command gets into an index.
TokenFile = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Holds the bearer token for the index; without it KVPOOL_INDEX_TOKEN."),
]
TlsCa = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Connect with TLS; the authority of the index's certificate, PEM."),
]
TlsCert = Annotated[
    str | None, typer.Option(metavar="FILE", help="Certificate of this client, where the index demands one.")
]
TlsKey = Annotated[str | None, typer.Option(metavar="FILE", help="Private key of --tls-cert.")]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
