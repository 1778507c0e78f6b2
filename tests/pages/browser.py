"""A headless Chromium, driven by Playwright, that ``make test-pages`` installs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

WIDE, NARROW = (1280, 900), (360, 780)
WAIT_MS = 60_000  # for what a page shows, at most: a browser beside other work is slow
# Of the machine's own: without a sandbox, for tests run as root in containers, and the page is our own.
OPTIONS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--force-color-profile=srgb"]


def executable() -> str:
    """The browser. Errors: ``AssertionError`` that says what to run."""
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    assert found, "there is no chromium: run make test-pages, or name one with CHROMIUM=/path/to/it"
    return found


def expect(locator: Any) -> Any:
    """Playwright's assertions of a locator, which wait: the page follows the index, and the index its fleet."""
    from playwright.sync_api import expect as expect_

    expect_.set_options(timeout=WAIT_MS)
    return expect_(locator)


def violations(page: Any) -> list[dict[str, Any]]:
    """What axe finds on a page, and not what it finds in order: that takes as long again."""
    from axe_playwright_python.sync_playwright import Axe

    return Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]


@contextmanager
def opened() -> Iterator[Any]:
    """A browser of Playwright, until the end of the block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), args=OPTIONS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def page_of(
    browser: Any, size: tuple[int, int] = WIDE, scheme: str = "light", scale: float = 1, **options: Any
) -> Iterator[Any]:
    """A page of a fresh browser profile. What its console says is in ``page.said``."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme=scheme,
        device_scale_factor=scale,
        **options,
    )
    try:
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.said = []
        page.on("console", lambda message: page.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: page.said.append(f"error: {error}"))
        yield page
    finally:
        context.close()
