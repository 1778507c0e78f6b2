"""``PoolListing``: which blocks of a namespace a directory holds, and what changed since it was told."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpool import Namespace, _native, open_store
from kvpool.store.file import pool_id

HASHES = [bytes([place]) * 32 for place in range(1, 9)]
NAMESPACE, OTHER = Namespace("t", {"a": 1}), Namespace("t", {"a": 2})


def low(hashes: list[bytes]) -> list[int]:
    return sorted(int.from_bytes(one[-8:], "big") for one in hashes)


def put(path: Path, namespace: Namespace, hashes: list[bytes], group: int = 0, rank: int = 0) -> list[str]:
    keys = namespace.keys(hashes, group, rank)
    with open_store(f"file://{path}") as store:
        assert all(store.put_many(keys, [b"x"] * len(keys)))
    return keys


def listing(path: Path, most: int = 1000) -> _native.PoolListing:
    return _native.PoolListing(str(path), "t", NAMESPACE.hex, most)


def test_what_came_and_went_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    keys = put(path, NAMESPACE, HASHES[:3])
    put(path, OTHER, HASHES[3:])
    found = listing(path)
    assert found.look() == 3
    assert found.changes() == [(0, low(HASHES[:3]), [])]
    assert found.changes() == [(0, low(HASHES[:3]), [])], "not told yet"
    found.told()
    assert found.changes() == []
    with open_store(f"file://{path}") as store:
        store.delete_many(keys[:1])
    put(path, NAMESPACE, HASHES[5:6])
    assert found.changes() == [], "of the last look"
    assert found.look() == 3
    assert found.changes() == [(0, low(HASHES[5:6]), low(HASHES[:1]))]
    found.forget()
    assert found.changes() == [(0, low([*HASHES[1:3], HASHES[5]]), [])]


def test_told_is_what_the_changes_were_of(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    put(path, NAMESPACE, HASHES[:1])
    found = listing(path)
    found.look()
    found.changes()
    put(path, NAMESPACE, HASHES[1:2])
    found.look()  # while the changes before are being told
    found.told()
    assert found.changes() == [(0, low(HASHES[1:2]), [])]


def test_a_block_is_there_with_all_its_ranks(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    put(path, NAMESPACE, HASHES[:2], 0, 0)
    (gone, _) = put(path, NAMESPACE, HASHES[:2], 0, 1)
    put(path, NAMESPACE, HASHES[:1], 1, 0)
    found = listing(path)
    with open_store(f"file://{path}") as store:
        store.delete_many([gone])
    assert found.look() == 2
    assert found.changes() == [(0, low(HASHES[1:2]), []), (1, low(HASHES[:1]), [])]


def test_only_records_count_and_only_so_many(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    put(path, NAMESPACE, HASHES)
    (bucket, *_) = sorted((path / "blocks").iterdir())
    for name in ("x", f"t.{NAMESPACE.hex}.", f"t.{NAMESPACE.hex}.zz.0.0", f"t.{NAMESPACE.hex}.{'0' * 64}.0"):
        (bucket / name).touch()
    (path / "blocks" / "a file").touch()
    assert listing(path).look() == len(HASHES)
    assert listing(path, 5).look() == 5


def test_a_directory_that_is_gone_is_empty_and_a_file_in_its_place_an_error(tmp_path: Path) -> None:
    found = listing(tmp_path / "none")
    assert found.look() == 0
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "blocks").touch()
    with pytest.raises(OSError, match="blocks"):
        found.look()


def test_a_directory_has_one_name_however_it_is_reached(tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir()
    (tmp_path / "link").symlink_to("pool")
    (tmp_path / "other").mkdir()
    names = [pool_id(str(tmp_path / name)) for name in ("pool", "link", "other", "none")]
    assert names[0] == names[1] != names[2]
    assert len(names[0]) == 32
    assert names[3] == ""
