"""Temporary folders that go away with a command, also when it is ended by a signal."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console


@contextlib.contextmanager
def termination_interrupts() -> Iterator[None]:
    """Within it SIGTERM does what Ctrl-C does: it raises ``KeyboardInterrupt``. The process's main thread only."""
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def workspace(
    prefix: str, console: Console, *, keep: bool, good: Callable[[], bool] = lambda: True
) -> Iterator[Path]:
    """A folder that goes away with the command, on Ctrl-C and on termination too, unless ``keep``.

    When the command fails, or ``good()`` says no at its end, the logs in it stay.
    """
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
    """Leave the logs in ``folder``, nothing else, and say where they are; False where there is none."""
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


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt
