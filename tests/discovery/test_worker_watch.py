"""Who watches the workers in real pools; pools that go away, return, or lose all."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvpool import ConfigError, open_store, threads
from kvpool.discovery import announcer, worker_watch
from kvpool.discovery.announcer import Announcer
from kvpool.discovery.worker_record import pack_worker
from kvpool.discovery.worker_watch import WorkerWatch
from kvpool.key.key import is_request_key, request_key, workers_prefix
from kvpool.store.store import Store
from tests.support.announced_workers import (
    FIELDS,
    LEASE_S,
    Watched,
    announced,
    leave_facts,
    rounds,
    watching,
    worker,
)
from tests.support.deadlines import eventually
from tests.support.memory_store import MemoryStore
from tests.support.servers import Server


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
    store.announce(key, record, lease_s=LEASE_S)
    with watching(store, told, ["default"]), announced(store, worker("lives")):
        assert eventually(lambda: told.gone == ["default/dies"])
        assert eventually(lambda: told.sees("lives"))
        assert told.pool_losses == 0


def test_another_start_is_told_and_the_one_before_does_not_withdraw_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer, "READ_S", 600.0)
    told = Watched()
    leave_facts(store)
    with watching(store, told, ["default"]) as watch:
        with announced(store, worker("a", "one"), lease_s=600):  # not renewed: it would replace the other
            assert eventually(lambda: told.starts == ["one"])
            second = Announcer(store, worker("a", "two"), lease_s=600)
            assert eventually(lambda: "two" in told.starts)
        assert rounds(watch, 2)
        assert told.gone == []
        assert eventually(lambda: told.workers["default/a"].incarnation in ("one", "two"))
        second.close()


def test_all_tenants_are_found(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_watch, "TENANTS_INTERVAL_S", 0.1)
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
    with MemoryStore() as store, watching(store, told, ["default"]) as watch, announced(store, worker("a")):
        assert eventually(lambda: any("worker default/a" in text for text in caplog.messages))
        assert rounds(watch, 2)
        told.raising = None
        assert eventually(lambda: told.sees("a"))


def test_a_rank_is_asked_until_all_it_holds_is_known(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_watch, "REQUEST_EVERY_S", 0.2)
    monkeypatch.setattr(worker_watch, "REQUEST_LEASE_S", 0.6)
    told, too, incomplete = Watched(), Watched(), {("default/a", 3), ("default/stock", 0)}
    of_both: Any = {"tenants": ["default"], "incomplete": incomplete}
    announcers = [Announcer(store, worker(name), lease_s=LEASE_S) for name in "ab"]
    try:
        # Several indexes, which leave one request.
        with watching(store, told, **of_both), watching(store, too, **of_both):
            assert eventually(lambda: announcers[0].requested)
            assert eventually(lambda: len(told.asked) > 2 and len(too.asked) > 2), "renewed"
            assert set(told.asked) == {("default/a", 3)}, "stock vLLM has nobody who would hear it"
            requests = [key for key in store.announcements(workers_prefix("default")) if is_request_key(key)]
            assert requests == ["kvpool:default:worker:3:a?"]
            assert not announcers[1].requested
            incomplete.clear()
            assert eventually(lambda: not announcers[0].requested), "it knows all, and asks no more"
            count = len(told.asked)
            assert told.sees("a", "b")
        assert len(told.asked) == count
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

            def is_missed() -> bool:
                store.withdraw(
                    "kvpool:default:worker:3:a"
                )  # again, where it was renewed before anybody looked
                return told.pool_losses >= 1

            assert eventually(is_missed), "as of one that was emptied and heard from an index since"
        assert said == []
    assert not [text for text in caplog.messages if "no record" in text]


def test_few_are_asked_in_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each announcement is a write; those that cannot answer must not keep others from being asked."""
    monkeypatch.setattr(worker_watch, "MAX_REQUESTS", 2)
    monkeypatch.setattr(worker_watch, "REQUEST_EVERY_S", 0.0)
    told = Watched()
    with MemoryStore() as store:
        for dp_rank in range(5):
            key, record = pack_worker(worker("a", dp_rank=dp_rank), 60)
            store.announce(key, record, lease_s=60)
        with watching(store, told, ["default"], incomplete={("default/a", dp_rank) for dp_rank in range(5)}):
            assert eventually(lambda: len(told.asked) >= 10)
        assert {dp_rank for _, dp_rank in told.asked[:6]} == set(range(5)), "each in its turn"


