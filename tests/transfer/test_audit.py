"""Audits of the mover: what they find, what they touch, and that their slots come back however they end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvpool import _native
from kvpool.errors import StoreUnavailable
from kvpool.metrics import Counters
from kvpool.store import Store, open_store
from kvpool.store.batch import GRACE_S
from kvpool.transfer import BlockCopier, KVCacheMover
from kvpool.transfer import audit as audit_module
from kvpool.transfer.audit import GET_TIMEOUT_S, Compared, Ended
from kvpool.transfer.memory import LOAD_RESERVE
from tests.support.audits import BLOCKS, ELSEWHERE, NUMBERS, Bench, block, reasons
from tests.support.deadlines import eventually
from tests.support.file_record import read_record, write_record
from tests.support.scripted_store import ScriptedBatch, key


@pytest.fixture
def bench() -> Iterator[Bench]:
    at = Bench()
    yield at
    at.mover.close()


def far(one: Compared) -> list[float]:
    """By layer; behind them stand the norms."""
    return [layer[-2] for layer in one.distances]


def test_a_record_that_is_what_the_engine_computes_is_at_no_distance(bench: Bench) -> None:
    bench.fill(3, seed=1)
    bench.put(1, 3)
    bench.mover.audit([block(1, 3)], [7])
    ended = bench.ended()
    assert ended.staged == [7]
    (one,) = ended.compared
    assert (one.tag, one.why, one.writer) == (7, "", ELSEWHERE)
    norms = [float((layer[3].double() ** 2).sum()) for layer in bench.caches[0]]
    assert far(one) == [0.0, 0.0]
    assert [layer[-1] for layer in one.distances] == pytest.approx(norms)
    assert bench.mover.slots_in_use == 0


def test_a_record_that_differs_says_how_far_in_which_layer(bench: Bench) -> None:
    bench.fill(3, seed=1)
    bench.put(1, 3)
    bench.caches[0][1][3, 5] += 2.0  # what the engine computes
    bench.mover.audit([block(1, 3)], [7])
    (one,) = bench.ended().compared
    assert not one.why
    assert far(one) == [0.0, pytest.approx(4.0)]
    assert bench.mover.slots_in_use == 0


@pytest.mark.parametrize("element", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_elements_are_compared_as_what_they_are(element: str) -> None:
    bench = Bench(element)
    bench.fill(3, seed=1)
    bench.put(1, 3)
    bench.fill(3, seed=2)
    theirs = torch.frombuffer(bytearray(bench.store.records[key(1, 0)]), dtype=bench.caches[0][0].dtype)
    apart = [
        float(((theirs.view(2, NUMBERS)[at].double() - layer[3].double()) ** 2).sum())
        for at, layer in enumerate(bench.caches[0])
    ]
    bench.mover.audit([block(1, 3)], [7])
    (one,) = bench.ended().compared
    assert far(one) == pytest.approx(apart)
    bench.mover.close()


def test_the_blocks_of_a_record_are_summed_by_layer() -> None:
    bench = Bench(blocks_per_record=3)
    for block_id in (2, 3, 4):
        bench.fill(block_id, seed=block_id)
    bench.put(1, 2, 3, 4)
    bench.caches[0][0][2, 0] += 1.0
    bench.caches[0][0][4, 0] += 2.0
    bench.mover.audit([block(1, 2, 3, 4)], [7])
    (one,) = bench.ended().compared
    assert far(one) == [pytest.approx(5.0, rel=1e-4), 0.0]
    bench.mover.close()


def test_each_group_is_read_by_its_own_elements() -> None:
    bench = Bench("float32", "bfloat16")
    bench.fill(3, seed=1)
    bench.fill(4, seed=2, group=1)
    bench.put(1, 3)
    bench.put(1, 4, group=1)
    bench.caches[1][0][4] = 0.0
    bench.mover.audit([block(1, 3), block(1, 4, group=1)], [7, 8])
    found = {one.tag: one for one in bench.ended().compared}
    assert far(found[7]) == [0.0, 0.0]
    assert far(found[8])[0] > 1.0
    assert far(found[8])[1] == 0.0
    assert bench.mover.slots_in_use == 0
    bench.mover.close()


def test_a_block_that_is_not_in_the_pool_is_missing(bench: Bench) -> None:
    bench.mover.audit([block(1, 3)], [7])
    ended = bench.ended()
    assert (ended.staged, reasons(ended)) == ([7], [(7, "missing")])
    assert bench.mover.slots_in_use == 0


@pytest.mark.parametrize("takes_it", [True, False])
def test_a_store_that_is_away_says_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, takes_it: bool
) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise StoreUnavailable("closed")

    if not takes_it:
        monkeypatch.setattr(bench.store, "submit_get", refuse)
    bench.put(1, 3)
    bench.mover.audit([block(1, 3)], [7])
    ended = bench.ended(fault=True)
    assert (ended.staged, reasons(ended)) == ([7], [(7, "store_unavailable")])
    assert bench.mover.slots_in_use == 0


def test_a_read_has_a_deadline(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    submit = bench.store.submit_get

    def note(*arguments: object, timeout_s: float) -> object:
        asked.append(timeout_s)
        return submit(*arguments, timeout_s=timeout_s)  # type: ignore[arg-type]

    monkeypatch.setattr(bench.store, "submit_get", note)
    bench.mover.audit([block(1, 3)], [7])
    bench.ended()
    assert asked == [GET_TIMEOUT_S]


def test_caches_without_numbers_are_not_compared_and_nothing_is_copied_or_read() -> None:
    for element in ("uint8", "int8"):
        bench = Bench(element)
        bench.mover.audit([block(1, 3)], [7])
        assert bench.mover.poll_audits() == Ended([7], [Compared(7, "no_numbers")])
        assert bench.mover.slots_in_use == 0
        assert not bench.gathers_under_way()
        bench.mover.close()


def test_audits_leave_the_slots_that_loads_need_and_take_no_more_than_there_are() -> None:
    bench = Bench(slots=8)
    reserve = int(8 * LOAD_RESERVE)
    for number in range(6):
        bench.put(number, 3)
    bench.mover.audit([block(number, 3) for number in range(6)], list(range(6)))
    assert bench.mover.slots_in_use == 8 - reserve, "of two slots each"
    at_once = bench.mover.poll_audits()
    assert at_once == Ended([3, 4, 5], [Compared(tag, "no_room") for tag in (3, 4, 5)])
    assert [one.why for one in bench.ended().compared] == ["", "", ""]
    assert bench.mover.slots_in_use == 0
    bench.mover.close()


def test_an_audit_without_two_free_slots_takes_none() -> None:
    bench = Bench(slots=2)
    bench.mover.audit([block(1, 3)], [7])
    assert bench.mover.poll_audits().compared == [Compared(7, "no_room")]
    assert bench.mover.slots_in_use == 0
    bench.mover.close()


def test_a_block_is_compared_as_the_step_before_leaves_it(bench: Bench) -> None:
    bench.fill(3, seed=1)
    bench.put(1, 3)
    bench.fill(3, seed=2)
    bench.device.engine.give(lambda: bench.fill(3, seed=1))  # the step computes it
    bench.mover.audit([block(1, 3)], [7])
    assert bench.mover.poll_audits() == Ended(), "neither staged nor compared before it is computed"
    assert far(bench.ended().compared[0]) == [0.0, 0.0]


def test_the_engine_may_overwrite_a_block_once_it_is_staged(bench: Bench) -> None:
    bench.fill(3, seed=1)
    bench.put(1, 3)
    bench.mover.audit([block(1, 3)], [7])
    assert bench.mover.poll_audits().staged == [], "the copy has not begun"
    assert bench.device.engine.go_on()
    assert bench.mover.poll_audits().staged == [], "nor ended"
    assert not bench.store.under_way, "nothing is read before"
    bench.device.go_on()
    assert bench.mover.poll_audits().staged == [7]
    bench.fill(3, seed=9)
    assert far(bench.ended().compared[0]) == [0.0, 0.0], "of what it held"


def test_audits_write_neither_the_cache_nor_the_pool(bench: Bench) -> None:
    for block_id in range(1, BLOCKS):
        bench.fill(block_id, seed=block_id)
    for number in range(3):
        bench.put(number, 5)  # 4 and 6 are not what the pool has
    before, records = [layer.clone() for layer in bench.caches[0]], dict(bench.store.records)
    bench.mover.audit([block(number, 4 + number) for number in range(3)], [0, 1, 2])
    assert len(bench.ended().compared) == 3
    assert all(torch.equal(now, then) for now, then in zip(bench.caches[0], before, strict=True))
    assert bench.store.records == records


def test_audits_hold_no_step_and_no_load_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    compare = _native.distances

    def slow(*arguments: object) -> object:
        assert go_on.wait(60)
        return compare(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(audit_module, "_native", SimpleNamespace(distances=slow))
    bench.fill(3, seed=1)
    bench.put(1, 3)
    bench.mover.audit([block(1, 3)], [7])
    bench.device.go_on()
    bench.mover.poll_audits()
    bench.store.end()
    bench.mover.poll_audits()  # hands it to the thread
    bench.mover.load("job", [block(1, 9)], timeout_s=60, max_s=60)
    bench.mover.poll()
    bench.store.end_all()
    bench.mover.poll()
    bench.device.go_on()
    assert [load.ok for load in bench.mover.poll().loads] == [True]
    assert bench.mover.poll_audits().compared == []
    go_on.set()
    assert len(bench.ended().compared) == 1


def test_a_cache_that_the_engine_takes_away_is_not_read_any_more(bench: Bench) -> None:
    bench.put(1, 3)
    bench.mover.audit([block(1, 3)], [7])
    assert not bench.mover.let_go(0.01), "its copy waits for a step"
    bench.device.go_on()
    assert bench.mover.let_go(0.01)
    assert bench.mover.auditor.copies == []
    assert bench.mover.poll_audits().staged == [7], "what ended meanwhile is still reported"
    assert [one.why for one in bench.ended().compared] == [""]


def reach(bench: Bench, steps: int) -> None:
    """Go so far in an audit: copied, read, answered, compared."""
    ways = (bench.device.go_on, bench.mover.poll_audits, bench.store.end_all, bench.mover.poll_audits)
    for go_on in ways[:steps]:
        go_on()


@pytest.mark.parametrize("steps", range(5))
def test_closed_in_the_midst_no_thread_stays_and_no_slot_that_nothing_uses(bench: Bench, steps: int) -> None:
    bench.fill(3, seed=1)
    bench.put(1, 3)
    bench.mover.audit([block(1, 3)], [7])
    reach(bench, steps)
    reads, copies = list(bench.store.under_way), bench.gathers_under_way()
    bench.mover.close()
    assert not [one for one in threading.enumerate() if one.name.startswith("kvpool-audit")]
    assert bench.mover.poll_audits().compared == []
    assert all(read.cancelled for read in reads)
    assert (bool(copies), len(reads)) == (steps == 0, steps == 2)
    assert bench.mover.slots_in_use == (2 if steps <= 2 else 0)


def test_close_waits_for_reads_that_never_end_together(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    waits_s: list[float] = []

    def wait(batch: ScriptedBatch, timeout_s: float) -> bool:
        waits_s.append(timeout_s)
        time.sleep(timeout_s)
        return False

    monkeypatch.setattr(ScriptedBatch, "wait", wait)
    for number in range(4):
        bench.put(number, 3)
    bench.mover.audit([block(number, 3) for number in range(4)], [0, 1, 2, 3])
    reach(bench, 2)
    assert len(bench.store.under_way) == 4
    bench.mover.close()
    assert len(waits_s) >= 4
    assert sum(waits_s) < 1.5 * GRACE_S
    assert bench.mover.slots_in_use == 8, "late bytes go nowhere else"


@pytest.mark.parametrize("far_too", [False, True])
def test_the_writer_is_the_one_that_the_record_names(tmp_path: Path, far_too: bool) -> None:
    url = [f"file://{tmp_path}/{pool}" for pool in (["near", "far"] if far_too else ["pool"])]
    caches = [torch.randn((BLOCKS, NUMBERS)) for _ in "ab"]
    with open_store(f"file://{tmp_path}/{'far' if far_too else 'pool'}") as writing:
        writing.writer = ELSEWHERE
        writing.put_many([key(1, 0)], [b"".join(layer[3].numpy().tobytes() for layer in caches)])
    with open_store(url) as store:
        there, missing = compare(store, caches, [1, 2])
        assert (there.why, there.writer, far(there)) == ("", ELSEWHERE, [0.0, 0.0])
        assert (missing.tag, missing.why, missing.writer) == (1, "missing", b"")


def compare(store: Store, caches: Sequence[torch.Tensor], numbers: Sequence[int]) -> list[Compared]:
    copier, counters = BlockCopier(caches), Counters()
    nbytes = 16 * copier.payload_nbytes
    mover = KVCacheMover(store, [copier], staging_nbytes=nbytes, max_store_nbytes_per_s=0, counters=counters)
    mover.audit([block(number, 3) for number in numbers], list(range(len(numbers))))
    found: list[Compared] = []

    def over() -> bool:
        found.extend(mover.poll_audits().compared)
        return len(found) == len(numbers)

    assert eventually(over)
    assert mover.slots_in_use == 0
    mover.close()
    return sorted(found, key=lambda one: one.tag)


def test_a_record_whose_bytes_are_not_its_checksums_is_missing_and_never_compared(tmp_path: Path) -> None:
    caches = [torch.randn((BLOCKS, NUMBERS)) for _ in "ab"]
    with open_store(f"file://{tmp_path}/pool") as store:
        store.put_many([key(1, 0)], [b"".join(layer[3].numpy().tobytes() for layer in caches)])
        (path,) = (tmp_path / "pool" / "blocks").glob("*/*")
        record = bytearray(read_record(path))
        record[5] ^= 1
        write_record(path, record)
        assert [one.why for one in compare(store, caches, [1])] == ["missing"]
