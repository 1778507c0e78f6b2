"""Recipes of ``docs/``: their code blocks, and the programs that are started as they say."""

from __future__ import annotations

import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from demo.engine_process import child_environment

DOCS = Path(__file__).parents[2] / "docs"
START_S = 60.0


def recipe(page: str, heading: str, language: str, number: int = 0) -> str:
    """The code block of that language, counted from 0, in the part of a page below a heading."""
    part = (DOCS / page).read_text().partition(f"\n{heading}\n")[2]
    assert part, f"docs/{page} has no {heading}"
    level = heading.partition(" ")[0]
    part = re.split(rf"^#{{1,{len(level)}}} ", part, maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(rf"^```{language}\n(.*?)^```", part, re.DOTALL | re.MULTILINE)[number]  # type: ignore[no-any-return]


def put_in(text: str, places: Mapping[str, str]) -> str:
    """``text`` with other addresses, each of which is there. The new ones are not looked at again."""
    for old in places:
        assert old in text, old
    return re.sub("|".join(re.escape(old) for old in places), lambda found: places[found[0]], text)


@contextmanager
def started(command: Sequence[str], log: Path, ready: str) -> Iterator[subprocess.Popen[bytes]]:
    """The program until the end of the block, from when it answers at the URL ``ready``."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=child_environment(),
        )
    try:
        ends_s = time.monotonic() + START_S
        while not _answers(ready):
            assert process.poll() is None, log.read_text(errors="replace")[-4000:]
            assert time.monotonic() < ends_s, log.read_text(errors="replace")[-4000:]
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(15)


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError:
        return False
    return True
