"""The capacity of a directory stands in it: one process's URL is no word for the others."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kvpool import open_store
from kvpool.store.file import FileStore
from kvpool.text import MAX_NBYTES
from tests.support.conformance import MIB, keys
from tests.support.deadlines import eventually
from tests.support.file_record import held_nbytes
from tests.support.file_user import record_files, run_user


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "pool"


def held(root: Path) -> int:
    return sum(held_nbytes(path) for path in record_files(root))


def test_another_capacity_than_the_pools_evicts_nothing_and_is_told(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        open_store(f"file://{root}?capacity=40MiB") as first,
        open_store(f"file://{root}?capacity=40MiB") as second,
    ):
        first.put_many(keys(30), [bytes(MIB)] * 30)
        assert caplog.messages == []
        with open_store(f"file://{root}?capacity=8MiB") as third:
            assert sum(third.contains_many(keys(30))) == 30
            assert third.put_many(keys(31)[30:], [bytes(MIB)]) == [True]
            assert third.counters()["evicted"] == 0
            assert [one.capacity_nbytes for one in third.usage()] == [40 * MIB]
        assert sum(second.contains_many(keys(31))) == 31
    (line,) = caplog.messages
    assert "its capacity is 40MiB for all its processes, and not the 8MiB of this URL" in line
    assert "kvpool capacity changes the pool's" in line


@pytest.mark.parametrize(
    ("query", "told"),
    [("?capacity=64MiB", "its capacity is 4MiB for all its processes, and not the 64MiB"), ("", "")],
)
def test_the_pools_capacity_holds_and_a_larger_one_is_told(
    root: Path, caplog: pytest.LogCaptureFixture, query: str, told: str
) -> None:
    open_store(f"file://{root}?capacity=4MiB").close()
    with open_store(f"file://{root}{query}") as store:
        store.put_many(keys(10), [bytes(MIB)] * 10)
        assert held(root) <= 4 * MIB
    assert [told in line for line in caplog.messages] == [True] * bool(told)


def test_a_changed_capacity_is_followed_by_processes_that_have_the_pool_open(root: Path) -> None:
    with FileStore(str(root), 8 * MIB, 1) as store, FileStore(str(root), None, 1) as operator:
        store.put_many(keys(20), [bytes(MIB)] * 20)
        assert 6 * MIB < held(root) <= 8 * MIB
        operator.set_capacity(16 * MIB)
        store.put_many(keys(20), [bytes(MIB)] * 20)
        assert 8 * MIB < held(root) <= 16 * MIB, "a put beyond the old one reads the new one before it evicts"
        operator.set_capacity(3 * MIB)

        def shrunk() -> bool:
            assert store.put_many(keys(21)[20:], [bytes(1000)]) == [True]
            return held(root) <= 3 * MIB

        assert eventually(shrunk)
    with FileStore(str(root), 8 * MIB, 1) as store:
        assert store.capacity_nbytes == 3 * MIB


def test_a_smaller_capacity_holds_at_the_next_opening(root: Path) -> None:
    with FileStore(str(root), 8 * MIB, 1) as store:
        store.put_many(keys(6), [bytes(MIB)] * 6)
        store.set_capacity(3 * MIB)
    with FileStore(str(root), 8 * MIB, 1) as store:
        assert held(root) <= 3 * MIB
        assert sum(store.contains_many(keys(6))) == 2


@pytest.mark.parametrize(
    "content", [None, b"", b"0\n", b"1\n", b"1048575\n", b"-5\n", b"9223372036854775807\n",
                b"99999999999999999999\n", b"8MiB\n", b"8388608", b"\xff\xfe\n", b"\0" * 5000],
)  # fmt: skip
def test_a_pool_without_a_capacity_keeps_what_it_holds(root: Path, content: bytes | None) -> None:
    """As an older kvpool left it, or damaged."""
    with FileStore(str(root), 64 * MIB, 1) as store:
        store.put_many(keys(20), [bytes(MIB)] * 20)
    nbytes = held(root)
    (root / "capacity").unlink()
    if content is not None:
        (root / "capacity").write_bytes(content)
    with FileStore(str(root), None, 1) as store:
        assert store.capacity_nbytes is None
    with FileStore(str(root), 8 * MIB, 1) as store:
        assert held(root) == nbytes, "the first one's word evicts nothing of the others"
        assert store.capacity_nbytes == nbytes
        assert store.put_many(keys(21)[20:], [bytes(MIB)]) == [True]
        assert held(root) <= nbytes


def test_a_pool_without_a_capacity_gets_the_first_processs(root: Path) -> None:
    with FileStore(str(root), 64 * MIB, 1) as store:
        store.put_many(keys(3), [bytes(MIB)] * 3)
        (root / "capacity").unlink()
        with FileStore(str(root), 32 * MIB, 1) as another:
            assert another.capacity_nbytes == store.capacity_nbytes == 32 * MIB
    assert (root / "capacity").read_text().startswith(f"{32 * MIB}\n")


@pytest.mark.parametrize("kind", ["a folder", "a link", "a pipe"])
def test_what_stands_in_the_place_of_the_capacity_is_not_followed_nor_waited_for(
    root: Path, tmp_path: Path, kind: str
) -> None:
    FileStore(str(root), 8 * MIB, 1).close()
    (root / "capacity").unlink()
    (tmp_path / "elsewhere").write_text(f"{MIB}\n")
    if kind == "a folder":
        (root / "capacity").mkdir()
    elif kind == "a link":
        (root / "capacity").symlink_to(tmp_path / "elsewhere")
    else:
        os.mkfifo(root / "capacity")
    with FileStore(str(root), 4 * MIB, 1) as store:
        assert store.put_many(keys(10), [bytes(MIB)] * 10) == [True] * 10
        assert held(root) <= 4 * MIB
    assert (tmp_path / "elsewhere").read_text() == f"{MIB}\n"


def test_an_index_writes_no_capacity_and_evicts_by_none(root: Path) -> None:
    with FileStore(str(root), MAX_NBYTES, 1) as index:
        assert index.capacity_nbytes is None
        with FileStore(str(root), 4 * MIB, 1) as store:
            store.put_many(keys(10), [bytes(MIB)] * 10)
        assert [one.capacity_nbytes for one in index.usage()] == [4 * MIB]


def test_processes_of_several_capacities_agree_on_one(root: Path) -> None:
    """They open it at once: whoever is first wins, and nobody keeps to another one."""
    users = [
        run_user("fill_own", str(root), str(number * 1000), str((4 + number) * MIB)) for number in range(4)
    ]
    outs = [user.communicate(timeout=120) for user in users]
    assert [user.returncode for user in users] == [0] * 4, outs
    with FileStore(str(root), None, 1) as store:
        assert store.capacity_nbytes in [(4 + number) * MIB for number in range(4)]
        assert held(root) <= store.capacity_nbytes


def test_a_pool_in_use_is_not_old_to_programs_that_clean_up_by_age(root: Path) -> None:
    """Its marker was read when a process began, and never again: without it no later process took the directory."""
    open_store(f"file://{root}?capacity=4MiB").close()
    ago_s = time.time() - 20 * 86400
    lasting = [root / "kvpool-pool", root / "capacity"]
    for path in lasting:
        os.utime(path, (ago_s, ago_s))
    with open_store(f"file://{root}?capacity=4MiB") as store:
        assert store.put_many(keys(1), [bytes(MIB)]) == [True]
    assert [path for path in lasting if path.stat().st_mtime < ago_s + 86400] == []
