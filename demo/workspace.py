"""A long command's temporary folder, removed at its end or its signal, and progress lines."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from kvpool.cli.tables import termination_interrupts


@contextlib.contextmanager
def workspace(
    prefix: str, console: Console, *, keep: bool, good: Callable[[], bool] = lambda: True
) -> Iterator[Path]:
    """A folder removed at the end, also by signals, unless ``keep``; its logs stay after a failure."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    failed = False
    try:
        with termination_interrupts():
            yield folder
    except Exception:
        failed = True
        raise
    finally:
        if keep:
            _tell(console, f"kept: {folder}")
        elif not ((failed or not good()) and _keep_logs(folder, console)):
            shutil.rmtree(folder, ignore_errors=True)


def _keep_logs(folder: Path, console: Console) -> bool:
    """Keep only the logs in ``folder``, and print their place; False without any."""
    logs = sorted(folder.glob("*.log"))
    if not logs:
        return False
    for item in folder.iterdir():
        if item.is_dir():
            shutil.rmtree(item, ignore_errors=True)
        elif item not in logs:
            item.unlink(missing_ok=True)
    _tell(console, f"logs are kept: {' '.join(map(str, logs))}")
    return True


def _tell(console: Console, sentence: str) -> None:
    console.print(sentence, highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def doing(console: Console, what: str) -> Iterator[None]:
    """Print a line with the time at its end; a spinner until then, on a terminal."""
    started = time.monotonic()
    failed = "failed after "
    try:
        with console.status(what) if console.is_terminal else contextlib.nullcontext():
            yield
        failed = ""
    finally:
        took_s = time.monotonic() - started
        console.print(f"{what}: {failed}{took_s:.1f} s", highlight=False, markup=False)
