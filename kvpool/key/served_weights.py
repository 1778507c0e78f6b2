"""The digest of the weights that an engine serves, where only the name of the model is known.

A name is not an identity: a folder is overwritten, or mounted elsewhere, and a hub's branch moves. Where the files can
be found, their digest is the fact; where not, an operator vouches with ``model_id``.

Threads: any; every call blocks as ``checkpoint_digest`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvpool.key.checkpoint import WEIGHTS_SUFFIXES, checkpoint_digest


def served_digest(
    engine_path: str, named_path: str | None, suffixes: Sequence[str] = WEIGHTS_SUFFIXES
) -> str:
    """32 hex digits; "" when no folder is named and the engine's own path has no weights (a hub's name, or "").

    ``named_path``: what an operator says, which wins. Errors: ``ConfigError``: it has no weights, or weights that are
    there cannot be read in time.
    """
    if named_path is not None:
        return checkpoint_digest(Path(named_path), suffixes=suffixes).hex
    if not engine_path:
        return ""
    path = Path(engine_path)
    try:
        found = path.is_file() or any(any(path.glob(f"*{suffix}")) for suffix in suffixes)
    except OSError:  # a name that is too long for a path
        return ""
    return checkpoint_digest(path, suffixes=suffixes).hex if found else ""
