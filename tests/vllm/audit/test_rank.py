"""One rank's part of audits: what it reports, once, of all parts together, and the blocks that it keeps."""

from __future__ import annotations

import errno
import io
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from kvpool.vllm.audit import rank as rank_module
from kvpool.vllm.audit.rank import MAX_KEPT, MAX_WAITING, MAX_WRITES, RankAudits
from kvpool.vllm.plan import PoolWorkerMetadata
from tests.support.audits import ELSEWHERE, Bench, block
from tests.support.deadlines import eventually

pytestmark = [pytest.mark.vllm]

NAMES = [["layers.0", "layers.2"], ["layers.1", "layers.3"]]


@pytest.fixture
def bench() -> Iterator[Bench]:
    at = Bench("float32", "bfloat16", slots=32)
    for number in range(4):
        for group in (0, 1):
            at.fill(3 + number, seed=number, group=group)
            at.put(number, 3 + number, group=group)
    yield at
    at.mover.close()


@pytest.fixture
def rank(bench: Bench) -> RankAudits:
    return RankAudits(bench.mover, NAMES)


def over(bench: Bench, rank: RankAudits) -> PoolWorkerMetadata:
    report = PoolWorkerMetadata()

    def ended() -> bool:
        bench.device.go_on()
        bench.store.end_all()
        rank.report(report)
        return not rank._audits

    assert eventually(ended)
    return report


def test_parts_are_reported_by_layer_and_the_audit_when_all_have_ended(
    bench: Bench, rank: RankAudits
) -> None:
    bench.caches[1][1][3] += 1.0
    rank.begin(5, [block(0, 3), block(0, 3, group=1)])
    report = over(bench, rank)
    assert (report.audit_staged, report.audit_ended) == ({5: 1}, {5: 1})
    parts = report.audited[5]
    assert [part.why for part in parts] == ["", ""]
    assert {part.writer for part in parts} == {ELSEWHERE}
    found = {
        layer.name: (layer.element, layer.difference > 0, layer.norm > 0)
        for part in parts
        for layer in part.layers
    }
    assert found == {
        "layers.0": ("float32", False, True),
        "layers.1": ("bfloat16", False, True),
        "layers.2": ("float32", False, True),
        "layers.3": ("bfloat16", True, True),
    }


def test_it_is_staged_when_all_of_its_parts_are(bench: Bench, rank: RankAudits) -> None:
    rank.begin(5, [block(0, 3), block(0, 3, group=1)])
    report = PoolWorkerMetadata()
    bench.device.engine.go_on()
    gathers = bench.device.streams[0].stream
    gathers.go_on(1)
    rank.report(report)
    assert report.audit_staged == {}
    gathers.go_on(1)
    rank.report(report)
    assert (report.audit_staged, report.audit_ended) == ({5: 1}, {})
    assert over(bench, rank).audit_ended == {5: 1}


def test_several_audits_at_once_are_told_apart(bench: Bench, rank: RankAudits) -> None:
    for number in (1, 2, 3):
        rank.begin(number, [block(number, 3 + number)])
    rank.begin(4, [block(99, 3)])
    report = over(bench, rank)
    assert report.audit_staged == report.audit_ended == dict.fromkeys((1, 2, 3, 4), 1)
    assert {number: parts[0].why for number, parts in report.audited.items()} == {
        1: "",
        2: "",
        3: "",
        4: "missing",
    }


@pytest.mark.parametrize("steps", range(4))
def test_what_is_given_up_is_reported_once_as_staged_and_as_ended(
    bench: Bench, rank: RankAudits, steps: int
) -> None:
    rank.begin(5, [block(0, 3)])
    report = PoolWorkerMetadata()
    for go_on in [bench.device.go_on, lambda: rank.report(report), bench.store.end_all][:steps]:
        go_on()
    bench.mover.close()
    rank.give_up(report)
    rank.give_up(report)
    assert (report.audit_staged, report.audit_ended) == ({5: 1}, {5: 1})


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def test_the_blocks_of_a_finding_are_kept_where_they_are_wanted(bench: Bench, tmp_path: Path) -> None:
    rank = RankAudits(bench.mover, NAMES, str(tmp_path / "found"))
    theirs = bench.store.records[f"{block(1, 4).key}"]
    bench.fill(4, seed=77)
    rank.begin(5, [block(1, 4)])
    rank.begin(6, [block(2, 5)])
    over(bench, rank)
    rank.keep(5, "what is wrong", 0)
    rank.keep(5, "what is wrong", 0)
    rank.keep(99, "nobody knows of it", 0)
    assert eventually(lambda: len(kept(tmp_path / "found")) == 1)
    bench.mover.close()
    (path,) = kept(tmp_path / "found")
    found = {name: one.tobytes() for name, one in load_file(path).items()}
    assert found == {"ours.0": bench.payload(4), "pool.0": theirs}
    text = path.read_bytes()[:2000]
    for said in ("what is wrong", "layers.0 layers.2", ELSEWHERE.hex()):
        assert said.encode() in text


def test_no_payload_is_copied_where_nobody_wants_it(bench: Bench, rank: RankAudits) -> None:
    rank.begin(5, [block(1, 4)])
    over(bench, rank)
    assert not rank._payloads


def test_a_folder_and_the_memory_before_it_take_so_many(bench: Bench, tmp_path: Path) -> None:
    rank = RankAudits(bench.mover, NAMES, str(tmp_path))
    for number in range(MAX_KEPT + 3):
        rank.begin(number, [block(1, 4)])
        over(bench, rank)
        rank.keep(number, "", 0)
        assert eventually(lambda: all(write.done() for write in rank._writes))
    done = threading.Event()
    rank._keeper.submit(done.set)
    assert done.wait(60)
    assert len(kept(tmp_path)) == MAX_KEPT
    for number in range(MAX_WAITING + 3):
        rank.begin(number, [block(1, 4)])
        over(bench, rank)
    assert len(rank._payloads) == MAX_WAITING


def test_a_folder_that_cannot_be_written_costs_the_file_alone(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    rank = RankAudits(bench.mover, NAMES, str(tmp_path / "file"))
    for number in range(2):
        rank.begin(number, [block(1, 4)])
        assert over(bench, rank).audit_ended == {number: 1}
        rank.keep(number, "", 0)


def test_a_disk_that_is_full_leaves_no_half_a_file(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.FileIO):
        def write(self, data: object) -> int:
            super().write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

    rank = RankAudits(bench.mover, NAMES, str(tmp_path))
    monkeypatch.setattr(rank_module, "open", lambda path, mode, opener: Full(path, "xb"), raising=False)
    rank.begin(1, [block(1, 4)])
    over(bench, rank)
    rank.keep(1, "", 0)
    assert eventually(lambda: all(write.done() for write in rank._writes))
    assert [write.exception() for write in rank._writes] == [None]
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_hangs_holds_neither_audits_nor_the_end_and_little_memory(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, ended = threading.Event(), threading.Event()

    def write(*arguments: object) -> None:
        go_on.wait(60)
        ended.set()

    monkeypatch.setattr(rank_module, "_write", write)
    rank = RankAudits(bench.mover, NAMES, str(tmp_path))
    for number in range(3 * MAX_WRITES):
        rank.begin(number, [block(1, 4)])
        assert over(bench, rank).audit_ended == {number: 1}
        rank.keep(number, "", 0)
    assert len(rank._writes) == MAX_WRITES
    bench.mover.close()
    assert not ended.is_set()
    go_on.set()
