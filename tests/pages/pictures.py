"""The pictures of the status page in docs/assets/pictures, of a fleet with a load: ``make pictures``."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.pages.browser import NARROW, WIDE, opened, page_of
from tests.pages.live_fleet import LiveFleet, NearPool, live_fleet, seen

NAMES = [f"worker-{number}" for number in range(8)]
LOAD_S = 240.0
SHOTS: tuple[tuple[str, tuple[int, int], str], ...] = (
    ("status-light", WIDE, "light"),
    ("status-dark", WIDE, "dark"),
    ("status-narrow", NARROW, "light"),
    ("status-narrow-dark", NARROW, "dark"),
)


def shoot(browser: Any, fleet: LiveFleet, folder: Path) -> None:
    """Write all of them."""
    for name, size, scheme in SHOTS:
        with page_of(browser, size, scheme) as page:
            page.goto(fleet.url)
            page.locator("#workers-table tbody tr").first.wait_for()
            page.locator("#prompt").fill(" ".join(map(str, fleet.prompt())))
            page.get_by_role("button", name="Ask").click()
            page.locator("#prompt-table tbody tr").first.wait_for()
            page.locator("h1").click()
            path = folder / f"{name}.png"
            # Of the narrow ones what four screens show.
            clip = None if size == WIDE else {"x": 0, "y": 0, "width": size[0], "height": 4 * 640}
            page.screenshot(path=path, full_page=True, clip=clip)
            shrink(path)


def shrink(path: Path) -> None:
    """256 colours are enough for it, and a third of the bytes."""
    from PIL import Image

    with Image.open(path) as image:
        small = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


def main(folder: Path, load_s: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as own,
        live_fleet(
            Path(own),
            NAMES,
            blocks=500,
            memory="10mb",
            nears=[NearPool(f"{host:032x}", 1200) for host in range(2)],
        ) as fleet,
    ):
        assert seen(fleet, len(NAMES))
        with fleet.load(clients=10, conversations=400), opened() as browser:
            time.sleep(load_s * 2 / 3)
            fleet.workers["worker-6"].is_asleep = True
            fleet.workers["worker-6"].show()
            fleet.workers["worker-7"].go_away()
            time.sleep(load_s / 3)
            shoot(browser, fleet, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else LOAD_S)
