"""``kvpool index``: the index as a process of its own."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

from kvpool.config import hash_seed, redact
from kvpool.errors import ConfigError
from kvpool.index.admission import check_worker
from kvpool.index.exporter import Exporter
from kvpool.index.feed import EventFeed
from kvpool.index.fleet import Fleet
from kvpool.index.registry import WorkerWatch
from kvpool.index.roster import Roster
from kvpool.index.service import IndexServer
from kvpool.index.worker import DEFAULT_ALGORITHM, DEFAULT_TENANT, Publisher, Worker
from kvpool.stores import Store, visit_store
from kvpool.stores.url import StoreURL
from kvpool.wording import unknown

_FIELDS = ("model", "block", "replay", "tenant", "hash", "address", "ranks")
_NUMBER = re.compile(r"[0-9]{1,9}")


def run_index(
    *, listen: str, pool: str | None, workers: Sequence[str], max_blocks: int, metrics: str | None
) -> None:
    """Serve until SIGTERM or SIGINT. Errors: ``ConfigError``, before anything is served."""
    fleet = Fleet(max_blocks=max_blocks, seed=hash_seed())
    named = [parse_worker(text, fleet.seed_id) for text in workers]
    if len({worker.id for worker in named}) != len(named):
        raise ConfigError("--worker: two workers of one tenant have the same name")
    _log_lines()
    asyncio.run(_serve(fleet, listen, pool, named, metrics))


async def _serve(
    fleet: Fleet, listen: str, pool: str | None, workers: Sequence[Worker], metrics: str | None
) -> None:
    """Everything that makes an index is put together here, and taken apart in the reverse order."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    async with AsyncExitStack() as parts:
        store = None if pool is None else parts.enter_context(_open_pool(pool))
        roster = Roster(fleet, EventFeed(fleet))
        parts.callback(roster.close)
        exporter = Exporter(fleet)
        parts.callback(exporter.close)
        server = IndexServer(roster, observer=exporter)
        parts.push_async_callback(server.stop)
        port = await server.start(listen)
        shown = f", metrics on port {exporter.serve(metrics)}" if metrics is not None else ""
        for worker in workers:
            roster.add(worker, "flag")
        if store is not None:
            watch = WorkerWatch(
                store,
                on_worker=lambda worker, keep_s: roster.add(worker, "pool", keep_s),
                on_gone=lambda worker_id: roster.remove(worker_id, "pool"),
                on_pool_lost=fleet.forget_pool,
            )
            parts.callback(watch.close)
        named = f"{len(workers)} workers" if len(workers) != 1 else "1 worker"
        host = listen.rpartition(":")[0]
        print(
            f"index listens on {host}:{port}, {named}, pool {redact(pool) if pool else 'none'}{shown}",
            flush=True,
        )
        await server.wait(ended)


def _open_pool(pool: str) -> Store:
    if StoreURL.parse(pool).scheme == "memory":
        raise ConfigError("--pool memory:// is of one process: no worker can announce itself in it")
    return visit_store(pool)


def parse_worker(text: str, seed_id: str) -> Worker:
    """The worker that a ``--worker`` names. Errors: ``ConfigError`` that begins with the option."""
    try:
        return check_worker(_worker(text, seed_id))
    except ConfigError as error:
        raise ConfigError(f'--worker "{text}": {error}') from error


def _worker(text: str, seed_id: str) -> Worker:
    name, separator, rest = text.partition("=")
    events, *parts = rest.split(",")
    if not separator or not name or "://" not in events:
        raise ConfigError("write NAME=tcp://HOST:PORT,model=MODEL,block=TOKENS")
    fields: dict[str, str] = {}
    for part in parts:
        field, separator, value = part.partition("=")
        if field not in _FIELDS:
            raise ConfigError(unknown("field", field, _FIELDS))
        if not value or field in fields:
            raise ConfigError(f"{field} is given twice" if value else f"{field} has no value")
        fields[field] = value
    if "model" not in fields:
        raise ConfigError("model is missing: the name that requests are sent with")
    if "block" not in fields:
        raise ConfigError("block is missing: the tokens of a block, which are the engine's --block-size")
    ranks = _whole("ranks", fields.get("ranks", "1"))
    replay = fields.get("replay", "")
    return Worker(
        name=name,
        model=fields["model"],
        block_tokens=_whole("block", fields["block"]),
        hash_seed_id=seed_id,
        publishers=tuple(
            Publisher(rank, _of_rank(events, rank), _of_rank(replay, rank))
            for rank in range(min(ranks, 2048))
        ),
        tenant=fields.get("tenant", DEFAULT_TENANT),
        hash_algorithm=fields.get("hash", DEFAULT_ALGORITHM),
        address=fields.get("address", ""),
    )


def _of_rank(endpoint: str, rank: int) -> str:
    """Where a rank publishes: vLLM adds the rank to the port (``offset_endpoint_port``)."""
    if rank == 0 or not endpoint:
        return endpoint
    host, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or _NUMBER.fullmatch(port) is None:
        raise ConfigError(f"{endpoint}: only tcp://HOST:PORT goes up by rank")
    return f"{host}:{int(port) + rank}"


def _whole(field: str, text: str) -> int:
    if _NUMBER.fullmatch(text) is None:
        raise ConfigError(f"{field} is a whole number, not {text!r:.40}")
    return int(text)


def _log_lines() -> None:
    """One line on standard error for whatever happens to a worker."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger("kvpool.index")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
