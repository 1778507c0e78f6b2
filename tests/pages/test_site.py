"""The documentation's site, as ``make docs`` builds it, in a headless Chromium, wide and narrow, light and dark."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.pages.browser import NARROW, WIDE, opened, page_of, violations

pytestmark = pytest.mark.pages

SITE = Path(__file__).parents[2] / ".cache" / "site"
# The decisions are short pages of one form: one of them stands for all.
PAGES = [
    *sorted(page for page in SITE.rglob("*.html") if page.parent.parent.name != "decisions"),
    *sorted(SITE.glob("decisions/*/index.html"))[:1],
]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """Its address."""
    assert (SITE / "index.html").is_file(), "the site is not built: run make docs"
    serve = functools.partial(_Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


# Half of the pages each: what they are made of stands on many.
@pytest.mark.parametrize(("size", "scheme"), [(WIDE, "light"), (NARROW, "dark")], ids=["wide", "narrow"])
def test_no_page_has_a_serious_violation_or_asks_another_host(
    site: str, size: tuple[int, int], scheme: str
) -> None:
    mine = PAGES[size == NARROW :: 2]
    assert len(mine) > 10
    found: list[str] = []
    asked: set[str] = set()
    with opened() as browser, page_of(browser, size, scheme) as page:
        page.on("request", lambda request: asked.add(urlsplit(request.url).netloc))
        for path in mine:
            name = str(path.relative_to(SITE))
            page.goto(f"{site}/{name}", wait_until="load")
            found += [
                f"{name}: {one['impact']}: {one['id']}: {one['nodes'][0]['html'][:200]}"
                for one in violations(page)
                if one["impact"] in ("serious", "critical")
            ]
            if page.evaluate("document.documentElement.scrollWidth > window.innerWidth"):
                found.append(f"{name}: has to be scrolled sideways")
            if page.evaluate("[...document.images].some(one => one.complete && !one.naturalWidth)"):
                found.append(f"{name}: shows a picture that is not there")
        said = [line for line in page.said if line.startswith("error")]
    assert (found, said, asked - {"", urlsplit(site).netloc}) == ([], [], set())
