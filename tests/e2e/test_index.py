"""The index beside real engines: it credits what the engine has said, what the pool has, and nobody who is dead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.engine_process import EngineProcess, free_ports, kill_all_but_trackers
from kvpool import BlockHasher, open_store
from kvpool.config import hash_seed
from kvpool.discovery.worker import Publisher, Worker
from kvpool.index.answer import Row
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.follow.subscriber import Subscriber
from kvpool.key.hashing import seed_id
from kvpool.key.key import parse_facts_key
from tests.support.deadlines import eventually
from tests.support.engines import (
    BLOCK_TOKENS,
    PROMPTS,
    WITHIN_S,
    EngineSays,
    Index,
    options_of,
    passing,
    prompt,
    started,
)
from tests.support.servers import running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

LEASE_S = 6.0
LONG_LEASE_S = 600.0
HASHER = BlockHasher(BLOCK_TOKENS)


def assert_true(index: Index, model: str, worker: str, replay_port: int) -> EngineSays:
    """Each answer is what the engine itself says, as of the batch that the answer names."""
    compared: list[tuple[Row, int]] = []
    said: EngineSays

    def of_one_batch() -> bool:
        nonlocal said
        said = EngineSays(replay_port)
        compared[:] = [(index.row(model, tokens, worker), said.leading(tokens)) for tokens in PROMPTS]
        return all(not row.stale and row.sequence == said.sequence for row, _ in compared)

    assert eventually(of_one_batch, within_s=WITHIN_S), compared
    for row, leading in compared:
        assert row.device_blocks == row.local_blocks == leading
    return said


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Index, str]]:
    with (
        running("valkey-server", tmp_path_factory.mktemp("index")) as server,
        open_store(server.url) as store,
    ):
        one = Index(store)
        yield one, server.url
        one.close()


@pytest.mark.smoke
@pytest.mark.allow_leaks("the index and its server are shared by the module")
def test_what_the_engine_and_the_pool_have_is_credited_until_the_engine_dies(
    index: tuple[Index, str], llama: Path, tmp_path: Path
) -> None:
    one, url = index
    model, ports = str(llama), free_ports(2)
    name = f"127.0.0.1:{ports[0]}"
    first = started("first", tmp_path, options_of(llama, url, ports, lease_s=LEASE_S))
    try:
        assert eventually(lambda: one.knows(name), within_s=WITHIN_S)
        for tokens in (*PROMPTS, PROMPTS[6], PROMPTS[7]):
            first.generate(tokens, 2)
        held = one.store.announcements("kvpool:default:")
        (namespace,) = [parsed[1] for key in held if (parsed := parse_facts_key(key)) is not None]

        def pool_has(tokens: list[int]) -> int:
            keys = [f"kvpool:default:{namespace}:{h.hex()}:0:0" for h in HASHER.hashes(tokens)]
            found = one.store.contains_many(keys)
            return (*found, False).index(False)

        def step() -> None:
            """An engine tells what has entered the pool in its next step, and stops stepping a second after the last
            store: a slow store is told with the next request.
            """
            first.generate(prompt(999, BLOCK_TOKENS // 2), 1)

        def all_is_stored() -> bool:
            step()
            return [pool_has(tokens) for tokens in PROMPTS] == [
                len(tokens) // BLOCK_TOKENS for tokens in PROMPTS
            ]

        def all_is_told() -> bool:
            step()
            return all(one.row(model, tokens, name).pool_blocks == pool_has(tokens) for tokens in PROMPTS)

        assert eventually(all_is_stored, within_s=WITHIN_S), [pool_has(tokens) for tokens in PROMPTS]
        assert eventually(all_is_told, within_s=WITHIN_S), [one.row(model, t, name) for t in PROMPTS]
        said = assert_true(one, model, name, ports[1])
        assert said.evicted > 10, "the cache was too small for all"
        assert said.leading(PROMPTS[7]) == len(PROMPTS[7]) // BLOCK_TOKENS
        assert said.leading(PROMPTS[0]) < len(PROMPTS[0]) // BLOCK_TOKENS
        (status,) = one.fleet.workers()
        assert (status.worker.namespace, status.worker.address) == (namespace, "http://127.0.0.1:8000")
        assert (status.publishers[0].resets, status.publishers[0].problem) == (0, "")
        incarnation = one.incarnation(name)

        kill_all_but_trackers(first.process_id)
        assert eventually(lambda: not one.fleet.workers(), within_s=LEASE_S + WITHIN_S)
    finally:
        first.kill()

    with started("again", tmp_path, options_of(llama, url, ports, lease_s=LONG_LEASE_S)) as again:
        assert eventually(lambda: one.knows(name), within_s=WITHIN_S)
        assert one.incarnation(name) != incarnation
        row = one.row(model, PROMPTS[7], name)
        assert row.device_blocks == 0, "what was held before is gone"
        assert row.pool_blocks == len(PROMPTS[7]) // BLOCK_TOKENS, "the pool has outlived it"
        answer = again.generate(PROMPTS[7], 2)
        assert answer["pool_tokens"] >= (len(PROMPTS[7]) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        said = assert_true(one, model, name, ports[1])
        assert said.leading(PROMPTS[7]) == len(PROMPTS[7]) // BLOCK_TOKENS
    # Its lease would have held it for ten minutes.
    assert eventually(lambda: not one.fleet.workers()), "a clean stop is told"


@pytest.mark.allow_leaks("the index and its server are shared by the module")
def test_stock_vllm_is_followed_when_somebody_names_it(
    index: tuple[Index, str], llama: Path, tmp_path: Path
) -> None:
    one, url = index
    model, ports = str(llama), free_ports(2)
    options = options_of(llama, url, ports)
    del options["kv_transfer_config"]
    stock = Worker(
        "stock",
        model,
        BLOCK_TOKENS,
        seed_id(hash_seed()),
        (Publisher(0, f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}"),),
    )
    engine: EngineProcess
    with passing("stock", tmp_path, options) as engine:
        engine.generate(PROMPTS[0], 2)  # before anybody listens
        one.fleet.add(stock, "flag")
        for tokens in PROMPTS[1:5]:
            engine.generate(tokens, 2)
        said = assert_true(one, model, "stock", ports[1])
        assert said.leading(PROMPTS[4]) == len(PROMPTS[4]) // BLOCK_TOKENS
        assert one.row(model, PROMPTS[4], "stock").pool_blocks == 0, "it has no namespace"
    assert eventually(lambda: one.row(model, PROMPTS[4], "stock").stale, within_s=WITHIN_S)
    one.fleet.remove("default/stock")


def test_a_hybrid_is_credited_with_what_it_can_use(gemma: Path, tmp_path: Path) -> None:
    """Full attention and windows: what the index says before a request is what the engine then takes from its cache."""
    model, ports = str(gemma), free_ports(2)
    options = options_of(gemma, "file:///unused", ports)
    del options["kv_transfer_config"]
    options["max_num_batched_tokens"] = 1024  # several steps a prompt
    fleet = Fleet(reuse_reports=False, feed=Subscriber())
    publisher = Publisher(0, f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}")
    shared = prompt(800, 1500)
    prompts = [shared[:cut] + prompt(801 + i, tokens) for i, (cut, tokens) in enumerate(
        [(1500, 600), (700, 900), (1500, 80), (0, 1700), (1300, 1000)]
    )]  # fmt: skip
    usable: list[tuple[int, int]] = []

    def row(tokens: list[int]) -> Row | None:
        """What the index answers as of the last batch that the engine has published."""
        (found,) = fleet.lookup(model, token_ids=tokens)
        return found if not found.stale and found.sequence == EngineSays(ports[1]).sequence else None

    try:
        with passing("hybrid", tmp_path, options) as engine:
            fleet.add(Worker("w", model, BLOCK_TOKENS, seed_id(hash_seed()), (publisher,)), "flag")
            for tokens in (*prompts, *prompts, prompts[3], prompts[0]):
                found: list[Row | None] = [None]

                def is_known(tokens: list[int] = tokens, found: list[Row | None] = found) -> bool:
                    found[0] = row(tokens)
                    return found[0] is not None

                assert eventually(is_known, within_s=WITHIN_S)
                assert found[0] is not None
                answer = engine.generate(tokens, 2)
                usable.append((found[0].device_blocks * BLOCK_TOKENS, answer["cached_tokens"]))
    finally:
        fleet.close()
    assert all(credited == cached for credited, cached in usable), usable
    assert sum(cached > 0 for _, cached in usable) >= 4, usable
    assert any(0 < cached < 1300 for _, cached in usable), usable
