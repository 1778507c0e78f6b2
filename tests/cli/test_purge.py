"""``kvpool purge`` on real servers and directories: what goes, what stays, and that it asks.

Over 400 lines because each case runs on a directory and on each server.
"""

from __future__ import annotations

import hashlib
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvpool import Namespace, open_store
from kvpool.discovery.facts import announce_facts
from kvpool.discovery.worker import Publisher, Worker
from kvpool.discovery.worker_record import pack_worker
from kvpool.key.hashing import seed_id
from kvpool.store import Store
from kvpool.store.file import pool_id
from tests.support.command_line import kvpool, refused
from tests.support.deadlines import eventually
from tests.support.servers import SERVERS, Server, running

BLOCKS = 1200  # more than one step of a scan
HASHES = [hashlib.sha256(b"%d" % number).digest() for number in range(BLOCKS)]
FACTS = {"model": "m", "tensor_parallel": 1}
ALPHA_1, ALPHA_2 = (Namespace("alpha", FACTS | {"tensor_parallel": size}) for size in (1, 2))
BETA_1 = Namespace("beta", FACTS)
ALL = (ALPHA_1, ALPHA_2, BETA_1)


class Pool(NamedTuple):
    url: str
    store: Store  # open in this process while others purge
    server: Server | None


@pytest.fixture(params=["file", *SERVERS])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pool]:
    """Two namespaces of tenant alpha and one of beta, with facts, and one more announcement of alpha."""
    if request.param == "file":
        url = f"file://{tmp_path}/pool?capacity=256MiB"
        with open_store(url) as store:
            fill(store)
            yield Pool(url, store, None)
        return
    with running(request.param, tmp_path) as server, open_store(server.url) as store:
        fill(store)
        yield Pool(server.url, store, server)


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    with running(request.param, tmp_path) as server, open_store(server.url) as store:
        fill(store)
        yield server


def fill(store: Store) -> None:
    for namespace in ALL:
        put(store, namespace)
        announce_facts(store, namespace, "m")
    store.announce("kvpool:alpha:worker:a", b"here", lease_s=600)


def put(store: Store, namespace: Namespace) -> None:
    values = [block_hash * 4 for block_hash in HASHES]
    assert all(store.put_many(namespace.keys(HASHES, 0, 0), values, timeout_s=60))


def blocks(store: Store, namespace: Namespace) -> int:
    """How many there are, each of them whole."""
    targets = [bytearray(128) for _ in HASHES]
    found = store.get_many_into(namespace.keys(HASHES, 0, 0), targets, timeout_s=60)
    assert all(
        target == block_hash * 4
        for target, block_hash, hit in zip(targets, HASHES, found, strict=True)
        if hit
    )
    return sum(found)


def left(store: Store) -> list[int]:
    return [blocks(store, namespace) for namespace in ALL]


def purged(*arguments: str) -> dict[str, object]:
    ended = kvpool("purge", *arguments, "--yes", "--json")
    assert ended.returncode == 0, ended.stderr
    report: dict[str, object] = json.loads(ended.stdout)
    return report


def test_a_tenant_goes_with_all_it_announced_and_others_stay(pool: Pool) -> None:
    report = purged("--pool", pool.url, "--tenant", "alpha")
    assert report["deleted_blocks"] == 2 * BLOCKS
    assert report["deleted_announcements"] == 3
    shown = [
        (part["tenant"], part["namespace"], part["model"], part["blocks"]) for part in report["namespaces"]
    ]  # type: ignore[attr-defined]
    assert shown == sorted(("alpha", one.hex, "m", BLOCKS) for one in (ALPHA_1, ALPHA_2))
    assert sum(part["nbytes"] for part in report["namespaces"]) == 2 * BLOCKS * (80 + 128)  # type: ignore[attr-defined]
    assert left(pool.store) == [0, 0, BLOCKS]
    assert list(pool.store.announcements()) == [BETA_1.facts_key]


