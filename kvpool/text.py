"""Parsing and wording of human text: sizes, misspelled names, URLs with a password, others' words on a terminal."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Sequence

from kvpool.errors import ConfigError

UNIT_NBYTES = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
}
MAX_NBYTES = (1 << 63) - 1

# kvpool's extra -> its packages, by import name.
_EXTRAS = {
    "client": {"google", "grpc"},
    "index": {"aiohttp", "anyio", "google", "grpc", "msgspec", "prometheus_client", "uvloop"},
    "tokenize": {"jinja2", "tokenizers", "transformers"},
}

_SIZE = re.compile(r"([0-9]{1,19})([A-Za-z]*)")
# The userinfo of a URL reaches to the last "@", because passwords may contain "/" or "@". The scheme may be
# missing; paths have no userinfo.
_USERINFO = re.compile(r"\A([A-Za-z][A-Za-z0-9+.-]*://|(?![/.]))(.*)@", re.DOTALL)
_SECRET_PARAMETER = re.compile(
    r"([?&;](?:[^=&;?]*(?:pass|secret|token|auth|cred)[^=&;?]*)=)[^&;#]*", re.IGNORECASE
)
_ANOTHER_URL = re.compile(r"(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]*://")
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")

# They command a terminal, end its line or turn its text around: all controls but tab and line feed.
_COMMANDS = dict.fromkeys(
    (
        *range(9),
        *range(11, 32),
        *range(127, 160),
        0x2028,
        0x2029,
        *range(0x202A, 0x202F),
        *range(0x2066, 0x206A),
    ),
    "\ufffd",
)


def printable(text: str) -> str:
    """``text`` with a replacement character for each that a terminal would obey."""
    return text.translate(_COMMANDS)


def make_printable(record: logging.LogRecord) -> bool:
    """A filter for loggers and handlers, as ``printable``; keeps every record."""
    record.msg, record.args = printable(record.getMessage()), None
    if record.exc_info:  # its text ends with the error's words; formatters take it from here
        record.exc_text = printable(logging.Formatter().formatException(record.exc_info))
    return True


def nearest(name: str, known: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """The known name most like ``name``; None below ``likeness`` (0 to 1)."""
    candidates = sorted(known)
    folded = {candidate.lower(): candidate for candidate in reversed(candidates)}
    matches = difflib.get_close_matches(name.lower(), sorted(folded), n=1, cutoff=likeness)
    return folded[matches[0]] if matches else None


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """A sentence for an unknown name: with the nearest known name, or with all."""
    candidates = sorted(known)
    match = nearest(name, candidates)
    if match is not None:
        return f'unknown {kind} "{name}"; did you mean "{match}"?'
    return f'unknown {kind} "{name}"; known are {", ".join(candidates)}'


def counted(count: int, noun: str) -> str:
    """``1 worker``, ``2 workers``: for regular nouns."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def parse_nbytes(text: str) -> int:
    """Bytes of a size such as ``10GiB``, ``500MB`` or ``1048576``.

    Units: KiB MiB GiB TiB (powers of 1,024), kB MB GB TB (powers of 1,000), B or none. Whole numbers only,
    without spaces.
    Errors: ``ConfigError`` that shows the spelling.
    """
    match = _SIZE.fullmatch(text) if text.isascii() else None
    if match is None or match[2] not in UNIT_NBYTES:
        raise ConfigError(
            f'"{text}" is not a size: write a whole number with a unit and no space, for example 10GiB or 500MB'
        )
    nbytes = int(match[1]) * UNIT_NBYTES[match[2]]
    if nbytes > MAX_NBYTES:
        raise ConfigError(f'"{text}" is too large: a size is at most {MAX_NBYTES} bytes')
    return nbytes


def format_nbytes(nbytes: int) -> str:
    """``nbytes`` in the largest exact binary unit; ``parse_nbytes`` inverts it."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes and nbytes % UNIT_NBYTES[unit] == 0:
            return f"{nbytes // UNIT_NBYTES[unit]}{unit}"
    return str(nbytes)


def format_size(nbytes: int) -> str:
    """``nbytes`` to read: in GiB or MiB, rounded."""
    return f"{nbytes / 2**30:,.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:,.1f} MiB"


def missing_extra(error: ModuleNotFoundError, extras: Sequence[str] = ("index", "tokenize")) -> Exception:
    """The error to raise instead: names the first of kvpool's ``extras`` with the package, else ``error``."""
    package = (error.name or "").partition(".")[0]
    if package == "torch":
        return ConfigError(
            "the package torch is not installed: pip install torch, in the build for this machine"
        )
    extra = next((extra for extra in extras if package in _EXTRAS[extra]), None)
    if extra is None:
        return error
    return ConfigError(f"the package {package} is not installed: {with_extra(extra)}")


def with_extra(extra: str) -> str:
    return f"install kvpool with its extra {extra}, in a checkout: pip install '.[{extra}]'"


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` or ``[IPv6]:PORT``; port 0 is valid. Errors: ``ConfigError``."""
    match = _ADDRESS.fullmatch(text) if isinstance(text, str) else None
    if match is None or int(match["port"]) > 65535:
        raise ConfigError(
            f"{text!r:.80} is not an address: write HOST:PORT with a port from 0 to 65535, such as 127.0.0.1:50051"
        )
    return match["host"], int(match["port"])


def joined_urls(value: object) -> object:
    """A list of URLs as one text with spaces between; anything else as it is."""
    if isinstance(value, (list, tuple)) and all(isinstance(one, str) and " " not in one for one in value):
        return " ".join(value)
    return value


def far_url(joined: str) -> str:
    """Of two URLs that ``joined_urls`` made one text, the far one; one URL as it is."""
    return joined.strip().rpartition(" ")[2]


def redact(url: str) -> str:
    """``url`` for logs: passwords and secret-looking parameters become ``***``."""
    if url.startswith("file:///"):
        far = _ANOTHER_URL.search(url, len("file:///"))
        return url if far is None else url[: far.start()] + redact(url[far.start() :])
    match = _USERINFO.match(url)
    if match is not None:
        user, colon, _ = match[2].partition(":")
        url = f"{match[1]}{user if colon else ''}{colon}***@{url[match.end() :]}"
    return _SECRET_PARAMETER.sub(r"\1***", url)
