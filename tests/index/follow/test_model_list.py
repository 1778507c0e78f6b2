"""Reading the ``/v1/models`` of workers: what vLLM lists, and lists that are huge, wrong, late or none."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from kvpool.index.cost.load import LoadBoard
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.names import Name
from kvpool.index.follow import scraper as scraper_module
from kvpool.index.follow.metrics_page import BadPage, EngineLoad
from kvpool.index.follow.model_list import MAX_CONTAINERS, read_names
from kvpool.index.follow.scraper import Scraper
from tests.support.fleets import a_worker
from tests.support.metrics_pages import PageServer, answer, page, serving_page
from tests.support.openai_worker import adapter, card

PAGE = answer(page({0: EngineLoad(3)}))


def listing(*cards: object) -> bytes:
    return json.dumps({"object": "list", "data": cards}).encode()


@pytest.mark.vllm
def test_what_vllm_lists() -> None:
    from vllm.entrypoints.serve.engine.protocol import ModelCard, ModelList, ModelPermission

    def of(**fields: object) -> ModelCard:
        return ModelCard(permission=[ModelPermission()], **fields)  # type: ignore[arg-type]

    cards = [
        of(id="m", root="/m", max_model_len=9),
        of(id="gpt-4", root="/m"),
        of(id="sql", root="/p", parent="m"),
    ]
    packed = ModelList(data=cards).model_dump_json().encode()
    assert read_names(packed) == [Name("m", "", 9), Name("gpt-4"), Name("sql", "/p")]


def test_an_adapters_path_is_the_root_of_a_card_with_a_parent() -> None:
    packed = listing(
        card("m", root="/m"), adapter("sql", "/p", "m"), {"id": "bare"}, {"id": "x", "parent": "m"}
    )
    assert read_names(packed) == [Name("m"), Name("sql", "/p"), Name("bare"), Name("x")]


@pytest.mark.parametrize(
    "packed",
    [
        b"", b"[]", b"{}", b'{"data": null}', b'{"data": [3]}', b'{"data": [{"id": 3}]}', b'{"data": [{}]}',
        b'{"data": [{"id": "\xff"}]}', b'{"data": ' + b"[" * 100_000, b'{"data": [' + b"{}," * (1 << 20) + b"{}]}",
        b"<html>", b'{"data": [' + b'{"id":""},' * MAX_CONTAINERS + b'{"id":"x"}]}',
    ],
)  # fmt: skip
def test_a_list_that_cannot_be_read_is_a_bad_page(packed: bytes) -> None:
    with pytest.raises(BadPage, match="its list of models cannot be read"):
        read_names(packed)


def test_a_list_as_long_as_a_page_may_be_is_read() -> None:
    permission = {"id": "modelperm-0123456789abcdef", "object": "model_permission", "group": None}
    cards = [card(f"sql-{number}", root="/m", permission=[permission]) for number in range(5000)]
    assert len(read_names(listing(*cards))) == 5000


# ---- over HTTP


@asynccontextmanager
async def reading(fleet: Fleet) -> AsyncIterator[None]:
    scraper = Scraper(fleet, LoadBoard(), interval_s=0.05)
    scraper.start()
    try:
        yield
    finally:
        await scraper.close()


@asynccontextmanager
async def beside(
    say: Callable[[socket.socket], object], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Fleet, PageServer]]:
    """Worker a, which answers so to ``GET /v1/models``."""
    monkeypatch.setattr(scraper_module, "NAMES_S", 0.05)
    with serving_page() as server:
        show(server, say)
        fleet = Fleet()
        fleet.add(a_worker("a", address=server.address), "flag")
        async with reading(fleet):
            yield fleet, server


def show(server: PageServer, say: Callable[[socket.socket], object]) -> None:
    def either(connection: socket.socket) -> None:
        (say if b"/v1/models" in server.asked[-1] else lambda one: one.sendall(PAGE))(connection)

    server.say = either


def saying(body: bytes, status: str = "200 OK") -> Callable[[socket.socket], object]:
    return lambda connection: connection.sendall(answer(body, status))


async def until(condition: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends_s, "it did not come true"
        await asyncio.sleep(0.005)


def lists_asked(server: PageServer) -> int:
    return sum(b"GET /v1/models" in head for head in server.asked)


GOOD = listing(card("m"), adapter("sql", "/p", "m"))


def huge(connection: socket.socket) -> None:
    connection.sendall(b'HTTP/1.1 200 OK\r\n\r\n{"data": [')
    while True:
        connection.sendall(b'{"id": "x"},' * 10_000)


def drip(connection: socket.socket) -> None:
    connection.sendall(b'HTTP/1.1 200 OK\r\n\r\n{"data": [')
    while connection.send(b" "):
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("say", "says"),
    [
        (huge, "has more than 2097152 bytes"),
        (drip, ""),
        (saying(b"{}"), "its list of models cannot be read"),
        (saying(GOOD, "401 Unauthorized"), "answers with HTTP status 401"),
        (saying(GOOD, "404 Not Found"), "answers with HTTP status 404"),
        (saying(GOOD, "302 Found\r\nlocation: /other"), "answers with HTTP status 302"),
    ],
    ids=["huge", "drip", "malformed", "401", "404", "302"],
)
@pytest.mark.anyio
async def test_a_list_that_is_no_good_changes_nothing_and_is_said_once(
    say: Callable[[socket.socket], object],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvpool.index")
    monkeypatch.setattr(scraper_module, "DEADLINE_S", 0.5)
    async with beside(say, monkeypatch) as (fleet, server):
        await until(lambda: lists_asked(server) >= 3)
        lines = [one.getMessage() for one in caplog.records if "announced names" in one.getMessage()]
        assert len(lines) == bool(says)
        assert all(
            line.startswith("worker default/a: only its announced names") and says in line for line in lines
        )
        assert fleet.names.listed("default", 9)[1:] == []
        show(server, saying(GOOD))
        await until(lambda: fleet.names.listed("default", 9)[1:] == [(Name("sql", "/p"), "m")])
        show(server, say)
        asked = lists_asked(server)
        await until(lambda: lists_asked(server) >= asked + 3)
        assert fleet.names.listed("default", 9)[1:] == [(Name("sql", "/p"), "m")]


@pytest.mark.anyio
async def test_names_are_read_without_a_page_of_metrics_and_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    worst_s = max(
        scraper_module.NAMES_S + 3 * scraper_module.DEADLINE_S + scraper_module.INTERVAL_S,
        scraper_module.MAX_BACKOFF_S + 3 * scraper_module.DEADLINE_S,
    )
    assert worst_s < 25
    monkeypatch.setattr(scraper_module, "NAMES_S", 0.05)
    with serving_page() as server:
        server.say = saying(GOOD)
        fleet = Fleet()
        fleet.add(a_worker("a", address=server.address), "flag")
        async with reading(fleet):
            await until(lambda: bool(fleet.names.listed("default", 9)[1:]))


@pytest.mark.anyio
async def test_a_list_is_not_read_with_each_page_of_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    async with beside(saying(GOOD), monkeypatch) as (fleet, server):
        await until(lambda: bool(fleet.names.listed("default", 9)[1:]))
        monkeypatch.setattr(scraper_module, "NAMES_S", 600.0)
        asked, pages = lists_asked(server), len(server.asked)
        await until(lambda: len(server.asked) >= pages + 20)
        assert lists_asked(server) <= asked + 1
        fleet.names.note("default/a", "sql", served=False)
        monkeypatch.setattr(scraper_module, "DOUBTED_S", 0.0)
        await until(lambda: lists_asked(server) >= asked + 1)
