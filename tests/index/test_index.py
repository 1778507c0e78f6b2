"""``Index``: its parts start together and end together; inside a router as docs/how-to/run-an-index.md has it."""

from __future__ import annotations

import ast
import asyncio
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool import BlockHasher, ConfigError, IndexClient, Worker
from kvpool.index import Lookup, Ranking
from kvpool.index.index import Beginning, Doors, Following, Index
from kvpool.key.hashing import seed_id
from tests.support.calls import WAIT_S
from tests.support.deadlines import ends_within, eventually
from tests.support.feeds import misbehaving
from tests.support.fleets import a_worker
from tests.support.wire import batch, stored

DOCS = Path(__file__).parents[2] / "docs" / "how-to" / "run-an-index.md"
TOKENS = list(range(64))
ANY = "127.0.0.1:0"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No thread outlives its index."""
    before = set(threading.enumerate())
    yield
    assert eventually(lambda: not [one for one in threads_of_kvpool() if one not in before])


def threads_of_kvpool() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvpool-")]


def test_the_example_of_an_index_inside_a_router() -> None:
    (example,) = re.findall(r"## Inside a router\n.*?```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    start, ask, end = re.split(r"(?m)^(?=rows = |await index\.stop)", example)

    async def run(code: str, names: dict[str, Any]) -> None:
        made = eval(compile(code, "example", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        if made is not None:
            await made

    async def route(names: dict[str, Any]) -> None:
        await run(start, names)
        try:
            for _ in range(round(WAIT_S / 0.05)):
                await run(ask, names)
                if names["rows"].device_blocks == (3,):
                    break
                await asyncio.sleep(0.05)
        finally:
            await run(end, names)

    with misbehaving() as publisher:
        publisher.publish(batch(stored(BlockHasher(16).hashes(TOKENS)[:3])))
        worker = Worker("w", "MODEL", 16, seed_id(None), (publisher.publisher,))
        names: dict[str, Any] = {"worker": worker, "token_ids": TOKENS}
        asyncio.run(route(names))
    assert isinstance(names["rows"], Lookup)
    assert names["rows"].device_blocks == (3,)
    assert isinstance(names["route"], Ranking)
    (pick,) = names["route"].picks
    assert (pick.worker, pick.prefill_cost, pick.trust) == ("w", 16, "exact")


def test_it_listens_at_the_doors_that_it_is_given_until_it_stops() -> None:
    doors = Doors(grpc=ANY, metrics=ANY, http=ANY, ext_proc=ANY, proxy=ANY)

    async def serve() -> tuple[int, ...]:
        index = Index(doors=doors, following=Following(workers=[a_worker("w")], reads_load=False))
        ports = await index.start()

        def asked() -> list[str]:
            with IndexClient(f"127.0.0.1:{ports.grpc}", WAIT_S) as client:
                return [one.worker.name for one in client.workers()]

        assert await asyncio.to_thread(asked) == ["w"]
        await index.leave(0.0, 0.0, asyncio.Event())
        await index.stop()
        await index.stop()
        return ports

    ports = asyncio.run(serve())
    assert len(set(ports)) == len(ports) == 5
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)


def test_a_start_that_fails_leaves_nothing_behind() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"

        async def fail() -> None:
            index = Index(doors=Doors(grpc=ANY, proxy=listen))
            with pytest.raises(ConfigError, match="Address already in use"):
                await index.start()
            await index.stop()

        asyncio.run(fail())


def test_it_starts_once() -> None:
    """A second start would leave the first one's ports open, or follow nobody: a fleet ends with its index."""

    async def is_refused(index: Index) -> None:
        with pytest.raises(RuntimeError, match="make another Index, with another Fleet"):
            await index.start()

    async def serve() -> None:
        index = Index(doors=Doors(grpc=ANY))
        await index.start()
        await is_refused(index)
        await index.stop()
        await is_refused(index)
        await is_refused(Index(index.fleet))
        never = Index()
        await never.stop()
        await is_refused(never)

    asyncio.run(serve())


def test_after_a_start_that_failed_another_one_follows_its_workers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        doors = Doors(grpc=f"127.0.0.1:{taken.getsockname()[1]}")
        index = Index(doors=doors)

        async def fail() -> None:
            with pytest.raises(ConfigError, match="Address already in use"):
                await index.start()

        asyncio.run(fail())

    async def serve() -> None:
        with pytest.raises(RuntimeError, match="an index starts once"):
            await index.start()
        async with Index(doors=doors) as another:
            assert another.fleet.feed is not None
            assert another.fleet.feed.is_alive

    asyncio.run(serve())


@pytest.mark.usefixtures("grpc_started")
@pytest.mark.parametrize("way", ["stop", "cancel"])
def test_a_start_that_waits_for_a_silent_peer_is_ended(way: str, caplog: pytest.LogCaptureFixture) -> None:
    async def serve(peer: str) -> None:
        index = Index(doors=Doors(grpc=ANY), beginning=Beginning(bootstrap=peer))
        starting = asyncio.create_task(index.start())
        await asyncio.sleep(0.1)
        if way == "cancel":
            starting.cancel()
        await index.stop()
        if way == "cancel":
            with pytest.raises(asyncio.CancelledError):
                await starting
        else:
            port = (await starting).grpc
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)

    with socket.create_server(("127.0.0.1", 0)) as silent, ends_within(1.0):
        asyncio.run(serve(f"127.0.0.1:{silent.getsockname()[1]}"))
    caplog.clear()  # its record has an error, whose frames have the index
