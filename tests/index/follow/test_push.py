"""Batches that are pushed: in order, each once, asked for again when some are missing, and never believed too far."""

from __future__ import annotations

import threading
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpool import ConfigError
from kvpool.discovery.admission import check_worker
from kvpool.discovery.worker import PUSHED
from kvpool.index import Publisher, Worker
from kvpool.index.follow import push as module
from kvpool.index.follow.push import Ack, NotRegistered, Pushed, PushReceiver, PushStream
from tests.conftest import eventually
from tests.index.fleets import Clock
from tests.index.test_sequence import Heard, batch

ID, RANK = "default/w", 3
KEPT = 6  # batches that the publisher of these tests can send again


def a_worker(incarnation: str = "1") -> Worker:
    return check_worker(Worker("w", "m", 16, "0" * 16, (Publisher(RANK, PUSHED),), incarnation=incarnation))


def pushed(
    number: int = 0, payload: bytes = b"", *, incarnation: str = "1", answers: int = 0, last: bool = False
) -> Pushed:
    return Pushed(ID, RANK, incarnation, number, payload, answers, last)


def an_intake(heard: Heard, clock: Clock | None = None) -> PushReceiver:
    one = PushReceiver(heard, clock=clock or Clock())
    one.follow(a_worker())
    assert heard.stale
    return one


def answer(stream: PushStream, ack: Ack, numbers: range, life: int = 0) -> list[Ack]:
    for number in numbers:
        if number >= ack.start:
            stream.take(pushed(number, batch(number, life), answers=ack.question))
    return stream.take(pushed(answers=ack.question, last=True))


def joined(stream: PushStream, count: int) -> None:
    (ack,) = stream.take(pushed(last=True))
    assert (ack.question, ack.start) == (1, 0)
    assert answer(stream, ack, range(count)) == [Ack(ID, RANK, max(0, count - 1))]


def test_from_the_first_question_to_new_batches() -> None:
    heard = Heard()
    stream = an_intake(heard).open()
    joined(stream, 3)
    assert (heard.numbers, heard.stale) == ([0, 1, 2], False)
    assert stream.take(pushed(3, batch(3))) == [Ack(ID, RANK, 3)]
    assert stream.take(pushed(3, batch(3))) == [Ack(ID, RANK, 3)], "one that comes twice"
    assert heard.numbers == [0, 1, 2, 3]
    stream.close()
    assert heard.stale


def test_a_gap_is_asked_for_and_closed() -> None:
    heard = Heard()
    stream = an_intake(heard).open()
    joined(stream, 3)
    (ack,) = stream.take(pushed(5, batch(5)))
    assert (ack.question > 0, ack.start, ack.sequence) == (True, 2, 2)
    assert (heard.stale, heard.gaps) == (True, 1)
    assert stream.take(pushed(6, batch(6))) == [Ack(ID, RANK, 2)], "it is part of the answer, or the next gap"
    answer(stream, ack, range(7))
    assert (heard.numbers, heard.stale, heard.closed) == (list(range(7)), False, 1)
    assert heard.problems == []


def test_a_gap_that_no_answer_can_close_clears() -> None:
    heard = Heard()
    stream = an_intake(heard).open()
    joined(stream, 3)
    (ack,) = stream.take(pushed(50, batch(50)))
    answer(stream, ack, range(45, 51))
    assert heard.numbers == list(range(45, 51))
    assert "more batches were missed" in heard.problems[0]
    assert not heard.stale


def test_who_does_not_answer_is_stale_and_asked_again_later() -> None:
    heard, clock = Heard(), Clock()
    stream = an_intake(heard, clock).open()
    joined(stream, 1)
    assert stream.wait_s() == module.PROBE_S
    assert stream.remind() == []
    clock.now_s += module.PROBE_S
    (first,) = stream.remind()
    assert (first.start, heard.stale) == (0, False)
    clock.now_s += module.ANSWER_S
    assert stream.remind() == []
    assert heard.stale
    clock.now_s += 0.25
    (second,) = stream.remind()
    assert second.question > first.question
    answer(stream, first, range(1))
    assert heard.stale, "a late answer to the question before"
    answer(stream, second, range(1))
    assert not heard.stale


def test_a_flood_does_not_keep_it_from_noticing() -> None:
    heard, clock = Heard(), Clock()
    stream = an_intake(heard, clock).open()
    stream.take(pushed(last=True))
    clock.now_s += module.ANSWER_S
    stream.take(pushed(0, batch(0)))
    clock.now_s += 0.25
    (ack, *more) = stream.take(pushed(1, batch(1)))
    assert any(one.question == 2 for one in (ack, *more))


def test_a_restart_is_told_from_what_was_heard_before() -> None:
    heard = Heard()
    one = an_intake(heard)
    stream = one.open()
    joined(stream, 4)
    stream.close()
    again = one.open()
    (ack,) = again.take(pushed(last=True))
    assert ack.start == 3
    (ack,) = answer(again, ack, range(6), life=1)
    assert heard.stale
    assert heard.applied == []
    assert "started anew" in heard.problems[0]
    assert (ack.question, ack.start) == (3, 0)
    answer(again, ack, range(6), life=1)
    assert not heard.stale
    assert heard.applied == [batch(number, 1) for number in range(6)]


def test_the_stream_that_spoke_last_speaks_for_a_rank() -> None:
    heard = Heard()
    one = an_intake(heard)
    old, new = one.open(), one.open()
    joined(old, 2)
    (ack,) = new.take(pushed(last=True))
    assert (heard.stale, ack.start) == (True, 1)
    old.close()
    answer(new, ack, range(2))
    assert not heard.stale, "the end of the old stream says nothing"
    assert old.remind() == []


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (pushed(incarnation="2"), "another incarnation"),
        (pushed()._replace(dp_rank=0), 'rank 0 of worker .* is not registered with events "push"'),
        (pushed()._replace(worker_id="other/w"), "call RegisterWorker first"),
    ],
)
def test_who_is_not_registered_is_not_heard(message: Pushed, says: str) -> None:
    heard = Heard()
    stream = an_intake(heard).open()
    with pytest.raises(NotRegistered, match=says):
        stream.take(message)
    assert heard.applied == []


def test_nothing_is_said_of_a_start_that_is_not_followed_any_more() -> None:
    heard = Heard()
    one = an_intake(heard)
    stream = one.open()
    joined(stream, 1)
    entered, go_on = threading.Event(), threading.Event()
    apply = heard.apply

    def slow(*arguments: object) -> None:
        entered.set()
        assert go_on.wait(30)
        apply(*arguments)  # type: ignore[arg-type]

    heard.apply = slow  # type: ignore[method-assign]
    taking = threading.Thread(target=stream.take, args=(pushed(1, batch(1)),))
    leaving = threading.Thread(target=one.unfollow, args=(ID,))
    taking.start()
    assert entered.wait(30)
    leaving.start()
    assert eventually(lambda: not one._links)
    assert leaving.is_alive(), "it waits for the batch that is being applied"
    go_on.set()
    for thread in (taking, leaving):
        thread.join(30)
    before = list(heard.numbers)
    with pytest.raises(NotRegistered):
        stream.take(pushed(2, batch(2)))
    one.follow(a_worker("2"))
    with pytest.raises(NotRegistered, match="another incarnation"):
        stream.take(pushed(2, batch(2)))
    assert stream.remind() == []
    stream.close()
    assert heard.numbers == before
    one.close()


def test_a_worker_that_leaves_just_before_its_batch_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard()
    one = an_intake(heard)
    stream = one.open()
    joined(stream, 1)
    link_of = one.link_of

    def and_then_it_leaves(message: Pushed) -> object:
        link = link_of(message)
        one.unfollow(ID)
        return link

    monkeypatch.setattr(one, "link_of", and_then_it_leaves)
    with pytest.raises(NotRegistered, match="was removed"):
        stream.take(pushed(1, batch(1)))
    assert heard.numbers == [0]


def test_who_pushes_has_no_replay_endpoint() -> None:
    with pytest.raises(ConfigError, match="leave replay empty"):
        check_worker(Worker("w", "m", 16, "0" * 16, (Publisher(0, PUSHED, "tcp://h:1"),)))


class Pushing(RuleBasedStateMachine):
    """A publisher, its streams, and whatever may happen on the way, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.heard, self.clock = Heard(), Clock()
        self.receiver = an_intake(self.heard, self.clock)
        self.life = 0
        self.published: list[bytes] = []
        self.stream: PushStream | None = None
        self.to_index: deque[Pushed] = deque()
        self.to_publisher: deque[Ack] = deque()
        self.leftovers: list[
            tuple[PushStream, deque[Pushed]]
        ] = []  # streams that the index does not know are over

    @rule(sent=st.booleans(), repeated=st.booleans())
    def publish(self, sent: bool, repeated: bool) -> None:
        number = len(self.published)
        self.published.append(batch(number, self.life))
        if self.stream is not None and sent:
            self.to_index.extend([pushed(number, self.published[number])] * (1 + repeated))

    @rule()
    def say_an_old_one_again(self) -> None:
        if self.stream is not None and self.published:
            number = max(0, len(self.published) - 3)
            self.to_index.append(pushed(number, self.published[number]))

    @rule()
    def connect(self) -> None:
        if self.stream is None:
            self.stream = self.receiver.open()
            self.to_index.append(pushed(last=True))

    @rule(noticed=st.booleans())
    def lose_the_connection(self, noticed: bool) -> None:
        if self.stream is None:
            return
        if noticed:
            self.stream.close()
        else:
            self.leftovers.append((self.stream, self.to_index))
        self.stream, self.to_index, self.to_publisher = None, deque(), deque()

    @rule()
    def restart(self) -> None:
        self.lose_the_connection(noticed=True)
        for stream, _ in self.leftovers:  # the process is gone, and its connections with it
            stream.close()
        self.leftovers.clear()
        self.life += 1
        self.published = []

    @rule(count=st.integers(1, 4))
    def deliver(self, count: int) -> None:
        for _ in range(min(count, len(self.to_index))):
            assert self.stream is not None
            self.to_publisher.extend(self.stream.take(self.to_index.popleft()))

    @rule()
    def deliver_what_is_left_of_another_stream(self) -> None:
        if self.leftovers:
            stream, messages = self.leftovers[0]
            if messages:
                stream.take(messages.popleft())
            else:
                stream.close()
                self.leftovers.pop(0)

    @rule()
    def hear(self) -> None:
        """The publisher reads what it was told, and answers."""
        if not self.to_publisher:
            return
        ack = self.to_publisher.popleft()
        if ack.question:
            for number in range(max(0, len(self.published) - KEPT), len(self.published)):
                if number >= ack.start:
                    self.to_index.append(pushed(number, self.published[number], answers=ack.question))
            self.to_index.append(pushed(answers=ack.question, last=True))

    @rule(passed_s=st.sampled_from([0.1, 1.0, 3.0]))
    def wait(self, passed_s: float) -> None:
        self.clock.now_s += passed_s
        if self.stream is not None:
            self.to_publisher.extend(self.stream.remind())

    @invariant()
    def what_is_credited_was_published_in_this_life_without_a_hole(self) -> None:
        if self.heard.stale:
            return
        numbers = self.heard.numbers
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        assert self.heard.applied == [self.published[number] for number in numbers]

    def teardown(self) -> None:
        while self.leftovers:
            self.deliver_what_is_left_of_another_stream()
        self.connect()
        for _ in range(200):
            self.deliver(1000)
            self.hear()
            if self.to_index or self.to_publisher:
                continue
            if not self.heard.stale and self.heard.numbers[-1:] == list(range(len(self.published)))[-1:]:
                break
            self.wait(1.0)
        assert not self.heard.stale
        assert self.heard.applied[-KEPT:] == self.published[-KEPT:][-len(self.heard.applied) :]
        assert self.heard.applied[-1:] == self.published[-1:]
        assert self.stream is not None
        self.stream.close()
        assert self.heard.stale


TestPushing = Pushing.TestCase
TestPushing.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
