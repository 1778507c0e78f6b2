"""The order of batches: a publisher that drops, repeats, restarts and forgets must never be believed too far.

Over 400 lines because one order of batches has many ways to be broken.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpool.discovery.worker import Position
from kvpool.index.fleet import sequence as module
from kvpool.index.fleet.rank import batch_digest
from kvpool.index.fleet.sequence import Sequence
from tests.support.feeds import Heard, sequence

KEPT = 6  # batches that the publisher of these tests can send again


def batch(number: int, life: int = 0) -> bytes:
    return f"{life}:{number}".encode()


def replay(one: Sequence, numbers: range, life: int = 0) -> None:
    """Answer what is wanted from a publisher that keeps these batches."""
    assert one.wanted is not None
    wanted = one.wanted
    for number in numbers:
        if number >= wanted:
            one.replayed(number, batch(number, life))
    one.replay_ended()


def joined(heard: Heard, count: int) -> Sequence:
    one = sequence(heard)
    replay(one, range(count))
    assert not heard.stale
    return one


def test_first_contact_asks_for_everything() -> None:
    heard = Heard()
    one = sequence(heard)
    assert one.wanted == 0
    one.live(2, batch(2))
    assert heard.applied == [], "nothing is applied before what came earlier"
    replay(one, range(3))
    assert heard.numbers == [0, 1, 2]
    assert (heard.stale, heard.proofs, one.is_live) == (False, 1, True)
    one.live(3, batch(3))
    assert heard.numbers == [0, 1, 2, 3]


def test_first_contact_with_a_publisher_that_has_dropped_its_oldest() -> None:
    heard = Heard()
    one = sequence(heard)
    replay(one, range(500, 503))
    assert heard.numbers == [500, 501, 502]
    assert heard.problems == []


def test_a_gap_is_closed_by_a_replay() -> None:
    heard = Heard()
    one = joined(heard, 3)
    one.live(6, batch(6))
    assert (heard.stale, heard.gaps) == (True, 1)
    one.live(7, batch(7))
    assert one.wanted == 2, "asked from the last batch applied, which must come back as it was"
    replay(one, range(7))
    assert heard.numbers == list(range(8))
    assert (heard.stale, heard.closed, heard.problems) == (False, 1, [])


def test_a_gap_that_no_replay_can_close_resets() -> None:
    heard = Heard()
    one = joined(heard, 3)
    one.live(20, batch(20))
    replay(one, range(15, 21))
    assert heard.numbers == [15, 16, 17, 18, 19, 20]
    assert "more batches were missed" in heard.problems[0]
    assert (heard.stale, heard.anew) == (False, [False])


def test_what_came_by_replay_and_comes_again_alive_is_no_restart() -> None:
    heard = Heard()
    one = joined(heard, 5)
    for number in (2, 3, 4):
        one.live(number, batch(number))
    assert heard.numbers == list(range(5))
    assert heard.problems == []


@pytest.mark.parametrize("number", [0, 2, 4])
def test_an_earlier_number_with_another_content_is_a_restart(number: int) -> None:
    heard = Heard()
    one = joined(heard, 5)
    one.live(number, batch(number, life=1))
    assert heard.applied == []
    assert "started anew" in heard.problems[0]
    replay(one, range(number + 1), life=1)
    assert heard.applied == [batch(n, 1) for n in range(number + 1)]
    assert heard.anew == [True]


def test_a_restart_while_disconnected_is_noticed_although_the_numbers_go_on() -> None:
    heard = Heard()
    one = joined(heard, 5)
    one.disconnected()
    one.live(5, batch(5, life=1))  # the next number, of another life
    assert heard.numbers == list(range(5)), "not applied before the publisher has proved who it is"
    replay(one, range(6), life=1)
    assert "started anew" in heard.problems[0]
    assert heard.applied == []
    replay(one, range(6), life=1)
    assert heard.applied == [batch(n, 1) for n in range(6)]


def test_a_restart_with_nothing_published_is_noticed_by_a_check() -> None:
    heard = Heard()
    one = joined(heard, 5)
    one.check()
    replay(one, range(0), life=1)
    assert heard.applied == []
    replay(one, range(0), life=1)
    assert (heard.stale, heard.proofs) == (False, 2)


def test_a_batch_of_the_old_life_never_follows_the_new_one() -> None:
    heard = Heard()
    one = joined(heard, 3)
    one.live(5, batch(5))  # a gap; 5 waits
    replay(one, range(5), life=1)  # it has restarted meanwhile and published 0 to 4
    replay(one, range(5), life=1)
    assert heard.applied == [batch(n, 1) for n in range(5)]


def test_what_waits_when_the_connection_is_lost_is_of_the_old_life() -> None:
    heard = Heard()
    one = sequence(heard)
    one.live(1, batch(1))
    one.disconnected()
    one.replay_failed("no answer")
    replay(one, range(1), life=1)
    assert heard.applied == [batch(0, 1)]


def test_the_first_batch_may_be_the_one_that_is_lost() -> None:
    heard = Heard()
    one = joined(heard, 0)
    one.live(1, batch(1))
    assert heard.applied == []
    assert (heard.stale, one.wanted) == (True, 0)
    replay(one, range(2))
    assert heard.numbers == [0, 1]


def test_a_disconnection_during_a_replay_is_checked_again() -> None:
    heard = Heard()
    one = joined(heard, 3)
    one.check()
    one.replayed(2, batch(2))
    one.disconnected()
    one.replay_ended()
    assert not one.is_live
    assert one.wanted == 2


def test_without_a_replay_endpoint_gaps_and_lost_connections_reset() -> None:
    heard = Heard()
    one = sequence(heard, can_replay=False)
    assert (one.wanted, heard.stale) == (None, True)
    one.live(7, batch(7))
    one.live(8, batch(8))
    assert (heard.numbers, heard.stale) == ([7, 8], False)
    one.live(11, batch(11))
    assert heard.numbers == [11]
    one.live(11, batch(11))
    assert heard.numbers == [11]
    one.disconnected()
    assert heard.numbers == []
    one.live(12, batch(12))
    assert heard.numbers == [12]
    one.live(0, batch(0, life=1))
    assert heard.applied == [batch(0, 1)]
    assert len(heard.problems) == 3
    assert heard.anew == [False, False, True]


def test_a_malformed_batch_resets_and_the_rest_goes_on() -> None:
    heard = Heard(malformed=batch(3))
    one = joined(heard, 3)
    one.live(3, batch(3))
    assert "batch 3" in heard.problems[0]
    one.live(4, batch(4))
    assert heard.numbers == [4]


def test_no_answer_marks_stale_and_asks_again() -> None:
    heard = Heard()
    one = joined(heard, 3)
    one.check()
    one.replay_failed("no answer from tcp://host:1")
    assert heard.stale
    assert one.wanted == 2
    replay(one, range(3))
    assert not heard.stale


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 4)
    heard = Heard()
    one = joined(heard, 1)
    for number in range(2, 50):
        one.live(number, batch(number))
    assert len(one._waiting) == 4
    while not one.is_live:
        replay(one, range(50))
    assert heard.numbers == list(range(50))


def test_replays_that_bring_nothing_new_end_in_a_reset() -> None:
    heard = Heard()
    one = joined(heard, 3)
    one.live(9, batch(9))
    for _ in range(50):
        one.replayed(2, batch(2))
        one.replayed(5, batch(5))  # 3 and 4 are dropped on the way, each time
        one.replay_ended()
        if heard.problems:
            break
    assert "not whole" in heard.problems[0]


def resumed(heard: Heard, sequence_: int, payload: bytes) -> Sequence:
    """An index that begins where another one has stopped."""
    position = Position(sequence_, batch_digest(payload))
    return sequence(heard, position=position)


def test_a_position_is_proved_by_its_batch_and_nothing_before_is_asked_for() -> None:
    heard = Heard(applied=[batch(n) for n in range(5)], numbers=list(range(5)))
    one = resumed(heard, 4, batch(4))
    assert (one.wanted, heard.stale) == (4, True)
    one.live(7, batch(7))
    replay(one, range(4, 7))
    assert heard.numbers == list(range(8))
    assert (heard.stale, heard.proofs, heard.problems) == (False, 1, [])


@pytest.mark.parametrize("published", [0, 2, 5, 9])
def test_a_position_of_another_life_is_forgotten(published: int) -> None:
    heard = Heard(applied=[batch(n) for n in range(5)], numbers=list(range(5)))
    one = resumed(heard, 4, batch(4))
    replay(one, range(published), life=1)
    assert (heard.applied, heard.stale) == ([], True)
    assert "started anew" in heard.problems[0]
    replay(one, range(published), life=1)
    assert heard.applied == [batch(n, 1) for n in range(published)]
    assert not heard.stale


def test_a_position_that_its_publisher_has_dropped_is_forgotten() -> None:
    heard = Heard(applied=[batch(n) for n in range(5)], numbers=list(range(5)))
    one = resumed(heard, 4, batch(4))
    replay(one, range(6, 9))
    assert heard.numbers == [6, 7, 8]
    assert "more batches were missed" in heard.problems[0]


def test_a_digest_is_the_same_in_every_process() -> None:
    import xxhash

    for payload in (b"", b"a", bytes(range(256)) * 40):
        assert batch_digest(payload) == xxhash.xxh3_64_intdigest(payload)


class Publishing(RuleBasedStateMachine):
    """A publisher and all that can happen on the way, in any order; the index may stop and begin with a snapshot."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = Heard()
        self.one = sequence(self.heard)
        self.life = 0
        self.published: list[bytes] = []
        self.under_way: list[tuple[int, bytes]] | None = None  # a replay
        self.connected = True
        self.snapshot: tuple[list[int], list[bytes]] = ([], [])

    @rule()
    def take_a_snapshot(self) -> None:
        self.snapshot = (list(self.heard.numbers), list(self.heard.applied))

    @rule()
    def restart_the_index(self) -> None:
        numbers, applied = self.snapshot
        self.heard = Heard(applied=list(applied), numbers=list(numbers))
        self.one = resumed(self.heard, numbers[-1], applied[-1]) if numbers else sequence(self.heard)
        self.under_way = None
        self.connected = True

    @rule(dropped=st.booleans(), repeated=st.booleans())
    def publish(self, dropped: bool, repeated: bool) -> None:
        number = len(self.published)
        self.published.append(batch(number, self.life))
        if self.connected and not dropped:
            for _ in range(1 + repeated):
                self.one.live(number, self.published[number])

    @rule()
    def restart(self) -> None:
        self.life += 1
        self.published = []
        self.under_way = None if self.under_way is None else []
        self.one.disconnected()
        self.connected = False

    @rule()
    def reconnect(self) -> None:
        self.connected = True

    @rule()
    def lose_the_connection(self) -> None:
        self.one.disconnected()
        self.connected = False

    @rule()
    def check(self) -> None:
        if self.one.is_live:
            self.one.check()

    @rule()
    def ask(self) -> None:
        """The publisher serves the replay that is wanted; what it sends then arrives later."""
        if self.one.is_live or self.under_way is not None:
            return
        assert self.one.wanted is not None
        kept = range(max(0, len(self.published) - KEPT), len(self.published))
        self.under_way = [(n, self.published[n]) for n in kept if n >= self.one.wanted]

    @rule(lost=st.sets(st.integers(0, KEPT)))
    def answer(self, lost: set[int]) -> None:
        if self.under_way is None:
            return
        for at, (number, payload) in enumerate(self.under_way):
            if at == 0 or at not in lost:  # a full queue drops behind what it holds
                self.one.replayed(number, payload)
        self.under_way = None
        self.one.replay_ended()

    @rule()
    def give_up(self) -> None:
        if self.under_way is not None:
            self.under_way = None
            self.one.replay_failed("no answer")

    @invariant()
    def what_is_applied_is_one_life_in_order(self) -> None:
        numbers = self.heard.numbers
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        lives = {payload.partition(b":")[0] for payload in self.heard.applied}
        assert len(lives) <= 1
        for number, payload in zip(numbers, self.heard.applied, strict=True):
            assert payload.endswith(b":%d" % number)

    def teardown(self) -> None:
        """In the end everything arrives, and the state is that of the publisher."""
        self.connected, self.under_way = True, None
        for _ in range(4 * module.MAX_ROUNDS):
            if self.one.is_live:
                self.one.check()
            self.ask()
            self.answer(set())
            if self.one.is_live and self.heard.applied[-1:] == self.published[-1:]:
                break
        assert self.one.is_live
        assert not self.heard.stale
        assert self.heard.applied == self.published[len(self.published) - len(self.heard.applied) :]
        assert len(self.heard.applied) >= min(KEPT, len(self.published))


TestPublishing = Publishing.TestCase
TestPublishing.settings = settings(max_examples=500, stateful_step_count=40, deadline=None)
