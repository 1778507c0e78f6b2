"""The feed on real ZMQ sockets: vLLM's own publisher, and publishers that lose, restart, hang and talk nonsense."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from demo.engine_process import free_ports
from kvpool.discovery.worker import Publisher
from kvpool.index.follow import subscriber as module
from kvpool.index.follow.subscriber import Subscriber
from tests.support.deadlines import eventually
from tests.support.feeds import WITHIN_S, AmongOthers, Heard, follow, followed, misbehaving, worker_of


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    monkeypatch.setattr(module, "PROBE_S", 0.2)
    monkeypatch.setattr(module, "ANSWER_S", 0.5)
    return Heard()


@pytest.fixture
def feed(heard: Heard) -> Iterator[Subscriber]:
    one = Subscriber()
    yield one
    one.close()
    assert "kvpool-subscriber" not in {thread.name for thread in threading.enumerate()}


def text(number: int, life: int = 0) -> bytes:
    return f"{life}:{number}".encode()


def test_what_was_asked_of_a_publisher_that_is_gone_is_asked_of_the_next_one(
    feed: Subscriber, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 10 * WITHIN_S)
    with misbehaving() as first:
        first.publish(text(0))
        follow(feed, heard, worker_of(first.publisher))
        assert followed(heard, [0])
        first.mute = True
        assert eventually(lambda: first.owes_an_answer)
    with misbehaving(first.ports) as second:
        second.publish(text(0, 1), lost=True)
        assert eventually(lambda: heard.applied == [text(0, 1)] and not heard.stale)


def test_nobody_there_is_stale_and_found_when_it_comes(feed: Subscriber, heard: Heard) -> None:
    ports = free_ports(2)
    events, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
    follow(feed, heard, worker_of(Publisher(3, events, replay)))
    assert eventually(lambda: hasattr(heard, "marked"))
    assert heard.stale
    with misbehaving(ports) as publisher:
        publisher.publish(text(0))
        assert followed(heard, [0])


def test_what_is_no_batch_is_counted_and_left(feed: Subscriber, heard: Heard) -> None:
    with misbehaving() as publisher:
        publisher.publish(text(0))
        follow(feed, heard, worker_of(publisher.publisher))
        assert followed(heard, [0])

        def counted() -> bool:
            publisher.send(b"only one frame")
            publisher.send(b"", b"short", b"payload")
            publisher.send(b"", b"12345678", b"payload", b"more")
            return feed.ignored_messages >= 3

        assert eventually(counted)
        publisher.publish(text(1))
        assert followed(heard, [0, 1])


@pytest.mark.parametrize("replay", ["", "tcp://no host:1"])
def test_an_address_that_one_cannot_connect_to_is_a_problem_of_that_worker(
    feed: Subscriber, heard: Heard, replay: str
) -> None:
    follow(feed, heard, worker_of(Publisher(3, "tcp://no host:1", replay), "broken"))
    feed.unfollow("default/broken")
    assert feed.is_alive
    with misbehaving() as publisher:
        publisher.publish(text(0))
        follow(feed, heard, worker_of(publisher.publisher))
        assert followed(heard, [0])


@pytest.mark.vllm
@pytest.mark.allow_leaks("ZMQ's context lives as long as the process")
def test_vllms_own_publisher_with_more_batches_than_a_replay_carries_at_once(
    feed: Subscriber, heard: Heard
) -> None:
    """Its ROUTER drops what a slow reader leaves in its queue of 1,000, without a word."""
    from vllm.distributed.kv_events import BlockStored, KVEventBatch, ZmqEventPublisher

    events, replay = free_ports(2)
    # vLLM adds the rank to the port.
    publisher = ZmqEventPublisher(
        3,
        endpoint=f"tcp://*:{events - 3}",
        replay_endpoint=f"tcp://*:{replay - 3}",
        buffer_steps=10000,
    )

    def publish(numbers: range) -> None:
        for number in numbers:
            stored = BlockStored([number], None, list(range(16)), 16, None, "GPU", None)
            publisher.publish(KVEventBatch(ts=float(number), events=[stored]))

    try:
        publish(range(9000))
        follow(feed, heard, worker_of(Publisher(3, f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}")))
        assert eventually(lambda: heard.numbers == list(range(9000)))
        publish(range(9000, 9500))
        assert eventually(lambda: heard.numbers == list(range(9500)) and not heard.stale)
        assert heard.problems == []
    finally:
        publisher.shutdown()


def test_three_hundred_workers_that_are_away_hold_up_none_that_is_there(tmp_path: Path) -> None:
    heard = AmongOthers()
    with misbehaving() as publisher, closing(Subscriber()) as feed:
        publisher.publish(text(0))
        nobody = Publisher(0, f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
        for number in range(300):
            follow(feed, heard, worker_of(nobody, f"other-{number}"))
        follow(feed, heard, worker_of(publisher.publisher))
        assert followed(heard, [0])


def test_a_worker_that_no_socket_is_left_for_is_stale_and_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard = AmongOthers()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with misbehaving() as publisher, closing(Subscriber()) as feed:
        follow(feed, heard, worker_of(publisher.publisher))
        publisher.publish(text(0))
        assert followed(heard, [0])
        open_ones = {int(one.name) for one in Path("/proc/self/fd").iterdir()}
        free = next(number for number in range(3, hard) if number not in open_ones)
        monkeypatch.setattr(module, "PROBE_S", WITHIN_S)  # what is open suffices
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        follow(feed, heard, worker_of(publisher.publisher, "other"))
        try:
            assert eventually(lambda: any("no socket left" in one for one in heard.others))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        publisher.publish(text(1))
        assert followed(heard, [0, 1])
