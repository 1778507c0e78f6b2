"""Feeds that are broken, slow, silent or hostile: each costs its own worker, and no other."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing

import pytest
import zmq

from kvpool.discovery.worker import Publisher
from kvpool.index.follow import subscriber as module
from kvpool.index.follow.subscriber import Subscriber
from kvpool.index.limits import Limits
from kvpool.index.net import zmtp
from tests.support.deadlines import eventually
from tests.support.feeds import (
    WITHIN_S,
    AmongOthers,
    Heard,
    follow,
    followed,
    frames,
    misbehaving,
    raw_publisher,
    worker_of,
)
from tests.support.networks import Names
from tests.support.proxy import Harm, Way, proxied


def test_a_name_that_does_not_resolve_makes_only_its_own_rank_stale(names: Names, short: None) -> None:
    heard = AmongOthers()
    with misbehaving() as publisher, closing(Subscriber()) as feed:
        for number in range(20):
            host = f"{'hang' if number % 2 else 'gone'}-{number}.test"
            follow(
                feed, heard, worker_of(Publisher(0, f"tcp://{host}:1", f"tcp://{host}:2"), f"dead-{number}")
            )
        follow(feed, heard, worker_of(publisher.publisher))
        for number in range(3):
            publisher.publish(b"%d" % number)
            assert followed(heard, list(range(number + 1)))
        for problem in (
            "the name gone-0.test does not resolve: Name or service not known",
            "the name hang-1.test does not resolve: no answer within 0.5 s",
        ):
            assert eventually(lambda problem=problem: problem in heard.others)
        proofs = heard.proofs
        assert eventually(lambda: heard.proofs > proofs + 3)


def test_a_publisher_that_has_another_address_is_found_by_its_name(
    names: Names, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.index.net.resolver.FRESH_S", 0.1)
    heard = Heard()
    with misbehaving() as first, closing(Subscriber()) as feed:
        names.known["a.test"] = "127.0.0.1"
        first.publish(b"0")
        events, replay = (f"tcp://a.test:{port}" for port in first.ports)
        follow(feed, heard, worker_of(Publisher(3, events, replay)))
        assert followed(heard, [0])
        with misbehaving(first.ports, host="127.0.0.2") as second:
            for number in range(4):
                second.publish(b"other %d" % number)
            names.known["a.test"] = "127.0.0.2"
            first.close()
            assert followed(heard, [0, 1, 2, 3])
            assert heard.applied[0] == b"other 0"


def test_leaving_a_worker_waits_for_no_batch_of_another(short: None) -> None:
    heard = AmongOthers()
    left = threading.Event()
    with misbehaving() as busy, misbehaving() as publisher, closing(Subscriber()) as feed:
        publisher.publish(b"0")
        (rank,) = follow(feed, heard, worker_of(publisher.publisher))
        assert followed(heard, [0])
        busy.publish(b"takes long")
        follow(feed, heard, worker_of(busy.publisher, "busy"))
        assert heard.entered.wait(WITHIN_S)

        def leave() -> None:
            rank.gone = True
            feed.unfollow("default/w")
            left.set()

        leaving = threading.Thread(target=leave, daemon=True)
        leaving.start()
        try:
            assert left.wait(WITHIN_S / 2), "it waits for a batch of another worker"
        finally:
            heard.held.set()
            leaving.join(WITHIN_S)
        proofs = heard.proofs
        publisher.publish(b"1")
        assert eventually(lambda: heard.of_others == 1)
        assert (heard.numbers, heard.proofs) == ([0], proofs), "nothing more is told of it"


def test_a_publisher_without_replay_whose_path_goes_silent_is_stale(
    short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent_s = 4.0  # a busy machine may hold up its signs of life for nearly as long
    monkeypatch.setattr("kvpool.index.net.zmtp.SILENT_S", silent_s)
    heard = Heard()
    with (
        misbehaving(replay=False) as publisher,
        proxied(publisher.ports[0]) as path,
        closing(Subscriber()) as feed,
    ):
        follow(feed, heard, worker_of(Publisher(3, f"tcp://127.0.0.1:{path.port}")))

        def heard_of() -> bool:
            publisher.publish(b"%d" % len(publisher.kept))
            return bool(heard.applied) and not heard.stale

        assert eventually(heard_of)
        known = len(heard.applied)
        threading.Event().wait(1.5 * silent_s)  # longer than it may be silent: it is idle, and answers
        assert (heard.stale, len(heard.applied) >= known) == (False, True)
        path.arm(Way.ANSWERED, 1, Harm.SILENCE)
        assert eventually(lambda: heard.stale)
        assert heard.applied == []
        assert heard.marked[1] == "it was silent for 4 s"
        assert eventually(heard_of)


def test_a_publisher_whose_batches_take_long_lets_others_have_their_turn() -> None:
    """Small batches may take long: each of them clears what the one before has stored, for example."""
    order: list[str] = []

    class Slow(AmongOthers):
        def apply(self, worker_id: str, dp_rank: int, sequence: int, payload: bytes) -> None:
            if not order:
                feed._loop.call_soon(order.append, "others")
            order.append(worker_id)
            until = time.monotonic() + zmtp.TURN_S
            while time.monotonic() < until:
                pass

    messages = b"".join(
        b"\x01\x00" + b"\x01\x08" + number.to_bytes(8, "big") + b"\x00\x01x" for number in range(40)
    )

    def say(connection: socket.socket) -> None:
        connection.sendall(messages)
        connection.settimeout(WITHIN_S)
        connection.recv(1)

    with raw_publisher(say) as publisher, closing(Subscriber()) as feed:
        follow(feed, Slow(), worker_of(publisher, "slow"))
        assert eventually(lambda: len(order) == 41)
        assert order.index("others") < 5
        feed.unfollow("default/slow")


def test_a_publisher_of_endless_commands_lets_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmtp, "MAX_COMMANDS", 1 << 62)
    heard, begun, done = AmongOthers(), threading.Event(), threading.Event()

    def say(connection: socket.socket) -> None:
        while not done.is_set():
            connection.sendall(b"\x04\x00" * 32768)  # returns when the reader has begun to take them
            begun.set()

    with misbehaving() as publisher, raw_publisher(say) as endless, closing(Subscriber()) as feed:
        try:
            follow(feed, heard, worker_of(endless, "endless"))
            assert begun.wait(WITHIN_S)
            publisher.publish(b"0")
            follow(feed, heard, worker_of(publisher.publisher))
            assert followed(heard, [0])
            assert heard.others == [], "it is followed all the same"
        finally:
            done.set()


@pytest.mark.parametrize(
    ("say", "says"),
    [
        (lambda connection: None, "its connection was closed"),
        (lambda connection: connection.sendall(b"\xff" * 99), "it sent what is no frame of ZMTP"),
        (lambda connection: connection.sendall(b"\x04\x00\x04\x01\x00"), "its connection was closed"),
        (lambda connection: connection.sendall(b"\x06" + b"\xff" * 8), "it sent what is no command of ZMTP"),
        (lambda connection: connection.sendall(b"\x04\x00" * 50_000), "more than 1024 commands within 0.3 s"),
        (lambda connection: connection.sendall(b"\x01\x00" * 99), "more than 64 MiB or 8 frames"),
        (lambda connection: connection.sendall(b"\x02" + b"\xff" * 8), "more than 64 MiB or 8 frames"),
        (frames(30 << 20, 30 << 20), "there is no room for a message of 62914560 bytes: raise --max-memory"),
    ],
    ids=["closes", "nonsense", "empty", "huge command", "commands", "many frames", "huge frame", "no room"],
)
def test_a_publisher_that_sends_nonsense_costs_its_own_rank(
    short: None, say: Callable[[socket.socket], None], says: str
) -> None:
    heard = AmongOthers()
    limits = Limits(256 << 20)  # a quarter is for batches
    with misbehaving() as publisher, raw_publisher(say) as bad, closing(Subscriber(limits=limits)) as feed:
        follow(feed, heard, worker_of(bad, "bad"))
        assert eventually(lambda: any(says in one for one in heard.others)), heard.others[-3:]
        publisher.publish(b"0")
        follow(feed, heard, worker_of(publisher.publisher))
        assert followed(heard, [0])
        feed.unfollow("default/bad")
        assert eventually(lambda: limits.used_nbytes == 0)


def test_what_is_no_publisher_is_said_to_be_none(short: None) -> None:
    heard = AmongOthers()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.linger = 0
    try:
        asks = context.socket(zmq.REP)
        port = asks.bind_to_random_port("tcp://127.0.0.1")
        with closing(Subscriber()) as feed, socket.create_server(("127.0.0.1", 0)) as listener:
            follow(feed, heard, worker_of(Publisher(0, f"tcp://127.0.0.1:{port}"), "asks"))
            assert eventually(lambda: bool(heard.others))
            feed.unfollow("default/asks")
            follow(
                feed, heard, worker_of(Publisher(0, f"tcp://127.0.0.1:{listener.getsockname()[1]}"), "ssh")
            )
            connection = listener.accept()[0]
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n" * 2)
                says = "what answers there does not speak ZMTP 3"
                assert eventually(lambda: any(says in one for one in heard.others))
    finally:
        context.destroy()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it waits for, shorter; the order of the waits is the same."""
    for name, value in (("PROBE_S", 0.2), ("ANSWER_S", 0.5)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr("kvpool.index.net.dialler.CONNECT_S", 0.5)
    for name, value in (("HEARTBEAT_S", 0.3), ("SILENT_S", 1.0)):
        monkeypatch.setattr(f"kvpool.index.net.zmtp.{name}", value)
    monkeypatch.setattr("kvpool.index.limits.ROOM_TIMEOUT_S", 0.5)
