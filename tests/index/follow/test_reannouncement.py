"""A rank of which batches were lost tells all it holds when it is asked: over a real pool, real sockets, no engine."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvpool import open_store
from kvpool.discovery import announcer, worker_watch
from kvpool.discovery.announcer import Announcer
from kvpool.discovery.worker import Publisher, Worker
from kvpool.discovery.worker_watch import WorkerWatch
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.sequence import Sequence
from kvpool.index.follow import subscriber as feed
from kvpool.index.follow.subscriber import Subscriber
from kvpool.key.hashing import seed_id
from kvpool.store.store import Store
from tests.support.deadlines import eventually
from tests.support.feeds import Misbehaving, misbehaving
from tests.support.fleets import a_worker
from tests.support.wire import batch, cleared, packed64, removed, stored


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"file://{tmp_path}/pool") as one:
        yield one


class Index:
    """What ``kvpool index`` consists of, without the gRPC around it."""

    def __init__(self, store: Store) -> None:
        self.fleet = Fleet(feed=Subscriber())
        self._watch = WorkerWatch(
            store,
            on_worker=lambda worker, keep_s: self.fleet.add(worker, "pool", keep_s),
            on_gone=lambda worker_id: self.fleet.remove(worker_id, "pool"),
            incomplete=self.fleet.incomplete,
            on_requested=lambda worker_id, dp_rank: self.fleet.rank(worker_id, dp_rank).ask(),
            tenants=["default"],
            interval_s=0.05,
        )

    def holds(self, blocks: list[int]) -> int | None:
        """Leading blocks; None while the rank is stale."""
        if not self.fleet.workers():
            return None
        (row,) = self.fleet.lookup("m", hashes64=packed64(blocks))
        return None if row.stale else row.device_blocks

    def problem(self) -> str:
        return self.fleet.workers()[0].publishers[0].problem

    def close(self) -> None:
        self._watch.close()
        self.fleet.close()


@contextlib.contextmanager
def following(store: Store) -> Iterator[Index]:
    one = Index(store)
    try:
        yield one
    finally:
        one.close()


@contextlib.contextmanager
def announced(store: Store, publisher: Publisher) -> Iterator[Announcer]:
    worker = Worker("w", "m", 16, seed_id(None), (publisher,), incarnation="one")
    announcer = Announcer(store, worker)
    try:
        yield announcer
    finally:
        announcer.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcer, "READ_S", 0.05)
    monkeypatch.setattr(worker_watch, "REQUEST_EVERY_S", 0.2)
    monkeypatch.setattr(worker_watch, "REQUEST_LEASE_S", 1.0)
    monkeypatch.setattr(feed, "PROBE_S", 0.2)


def _publish_all(publisher: Misbehaving, *blocks: int) -> None:
    """As the connector does when it is asked."""
    publisher.publish(batch(cleared("GPU"), stored(blocks), dp_rank=3))


def _until_asked(index: Index, announcer: Announcer) -> None:
    assert eventually(lambda: announcer.requested)
    assert eventually(lambda: "asked for all it holds" in index.problem())


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("replay", [True, False])
def test_after_a_gap_that_nothing_closes(store: Store, replay: bool) -> None:
    """One answer serves all indexes that ask."""
    with (
        misbehaving(replay=replay) as publisher,
        announced(store, publisher.publisher) as announcer,
        contextlib.ExitStack() as parts,
    ):
        # Without replays only who has subscribed already hears anything; nobody knows when that is.
        indexes = [parts.enter_context(following(store)) for _ in range(1 + replay)]
        index, count = indexes[0], 0

        def heard() -> bool:
            nonlocal count
            if count == 0 or not replay:
                publisher.publish(batch(stored([1, 2]), dp_rank=3))
                count += 1
            return all(one.holds([1, 2]) == 2 for one in indexes)

        assert eventually(heard)
        publisher.publish(batch(stored([3], parent=2), dp_rank=3), lost=True)
        publisher.forget(count + 1)
        publisher.publish(batch(stored([4], parent=3), dp_rank=3))
        for one in indexes:
            assert eventually(lambda one=one: one.holds([4]) == 1)  # type: ignore[misc]
            assert one.holds([1, 2, 3, 4]) == 0, "less than there is, and never more"
            _until_asked(one, announcer)
        _publish_all(publisher, 1, 2, 3, 4)
        for one in indexes:
            assert eventually(lambda one=one: one.holds([1, 2, 3, 4]) == 4)  # type: ignore[misc]
            assert (one.problem(), one.fleet.incomplete()) == ("", [])
        assert eventually(lambda: not announcer.requested)
        publisher.publish(batch(removed([4]), dp_rank=3))
        assert eventually(lambda: index.holds([1, 2, 3, 4]) == 3)


@pytest.mark.usefixtures("quick")
def test_who_has_told_all_is_not_asked(store: Store) -> None:
    with (
        misbehaving() as publisher,
        announced(store, publisher.publisher) as announcer,
        following(store) as index,
    ):
        assert eventually(lambda: index.holds([1]) == 0)
        for block in range(1, 4):
            publisher.publish(batch(stored([block], parent=9), dp_rank=3), lost=block == 2)
        assert eventually(lambda: index.holds([1, 2, 3]) == 3)
        (status,) = index.fleet.workers()
        assert (status.publishers[0].gaps, status.publishers[0].replays) == (1, 1)
        assert (index.problem(), index.fleet.incomplete(), announcer.requested) == ("", [], False)


KEPT = 4
BLOCKS = list(range(1, 5))


class Following(RuleBasedStateMachine):
    """One publisher whose batches are lost, cut, repeated and replayed; restarts; tellings of all it holds.

    Whoever is not incomplete and not behind holds exactly what the publisher holds, and nobody ever more than it held
    at the batch that is named.
    """

    @initialize(can_replay=st.booleans())
    def start(self, can_replay: bool) -> None:
        self.can_replay = can_replay
        self.fleet = Fleet()
        self.fleet.add(a_worker(), "pool")
        self.sequence = Sequence(self.fleet.rank("default/w", 0), can_replay=can_replay)
        self.life = 0
        self.begin()

    def begin(self) -> None:
        self.payloads: list[bytes] = []
        self.held = Counter[int]()
        self.states: list[Counter[int]] = []  # after each batch

    def publish(self, *events: object, lost: bool, cut: bool = False) -> None:
        number = len(self.payloads)
        payload = batch(*events, at_s=self.life * 1000.0 + number)  # type: ignore[arg-type]
        self.payloads.append(payload[:-1] if cut else payload)
        self.states.append(self.held.copy())
        if not lost:
            self.sequence.live(number, self.payloads[number])

    @rule(block=st.sampled_from(BLOCKS), lost=st.booleans(), cut=st.sampled_from([False] * 5 + [True]))
    def store(self, block: int, lost: bool, cut: bool) -> None:
        self.held[block] += 1
        self.publish(stored([block], parent=9), lost=lost, cut=cut)

    @rule(block=st.sampled_from(BLOCKS), lost=st.booleans())
    def remove(self, block: int, lost: bool) -> None:
        if self.held[block]:
            self.held[block] -= 1
            self.publish(removed([block]), lost=lost)

    @rule(lost=st.booleans())
    def tell_all(self, lost: bool) -> None:
        once = [block for block in BLOCKS if self.held[block]]
        more = [block for block in BLOCKS for _ in range(self.held[block] - 1)]
        self.publish(cleared("GPU"), stored(once), stored(more, parent=9), lost=lost)

    @rule()
    def clear(self) -> None:
        self.held.clear()
        self.publish(cleared(), lost=False)

    @rule()
    def restart(self) -> None:
        self.life += 1
        self.begin()
        self.sequence.disconnected()

    @rule()
    def check(self) -> None:
        self.sequence.check()

    @rule()
    def replay(self) -> None:
        wanted = self.sequence.wanted
        if wanted is None:
            return
        kept = range(max(0, len(self.payloads) - KEPT), len(self.payloads))
        for number in kept:
            if number >= wanted:
                self.sequence.replayed(number, self.payloads[number])
        self.sequence.replay_ended()

    @invariant()
    def what_is_credited_was_true_at_the_batch_that_is_named(self) -> None:
        if not hasattr(self, "fleet"):
            return
        rows = [self.fleet.lookup("m", hashes64=packed64([block])) for block in BLOCKS]
        if rows[0].stale[0] or not self.sequence.is_live:
            return
        credited = {block for block, row in zip(BLOCKS, rows, strict=True) if row.device_blocks[0]}
        (sequence,) = rows[0].sequences
        last = self.sequence._last
        if last is None or last >= len(self.payloads):
            return  # nothing was told; or it lives in a life that has ended, and nothing has come since
        assert sequence in (last, 0)
        truth = {block for block, count in self.states[last].items() if count}
        assert credited <= truth
        if not self.fleet.incomplete():
            assert credited == truth

    def teardown(self) -> None:
        """Whatever was lost, one telling that arrives makes it whole."""
        if not hasattr(self, "fleet"):
            return
        for _ in range(8):
            self.tell_all(lost=False)
            for _ in range(20):
                self.replay()
        assert self.sequence.is_live
        assert self.fleet.incomplete() == []
        assert self.fleet.totals().incomplete_ranks == 0
        self.what_is_credited_was_true_at_the_batch_that_is_named()


TestFollowing = Following.TestCase
TestFollowing.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