def test_a_model_has_the_name_that_its_workers_announce(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool"
    with open_store(url) as store:
        fill(store)
        publisher = Publisher(0, "tcp://h:5557", "")
        worker = Worker(
            name="a", tenant="alpha", model="/models/m", namespace=ALPHA_1.hex, block_tokens=16,
            hash_seed_id=seed_id(None), publishers=(publisher,), incarnation="one",
        )  # fmt: skip
        key, record = pack_worker(worker, lease_s=600.0)
        store.announce(key, record, lease_s=600.0)
    report = purged("--pool", url, "--tenant", "alpha")
    namespaces = report["namespaces"]
    assert isinstance(namespaces, list)
    assert {one["namespace"]: one["model"] for one in namespaces} == {
        ALPHA_1.hex: "/models/m",
        ALPHA_2.hex: "m",
    }


def test_it_counts_at_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.cli.tables._Console.is_screen", True)
    url = f"file://{tmp_path}/pool"
    with open_store(url) as store:
        fill(store)
    ended = kvpool("purge", "--pool", url, "--everything", "--yes", env={**os.environ, "FORCE_COLOR": "1"})
    said = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", ended.stderr)
    assert re.search(r"looking .* 3,600 blocks", said), said
    assert re.search(r"deleting .* 3,600 of 3,600 blocks", said), said
    assert "Deleted 3,600 blocks and 4 announcements." in ended.stdout


def test_a_namespace_goes_with_its_facts_and_its_siblings_stay(pool: Pool) -> None:
    report = purged("--pool", pool.url, "--namespace", ALPHA_2.hex[:8])
    assert report["deleted_blocks"] == BLOCKS
    assert report["deleted_announcements"] == 1
    assert left(pool.store) == [BLOCKS, 0, BLOCKS]
    assert list(pool.store.announcements()) == sorted(
        [ALPHA_1.facts_key, BETA_1.facts_key, "kvpool:alpha:worker:a"]
    )


def test_a_namespace_that_two_tenants_have_goes_for_both_or_for_the_one_named(pool: Pool) -> None:
    assert ALPHA_1.hex == BETA_1.hex
    report = purged("--pool", pool.url, "--namespace", BETA_1.hex, "--tenant", "beta")
    assert report["deleted_blocks"] == BLOCKS
    assert left(pool.store) == [BLOCKS, BLOCKS, 0]
    put(pool.store, BETA_1)
    assert purged("--pool", pool.url, "--namespace", BETA_1.hex)["deleted_blocks"] == 2 * BLOCKS
    assert left(pool.store) == [0, BLOCKS, 0]


ONE, OTHER = b"\xab" * 15 + b"\x01", b"\xab" * 15 + b"\x02"


def write(store: Store, writer: bytes, *spans: tuple[Namespace, slice]) -> None:
    store.writer = writer
    for namespace, span in spans:
        values = [block_hash * 4 for block_hash in HASHES[span]]
        assert all(store.put_many(namespace.keys(HASHES[span], 0, 0), values, timeout_s=60))
    store.writer = b""


def test_what_one_writer_wrote_goes_and_no_more(pool: Pool) -> None:
    """Not what another one wrote, nor what names none, nor an announcement."""
    announced = pool.store.announcements().keys()
    write(pool.store, ONE, (ALPHA_1, slice(0, 1100)), (BETA_1, slice(5)))
    write(pool.store, OTHER, (ALPHA_1, slice(1100, 1150)))
    shown = " ".join(kvpool("purge", "--pool", pool.url, "--writer", ONE.hex(), "--dry-run").stdout.split())
    assert f"In all: 1,105 blocks (224.5 KiB) in 2 namespaces, written by {ONE.hex()}." in shown
    report = purged("--pool", pool.url, "--writer", ONE.hex()[:30] + "01", "--tenant", "beta")
    assert (report["deleted_blocks"], report["deleted_announcements"]) == (5, 0)
    assert left(pool.store) == [BLOCKS, BLOCKS, BLOCKS - 5]
    report = purged("--pool", pool.url, "--writer", ONE.hex(), "--namespace", ALPHA_1.hex[:8])
    assert report["deleted_blocks"] == 1100
    assert report["writer"] == ONE.hex()
    assert left(pool.store) == [BLOCKS - 1100, BLOCKS, BLOCKS - 5]
    report = purged("--pool", pool.url, "--writer", OTHER.hex()[:8])
    assert report["deleted_blocks"] == 50
    assert report["writer"] == OTHER.hex()
    assert pool.store.announcements().keys() == announced
    assert purged("--pool", pool.url, "--tenant", "alpha")["deleted_blocks"] == 50 + BLOCKS


def test_digits_that_begin_two_writers_are_too_few(pool: Pool) -> None:
    write(pool.store, ONE, (ALPHA_1, slice(3)))
    write(pool.store, OTHER, (ALPHA_1, slice(3, 5)), (BETA_1, slice(2)))
    line = refused("purge", "--pool", pool.url, "--writer", "abababab", "--yes")
    assert "write more digits" in line
    assert ONE.hex() in line
    assert OTHER.hex() in line
    assert left(pool.store) == [BLOCKS] * 3
    assert purged("--pool", pool.url, "--writer", "abababab", "--tenant", "beta")["deleted_blocks"] == 2


def test_a_wrong_writer_is_answered_with_those_there_are(pool: Pool) -> None:
    asked = ("purge", "--pool", pool.url, "--yes", "--writer")
    assert "kvpool purge --dry-run shows what is there" in refused(*asked, "0" * 32)
    write(pool.store, ONE, (ALPHA_1, slice(3)))
    line = refused(*asked, "0" * 8)
    assert f'no block was written by "00000000"; there are {ONE.hex()}' in line
    assert left(pool.store) == [BLOCKS] * 3


def test_what_a_writer_wrote_goes_from_both_pools(tmp_path: Path) -> None:
    near, far = (f"file://{tmp_path}/{name}?capacity=256MiB" for name in ("near", "far"))
    for url, count in ((near, 3), (far, 5)):
        with open_store(url) as store:
            write(store, ONE, (ALPHA_1, slice(count)))
            write(store, OTHER, (ALPHA_1, slice(5, 6)))
    assert purged("--pool", f"{near} {far}", "--writer", ONE.hex())["deleted_blocks"] == 8
    with open_store([near, far]) as both:
        assert [(key, writer) for step in both.scan_writers() for key, _, writer in step] == [
            (ALPHA_1.key(HASHES[5], 0, 0), OTHER)
        ] * 2


def test_everything_goes_and_the_pool_goes_on(pool: Pool) -> None:
    report = purged("--pool", pool.url, "--everything")
    assert report["deleted_blocks"] == 3 * BLOCKS
    assert report["deleted_announcements"] == 4
    assert left(pool.store) == [0, 0, 0]
    assert pool.store.announcements() == {}
    if pool.server is not None:
        assert pool.server.client.dbsize() == 0
    else:
        assert pool.store.counters()["stored_nbytes"] == 0
    assert purged("--pool", pool.url, "--everything")["deleted_blocks"] == 0
    fill(pool.store)
    assert left(pool.store) == [BLOCKS, BLOCKS, BLOCKS]
    assert len(pool.store.announcements()) == 4


def test_what_is_not_spelled_as_ours_is_never_touched(server: Server) -> None:
    key = ALPHA_1.key(HASHES[0], 0, 0)
    others = ["other", f"other:{key}", f"{key}:more", key[:-1] + "01", key.replace("alpha", "al*ha"), key.upper(),
              "kvpool:alpha:settings", "kvpool:", b"kvpool:alpha:\xff", f"{key}\n"]  # fmt: skip
    for name in others:
        server.client.set(name, "theirs")
    server.client.hset("kvpool:alpha:theirs", "h", "b")
    with open_store(server.url) as store:
        store.announce("theirs", b"document", lease_s=600)
        report = purged("--pool", server.url, "--everything")
        assert report["deleted_blocks"] == 3 * BLOCKS
        assert store.announcements() == {"theirs": b"document"}
    assert all(server.client.get(name) == b"theirs" for name in others)
    assert server.client.hget("kvpool:alpha:theirs", "h") == b"b"


def test_a_key_of_ours_that_holds_something_else_goes_too(server: Server) -> None:
    key = Namespace("alpha", {"model": "odd"}).key(HASHES[0], 0, 0)
    server.client.set(key, "no record")
    report = purged("--pool", server.url, "--tenant", "alpha")
    assert report["deleted_blocks"] == 2 * BLOCKS + 1
    assert not server.client.exists(key)


def test_the_server_is_asked_in_small_steps_and_never_for_all_its_keys(server: Server) -> None:
    server.client.config_resetstat()
    purged("--pool", server.url, "--everything")
    stats = server.client.info("commandstats")
    assert not {"cmdstat_keys", "cmdstat_flushall", "cmdstat_flushdb", "cmdstat_del"} & stats.keys()
    assert stats["cmdstat_scan"]["calls"] >= 2 * 3 * BLOCKS // 1000
    assert stats["cmdstat_unlink"]["calls"] >= 3 * BLOCKS


def test_tenants_that_are_in_no_list_go_with_everything(server: Server) -> None:
    server.client.execute_command("ACL", "SETUSER", "worker", "on", ">pass-word", "~kvpool:gamma:*", "+@all")
    with open_store(f"valkey://worker:pass-word@127.0.0.1:{server.port}") as store:
        store.announce("kvpool:gamma:worker:g", b"here", lease_s=600)
        with open_store(server.url) as ours:
            assert "kvpool:gamma:worker:g" not in ours.announcements()
            assert purged("--pool", server.url, "--everything")["deleted_announcements"] == 5
        assert store.announcements("kvpool:gamma:") == {}


CONFINED = ("on", ">pass-word", "~kvpool:alpha:*", "+ping", "+select", "+hset", "+pexpire", "+hmget", "+exists",
            "+touch", "+pttl", "+unlink", "+time", "+set", "+mget", "+zadd", "+zcard", "+zscore", "+zrange",
            "+zremrangebyscore", "+zremrangebyrank", "+multi", "+exec")  # fmt: skip
PURGES = ("+scan", "+hstrlen", "+zrem")  # docs/how-to/valkey.md has both


def test_a_confined_user_needs_the_commands_and_is_told_so(server: Server) -> None:
    url = f"valkey://worker:pass-word@127.0.0.1:{server.port}"
    arguments = ("purge", "--pool", url, "--tenant", "alpha", "--yes", "--json")
    server.client.execute_command("ACL", "SETUSER", "worker", *CONFINED)
    for command in PURGES:
        line = refused(*arguments)
        assert "permissions" in line
        assert "docs/how-to/valkey.md" in line
        assert "pass-word" not in line
        server.client.execute_command("ACL", "SETUSER", "worker", command)
    with open_store(server.url) as store:
        fill(store)
        write(store, ONE, (ALPHA_1, slice(5)))
        assert purged(*arguments[1:-2], "--writer", ONE.hex())["deleted_blocks"] == 5
        put(store, ALPHA_1)
        assert purged(*arguments[1:-2])["deleted_blocks"] == 2 * BLOCKS
        assert left(store) == [0, 0, BLOCKS]
    line = refused("purge", "--pool", url, "--everything", "--yes")
    assert "permissions" in line
    with open_store(server.url) as store:
        assert left(store) == [0, 0, BLOCKS]


def test_without_a_terminal_nothing_goes_before_yes(pool: Pool) -> None:
    line = refused("purge", "--pool", pool.url, "--tenant", "alpha")
    assert "would delete 2,400 blocks (487.5 KiB) in 2 namespaces, and at least 3 announcements" in line
    assert "--yes" in line
    assert left(pool.store) == [BLOCKS] * 3
    assert len(pool.store.announcements()) == 4


def test_a_dry_run_shows_and_deletes_nothing(pool: Pool) -> None:
    for asked, count in (((), 3), (("--everything", "--yes"), 3), (("--tenant", "alpha"), 2)):
        said = " ".join(kvpool("purge", "--pool", pool.url, "--dry-run", *asked).stdout.split())
        in_all = rf"In all: {count * BLOCKS:,} blocks .* in {count} namespaces, "
        assert re.search(rf"{in_all}.* Nothing was deleted: --dry-run\.$", said), said
        assert purged("--pool", pool.url, "--dry-run", *asked)["deleted_blocks"] == 0
    assert left(pool.store) == [BLOCKS] * 3


@pytest.mark.parametrize(("answer", "code"), [(b"n\n", 130), (b"\n", 130), (b"y\n", 0)])
def test_at_a_terminal_it_asks(tmp_path: Path, answer: bytes, code: int) -> None:
    url = f"file://{tmp_path}/pool"
    with open_store(url) as store:
        fill(store)
        ours, theirs = pty.openpty()
        command = [str(Path(sys.executable).parent / "kvpool"), "purge", "--pool", url, "--everything"]
        output = tmp_path / "output"
        with output.open("wb") as file:
            process = subprocess.Popen(command, stdin=theirs, stdout=file, stderr=subprocess.STDOUT)
        try:
            assert eventually(lambda: b"Delete this?" in output.read_bytes())
            assert left(store) == [BLOCKS] * 3, "nothing goes before the answer"
            os.write(ours, answer)
            assert process.wait(60) == code
        finally:
            process.kill()
            process.wait()
            os.close(ours)
            os.close(theirs)
        assert left(store) == ([0] * 3 if code == 0 else [BLOCKS] * 3)
    assert b"3,600 blocks" in output.read_bytes()
    assert b"alpha" in output.read_bytes()


def test_a_wrong_name_is_answered_with_those_there_are(pool: Pool) -> None:
    line = refused("purge", "--pool", pool.url, "--tenant", "alfa", "--yes")
    assert 'unknown tenant "alfa"' in line
    assert "alpha, beta" in line
    line = refused("purge", "--pool", pool.url, "--tenant", "alpha", "--namespace", "0" * 8, "--yes")
    assert ALPHA_1.hex[:8] in line
    assert ALPHA_2.hex[:8] in line
    assert left(pool.store) == [BLOCKS] * 3


def test_a_smaller_capacity_than_the_workers_have_evicts_nothing(tmp_path: Path) -> None:
    with open_store(f"file://{tmp_path}/pool?capacity=64MiB") as store:
        fill(store)
        big = Namespace("beta", {"model": "big"}).keys(HASHES[:4], 0, 0)
        assert all(store.put_many(big, [bytes(1 << 20)] * 4))
        purged("--pool", f"file://{tmp_path}/pool?capacity=1MiB", "--tenant", "alpha")
        assert left(store) == [0, 0, BLOCKS]
        assert store.contains_many(big) == [True] * 4


def test_digits_that_begin_two_namespaces_are_too_few(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool"
    with open_store(url) as store:
        for end in ("0", "1"):
            folder = tmp_path / "pool" / "blocks" / "000"
            folder.mkdir(exist_ok=True)
            (folder / f"alpha.{'ab' * 15}a{end}.{'00' * 32}.0.0").write_bytes(bytes(100))
        line = refused("purge", "--pool", url, "--namespace", "abababab", "--yes")
        assert "write more digits" in line
        assert sum(map(len, store.scan())) == 2
        assert purged("--pool", url, "--namespace", "ab" * 15 + "a1")["deleted_blocks"] == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--everything"),
        (["--everything", "--tenant", "alpha"], "--everything"),
        (["--everything", "--writer", "ab" * 16], "--everything"),
        (["--writer", "abc"], "hex digits"),
        (["--writer", "ab" * 17], "hex digits"),
        (["--tenant", "a:b"], "tenant"),
        (["--namespace", "xyz"], "hex digits"),
        (["--namespace", "ABCDEF01"], "lowercase"),
        (["--tenant", "alpha"], "it is empty"),
        (["--namespace", "12345678"], "it is empty"),
    ],
)
def test_wrong_use_is_one_clear_line(tmp_path: Path, arguments: list[str], says: str) -> None:
    open_store(f"file://{tmp_path}/pool").close()
    assert says in refused("purge", "--pool", f"file://{tmp_path}/pool", *arguments, "--yes")


