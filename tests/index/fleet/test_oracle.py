"""The whole service against a plain model: real publishers, the real feed, gRPC, a client; whatever happens on the way.

Over 400 lines because it holds one model of a fleet and the machine that drives it.

A row that is not stale must be exactly what its rank held after the batch that it names. A stale one says nothing. When
all is quiet, every rank is known to its last batch.

The order of what happens is drawn by hypothesis, which prints how to see it again. How it falls out between threads and
sockets is not repeatable, so nothing is made smaller: the steps of the example that failed are in the error.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from demo.index_process import IndexProcess
from kvpool import IndexClient, UnknownModel
from kvpool.index import Row, Worker
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.follow import subscriber as feed_module
from kvpool.index.follow.subscriber import Subscriber
from kvpool.key.hashing import seed_id
from tests.support.deadlines import eventually
from tests.support.fleets import serving
from tests.support.oracle import PROMPTS, Source, telling
from tests.support.soak import SEARCH_S
from tests.support.wire import packed64

SETTLED_S = 2.0  # promised: so long after the last event everything is known
MARGIN_S = 60.0  # for a machine that is busy with other things
CALL_S = 60.0
MODEL = "m"


class Oracle(RuleBasedStateMachine):
    """Three workers, one with two ranks and one of a model with a sliding window, as one tenant of every replica."""

    tenants = 0
    longest_s = 0.0  # until a quiet service knew everything, of all examples

    def __init__(self, clients: Sequence[IndexClient]) -> None:
        super().__init__()
        Oracle.tenants += 1
        self.tenant = f"t{os.getpid()}-{Oracle.tenants}"
        self.clients = clients
        self.sources = [Source("plain", 0), Source("two", 0), Source("two", 1), Source("hybrid", 0)]
        self.incarnations = {"plain": 0, "two": 0, "hybrid": 0}
        self.there: set[str] = set()
        self.steps: list[str] = []
        for worker in self.incarnations:
            self.add(worker)

    # ---- what happens

    def of(self, worker: str) -> list[Source]:
        return [source for source in self.sources if source.worker == worker]

    def add(self, worker: str, lease_s: float | None = None) -> None:
        publishers = tuple(replace(one.publisher.publisher, dp_rank=one.rank) for one in self.of(worker))
        for client in self.clients:
            client.register(
                Worker(worker, MODEL, 16, seed_id(None), publishers, tenant=self.tenant,
                       incarnation=str(self.incarnations[worker])),
                lease_s,
            )  # fmt: skip
        self.there.add(worker)

    def nothing_of_before(self, worker: str) -> None:
        """From now on no answer may be of a life before the present one."""
        for source in self.of(worker):
            source.lives_seen = dict.fromkeys(range(len(self.clients)), len(source.lives) - 1)

    WHO = st.integers(0, 3)
    SEEDS = st.integers(0, (1 << 32) - 1)
    NAMES = st.sampled_from(["plain", "two", "hybrid"])

    @rule(who=WHO, seed=SEEDS, fate=st.sampled_from(["heard", "heard", "twice", "lost", "late"]))
    def tell(self, who: int, seed: int, fate: str) -> None:
        source = self.sources[who]
        events = telling(random.Random(seed), source.hybrid)
        self.steps.append(f"{who} tells {len(source.life.told)} {fate}: {events}")
        source.tell(events, fate=fate)

    @rule(who=WHO, seed=SEEDS)
    def tell_many(self, who: int, seed: int) -> None:
        source, chance = self.sources[who], random.Random(seed)
        for _ in range(chance.randint(3, 12)):
            events, fate = telling(chance, source.hybrid), chance.choice(["heard", "heard", "twice", "lost"])
            self.steps.append(f"{who} tells {len(source.life.told)} {fate}: {events}")
            source.tell(events, fate=fate)

    @rule(who=WHO, at=st.integers(0, 10**6))
    def deliver_late(self, who: int, at: int) -> None:
        """What was under way arrives behind what was told after it; or what has come before comes again."""
        source = self.sources[who]
        if source.late:
            number, payload = source.late.pop(at % len(source.late))
        elif source.publisher.kept:
            place = at % len(source.publisher.kept)
            number, payload = source.publisher.first + place, source.publisher.kept[place]
        else:
            return
        self.steps.append(f"{who} delivers {number} late")
        source.again(number, payload)

    @rule(who=WHO)
    def tell_what_nobody_can_read(self, who: int) -> None:
        self.steps.append(f"{who} tells {len(self.sources[who].life.told)}: nonsense")
        self.sources[who].tell(None, fate="heard")

    @rule(who=WHO, numbers=st.sets(st.integers(0, 20), max_size=6))
    def drop_in_the_next_replay(self, who: int, numbers: set[int]) -> None:
        self.steps.append(f"{who} drops {numbers} in the next replay")
        self.sources[who].publisher.dropped_in_replays = numbers

    @rule(who=WHO, mute=st.booleans())
    def be_mute(self, who: int, mute: bool) -> None:
        self.steps.append(f"{who} is mute: {mute}")
        self.sources[who].publisher.mute = mute

    @rule(who=WHO, count=st.integers(1, 8))
    def forget_the_oldest(self, who: int, count: int) -> None:
        """As a publisher that keeps so many batches only."""
        source = self.sources[who]
        if len(source.publisher.kept) > count:
            self.steps.append(f"{who} forgets {count}")
            source.life.forgot = True
            source.publisher.forget(count)

    @rule(who=WHO)
    def restart(self, who: int) -> None:
        """The numbers go back to 0, and nobody says so."""
        self.steps.append(f"{who} restarts")
        self.sources[who].restart()

    @rule(name=NAMES, restarts=st.booleans())
    def start_anew(self, name: str, restarts: bool) -> None:
        """As seen by its lease: another incarnation. What was held is gone when the call returns."""
        self.steps.append(f"{name} starts anew, with its publishers: {restarts}")
        for source in self.of(name):
            if restarts:
                source.restart()
        self.incarnations[name] += 1
        self.add(name)
        self.nothing_of_before(name)

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        self.steps.append(f"{name} is removed")
        for client in self.clients:
            client.remove(name, tenant=self.tenant)
        self.there.discard(name)

    @rule(name=NAMES)
    def come_back(self, name: str) -> None:
        if name not in self.there:
            self.steps.append(f"{name} comes back")
            self.add(name)
            self.nothing_of_before(name)

    @rule(name=NAMES)
    def let_the_lease_end(self, name: str) -> None:
        self.steps.append(f"the lease of {name} ends")
        self.add(name, lease_s=0.05)
        self.there.discard(name)
        assert eventually(
            lambda: all(name not in self.ask(client, PROMPTS[0]) for client in self.clients),
            within_s=SETTLED_S + MARGIN_S,
        ), f"{name} is there although its lease is over; {self.steps}"

    # ---- what is answered

    def ask(self, client: IndexClient, prompt: Sequence[int]) -> dict[str, dict[int, Row]]:
        rows: dict[str, dict[int, Row]] = {}
        try:
            answer = client.lookup(MODEL, hashes64=packed64(prompt), tenant=self.tenant)
        except UnknownModel:
            assert not self.there, "only a model without workers may be forgotten"
            return rows
        for row in answer:
            rows.setdefault(row.worker, {})[row.dp_rank] = row
        return rows

    @invariant()
    def no_answer_is_beyond_the_batch_that_it_names(self) -> None:
        for prompt in PROMPTS:
            for replica, client in enumerate(self.clients):
                self.judge(replica, self.ask(client, prompt), prompt)

    def judge(self, replica: int, rows: dict[str, dict[int, Row]], prompt: Sequence[int]) -> None:
        try:
            assert set(rows) == self.there
            for source in self.sources:
                if source.worker in self.there:
                    source.check(replica, rows[source.worker][source.rank], prompt)
        except AssertionError as error:
            raise AssertionError(f"{error}\nafter:\n" + "\n".join(self.steps)) from error

    @rule()
    def quiet(self) -> None:
        """Nothing is under way any more: soon everything is known, and all replicas answer alike."""
        self.steps.append("quiet")
        for source in self.sources:
            source.publisher.mute = False
            for number, payload in source.late:
                source.again(number, payload)
            source.late.clear()
        # Who has left a question unanswered is asked again after a while: there is no quiet before.
        followed = [source.publisher for source in self.sources if source.worker in self.there]
        patience_s = feed_module.ANSWER_S + feed_module.MAX_BACKOFF_S + MARGIN_S
        assert eventually(lambda: not any(one.owes_an_answer for one in followed), within_s=patience_s)
        unsettled: list[str] = []

        def settled() -> bool:
            unsettled.clear()
            for prompt in PROMPTS:
                answers = [self.ask(client, prompt) for client in self.clients]
                for replica, rows in enumerate(answers):
                    self.judge(replica, rows, prompt)
                for source in self.sources:
                    for rows in answers if source.worker in self.there else ():
                        row = rows[source.worker][source.rank]
                        if row.stale or not source.life.is_known_to_the_end(
                            row, prompt, source.publisher.first
                        ):
                            unsettled.append(f"{row} of {prompt}")
            return not unsettled

        began_s = time.monotonic()
        assert eventually(settled, within_s=SETTLED_S + MARGIN_S), "\n".join(
            [*unsettled, "after:", *self.steps]
        )
        Oracle.longest_s = max(Oracle.longest_s, time.monotonic() - began_s)
        for worker in self.incarnations:
            self.nothing_of_before(worker)

    def teardown(self) -> None:
        try:
            self.quiet()
        finally:
            for name in self.there:
                for client in self.clients:
                    client.remove(name, tenant=self.tenant)
            for source in self.sources:
                source.publisher.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A feed that asks again soon, so that more can happen in the time of a test."""
    monkeypatch.setattr(feed_module, "PROBE_S", 0.1)
    monkeypatch.setattr(feed_module, "ANSWER_S", 0.2)
    monkeypatch.setattr(feed_module, "MAX_BACKOFF_S", 0.3)


def drawn(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        database=None,
    )


@pytest.mark.usefixtures("grpc_started", "impatient")
def test_no_answer_is_beyond_the_state_that_it_names() -> None:
    fleet = Fleet()
    with serving(fleet, feed=Subscriber()) as served, IndexClient(served.target, timeout_s=CALL_S) as client:
        try:
            run_state_machine_as_test(lambda: Oracle([client]), settings=drawn(15, 30))
        finally:
            served.fleet.close()


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.usefixtures("grpc_started")
def test_two_replicas_settle_and_agree(tmp_path: Path) -> None:
    """Two real index processes, with the times that they have in a fleet."""
    ends_s = time.monotonic() + SEARCH_S
    with ExitStack() as parts:
        clients = []
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            index = parts.enter_context(IndexProcess(tmp_path / name, f"file://{tmp_path}/pool"))
            clients.append(parts.enter_context(IndexClient(index.address, timeout_s=CALL_S)))
        while time.monotonic() < ends_s:
            run_state_machine_as_test(lambda: Oracle(clients), settings=drawn(5, 50))
    print(f"{Oracle.tenants} examples; the longest wait for all to be known was {Oracle.longest_s:.2f} s")
