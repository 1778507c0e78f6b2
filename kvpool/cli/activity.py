"""What a command that takes minutes says of what it does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console


@contextlib.contextmanager
def doing(console: Console, what: str) -> Iterator[None]:
    """Show that something goes on: a spinner on a terminal, a line before and after elsewhere."""
    started = time.monotonic()
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        console.print(f"... {what}", highlight=False)
        yield
    console.print(f"[{time.monotonic() - started:5.1f} s] {what}", highlight=False, markup=False)
