"""Reading the metrics of workers: real HTTP, and servers that are slow, huge, wrong or away.

Over 400 lines because all of it is one reader before one kind of server.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvpool import Load
from kvpool.index.cost.load import KnownLoad, LoadBoard
from kvpool.index.cost.router import Router
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.follow import scraper as scraper_module
from kvpool.index.follow.metrics_page import EngineLoad
from kvpool.index.follow.scraper import Scraper
from tests.support.fleets import a_worker, say
from tests.support.metrics_pages import PageServer, answer, page, serving_page
from tests.support.networks import Names
from tests.support.wire import batch, packed64, stored

WITHIN_S = 60.0


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it waits for, shorter; the order of the waits is the same."""
    monkeypatch.setattr(scraper_module, "DEADLINE_S", 0.5)
    monkeypatch.setattr(scraper_module, "MAX_BACKOFF_S", 0.2)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


async def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come true"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def scraping(
    fleet: Fleet, interval_s: float = 0.05, board: LoadBoard | None = None
) -> AsyncIterator[LoadBoard]:
    """What a scraper of ``fleet`` knows, until the end of the block."""
    board = board or LoadBoard(rank=fleet.rank)
    before = asyncio.all_tasks()
    scraper = Scraper(fleet, board, interval_s=interval_s)
    scraper.start()
    try:
        yield board
    finally:
        await scraper.close()
    assert asyncio.all_tasks() == before


def follow(fleet: Fleet, name: str, address: str, **fields: Any) -> None:
    fleet.add(a_worker(name, address=address, **fields), "flag")


def running(board: LoadBoard, name: str, rank: int = 0) -> int | None:
    known = board.get(f"default/{name}", rank)
    return None if known is None else known.load.running


@pytest.mark.anyio
async def test_loads_of_all_ranks(fleet: Fleet) -> None:
    engines = {0: EngineLoad(3, 5, 0.25, capacity_tokens=1600), 1: EngineLoad(4, 6, 0.75, asleep=True)}
    with serving_page(engines) as server:
        follow(fleet, "a", f"{server.address}/", ranks=2)
        async with scraping(fleet) as board:
            await until(lambda: running(board, "a", 1) == 4)
            known = board.get("default/a", 0)
            assert known is not None
            assert known._replace(age_s=0) == KnownLoad(Load("a", 0, 3, 5, None, 0.25), "scraped", 0, False)
            known = board.get("default/a", 1)
            assert known is not None
            assert known.asleep
            ranks = board.of(fleet.ranks_of("default/a"))
            assert [rank and rank.capacity_tokens for rank in ranks] == [1600, None]
            server.show({0: EngineLoad(7), 1: EngineLoad(8)})
            await until(lambda: running(board, "a") == 7)
            assert server.asked[-1].startswith(b"GET /metrics HTTP/1.1\r\n")


@pytest.mark.anyio
async def test_a_worker_that_does_not_answer_gets_no_first_pick_while_it_is_stale(fleet: Fleet) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        follow(fleet, "dead", f"http://127.0.0.1:{taken.getsockname()[1]}")
        with serving_page({0: EngineLoad(9)}) as server:
            follow(fleet, "busy", server.address, port=6000)
            router = Router(fleet)
            async with scraping(fleet, board=router.loads) as board:

                def picks() -> list[tuple[str, bool]]:
                    route = router.route("m", token_ids=[1])
                    return [(pick.worker, pick.unreachable) for pick in route.picks]

                await until(lambda: picks()[-1] == ("dead", True) and running(board, "busy") == 9)
                assert {name for name, unreachable in picks() if not unreachable} >= {"busy"}
                fleet.rank("default/dead", 0).heard()
                assert ("dead", False) in picks(), "its events are followed"


