"""Workers for the tests of the fleet, the service and its clients."""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpool.index import Publisher, Worker
from kvpool.index.cost.router import Router
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.front.endpoints import Endpoints
from kvpool.index.front.ext_proc import ExtProcServer
from kvpool.index.front.placer import Placer
from kvpool.index.front.proxy import Proxy
from kvpool.index.front.renderer import Renderer
from kvpool.index.front.settings import PlacingSettings, ProxySettings
from kvpool.index.front.token_checks import TokenChecks
from kvpool.index.front.token_makers import TokenMakers
from kvpool.index.limits import INFERENCE
from kvpool.index.net.connections import Connections
from kvpool.index.net.resolver import Resolver
from kvpool.index.request_stats import ProxyStats, RequestStats
from kvpool.index.serve.auth import TokenAuth
from kvpool.index.serve.calls import Calls
from kvpool.index.serve.health import Health
from kvpool.index.serve.http import HttpServer
from kvpool.index.serve.service import IndexServer
from kvpool.index.serve.status import Status
from kvpool.index.tokens.tokenizers import Tokenizers
from kvpool.key.hashing import seed_id
from tests.support.credentials import write_tokens
from tests.support.wire import batch


class Clock:
    """Seconds that stand still until a test moves them."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def a_worker(name: str = "w", *, ranks: int = 1, port: int = 5557, **fields: Any) -> Worker:
    if "tenant" in fields:  # an endpoint is followed for one tenant only
        port += 1000 + zlib.crc32(fields["tenant"].encode()) % 20_000
    publishers = tuple(
        Publisher(rank, f"tcp://127.0.0.1:{port + rank}", f"tcp://127.0.0.1:{port + 100 + rank}")
        for rank in range(ranks)
    )
    known: dict[str, Any] = {
        "model": "m", "block_tokens": 16, "hash_seed_id": seed_id(None), "publishers": publishers,
        "address": f"http://{name}:8000",
    }  # fmt: skip
    return Worker(name=name, **{**known, **fields})


@contextmanager
def applying(fleet: Fleet, worker_id: str) -> Iterator[None]:
    """For as long as a batch of the worker is being applied."""
    rank = fleet._ranks[worker_id, 0]
    with rank.lock:
        rank.version += 1
        yield
        rank.version += 1


def say(fleet: Fleet, worker_id: str, dp_rank: int, sequence: int, payload: bytes) -> None:
    """A batch of a rank that is followed well; of a stranger: nothing."""
    if (rank := fleet.rank(worker_id, dp_rank)) is not None:
        rank.apply(sequence, payload)
        rank.heard()


def joined(fleet: Fleet, worker: Worker, *events: dict[str, Any], sequence: int = 0) -> None:
    """A worker whose first rank has told these events in one batch; of none: it is heard."""
    fleet.add(worker, "flag")
    if events:
        say(fleet, worker.id, worker.publishers[0].dp_rank, sequence, batch(*events))
    else:
        fleet.rank(worker.id, worker.publishers[0].dp_rank).heard()


class Served:
    """An index that listens in a thread of its own."""

    def __init__(
        self,
        fleet: Fleet,
        feed: Any = None,
        *,
        stats: RequestStats | None = None,
        http: bool = False,
        place: dict[str, Any] | None = None,
        proxy: dict[str, Any] | None = None,
        target: str = "",
        every_s: float = 5.0,
        **options: Any,
    ) -> None:
        self.fleet = fleet
        self._every_s = every_s
        self.ext_proc = ""  # where it speaks ext_proc; empty: nowhere
        self.proxy = ""  # where it sends requests on; empty: nowhere
        self.proxy_stats = ProxyStats()
        self.held_nbytes = lambda: 0  # of bodies of requests
        self._place = place  # fields of PlacingSettings; tokenizers, resolver
        self._proxy_options = proxy  # fields of ProxySettings; worker_tls
        if feed is not None:
            fleet.feed = feed
        self.target = target
        self.http = ""  # where it speaks HTTP; empty: nowhere
        self._stats = stats or RequestStats()
        self._with_http = http
        # Of IndexServer; of its calls, its health and its connections.
        auth, tracing = options.pop("auth", None), options.pop("tracing", None)
        self._calls = Calls(auth or TokenAuth(), self._stats, fleet.limits, tracing)
        self._health = {name: options.pop(name) for name in ("is_warm", "warm_up_s") if name in options}
        names = {"tls": "tls", "max_connection_age_s": "age_s", "max_connection_grace_s": "grace_s"}
        given = {names[name]: options.pop(name) for name in names if name in options}
        self._connections = Connections(**given)
        self._options = options
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._server: IndexServer | None = None  # while it runs: gRPC's threads end with it
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(60)
        if self._failure is not None:
            self._thread.join(60)
            raise self._failure

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    def drain(self) -> None:
        """As its first SIGTERM does."""
        assert self._server is not None
        asyncio.run_coroutine_threadsafe(self._server.drain(0.0, self._done), self._loop).result(60)

    async def _serve(self) -> None:
        self._loop, self._done = asyncio.get_running_loop(), asyncio.Event()
        self._options.setdefault("router", Router(self.fleet))
        self._options.setdefault("tokenizers", Tokenizers())
        self._server = server = IndexServer(
            self.fleet,
            self._calls,
            health=Health(**self._health),
            connections=self._connections,
            **self._options,
        )
        status = Status(
            self.fleet, self._options["router"], self._options["tokenizers"], self._stats,
            self._options.get("pool"), server.health.is_serving, every_s=self._every_s,
        )  # fmt: skip
        http = HttpServer(server, connections=self._connections, status=status)
        parts = AsyncExitStack()
        try:
            self.target = f"127.0.0.1:{await server.start(self.target or '127.0.0.1:0')}"
            if self._place is not None:
                await self._start_placing(server, parts)
            if self._with_http:
                status.start()
                self.http = f"127.0.0.1:{await http.start('127.0.0.1:0')}"
            self._ready.set()
            await server.wait(self._done)
        except BaseException as error:
            self._failure = error
            self._ready.set()
        finally:
            await parts.aclose()
            await http.stop()
            await status.close()
            await server.stop()
            self._server = None

    async def _start_placing(self, server: IndexServer, parts: AsyncExitStack) -> None:
        options = dict(self._place or {})
        tokenizers = Tokenizers(options.pop("tokenizers", None))
        parts.callback(tokenizers.close)
        renderer = Renderer(limits=self.fleet.limits)
        parts.push_async_callback(renderer.close)
        router = self._options.get("router") or Router(self.fleet)
        endpoints = Endpoints(self.fleet, options.pop("resolver", None) or Resolver())
        makers = TokenMakers(tokenizers, renderer, TokenChecks(tokenizers, self._stats))
        placer = Placer(
            self.fleet, router, makers, endpoints, PlacingSettings(**options),
            stats=self._stats, serves=lambda: server.health.serves,
        )  # fmt: skip
        parts.callback(placer.close)
        self.held_nbytes = lambda: self.fleet.limits._used_by[INFERENCE]
        if self._proxy_options is not None:
            chosen = dict(self._proxy_options)
            tls = {"tls": self._connections.tls, "worker_tls": chosen.pop("worker_tls", None)}
            proxy = Proxy(
                placer, self.fleet.limits, server.health, self.proxy_stats, ProxySettings(**chosen), **tls
            )
            parts.push_async_callback(proxy.stop)
            self.proxy = f"127.0.0.1:{await proxy.start('127.0.0.1:0')}"
            return
        picker = ExtProcServer(placer, server.calls, server.health, self._connections)
        parts.push_async_callback(picker.stop)
        self.ext_proc = f"127.0.0.1:{await picker.start('127.0.0.1:0')}"


@contextmanager
def serving(fleet: Fleet | None = None, **options: Any) -> Iterator[Served]:
    """An index, on a free port unless one is given, until the end of the block; ``options``: of ``Served``.

    ``place``: fields of ``PlacingSettings``, for an endpoint picker beside it; None: there is none. ``proxy``: those of
    ``ProxySettings``: a proxy is then there in the place of the picker.
    """
    served = Served(fleet or Fleet(), **options)
    try:
        served.start()
        yield served
    finally:
        served.stop()


@contextmanager
def two_tenants(folder: Path, **options: Any) -> Iterator[tuple[Served, dict[str, str]]]:
    """An index that asks for tokens, with a worker of a and one of b; the tokens: of a, of b, and c for all tenants."""
    path, fleet = folder / "tokens.toml", Fleet()
    tokens = write_tokens(path, **{name: (["read", "publish"], [name]) for name in "ab"}, c=(["read"], ["*"]))
    for tenant in "ab":
        fleet.add(a_worker(tenant=tenant), "flag")
    with serving(fleet, auth=TokenAuth(str(path)), **options) as served:
        yield served, tokens


def a_fleet(*names: str, clock: Clock | None = None, **fields: Any) -> Fleet:
    """Workers that hold nothing, and are heard."""
    fleet = Fleet(clock=clock or Clock())
    for place, name in enumerate(names):
        fleet.add(a_worker(name, port=5000 + 2 * place, **fields), "flag")
        fleet.rank(f"default/{name}", 0).heard()
    return fleet


def hold_questions(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> tuple[threading.Semaphore, threading.Event]:
    """From now on questions wait until the event is set; the semaphore counts those that have come."""
    entered, go_on = threading.Semaphore(0), threading.Event()
    ask = fleet.ask

    def slow(*arguments: Any, **options: Any) -> Any:
        entered.release()
        assert go_on.wait(120)
        return ask(*arguments, **options)

    monkeypatch.setattr(fleet, "ask", slow)
    return entered, go_on
