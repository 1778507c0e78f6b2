"""``kvpool token``: a new bearer token for an index, and what its file of tokens keeps of it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvpool.errors import ConfigError
from kvpool.index.serve.auth import make_token


def run_token(*, name: str, rights: Sequence[str], tenants: Sequence[str], token_file: str) -> None:
    """Write the token to a new file that only its owner can read, and print the entry. Errors: ``ConfigError``."""
    token, entry = make_token(name, rights, tenants)
    try:
        descriptor = os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"--token-file {token_file}: {error.strerror}; name a new file") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")
    print(entry)
