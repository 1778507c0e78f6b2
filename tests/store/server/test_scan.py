"""Looking through a pool, on every kind of store: what ``scan`` gives, in which portions, and what it passes over."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from kvpool import Namespace, _native, open_store
from kvpool.errors import StoreClosed, StoreUnavailable
from kvpool.key.key import namespace_prefix, tenant_prefix
from kvpool.store.file_records import FILE_BLOCK
from kvpool.store.server import server as server_module
from kvpool.store.store import SCAN_KEYS, Store
from tests.support.conformance import NAMESPACE, keys
from tests.support.memory_store import MemoryStore
from tests.support.records import HEADER_NBYTES
from tests.support.servers import SERVERS, Server, running

OTHER = Namespace("tenant-10", dict(NAMESPACE.facts))  # its prefix begins with the other's letters
COUNT = 2 * SCAN_KEYS + 1


@pytest.fixture(params=["memory", "file", *SERVERS])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "memory":
        with MemoryStore() as store:
            yield store
    elif request.param == "file":
        with open_store(f"file://{tmp_path}/pool") as store:
            yield store
    else:
        with running(request.param, tmp_path) as server, open_store(server.url) as store:
            yield store


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    with running(request.param, tmp_path) as server:
        yield server


def found(store: Store, prefix: str = "kvpool:") -> dict[str, int]:
    return {key: nbytes for batch in store.scan(prefix) for key, nbytes in batch}


def test_every_block_comes_in_portions_with_its_size(store: Store) -> None:
    assert found(store) == {}
    assert all(store.put_many(keys(COUNT), [b"x" * 200] * COUNT, timeout_s=60))
    portions = [len(batch) for batch in store.scan()]
    assert sum(portions) >= COUNT
    assert max(portions) <= 2 * SCAN_KEYS, "a server may give some more than it was asked for"
    assert found(store) == dict.fromkeys(keys(COUNT), 200 + HEADER_NBYTES)


def test_the_keys_alone(store: Store) -> None:
    store.put_many(keys(COUNT), [b"x"] * COUNT, timeout_s=60)
    store.announce("kvpool:tenant-1:worker:a", b"document", lease_s=60)
    given = [key for step in store.scan_keys() for key in step]
    assert sorted(set(given)) == sorted(keys(COUNT))
    assert [key for step in store.scan_keys(tenant_prefix(OTHER.tenant)) for key in step] == []
    assert [key for step in store.scan_keys(keys(1)[0]) for key in step] == keys(1)


def writers(store: Store, prefix: str = "kvpool:") -> dict[str, tuple[int, bytes]]:
    return {key: (nbytes, writer) for batch in store.scan_writers(prefix) for key, nbytes, writer in batch}


@pytest.mark.parametrize("payload_nbytes", [200, FILE_BLOCK - HEADER_NBYTES, 12288, 100_000])
def test_who_wrote_each_block(store: Store, payload_nbytes: int) -> None:
    one, other, nobody, theirs = *keys(3), OTHER.key(bytes(32), 0, 1)
    for key, writer in ((one, b"1" * 16), (other, b"2" * 16), (nobody, b""), (theirs, b"1" * 16)):
        store.writer = writer
        assert store.put_many([key], [b"x" * payload_nbytes]) == [True]
    nbytes = payload_nbytes + HEADER_NBYTES
    ours = {one: (nbytes, b"1" * 16), other: (nbytes, b"2" * 16), nobody: (nbytes, bytes(16))}
    assert writers(store) == ours | {theirs: (nbytes, b"1" * 16)}
    assert writers(store, tenant_prefix("tenant-1")) == ours


def test_writers_come_in_portions_and_little_is_read(server: Server) -> None:
    """Of a record that is cut only what has the header; of several that are not, some at a time."""
    with open_store(server.url) as store:
        store.writer = b"w" * 16
        store.put_many(keys(COUNT), [b"x" * 16384] * COUNT, timeout_s=60)
        server.client.config_resetstat()
        portions = [len(batch) for batch in store.scan_writers()]
        assert sum(portions) >= COUNT
        assert max(portions) <= 2 * SCAN_KEYS
        sent_nbytes = server.client.info("stats")["total_net_output_bytes"]
        assert sent_nbytes < COUNT * 600, "names, sizes and last fields"


def test_last_fields_are_read_in_steps(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that alone is larger than a step, and than all replies of one otherwise."""
    monkeypatch.setattr(server_module, "LAST_FIELDS_NBYTES", 30_000)
    monkeypatch.setattr("kvpool.store.server.connection.MAX_REPLIES_NBYTES", 30_000)
    steps: list[tuple[int, int]] = []
    headers = server_module._headers

    def counted(server: redis.Redis, keys: list[str], nbytes: int) -> dict[str, bytes]:
        steps.append((len(keys), nbytes))
        return headers(server, keys, nbytes)

    monkeypatch.setattr(server_module, "_headers", counted)
    with open_store(server.url) as store:
        store.writer = b"w" * 16
        store.put_many(keys(30), [b"x" * 12288] * 30)
        large = OTHER.key(bytes(32), 0, 0)
        (_, whole), *_ = _native.cut_record(1 << 20)
        while len(_native.cut_record(whole)) > 1:
            whole -= 1
        store.put_many([large], [bytes(whole)])
        assert {writer for _, writer in writers(store).values()} == {b"w" * 16}
        assert max(nbytes for count, nbytes in steps if count > 1) <= 30_000
        assert len(writers(store)) == 31


def test_of_a_foreign_value_no_writer_is_told_and_nothing_is_read(server: Server) -> None:
    one, other, cut, text, short = keys(5)
    with open_store(server.url) as store:
        store.writer = b"w" * 16
        store.put_many([one], [b"x" * 200])
        record = server.client.hgetall(one)
        server.client.hset(other, mapping=record)  # a right record under a wrong key
        server.client.hset(cut, mapping={b"b": b"", b"h": bytes(1 << 20)})  # no record is cut so
        server.client.set(text, "theirs")
        server.client.hset(short, mapping={b"h": b"x"})
        server.client.config_resetstat()
        found = writers(store)
        assert {key: writer for key, (_, writer) in found.items() if any(writer)} == {one: b"w" * 16}
        assert found.keys() == {one, other, cut, text, short}
        assert server.client.info("stats")["total_net_output_bytes"] < 1 << 16


def test_of_a_file_that_is_no_record_no_writer_is_told(tmp_path: Path) -> None:
    with open_store(f"file://{tmp_path}/pool") as store:
        store.writer = b"w" * 16
        store.put_many(keys(7), [b"x" * 200] * 7)
        link, pipe, empty, cut, other, folder, _ = found = [path_of(tmp_path, key) for key in keys(7)]
        content = link.read_bytes()
        elsewhere = tmp_path / "elsewhere"
        elsewhere.write_bytes(content)
        for path in found[:-1]:
            path.unlink()
        link.symlink_to(elsewhere)
        os.mkfifo(pipe)
        empty.touch()
        cut.write_bytes(content[:FILE_BLOCK])
        other.write_bytes(content)
        folder.mkdir()
        assert {key: writer for key, (_, writer) in writers(store).items() if any(writer)} == {
            keys(7)[6]: b"w" * 16
        }
        assert len(writers(store)) == 6


def path_of(tmp_path: Path, key: str) -> Path:
    (path,) = (tmp_path / "pool" / "blocks").glob(f"*/{key.removeprefix('kvpool:').replace(':', '.')}")
    return path


def test_keys_of_servers_that_change_meanwhile_are_not_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running("valkey-server", tmp_path) as server, open_store(server.url) as store:
        store.put_many(keys(3), [b"x"] * 3)
        found = iter(["before", "after"])
        monkeypatch.setattr(store._primaries, "find", lambda: next(found))  # type: ignore[attr-defined]
        looking = store.scan_keys()
        assert sorted(next(looking)) == sorted(keys(3))
        with pytest.raises(StoreUnavailable, match="its servers changed during the scan"):
            list(looking)


def test_only_servers_have_notices(store: Store, request: pytest.FixtureRequest) -> None:
    notices = store.notices()
    assert (notices is not None) == (request.node.callspec.params["store"] in SERVERS)
    if notices is not None:
        notices.close()
    store.close()
    for look in (
        store.notices,
        store.scan,
        store.scan_keys,
        store.scan_writers,
        lambda: store.withdraw_all("kvpool:"),
    ):
        with pytest.raises(StoreClosed):
            look()


def test_a_prefix_is_a_prefix_and_no_pattern(store: Store) -> None:
    theirs = OTHER.key(bytes(32), 0, 0)
    store.put_many([*keys(3), theirs], [b"x"] * 4)
    assert found(store, tenant_prefix("tenant-1")).keys() == set(keys(3))
    assert found(store, namespace_prefix(OTHER.tenant, OTHER.hex)).keys() == {theirs}
    assert found(store, keys(1)[0]).keys() == set(keys(1))
    for nothing in ("kvpool:*", "kvpool:tenant-?:", "kvpool:[t]", "kvpool:tenant-\\1", "other"):
        assert found(store, nothing) == {}


def test_deleting_what_was_given_loses_nothing(store: Store) -> None:
    store.put_many(keys(COUNT), [b"x"] * COUNT, timeout_s=60)
    deleted = sum(store.delete_many([block.key for block in batch]) for batch in store.scan())
    assert deleted == COUNT
    assert found(store) == {}


def test_announcements_are_no_blocks_and_go_by_prefix(store: Store) -> None:
    for key in ("kvpool:tenant-1:worker:a", "kvpool:tenant-10:worker:a", NAMESPACE.facts_key):
        store.announce(key, b"document", lease_s=60)
    assert found(store) == {}
    assert store.withdraw_all(tenant_prefix("tenant-1")) == 2
    assert list(store.announcements()) == ["kvpool:tenant-10:worker:a"]
    assert store.withdraw_all(tenant_prefix("tenant-1")) == 0


def test_what_is_no_record_of_a_directory_is_passed_over(tmp_path: Path) -> None:
    with open_store(f"file://{tmp_path}/pool") as store:
        store.put_many(keys(1), [b"x"])
        (record,) = (tmp_path / "pool" / "blocks").glob("*/*")
        name = record.name
        other = "0" if name[-3] != "0" else "1"
        (record.parent / f"{name[:-3]}{other}.7").mkdir()
        (record.parent / f"{name}.0").write_bytes(b"x")
        (record.parent / "note").write_bytes(b"x")
        elsewhere = record.parent.with_name("zzz")
        elsewhere.mkdir()
        (elsewhere / name).write_bytes(b"x")
        (tmp_path / "pool" / "blocks" / "file").write_bytes(b"x")
        assert found(store) == {keys(1)[0]: 1 + HEADER_NBYTES}


def test_a_server_that_goes_in_the_middle_is_a_fault(tmp_path: Path) -> None:
    with running("valkey-server", tmp_path) as server, open_store(server.url) as store:
        store.put_many(keys(COUNT), [b"x"] * COUNT, timeout_s=60)
        looking = store.scan()
        assert next(looking)
        server.kill()
        with pytest.raises(StoreUnavailable, match="cannot look at its blocks"):
            list(looking)
