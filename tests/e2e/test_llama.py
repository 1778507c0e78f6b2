"""Full attention on two engines: exact hits, and every damage to the pool a recompute with the same tokens."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import EngineProcess, free_ports
from kvpool import BlockHasher
from tests.support.deadlines import eventually
from tests.support.engines import (
    BLOCK_TOKENS,
    GENERATED_TOKENS,
    EngineSays,
    call,
    corrupt,
    engine_options,
    held_worker,
    passing,
    process_named,
    processes_below,
    prompt,
    publishing,
    records,
    rests,
    started,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

PROMPTS = {
    name: prompt(seed, 1500 + 97 * seed)
    for seed, name in enumerate(["hit", "corrupted", "flipped", "aborted", "after abort", "halved"])
}
LONG = {name: prompt(100 + seed, 4000) for seed, name in enumerate(["gone", "replaced", "aborted"])}


@dataclass
class Pair:
    """Two engines on one pool; ``reference`` is what the first one answers from its own prefix cache."""

    pool: Path
    second: EngineProcess
    reference: dict[str, dict[str, Any]]
    announced: Set[int]  # as in the pool, by the first one

    def ask(self, name: str) -> dict[str, Any]:
        tokens = PROMPTS.get(name) or LONG[name]
        return self.second.generate(tokens, GENERATED_TOKENS)

    def metrics(self) -> dict[str, float]:
        return self.second.ask({"do": "metrics"})


@pytest.fixture(scope="module")
def pair(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("engines")
    pool = folder / "pool"
    ports, reference = free_ports(2), {}
    options = engine_options(llama, f"file://{pool}", kv_events_config=publishing(ports))
    with started("first", folder, options) as first:
        for name, tokens in {**PROMPTS, **LONG}.items():
            first.generate(tokens, GENERATED_TOKENS)
            reference[name] = first.generate(tokens, GENERATED_TOKENS)
            assert reference[name]["cached_tokens"] > 0
            assert reference[name]["pool_tokens"] == 0
        announced = EngineSays(ports[1]).copies["STORAGE"].keys()
    # Two staging slots: a load takes many steps, so that a test can act while it is under way.
    options = engine_options(llama, f"file://{pool}", settings={"staging_nbytes": 1 << 20})
    with passing("second", folder, options) as second:
        yield Pair(pool, second, reference, announced)


def _same(pair: Pair, name: str, answer: dict[str, Any]) -> bool:
    return bool(answer["tokens"] == pair.reference[name]["tokens"])


def test_second_engine_loads_what_the_first_computed(pair: Pair) -> None:
    answer = pair.ask("hit")
    full_blocks = (len(PROMPTS["hit"]) - 1) // BLOCK_TOKENS
    assert answer["pool_tokens"] == full_blocks * BLOCK_TOKENS
    assert answer["cached_tokens"] == answer["pool_tokens"]
    assert _same(pair, "hit", answer)


def test_corrupted_payload_with_a_right_checksum_changes_the_output(pair: Pair) -> None:
    """The control: without it, identical outputs would prove nothing."""
    for record in records(pair.pool, PROMPTS["corrupted"]):
        corrupt(record, keep_checksum=False)
    answer = pair.ask("corrupted")
    assert answer["pool_tokens"] > 0
    assert not _same(pair, "corrupted", answer)


def test_damaged_record_is_a_miss_and_the_output_is_identical(pair: Pair) -> None:
    damaged = records(pair.pool, PROMPTS["flipped"])[2]
    corrupt(damaged, keep_checksum=True)
    content = damaged.read_bytes()
    before = pair.metrics()
    answer = pair.ask("flipped")
    assert _same(pair, "flipped", answer)
    failed = "kvpool_load_requests_total/missing"
    assert pair.metrics()[failed] == before.get(failed, 0) + 1
    assert not damaged.exists() or damaged.read_bytes() != content, "a damaged record is deleted"


def test_missing_tail_is_computed_and_the_rest_is_loaded(pair: Pair) -> None:
    blocks = records(pair.pool, PROMPTS["halved"])
    half = len(blocks) // 2
    for record in blocks[half:]:
        record.unlink()
    answer = pair.ask("halved")
    assert answer["pool_tokens"] == half * BLOCK_TOKENS
    assert _same(pair, "halved", answer)


def _delete(pair: Pair, found: list[Path]) -> None:
    for record in found[2:]:
        record.unlink(missing_ok=True)


def _has_stored_all(pair: Pair) -> bool:
    """Whether another request finds nothing to be stored any more."""
    stored = "kvpool_stored_blocks_total"
    before = pair.metrics().get(stored, 0)
    pair.second.generate(prompt(400, 60), 1)  # less than a block
    return pair.metrics().get(stored, 0) == before


def _replace_folder(pair: Pair, found: list[Path]) -> None:
    """Every further open fails with ENOTDIR: a fault, not a miss."""
    blocks = pair.pool / "blocks"
    blocks.rename(pair.pool / "aside")
    blocks.write_bytes(b"")


@pytest.mark.parametrize(
    ("name", "damage", "causes"),
    [("gone", _delete, {"missing"}), ("replaced", _replace_folder, {"store_unavailable", "missing"})],
)
def test_pool_lost_while_a_load_is_in_flight(
    pair: Pair, name: str, damage: Callable[[Pair, list[Path]], None], causes: set[str]
) -> None:
    """The worker is held while its blocks go: the pool was asked and said yes, and the load finds them gone."""
    found = records(pair.pool, LONG[name])
    # Steps that store what the request before computed would keep the core from asking.
    assert eventually(lambda: _has_stored_all(pair))
    before = pair.metrics()
    with held_worker(pair.second) as core:
        looked_up = found[-1].stat().st_mtime_ns
        pair.second.send({"do": "generate", "tokens": LONG[name], "max_tokens": GENERATED_TOKENS})
        asked = eventually(lambda: _touched_since(found[-1], looked_up) and rests(core))
        if asked:
            damage(pair, found)
    try:
        answer = pair.second.receive(60)
    finally:
        aside = pair.pool / "aside"
        if aside.exists():
            blocks = pair.pool / "blocks"
            if blocks.is_file():
                blocks.unlink()
            else:
                shutil.rmtree(blocks, ignore_errors=True)
            aside.rename(blocks)
    assert asked, "no lookup while the worker was held"
    assert _same(pair, name, answer)
    after = pair.metrics()
    ended = {key: count - before.get(key, 0) for key, count in after.items() if "kvpool_load_requests" in key}
    failed = [f"kvpool_load_requests_total/{cause}" for cause in causes]
    assert sum(ended.get(key, 0) for key in failed) == 1, f"the load was not under way: {ended}"


def _touched_since(record: Path, time_ns: int) -> bool:
    return record.stat().st_mtime_ns > time_ns


@contextlib.contextmanager
def _slowed(process: int) -> Iterator[None]:
    """Let a process run for about a fiftieth of the time."""
    ended = threading.Event()

    def pulse() -> None:
        while not ended.is_set():
            os.kill(process, signal.SIGSTOP)
            ended.wait(0.05)
            os.kill(process, signal.SIGCONT)
            time.sleep(0.001)

    thread = threading.Thread(target=pulse, name="pulse")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_aborted_load_leaks_nothing(pair: Pair) -> None:
    """Threads and descriptors are counted; with two staging slots, one that leaked would end all later loads."""
    driver, worker = pair.second.process_id, process_named(pair.second, "VLLM::Worker")
    pair.second.generate(prompt(499, 60), 1)  # an engine opens some files with its first request
    before = _held(driver)
    last = records(pair.pool, LONG["aborted"])[-1]
    ended = "kvpool_load_requests_total/cancelled"
    cancelled = pair.metrics().get(ended, 0)
    for attempt in range(10):  # the load may end before the abort arrives
        # A load that has ended leaves its blocks to the engine, which would not ask for them again.
        assert eventually(lambda: call(pair.second, "reset_prefix_cache"))
        begun = functools.partial(_has_read, worker, _read_nbytes(worker) + last.stat().st_size)
        aborting = pair.pool.parent / f"abort{attempt}"
        with _slowed(worker):  # its load takes 16 steps
            pair.second.send({"do": "abort", "tokens": LONG["aborted"], "once": str(aborting)})
            assert eventually(begun), "no load"
            aborting.touch()
            assert pair.second.receive(60) == {"aborted": True}
        pair.second.generate(prompt(500 + attempt, 60), 1)  # an idle engine does not report
        if pair.metrics().get(ended, 0) >= cancelled + 2:
            break
    assert pair.metrics().get(ended, 0) > cancelled, "no load was under way when its request was aborted"
    assert eventually(lambda: _held(driver) == before), (before, _held(driver))
    answer = pair.ask("after abort")
    assert answer["cached_tokens"] == (len(PROMPTS["after abort"]) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert _same(pair, "after abort", answer)


def _has_read(process: int, nbytes: int) -> bool:
    return _read_nbytes(process) >= nbytes


def _read_nbytes(process: int) -> int:
    """What a process has read so far, of any file."""
    said = dict(line.split(": ") for line in Path(f"/proc/{process}/io").read_text().splitlines())
    return int(said["rchar"])


def _held(process: int) -> tuple[int, int]:
    """(threads, descriptors) of everything below the driver: the engine core and its worker."""
    processes = processes_below(process)
    assert len(processes) >= 2, "the engine has a core and a worker"
    threads = sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in processes)
    return threads, sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in processes)


def test_events_say_what_is_in_the_pool(pair: Pair) -> None:
    """Every full block of a prompt is announced, under the hash that the client library computes."""
    hashes = BlockHasher(BLOCK_TOKENS).hashes64(PROMPTS["hit"])
    wanted = {int.from_bytes(hashes[at : at + 8], "little") for at in range(0, len(hashes), 8)}
    assert len(wanted) == len(PROMPTS["hit"]) // BLOCK_TOKENS
    assert wanted <= pair.announced
