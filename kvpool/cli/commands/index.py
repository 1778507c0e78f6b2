"""``kvpool index``, ``router`` and ``token``: the services, and their callers' tokens."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer

from kvpool.cli.settings import FleetSettings, IndexSettings, RouterSettings
from kvpool.errors import ConfigError


def _takes(settings: type[FleetSettings]) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """Makes a command of a function of ``settings``: each field is an option."""
    hints = get_type_hints(settings, include_extras=True)
    options = [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hints[one.name],
            default=None if one.default_factory is list else one.default,
        )
        for one in fields(settings)
    ]

    def command(run: Callable[[Any], None]) -> Callable[..., None]:
        @functools.wraps(run)
        def called(**given: Any) -> None:
            run(settings(**{name: value for name, value in given.items() if value is not None}))

        del called.__wrapped__
        called.__annotations__ = hints
        called.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        return called

    return command


@_takes(IndexSettings)
def index(settings: IndexSettings) -> None:
    """Serve the prefix index: which worker holds how much of a prompt. Runs until SIGTERM or Ctrl-C."""
    from kvpool.cli.index import run_index

    run_index(settings)


@_takes(RouterSettings)
def router(settings: RouterSettings) -> None:
    """Serve OpenAI's API in front of a fleet: each request goes where its prompt costs least. Runs until SIGTERM."""
    from kvpool.cli.index import run_index

    if settings.tokens is not None and settings.grpc is None and settings.http is None:
        raise ConfigError("--tokens is for callers of --grpc and --http: give one of them, too")
    run_index(settings)


def token(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Whom it is for; a name in the file of tokens.")
    ],
    token_file: Annotated[
        str,
        typer.Option(metavar="FILE", help="Where the token is written, a new file, for that caller alone."),
    ],
    right: Annotated[
        list[str] | None,
        typer.Option(
            "--right",
            metavar="RIGHT",
            autocompletion=lambda: ["read", "publish", "admin"],
            help="What it allows: read, publish or admin; once for each. Without it: read.",
        ),
    ] = None,
    tenant: Annotated[
        list[str] | None,
        typer.Option(
            "--tenant",
            metavar="TENANT",
            help="For whose workers; once for each; *: for all. Without it: default.",
        ),
    ] = None,
) -> None:
    """Make a bearer token for an index, and print the entry for its file of tokens.

    For example: kvpool token router-1 --token-file router-1.token >> tokens.toml
    """
    from kvpool.index.serve.auth import make_token

    made, entry = make_token(name, right or ["read"], tenant or ["default"])
    try:
        descriptor = os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"--token-file {token_file}: {error.strerror}; name a new file") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(made + "\n")
    print(entry)
