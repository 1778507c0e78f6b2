"""``Scraper``: reads metrics and health of a fleet's workers, each once a second, and the names that they serve,
in the index's event loop.

Each worker has a task, so a slow page delays no other. ``MAX_AT_A_TIME`` pages are under way at most,
``MAX_OF_TENANT`` per tenant. A thread parses pages, ``Resolver`` resolves names; the event loop owns all state.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import aiohttp
import anyio
from yarl import URL

from kvpool.index.cost.load import LoadBoard
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.start import Start
from kvpool.index.follow.metrics_page import BadPage, LoadCosts, read_page
from kvpool.index.follow.model_list import read_names
from kvpool.index.limits import Work
from kvpool.index.net.resolver import Resolver, addresses_of
from kvpool.index.net.worker_connection import KEEP_ALIVE_S, WorkerConnector, why_not
from kvpool.index.net.worker_url import parse_url
from kvpool.index.prompt import Load

INTERVAL_S = 1.0
# Between readings of names: with MAX_BACKOFF_S and DEADLINE_S below 25 s. A doubted worker is read sooner.
NAMES_S, DOUBTED_S = 10.0, 2.0
DEADLINE_S = 2.0  # for all of a page
MAX_BACKOFF_S = 10.0
MAX_AT_A_TIME = 32
MAX_OF_TENANT = 16
MAX_KEPT_OPEN = 512  # connections
MAX_PAGE_NBYTES = 2 << 20  # one of vLLM's has about 50 KiB an engine

logger = logging.getLogger("kvpool.index")


class Scraper:
    """Writes the load of each worker of ``fleet`` to ``loads``, its sleep and its names to ``fleet``.

    Workers without an HTTP URL are left out. ``tls``: for workers at https; None: the system's authorities.
    ``check``: ``Router.check``, told each answer to ``GET /health``; None: nobody asks. 5xx fails; no answer says
    nothing, as the index itself may be cut off.
    One event loop: ``start``, ``close``.
    """

    def __init__(
        self,
        fleet: Fleet,
        loads: LoadBoard,
        *,
        resolver: Resolver | None = None,
        interval_s: float = INTERVAL_S,
        tls: ssl.SSLContext | None = None,
        check: Callable[..., None] | None = None,
    ) -> None:
        self._fleet, self._check = fleet, check
        self._loads = loads
        self._interval_s = interval_s
        self._resolver = resolver or Resolver()
        self._parser = ThreadPoolExecutor(1, "kvpool-metrics-page")
        self._work = Work(MAX_AT_A_TIME, MAX_OF_TENANT)
        self._readers: dict[tuple[str, str, tuple[int, ...]], asyncio.Task[None]] = {}  # by _read's arguments
        self._task: asyncio.Task[None] | None = None
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    def start(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=WorkerConnector(keepalive_s=KEEP_ALIVE_S, tls=self._tls),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            trust_env=False,  # a proxy in the environment is not meant for workers next door
            headers={"accept": "text/plain", "accept-encoding": "identity"},
        )
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop reading; no more loads are reported."""
        tasks = [*self._readers.values(), *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        self._parser.shutdown()

    async def _run(self) -> None:
        while True:
            wanted = {
                (worker.id, worker.address, tuple(one.dp_rank for one in worker.publishers))
                for worker in self._fleet.followed()
                if worker.address.startswith(("http://", "https://"))
            }
            for key in self._readers.keys() - wanted:
                self._readers.pop(key).cancel()
            for key in wanted - self._readers.keys():
                self._readers[key] = asyncio.create_task(self._read(*key))
            await asyncio.sleep(self._interval_s)

    async def _read(self, worker_id: str, address: str, ranks: tuple[int, ...]) -> None:
        """A worker's page, again and again. A failure is logged once, and so is its end."""
        failures = 0
        part = random.random()  # of the first pause: spreads workers that came together
        costs = {rank: LoadCosts() for rank in ranks}
        tenant = worker_id.partition("/")[0]
        names_s = -NAMES_S  # when they were read
        while True:
            try:
                async with self._work.turn(tenant):
                    await self._take(worker_id, address, ranks, costs)
            except Exception as error:  # of many kinds: of addresses, names, sockets, TLS, HTTP and pages
                failures += 1
                if not isinstance(error, BadPage):
                    for rank in ranks:
                        self._loads.fail(worker_id, rank)
                    if failures == 1:
                        self._fleet.lapse(worker_id)
                if failures == 1:
                    late = isinstance(error, TimeoutError | asyncio.TimeoutError)
                    why = f"no answer within {DEADLINE_S:g} s" if late else why_not(error)
                    logger.info("worker %s: its metrics cannot be read: %s", worker_id, why)
            else:
                if failures:
                    logger.info("worker %s: its metrics are read again", worker_id)
                failures = 0
            if self._check is not None:
                start = self._fleet.start(worker_id)
                with suppress(Exception):  # of as many kinds
                    async with self._work.turn(tenant):
                        with anyio.fail_after(DEADLINE_S):
                            status, _ = await self._get(address, tenant, "/health")
                    self._check(start, failed=status >= 500)
            names_s = await self._read_names(worker_id, address, names_s)
            await asyncio.sleep(part * min(self._interval_s * 2 ** min(failures, 16), MAX_BACKOFF_S))
            part = 1.0

    async def _read_names(self, worker_id: str, address: str, last_s: float) -> float:
        """What a worker lists, if it is time; returns when that was. Names stay where it lists nothing readable."""
        now_s, tenant = time.monotonic(), worker_id.partition("/")[0]
        is_due = now_s - last_s >= NAMES_S
        if not is_due and not (now_s - last_s >= DOUBTED_S and self._fleet.names.take_doubt(worker_id)):
            return last_s
        start = self._fleet.start(worker_id)  # the list of a later one is not this one's
        try:
            async with self._work.turn(tenant):
                with anyio.fail_after(DEADLINE_S):
                    status, page = await self._get(address, tenant, "/v1/models")
                if status != 200:
                    raise BadPage(f"{address.rstrip('/')}/v1/models answers with HTTP status {status}")
                await asyncio.get_running_loop().run_in_executor(self._parser, self._learn, start, page)
        except Exception as error:  # of as many kinds
            if last_s < 0 and isinstance(error, BadPage):
                logger.info("worker %s: only its announced names are known: %s", worker_id, why_not(error))
        return now_s

    def _learn(self, start: Start, page: bytes) -> None:
        self._fleet.read_names(start, read_names(page))

    async def _take(
        self, worker_id: str, address: str, ranks: tuple[int, ...], costs: Mapping[int, LoadCosts]
    ) -> None:
        # Before the page is requested: a batch meanwhile may be of an engine that woke.
        followed = [self._fleet.rank(worker_id, rank) for rank in ranks]
        since = [0 if one is None else one.batches for one in followed]
        keys = [one and one.key for one in followed]
        # Before Python 3.12, asyncio.wait_for forgets a cancellation that meets the page.
        with anyio.fail_after(DEADLINE_S):
            status, page = await self._get(address, worker_id.partition("/")[0], "/metrics")
        if status != 200:
            raise BadPage(f"{address.rstrip('/')}/metrics answers with HTTP status {status}")
        engines = await asyncio.get_running_loop().run_in_executor(self._parser, read_page, page)
        if len(engines) == len(ranks) == 1:  # behind its own balancer, each rank is a server
            engines = {ranks[0]: next(iter(engines.values()))}
        if keys != [one and one.key for one in (self._fleet.rank(worker_id, rank) for rank in ranks)]:
            return  # the page may be of the former start
        name = worker_id.partition("/")[2]
        for rank, one, batches in zip(ranks, followed, since, strict=True):
            engine = engines.get(rank)
            if engine is None:
                raise BadPage(f"it has no line of engine {rank}")
            load = Load(name, rank, engine.running, engine.waiting, None, engine.kv_usage)
            self._loads.scrape(worker_id, load, asleep=engine.asleep)
            if engine.capacity_tokens is not None:
                self._loads.size(worker_id, rank, engine.capacity_tokens)
            if engine.gate is not None:
                costs[rank].update(engine.gate, time.monotonic())
                cost = costs[rank]
                self._loads.measure(worker_id, rank, cost.pool, cost.near, cost.speed)
            if engine.asleep and one is not None:  # it waits for a batch of the rank that is being applied
                await asyncio.get_running_loop().run_in_executor(self._parser, one.empty, batches)

    async def _get(self, address: str, tenant: str, path: str) -> tuple[int, bytes]:
        """Status and, of a good one, body."""
        assert self._session is not None
        named, at = URL(address.rstrip("/") + path), parse_url(address)
        # aiohttp would resolve in the event loop's few threads, which hanging names could fill.
        addresses = await addresses_of(self._resolver.resolve(at.host, tenant, at.port))
        headers = {"host": at.authority}
        if len(self._readers) > MAX_KEPT_OPEN:
            headers["connection"] = "close"
        async with self._session.get(
            named.with_host(addresses[0]), headers=headers, allow_redirects=False, server_hostname=at.host
        ) as reply:
            if reply.status != 200:
                return reply.status, b""
            page = bytearray()
            async for part in reply.content.iter_any():
                page += part
                if len(page) > MAX_PAGE_NBYTES:
                    raise BadPage(f"{named} has more than {MAX_PAGE_NBYTES} bytes")
        return reply.status, bytes(page)
