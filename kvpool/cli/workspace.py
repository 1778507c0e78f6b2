"""The temporary folder of a command that starts engines."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console


@contextlib.contextmanager
def workspace(prefix: str, console: Console, *, keep: bool) -> Iterator[Path]:
    """A folder that goes away with the command, on Ctrl-C and on termination too, unless ``keep``."""
    previous = signal.signal(signal.SIGTERM, _interrupt)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    finally:
        signal.signal(signal.SIGTERM, previous)
        if keep:
            console.print(f"kept: {folder}", highlight=False)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt
