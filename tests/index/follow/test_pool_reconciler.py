"""What the index credits to the pool against what lies there, key by key, on real servers that lose blocks.

Over 400 lines because it holds one model of a pool and the machine that drives it.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpool import ConfigError, Namespace, StoreUnavailable, open_store
from kvpool.discovery.facts import announce_facts
from kvpool.discovery.worker_watch import WorkerWatch
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.follow import pool_reconciler as module
from kvpool.index.follow.pool_reconciler import PoolReconciler
from kvpool.store.server import notices as server_notices
from kvpool.store.store import Store
from tests.support.deadlines import eventually
from tests.support.fleets import a_worker
from tests.support.memory_store import MemoryStore
from tests.support.reconciler import (
    NAMESPACE,
    NBYTES,
    NEVER_S,
    another_round,
    credited,
    digest,
    following,
    hashes64,
    keys,
    put,
    rests,
)
from tests.support.servers import SERVERS, Cluster, Server, running
from tests.support.soak import SEARCH_S
from tests.support.wire import batch, packed64, removed, stored

OTHER = Namespace("default", {"model": "m", "kv_dtype": "fp8"})


def told(numbers: Iterable[int], **more: Any) -> bytes:
    """What a worker says when it has put them."""
    return batch(stored(hashes64(numbers), medium="STORAGE", **more))


def present(server: Server, numbers: Iterable[int]) -> set[int]:
    numbers = list(numbers)
    with server.client.pipeline(transaction=False) as asked:
        for key in keys(numbers):
            asked.exists(key)
        return {number for number, there in zip(numbers, asked.execute(), strict=True) if there}


def a_fleet(*namespaces: Namespace) -> Fleet:
    fleet = Fleet()
    for number, namespace in enumerate(namespaces or (NAMESPACE,)):
        fleet.add(a_worker(f"w{number}", namespace=namespace.hex), "pool")
    return fleet


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    with running(request.param, tmp_path) as one:
        yield one


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Server]:
    with running("valkey-server", tmp_path) as one:
        yield one


def without(server: Server, *rights: str) -> str:
    """The URL of a user who may do everything but this."""
    server.client.execute_command(
        "ACL", "SETUSER", "u", "reset", "on", ">pass-word", "~*", "&*", "+@all", *rights
    )
    return server.url.replace("://", "://u:pass-word@")


@contextmanager
def credited_pool(url: str, mine: Iterable[int]) -> Iterator[tuple[Fleet, Store, PoolReconciler]]:
    """A pool of these blocks, of which a worker has told; its reconciler rests."""
    fleet = a_fleet()
    with open_store(url) as store, following(fleet, store) as reconciler:
        put(store, mine)
        fleet.rank("default/w0", 0).apply(1, told(mine))
        assert rests(reconciler)
        yield fleet, store, reconciler


# ---- a full server


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("heard", [True, False], ids=["notices", "no notices"])
def test_thousands_of_evictions_while_events_come_in(name: str, heard: bool, tmp_path: Path) -> None:
    """At its maxmemory, with writers whose events are late: once they rest, it is EXISTS, key by key."""
    options = ("--maxmemory", "12mb", "--maxmemory-policy", "allkeys-lru")
    with running(name, tmp_path, *options) as server:
        url = server.url if heard else without(server, "-client|tracking")
        fleet, everything = a_fleet(), range(8000)
        with open_store(url) as store, following(fleet, store, pause_s=0.2, keys_per_s=200_000) as reconciler:

            def write(part: int) -> None:
                late: list[range] = []
                for start in range(part * 4000, (part + 1) * 4000, 100):
                    put(store, range(start, start + 100))
                    late.append(range(start, start + 100))
                    if len(late) > 5:
                        fleet.rank("default/w0", 0).apply(start, told(late.pop(0)))
                for numbers in late:
                    fleet.rank("default/w0", 0).apply(8000, told(numbers))

            writers = [threading.Thread(target=write, args=(part,)) for part in range(2)]
            for writer in writers:
                writer.start()
            for writer in writers:
                writer.join()
            server.client.config_set("maxmemory", "0")  # replies to the questions below would evict more
            assert eventually(
                lambda: credited(fleet, everything) == present(server, everything),
                # The machine may be busy; what is promised is measured by the index itself.
                within_s=60 + reconciler.totals().max_staleness_s,
            )
            assert server.info("evicted_keys") > 2000
            assert len(present(server, everything)) > 500
            assert reconciler.totals().removed > 1000
            assert reconciler.totals().notifications_down == (not heard)
            rounds = reconciler.totals().rounds
            assert eventually(lambda: reconciler.totals().rounds > rounds + 1)
            assert credited(fleet, everything) == present(server, everything), "and so it stays"


# ---- what else a server loses


def test_each_kind_of_loss_is_heard(server: Server) -> None:
    fleet, mine = a_fleet(), range(20)
    losses: dict[str, Callable[[str], object]] = {
        "deleted": server.client.delete,
        "unlinked": server.client.unlink,
        "run out": lambda key: server.client.pexpire(key, 1),
        "renamed": lambda key: server.client.rename(key, "elsewhere"),
        "replaced by nothing": lambda key: server.client.hdel(key, "h", "b"),
    }
    with open_store(server.url) as store, following(fleet, store) as reconciler:
        put(store, mine)
        fleet.rank("default/w0", 0).apply(1, told(mine))
        assert rests(reconciler)
        rounds = reconciler.totals().rounds
        for number, (kind, lose) in enumerate(losses.items()):
            assert credited(fleet, mine) == set(range(number, 20)), kind
            lose(keys([number])[0])
            assert eventually(lambda n=number: credited(fleet, mine) == set(range(n + 1, 20))), kind
        put(store, [0])
        assert eventually(lambda: 0 in credited(fleet, mine)), "whoever puts it, it can be loaded"
        server.client.config_set("maxmemory-policy", "allkeys-lru")
        server.client.config_set("maxmemory", "1")
        assert eventually(lambda: not credited(fleet, mine)), "evicted"
        assert reconciler.totals().rounds == rounds


def test_a_flush_is_heard_at_once(server: Server) -> None:
    fleet, mine = a_fleet(), range(200)
    with open_store(server.url) as store, following(fleet, store) as reconciler:
        for flush in (("FLUSHALL",), ("FLUSHDB", "ASYNC")):
            put(store, mine)
            fleet.rank("default/w0", 0).apply(1, told(mine))
            assert rests(reconciler)
            reconciler._keys_per_s = 1  # a round would not come to its end
            server.client.execute_command(*flush)
            assert eventually(lambda: not credited(fleet, mine))
            reconciler._keys_per_s = 200_000
            another_round(reconciler)


def test_a_flush_of_another_database_takes_nothing(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvpool.index")
    mine = range(200)
    with credited_pool(server.url + "/1", mine) as (fleet, _, reconciler):
        before = reconciler.totals()
        server.client.flushdb()
        assert eventually(lambda: reconciler.totals().missed_notices > before.missed_notices)
        assert eventually(lambda: reconciler.totals().rounds > before.rounds), "it looks, to be sure"
        assert credited(fleet, mine) == set(mine)
        assert not any("is forgotten" in text for text in caplog.messages), "not for a moment"
        assert reconciler.totals().removed == before.removed


@pytest.mark.parametrize("kept", [True, False], ids=["with its keys", "empty"])
def test_a_server_that_is_started_anew(server: Server, kept: bool) -> None:
    fleet, mine = a_fleet(), range(200)
    with open_store(server.url) as store, following(fleet, store) as reconciler:
        watch = WorkerWatch(
            store, on_worker=lambda *_: None, on_gone=lambda _: None, on_pool_lost=reconciler.pool_lost,
            tenants=["default"], interval_s=0.05,
        )  # fmt: skip
        try:
            put(store, mine)
            fleet.rank("default/w0", 0).apply(1, told(mine))
            assert rests(reconciler)
            assert eventually(lambda: watch.rounds > 0)
            if kept:
                server.client.save()
            server.kill()
            before = reconciler.totals()
            server.start()
            assert eventually(lambda: reconciler.totals().missed_notices > before.missed_notices)
            expected = set(mine) if kept else set()
            assert eventually(lambda: rests(reconciler) and credited(fleet, mine) == expected)
            assert present(server, mine) == expected
        finally:
            watch.close()


# ---- what is missed is repaired


def test_what_was_lost_while_nobody_listened_is_found(server: Server) -> None:
    """The listener's connection is cut, and blocks go in the same moment."""
    mine = range(50)
    with credited_pool(server.url, mine) as (fleet, _, reconciler):
        before = reconciler.totals()
        with server.client.pipeline(transaction=True) as together:
            together.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            together.delete(*keys(range(10)))
            killed, deleted = together.execute()
        assert (killed, deleted) == (1, 10)
        assert eventually(lambda: credited(fleet, mine) == set(range(10, 50)))
        assert reconciler.totals().notices == before.notices, "seen by a round, not heard"
        server.client.delete(*keys([10]))
        assert eventually(lambda: credited(fleet, mine) == set(range(11, 50))), "heard again"


