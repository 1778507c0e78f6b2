"""``get``: one page over HTTP, within a few seconds and a few megabytes, without the environment's proxy."""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.request
from typing import NamedTuple
from urllib.parse import urlsplit

from kvpool.errors import ConfigError

TIMEOUT_S = 3.0
MAX_NBYTES = 16 << 20


class Page(NamedTuple):
    """What was answered, whatever the status."""

    status: int
    headers: dict[str, str]  # by their names in lower case
    body: bytes


def check_url(url: str, option: str) -> str:
    """The URL without a slash at its end. Errors: ``ConfigError``."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{option} {url}: write http://HOST:PORT or https://HOST:PORT")
    return url.rstrip("/")


def get(url: str, tls_ca: str | None = None) -> Page | str:
    """The page, or why there is none, in a few words. ``tls_ca``: authority of an ``https`` server. Never raises."""
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    try:
        if url.startswith("https://"):
            context = ssl.create_default_context(cafile=tls_ca)
            handlers.append(urllib.request.HTTPSHandler(context=context))
        with urllib.request.build_opener(*handlers).open(url, timeout=TIMEOUT_S) as reply:
            return _page(reply.status, reply)
    except urllib.error.HTTPError as error:
        with error:
            return _page(error.code, error)
    except urllib.error.URLError as error:
        return _words(error.reason)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return _words(error)


def _page(status: int, reply: http.client.HTTPResponse | urllib.error.HTTPError) -> Page:
    headers = {name.lower(): value for name, value in reply.headers.items()}
    return Page(status, headers, reply.read(MAX_NBYTES))


def _words(error: object) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {TIMEOUT_S:g} s"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:200] or type(error).__name__
