"""``IndexConnection``: where a command finds an index, and how it gets in."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from kvpool.config import index_token
from kvpool.errors import ConfigError
from kvpool.index.client.channel import DEFAULT_TIMEOUT_S, PICKER, Access, is_serving
from kvpool.index.client.client import IndexClient

MAX_TOKEN_FILE_NBYTES = 4096


class IndexConnection(NamedTuple):
    """``target``: ``HOST:PORT``. The others are the options of the same names; None: not given.

    Without ``token_file`` the token is that of ``KVPOOL_INDEX_TOKEN``, if it is set.
    """

    target: str
    token_file: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None

    def is_serving(self, *, picker: bool = False, timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
        """What its health says, of it or of its endpoint picker. Blocking. Errors: those of ``IndexClient``."""
        access = Access(None, self.tls_ca, self.tls_cert, self.tls_key)  # health is told without a token
        return is_serving(self.target, PICKER if picker else "", access, timeout_s)

    def open(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> IndexClient:
        """A client. Blocking: reads the files. Errors: ``ConfigError``."""
        token = _token(self.token_file) if self.token_file is not None else index_token() or None
        return IndexClient(
            self.target,
            timeout_s,
            token=token,
            tls_ca=self.tls_ca,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
        )


def _token(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_TOKEN_FILE_NBYTES + 1)
    except OSError as error:
        raise ConfigError(f"--token-file {path}: {error.strerror}") from error
    token = raw.decode("ascii", "replace").strip()
    if not token or len(raw) > MAX_TOKEN_FILE_NBYTES:
        raise ConfigError(f"--token-file {path}: holds no token: one line that kvpool token has made")
    return token
