"""PNGs of the benchmarks, if matplotlib is installed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from kvpool.errors import ConfigError


def new_figure(width: float, height: float) -> Any:
    """A ``matplotlib.figure.Figure``, in inches. Errors: ``ConfigError`` without matplotlib."""
    try:
        # pyplot would look for a screen.
        module: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed: pip install matplotlib"
        ) from error
    return module.Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Errors: ``ConfigError`` for an unwritable file."""
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigError(f"cannot write the plot {path}: {error.strerror}") from error
