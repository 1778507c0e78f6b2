"""Files of tokens for tests."""

from __future__ import annotations

from pathlib import Path

from kvpool.index.serve.auth import make_token


def write_tokens(path: Path, **holders: tuple[list[str], list[str]]) -> dict[str, str]:
    """``name=(rights, tenants)``; the tokens by name."""
    tokens, entries = {}, []
    for name, (rights, tenants) in holders.items():
        tokens[name], entry = make_token(name, rights, tenants)
        entries.append(entry)
    fresh = path.with_suffix(".new")
    fresh.write_text("\n".join(entries))
    fresh.rename(path)  # another file each time, so no clock has to move
    return tokens
