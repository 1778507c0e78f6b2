"""Workers at https: an index that knows the authority of their certificates reads their metrics and their tokens."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from kvpool.index.client.tls import ServerTls, trusting
from kvpool.index.fleet import Fleet
from kvpool.index.place.load import LoadBoard
from kvpool.index.place.scraper import Scraper
from tests.support.credentials import Authority
from tests.support.openai_worker import ScriptedWorker
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
    monkeypatch.setattr("kvpool.index.place.scraper.DEADLINE_S", WITHIN_S)

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
    monkeypatch.setattr("kvpool.index.place.renderer.CONNECT_S", 1e-4)  # for workers without TLS
    monkeypatch.setattr("kvpool.index.place.renderer.HANDSHAKE_S", WITHIN_S)
    tls = trusting("ca", str(authority.ca)) if known else None
    async with placer_of(fleet, tls=tls) as (placer, _):
        body = json.dumps({"model": "m", "prompt": "w3"}).encode()
        placement = await placer.place("/v1/completions", {}, body, "default")
        placer.release(placement)
    assert worker.rendered == int(known), placement
