"""Workers that announce themselves in real pools, and who watches them; pools that go away, return, or lose all."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvpool import ConfigError, open_store
from kvpool.discovery import registry
from kvpool.discovery.registry import Announcer, WorkerWatch
from kvpool.discovery.worker import Publisher, Worker
from kvpool.discovery.worker_record import Announced, merge_ranks, pack_worker, unpack_worker
from kvpool.key.key import is_request_key, request_key, workers_prefix
from kvpool.store.store import Store
from tests.conftest import eventually
from tests.store.servers import SERVERS, Server, running

LEASE_S = 1.0
KEY = "kvpool:default:worker:3:10.0.0.7:5557"
FIELDS: dict[str, Any] = {
    "version": 1,
    "block_tokens": 16,
    "events": "tcp://10.0.0.7:5560",
    "replay": "tcp://10.0.0.7:5660",
    "lease_s": 10.0,
    "model": "m",
    "hash_algorithm": "sha256_cbor",
    "hash_seed_id": "0123456789abcdef",
    "address": "http://10.0.0.7:8000",
    "incarnation": "one",
    "namespace": "ab" * 16,
}


def worker(name: str = "10.0.0.7:5557", incarnation: str = "one", dp_rank: int = 3, **more: Any) -> Worker:
    fields: dict[str, Any] = {
        "name": name,
        "model": "m",
        "block_tokens": 16,
        "hash_seed_id": "0123456789abcdef",
        "publishers": (Publisher(dp_rank, "tcp://10.0.0.7:5560", "tcp://10.0.0.7:5660"),),
        "address": "http://10.0.0.7:8000",
        "incarnation": incarnation,
        "namespace": "ab" * 16,
    }
    return Worker(**{**fields, **more})


# ---------------------------------------------------------------- the record


def test_golden_record() -> None:
    key, record = pack_worker(worker(), 10)
    assert key == KEY
    assert msgpack.unpackb(record) == FIELDS
    assert record.hex() == (
        "8ba776657273696f6e01ac626c6f636b5f746f6b656e7310a66576656e7473b37463703a2f2f31302e302e302e373a35353630"
        "a67265706c6179b37463703a2f2f31302e302e302e373a35363630a76c656173655f73cb4024000000000000a56d6f64656ca1"
        "6dae686173685f616c676f726974686dab7368613235365f63626f72ac686173685f736565645f6964b0303132333435363738"
        "39616263646566a761646472657373b4687474703a2f2f31302e302e302e373a38303030ab696e6361726e6174696f6ea36f6e"
        "65a96e616d657370616365d9206162616261626162616261626162616261626162616261626162616261626162"
    )
    assert unpack_worker(key, record) == Announced(worker(), 10.0)


@pytest.mark.parametrize(
    "changed",
    [
        {"replay": ""},
        {"address": "", "namespace": ""},
        {"a_field_of_a_later_version": 3},
        {"events": "ipc:///run/events"},
        {"lease_s": 1.0},
    ],
)
def test_a_record_may_say_less_or_more(changed: dict[str, Any]) -> None:
    assert unpack_worker(KEY, msgpack.packb({**FIELDS, **changed})) is not None


@pytest.mark.parametrize(
    "changed",
    [
        {"version": 2},
        {"version": "1"},
        {"block_tokens": 0},
        {"block_tokens": "16"},
        {"block_tokens": True},
        {"events": ""},
        {"events": "tcp://*:5557"},
        {"events": "tcp://host:0"},
        {"events": "inproc://x"},
        {"events": b"tcp://host:1"},
        {"replay": None},
        {"lease_s": 10},
        {"lease_s": 0.5},
        {"lease_s": float("nan")},
        {"lease_s": 1e9},
        {"model": ""},
        {"model": "m\n"},
        {"model": "m" * 2000},
        {"model": None},
        {"hash_algorithm": "sha256"},
        {"hash_algorithm": {}},
        {"hash_seed_id": "x"},
        {"hash_seed_id": 3},
        {"address": 3},
        {"incarnation": ""},
        {"namespace": "ab"},
        {"namespace": False},
        {"more": [1]},
        {"more": msgpack.ExtType(1, b"x")},
        {"more": "x" * (16 << 10)},
    ],
)
def test_a_record_that_cannot_be_followed_is_none(changed: dict[str, Any]) -> None:
    assert unpack_worker(KEY, msgpack.packb({**FIELDS, **changed})) is None


def test_what_is_no_record_is_none() -> None:
    good = msgpack.packb(FIELDS)
    for at in range(len(good)):
        assert unpack_worker(KEY, good[:at]) is None, "truncated"
    for missing in FIELDS:
        assert unpack_worker(KEY, msgpack.packb({k: v for k, v in FIELDS.items() if k != missing})) is None
    for key in (
        "kvpool:default:worker:3",
        "kvpool:default:worker:03:w",
        "kvpool:default:worker:65536:w",
        "kvpool:default:worker:3:w w",
        "kvpool::worker:3:w",
        "kvpool:default:" + "ab" * 16 + ":facts",
    ):
        assert unpack_worker(key, good) is None
    assert unpack_worker(KEY, b"\xc1") is None
    assert unpack_worker(KEY, msgpack.packb([1])) is None


@pytest.mark.parametrize(
    ("wrong", "lease_s"),
    [
        (worker(name="a b"), 10.0),
        (worker(name="x" * 129), 10.0),
        (worker(tenant="a:b"), 10.0),
        (worker(incarnation=""), 10.0),
        (worker(publishers=()), 10.0),
        (worker(publishers=(Publisher(0, "tcp://h:1"), Publisher(1, "tcp://h:2"))), 10.0),
        (worker(), 0.5),
        (worker(), 4000.0),
    ],
)
def test_what_nobody_could_follow_is_not_announced(wrong: Worker, lease_s: float) -> None:
    with pytest.raises(ConfigError), open_store("memory://") as store:
        Announcer(store, wrong, lease_s=lease_s)


def test_ranks_of_one_engine_are_one_worker() -> None:
    ranks = [Announced(worker(incarnation=f"i{rank}", dp_rank=rank), 10.0) for rank in (1, 0, 2)]
    workers, problems = merge_ranks(ranks)
    assert problems == []
    (merged,) = workers.values()
    assert [publisher.dp_rank for publisher in merged.publishers] == [0, 1, 2]
    assert dataclasses.replace(merged, publishers=(), incarnation="") == worker(publishers=(), incarnation="")
    incarnations = {merged.incarnation}
    for fewer in (ranks[:2], ranks[:1], [*ranks[:2], Announced(worker(incarnation="new", dp_rank=2), 10.0)]):
        workers, _ = merge_ranks(fewer)
        incarnations.add(workers["default/10.0.0.7:5557"].incarnation)
    assert len(incarnations) == 4, "a rank that comes, goes or starts anew is another start of the worker"
    assert merge_ranks(reversed(ranks))[0] == merge_ranks(ranks)[0]


def test_ranks_of_different_engines_are_told_apart() -> None:
    other = Announced(worker(dp_rank=4, model="n", block_tokens=32), 10.0)
    elsewhere = Announced(worker(tenant="u", dp_rank=4), 10.0)
    workers, problems = merge_ranks([other, Announced(worker(), 10.0), elsewhere])
    assert workers == {"default/10.0.0.7:5557": worker(), "u/10.0.0.7:5557": elsewhere.worker}
    (problem,) = problems
    assert "rank 4 is left out" in problem
    assert "block_tokens is 16 and 32, model is 'm' and 'n'" in problem


def test_an_engine_that_announces_itself_loads_neither_grpc_nor_zmq() -> None:
    program = (
        "import sys, kvpool.discovery.registry; sys.exit(bool({'grpc', 'zmq', 'torch'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


# ---------------------------------------------------------------- in a pool


@pytest.fixture(params=["memory", "file", *SERVERS])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param in SERVERS:
        with running(request.param, tmp_path) as server, open_store(server.url) as store:
            yield store
    else:
        url = "memory://" if request.param == "memory" else f"file://{tmp_path}/pool"
        with open_store(url) as store:
            yield store


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running("valkey-server", tmp_path) as one:
        yield one


@contextmanager
def announced(store: Store, one: Worker, lease_s: float = LEASE_S) -> Iterator[list[str]]:
    said: list[str] = []
    announcer = Announcer(store, one, lease_s=lease_s, say=said.append)
    try:
        yield said
    finally:
        announcer.close()


class Watched:
    """What a watch has told."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.gone: list[str] = []
        self.starts: list[str] = []
        self.pool_losses = 0
        self.tells = 0
        self.raising: Exception | None = None

    def on_worker(self, one: Worker, keep_s: float) -> None:
        assert keep_s > 5
        if self.raising is not None:
            raise self.raising
        if self.workers.get(one.id) != one:
            self.starts.append(one.incarnation)
        self.workers[one.id] = one
        self.tells += 1

    def on_gone(self, worker_id: str) -> None:
        del self.workers[worker_id]
        self.gone.append(worker_id)

    def on_pool_lost(self) -> None:
        self.pool_losses += 1

    def sees(self, *names: str) -> bool:
        return set(self.workers) == {f"default/{name}" for name in names}


