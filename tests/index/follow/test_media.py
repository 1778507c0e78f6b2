"""Which outputs of encoders a pool has, as an index on a real pool says it of scripted workers."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvpool import BlockHasher, IndexClient, open_store
from kvpool.cli.lookup import run_lookup
from kvpool.cli.options import IndexConnection
from kvpool.cli.settings import LookupOptions
from kvpool.discovery.worker import Publisher
from kvpool.index.follow import pool_follower
from kvpool.index.follow.pool_reconciler import PoolReconciler
from kvpool.index.index import Doors, Following, Index
from kvpool.key.hashing import seed_id
from kvpool.store.store import Store
from tests.support.announced_workers import announced, worker
from tests.support.calls import WAIT_S
from tests.support.deadlines import eventually
from tests.support.media import ENCODER, OTHER_ENCODER, output_key, put_outputs
from tests.support.servers import running

pytestmark = pytest.mark.usefixtures("grpc_started")

TOKENS = list(range(160))
ITEMS = [("one", 0, 32), ("two", 32, 32), ("one", 64, 32), ("three", 96, 32)]
# c is of a version that says nothing of its encoder.
MEDIA = {"a": (ENCODER.hex,), "b": (OTHER_ENCODER.hex,), "c": (), "d": (ENCODER.hex, OTHER_ENCODER.hex)}

Ask = Callable[[IndexClient, Store, str], None]


@pytest.fixture(params=["file", "valkey-server"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/pool"
        return
    with running(request.param, tmp_path) as server:
        yield server.url


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of files says nothing of what changes: rounds find it."""
    monkeypatch.setattr(pool_follower, "PoolReconciler", functools.partial(PoolReconciler, pause_s=0.1))


def with_an_index(url: str, ask: Ask) -> None:
    """An index, and the workers of ``MEDIA``, which publish no events."""

    async def serve(store: Store) -> None:
        index = Index(doors=Doors(grpc="127.0.0.1:0"), following=Following(pool=url, reads_load=False))
        ports = await index.start()
        try:
            await asyncio.to_thread(asked, store, f"127.0.0.1:{ports.grpc}")
        finally:
            await index.stop()

    def asked(store: Store, target: str) -> None:
        with IndexClient(target, WAIT_S) as client:
            assert eventually(lambda: len(client.workers()) == len(MEDIA))
            ask(client, store, target)

    with open_store(url) as store, ExitStack() as workers:
        for name, media in MEDIA.items():
            one = worker(
                name, hash_seed_id=seed_id(None), publishers=(Publisher(0, ""),), media_namespaces=media
            )
            workers.enter_context(announced(store, one, lease_s=600))
        asyncio.run(serve(store))


def held(client: IndexClient, **prompt: Any) -> tuple[int, ...]:
    prompt = prompt or {"token_ids": TOKENS}
    return client.lookup("m", multimodal=ITEMS, **prompt).pool_media


def test_an_index_follows_what_the_pool_has_of_each_encoder(url: str) -> None:
    """A worker is credited with the outputs that it can load itself; an item that is there twice counts once."""

    def ask(client: IndexClient, store: Store, _: str) -> None:
        assert held(client) == (0, 0, 0, 0)
        put_outputs(store, ["one", "two", "another"])
        assert eventually(lambda: held(client) == (2, 0, 0, 2))
        put_outputs(store, ["three"], OTHER_ENCODER)
        assert eventually(lambda: held(client) == (2, 1, 0, 3))
        hashes64 = BlockHasher(16).hashes64(TOKENS)
        assert held(client, hashes64=hashes64) == held(client, token_ids=TOKENS[:3]) == (2, 1, 0, 3)
        assert client.lookup("m", token_ids=TOKENS).pool_media == (0, 0, 0, 0), "no item is named"
        route = client.route("m", token_ids=TOKENS, multimodal=ITEMS, preview=True)
        assert {pick.worker: (pick.row.pool_media, pick.encode_cost) for pick in route.picks} == {
            "a": (2, 10), "b": (1, 19), "c": (0, 29), "d": (3, 0),
        }  # fmt: skip
        assert [pick.worker for pick in route.picks] == ["d", "a", "b", "c"]
        assert client.status().index.held_pool_blocks == 0, "outputs are no blocks"
        store.delete_many([output_key("two")])
        assert eventually(lambda: held(client) == (1, 1, 0, 2))

    with_an_index(url, ask)


def test_a_pool_that_goes_away_fails_no_lookup(tmp_path: Path) -> None:
    with running("valkey-server", tmp_path) as server:

        def ask(client: IndexClient, store: Store, _: str) -> None:
            put_outputs(store, ["one"])
            assert eventually(lambda: held(client) == (1, 0, 0, 1))
            server.stop()
            try:
                assert held(client) == (1, 0, 0, 1), "what was known last"
            finally:
                server.go_on()

        with_an_index(server.url, ask)


def test_a_lookup_shows_them(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    def ask(client: IndexClient, store: Store, target: str) -> None:
        put_outputs(store, ["one", "two"])
        assert eventually(lambda: held(client) == (2, 0, 0, 2))

        def lines(**options: Any) -> list[str]:
            media = [f"{identifier}:{offset}:{length}" for identifier, offset, length in ITEMS]
            asked = LookupOptions(model="m", token_ids=json.dumps(TOKENS), media=media, timeout=60, **options)
            run_lookup(asked, IndexConnection(target))
            return [line.split() for line in capsys.readouterr().out.splitlines()]

        (said,) = lines(as_json=True)
        rows = json.loads(" ".join(said))["rows"]
        assert {row["worker"]: row["pool_media"] for row in rows} == {"a": 2, "b": 0, "c": 0, "d": 2}
        table = lines()
        (place,) = (line.index("media") for line in table if "media" in line)
        shown = {
            line[0]: [cell for cell in line if "/" in cell] for line in table if line[:1] and line[0] in MEDIA
        }
        assert place
        assert shown == {"a": ["2/3"], "b": ["0/3"], "c": ["0/3"], "d": ["2/3"]}
        ranked = lines(route=True)
        assert any("encode" in line for line in ranked)

    with_an_index(url, ask)
