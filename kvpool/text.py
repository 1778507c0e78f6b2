"""Parsing and wording of human text: sizes, misspelled names, URLs with a password, others' words on a terminal."""

from __future__ import annotations

import difflib
import ipaddress
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
# Of a URL: what is told of it. Anything else may be a secret that was mistyped, or put in a wrong place.
_SCHEME = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*:)?//|")
_PLACE = re.compile(r"(?:\[[0-9A-Fa-f:.]*\]|[A-Za-z0-9._*-]*)(?::[0-9]{0,5})?")
_FILES = frozenset(("ca", "cert", "key", "password_file", "sentinel_password_file"))
_TOLD = frozenset(
    ("capacity", "client", "connections", "db", "far", "sentinel_user", "threads", "tls", "ttl")
)
_PLAIN = re.compile(r"[A-Za-z0-9._-]{1,40}")
_SEGMENTS = re.compile(r"[A-Za-z0-9._/*-]*")
# Userinfo anywhere in a text, up to the last "@" of its word, unless it is redacted. A path lacks the second slash.
_PASSWORD = re.compile(r"(:/{1,3})(?!/|[^\s/@]*\*\*\*@[^\s@]*(?:\s|$))[^\s]*@")
_ANOTHER_URL = re.compile(r"(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]*://")
_NEXT_URL = re.compile(r"(\s+)(?=[A-Za-z][A-Za-z0-9+.-]*://)")
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
    """``text`` with a replacement character for each that a terminal would obey, and URLs' passwords as ``***``.

    Whoever quotes a URL redacts it; this is for those who quote what was no place for one.
    """
    return _PASSWORD.sub(r"\1***@", text.translate(_COMMANDS))


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


def listed(names: Iterable[str], most: int) -> str:
    """Names in order, each once, ``most`` of them: ``a, b and 2 more``."""
    distinct = sorted(set(names))
    more = f" and {len(distinct) - most:,} more" if len(distinct) > most else ""
    return ", ".join(distinct[:most]) + more


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


def parse_sized(text: str) -> int:
    """As ``parse_nbytes``; a small number without a unit is refused: who writes 50 means no 50 bytes."""
    nbytes = parse_nbytes(text)
    if 0 < nbytes < 1 << 20 and text.isdecimal():
        raise ConfigError(f'"{text}" has no unit: write {text}GiB or {text}MiB, or {text}B for bytes')
    return nbytes


def format_nbytes(nbytes: int) -> str:
    """``nbytes`` in the largest exact binary unit; ``parse_nbytes`` inverts it."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes and nbytes % UNIT_NBYTES[unit] == 0:
            return f"{nbytes // UNIT_NBYTES[unit]}{unit}"
    return str(nbytes)


def format_size(nbytes: float) -> str:
    """``nbytes`` to read, rounded: in GiB, MiB, KiB or bytes, the largest of which there is one."""
    unit = next((unit for unit in ("GiB", "MiB", "KiB") if nbytes >= UNIT_NBYTES[unit]), "")
    return f"{nbytes / UNIT_NBYTES[unit]:,.1f} {unit}" if unit else counted(int(nbytes), "byte")


def format_duration(seconds: float) -> str:
    """``42 s``, ``7 min``, ``3.5 h``, ``2.0 days``."""
    minutes, hours, days = seconds / 60, seconds / 3600, seconds / 86400
    if minutes < 1:
        return f"{seconds:.0f} s"
    if hours < 1:
        return f"{minutes:.0f} min"
    return f"{hours:.1f} h" if days < 2 else f"{days:.1f} days"


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
            f"{printable(repr(text)):.80} is not an address: write HOST:PORT with a port from 0 to 65535, "
            "such as 127.0.0.1:50051"
        )
    return match["host"], int(match["port"])


def is_ip_address(host: str) -> bool:
    """Whether it is an IPv4 or IPv6 address, without brackets, and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def joined_urls(value: object) -> object:
    """A list of URLs as one text with spaces between; anything else as it is."""
    if isinstance(value, (list, tuple)) and all(isinstance(one, str) and " " not in one for one in value):
        return " ".join(value)
    return value


def far_url(joined: str) -> str:
    """Of two URLs that ``joined_urls`` made one text, the far one; one URL as it is."""
    return joined.strip().rpartition(" ")[2]


def redact(url: str) -> str:
    """``url``, or several with spaces between, for logs and errors: what may be a secret becomes ``***``.

    That is all but the scheme, a user beside a password, hosts with ports, a path, and known parameters whose values
    look as they should.
    """
    return "".join(one if one.isspace() else _redacted(one) for one in _NEXT_URL.split(url))


def redact_value(name: str, value: str) -> str:
    """The value of a URL's parameter, or ``***``."""
    is_told = _PLAIN.fullmatch(value) if name in _TOLD else name in _FILES and value.startswith("/")
    return value if is_told else "***"


def _redacted(url: str) -> str:
    scheme = _SCHEME.match(url)
    told = scheme[0] if scheme is not None else ""
    rest = url[len(told) :]
    is_path = told.lower() == "file://" and rest.startswith("/")
    if is_path and (another := _ANOTHER_URL.search(rest)):  # joined by what joins no URLs
        return _redacted(told + rest[: another.start()]) + _redacted(rest[another.start() :])
    if told or not rest.startswith(("/", ".")):
        # A password may contain "/" or "@": it reaches to the last one.
        userinfo, at, rest = ("", "", rest) if is_path else rest.rpartition("@")
        user, colon, _ = userinfo.partition(":")
        told += f"{user if colon else ''}{colon}***@" if at else ""
        hosts, rest = _cut(rest, "/?&;#")
        told += ",".join(one if _PLACE.fullmatch(one) else "***" for one in hosts.split(","))
    path, rest = _cut(rest, "?&;#")
    has_files = not told or told.lower().startswith(("file:", "valkey+unix:"))
    told += path if has_files or _SEGMENTS.fullmatch(path) else "/***"
    while rest:
        mark, (part, rest) = rest[0], _cut(rest[1:], "?&;#")
        name, equals, value = part.partition("=")
        if equals and value:
            told += f"{mark}{name if _PLAIN.fullmatch(name) else '***'}={redact_value(name, value)}"
        else:
            told += mark + (part if not part or name in _TOLD | _FILES else "***")
    return told


def _cut(text: str, marks: str) -> tuple[str, str]:
    """``text`` before the first of ``marks``, and the rest with it."""
    at = min((place for mark in marks if (place := text.find(mark)) >= 0), default=len(text))
    return text[:at], text[at:]
