"""``TokenAuth``: callers' rights to read, publish and administer, by bearer tokens.

The file of tokens is TOML, with the SHA-256 of each random token; ``kvpool token`` makes both. One table per
token, under any name:

    [router]
    sha256 = "..."          # 64 hex digits
    rights = ["read"]       # read, publish, admin; none includes another one
    tenants = ["team-a"]    # or "*": all

Threads: any calls ``authenticate``, one at a time ``reload``; ``_entries`` is replaced whole. Tokens are
neither kept nor logged.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, get_args

from kvpool.environment import read_toml
from kvpool.errors import AccessDenied, ConfigError
from kvpool.index.net.tls import file_state
from kvpool.index.protocol.messages import MAX_TOKEN_CHARS
from kvpool.key.key import check_tenant
from kvpool.text import unknown

Right = Literal["read", "publish", "admin"]
RIGHTS: tuple[Right, ...] = get_args(Right)
_REMOVED_RIGHTS: Mapping[str, Right] = {"ask": "read", "administer": "admin"}
ALL_TENANTS = "*"

MAX_TOKENS = 1024  # each call is compared with all of them: 0.2 ms
MAX_TENANTS = 1024  # of a token

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")

logger = logging.getLogger("kvpool.index")


class WrongToken(AccessDenied):
    """The token is unknown or absent."""


class Permissions(NamedTuple):
    """Of one caller. ``tenants``: None: all."""

    rights: frozenset[str]
    tenants: frozenset[str] | None

    def check(self, right: Right, tenant: str | None) -> None:
        """``tenant``: None: no particular one; ``ALL_TENANTS``: all.

        Errors: ``AccessDenied``, with equal words for known and unknown tenants.
        """
        if right not in self.rights:
            raise AccessDenied(f'this token does not have the right "{right}"')
        if tenant is not None and self.tenants is not None and tenant not in self.tenants:
            raise AccessDenied(
                "this token is not for "
                + ("all tenants" if tenant == ALL_TENANTS else f"tenant {tenant!r:.80}")
            )

    def sees(self, tenant: str) -> bool:
        return self.tenants is None or tenant in self.tenants


EVERYTHING = Permissions(frozenset(RIGHTS), None)


class _Entry(NamedTuple):
    sha256: bytes
    permissions: Permissions


class TokenAuth:
    """``path``: the file of tokens; None: every caller may do everything.

    Errors: ``ConfigError`` that names the file, and the token by its name.
    """

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        self._seen: object = None
        self._entries: tuple[_Entry, ...] = ()
        if path is not None:
            self._seen = file_state(path)
            self._entries = _read(path)

    @property
    def is_open(self) -> bool:
        """Whether no caller needs a token."""
        return self._path is None

    def authenticate(self, authorization: str | None) -> Permissions:
        """``authorization``: ``Bearer TOKEN``. Errors: ``WrongToken``."""
        if self._path is None:
            return EVERYTHING
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise WrongToken("this index asks for a token: send authorization: Bearer TOKEN")
        found: Permissions | None = None
        if len(token) <= MAX_TOKEN_CHARS:
            digest = _digest(token)
            for entry in self._entries:  # always all of them: constant time
                if hmac.compare_digest(entry.sha256, digest):
                    found = entry.permissions
        if found is None:
            raise WrongToken("this index does not know this token")
        return found

    def reload(self) -> None:
        """Read the file again if it has changed. An unreadable one changes nothing, and is logged once. Blocking."""
        if self._path is None or (seen := file_state(self._path)) == self._seen:
            return
        self._seen = seen
        try:
            self._entries = _read(self._path)
        except ConfigError as error:
            logger.warning("the tokens stay as they were: %s", error)
        else:
            logger.info("the tokens were read again: %d", len(self._entries))


def make_token(name: str, rights: Iterable[str], tenants: Iterable[str]) -> tuple[str, str]:
    """A new token, and the table for the file of tokens. Errors: ``ConfigError``."""
    token = secrets.token_urlsafe(32)
    several = list(tenants)
    table = {
        "sha256": _digest(token).hex(),
        "rights": list(rights),
        "tenants": ALL_TENANTS if ALL_TENANTS in several else several,
    }
    _entry(name, table)  # validates it
    lines = (f"{field} = {_toml(value)}" for field, value in table.items())
    return token, "\n".join((f"[{name}]", *lines)) + "\n"


def _toml(value: Any) -> str:
    # No name, right or tenant needs escaping in TOML.
    return f'"{value}"' if isinstance(value, str) else f"[{', '.join(map(_toml, value))}]"


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()


def _read(path: str) -> tuple[_Entry, ...]:
    tables = read_toml(path, "--tokens")
    if not 1 <= len(tables) <= MAX_TOKENS:
        raise ConfigError(
            f"{path} has {len(tables)} tokens: write 1 to {MAX_TOKENS}, kvpool token makes them"
        )
    try:
        entries = tuple(_entry(name, table) for name, table in tables.items())
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if len({entry.sha256 for entry in entries}) != len(entries):
        raise ConfigError(f"{path}: two names have the same token")
    return entries


def _entry(name: str, table: Any) -> _Entry:
    if _NAME.fullmatch(name) is None or not isinstance(table, Mapping):
        raise ConfigError(
            f"{name!r:.80}: write a table for each token, under a name of letters, digits, _ and -"
        )
    fields = ("sha256", "rights", "tenants")
    for field in table:
        if field not in fields:
            raise ConfigError(f"token {name}: {unknown('field', field, fields)}")
    for field in fields:
        if field not in table:
            raise ConfigError(f"token {name}: {field} is missing")
    sha256, rights, tenants = (table[field] for field in fields)
    if not isinstance(sha256, str) or _SHA256.fullmatch(sha256) is None:
        raise ConfigError(
            f"token {name}: sha256 is 64 hex digits, as kvpool token writes them, not the token"
        )
    if not _are_texts(rights) or not rights:
        raise ConfigError(f"token {name}: rights is a list of {', '.join(RIGHTS)}")
    for right in rights:
        if right in _REMOVED_RIGHTS:
            raise ConfigError(f'token {name}: write the right "{_REMOVED_RIGHTS[right]}" for "{right}"')
        if right not in RIGHTS:
            raise ConfigError(f"token {name}: {unknown('right', right, RIGHTS)}")
    if tenants == ALL_TENANTS:
        return _Entry(bytes.fromhex(sha256), Permissions(frozenset(rights), None))
    if not _are_texts(tenants) or not 1 <= len(tenants) <= MAX_TENANTS:
        raise ConfigError(f'token {name}: tenants is a list of 1 to {MAX_TENANTS} names, or "*"')
    try:
        found = frozenset(map(check_tenant, tenants))
    except ConfigError as error:
        raise ConfigError(f"token {name}: {error}") from error
    return _Entry(bytes.fromhex(sha256), Permissions(frozenset(rights), found))


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)
