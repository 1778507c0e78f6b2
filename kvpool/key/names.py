"""Names in keys: the tenant, and the name under which a worker announces itself.

The tenant is the first variable part of every key, so that one ACL pattern covers it.
"""

from __future__ import annotations

import re

from kvpool.errors import ConfigError

TENANT_PATTERN = r"[A-Za-z0-9_-]{1,64}"
WORKER_NAME_PATTERN = r"[A-Za-z0-9._:\[\]-]{1,128}"
_TENANT = re.compile(TENANT_PATTERN)
_WORKER_NAME = re.compile(WORKER_NAME_PATTERN)


def check_tenant(tenant: str) -> str:
    """Return ``tenant`` if a key can contain it. Errors: ``ConfigError`` that says the allowed characters."""
    if not isinstance(tenant, str) or _TENANT.fullmatch(tenant) is None:
        raise ConfigError(
            f"tenant {tenant!r} is not allowed: use 1 to 64 letters, digits, underscores or hyphens"
        )
    return tenant


def check_worker_name(name: str) -> str:
    """Return ``name`` if a worker can announce it. Errors: ``ConfigError`` that says the allowed characters."""
    if not isinstance(name, str) or _WORKER_NAME.fullmatch(name) is None:
        raise ConfigError(
            f"worker name {name!r:.80} is not allowed: use 1 to 128 letters, digits and any of . _ : [ ] -"
        )
    return name
