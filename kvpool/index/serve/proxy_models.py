"""``model_list``: what ``GET /v1/models`` answers before workers of several models. One event loop.

Adapters, lengths and who may ask are what workers know, so one worker of each model is asked, with the headers of the
request, and their lists become one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from aiohttp import web

from kvpool.errors import ConfigError
from kvpool.index import bounded_json
from kvpool.index.serve.placements import Refusal
from kvpool.index.serve.proxy_forwarding import Answer, Forwarding

LIST_S = 2.0  # for all workers
MAX_ASKED = 64  # models
MAX_LIST_NBYTES = 256 << 10  # of a worker: one of 500 adapters
AT_ONCE = 16


class _List(msgspec.Struct):
    data: list[dict[str, Any]]


_LIST = msgspec.json.Decoder(_List)


async def model_list(models: Sequence[str], forward: Callable[[], Forwarding]) -> web.Response:
    """What the workers of ``models`` list, each model once, in the form of OpenAI's API.

    A model whose workers do not answer in time is listed by its name. Where a worker refuses the request, as for want
    of a key, its models are left out; where all do, that is the answer. Errors: ``Refusal``; none has answered.
    """
    turn = asyncio.Semaphore(AT_ONCE)

    async def ask(model: str) -> Answer | Refusal:
        async with turn:
            try:
                return await forward().fetch(msgspec.json.encode({"model": model}), MAX_LIST_NBYTES)
            except Refusal as refusal:
                return refusal

    asked = {model: asyncio.ensure_future(ask(model)) for model in models[:MAX_ASKED]}
    try:
        await asyncio.wait(asked.values(), timeout=LIST_S)
    finally:
        for task in asked.values():
            task.cancel()
        await asyncio.gather(*asked.values(), return_exceptions=True)
    late = Refusal(503, f"no worker has listed its models within {LIST_S:g} s")
    told = {model: late if task.cancelled() else task.result() for model, task in asked.items()}
    answers = [one for one in told.values() if isinstance(one, Answer)]
    if not answers:
        raise next(one for one in told.values() if isinstance(one, Refusal))
    if all(400 <= one.status < 500 for one in answers):
        headers = {"content-type": answers[0].kind, "server": "kvpool"}
        return web.Response(body=answers[0].body, status=answers[0].status, headers=headers)
    listed: dict[str, dict[str, Any]] = {}
    for model in models:
        for one in _listed(model, told.get(model)):
            listed.setdefault(one["id"], one)
    body = msgspec.json.encode({"object": "list", "data": list(listed.values())})
    return web.Response(body=body, headers={"content-type": "application/json", "server": "kvpool"})


def _listed(model: str, answer: Answer | Refusal | None) -> list[dict[str, Any]]:
    if isinstance(answer, Answer) and 400 <= answer.status < 500:
        return []
    if isinstance(answer, Answer) and answer.status == 200:
        try:
            bounded_json.check(answer.body)
            return [one for one in _LIST.decode(answer.body).data if isinstance(one.get("id"), str)]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ConfigError):
            pass
    return [{"id": model, "object": "model", "created": 0, "owned_by": "kvpool"}]
