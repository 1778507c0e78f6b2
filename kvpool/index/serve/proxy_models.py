"""``ModelLists``: what ``GET /v1/models`` answers before workers of several models. One event loop.

Adapters, lengths and who may ask are what workers know, so one worker of each model is asked, with the headers of the
request, and their lists become one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
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
KEEP_S = 1.0  # an answer, for callers who ask the same
MAX_KEPT = 16  # answers
# What does not tell whom workers answer; any other header of a request could be a key.
_NOT_OF_KEY = frozenset(
    (
        "accept", "accept-encoding", "accept-language", "cache-control", "connection", "content-type", "host", "pragma",
        "traceparent", "tracestate", "user-agent", "x-forwarded-for", "x-forwarded-proto", "x-request-id",
    )
)  # fmt: skip


class _List(msgspec.Struct):
    data: list[dict[str, Any]]


_LIST = msgspec.json.Decoder(_List)


_Key = tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]]


class ModelLists:
    """Asks workers, and remembers for ``KEEP_S`` what they have answered. ``_known``: by what was asked, answers and
    those that are under way."""

    def __init__(self) -> None:
        self._known: dict[_Key, asyncio.Task[Answer]] = {}

    async def get(
        self, request: web.BaseRequest, models: Sequence[str], forward: Callable[[], Forwarding]
    ) -> web.Response:
        """The answer to ``request``. Errors: ``Refusal``; none has answered."""
        sent = ((name.lower(), value) for name, value in request.headers.items())
        asked = sorted(one for one in sent if one[0] not in _NOT_OF_KEY)
        key = (request.query_string, tuple(models), tuple(asked))
        task = self._known.get(key)
        if task is None:
            task = self._known[key] = asyncio.create_task(_model_list(models, forward))
            task.add_done_callback(partial(self._keep, key))
        answer = await asyncio.shield(task)
        headers = {"content-type": answer.kind, "server": "kvpool"}
        return web.Response(body=answer.body, status=answer.status, headers=headers)

    async def close(self) -> None:
        """Forget what is under way."""
        tasks = [task for task in self._known.values() if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _keep(self, key: _Key, task: asyncio.Task[Answer]) -> None:
        if task.cancelled() or task.exception() is not None or len(self._known) > MAX_KEPT:
            del self._known[key]
        else:
            asyncio.get_running_loop().call_later(KEEP_S, self._known.pop, key)


async def _model_list(models: Sequence[str], forward: Callable[[], Forwarding]) -> Answer:
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
        return answers[0]
    listed: dict[str, dict[str, Any]] = {}
    for model in models:
        for one in _listed(model, told.get(model)):
            listed.setdefault(one["id"], one)
    body = msgspec.json.encode({"object": "list", "data": list(listed.values())})
    return Answer(200, "application/json", body)


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
