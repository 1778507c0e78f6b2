"""The files of the status page: HTML, CSS and JavaScript as they lie in ``page/``, for every caller.

They hold nothing of the index: what the page shows it asks for by itself, with the token that is typed into it. The
headers forbid it everything that is not one of these files: names of workers come from tenants, who may be hostile.
"""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

PATH = "/status"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
FILES = (
    "status.css",
    "icon.svg",
    "main.js",
    "dom.js",
    "format.js",
    "overview.js",
    "chart.js",
    "workers.js",
    "prompt.js",
)
HEADERS = {
    # Trusted types: a script that makes HTML of text fails in the browsers that know them.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def routes() -> list[Route]:
    """Of all files, and from ``/`` to the page. Reads them once. Blocking, for ten small files."""

    async def to_page(_: Request) -> Response:
        return RedirectResponse(PATH.lstrip("/"), headers=HEADERS)

    served = {PATH: _read("index.html")} | {f"{PATH}/{name}": _read(name) for name in FILES}
    return [Route("/", to_page), *(_route(path, *content) for path, content in served.items())]


def _route(path: str, content: bytes, media_type: str) -> Route:
    async def answer(_: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=media_type)

    return Route(path, answer)


def _read(name: str) -> tuple[bytes, str]:
    content = (files("kvpool.index.serve") / "page" / name).read_bytes()
    return content, _TYPES[name.rpartition(".")[2]]