def test_a_listener_that_is_flooded_is_repaired(valkey: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_notices, "MAX_KEYS", 10)
    mine = range(500)
    with credited_pool(valkey.url, mine) as (fleet, _, reconciler):
        before = reconciler.totals()
        valkey.client.delete(*keys(range(400)))  # told of in one message
        assert eventually(lambda: credited(fleet, mine) == set(range(400, 500)))
        assert reconciler.totals().missed_notices > before.missed_notices


def test_a_server_that_falls_silent(
    valkey: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_notices, "PING_S", 0.2)
    monkeypatch.setattr(server_notices, "TIMEOUT_S", 0.3)
    caplog.set_level(logging.INFO, "kvpool.index")  # that it is over is good news
    mine = range(50)
    with credited_pool(valkey.url, mine) as (fleet, _, reconciler):
        valkey.stop()
        try:
            assert eventually(lambda: reconciler.totals().notifications_down == 1)
        finally:
            valkey.go_on()
        assert eventually(lambda: reconciler.totals().notifications_down == 0)
        valkey.client.delete(*keys([1]))
        assert eventually(lambda: 1 not in credited(fleet, mine))
    assert sum("the pool does not say what it loses" in text for text in caplog.messages) == 2


# ---- what a round may and may not do


class Told(MemoryStore):
    """A pool that does things in the middle of a walk."""

    def __init__(self) -> None:
        super().__init__(1 << 24)
        self.meanwhile: Callable[[], object] = lambda: None
        self.hidden: set[str] = set()

    def _scan_keys(self, prefix: str) -> Iterator[list[str]]:
        for names in super()._scan_keys(prefix):
            self.meanwhile()
            yield [name for name in names if name not in self.hidden]
        self.meanwhile()
        yield []


