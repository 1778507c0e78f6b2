"""What one tenant may write under its own keys stops neither rounds nor notices of another tenant's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool import Namespace, open_store
from kvpool.discovery.facts import announce_facts
from kvpool.index.fleet.fleet import Fleet
from kvpool.store.server import notices
from kvpool.store.server.connection import MAX_REPLIES_NBYTES
from tests.support.deadlines import eventually
from tests.support.fleets import a_worker
from tests.support.reconciler import NAMESPACE, NBYTES, another_round, credited, following, keys, put, rests
from tests.support.servers import Server, running

OTHER = Namespace("other", {"model": "m", "groups": 1, "group0.attention": "full", "group0.block_tokens": 16})
HUGE = b"x" * (MAX_REPLIES_NBYTES + (1 << 20))  # a name


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Server]:
    # As it is set, a server cuts off who is to be told 32 MiB at once.
    with running("valkey-server", tmp_path, "--client-output-buffer-limit", "pubsub 0 0 0") as one:
        yield one


def a_fleet(*namespaces: Namespace) -> Fleet:
    fleet = Fleet()
    for number, namespace in enumerate(namespaces):
        one = a_worker(f"w{number}", port=5557 + 2 * number, tenant=namespace.tenant, namespace=namespace.hex)
        fleet.add(one, "pool")
    return fleet


def test_facts_of_another_kind_stop_no_other_tenant_s_round(
    valkey: Server, caplog: pytest.LogCaptureFixture
) -> None:
    valkey.client.set("kvpool:default::announced", "not a sorted set")
    fleet = a_fleet(NAMESPACE, OTHER)
    with open_store(valkey.url) as store:
        announce_facts(store, OTHER, "m")
        put(store, range(5))
        store.put_many(keys([7], namespace=OTHER), [bytes(NBYTES)])
        with following(fleet, store) as reconciler:
            assert rests(reconciler)
            assert credited(fleet, range(10), OTHER) == {7}
            assert reconciler._groups["other", OTHER.hex][0]["kv_cache_spec_kind"] == "full_attention"
            assert credited(fleet, range(10)) == set(range(5)), "judged without its facts"
            another_round(reconciler)
            assert reconciler.totals().failed_rounds == 0
    (line,) = [text for text in caplog.messages if "the facts of tenant" in text]
    assert line.startswith("the facts of tenant default cannot be read")
    assert "WRONGTYPE" in line


@pytest.mark.parametrize("whose", ["default", "nobody"])
def test_a_huge_name_of_one_tenant_stops_no_other_tenant_s_round(
    valkey: Server, whose: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as an access rule for a tenant's keys allows."""
    monkeypatch.setattr(notices, "REFUSED_S", 3600.0)  # rounds alone
    caplog.set_level(logging.INFO, "kvpool.index")
    second = Namespace("default", {"model": "another"})  # so that all the tenant's keys are walked
    fleet = a_fleet(NAMESPACE, second, OTHER)
    with open_store(valkey.url) as store, following(fleet, store) as reconciler:
        put(store, range(5))
        store.put_many(keys(range(5), namespace=OTHER), [bytes(NBYTES)] * 5)
        assert rests(reconciler)
        another_round(reconciler)
        huge = f"kvpool:{whose}:".encode() + HUGE
        valkey.client.set(huge, 1)
        assert eventually(lambda: reconciler.totals().notifications_down == 1)
        valkey.client.delete(keys([0])[0], keys([0], namespace=OTHER)[0])
        for _ in range(2):
            another_round(reconciler)
        assert credited(fleet, range(9), OTHER) == {1, 2, 3, 4}
        assert credited(fleet, range(9)) == (set(range(5)) if whose == "default" else {1, 2, 3, 4})
        assert reconciler.totals().failed_rounds == 0
        valkey.client.delete(huge)
        another_round(reconciler)
        assert credited(fleet, range(9)) == {1, 2, 3, 4}
    said = [text for text in caplog.messages if "cannot be looked through" in text]
    assert len(said) == (2 if whose == "default" else 0), "once, and once that it is over"
    assert all("of tenant default" in text for text in said)
    assert all("cannot look at its blocks: its replies are too large" in text for text in said[:1])
    assert "Traceback" not in caplog.text


def test_notices_come_again_after_a_huge_name(
    valkey: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "REFUSED_S", 0.1)
    with open_store(valkey.url) as store:
        heard = store.notices()
        assert heard is not None
        try:
            assert eventually(lambda: heard.take(0.05).missed), "it listens"
            valkey.client.set(b"kvpool:evil:" + HUGE, 1)
            assert eventually(lambda: "its replies are too large" in heard.take(0.05).problem)
            assert eventually(lambda: heard.take(0.05).missed), (
                "it listens again, and what was lost is missed"
            )
            put(store, [1])
            assert eventually(lambda: heard.take(0.05).keys == keys([1]))
        finally:
            heard.close()
    assert "Traceback" not in caplog.text
