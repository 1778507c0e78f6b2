"""Options of several commands, and ``IndexConnection``: those that connect to an index."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from kvpool.config import index_token
from kvpool.errors import ConfigError
from kvpool.text import parse_address, parse_nbytes

if TYPE_CHECKING:
    from kvpool.index.client.client import IndexClient

ACCESS = "Access to the index"
MAX_TOKEN_FILE_NBYTES = 4096


def _read_by(parse: Callable[[str], object]) -> Callable[..., Any]:
    """A callback for options whose values ``parse`` reads; its refusals name the option."""

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

# Options that connect to an index.
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
    bool,
    typer.Option("--json", metavar="", help="Print one JSON object instead of tables, of a failure too."),
]


class IndexConnection(NamedTuple):
    """``target``: ``HOST:PORT``. The others are the options of the same names; None: not given.

    Without ``token_file`` the token is that of ``KVPOOL_INDEX_TOKEN``, if set.
    """

    target: str
    token_file: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None

    def is_serving(self, *, picker: bool = False, timeout_s: float = 1.0) -> bool:
        """The health of the index or its endpoint picker. Blocking. Errors: those of ``IndexClient``."""
        from kvpool.index.client.channel import PICKER, Access, is_serving

        access = Access(None, self.tls_ca, self.tls_cert, self.tls_key)  # health takes no token
        return is_serving(self.target, PICKER if picker else "", access, timeout_s)

    def open(self, timeout_s: float = 1.0) -> IndexClient:
        """Blocking: reads the files. Errors: ``ConfigError``."""
        from kvpool.index.client.client import IndexClient

        token = _token(self.token_file) if self.token_file is not None else index_token() or None
        return IndexClient(
            self.target,
            timeout_s,
            token=token,
            tls_ca=self.tls_ca,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
        )


def _token(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_TOKEN_FILE_NBYTES + 1)
    except OSError as error:
        raise ConfigError(f"--token-file {path}: {error.strerror}") from error
    token = raw.decode("ascii", "replace").strip()
    if not token or len(raw) > MAX_TOKEN_FILE_NBYTES:
        raise ConfigError(f"--token-file {path}: holds no token: one line that kvpool token has made")
    return token
