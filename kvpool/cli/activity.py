"""What a command that takes minutes says of what it does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console


@contextlib.contextmanager
def doing(console: Console, what: str) -> Iterator[None]:
    """One line when it has ended, with the time that it took; a spinner until then, on a terminal."""
    started = time.monotonic()
    failed = "failed after "
    try:
        with console.status(what) if console.is_terminal else contextlib.nullcontext():
            yield
        failed = ""
    finally:
        took_s = time.monotonic() - started
        console.print(f"{what}: {failed}{took_s:.1f} s", highlight=False, markup=False)
