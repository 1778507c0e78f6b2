"""The tenant: the first variable part of every key, so that one ACL pattern covers all that a tenant owns."""

from __future__ import annotations

import re

from kvpool.errors import ConfigError

TENANT_PATTERN = r"[A-Za-z0-9_-]{1,64}"
_TENANT = re.compile(TENANT_PATTERN)


def check_tenant(tenant: str) -> str:
    """Return ``tenant`` if it can stand in a key.

    Errors: ``ConfigError`` that says what is allowed.
    """
    if not isinstance(tenant, str) or _TENANT.fullmatch(tenant) is None:
        raise ConfigError(
            f"tenant {tenant!r} is not allowed: use 1 to 64 letters, digits, underscores or hyphens"
        )
    return tenant
