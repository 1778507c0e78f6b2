"""Workers whose ``/v1/models`` is read while a test runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvpool.index.cost.load import LoadBoard
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.follow.scraper import Scraper


@contextmanager
def reading(fleet: Fleet) -> Iterator[None]:
    """A scraper of the fleet, in an event loop of its own, until the end of the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def begin() -> Scraper:
        scraper = Scraper(fleet, LoadBoard(), interval_s=0.05)
        scraper.start()
        return scraper

    try:
        scraper = asyncio.run_coroutine_threadsafe(begin(), loop).result(60)
        try:
            yield
        finally:
            asyncio.run_coroutine_threadsafe(scraper.close(), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
