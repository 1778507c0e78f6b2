"""The name under which a worker announces itself: a part of a key, like the tenant."""

from __future__ import annotations

import re

from kvpool.errors import ConfigError

WORKER_NAME_PATTERN = r"[A-Za-z0-9._:\[\]-]{1,128}"
_WORKER_NAME = re.compile(WORKER_NAME_PATTERN)


def check_worker_name(name: str) -> str:
    """Return ``name`` if a worker of that name can be announced.

    Errors: ``ConfigError`` that says what is allowed.
    """
    if not isinstance(name, str) or _WORKER_NAME.fullmatch(name) is None:
        raise ConfigError(
            f"worker name {name!r:.80} is not allowed: use 1 to 128 letters, digits and any of . _ : [ ] -"
        )
    return name
