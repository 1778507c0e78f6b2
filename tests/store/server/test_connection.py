"""The connections besides those of the values: bounded in time, named, and few."""

from __future__ import annotations

import contextlib
import importlib.metadata
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import redis

from kvpool import __version__, open_store
from kvpool.errors import StoreUnavailable
from kvpool.store import StoreURL
from kvpool.store.server import documents as server_announcements
from kvpool.store.server import notices as module
from kvpool.store.server.connection import connect, library_version
from kvpool.store.store import Store
from tests.support.conformance import key, keys
from tests.support.deadlines import ends_within, eventually
from tests.support.misbehaving import HungUp, Peer, misbehaving, says
from tests.support.servers import Server, with_client
from tests.support.store_traffic import serves

CALLS: dict[str, Callable[[Store], object]] = {
    "announce": lambda store: store.announce("kvpool:t:x", b"x", lease_s=60),
    "withdraw": lambda store: store.withdraw("kvpool:t:x"),
    "announcements": lambda store: store.announcements("kvpool:t:"),
    "announcements of all": lambda store: store.announcements(""),
    "withdraw_all": lambda store: store.withdraw_all("kvpool:t:"),
    "life": lambda store: store.server_run_id(),
}


@pytest.fixture
def server(own_server: Server) -> Server:
    return own_server


# ---------------------------------------------------------------------- time


def trickles(peer: Peer, words: Sequence[bytes], good: bytes) -> None:
    """A byte now and then, without an end: a timeout of the socket never passes."""
    peer.drip(b"$60000\r\n" + b"x" * 60000, 0.3)


