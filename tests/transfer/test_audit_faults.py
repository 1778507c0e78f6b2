"""What hangs or fails in an audit holds nothing but itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kvpool import _native
from kvpool.transfer import audit as audit_module
from kvpool.transfer.audit import Ended
from tests.support.audits import Bench, block, reasons
from tests.support.deadlines import eventually
from tests.support.scripted_store import key


@pytest.fixture
def bench() -> Iterator[Bench]:
    at = Bench()
    yield at
    at.mover.close()


def test_a_read_that_never_ends_holds_its_slots_and_no_audit(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "GET_TIMEOUT_S", 0.01)
    monkeypatch.setattr(audit_module, "GRACE_S", 0.01)
    bench.fill(3, seed=1)
    bench.put(1, 3)
    bench.mover.audit([block(1, 3)], [7])
    bench.device.go_on()
    found = Ended()

    def over() -> bool:
        found.compared.extend(bench.mover.poll_audits().compared)
        return bool(found.compared)

    assert eventually(over)
    assert reasons(found) == [(7, "store_unavailable")]
    (read,) = bench.store.under_way
    assert read.cancelled
    assert bench.mover.slots_in_use == 2, "late bytes go nowhere else"
    bench.store.end_all()
    assert bench.mover.poll_audits() == Ended()
    assert bench.mover.slots_in_use == 0


def test_a_fault_of_a_comparison_ends_that_audit_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    compare, faults = _native.distances, [MemoryError("planted")]

    def distances(*arguments: object) -> object:
        if faults:
            raise faults.pop()
        return compare(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(audit_module, "_native", SimpleNamespace(distances=distances))
    bench.fill(3, seed=1)
    for number in (1, 2):
        bench.put(number, 3)
    bench.mover.audit([block(1, 3), block(2, 3)], [7, 8])
    assert sorted(reasons(bench.ended())) == [(7, "no_room"), (8, "")]
    assert bench.mover.slots_in_use == 0


def test_without_a_thread_nothing_is_compared_or_deleted_and_nothing_fails(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    bench.put(1, 3)
    bench.mover.audit([block(1, 3)], [7])
    assert reasons(bench.ended()) == [(7, "no_room")]
    bench.mover.auditor.delete([key(1, 0)])
    assert bench.mover.slots_in_use == 0


def test_a_store_that_hangs_at_a_delete_holds_neither_audits_nor_the_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, ended = threading.Event(), threading.Event()

    def delete_many(keys: list[str]) -> None:
        go_on.wait(60)
        ended.set()

    monkeypatch.setattr(bench.store, "delete_many", delete_many, raising=False)
    bench.fill(3, seed=1)
    bench.put(1, 3)
    bench.mover.auditor.delete([key(9, 0)])
    bench.mover.audit([block(1, 3)], [7])
    assert reasons(bench.ended()) == [(7, "")]
    bench.mover.close()
    assert not ended.is_set()
    go_on.set()