def test_what_is_put_while_the_pool_is_walked_stays() -> None:
    """The walk does not see it, and its event comes before the end."""
    fleet = a_fleet()
    with Told() as store, following(fleet, store) as reconciler:
        put(store, range(5))
        another_round(reconciler)
        assert credited(fleet, range(9)) == set(range(5))
        fleet.rank("default/w0", 0).apply(1, told([5, 6]))  # credited, and not there
        store.hidden = set(keys([7, 4]))
        put(store, [7])
        # 4 was credited before the round and is told again in it, 7 is new, 5 and 6 have gone.
        store.meanwhile = lambda: fleet.rank("default/w0", 0).apply(2, told([7, 4]))
        another_round(reconciler)
        assert credited(fleet, range(9)) == {*range(5), 7}
        store.meanwhile = lambda: None
        another_round(reconciler)
        assert credited(fleet, range(9)) == set(range(4)), "marked again, and not seen"


def test_a_walk_that_fails_takes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvpool.index")
    fleet = a_fleet()
    with Told() as store, following(fleet, store, pause_s=0.01) as reconciler:
        put(store, range(5))
        fleet.rank("default/w0", 0).apply(1, told(range(9)))

        def fail() -> None:
            raise StoreUnavailable("planted")

        another_round(reconciler)
        assert credited(fleet, range(9)) == set(range(5))
        store.meanwhile = fail
        fleet.rank("default/w0", 0).apply(1, told(range(9)))
        failed = reconciler.totals().failed_rounds
        assert eventually(lambda: reconciler.totals().failed_rounds > failed + 1)
        assert credited(fleet, range(9)) == set(range(9))
        store.meanwhile = lambda: None
        assert eventually(lambda: credited(fleet, range(9)) == set(range(5)))
    lines = [text for text in caplog.messages if "cannot be looked through" in text]
    assert len(lines) == 2
    assert lines[0].endswith(": planted")
    assert lines[1].startswith("this is over: ")