@pytest.mark.parametrize("when_dialled", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_server_that_trickles_costs_one_deadline(
    monkeypatch: pytest.MonkeyPatch, name: str, when_dialled: bool
) -> None:
    for which in ("WRITE_S", "READ_S"):
        monkeypatch.setattr(server_announcements, which, 1.0)
    with misbehaving() as server, open_store(server.url) as store:
        server.misbehave(trickles, when_dialled=when_dialled)
        if name != "life" or when_dialled:
            with ends_within(2.0), pytest.raises(StoreUnavailable):
                CALLS[name](store)


@pytest.mark.parametrize(
    "nonsense",
    [
        b":x\r\n",
        b"*1\r\n" * 5000,
        b"+QUEUED\r\n",
        b"*2\r\n:1\r\n",
        b"*1\r\n$1\r\nx\r\n",
        b"?\r\n",
        b"*-1\r\n",
    ],
)
@pytest.mark.parametrize("name", CALLS)
def test_nonsense_is_a_fault_like_any_other(
    monkeypatch: pytest.MonkeyPatch, name: str, nonsense: bytes
) -> None:
    for which in ("WRITE_S", "READ_S"):
        monkeypatch.setattr(server_announcements, which, 0.5)
    with misbehaving() as server, open_store(server.url) as store:
        server.misbehave(lambda peer, words, good: peer.send(nonsense))
        with contextlib.suppress(StoreUnavailable):
            CALLS[name](store)


def test_a_server_that_loads_its_data_says_so() -> None:
    with misbehaving() as server, open_store(server.url) as store:
        server.misbehave(says(b"-LOADING Redis is loading the dataset in memory\r\n"), when_dialled=True)
        with pytest.raises(StoreUnavailable, match="is loading"):
            store.announce("kvpool:t:x", b"x", lease_s=60)
        with pytest.raises(StoreUnavailable, match="LOADING"):
            open_store(server.url)


# ---------------------------------------------------------------------- last words

DENIED = (
    b"-DENIED Redis is running in protected mode because protected mode is enabled and no password is set\r\n"
)


@contextmanager
def hangs_up(words: bytes) -> Iterator[str]:
    """``host:port`` of a server that says ``words`` to whoever dials, and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = listener.accept()
                    with peer:
                        peer.sendall(words)

        thread = threading.Thread(target=refuse)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(60)


@pytest.mark.parametrize("userinfo", ["", ":hunter2@"])
def test_a_server_that_is_full_of_clients_says_so_and_refuses_no_user(
    server: Server, client: str, userinfo: str
) -> None:
    if userinfo:
        server.client.config_set("requirepass", "hunter2")
        server.client.execute_command("AUTH", "hunter2")  # type: ignore[no-untyped-call]
    url = with_client(f"valkey://{userinfo}127.0.0.1:{server.port}", client)
    server.client.config_set("maxclients", 1)
    with pytest.raises(
        StoreUnavailable, match=r"max number of clients reached.*; raise the server's maxclients"
    ):
        open_store(url)
    server.client.config_set("maxclients", 100)
    with open_store(url) as store:
        assert serves(store)


@pytest.mark.parametrize("userinfo", ["", ":hunter2@"])
def test_a_server_in_protected_mode_says_so_and_refuses_no_user(client: str, userinfo: str) -> None:
    with hangs_up(DENIED) as place:
        url = f"valkey://{userinfo}{place}/1"
        with pytest.raises(
            StoreUnavailable, match=r"DENIED Redis is running in protected.*hangs up; set a pass"
        ):
            open_store(with_client(url, client))
        with (
            pytest.raises(redis.ConnectionError, match="DENIED Redis is running in protected mode"),
            connect(StoreURL.parse(url), timeout_s=60, role="test") as asking,
        ):
            asking.ping()


def test_what_a_server_says_unasked_is_why_its_connection_ends() -> None:
    """In the words of a server whose limit of a value is below a block."""

    def refuses(peer: Peer, words: Sequence[bytes], good: bytes) -> None:
        peer.send(good)
        if words[0] == b"MULTI":
            peer.send(b"-ERR Protocol error: invalid bulk length\r\n")
            raise HungUp

    with misbehaving() as server, open_store(server.url) as store:
        server.misbehave(refuses)
        with pytest.raises(
            StoreUnavailable, match='says "ERR Protocol error: invalid bulk length" and hangs up'
        ):
            store.put_many(
                [key(1)], [bytes(32 << 20)]
            )  # more than sockets hold: the error comes in its middle


# ---------------------------------------------------------------------- names and number


def clients(server: Server) -> list[dict[str, str]]:
    """All connections but the test's own, when none is left that has not said its name yet."""
    own = server.client.client_id()
    listed: list[dict[str, str]] = []

    def all_have_names() -> bool:
        listed[:] = [one for one in server.client.client_list() if int(one["id"]) != own]
        return all(one["name"] for one in listed)

    assert eventually(all_have_names), listed
    return listed


def test_every_connection_says_whose_it_is(server: Server, client: str) -> None:
    with open_store(with_client(server.url, client), opened_by="worker 7\n") as store:
        assert store.put_many([key(1)], [b"value"]) == [True]
        store.announce("kvpool:t:x", b"x", lease_s=60)
        notices = store.notices()
        assert notices is not None
        assert eventually(lambda: notices.take(0.1).problem == "")
        listed = clients(server)
        notices.close()
    roles = {"native": {"reads", "writes"}, "redis": {"values"}, "glide": {"values"}}[client]
    names = {one["name"] for one in listed}
    assert names == {f"kvpool:{role}:worker-7-" for role in roles | {"announcements", "notices"}}
    if server.knows("client|setinfo") and client != "glide":
        assert {(one["lib-name"], one["lib-ver"]) for one in listed} == {("kvpool", __version__)}


def test_a_copied_package_without_metadata_has_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", raises)
    assert library_version.__wrapped__() == __version__


def test_without_a_name_it_is_the_host_and_process(server: Server) -> None:
    with open_store(server.url) as store:
        assert store.contains_many([key(1)]) == [False]
        names = [one["name"] for one in clients(server)]
        assert names
        assert all(name.startswith("kvpool:") and "." in name for name in names)


def received(server: Server) -> int:
    """How many connections a server has had, without those that are open for blocks: these may still be coming."""
    listed, stats = server.client.pipeline().client_list().info("stats").execute()
    others = sum(not one["name"].startswith("kvpool:announcements:") for one in listed)
    return int(stats["total_connections_received"]) - others


def test_announcing_keeps_one_connection(server: Server, client: str) -> None:
    with open_store(with_client(server.url, client)) as store:
        store.announce("kvpool:t:x", b"x", lease_s=60)
        assert store.announcements("kvpool:t:") == {"kvpool:t:x": b"x"}
        before = received(server)
        for _ in range(30):
            store.announce("kvpool:t:x", b"x", lease_s=60)
            assert len(store.announcements("")) == 1
            store.server_run_id()
        assert received(server) == before
        # One that ended is noticed before anything is asked on it.
        server.client.client_kill_filter(_type="normal", skipme=True)
        assert store.announcements("kvpool:t:") == {"kvpool:t:x": b"x"}
        server.kill()
        with pytest.raises(StoreUnavailable):
            store.announce("kvpool:t:x", b"x", lease_s=60)
        server.start()
        store.announce("kvpool:t:y", b"y", lease_s=60)
        assert "kvpool:t:y" in store.announcements("")
    assert clients(server) == []


def test_the_list_of_tenants_lives_a_day(server: Server) -> None:
    with open_store(server.url) as store:
        store.announce("kvpool:t:x", b"x", lease_s=60)
        assert 86_000_000 < server.client.pttl("kvpool:::announced") <= 86_400_000


# ---------------------------------------------------------------------- a subscription to what changes in a pool

SILENCE_S = 3 * module.TIMEOUT_S  # beyond the end of the last step, and beyond a PING


def test_a_silent_server_is_waited_for_in_the_kernel(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[float] = []
    read = module._Tracking.read

    def counted(self: module._Tracking, inbox: module._Inbox) -> None:
        reads.append(time.monotonic())
        read(self, inbox)

    monkeypatch.setattr(module._Tracking, "read", counted)
    with open_store(server.url) as store:
        notices = store.notices()
        assert notices is not None
        assert notices.take(60).missed, "what was before it listened"
        reads.clear()
        count = int(SILENCE_S / module.POLL_S)
        assert eventually(lambda: len(reads) > count)
        assert reads[count] - reads[0] > SILENCE_S / 2
        store.put_many(keys(1), [b"x"])
        assert eventually(lambda: notices.take(1).keys == keys(1))
        notices.close()