@contextmanager
def watching(
    store: Store, told: Watched, tenants: list[str] | None = None, life: str = ""
) -> Iterator[WorkerWatch]:
    watch = WorkerWatch(
        store,
        on_worker=told.on_worker,
        on_gone=told.on_gone,
        on_pool_lost=told.on_pool_lost,
        tenants=tenants,
        interval_s=0.05,
        life=life,
    )
    try:
        yield watch
    finally:
        watch.close()
        assert not watch._thread.is_alive()


def rounds(watch: WorkerWatch, count: int) -> bool:
    """Wait for some more rounds in which the pool answered."""
    until = watch.rounds + count
    return eventually(lambda: watch.rounds >= until)


def leave_facts(store: Store) -> None:
    """As the connector does: so the pool is not empty when workers have stopped."""
    store.announce("kvpool:default:" + "ab" * 16 + ":facts", b"facts", lease_s=600)


def test_a_worker_comes_stays_beyond_its_lease_and_stops(store: Store) -> None:
    told = Watched()
    leave_facts(store)
    with watching(store, told, ["default"]) as watch:
        with announced(store, worker("a")) as said, announced(store, worker("b")):
            assert eventually(lambda: told.sees("a", "b"))
            assert told.workers["default/a"] == worker("a")
            start_s = time.monotonic()
            assert eventually(lambda: time.monotonic() > start_s + 1.5 * LEASE_S)
            assert (told.gone, len(told.starts)) == ([], 2)
            tells = told.tells
            assert eventually(lambda: told.tells > tells + 4), "told again in each round"
        assert rounds(watch, 2)
        assert sorted(told.gone) == ["default/a", "default/b"], "at once, for they have withdrawn"
        assert (said, told.pool_losses) == ([], 0)


