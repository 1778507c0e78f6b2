"""A caller that measures: ``python -m tests.support.asker TARGET TENANT SECONDS``, with a token in its environment.

It asks for prompts that change, one after the other, with a pause, and prints a JSON object: how long the answers took,
in ms, and how many calls failed.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from kvpool import AsyncIndexClient, IndexUnavailable
from kvpool.config import index_token
from tests.support.wire import packed64

PAUSE_S = 0.02
PROMPTS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [9, 10], [4, 5]]


async def ask(target: str, tenant: str, seconds: float) -> dict[str, object]:
    failed: list[str] = []
    late: list[tuple[float, float]] = []  # how long a call took, and when it ended
    started_s = time.monotonic()
    async with AsyncIndexClient(target, timeout_s=60, token=index_token() or None) as client:
        while time.monotonic() < started_s + seconds:
            prompt = packed64(PROMPTS[len(late) % len(PROMPTS)])
            began_s = time.perf_counter()
            try:
                await client.lookup("m", tenant=tenant, hashes64=prompt)
            except IndexUnavailable as error:
                failed.append(str(error))
            late.append(((time.perf_counter() - began_s) * 1e3, round(time.monotonic() - started_s, 1)))
            await asyncio.sleep(PAUSE_S)
    took = sorted(ms for ms, _ in late)
    parts = {f"p{share}": took[min(len(took) - 1, int(len(took) * share / 100))] for share in (50, 99, 99.9)}
    found = {"calls": len(took), "failed": failed[:5], "failures": len(failed), "max": took[-1], **parts}
    return {**found, "worst": sorted(late, reverse=True)[:5]}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(ask(sys.argv[1], sys.argv[2], float(sys.argv[3])))))
