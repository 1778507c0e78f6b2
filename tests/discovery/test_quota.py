"""What a tenant may hold: who says it, who may not, and what a worker makes of what it reads."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis

from kvpool import metrics, open_store
from kvpool.discovery.quota import Standing, read_standings, tenants_with_quotas, write_held, write_quota
from kvpool.discovery.quota_watch import UNKNOWN_S, QuotaWatch
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.key.key import quota_keys
from kvpool.metrics import Counters
from kvpool.store.store import MAX_LEASE_S, Store
from tests.support.deadlines import eventually
from tests.support.memory_store import MemoryStore
from tests.support.servers import Cluster, Server

QUOTA, HELD = quota_keys("t")
LOGGER = logging.getLogger("kvpool")


def standing(store: Store, tenant: str = "t") -> Standing:
    return read_standings(store, [tenant])[tenant]


def test_a_quota_is_said_taken_back_and_listed(store: Store) -> None:
    assert standing(store) == Standing()
    write_quota(store, "t", 1000)
    write_quota(store, "u", 0)
    write_held(store, "t", 250, 60)
    assert read_standings(store, ["t", "u", "v"]) == {
        "t": Standing(1000, 250, is_said=True),
        "u": Standing(0, None, is_said=True),
        "v": Standing(),
    }
    assert tenants_with_quotas(store) == ["t", "u"]
    write_quota(store, "t", None)
    assert standing(store) == Standing(None, 250, is_said=True), "taken back, which is not lost"
    for tenant in ("t", "u"):
        store.withdraw_all(f"kvpool:{tenant}:")
    assert tenants_with_quotas(store) == ["t", "u"], "a purge of a tenant leaves what an operator said"
    with pytest.raises(ConfigError, match="not allowed"):
        write_quota(store, "t:held", 5)


@pytest.mark.parametrize(
    ("told", "used", "is_over"),
    [
        (Standing(100, 99), 0.99, False),
        (Standing(100, 100), 1.0, True),
        (Standing(0, 0), 1.0, True),
        (Standing(None, 5), 0.0, False),
        (Standing(100, None), 0.0, False),
    ],
)
def test_what_is_used_of_a_quota(told: Standing, used: float, is_over: bool) -> None:
    assert (told.used, told.is_over) == (used, is_over)


def document(nbytes: Any, version: int = 1) -> bytes:
    packed: bytes = msgpack.packb({"version": version, "nbytes": nbytes})
    return packed


GARBAGE = [
    b"garbage", b"\xc1", b"\x00", msgpack.packb([1, 2]), msgpack.packb({"nbytes": 5}), msgpack.packb({"version": 1}),
    document(-1), document(1 << 63), document(True), document(1.5), document("50GiB"), document(5, version=2),
    document(5) + b"more", document("x" * 300), document([[]]),
]  # fmt: skip


@pytest.mark.parametrize("key", [QUOTA, HELD])
@pytest.mark.parametrize("bad", GARBAGE)
def test_a_document_that_makes_no_sense_changes_nothing_for_a_time_and_is_counted(
    key: str, bad: bytes
) -> None:
    with MemoryStore() as store:
        write_quota(store, "t", 10)
        write_held(store, "t", 10, 60)
        counters, now = Counters(), [0.0]
        watch = QuotaWatch(store, "t", counters, LOGGER, lambda: now[0])
        watch.turn()
        assert watch.is_over()
        store.announce(key, bad, lease_s=60)
        watch.turn()
        assert watch.is_over()
        assert counters.take() == {f"{metrics.QUOTA_FAILURES.name}/unreadable": 1}
        now[0] += UNKNOWN_S
        watch.turn()
        assert not watch.is_over()
        assert standing(store).is_unreadable


def test_stores_end_at_the_quota_and_go_on_well_below_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER.name)
    with MemoryStore() as store:
        watch = QuotaWatch(store, "t", Counters(), LOGGER)
        seen = []
        write_quota(store, "t", 1000)
        for held_nbytes in (0, 999, 1000, 1500, 999, 950, 949, 999, 1001):
            write_held(store, "t", held_nbytes, 60)
            watch.turn()
            seen.append(watch.is_over())
        assert seen == [False, False, True, True, True, True, False, False, True]
        levels = [record.levelname for record in caplog.records]
        assert levels == ["WARNING", "INFO", "WARNING"], "each change once, and good news is no warning"
        assert caplog.messages[0].startswith(
            "kvpool: tenant t holds 1,000 bytes of a quota of 1,000: this worker loads, and stores nothing"
        )
        assert (
            caplog.messages[1] == "kvpool: tenant t is not over its quota any more: this worker stores again"
        )
        write_quota(store, "t", 5000)
        watch.turn()
        assert not watch.is_over(), "raised"


class Blind(MemoryStore):
    """Its documents cannot be read while ``error`` is set."""

    error: Exception | None = None

    def announced_under(self, keys: Sequence[str]) -> dict[str, bytes]:
        if self.error is not None:
            raise self.error
        return super().announced_under(keys)


LOST, GARBLED = "lost", "garbled"


@pytest.mark.parametrize("held_nbytes", [970, 1000, 949, 0])
@pytest.mark.parametrize("fault", [StoreUnavailable("gone"), RuntimeError("a bug"), LOST, GARBLED])
def test_what_is_unknown_for_a_while_changes_nothing_and_says_nothing(
    fault: Exception | str, held_nbytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER.name)
    with Blind() as store:
        now = [0.0]
        watch = QuotaWatch(store, "t", Counters(), LOGGER, lambda: now[0])
        write_quota(store, "t", 1000)
        write_held(store, "t", 1000, 60)
        watch.turn()
        said = len(caplog.records)
        if fault == LOST:
            store.withdraw(QUOTA)
            store.withdraw(HELD)
        elif fault == GARBLED:
            store.announce(HELD, b"garbage", lease_s=60)
        else:
            store.error = fault  # type: ignore[assignment]
        for _ in range(5):
            now[0] += UNKNOWN_S / 6
            watch.turn()
            assert watch.is_over()
        assert not [text for text in caplog.messages[said:] if "quota any more" in text or "no limit" in text]
        store.error = None
        write_quota(store, "t", 1000)
        write_held(store, "t", held_nbytes, 60)
        watch.turn()
        assert watch.is_over() == (held_nbytes >= 950), "the mark below which stores go on holds as before"


def test_what_stays_unknown_is_no_limit_in_the_end_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with Blind() as store:
        now = [0.0]
        watch = QuotaWatch(store, "t", Counters(), LOGGER, lambda: now[0])
        write_quota(store, "t", 1000)
        write_held(store, "t", 1000, 60)
        watch.turn()
        store.error = StoreUnavailable("no right to read it")
        now[0] += UNKNOWN_S - 1
        watch.turn()
        assert watch.is_over()
        for _ in range(3):
            now[0] += 1
            watch.turn()
        assert not watch.is_over()
        assert "could not be read for 10 minutes" in caplog.messages[-1]
        assert len(caplog.messages) == 2, "once"
        store.error = None
        write_held(store, "t", 970, 60)
        watch.turn()
        assert watch.is_over(), "it never fell below the mark"


def test_what_no_index_counts_any_more_is_no_limit_and_is_not_called_less(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, LOGGER.name)
    with MemoryStore() as store:
        watch = QuotaWatch(store, "t", Counters(), LOGGER)
        write_quota(store, "t", 1000)
        write_held(store, "t", 1000, 60)
        watch.turn()
        store.withdraw(HELD)
        watch.turn()
        assert not watch.is_over()
        assert "no index counts any more what tenant t holds" in caplog.messages[-1]
        write_held(store, "t", 970, 60)
        watch.turn()
        assert watch.is_over()
        write_held(store, "t", 949, 60)
        watch.turn()
        assert not watch.is_over()
        write_quota(store, "t", None)
        watch.turn()
        assert not watch.is_over()


def test_a_watch_reads_by_itself_until_it_is_closed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.discovery.quota_watch.READ_S", 0.02)
    counters = Counters()
    with open_store(server.url) as store:
        watch = QuotaWatch(store, "t", counters, LOGGER)
        assert not watch.is_over(), "not started"
        watch.start()
        try:
            write_quota(store, "t", 10)
            write_held(store, "t", 11, 60)
            assert eventually(watch.is_over)
            server.kill()
            failures = f"{metrics.QUOTA_FAILURES.name}/store_unavailable"
            assert eventually(lambda: counters.take().get(failures, 0) >= 1)
            assert watch.is_over(), "what is unknown is as it was"
        finally:
            watch.close()


def test_a_tenants_user_reads_its_quota_and_writes_none(server: Server) -> None:
    """By the rule in docs/how-to/valkey.md."""
    rights = (Path(__file__).parents[2] / "docs" / "how-to" / "valkey.md").read_text()
    rule = rights.split("ACL SETUSER worker on >PASSWORD ")[1].split("```")[0].split()
    for tenant in ("t", "tt", "u"):
        words = [word.replace("TENANT", tenant) for word in rule]
        server.client.execute_command("ACL", "SETUSER", tenant, "on", ">secret", *words)
    with open_store(server.url) as operator:
        write_quota(operator, "t", 1000)
        write_quota(operator, "tt", 5)
        write_held(operator, "t", 10, 60)
        for tenant, others in (("t", ["u", "tt"]), ("u", ["t", "tt"])):
            with open_store(server.url.replace("://", f"://{tenant}:secret@")) as own:
                for whose in (tenant, *others):
                    for write in (
                        lambda whose=whose: write_quota(own, whose, 1 << 60),
                        lambda whose=whose: write_held(own, whose, 0, 60),
                        lambda whose=whose: own.withdraw(quota_keys(whose)[0]),
                        lambda whose=whose: own.withdraw(quota_keys(whose)[1]),
                    ):
                        with pytest.raises(StoreUnavailable, match=r"(?i)permission"):
                            write()
                with redis.Redis(port=server.port, username=tenant, password="secret") as raw:
                    for name in (
                        f"{key}:announced" for whose in (tenant, *others) for key in quota_keys(whose)
                    ):
                        for command in (("SET", name, "x"), ("UNLINK", name), ("PEXPIRE", name, 1)):
                            with pytest.raises(redis.exceptions.NoPermissionError):
                                raw.execute_command(*command)
                assert standing(own, tenant) == standing(operator, tenant)
                for whose in others:
                    with pytest.raises(StoreUnavailable, match=r"(?i)permission"):
                        standing(own, whose)
        assert standing(operator) == Standing(1000, 10, is_said=True)
        # Its own announcements may name what it likes.
        operator.announce("kvpool:t:worker:0:a", b"x", lease_s=60)  # so it is listed
        server.client.zadd("kvpool:t::announced", {"kvpool-quota:v": 4e12, b"x" * (40 << 20): 4e12})
        assert tenants_with_quotas(operator) == ["t", "tt"], "and nobody reads them for that"


def test_a_quota_lasts_as_long_as_a_server_lets_it(server: Server) -> None:
    with open_store(server.url) as store:
        write_quota(store, "t", 1000)
        left_s = server.client.ttl(f"{QUOTA}:announced")
        assert MAX_LEASE_S - 60 < left_s <= MAX_LEASE_S


def test_a_cluster_keeps_quotas(tmp_path: Path) -> None:
    with Cluster("valkey-server", tmp_path) as cluster, open_store(cluster.url) as store:
        write_quota(store, "t", 1000)
        write_held(store, "t", 5, 60)
        assert standing(store) == Standing(1000, 5, is_said=True)
        assert tenants_with_quotas(store) == ["t"]