def test_a_worker_that_dies_is_gone_when_its_lease_ends(store: Store) -> None:
    told = Watched()
    leave_facts(store)
    key, record = pack_worker(worker("dies"), LEASE_S)
    store.announce(key, record, lease_s=0.3)
    with watching(store, told, ["default"]), announced(store, worker("lives")):
        assert eventually(lambda: told.gone == ["default/dies"])
        assert eventually(lambda: told.sees("lives"))
        assert told.pool_losses == 0


def test_another_start_is_told_and_the_one_before_does_not_withdraw_it(store: Store) -> None:
    told = Watched()
    leave_facts(store)
    with watching(store, told, ["default"]) as watch:
        with announced(store, worker("a", "one")):
            assert eventually(lambda: told.starts == ["one"])
            second = Announcer(store, worker("a", "two"), lease_s=600)
            assert eventually(lambda: "two" in told.starts)
        assert rounds(watch, 2)
        assert told.gone == []
        assert eventually(lambda: told.workers["default/a"].incarnation in ("one", "two"))
        second.close()


def test_two_engines_of_one_name_are_told(store: Store) -> None:
    with announced(store, worker("a", "one")) as first, announced(store, worker("a", "two")) as second:
        assert eventually(lambda: bool(first) and bool(second))
        assert "somebody else announces a worker a of tenant default" in first[0]
        assert len(first) == 1
        assert len(second) == 1


def test_all_tenants_are_found(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "TENANTS_INTERVAL_S", 0.1)
    told = Watched()
    with watching(store, told), announced(store, worker("a", tenant="t")):
        assert eventually(lambda: set(told.workers) == {"t/a"})
        with announced(store, worker("a", tenant="u")):
            assert eventually(lambda: set(told.workers) == {"t/a", "u/a"})


