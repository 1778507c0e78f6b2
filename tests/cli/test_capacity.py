"""``kvpool capacity`` on real directories: what it shows, changes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpool import open_store
from kvpool.store.file import FileStore
from tests.support.command_line import kvpool, refused
from tests.support.conformance import MIB, keys


def test_a_capacity_is_shown_and_changed_while_workers_have_the_pool_open(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool"
    with open_store(f"{url}?capacity=16MiB") as worker:
        worker.put_many(keys(10), [bytes(MIB)] * 10)
        shown = kvpool("capacity", "--pool", url)
        assert shown.stdout == f"{tmp_path}/pool: capacity 16MiB, 10.0 MiB are held\n"
        changed = kvpool("capacity", "4MiB", "--pool", f"{url}?capacity=1GiB valkey://127.0.0.1:1")
        assert changed.stdout == f"{tmp_path}/pool: capacity 4MiB (it was 16MiB), 10.0 MiB are held\n"
        again = json.loads(kvpool("capacity", "4MiB", "--pool", url, "--json").stdout)
        assert again["capacity_nbytes"] == 4 * MIB
    with FileStore(f"{tmp_path}/pool", 16 * MIB, 1) as worker:
        assert worker.counters()["stored_nbytes"] <= 4 * MIB


def test_a_capacity_that_the_file_system_has_no_room_for_is_told(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool"
    open_store(f"{url}?capacity=16MiB").close()
    _, says = kvpool("capacity", "900TiB", "--pool", url).stdout.splitlines()
    assert says.startswith("its capacity is 900TiB, and ")
    assert "evicts for them" in says


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("8",), 'size: "8" has no unit: write 8GiB or 8MiB, or 8B for bytes'),
        (("1023KiB",), "1023KiB is no capacity of a directory: write 1MiB or more"),
        (("0",), "0 is no capacity of a directory"),
        (("8MB", "--pool", "valkey://127.0.0.1:1"), "a server's capacity is its maxmemory"),
        (("8MB", "--pool", "file:///nowhere/pool"), "there is no such directory"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(
    tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    with open_store(f"file://{tmp_path}/pool?capacity=16MiB") as store:
        assert says in refused(
            "capacity", *arguments, *(() if "--pool" in arguments else ("--pool", f"file://{tmp_path}/pool"))
        )
        assert [one.capacity_nbytes for one in store.usage()] == [16 * MIB]


def test_a_pool_of_an_older_kvpool_has_none_yet(tmp_path: Path) -> None:
    open_store(f"file://{tmp_path}/pool?capacity=16MiB").close()
    (tmp_path / "pool" / "capacity").unlink()
    assert "capacity none stands in it" in kvpool("capacity", "--pool", f"file://{tmp_path}/pool").stdout
