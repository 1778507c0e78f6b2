"""Workers at https: an index that knows the authority of their certificates reads their metrics and their tokens."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import anyio
import pytest

from kvpool.index.cost.load import LoadBoard
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.follow.scraper import Scraper
from kvpool.index.net.tls import ServerTls, trusting
from kvpool.index.net.worker_connection import WorkerConnector
from tests.support.credentials import Authority
from tests.support.http_client import request_of
from tests.support.openai_worker import BadWorker, ScriptedWorker
from tests.support.placing import placer_of

WITHIN_S = 60.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def worker(authority: Authority) -> Iterator[ScriptedWorker]:
    pair = authority.issue("worker", names=("localhost",))
    worker = ScriptedWorker("a", tls=ServerTls(str(pair.cert), str(pair.key)).context)
    worker.start()
    yield worker
    worker.stop()


@pytest.fixture
def fleet(worker: ScriptedWorker) -> Fleet:
    fleet = Fleet()
    fleet.add(worker.worker(address=f"https://localhost:{worker.port}"), "flag")
    fleet.rank("default/a", 0).heard()
    return fleet


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.anyio
async def test_metrics(
    authority: Authority,
    fleet: Fleet,
    known: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "kvpool.index")
    # Only the first failure is said, so on a busy machine it must not be that a page came too late.
    monkeypatch.setattr("kvpool.index.follow.scraper.DEADLINE_S", WITHIN_S)

    def is_told(board: LoadBoard) -> bool:
        return board.get("default/a", 0) is not None if known else "cannot be read" in caplog.text

    board = LoadBoard()
    scraper = Scraper(fleet, board, interval_s=0.05, tls=trusting("ca", str(authority.ca)) if known else None)
    scraper.start()
    try:
        with anyio.fail_after(WITHIN_S):
            while not is_told(board):
                await asyncio.sleep(0.01)
    finally:
        await scraper.close()
    assert (board.get("default/a", 0) is not None) == known
    assert ("cannot be read: TLS: unable to get local issuer certificate" in caplog.text) == (not known)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.anyio
async def test_tokens(
    authority: Authority, fleet: Fleet, worker: ScriptedWorker, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A handshake takes longer on a busy machine than a request may wait for it.
    monkeypatch.setattr("kvpool.index.front.renderer.CONNECT_S", 1e-4)  # for workers without TLS
    monkeypatch.setattr("kvpool.index.front.renderer.HANDSHAKE_S", WITHIN_S)
    tls = trusting("ca", str(authority.ca)) if known else None
    async with placer_of(fleet, tls=tls) as (placer, _):
        body = json.dumps({"model": "m", "prompt": "w3"}).encode()
        placement = await placer.place("/v1/completions", {}, body, "default")
        placer.release(placement)
    assert worker.rendered == int(known), placement


@pytest.mark.anyio
async def test_a_worker_that_does_not_end_tls_holds_no_connection(authority: Authority) -> None:
    pair = authority.issue("worker", names=("localhost",))
    context = ServerTls(str(pair.cert), str(pair.key)).context
    assert context is not None

    def talk(client: socket.socket) -> None:
        with context.wrap_socket(client, server_side=True) as wrapped:
            request_of(wrapped)
            wrapped.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
            while wrapped.recv(1):  # of an end of TLS, which it does not answer
                pass
            ended.wait()

    ended = threading.Event()
    worker = BadWorker("bad", talk)
    connector = WorkerConnector(keepalive_s=60, tls=trusting("ca", str(authority.ca)))
    try:
        async with aiohttp.ClientSession(connector=connector) as session:
            async with session.get(f"https://localhost:{worker.port}/") as reply:
                assert await reply.content.readany() == b"half"
                assert reply.connection is not None
                assert reply.connection.transport is not None
                mine = reply.connection.transport.get_extra_info("socket")
            for _ in range(3):
                await asyncio.sleep(0)
            assert mine.fileno() == -1, "it waits for the worker"
    finally:
        ended.set()
        worker.stop()
