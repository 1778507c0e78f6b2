"""Pages of other sites, by the headers of a browser's request: it asks here for any page that it shows.

A page of another site sends what needs no preflight (``is_simple``); a page whose own name is made to lead here (DNS
rebinding) is of this site to its browser, and only ``Host`` tells. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvpool.index.net.listener import JSON
from kvpool.text import is_ip_address

# Of names without an authority on the internet: no site has one.
_PRIVATE = (".localhost", ".local", ".internal", ".svc")


def foreign_name(headers: Mapping[str, str], names: Collection[str]) -> str:
    """The name of ``Host``, for an error, where another's page may have it; empty: an address, a private name, or one
    of ``names``, in lower case.
    """
    host = headers.get("host", "")
    name = host[1:].partition("]")[0] if host[:1] == "[" else host.partition(":")[0]
    name = name.lower().rstrip(".")
    if "." not in name or name.endswith(_PRIVATE) or name in names:
        return ""
    return "" if is_ip_address(name) else f"{ascii(name)[1:-1]:.80}"


def is_of_another_site(headers: Mapping[str, str]) -> bool:
    """Whether a browser sends it for a page of another site."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is None and origin is not None and origin.partition("://")[2] != headers.get("host"):
        return True  # of a browser without the header
    return site not in (None, "same-origin")


def is_json(headers: Mapping[str, str]) -> bool:
    return headers.get("content-type", "").partition(";")[0].strip().lower() == JSON


def is_simple(headers: Mapping[str, str]) -> bool:
    """Whether a browser sends it without a preflight, which asks the server first."""
    return not is_json(headers) and "authorization" not in headers
