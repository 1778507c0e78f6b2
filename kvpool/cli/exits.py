"""Exit codes of a command line, and one line on standard error for a failure.

0: done. 1: the environment fails: no reply, a missing file, a taken address, a failed check. 2: the command
line is invalid or contradicts itself. 130: interrupted. With ``--json`` the failure is one object on standard
output: ``{"error": {"type", "message", "exit_code"}}``.
"""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import re
import sys
from pathlib import Path
from typing import NoReturn

import typer

from kvpool.errors import NO_PROVIDER, ConfigError, KVPoolError
from kvpool.text import missing_extra, printable

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

# Commands and options that are gone, or tried by habit from other programs, with what to do instead.
_CHECKOUT = "run python -m benchmarks {} in a checkout of kvpool"
_LOOK = "is no command: kvpool top shows an index and its workers, kvpool doctor examines a deployment"
COMMANDS = {
    "demo": "is not in the package any more: run make demo in a checkout of kvpool",
    **{
        f"bench {one}": f"is not in the package any more: {_CHECKOUT.format(one)}"
        for one in ("hash", "device", "index", "fleet", "e2e")
    },
    "status": _LOOK,
    "stats": _LOOK,
    "ping": "is no command: kvpool doctor says whether a pool, an index or a front answers",
    "version": "is no command: kvpool --version prints it",
}
_PEERS = f"is no option any more: {_CHECKOUT.format('store --peers')}"
OPTIONS = {
    ("kvpool bench store", "--peers"): _PEERS,
    ("kvpool bench store", "--peers-folder"): _PEERS,
    ("kvpool bench store", "--plot"): f"is no option any more: {_CHECKOUT.format('store --plot')}",
    (
        "kvpool purge",
        "--all",
    ): "is no option: write --everything; --dry-run alone shows what is there, by tenant and namespace",
    **{
        (f"kvpool {service}", option): "is no option any more: it is the default; leave it out"
        for service in ("index", "router")
        for option in ("--reuse-reports", "--place-headers", "--scrape")
    },
}

_NO_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)
# An argument of an index's clients in Python, as their errors name it; no part of a path.
_ARGUMENT = re.compile(r"(?<![\w/.-])tls_(ca|cert|key)(?![\w/.-])")


def run(app: typer.Typer, program: str) -> NoReturn:
    """Run a command line and exit. ``program``: its name, before each line about a failure."""
    for name, mode in (("stdin", "r"), ("stdout", "w")):
        if getattr(sys, name) is None:  # whoever started this has closed it
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - until the end
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of others may be in no locale's bytes
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            _run(app, program)
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in _NO_OUTPUT or error.filename is not None:
            raise
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())  # else the interpreter's end tries again
        if error.errno != errno.EPIPE:  # a pipe's reader that has gone knows
            print(f"{program}: nothing can be written to standard output: {error.strerror}", file=sys.stderr)
        sys.exit(EXIT_FAILED)


def _run(app: typer.Typer, program: str) -> NoReturn:
    as_json = "--json" in sys.argv[1:]

    def end(sentence: str, code: int, kind: str) -> NoReturn:
        if as_json:
            print(json.dumps({"error": error_object(sentence, code, kind)}), flush=True)
        else:
            print(f"{program}: {printable(sentence)}", file=sys.stderr)
        sys.exit(code)

    for name, why in COMMANDS.items() if program == "kvpool" else ():
        if sys.argv[1:][: len(name.split())] == name.split():
            end(f"{name} {why}", EXIT_USAGE, "UsageError")
    try:
        # The code of a command's typer.Exit; Ctrl-C comes as 130.
        code = app(prog_name=program, standalone_mode=False)
        if code == EXIT_INTERRUPTED:
            end("interrupted", EXIT_INTERRUPTED, "Interrupted")
        sys.exit(code)
    except typer.Abort:
        end("aborted", EXIT_INTERRUPTED, "Aborted")
    except KVPoolError as error:
        end(in_options(str(error)), code_of(error), type(error).__name__)
    except ModuleNotFoundError as error:
        needed = missing_extra(error)
        if needed is error:
            raise
        end(str(needed), EXIT_FAILED, "MissingPackage")
    except Exception as error:
        if type(error).__name__ == "UnsupportedDigestmodError":  # hashlib's, of a module without types
            end(f"Python's OpenSSL offers no SHA-256: {error}; {NO_PROVIDER}", EXIT_FAILED, "NoProvider")
        # Wrong options, as click words them; anything else is a fault of ours and keeps its trace.
        if not hasattr(error, "format_message"):
            raise
        words = [program, *itertools.takewhile(lambda word: not word.startswith("-"), sys.argv[1:])]
        page = getattr(getattr(error, "ctx", None), "command_path", " ".join(words))
        option = str(getattr(error, "option_name", ""))
        if (page, option) in OPTIONS:
            end(f"{option} {OPTIONS[page, option]}", EXIT_USAGE, "UsageError")
        sentence = " ".join(error.format_message().split()).rstrip(".")
        end(f"{sentence} (see {page} --help)", EXIT_USAGE, "UsageError")


def code_of(error: KVPoolError) -> int:
    """A ``ConfigError`` caused by a file, folder or address is a fault of the environment."""
    from kvpool._native import RefusedDirectory

    if isinstance(error, ConfigError) and not isinstance(error.__cause__, OSError | RefusedDirectory):
        return EXIT_USAGE
    return EXIT_FAILED


def in_options(text: str) -> str:
    """An error's text with the command line's options in place of Python's arguments: ``--tls-ca`` for ``tls_ca``."""
    return _ARGUMENT.sub(r"--tls-\1", text)


def error_object(sentence: str, code: int, kind: str) -> dict[str, str | int]:
    return {"type": kind, "message": printable(in_options(sentence)), "exit_code": code}
