"""Records that are found wrong: those of a writer who is put away count as missing, and all are deleted, soon."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvpool.key.key import writer_name
from kvpool.transfer import audit as audit_module
from kvpool.transfer.job import Moved
from tests.support.audits import ELSEWHERE, Bench, block
from tests.support.deadlines import eventually
from tests.support.scripted_store import key


@pytest.fixture
def bench() -> Iterator[Bench]:
    at = Bench()
    yield at
    at.store.end_all()
    at.mover.close()


ANOTHER = writer_name("a third engine")


@pytest.mark.parametrize("wrong", [(0,), (1,), (0, 1)])
def test_records_of_a_writer_that_is_put_away_are_missing_and_are_deleted(
    bench: Bench, wrong: tuple[int, ...]
) -> None:
    for number in (0, 1):
        bench.fill(3 + number, seed=number)
        bench.put(number, 3 + number, writer=ELSEWHERE if number in wrong else ANOTHER)
    before = [layer.clone() for layer in bench.caches[0]]
    bench.mover.put_away = frozenset({ELSEWHERE})
    bench.mover.load("job", [block(0, 9), block(1, 10)], timeout_s=60, max_s=60)
    loads: list[Moved] = []

    def over() -> bool:
        bench.device.go_on()
        bench.store.end_all()
        bench.mover.poll_audits()
        loads.extend(bench.mover.poll().loads)
        return bool(loads)

    assert eventually(over)
    (load,) = loads
    assert (load.ok, load.cause, load.missing) == (False, "missing", list(wrong))
    assert load.writers == ({ELSEWHERE} if len(wrong) == 2 else {ELSEWHERE, ANOTHER})
    assert all(torch.equal(now, then) for now, then in zip(bench.caches[0], before, strict=True))
    right = {key(number, 0) for number in (0, 1) if number not in wrong}
    assert eventually(lambda: over() and bench.store.records.keys() == right)
    bench.mover.put_away = frozenset()
    bench.put(0, 3)
    bench.put(1, 4)
    bench.mover.load("again", [block(0, 9), block(1, 10)], timeout_s=60, max_s=60)
    loads.clear()
    assert eventually(over)
    assert loads[0].ok


def test_deletes_wait_for_nobody_and_no_more_wait_than_so_many(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "MAX_DELETED", 2)
    for number in range(4):
        bench.put(number, 3)
    keys = [key(number, 0) for number in range(4)]
    bench.mover.auditor.delete(keys[:1])
    bench.mover.auditor.delete(keys[1:3])
    bench.mover.auditor.delete(keys[3:])

    def over() -> bool:
        bench.store.end_all()
        return len(bench.store.records) == 2

    assert eventually(over)
    bench.mover.auditor.later(lambda: None).result(60)
    assert list(bench.store.records) == keys[2:]
    bench.mover.auditor.delete(keys[2:])
    assert eventually(lambda: bench.store.end_all() is None and not bench.store.records)


def test_a_delete_that_fails_is_said_and_no_more(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.put(1, 3)
    bench.mover.auditor.delete([key(1, 0)])
    assert eventually(lambda: bool(bench.store.under_way))
    bench.store.end(fault=True)
    bench.mover.auditor.later(lambda: None).result(60)
    assert "could not delete 1 record" in caplog.text
    assert bench.store.records
