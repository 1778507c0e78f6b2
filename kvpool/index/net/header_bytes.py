"""``keep``: bytes of headers that are no UTF-8 pass through aiohttp as they came; ``has_control``: whether some cannot.

aiohttp reads such bytes as surrogates (PEP 383), and its writer drops these without a word. It has no seam for that:
one function of it is replaced, for the whole process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from aiohttp import http_writer
from multidict import CIMultiDict

# RFC 9110, 5.5. aiohttp reads some of these, and writes none.
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_theirs = http_writer._serialize_headers


def keep() -> None:
    """Idempotent."""
    http_writer._serialize_headers = _packed


def has_control(line: str, headers: Mapping[str, str]) -> bool:
    return _CONTROL.search(line + "".join(headers.values())) is not None


def _packed(status_line: str, headers: CIMultiDict[str]) -> bytes:
    """A head. Errors: ``ValueError`` for control characters."""
    if status_line.isascii() and all(map(str.isascii, headers.values())):
        return _theirs(status_line, headers)
    if has_control(status_line, headers):
        raise ValueError("a head holds no control characters")
    lines = [status_line, *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode("utf-8", "surrogateescape")
