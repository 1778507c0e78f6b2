"""How a command line ends: the exit code, and one line on standard error when it failed."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from kvpool.errors import ConfigError, KVPoolError
from kvpool.text import missing_extra

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def run(app: typer.Typer, program: str) -> NoReturn:
    """Run a command line and exit. ``program``: its name, before each line that it prints about a failure."""

    def end(sentence: str, code: int) -> NoReturn:
        print(f"{program}: {sentence}", file=sys.stderr)
        sys.exit(code)

    try:
        # What a command's typer.Exit says; Ctrl-C comes as 130.
        code = app(prog_name=program, standalone_mode=False)
        if code == EXIT_INTERRUPTED:
            end("interrupted", EXIT_INTERRUPTED)
        sys.exit(code)
    except typer.Abort:
        end("aborted", EXIT_INTERRUPTED)
    except ConfigError as error:
        end(str(error), EXIT_USAGE)
    except KVPoolError as error:
        end(str(error), EXIT_FAILED)
    except ModuleNotFoundError as error:
        needed = missing_extra(error)
        if needed is error:
            raise
        end(str(needed), EXIT_USAGE)
    except Exception as error:
        # Wrong options, as click words them; anything else is a fault of ours and keeps its trace.
        if not hasattr(error, "format_message"):
            raise
        end(f"{error.format_message()} ({program} --help)", EXIT_USAGE)