def test_only_the_tenants_that_are_named(store: Store) -> None:
    told = Watched()
    with watching(store, told, ["u"]) as watch, announced(store, worker("a", tenant="t")):
        with announced(store, worker("a", tenant="u")):
            assert eventually(lambda: set(told.workers) == {"u/a"})
        assert rounds(watch, 2)
    with pytest.raises(ConfigError, match="tenant"):
        WorkerWatch(store, on_worker=told.on_worker, on_gone=told.on_gone, tenants=["a:b"])


def test_records_that_cannot_be_read_are_counted_and_passed_over(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    told = Watched()
    store.announce("kvpool:default:worker:0:bad", b"\xc1", lease_s=60)
    store.announce("kvpool:default:worker:0:later", msgpack.packb({**FIELDS, "version": 2}), lease_s=60)
    with watching(store, told) as watch, announced(store, worker("a")):
        assert eventually(lambda: told.sees("a"))
        assert rounds(watch, 3)
        assert watch.unreadable_records == 2
    assert [text for text in caplog.messages if "kvpool:default:worker:0:bad" in text] == [
        "no record of a worker that this version can follow: kvpool:default:worker:0:bad"
    ]


@pytest.mark.parametrize("error", [ConfigError("the fleet is full"), ZeroDivisionError("planted")])
def test_what_is_told_may_raise(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    told = Watched()
    told.raising = error
    with (
        open_store("memory://") as store,
        watching(store, told, ["default"]) as watch,
        announced(store, worker("a")),
    ):
        assert eventually(lambda: any("worker default/a" in text for text in caplog.messages))
        assert rounds(watch, 2)
        told.raising = None
        assert eventually(lambda: told.sees("a"))


# ---------------------------------------------------------------- asking for all that a rank holds


@contextmanager
def asking(store: Store, told: Watched, incomplete: set[tuple[str, int]]) -> Iterator[list[tuple[str, int]]]:
    """A watch that asks these; yields whom it has asked, again and again."""
    asked: list[tuple[str, int]] = []
    watch = WorkerWatch(
        store,
        on_worker=told.on_worker,
        on_gone=told.on_gone,
        on_pool_lost=told.on_pool_lost,
        incomplete=lambda: set(incomplete),
        on_asked=lambda worker_id, dp_rank: asked.append((worker_id, dp_rank)),
        tenants=["default"],
        interval_s=0.05,
    )
    try:
        yield asked
    finally:
        watch.close()


def test_a_rank_is_asked_until_all_it_holds_is_known(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ASK_S", 0.2)
    monkeypatch.setattr(registry, "REQUEST_LEASE_S", 0.6)
    told, incomplete = Watched(), {("default/a", 3), ("default/stock", 0)}
    announcers = [Announcer(store, worker(name), lease_s=LEASE_S) for name in "ab"]
    try:
        # Several indexes, which leave one request.
        with asking(store, told, incomplete) as asked, asking(store, Watched(), incomplete) as too:
            assert eventually(lambda: announcers[0].asked)
            assert eventually(lambda: len(asked) > 2 and len(too) > 2), "renewed"
            assert set(asked) == {("default/a", 3)}, "stock vLLM has nobody who would hear it"
            requests = [key for key in store.announcements(workers_prefix("default")) if is_request_key(key)]
            assert requests == ["kvpool:default:worker:3:a?"]
            assert not announcers[1].asked
            incomplete.clear()
            assert eventually(lambda: not announcers[0].asked), "it knows all, and asks no more"
            count = len(asked)
            assert told.sees("a", "b")
        assert len(asked) == count
    finally:
        for announcer in announcers:
            announcer.close()


def test_a_request_is_no_record_and_no_sign_of_life(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    told = Watched()
    with watching(store, told, ["default"]) as watch:
        with announced(store, worker("a")) as said:
            store.announce(request_key("kvpool:default:worker:3:a"), b"?", lease_s=600)
            assert eventually(lambda: told.sees("a"))
            assert rounds(watch, 2)
            assert watch.unreadable_records == 0
            # As one that was emptied and heard from an index since.
            store.withdraw("kvpool:default:worker:3:a")
            assert eventually(lambda: told.pool_losses >= 1)
        assert said == []
    assert not [text for text in caplog.messages if "no record" in text]


def test_few_are_asked_in_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each announcement is a write; those that cannot answer must not keep others from being asked."""
    monkeypatch.setattr(registry, "MAX_ASKED", 2)
    monkeypatch.setattr(registry, "ASK_S", 0.0)
    told = Watched()
    with open_store("memory://") as store:
        for dp_rank in range(5):
            key, record = pack_worker(worker("a", dp_rank=dp_rank), 60)
            store.announce(key, record, lease_s=60)
        with asking(store, told, {("default/a", dp_rank) for dp_rank in range(5)}) as asked:
            assert eventually(lambda: len(asked) >= 10)
        assert {dp_rank for _, dp_rank in asked[:6]} == set(range(5)), "each in its turn"


def test_who_may_not_write_says_so_once_and_watches_on(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.client.execute_command("ACL", "SETUSER", "u", "on", ">p", "~kvpool:default:*", "+@all", "-set")
    told = Watched()
    with open_store(server.url) as own, open_store(server.url.replace("://", "://u:p@")) as store:
        with announced(own, worker("a")), asking(store, told, {("default/a", 3)}) as asked:
            assert eventually(lambda: any("asked for all they hold" in text for text in caplog.messages))
            tells = told.tells
            assert eventually(lambda: told.tells > tells + 4)
        assert asked == []
    assert sum("asked for all they hold" in text for text in caplog.messages) == 1


def test_a_pool_that_is_away_asks_for_nothing(server: Server) -> None:
    with open_store(server.url) as store:
        announcer = Announcer(store, worker("a"), lease_s=LEASE_S, say=lambda text: None)
        try:
            store.announce(request_key(KEY.replace("10.0.0.7:5557", "a")), b"?", lease_s=600)
            assert eventually(lambda: announcer.asked)
            server.kill()
            assert eventually(lambda: not announcer.asked, within_s=15)
        finally:
            announcer.close()


# ---------------------------------------------------------------- pools that go away


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_a_pool_that_is_away_takes_no_worker_along(
    server: Server, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    told = Watched()
    with open_store(server.url) as store, watching(store, told, ["default"]) as watch:
        with announced(store, worker("a")) as said:
            leave_facts(store)
            assert eventually(lambda: told.sees("a"))
            server.kill() if fault == "killed" else server.stop()
            assert eventually(lambda: bool(said), within_s=15)
            tells = told.tells
            start_s = time.monotonic()
            assert eventually(lambda: time.monotonic() > start_s + 1.5 * LEASE_S)
            assert eventually(lambda: told.tells > tells, within_s=15), "kept alive while nothing is known"
            server.start() if fault == "killed" else server.go_on()
            assert eventually(lambda: len(said) == 2, within_s=15), "announced again"
            assert rounds(watch, 3)
            assert (told.gone, told.starts) == ([], ["one"])
            assert told.pool_losses == (fault == "killed"), "a server that starts anew has lost what it held"
            assert "cannot be announced, and no index sees it" in said[0]
            assert said[1].endswith("is announced again")
            leave_facts(store)
        assert eventually(lambda: told.gone == ["default/a"], within_s=15)
    assert sum("the workers in the pool cannot be read" in text for text in caplog.messages) == 1
    assert sum("can be read again" in text for text in caplog.messages) == 1


def test_who_died_while_the_pool_was_away_is_gone_a_lease_later(server: Server) -> None:
    told = Watched()
    key, record = pack_worker(worker("dies"), LEASE_S)
    with open_store(server.url) as store:
        store.announce(key, record, lease_s=LEASE_S)
        with watching(store, told, ["default"]) as watch:
            assert eventually(lambda: told.sees("dies"))
            server.kill()
            assert eventually(lambda: watch._away)
            server.start()
            assert rounds(watch, 1)
            assert told.sees("dies"), "it has not had a chance to say that it lives"
            assert eventually(lambda: told.gone == ["default/dies"])


def test_a_pool_that_was_emptied_is_told_and_takes_no_worker_along(store: Store, tmp_path: Path) -> None:
    told = Watched()
    with watching(store, told, ["default"]) as watch, announced(store, worker("a")):
        leave_facts(store)
        assert eventually(lambda: told.sees("a"))
        for key in store.announcements(""):
            store.withdraw(key)
        assert eventually(lambda: told.pool_losses == 1)
        assert rounds(watch, 3)
        assert (told.gone, told.pool_losses) == ([], 1)


def test_a_pool_that_does_not_let_a_record_be_withdrawn_is_said(server: Server) -> None:
    server.client.execute_command("ACL", "SETUSER", "u", "on", ">p", "~kvpool:default:*", "+@all", "-unlink")
    with open_store(server.url.replace("://", "://u:p@")) as store:
        with announced(store, worker("a")) as said:
            assert eventually(lambda: bool(store.announcements(workers_prefix("default"))))
        (sentence,) = said
        assert "worker a is not withdrawn, and announced until its lease ends: " in sentence


def test_a_server_that_was_started_anew_is_told_even_if_it_has_something(server: Server) -> None:
    told = Watched()
    with open_store(server.url) as store, announced(store, worker("a")):
        leave_facts(store)
        with watching(store, told, ["default"]) as watch:
            assert eventually(lambda: told.sees("a"))
            server.client.save()
            server.kill()
            server.start()
            assert rounds(watch, 2)
            assert list(store.announcements("kvpool:default:a")) == ["kvpool:default:" + "ab" * 16 + ":facts"]
            assert (told.pool_losses, told.gone) == (1, [])


def test_a_server_that_was_started_anew_before_the_watch_was(server: Server) -> None:
    """What an index has read about the pool before it began to watch may be of another life."""
    with open_store(server.url) as store:
        for life, losses in [("", 0), (store.server_run_id(), 0), ("0" * 40, 1)]:
            told = Watched()
            with watching(store, told, ["default"], life) as watch:
                assert rounds(watch, 2)
                assert (told.pool_losses, watch.life) == (losses, store.server_run_id())


def test_a_server_that_keeps_its_run_to_itself(server: Server) -> None:
    server.client.execute_command(
        "ACL", "SETUSER", "u", "on", ">p", "~kvpool:default:*", "+@all", "-info", "-@dangerous"
    )
    told = Watched()
    url = server.url.replace("://", "://u:p@")
    with open_store(server.url) as full:
        assert len(full.server_run_id()) == 40
    with open_store(url) as store, watching(store, told, ["default"]), announced(store, worker("a")):
        assert store.server_run_id() == ""
        assert eventually(lambda: told.sees("a"))


def test_stores_without_a_server_have_one_life(tmp_path: Path) -> None:
    for url in ("memory://", f"file://{tmp_path}/pool"):
        with open_store(url) as store:
            assert store.server_run_id() == ""


def test_closing_does_not_wait_for_a_pool_that_hangs(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "CLOSE_S", 0.2)
    told = Watched()
    with open_store(server.url) as store:
        announcer = Announcer(store, worker("a"), lease_s=LEASE_S, say=lambda text: None)
        watch = WorkerWatch(store, on_worker=told.on_worker, on_gone=told.on_gone, interval_s=0.02)
        assert eventually(lambda: told.sees("a"))
        server.stop()
        try:
            waited = threading.Event()

            def close() -> None:
                announcer.close()
                watch.close()
                announcer.close()
                waited.set()

            closer = threading.Thread(target=close)
            closer.start()
            assert waited.wait(5)
            closer.join()
        finally:
            server.go_on()


def test_an_announcer_tells_at_once_that_its_worker_entered_another_namespace(store: Store) -> None:
    """It is the same start of the worker: what its own memory holds is as it was."""
    announcer = Announcer(store, worker(), lease_s=600.0)
    try:
        watched = Watched()
        with watching(store, watched):
            assert eventually(lambda: watched.sees("10.0.0.7:5557"))
            announcer.enter("cd" * 16)
            wanted = worker(namespace="cd" * 16)
            assert eventually(lambda: watched.workers.get(wanted.id) == wanted, within_s=3)
            assert set(watched.starts) == {"one"}
    finally:
        announcer.close()


def test_ranks_that_are_each_in_a_namespace_of_their_own_are_one_worker_without_one() -> None:
    ranks = [Announced(worker(incarnation=f"i{rank}", dp_rank=rank), 10.0) for rank in (0, 1)]
    alone = Announced(worker(incarnation="i1", dp_rank=1, namespace="cd" * 16), 10.0)
    (before,), (after,) = (merge_ranks(some)[0].values() for some in (ranks, [ranks[0], alone]))
    assert (before.namespace, after.namespace) == ("ab" * 16, "")
    assert after.publishers == before.publishers
    assert after.incarnation == before.incarnation
    assert merge_ranks([ranks[0], alone])[1] == []