@pytest.mark.anyio
async def test_one_that_comes_is_read_at_once(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is placed there before its load is known is counted for too long."""
    monkeypatch.setattr(scraper_module.random, "random", lambda: 0.99)
    with serving_page() as server:
        server.show({0: EngineLoad(3)})
        follow(fleet, "w", server.address)
        async with scraping(fleet, 2 * WITHIN_S) as board:
            await until(lambda: running(board, "w") == 3)


@pytest.mark.anyio
async def test_a_rank_that_is_a_server_of_its_own(fleet: Fleet) -> None:
    with serving_page({0: EngineLoad(3)}) as server:
        (third,) = a_worker(ranks=4).publishers[3:]
        follow(fleet, "a", server.address, publishers=(third,))
        async with scraping(fleet) as board:
            await until(lambda: running(board, "a", 3) == 3)


@pytest.mark.anyio
async def test_only_those_that_are_there_and_speak_http_are_read(fleet: Fleet) -> None:
    with serving_page() as server, serving_page() as other:
        follow(fleet, "a", server.address)
        follow(fleet, "b", "")
        follow(fleet, "c", "grpc://127.0.0.1:1")
        async with scraping(fleet):
            await until(lambda: len(server.asked) >= 3)
            fleet.remove("default/a")
            await until(lambda: not scraper_tasks())
            asked = len(server.asked)
            follow(fleet, "a", other.address)
            await until(lambda: len(other.asked) >= 3)
            assert len(server.asked) == asked, "it is left when its worker goes"


def scraper_tasks() -> list[Any]:
    return [task for task in asyncio.all_tasks() if "Scraper._read" in repr(task)]


@pytest.mark.anyio
async def test_a_worker_that_goes_as_its_page_comes_is_left(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow(fleet, "a", "http://127.0.0.1:1")

    came: list[str] = []

    async def come(scraper: Scraper, url: str, *_: str) -> tuple[int, bytes]:
        came.append(url)
        for reader in scraper._readers.values():
            reader.cancel()
        return 200, page({0: EngineLoad(7)})

    monkeypatch.setattr(Scraper, "_get", come)
    async with scraping(fleet):
        await until(lambda: came)
        await until(lambda: not scraper_tasks())


def never(connection: socket.socket) -> None:
    connection.recv(1)


def drip(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b"# x\n")
        threading.Event().wait(0.05)


def wait_for(closing: threading.Event) -> None:
    closing.wait(2 * WITHIN_S)


def endless_head(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        connection.sendall(b"x-more: " + b"x" * 4000 + b"\r\n")


def huge(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b"# x\n" * 65536)


def saying(raw: bytes) -> Callable[[socket.socket], None]:
    return lambda connection: connection.sendall(raw)


GOOD = page({0: EngineLoad(9)})


@pytest.mark.parametrize(
    ("say", "says"),
    [
        (never, "no answer within 0.5 s"),
        (drip, "no answer within 0.5 s"),
        (endless_head, ""),
        (huge, "has more than 2097152 bytes"),
        (saying(b""), ""),
        (saying(b"SSH-2.0-x\r\n"), ""),
        (saying(answer(GOOD, "404 Not Found")), "HTTP status 404"),
        (saying(answer(GOOD, "302 Found\r\nlocation: /other")), "HTTP status 302"),
        (saying(answer(GOOD)[:-20]), ""),
        (saying(answer(page({1: EngineLoad(9), 2: EngineLoad(9)}))), "has no line of engine 0"),
    ],
    ids=[
        "never", "drip", "endless head", "huge", "closes", "another protocol", "404", "302", "cut short",
        "other engines",
    ],
)  # fmt: skip
@pytest.mark.anyio
async def test_one_that_misbehaves(
    fleet: Fleet, say: Callable[[socket.socket], None], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It holds up nobody, nothing of it is taken, it is said once, and it is read again when it is well."""
    caplog.set_level(logging.INFO, "kvpool.index")
    with serving_page() as bad, serving_page() as good:
        bad.say = say
        follow(fleet, "bad", bad.address)
        follow(fleet, "good", good.address, port=7000)

        def lines() -> list[str]:
            return [record.getMessage() for record in caplog.records if "metrics" in record.getMessage()]

        async with scraping(fleet) as board:
            for number in range(1, 4):
                good.show({0: EngineLoad(number)})
                await until(lambda number=number: running(board, "good") == number)
            await until(lambda: len(bad.asked) >= 2 and bool(lines()))
            assert running(board, "bad") is None
            (line,) = lines()
            assert line.startswith("worker default/bad: its metrics cannot be read: ")
            assert says in line
            assert "\n" not in line
            bad.show({0: EngineLoad(5)})
            await until(lambda: running(board, "bad") == 5)
            assert lines()[1:] == ["worker default/bad: its metrics are read again"]


@pytest.mark.anyio
async def test_slow_ones_hold_up_nobody(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than pages may be under way: they give their turns back at the deadline, and wait longer."""
    monkeypatch.setattr(scraper_module, "MAX_AT_A_TIME", 4)
    servers: list[PageServer] = []
    try:
        for place in range(8):
            servers.append(PageServer(never))
            follow(fleet, f"slow-{place}", servers[-1].address, port=7000 + 2 * place)
        servers.append(PageServer(never))
        servers[-1].show({0: EngineLoad(1)})
        follow(fleet, "good", servers[-1].address, port=8000)
        async with scraping(fleet) as board:
            for number in range(1, 4):
                servers[-1].show({0: EngineLoad(number)})
                await until(lambda number=number: running(board, "good") == number)
    finally:
        for server in servers:
            server.close()


@pytest.mark.anyio
async def test_slow_ones_of_one_tenant_hide_no_load_of_another(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They kept all turns: a load was known for ten seconds, and read again later than that."""
    monkeypatch.setattr(scraper_module, "DEADLINE_S", 2 * WITHIN_S)  # none gives its turn back
    with serving_page() as slow, serving_page({0: EngineLoad(1)}) as good:
        slow.say = lambda connection: wait_for(slow.closing)
        for place in range(200):
            follow(fleet, f"slow-{place}", slow.address, port=7000 + 2 * place, tenant="slow")
        async with scraping(fleet) as board:
            await until(lambda: len(slow.asked) == scraper_module.MAX_OF_TENANT)
            follow(fleet, "good", good.address)
            for number in range(1, 4):
                good.show({0: EngineLoad(number)})
                await until(lambda number=number: running(board, "good") == number)
            assert len(slow.asked) == scraper_module.MAX_OF_TENANT


@pytest.mark.anyio
async def test_one_that_cannot_be_reached(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvpool.index")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    follow(fleet, "away", f"http://127.0.0.1:{port}")
    follow(fleet, "nowhere", "http://no-such-host.invalid:1", port=7000)
    follow(fleet, "wrong", "http://[::1:99999/", port=8000)
    follow(fleet, "plain", f"https://127.0.0.1:{port}", port=9000)
    async with scraping(fleet):
        await until(lambda: len([one for one in caplog.records if "cannot be read" in one.getMessage()]) == 4)


@pytest.mark.anyio
async def test_a_page_is_parsed_outside_the_event_loop(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    parsing, go_on = threading.Event(), threading.Event()
    read_page = scraper_module.read_page
    in_time: list[bool] = []

    def slowly(body: bytes) -> dict[int, EngineLoad]:
        parsing.set()
        in_time.append(go_on.wait(WITHIN_S / 4))
        return read_page(body)

    monkeypatch.setattr(scraper_module, "read_page", slowly)
    with serving_page({0: EngineLoad(3)}) as server:
        follow(fleet, "a", server.address)
        async with scraping(fleet) as board:
            await until(parsing.is_set)
            go_on.set()
            await until(lambda: running(board, "a") == 3)
            assert all(in_time), "the event loop waits for it"


@pytest.mark.anyio
async def test_names_that_hang_hold_up_no_other_worker(fleet: Fleet, names: Names) -> None:
    with serving_page({0: EngineLoad(3)}) as server:
        for number in range(40):
            follow(fleet, f"hang-{number}", f"http://hang-{number}.test:1", port=6000 + number)
        port = server.address.rpartition(":")[2]
        names.known["good.test"] = "127.0.0.1"
        follow(fleet, "good", f"http://good.test:{port}", tenant="other")
        async with scraping(fleet) as board:
            for number in range(4, 7):
                await until(lambda: board.get("other/good", 0) is not None)
                server.show({0: EngineLoad(number)})
                await until(lambda number=number: board.get("other/good", 0).load.running == number)
            assert b"host: good.test:%s\r\n" % port.encode() in server.asked[-1].lower()


# ---- asleep


def credited(fleet: Fleet, name: str = "a") -> tuple[int, bool]:
    (row,) = fleet.lookup("m", hashes64=packed64([1, 2, 3]), workers=[name])
    return row.device_blocks, row.stale


@pytest.mark.anyio
async def test_a_worker_that_sleeps_is_not_credited_until_it_says_what_it_holds(fleet: Fleet) -> None:
    """vLLM empties its cache for a sleep, and sends word of that with the first batch after it."""
    with serving_page() as server:
        follow(fleet, "a", server.address)
        say(fleet, "default/a", 0, 0, batch(stored([1, 2])))
        async with scraping(fleet) as board:
            await until(lambda: running(board, "a") == 0)
            assert credited(fleet) == (2, False)
            server.show({0: EngineLoad(asleep=True)})
            await until(lambda: credited(fleet) == (0, True))
            (status,) = fleet.workers()
            assert status.publishers[0].problem == "asleep, or no event since it woke"
            assert fleet.totals().stale_ranks == 0, "it calls nobody at night"
            server.show({0: EngineLoad(4)})
            await until(lambda: running(board, "a") == 4)
            fleet.rank("default/a", 0).heard()
            assert credited(fleet) == (0, True), "awake, and its cache is empty"
            fleet.rank("default/a", 0).apply(1, batch({"type": "AllBlocksCleared"}, stored([1, 2, 3])))
            assert credited(fleet) == (3, False)
            (status,) = fleet.workers()
            assert status.publishers[0].problem == ""


@pytest.mark.anyio
async def test_a_batch_while_a_page_is_on_its_way_is_believed(fleet: Fleet) -> None:
    """The page is of before the batch: the engine woke meanwhile."""
    arrived, go_on = threading.Event(), threading.Event()

    def slowly(connection: socket.socket) -> None:
        arrived.set()
        assert go_on.wait(WITHIN_S)
        connection.sendall(answer(page({0: EngineLoad(asleep=True)})))

    with serving_page() as server:
        server.say = slowly
        follow(fleet, "a", server.address)
        say(fleet, "default/a", 0, 0, batch(stored([1])))
        async with scraping(fleet) as board:
            await until(arrived.is_set)
            fleet.rank("default/a", 0).apply(1, batch({"type": "AllBlocksCleared"}, stored([1, 2])))
            server.show({0: EngineLoad(2)})
            go_on.set()
            await until(lambda: running(board, "a") == 2)
            assert credited(fleet) == (2, False)


@pytest.mark.anyio
async def test_a_page_of_a_former_start_says_nothing_of_the_present_one(fleet: Fleet) -> None:
    arrived, go_on = threading.Event(), threading.Event()

    def slowly(connection: socket.socket) -> None:
        arrived.set()
        assert go_on.wait(WITHIN_S)
        connection.sendall(answer(page({0: EngineLoad(9)})))

    seen: list[int] = []

    class Board(LoadBoard):
        def scrape(self, worker_id: str, load: Load, *, asleep: bool) -> None:
            seen.append(load.running)
            super().scrape(worker_id, load, asleep=asleep)

    with serving_page() as server:
        server.say = slowly
        follow(fleet, "a", server.address, incarnation="1")
        async with scraping(fleet, board=Board(rank=fleet.rank)) as board:
            await until(arrived.is_set)
            follow(fleet, "a", server.address, incarnation="2")
            server.show({0: EngineLoad(2)})
            go_on.set()
            await until(lambda: running(board, "a") == 2)
            assert set(seen) == {2}


def test_word_of_an_earlier_start_does_not_count(fleet: Fleet) -> None:
    fleet.add(a_worker("a", incarnation="1"), "call")
    for number in range(5):
        say(fleet, "default/a", 0, number, batch(stored([1])))
    earlier = fleet.rank("default/a", 0)
    assert earlier.batches == 5
    fleet.add(a_worker("a", incarnation="2"), "call")
    say(fleet, "default/a", 0, 0, batch(stored([1, 2])))
    earlier.empty(5)
    assert credited(fleet) == (2, False)
    now = fleet.rank("default/a", 0)
    now.empty(now.batches)
    assert credited(fleet) == (0, True)
    assert fleet.rank("default/x", 0) is None
