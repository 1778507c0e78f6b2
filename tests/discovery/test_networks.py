"""At which addresses an index follows workers that callers and records name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpool import ConfigError
from kvpool.discovery.networks import WorkerNetworks, one_spelling, places_of
from kvpool.discovery.worker import Publisher
from tests.support.announced_workers import worker

LOCAL = ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"]
OF_THE_LINK = ["169.254.169.254", "fe80::1", "fe80::1%eth0", "224.0.0.1", "0.0.0.0", "::"]


def test_without_networks_the_host_and_its_link_are_out() -> None:
    networks = WorkerNetworks()
    assert [networks.allows("t", one) for one in LOCAL + OF_THE_LINK] == [False] * 10
    assert [networks.allows("t", one) for one in ("10.0.0.7", "8.8.8.8", "2001:db8::7")] == [True] * 3


def test_an_index_of_one_host_finds_the_workers_of_that_host() -> None:
    networks = WorkerNetworks(loopback=True)
    assert [networks.allows("t", one) for one in LOCAL] == [True] * 4
    assert [networks.allows("t", one) for one in OF_THE_LINK] == [False] * 6


def test_named_networks_are_all_that_is_allowed() -> None:
    networks = WorkerNetworks(["10.1.0.0/16", "fe80::/64", "10.2.3.4"])
    allowed = {"10.1.2.3": True, "10.2.3.4": True, "10.2.3.5": False, "fe80::7": True, "8.8.8.8": False}
    assert {one: networks.allows("t", one) for one in allowed} == allowed
    assert not networks.allows("t", "127.0.0.1")
    assert WorkerNetworks(["127.0.0.0/8"]).allows("t", "127.0.0.1")


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


def test_names_and_events_that_are_off_pass_and_sockets_when_they_are_allowed() -> None:
    WorkerNetworks(["10.0.0.0/8"]).check(
        replace(
            worker("w"), publishers=(Publisher(0, "tcp://worker-1:5557"),), address="http://worker-1:8000"
        )
    )
    WorkerNetworks().check(replace(worker("w"), publishers=(Publisher(0, ""),), address=""))
    WorkerNetworks(["ipc"]).check(
        replace(worker("w"), publishers=(Publisher(0, "ipc:///run/w"),), address="")
    )


def test_a_tenant_of_its_own_networks_is_there_and_nowhere_else_and_no_other_is() -> None:
    networks = WorkerNetworks(
        ["10.0.0.0/8", "t=10.1.0.0/16,10.3.0.7", "t=ipc", "u=10.3.0.0/24"], loopback=True
    )
    allowed = {
        tenant: [
            one for one in ("10.0.0.7", "10.1.0.7", "10.3.0.7", "10.3.0.8") if networks.allows(tenant, one)
        ]
        for tenant in ("t", "u", "others")
    }
    assert allowed == {"t": ["10.1.0.7", "10.3.0.7"], "u": ["10.3.0.7", "10.3.0.8"], "others": ["10.0.0.7"]}
    assert all(networks.allows(tenant, "127.0.0.1") for tenant in allowed)
    by_socket = replace(worker("w"), publishers=(Publisher(0, "ipc:///run/w"),), address="")
    networks.check(replace(by_socket, tenant="t"))
    for tenant in ("u", "others"):
        with pytest.raises(ConfigError, match="events of rank 0"):
            networks.check(replace(by_socket, tenant=tenant))
    spelled = replace(worker("w"), publishers=(Publisher(0, "tcp://10.1.0.7:1"),), address="")
    networks.check(replace(spelled, tenant="t"))
    with pytest.raises(ConfigError, match="events of rank 0"):
        networks.check(replace(spelled, tenant="others"))


def test_a_tenant_s_networks_alone_leave_the_others_as_they_are() -> None:
    networks = WorkerNetworks(["t=10.1.0.0/16"])
    assert [networks.allows("u", one) for one in ("10.1.0.7", "10.2.0.7", "127.0.0.1")] == [
        False,
        True,
        False,
    ]


def test_one_spelling_of_an_endpoint() -> None:
    for same in (
        "tcp://10.0.0.5:5557",
        "tcp://10.0.0.5:05557",
        "tcp://[::ffff:10.0.0.5]:5557",
        "tcp://[::FFFF:a00:5]:5557",
    ):
        assert one_spelling(same) == "tcp://10.0.0.5:5557"
    assert one_spelling("tcp://Worker-1.Test.:5557") == one_spelling("tcp://worker-1.test:5557")
    assert one_spelling("tcp://[2001:DB8:0::7]:1") == one_spelling("tcp://[2001:db8::7]:1")
    assert one_spelling("ipc:///run/./x//w") == one_spelling("ipc:///run/x/w")
    assert one_spelling("tcp://10.0.0.5:5557") != one_spelling("tcp://10.0.0.5:5558")


def test_the_places_of_a_worker() -> None:
    """As flags name them: only these are exempt."""
    one = replace(
        worker("w"),
        publishers=(Publisher(0, "tcp://Host-1:5557", "tcp://[::1]:5558"),),
        address="https://host-1/v1",
    )
    assert places_of(one) == {("host-1", 5557), ("::1", 5558), ("host-1", 443)}


@pytest.mark.parametrize(
    "wrong",
    [
        "10.0.0.0/33",
        "worker-1",
        "",
        "10.0.0.0-10.0.0.9",
        "t=",
        "=10.0.0.0/8",
        "t/u=10.0.0.0/8",
        "t=10.0.0.0/8,",
    ],
)
def test_what_is_no_network_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"--worker-networks|tenant 't?/?u?' is not allowed"):
        WorkerNetworks([wrong])
