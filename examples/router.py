"""A router of twenty lines: each completion goes to the worker where its prompt costs least.

    pip install '.[index]'  # in a checkout
    python router.py 127.0.0.1:8080 127.0.0.1:50051 http://WORKER:8000
    curl http://127.0.0.1:8080/v1/completions --json '{"model": "MODEL", "prompt": [1, 2, 3]}'

The last word is where requests go without an answer of the index. A text in place of tokens needs an index with
--tokenizer. To see how it is done; kvpool router is the one to use: with chats, retries, limits and metrics.
"""

from __future__ import annotations

import sys

import aiohttp
from aiohttp import web

import kvpool


async def completions(request: web.Request) -> web.StreamResponse:
    asked = await request.json()
    prompt = asked["prompt"]
    named = {"text": prompt} if isinstance(prompt, str) else {"token_ids": prompt}
    try:  # reserve_s: until its load shows, others that ask see this request at the worker that was picked
        route = await request.app["index"].route(
            asked["model"], limit=1, reserve_s=2.0, timeout_s=0.5, **named
        )
        worker = route.picks[0].row.address
    except (kvpool.KVPoolError, IndexError):
        worker = request.app["fallback"]
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{worker}/v1/completions", json=asked) as answer,
    ):
        response = web.StreamResponse(status=answer.status, headers={"x-worker": worker})
        response.content_type = answer.content_type
        await response.prepare(request)
        async for part in answer.content.iter_any():  # a stream passes as it comes
            await response.write(part)
    return response


async def health(_: web.Request) -> web.Response:
    return web.Response()


async def app(target: str, fallback: str) -> web.Application:
    made = web.Application()
    made["fallback"], made["index"] = fallback, kvpool.AsyncIndexClient(target)
    made.router.add_post("/v1/completions", completions)
    made.router.add_get("/health", health)
    return made


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    host, _, port = sys.argv[1].rpartition(":")
    web.run_app(app(sys.argv[2], sys.argv[3]), host=host, port=int(port))
