"""The worker's half: outputs from the pool reach the engine's cache, and what it computes is stored or compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kvpool.config import EncoderConfig
from kvpool.store import open_store
from kvpool.vllm.encoder.plan import (
    ComparedOutput,
    EncoderMetadata,
    EncoderWorkerMetadata,
    Loaded,
    Shape,
    Stored,
)
from kvpool.vllm.encoder.worker import EncoderWorker
from tests.support.deadlines import eventually
from tests.support.encoder import WRITER, key

SHAPE = Shape(8, 4, "bfloat16")
CPU = torch.device("cpu")
NAME = "a" * 64


@pytest.fixture
def pool(tmp_path: Path) -> str:
    return f"file://{tmp_path}/pool"


@pytest.fixture
def make(pool: str) -> Iterator[Callable[..., EncoderWorker]]:
    made: list[EncoderWorker] = []

    def worker(stores: bool = True, **settings: object) -> EncoderWorker:
        made.append(EncoderWorker(EncoderConfig.load({"pool": pool, **settings}, {}), stores=stores))
        return made[-1]

    yield worker
    for one in made:
        one.close()


def output(shape: Shape = SHAPE, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape.rows, shape.width, generator=draw).to(getattr(torch, shape.dtype))


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def record(tensor: torch.Tensor) -> np.ndarray:
    return np.frombuffer(bytearray(as_bytes(tensor)), np.uint8)


def in_pool(pool: str, name: str = NAME) -> bytes | None:
    with open_store(pool) as store:
        found = bytearray(SHAPE.rows * SHAPE.width * 2)
        return bytes(found) if store.get_many_into([key(name)], [found])[0] else None


def reports(worker: EncoderWorker) -> Callable[[], EncoderWorkerMetadata]:
    """All of its reports so far, as one."""
    whole = EncoderWorkerMetadata()

    def take() -> EncoderWorkerMetadata:
        nonlocal whole
        if (report := worker.take_report()) is not None:
            whole = whole.aggregate(report)
        return whole

    return take


def test_outputs_of_the_pool_are_in_the_cache_to_the_bit(make: Callable[..., EncoderWorker]) -> None:
    wanted, cache = output(), {}
    step = EncoderMetadata(loads={NAME: Loaded(record(wanted), SHAPE)})
    for stores in (True, False):
        make(stores=stores).load(step, cache, CPU)
        assert as_bytes(cache[NAME]) == as_bytes(wanted)
        assert cache[NAME].shape == (8, 4)


def test_memory_between_processes_is_not_kept(make: Callable[..., EncoderWorker]) -> None:
    """vLLM's queue may write there again."""
    wanted, cache = output(), {}
    shared = bytearray(as_bytes(wanted))
    payload = np.frombuffer(memoryview(shared), np.uint8)
    make().load(EncoderMetadata(loads={NAME: Loaded(payload, SHAPE)}), cache, CPU)
    shared[:] = bytes(len(shared))
    assert as_bytes(cache[NAME]) == as_bytes(wanted)


def test_a_step_is_loaded_once(make: Callable[..., EncoderWorker]) -> None:
    worker, cache = make(), {}
    step = EncoderMetadata(loads={NAME: Loaded(record(output()), SHAPE)})
    worker.load(step, cache, CPU)
    cache.clear()  # the engine has evicted it
    worker.load(step, cache, CPU)
    assert cache == {}


def test_what_is_computed_is_stored_behind_the_step(make: Callable[..., EncoderWorker], pool: str) -> None:
    worker, computed = make(), output()
    step = EncoderMetadata(stores={NAME: Stored(key(NAME), SHAPE)}, writer=WRITER)
    worker.load(step, {}, CPU)
    worker.save(step, {NAME: computed}, NAME)
    expected = as_bytes(computed)
    computed.zero_()  # the engine may do with its memory what it likes
    assert eventually(lambda: in_pool(pool) == expected)
    take = reports(worker)
    assert eventually(lambda: take().samples.get("kvpool_encoder_stored_outputs_total") == 1)
    with open_store(pool) as store:
        assert [one.writer for blocks in store.scan_writers() for one in blocks] == [WRITER]
    worker.save(step, {NAME: output(seed=1)}, NAME)
    skipped = "kvpool_encoder_store_skipped_outputs_total/already_there"
    assert eventually(lambda: take().samples.get(skipped) == 1)
    assert in_pool(pool) == expected


@pytest.mark.parametrize(
    "computed",
    [
        output(SHAPE._replace(rows=9)),
        output(SHAPE._replace(width=6)),
        output(SHAPE._replace(dtype="float32")),
        torch.empty(0, 4, dtype=torch.bfloat16),
        torch.zeros(2, 4, 4, dtype=torch.bfloat16),
    ],
    ids=["rows", "width", "type", "nothing", "dimensions"],
)
def test_an_output_of_another_shape_is_not_stored(
    make: Callable[..., EncoderWorker], pool: str, computed: torch.Tensor
) -> None:
    worker = make()
    worker.save(EncoderMetadata(stores={NAME: Stored(key(NAME), SHAPE)}), {NAME: computed}, NAME)
    report = worker.take_report()
    assert report is not None
    assert report.samples == {"kvpool_encoder_store_skipped_outputs_total/unusable": 1}
    other = computed.dim() == 2 and (computed.shape[1] != 4 or computed.dtype != torch.bfloat16)
    assert (NAME in report.forms) is other
    worker.close()
    assert in_pool(pool) is None


