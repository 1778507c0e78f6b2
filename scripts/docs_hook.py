"""A MkDocs hook: repository files linked from a page join the site, under ``repository/``.

So one link works in the repository and in the site, and MkDocs checks all links. The page of decisions lists their
titles, as they are.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = "docs/"
OTHERS = "repository/"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add files outside of ``docs/`` named by the navigation and pages, and files linked from those."""
    pages = [DOCS + file.src_uri for file in files.documentation_pages()]
    named = [path.removeprefix(OTHERS) for path in _leaves(config.nav) if path.startswith(OTHERS)]
    while pages or named:
        if not named:
            page = pages.pop()
            named = [_path(page, target[1]) for target in LINK.finditer((ROOT / page).read_text())]
            continue
        path = named.pop()
        if path.startswith(DOCS) or not (ROOT / path).is_file() or files.get_file_from_path(OTHERS + path):
            continue
        files.append(File.generated(config, OTHERS + path, abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            pages.append(path)
    return files


def _leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for part in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _leaves(part)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    source = here.removeprefix(OTHERS) if here.startswith(OTHERS) else DOCS + here
    if here == "decisions/index.md":
        markdown += "\n" + _titles((ROOT / DOCS / "decisions").glob("0*.md"))
    return LINK.sub(_within_site(here, source), markdown)


def _titles(pages: Iterable[Path]) -> str:
    """A list of links: each page's number, and the rest of its title."""
    titles = [(page.name, page.read_text().partition("\n")[0][2:].partition(". ")) for page in sorted(pages)]
    return "\n".join(f"- [{number}]({name}) {rest}" for name, (number, _, rest) in titles) + "\n"


def _within_site(here: str, source: str) -> Callable[[re.Match[str]], str]:
    def link(found: re.Match[str]) -> str:
        path = _path(source, found[1])
        if not (ROOT / path).is_file():
            return found[0]  # MkDocs reports it
        site_path = path.removeprefix(DOCS) if path.startswith(DOCS) else OTHERS + path
        return posixpath.relpath(site_path, posixpath.dirname(here) or ".") + (found[2] or "")

    return link


def _path(page: str, link: str) -> str:
    """Path in the repository; a folder stands for its README or index."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    for name in ("README.md", "index.md"):
        if (ROOT / path / name).is_file():
            return posixpath.join(path, name)
    return path