def test_no_server_is_one_clear_line() -> None:
    assert "cannot connect" in refused("purge", "--pool", "valkey://127.0.0.1:1", "--everything", "--yes")
    assert "--pool" in refused("purge", "--everything", "--yes")


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    line = refused("purge", "--pool", f"file://{tmp_path}/nowhere", "--everything", "--yes")
    assert "there is no such directory" in line
    assert not list(tmp_path.iterdir())


def test_a_near_and_a_far_pool_are_told_apart(tmp_path: Path) -> None:
    near, far = (f"file://{tmp_path}/{name}?capacity=256MiB" for name in ("near", "far"))
    for url, blocks in ((near, 3), (far, 5)):
        with open_store(url) as store:
            store.put_many(ALPHA_1.keys(HASHES[:blocks], 0, 0), [b"value"] * blocks)
            store.put_many(BETA_1.keys(HASHES[:1], 0, 0), [b"value"])
            if url == far:
                announce_facts(store, ALPHA_1, "m")
    ended = kvpool("purge", "--pool", f"{near} {far}", "--tenant", "alpha")
    assert ended.returncode != 0
    assert "8 blocks" in ended.stderr
    assert "in 1 namespace" in ended.stderr
    report = purged("--pool", f"{near} {far}", "--tenant", "alpha")
    assert report["deleted_blocks"] == 8
    namespaces = report["namespaces"]
    assert isinstance(namespaces, list)
    assert [(one["pool"], one["model"], one["blocks"]) for one in namespaces] == [
        ("far", "m", 5),
        ("near", "m", 3),
    ]
    for url in (near, far):
        with open_store(url) as store:
            assert [block.key for blocks in store.scan() for block in blocks] == BETA_1.keys(HASHES[:1], 0, 0)


