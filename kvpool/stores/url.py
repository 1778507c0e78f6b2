"""A store's URL, read once and checked: which store, where, how large."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from kvpool.errors import ConfigError
from kvpool.wording import format_nbytes, parse_nbytes, redact, unknown

SCHEMES = ("file", "memory")
LATER_SCHEMES = (
    "redis", "rediss", "valkey", "valkey+cluster", "valkey+sentinel", "valkey+unix", "valkeys",
)  # fmt: skip
MIN_CAPACITY_NBYTES = 1 << 20
DEFAULT_FILE_CAPACITY_NBYTES = 10 << 30
DEFAULT_MEMORY_CAPACITY_NBYTES = 1 << 30
DEFAULT_THREADS = 2
MAX_THREADS = 64
MAX_URL_CHARS = 4096

_URL = re.compile(
    r"(?P<scheme>[^:/?#]*)://(?P<host>[^/?#]*)(?P<path>[^?#]*)(?:\?(?P<query>[^#]*))?", re.DOTALL
)
_PARAMETERS = {"file": ("capacity", "threads"), "memory": ("capacity",)}


@dataclass(frozen=True)
class StoreURL:
    """What a store URL says.

    ``path``: absolute directory of a file store, empty for memory. ``capacity_nbytes``: most that the store
    keeps. ``threads``: native threads that move bytes (file), 1 to 64.
    """

    scheme: str
    path: str
    capacity_nbytes: int
    threads: int = DEFAULT_THREADS

    @classmethod
    def parse(cls, url: str) -> StoreURL:
        """Read ``memory://[?capacity=1GiB]`` or ``file:///dir[?capacity=10GiB][&threads=2]``.

        Errors: ``ConfigError`` that says what to write instead, and never shows a password.
        """
        match = _URL.fullmatch(url) if isinstance(url, str) and len(url) <= MAX_URL_CHARS else None
        if match is None or not url.isprintable():
            raise ConfigError(
                f"{_shown(url)} is not a store URL: write file:///dir or memory://; "
                "percent-encode spaces, # and ? in a directory"
            )
        scheme = match["scheme"]
        if scheme in LATER_SCHEMES:
            raise ConfigError(
                f"{redact(url)}: {scheme}:// is not available in this version; use file:///dir or memory://"
            )
        if scheme not in SCHEMES:
            raise ConfigError(f"{redact(url)}: {unknown('store', scheme, SCHEMES + LATER_SCHEMES)}")
        query = _query(url, match["query"] or "", _PARAMETERS[scheme])
        if scheme == "memory":
            if match["host"] or match["path"]:
                raise ConfigError(
                    f"{redact(url)}: memory:// takes no name: each one opened is a store of its own"
                )
            return cls(scheme, "", _capacity(url, query, DEFAULT_MEMORY_CAPACITY_NBYTES))
        if match["host"] or not match["path"]:
            wanted = f"/{match['host']}{match['path']}" if match["host"] else "/absolute/path"
            raise ConfigError(
                f"{redact(url)}: a directory is written file:///absolute/path, with three slashes; "
                f"perhaps file://{wanted}"
            )
        try:
            path = unquote(match["path"], errors="strict")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{redact(url)}: a directory's name is UTF-8 text") from error
        if "\0" in path:
            raise ConfigError(f"{redact(url)}: a directory's name cannot hold a zero byte")
        capacity_nbytes = _capacity(url, query, DEFAULT_FILE_CAPACITY_NBYTES)
        return cls(scheme, path, capacity_nbytes, _threads(url, query))


def check_threads(threads: int) -> int:
    """Return ``threads`` if it is 1 to 64. Errors: ``ConfigError``."""
    if type(threads) is not int or not 1 <= threads <= MAX_THREADS:
        raise ConfigError(f"threads is a whole number from 1 to {MAX_THREADS}, not {threads!r}")
    return threads


def _shown(url: object) -> str:
    if not isinstance(url, str):
        return f"a {type(url).__name__}"
    return repr(redact(url)) if len(url) <= MAX_URL_CHARS else f"text of {len(url)} characters"


def _query(url: str, text: str, known: tuple[str, ...]) -> dict[str, str]:
    query: dict[str, str] = {}
    for part in filter(None, text.split("&")):
        name, _, value = part.partition("=")
        if name not in known:
            raise ConfigError(f"{redact(url)}: {unknown('parameter', unquote(name), known)}")
        if name in query:
            raise ConfigError(f"{redact(url)}: {name} is given twice")
        query[name] = unquote(value)
    return query


def _capacity(url: str, query: Mapping[str, str], default_nbytes: int) -> int:
    if "capacity" not in query:
        return default_nbytes
    try:
        capacity_nbytes = parse_nbytes(query["capacity"])
    except ConfigError as error:
        raise ConfigError(f"{redact(url)}: capacity {error}") from error
    if capacity_nbytes < MIN_CAPACITY_NBYTES:
        raise ConfigError(f"{redact(url)}: capacity is at least {format_nbytes(MIN_CAPACITY_NBYTES)}")
    return capacity_nbytes


def _threads(url: str, query: Mapping[str, str]) -> int:
    if "threads" not in query:
        return DEFAULT_THREADS
    text = query["threads"]
    if not (text.isascii() and text.isdigit() and len(text) <= 4):
        raise ConfigError(
            f"{redact(url)}: threads is a whole number from 1 to {MAX_THREADS}, not {text!r:.20}"
        )
    return check_threads(int(text))
