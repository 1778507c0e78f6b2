"""Publishers of one tenant's workers, to which nothing is connected for another tenant, however it names them."""

from __future__ import annotations

from collections import defaultdict
from contextlib import closing
from dataclasses import replace

import pytest

from kvpool.discovery.worker import Publisher, Worker
from kvpool.index.follow import subscriber as module
from kvpool.index.follow.subscriber import Subscriber
from tests.support.deadlines import eventually
from tests.support.feeds import follow, misbehaving, worker_of
from tests.support.networks import Names


class Told:
    """A sink for several workers, by id."""

    def __init__(self) -> None:
        self.batches: dict[str, list[bytes]] = defaultdict(list)
        self.problems: dict[str, str] = {}  # empty: it is followed

    def apply(self, worker_id: str, dp_rank: int, sequence: int, payload: bytes) -> None:
        self.batches[worker_id].append(payload)

    def heard(self, worker_id: str, dp_rank: int) -> None:
        pass

    def reset(self, worker_id: str, dp_rank: int, problem: str, *, anew: bool = False) -> None:
        pass

    def mark(self, worker_id: str, dp_rank: int, *, stale: bool, problem: str = "") -> None:
        self.problems[worker_id] = problem

    def gap(self, worker_id: str, dp_rank: int, *, closed: bool) -> None:
        pass


def of_tenant(tenant: str, publisher: Publisher) -> Worker:
    return replace(worker_of(publisher), tenant=tenant)


@pytest.mark.parametrize("named", ["events", "replay", "both", "events, without a replay"])
def test_a_name_of_another_tenant_s_publisher_brings_nothing(
    names: Names, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setattr(module, "PROBE_S", 0.1)
    told = Told()
    with misbehaving() as theirs, misbehaving() as own, closing(Subscriber()) as feed:
        events, replay = (f"tcp://a.test:{port}" for port in theirs.ports)
        theirs.publish(b"secret 0")
        mine = own.publisher
        if named == "replay":
            mine = replace(mine, replay=replay)
        elif named == "both":
            mine = replace(mine, events=events, replay=replay)
        else:
            mine = replace(mine, events=events, replay="" if "without" in named else mine.replay)
        follow(feed, told, of_tenant("t", theirs.publisher))
        assert eventually(lambda: told.batches["t/w"] == [b"secret 0"])
        follow(feed, told, of_tenant("u", mine))
        refused = "is not connected to: another tenant's worker is followed there"
        assert eventually(lambda: refused in told.problems.get("u/w", ""))
        theirs.publish(b"secret 1")
        assert eventually(lambda: told.batches["t/w"] == [b"secret 0", b"secret 1"])
        attempts = names.asked.count("a.test")
        assert attempts > 0
        assert not any(b"secret" in batch for batch in told.batches["u/w"])
        assert told.problems["t/w"] == ""
        # Of another worker of the same tenant it is no matter.
        follow(feed, told, replace(of_tenant("t", mine), name="w-2"))
        if named == "both":
            theirs.publish(b"secret 2")
            assert eventually(lambda: b"secret 2" in told.batches["t/w-2"])
        feed.unfollow("t/w")
        feed.unfollow("t/w-2")
        theirs.publish(b"secret 3")
        if named == "both":
            assert eventually(lambda: b"secret 3" in told.batches["u/w"]), "nobody's now"


def test_an_address_that_a_name_no_longer_has_is_free(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses of pods are given again, while the worker that had one before is still followed by its name."""
    monkeypatch.setattr("kvpool.index.net.resolver.FRESH_S", 0.05)
    told = Told()
    with closing(Subscriber()) as feed:
        with misbehaving() as before:
            ports = before.ports
            follow(
                feed,
                told,
                of_tenant("t", Publisher(3, f"tcp://a.test:{ports[0]}", f"tcp://a.test:{ports[1]}")),
            )
            before.publish(b"of t")
            assert eventually(lambda: told.batches["t/w"] == [b"of t"])
        names.known["a.test"] = "127.0.0.2"
        asked = names.asked.count("a.test")
        assert eventually(lambda: names.asked.count("a.test") > asked + 1), "t knows the new one"
        with misbehaving(ports) as after:
            follow(feed, told, of_tenant("u", after.publisher))
            after.publish(b"of u")
            assert eventually(lambda: told.batches["u/w"] == [b"of u"])
            assert told.batches["t/w"] == [b"of t"]
