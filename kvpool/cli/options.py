"""How a command declares its options: a field of a dataclass each, and those that several commands share.

A field is an option: ``max_blocks`` is ``--max-blocks``.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, get_type_hints

import typer

from kvpool.environment import index_token
from kvpool.errors import ConfigError
from kvpool.files import read_file
from kvpool.text import parse_address, parse_nbytes, parse_sized

if TYPE_CHECKING:
    from kvpool.index.client.client import IndexClient

ACCESS = "Access to the index"
DEFAULT_DIRECTORY = "/dev/shm/kvpool"  # noqa: S108 - where kvpool vllm has its pool without a URL
MAX_TOKEN_FILE_NBYTES = 4096

_Options = TypeVar("_Options")


def takes(options: type[_Options]) -> Callable[[Callable[[_Options], None]], Callable[..., None]]:
    """Makes a command of a function of ``options``, a dataclass: each field is an option."""
    hints, required = get_type_hints(options, include_extras=True), inspect.Parameter.empty
    parameters = [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hints[one.name],
            default=one.default
            if one.default is not MISSING
            else None
            if one.default_factory is list
            else required,
        )
        for one in fields(options)  # type: ignore[arg-type]
    ]

    def command(run: Callable[[_Options], None]) -> Callable[..., None]:
        @functools.wraps(run)
        def called(**given: Any) -> None:
            run(options(**{name: value for name, value in given.items() if value is not None}))

        del called.__wrapped__
        called.__annotations__ = hints
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return called

    return command


def option(panel: str | None, metavar: str | None, text: str, **more: Any) -> Any:
    """``panel``: its group in --help."""
    return typer.Option(metavar=metavar, help=text, rich_help_panel=panel, **more)


def flag(panel: str | None, name: str, text: str) -> Any:
    return typer.Option(name, metavar="", help=text, rich_help_panel=panel)


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


def default_pool() -> str | None:
    """The URL of ``DEFAULT_DIRECTORY`` if that is there, which a line on standard error then says; else None."""
    if not Path(DEFAULT_DIRECTORY).is_dir():
        return None
    print(
        f"kvpool: without --pool this is about file://{DEFAULT_DIRECTORY}, the pool of kvpool vllm",
        file=sys.stderr,
    )
    return f"file://{DEFAULT_DIRECTORY}"


def pool_or_default(value: str) -> str:
    """A callback of ``--pool``: ``default_pool`` in place of an empty one. Errors: ``ConfigError``."""
    if pool := value or default_pool():
        return pool
    raise ConfigError(f"name the pool: --pool URL, or KVPOOL_POOL; there is no {DEFAULT_DIRECTORY}")


is_address, is_size, is_sized = _read_by(parse_address), _read_by(parse_nbytes), _read_by(parse_sized)

# fmt: off
Index = Annotated[str, option(ACCESS, "HOST:PORT", "Where the index serves.",
    envvar="KVPOOL_INDEX", callback=is_address)]
TokenFile = Annotated[str | None, option(ACCESS, "FILE",
    "Holds the bearer token for the index. Without it: KVPOOL_INDEX_TOKEN, if that is set.")]
TlsCa = Annotated[str | None, option(ACCESS, "FILE",
    "Connect with TLS; the authority of the index's certificate, PEM. Without it: no TLS.")]
TlsCert = Annotated[str | None, option(ACCESS, "FILE",
    "Certificate of this client, where the index demands one, PEM.")]
TlsKey = Annotated[str | None, option(ACCESS, "FILE", "The private key of --tls-cert, PEM.")]
Json = Annotated[bool, flag(None, "--json", "Print one JSON object instead of tables, of a failure too.")]
# fmt: on


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
        raw = read_file(path, MAX_TOKEN_FILE_NBYTES)
    except OSError as error:
        raise ConfigError(f"--token-file {path}: {error.strerror}") from error
    token = raw.decode("ascii", "replace").strip()
    if not token:
        raise ConfigError(f"--token-file {path}: holds no token: one line that kvpool token has made")
    return token