def test_a_fault_of_ours_is_logged_and_the_next_round_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    fleet = a_fleet()
    with Told() as store, following(fleet, store, pause_s=0.01):
        put(store, range(5))

        def fail() -> None:
            raise ZeroDivisionError("planted")

        store.meanwhile = fail
        assert eventually(lambda: "looking at the pool failed" in caplog.messages)
        store.meanwhile = lambda: None
        assert eventually(lambda: credited(fleet, range(5)) == set(range(5)))


def test_all_ranks_make_a_block(valkey: Server) -> None:
    """With tensor parallelism a block is there when every rank's part is."""
    fleet, mine = a_fleet(), range(10)
    with open_store(valkey.url) as store, following(fleet, store) as reconciler:
        for rank in range(3):
            put(store, mine, rank=rank)
        fleet.rank("default/w0", 0).apply(1, told(mine))
        assert rests(reconciler)
        valkey.client.delete(*keys([3], rank=2))
        assert eventually(lambda: credited(fleet, mine) == set(mine) - {3}), "heard"
        fleet.rank("default/w0", 0).apply(2, told([3]))
        another_round(reconciler)
        assert credited(fleet, mine) == set(mine) - {3}, "and seen"
        put(store, [3], rank=2)
        assert eventually(lambda: credited(fleet, mine) == set(mine))
        valkey.client.delete(*keys([5], rank=0))
        assert eventually(lambda: credited(fleet, mine) == set(mine) - {5})


@contextmanager
def announced(groups: dict[str, int], *told: tuple[int, int, list[int]]) -> Iterator[tuple[Any, Any, Any]]:
    """A pool of a namespace with these groups: attention and tokens of a block; ``told``: group, rank, blocks."""
    facts: dict[str, Any] = {"model": "m", "groups": len(groups)}
    for number, (attention, block_tokens) in enumerate(groups.items()):
        facts |= {f"group{number}.attention": attention, f"group{number}.block_tokens": block_tokens}
    namespace = Namespace("default", facts)
    fleet = a_fleet(namespace)
    with MemoryStore(1 << 24) as store:
        announce_facts(store, namespace, "m")
        for group, rank, numbers in told:
            names = keys(numbers, group, rank, namespace)
            store.put_many(names, [bytes(NBYTES)] * len(names))
        with following(fleet, store) as reconciler:
            another_round(reconciler)
            (pool,) = fleet.pools()

            def blocks(count: int) -> list[int]:
                prompt = packed64(hashes64(range(count)))
                return list(pool.table.match(prompt, workers=[pool.holder]).pool_blocks)

            def lose(*numbers: int, group: int, rank: int) -> None:
                store.delete_many(keys(numbers, group, rank, namespace))
                another_round(reconciler)

            yield blocks, lose, reconciler._groups["default", namespace.hex]


def test_what_all_ranks_have_in_common_lies_there_once() -> None:
    """Heads (group 0) lie there once for each rank, latent vectors (group 1) once for all."""
    held = ((0, 0, [0, 1, 2, 3]), (0, 1, [0, 1, 2, 3]), (1, 0, [0, 1, 2]))
    with announced({"full": 16, "mla": 16}, *held) as (blocks, lose, groups):
        assert blocks(4) == [3]
        assert groups[1]["kv_cache_spec_kind"] == "mla_attention"
        lose(2, group=0, rank=1)
        assert blocks(4) == [2]


def test_groups_are_as_the_facts_say() -> None:
    """A window needs its last block only; that is known before any worker says so."""
    held = ((0, 0, [4]), (1, 0, [0, 1, 2, 3, 4]))
    with announced({"sliding_window:16": 16, "full": 16}, *held) as (blocks, _, groups):
        assert blocks(5) == [5]
        assert groups[0]["kv_cache_spec_sliding_window"] == 16
        assert groups[1] == {"kv_cache_spec_kind": "full_attention", "block_size": 16}


def test_records_of_several_blocks_are_credited_whole() -> None:
    """Their keys have the hash of the last block; that is known before any worker says so."""
    with announced({"full": 48}, (0, 0, [2, 5, 11])) as (blocks, _, _):  # blocks 0 to 5, and 9 to 11
        assert [blocks(count) for count in (2, 3, 8, 12)] == [[], [3], [6], [6]]


