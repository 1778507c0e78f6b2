"""Options that several commands take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from kvpool.errors import ConfigError
from kvpool.text import parse_address, parse_nbytes

ACCESS = "Access to the index"


def _read_by(parse: Callable[[str], object]) -> Callable[..., Any]:
    """A callback for options whose values ``parse`` reads: what it refuses is told with the option's name."""

    def check(param: typer.CallbackParam, value: Any) -> Any:
        try:
            for text in value if isinstance(value, list) else [value]:
                if text is not None:
                    parse(text)
        except ConfigError as error:
            raise ConfigError(f"{param.opts[0]}: {error}") from error
        return value

    return check


is_address, is_size = _read_by(parse_address), _read_by(parse_nbytes)

# How a command gets into an index.
Index = Annotated[
    str,
    typer.Option(
        "--index",
        metavar="HOST:PORT",
        envvar="KVPOOL_INDEX",
        help="Where the index serves.",
        callback=is_address,
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
