"""At which addresses an index follows workers that callers and records name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpool import ConfigError
from kvpool.discovery.networks import WorkerNetworks
from kvpool.discovery.worker import Publisher
from tests.discovery.workers import worker

LOCAL = ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"]
OF_THE_LINK = ["169.254.169.254", "fe80::1", "fe80::1%eth0", "224.0.0.1", "0.0.0.0", "::"]


def test_without_networks_the_host_and_its_link_are_out() -> None:
    networks = WorkerNetworks()
    assert [networks.allows(one) for one in LOCAL + OF_THE_LINK] == [False] * 10
    assert [networks.allows(one) for one in ("10.0.0.7", "8.8.8.8", "2001:db8::7")] == [True] * 3


def test_an_index_of_one_host_finds_the_workers_of_that_host() -> None:
    networks = WorkerNetworks(loopback=True)
    assert [networks.allows(one) for one in LOCAL] == [True] * 4
    assert [networks.allows(one) for one in OF_THE_LINK] == [False] * 6


def test_named_networks_are_all_that_is_allowed() -> None:
    networks = WorkerNetworks(["10.1.0.0/16", "fe80::/64", "10.2.3.4"])
    allowed = {"10.1.2.3": True, "10.2.3.4": True, "10.2.3.5": False, "fe80::7": True, "8.8.8.8": False}
    assert {one: networks.allows(one) for one in allowed} == allowed
    assert not networks.allows("127.0.0.1")
    assert WorkerNetworks(["127.0.0.0/8"]).allows("127.0.0.1")


@pytest.mark.parametrize(
    ("events", "replay", "address", "field"),
    [
        ("tcp://169.254.169.254:80", "", "", "events of rank 0"),
        ("tcp://[::1]:80", "", "", "events of rank 0"),
        ("ipc:///run/other.sock", "", "", "events of rank 0"),
        ("tcp://10.0.0.7:5557", "tcp://127.0.0.1:1", "", "replay of rank 0"),
        ("tcp://10.0.0.7:5557", "", "http://127.0.0.1:8500/v1/kv", "address"),
        ("tcp://10.0.0.7:5557", "", "http://[fe80::1%25eth0]:80", "address"),
    ],
)
def test_a_worker_at_another_place_is_refused_by_its_field(
    events: str, replay: str, address: str, field: str
) -> None:
    one = replace(worker("w"), publishers=(Publisher(0, events, replay),), address=address)
    with pytest.raises(ConfigError, match=f"worker w: {field}: .*--worker-networks"):
        WorkerNetworks().check(one)


def test_names_and_pushed_events_pass_and_sockets_when_they_are_allowed() -> None:
    WorkerNetworks(["10.0.0.0/8"]).check(
        replace(
            worker("w"), publishers=(Publisher(0, "tcp://worker-1:5557"),), address="http://worker-1:8000"
        )
    )
    WorkerNetworks().check(replace(worker("w"), publishers=(Publisher(0, "push"),), address=""))
    WorkerNetworks(["ipc"]).check(
        replace(worker("w"), publishers=(Publisher(0, "ipc:///run/w"),), address="")
    )


@pytest.mark.parametrize("wrong", ["10.0.0.0/33", "worker-1", "", "10.0.0.0-10.0.0.9"])
def test_what_is_no_network_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="--worker-networks"):
        WorkerNetworks([wrong])