def test_other_namespaces_and_tenants_are_left_alone(valkey: Server) -> None:
    fleet = a_fleet(NAMESPACE, OTHER)
    with open_store(valkey.url) as store, following(fleet, store) as reconciler:
        put(store, range(5))
        stranger = Namespace("stranger", dict(NAMESPACE.facts))
        for other, numbers in ((OTHER, [7]), (stranger, [8]), (Namespace("default", {"model": "x"}), [9])):
            store.put_many(keys(numbers, namespace=other), [bytes(NBYTES)])
        valkey.client.set("kvpool:default:no-key-of-a-block", 1)
        assert rests(reconciler)
        another_round(reconciler)
        assert credited(fleet, range(10)) == set(range(5))
        assert credited(fleet, range(10), OTHER) == {7}


def test_a_namespace_that_comes_is_looked_at_at_once() -> None:
    fleet = Fleet()
    with MemoryStore() as store, following(fleet, store) as reconciler:
        put(store, range(5))
        assert eventually(lambda: reconciler.totals().rounds > 0)
        fleet.add(a_worker("w0", namespace=NAMESPACE.hex), "pool")
        assert eventually(lambda: credited(fleet, range(9)) == set(range(5)))


def test_files_are_looked_through(tmp_path: Path) -> None:
    """Nobody says what a directory loses."""
    fleet, mine = a_fleet(), range(50)
    with open_store(f"file://{tmp_path}/pool") as store, following(fleet, store, pause_s=0.05) as reconciler:
        put(store, mine)
        assert eventually(lambda: credited(fleet, mine) == set(mine))
        store.delete_many(keys(range(10)))
        for path in (tmp_path / "pool" / "blocks").glob(f"*/*.{digest(10).hex()}.*"):
            path.unlink()
        assert eventually(lambda: credited(fleet, mine) == set(range(11, 50)))
        assert reconciler.totals().notifications_down == 0
        assert reconciler.totals().max_staleness_s > 0.05


def test_the_rate_is_kept(valkey: Server) -> None:
    """A walk of some thousand keys takes no less time than was asked for."""
    fleet = a_fleet()
    with open_store(valkey.url) as store:
        put(store, range(3000))
        with following(fleet, store, keys_per_s=2500) as reconciler:
            started_s = time.monotonic()
            assert eventually(lambda: reconciler.totals().rounds > 0)
            assert time.monotonic() - started_s > 1.0
            assert reconciler.totals().round_s > 1.0
            assert reconciler.totals().max_staleness_s == 2 * reconciler.totals().round_s + NEVER_S
            assert credited(fleet, range(3000)) == set(range(3000))


# ---- rights


