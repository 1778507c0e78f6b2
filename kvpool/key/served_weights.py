"""The digest of an engine's served weights, where only the model's name is known.

A name is no identity: folders are overwritten or remounted, hub branches move. The files' digest is the fact;
without files, an operator vouches with ``model_id``.

Threads: any; every call blocks as ``checkpoint_digest`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvpool.key.checkpoint import WEIGHTS_SUFFIXES, checkpoint_digest


def served_digest(
    engine_path: str, named_path: str | None, suffixes: Sequence[str] = WEIGHTS_SUFFIXES
) -> str:
    """32 hex digits; "" when no folder is named and the engine's path has no weights (a hub's name, or "").

    ``named_path``: the operator's, which wins. Errors: ``ConfigError``: it has no weights, or its weights
    cannot be read in time.
    """
    if named_path is not None:
        return checkpoint_digest(Path(named_path), suffixes=suffixes).hex
    if not engine_path:
        return ""
    path = Path(engine_path)
    try:
        found = path.is_file() or any(any(path.glob(f"*{suffix}")) for suffix in suffixes)
    except OSError:  # a name too long for a path
        return ""
    return checkpoint_digest(path, suffixes=suffixes).hex if found else ""