def test_near_pools_that_keep_the_blocks_are_counted(tmp_path: Path) -> None:
    """A host that used its near pool had sent all 20 blocks far again 9 s after a purge of far, and nothing said so."""
    near, far = (f"file://{tmp_path}/{name}?capacity=256MiB" for name in ("near", "far"))
    open_store(near).close()

    def fill_again() -> None:
        with open_store(far) as store:
            for number, host in enumerate((pool_id(str(tmp_path / "near")), "e" * 32, "e" * 32, "")):
                worker = Worker(
                    name=f"w{number}", tenant="alpha", model="m", namespace=ALPHA_1.hex, block_tokens=16,
                    hash_seed_id=seed_id(None), publishers=(Publisher(0, ""),), incarnation="one", near=host,
                )  # fmt: skip
                key, record = pack_worker(worker, lease_s=600.0)
                store.announce(key, record, lease_s=600.0)
            store.put_many(ALPHA_1.keys(HASHES[:1], 0, 0), [b"value"])

    fill_again()
    said = kvpool("purge", "--pool", far, "--tenant", "alpha", "--yes").stdout
    assert "Near pools of workers' hosts (2 announced) keep theirs" in " ".join(said.split())
    fill_again()
    assert purged("--pool", far, "--everything")["near_pools_left"] == 2
    fill_again()
    assert purged("--pool", f"{near} {far}", "--tenant", "alpha")["near_pools_left"] == 1
    assert purged("--pool", far, "--everything")["near_pools_left"] == 0, "nobody announces one"


def test_what_was_evicted_goes_with_a_purge(tmp_path: Path) -> None:
    """Also where the tenant has nothing else any more."""
    pool = tmp_path / "pool"
    with open_store(f"file://{pool}?capacity=1MiB") as store:
        for number in range(11):
            store.put_many([ALPHA_1.key(HASHES[number], 0, 0)], [bytes(100_000)])
        free = pool / "free"
        assert list(free.iterdir())
        assert kvpool("purge", "--pool", f"file://{pool}", "--tenant", "beta", "--yes").returncode != 0
        assert list(free.iterdir()) == []
        for number in range(11, 13):
            store.put_many([ALPHA_1.key(HASHES[number], 0, 0)], [bytes(100_000)])
        assert list(free.iterdir())
        assert kvpool("purge", "--pool", f"file://{pool}", "--tenant", "alpha", "--yes").returncode == 0
        assert list(free.iterdir()) == []
