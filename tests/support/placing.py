"""A placer on a fleet of two, and what a router makes of a fleet."""

from __future__ import annotations

import json
import threading
from array import array
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from kvpool.index.answer import Ranking
from kvpool.index.cost.router import Costs, Router
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.front.endpoints import Endpoints
from kvpool.index.front.placer import INLINE_NBYTES, Placer
from kvpool.index.front.renderer import Renderer
from kvpool.index.front.settings import PlacingSettings
from kvpool.index.front.token_checks import TokenChecks
from kvpool.index.front.token_makers import TokenMakers
from kvpool.index.net.resolver import Resolver
from kvpool.index.request_stats import RequestStats
from kvpool.index.tokens.tokenizers import Tokenizers
from kvpool.key.hashing import BlockHasher
from tests.support.fleets import a_worker, say
from tests.support.wire import batch, stored

LONG = "word " * INLINE_NBYTES


class ByteTokenizer:
    """A token is a byte. ``goes_on``: until when texts are not made."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.threads: set[str] = set()

    def of_text(self, text: str, work: object = None) -> array[int]:
        self.threads.add(threading.current_thread().name)
        assert self.goes_on.wait(60)
        return array("I", list(text.encode()))


class Placing:
    def __init__(self, placer: Placer, router: Router, tokenizer: ByteTokenizer) -> None:
        self.placer, self.router, self.tokenizer = placer, router, tokenizer

    async def place(self, text: str, headers: Mapping[str, str] | None = None, **fields: Any) -> Any:
        body = json.dumps({"model": "m", "prompt": text, **fields}).encode()
        return await self.placer.place("/v1/completions", headers or {}, body, "default")

    @property
    def reservations(self) -> int:
        return len(self.router._reservations)


@asynccontextmanager
async def placer_of(
    fleet: Fleet,
    tokenizers: Tokenizers | None = None,
    *,
    timeout_s: float = 60.0,
    tls: Any = None,
    checks: TokenChecks | None = None,
) -> AsyncIterator[tuple[Placer, Router]]:
    """``tls``: of the workers that make tokens."""
    router, renderer, tokenizers = Router(fleet), Renderer(tls=tls), tokenizers or Tokenizers()
    stats, endpoints = RequestStats(), Endpoints(fleet, Resolver())
    makers = TokenMakers(tokenizers, renderer, checks or TokenChecks(tokenizers, stats))
    settings = PlacingSettings(timeout_s=timeout_s)
    placer = Placer(fleet, router, makers, endpoints, settings, stats=stats)
    try:
        yield placer, router
    finally:
        await renderer.close()
        placer.close()
        tokenizers.close()


@asynccontextmanager
async def placing(timeout_s: float = 20.0, models: str = "mm") -> AsyncIterator[Placing]:
    """Worker b holds LONG. ``models``: of the workers a and b."""
    fleet = Fleet()
    for place, (name, model) in enumerate(zip("ab", models, strict=True)):
        address = f"http://127.0.0.1:{7000 + place}"
        fleet.add(a_worker(name, port=5000 + 2 * place, address=address, model=model), "flag")
    say(fleet, "default/b", 0, 0, batch(stored(BlockHasher(16).hashes(list(LONG.encode())))))
    tokenizer = ByteTokenizer()
    tokenizers = Tokenizers(dict.fromkeys(models, tokenizer))  # type: ignore[arg-type]
    async with placer_of(fleet, tokenizers, timeout_s=timeout_s) as (placer, router):
        try:
            yield Placing(placer, router, tokenizer)
        finally:
            tokenizer.goes_on.set()


COSTS = Costs(local=0.25, pool=0.5, waiting=1000, running=100, usage=200, speed=100)
NAMESPACE = "0123456789abcdef" * 2


def order(route: Ranking) -> list[str]:
    return [pick.worker for pick in route.picks]


TEN = list(range(1, 11))