def test_who_may_not_listen_is_told_and_rounds_do_it(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    mine = range(20)
    for right in ("-subscribe", "-client|tracking", "resetchannels"):
        caplog.clear()
        fleet = a_fleet()
        with open_store(without(server, right)) as store, following(fleet, store, pause_s=0.05) as reconciler:
            put(store, mine)
            assert eventually(lambda r=reconciler: r.totals().notifications_down == 1)
            assert eventually(lambda f=fleet: credited(f, mine) == set(mine))
            server.client.delete(*keys(range(5)))
            assert eventually(lambda f=fleet: credited(f, mine) == set(range(5, 20)))
            server.client.flushall()
            assert eventually(lambda f=fleet: not credited(f, mine))
        (line,) = [text for text in caplog.messages if "does not say what it loses" in text]
        assert "NOPERM" in line or "ermission" in line
        assert "allow +client|id +client|tracking +subscribe &__redis__:invalidate to this user" in line
        assert "pass-word" not in caplog.text


def test_who_may_not_walk_is_told_and_notices_do_it(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    fleet, mine = a_fleet(), range(20)
    with open_store(without(server, "-scan")) as store, following(fleet, store, pause_s=0.05) as reconciler:
        put(store, mine)
        fleet.rank("default/w0", 0).apply(1, told(mine))
        assert eventually(lambda: reconciler.totals().missed_notices > 0)
        assert eventually(lambda: reconciler.totals().failed_rounds > 1)
        assert credited(fleet, mine) == set(mine)
        server.client.delete(*keys(range(5)))
        assert eventually(lambda: credited(fleet, mine) == set(range(5, 20)))
    (line,) = [text for text in caplog.messages if "cannot be looked through" in text]
    assert "cannot look at its blocks" in line
    assert "pass-word" not in caplog.text


@pytest.mark.parametrize("rate", [0, -1, 1.5, True, 1 << 40])
def test_a_rate_is_a_number(rate: Any) -> None:
    with MemoryStore() as store, pytest.raises(ConfigError, match="keys a second"):
        PoolReconciler(Fleet(), store, keys_per_s=rate)


# ---- several servers


def test_every_node_of_a_cluster_is_heard_and_walked(tmp_path: Path) -> None:
    cluster = Cluster("valkey-server", tmp_path)
    try:
        fleet, mine = a_fleet(), range(60)
        with open_store(cluster.url) as store, following(fleet, store) as reconciler:
            put(store, mine)
            assert eventually(lambda: reconciler.totals().missed_notices > 0)
            assert rests(reconciler)
            assert eventually(lambda: credited(fleet, mine) == set(mine))
            left = set(mine)
            for one in cluster.servers:
                key = one.client.randomkey()
                while b"kvpool:default:" + NAMESPACE.hex.encode() not in key:
                    key = one.client.randomkey()
                one.client.delete(key)
                left -= {number for number in left if keys([number])[0].encode() == key}
                assert eventually(lambda left=left: credited(fleet, mine) == left)
            assert len(left) == 57
            rounds = reconciler.totals().rounds
            cluster.servers[0].client.flushall()
            assert eventually(lambda: reconciler.totals().rounds > rounds and rests(reconciler))
            kept = {number for number in left if store.contains_many(keys([number])) == [True]}
            assert 0 < len(kept) < 57
            assert eventually(lambda: credited(fleet, mine) == kept)
    finally:
        cluster.kill()


def test_another_server_is_listened_to_when_it_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a failover: who is the primary is asked again and again."""
    monkeypatch.setattr(server_notices, "SERVERS_S", 0.02)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with (
        running("valkey-server", tmp_path / "a") as one,
        running("valkey-server", tmp_path / "b") as two,
        open_store(one.url) as store,
        open_store(two.url) as other,
    ):
        found = [store._primaries.urls()]  # type: ignore[attr-defined]
        monkeypatch.setattr(store._primaries, "urls", lambda: found[-1])  # type: ignore[attr-defined]
        notices = store.notices()
        assert notices is not None
        try:
            assert eventually(lambda: notices.take(0.01).missed)
            put(store, [1])
            assert eventually(lambda: notices.take(0.05).keys == keys([1]))
            found.append(other._primaries.urls())  # type: ignore[attr-defined]
            assert eventually(lambda: notices.take(0.01).missed)
            put(other, [2])
            assert eventually(lambda: notices.take(0.05).keys == keys([2]))
            assert eventually(lambda: one.client.client_list(_type="pubsub") == [])
        finally:
            notices.close()


# ---- anything, for long


@pytest.mark.parametrize(
    "seconds", [3.0, pytest.param(SEARCH_S, marks=[pytest.mark.soak, pytest.mark.timeout(SEARCH_S + 120)])]
)
def test_whatever_happens_it_is_right_when_it_rests(valkey: Server, seconds: float) -> None:
    """Puts, losses, lost and late events, cut listeners and flushes by chance, and now and then some rest."""
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    fleet, everything = a_fleet(), range(300)
    late: list[bytes] = []
    with (
        open_store(valkey.url) as store,
        following(fleet, store, pause_s=0.1, keys_per_s=100_000) as reconciler,
    ):
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            for _ in range(60):
                some = chance.sample(everything, chance.randint(1, 20))
                what = chance.random()
                if what < 0.5:
                    put(store, some)
                    late.append(told(some))
                elif what < 0.8:
                    valkey.client.delete(*keys(some))
                elif what < 0.85:
                    late.append(batch(removed(hashes64(some), medium="STORAGE")))
                elif what < 0.87:
                    valkey.client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
                elif what < 0.88:
                    valkey.client.flushall()
                while late and chance.random() < 0.4:
                    payload = late.pop(chance.randrange(len(late)))
                    if chance.random() < 0.8:  # else it is lost
                        fleet.rank("default/w0", 0).apply(1, payload)
            for payload in late:
                fleet.rank("default/w0", 0).apply(1, payload)
            late.clear()
            assert eventually(
                lambda: credited(fleet, everything) == present(valkey, everything),
                within_s=60 + reconciler.totals().max_staleness_s,
            ), f"seed {seed}"