def test_who_may_not_write_says_so_once_and_watches_on(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.client.execute_command("ACL", "SETUSER", "u", "on", ">p", "~kvpool:default:*", "+@all", "-set")
    told = Watched()
    with open_store(server.url) as own, open_store(server.url.replace("://", "://u:p@")) as store:
        with announced(own, worker("a")), watching(store, told, ["default"], incomplete={("default/a", 3)}):
            assert eventually(lambda: any("asked for all it holds" in text for text in caplog.messages))
            tells = told.tells
            assert eventually(lambda: told.tells > tells + 4)
        assert told.asked == []
    assert sum("asked for all it holds" in text for text in caplog.messages) == 1


def test_a_full_server_that_evicts_nothing_takes_no_worker_along(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    told = Watched()
    with open_store(server.url) as store, watching(store, told, ["default"]) as watch:
        with announced(store, worker("a")) as said:
            leave_facts(store)
            assert eventually(lambda: told.sees("a"))
            server.client.config_set("maxmemory-policy", "noeviction")
            server.client.config_set("maxmemory", 1)
            assert eventually(lambda: bool(said))
            start_s = time.monotonic()
            assert eventually(lambda: time.monotonic() > start_s + 3 * LEASE_S)
            assert rounds(watch, 2)
            assert (told.gone, told.pool_losses) == ([], 0)
            server.client.config_set("maxmemory", 0)
            assert eventually(lambda: len(said) == 2), "announced again"
        assert eventually(lambda: told.gone == ["default/a"])
    assert sum("is full and evicts nothing" in text for text in caplog.messages) == 1


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_a_pool_that_is_away_takes_no_worker_along(
    server: Server, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvpool.index")
    told = Watched()
    with open_store(server.url) as store, watching(store, told, ["default"]) as watch:
        with announced(store, worker("a")) as said:
            leave_facts(store)
            assert eventually(lambda: told.sees("a"))
            server.kill() if fault == "killed" else server.stop()
            assert eventually(lambda: bool(said))
            tells = told.tells
            start_s = time.monotonic()
            assert eventually(lambda: time.monotonic() > start_s + 1.5 * LEASE_S)
            assert eventually(lambda: told.tells > tells), "kept alive while nothing is known"
            server.start() if fault == "killed" else server.go_on()
            assert eventually(lambda: len(said) == 2), "announced again"
            assert rounds(watch, 3)
            assert (told.gone, told.starts) == ([], ["one"])
            assert told.pool_losses == (fault == "killed"), "a server that starts anew has lost what it held"
            assert "cannot be announced: an index that starts now will not see it" in said[0]
            assert said[1].endswith("is announced again")
            assert said.levels == ["WARNING", "INFO"]
            leave_facts(store)
        assert eventually(lambda: told.gone == ["default/a"])
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


def test_a_directory_has_one_life(tmp_path: Path) -> None:
    with open_store(f"file://{tmp_path}/pool") as store:
        assert store.server_run_id() == ""


def test_closing_does_not_wait_for_a_pool_that_hangs(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "CLOSE_S", 0.2)
    monkeypatch.setattr(worker_watch, "CLOSE_S", 0.2)
    told = Watched()
    with open_store(server.url) as store:
        one = Announcer(store, worker("a"), lease_s=LEASE_S)
        watch = WorkerWatch(store, on_worker=told.on_worker, on_gone=told.on_gone, interval_s=0.02)
        assert eventually(lambda: told.sees("a"))
        server.stop()
        try:
            waited = threading.Event()

            def close() -> None:
                one.close()
                watch.close()
                one.close()
                waited.set()

            closer = threading.Thread(target=close)
            closer.start()
            assert waited.wait(60)
            closer.join()
        finally:
            server.go_on()