def test_an_output_of_which_the_engine_says_nothing_is_taken_with_the_next_step(
    make: Callable[..., EncoderWorker],
) -> None:
    """As of an engine that only loads, with vLLM's V2 runner: it audits, and learns how wide its outputs are."""
    worker, computed = make(), output()
    take = reports(worker)
    step = EncoderMetadata(stores={NAME: Stored("", SHAPE, record(computed), WRITER), "b": Stored("", SHAPE)})
    cache: dict[str, torch.Tensor] = {}
    worker.load(step, cache, CPU)
    cache |= {NAME: computed, "b": output(SHAPE._replace(width=12))}
    worker.load(EncoderMetadata(), cache, CPU)
    assert eventually(lambda: [one.identifier for one in take().compared] == [NAME])
    assert take().forms == {"b": (12, "bfloat16")}
    worker.load(EncoderMetadata(), cache, CPU)
    assert worker.take_report() is None, "once"


def test_nothing_is_stored_that_nobody_asked_for(make: Callable[..., EncoderWorker], pool: str) -> None:
    worker, rank = make(), make(stores=False)
    worker.save(EncoderMetadata(), {NAME: output()}, NAME)
    rank.save(EncoderMetadata(stores={NAME: Stored(key(NAME), SHAPE)}), {NAME: output()}, NAME)
    for one in (worker, rank):
        one.close()
    assert in_pool(pool) is None


def test_host_memory_is_bounded(make: Callable[..., EncoderWorker], monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make(staging_nbytes=1 << 20)
    monkeypatch.setattr(worker, "_behind", lambda *_: None)  # a store that never ends
    shape = Shape(1 << 18, 1, "bfloat16")  # half of it
    step = EncoderMetadata(stores={f"{number}": Stored(key(f"{number}"), shape) for number in range(3)})
    for name in step.stores:
        worker.save(step, {name: output(shape)}, name)
    report = worker.take_report()
    assert report is not None
    assert report.samples == {"kvpool_encoder_store_skipped_outputs_total/staging_full": 1}
    monkeypatch.undo()
    worker._waiting_nbytes = 0


def test_an_output_is_compared_with_the_record(make: Callable[..., EncoderWorker]) -> None:
    worker, computed = make(), output()
    take = reports(worker)
    for name, theirs in (("same", computed), ("other", output(seed=1))):
        audit = Stored("", SHAPE, record(theirs), WRITER)
        worker.save(EncoderMetadata(stores={name: audit}), {name: computed}, name)
    assert eventually(lambda: len(take().compared) == 2)
    same, other = take().compared
    assert same == ComparedOutput("same", "", WRITER, "bfloat16", 0.0, same.norm)
    assert other.difference > 0.5 * other.norm > 0


def test_an_audit_that_cannot_be_made_is_reported(make: Callable[..., EncoderWorker]) -> None:
    worker = make()
    audit = Stored("", SHAPE, record(output()), WRITER)
    worker.save(EncoderMetadata(stores={NAME: audit}), {NAME: output(SHAPE._replace(rows=9))}, NAME)
    report = worker.take_report()
    assert report is not None
    assert report.compared == [ComparedOutput(NAME, "gone", WRITER)]


def test_wrong_records_are_deleted(make: Callable[..., EncoderWorker], pool: str) -> None:
    with open_store(pool) as store:
        assert store.put_many([key(NAME)], [record(output())]) == [True]
    make().load(EncoderMetadata(wrong=[key(NAME)]), {}, CPU)
    assert eventually(lambda: in_pool(pool) is None)


def test_a_silent_change_deletes_what_was_stored_since_the_last_look(
    make: Callable[..., EncoderWorker], pool: str
) -> None:
    worker = make()
    step = EncoderMetadata(stores={NAME: Stored(key(NAME), SHAPE)})
    worker.save(step, {NAME: output()}, NAME)
    assert eventually(lambda: in_pool(pool) is not None)
    worker.load(EncoderMetadata(silent=True), {}, CPU)
    assert eventually(lambda: in_pool(pool) is None)


def test_a_pool_that_cannot_be_opened_is_told(make: Callable[..., EncoderWorker], tmp_path: Path) -> None:
    (tmp_path / "pool").write_text("a file")
    worker = make()
    report = worker.take_report()
    assert report is not None
    assert report.broken
    cache: dict[str, torch.Tensor] = {}
    step = EncoderMetadata({NAME: Loaded(record(output()), SHAPE)}, {NAME: Stored(key(NAME), SHAPE)})
    worker.load(step, cache, CPU)
    worker.save(step, cache, NAME)
    assert NAME in cache, "a promise is kept"
