"""What requests hint at: read from three places, bounded, and counted; kept prefixes outlive others, done ones go.

Over 400 lines because keeping and letting go share one scripted pool.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from kvpool import metrics
from kvpool.errors import StoreUnavailable
from kvpool.key.key import Namespace
from kvpool.metrics import Counters
from kvpool.store import LookupGroup, Store
from kvpool.store.store import Usage
from kvpool.vllm.engine.hints import MAX_ACTIONS, NO_HINTS, Hints, read_hints
from kvpool.vllm.geometry import Group
from kvpool.vllm.plan import PoolWorkerMetadata
from kvpool.vllm.save.retention import KEEPER_LEASE_S, TOUCH_EVERY_S, Prefix, Retention
from tests.support.deadlines import eventually
from tests.support.memory_store import MemoryStore
from tests.support.records import HEADER_NBYTES
from tests.support.scheduler import BLOCK_TOKENS, FACTS, NAMESPACE, half, request

pytestmark = [pytest.mark.vllm]

RECORD_NBYTES = 100


def envelope(*actions: tuple[str, Any]) -> dict[str, Any]:
    listed = [
        {"action_id": f"{number}", "action_type": kind, "action_version": "1", "payload": payload}
        for number, (kind, payload) in enumerate(actions)
    ]
    return {"protocol_version": "1", "message_id": "m", "actions": listed}


def counted(counters: Counters, metric: metrics.Metric = metrics.HINTS) -> dict[str, float]:
    name = f"{metric.name}/"
    return {key.removeprefix(name): value for key, value in counters.take().items() if key.startswith(name)}  # type: ignore[misc]


def test_an_envelope_is_read_as_json_and_as_vllms_own() -> None:
    kv_hints = pytest.importorskip("vllm.v1.kv_hints")
    given = envelope(("keep", {"seconds": 300}), ("priority", {"priority": -2}), ("prefetch", {}))
    own = kv_hints.KvHintsEnvelope(
        given["protocol_version"], "m", [kv_hints.KvHintAction(**action) for action in given["actions"]]
    )
    for transfer_params, of_vllm in (({"kv_hint": given}, None), (None, own)):
        counters = Counters()
        hints = read_hints(NO_HINTS, transfer_params, of_vllm, counters)
        assert hints == Hints(keep_s=300, prefetch=True, priority=-2)
        assert counted(counters) == {"keep": 1, "priority": 1, "prefetch": 1}


def test_kvpools_own_words_come_first_and_vllms_come_last() -> None:
    inside, outside = envelope(("keep", {"seconds": 10}), ("done", None)), envelope(("keep", {"seconds": 20}))
    assert read_hints(NO_HINTS, {"kv_hint": inside}, outside, Counters()) == Hints(keep_s=20, done=True)
    assert read_hints(Hints(keep_s=5), {"kv_hint": inside}, outside, Counters()).keep_s == 5


@pytest.mark.parametrize(
    ("given", "count"),
    [
        (envelope(("pin", {"seconds": 5})), {"unknown": 1}),
        (envelope(("keep", {"seconds": 0})), {"invalid": 1}),
        (envelope(("keep", {"seconds": 1e6})), {"invalid": 1}),
        (envelope(("keep", {"seconds": float("nan")})), {"invalid": 1}),
        (envelope(("keep", {"seconds": 10**400})), {"invalid": 1}),
        (envelope(("keep", {"seconds": True})), {"invalid": 1}),
        (envelope(("keep", {})), {"invalid": 1}),
        (envelope(("keep", 300)), {"unknown": 1}),
        (envelope(("priority", {"priority": 1 << 40})), {"invalid": 1}),
        (envelope((7, {})), {"unknown": 1}),  # type: ignore[arg-type]
        ({"actions": "keep"}, {"unknown": 1}),
        ({"actions": [None, 5, []]}, {"unknown": 3}),
        ("keep", {"unknown": 1}),
        (["keep"], {"unknown": 1}),
        (envelope(*[("pin", {})] * 1000), {"unknown": MAX_ACTIONS}),
    ],
)
def test_what_nobody_understands_is_counted_and_ignored(given: Any, count: dict[str, int]) -> None:
    for transfer_params, of_vllm in (({"kv_hint": given}, None), (None, given)):
        counters = Counters()
        assert read_hints(NO_HINTS, transfer_params, of_vllm, counters) == NO_HINTS
        assert counted(counters) == count


# ---------------------------------------------------------------------- keeping


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def prefix_of(hashes: list[bytes], namespace: Namespace = NAMESPACE) -> Prefix:
    group = LookupGroup(b"".join(hashes), len(hashes[0]), 0, 1, BLOCK_TOKENS)
    return Prefix(namespace, [group], hashes, len(hashes) * (RECORD_NBYTES + HEADER_NBYTES))


class Pool:
    """A store with room for so many records, and engines that keep prefixes in it, turned by hand."""

    def __init__(self, records: int) -> None:
        self.store = MemoryStore(records * (RECORD_NBYTES + HEADER_NBYTES))
        self.clock = Clock()
        self.counters = Counters()

    def engine(self, tenant: str = "default", share: float = 0.5) -> Retention:
        retention = Retention(self.store, tenant, share=share, counters=self.counters, clock=self.clock)
        retention._thread = _Never()  # type: ignore[assignment]
        return retention

    def fill(self, records: int, namespace: Namespace = NAMESPACE) -> Prefix:
        """Store another prompt of so many records."""
        hashes = [os.urandom(32) for _ in range(records)]
        keys = namespace.keys(hashes, 0, 0)
        assert all(self.store.submit_put_absent(keys, [bytes(RECORD_NBYTES)] * records).wait())
        return prefix_of(hashes, namespace)

    def present(self, prefix: Prefix) -> int:
        return sum(self.store.contains_many(prefix.namespace.keys(prefix.hashes, 0, 0)))

    def wait(self, *engines: Retention, seconds: float = TOUCH_EVERY_S) -> None:
        self.clock.now_s += seconds
        for engine in engines:
            engine.turn()

    def samples(self) -> dict[str, Any]:
        return self.counters.take()


class _Never:
    """A thread that has been started, and does nothing."""

    ident = 1

    def join(self, timeout: float) -> None:
        pass


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(100)
    yield pool
    pool.store.close()


def test_a_kept_prefix_outlives_others_until_its_time_is_over(pool: Pool) -> None:
    engine = pool.engine()
    kept, other = pool.fill(20), pool.fill(20)
    engine.keep(kept, 2 * TOUCH_EVERY_S + 1)
    pool.wait(engine, seconds=0)
    assert engine.keeps
    assert pool.samples()[metrics.KEPT_NBYTES.name] == kept.nbytes
    for _ in range(2):
        pool.fill(60)
        pool.wait(engine)
    assert (pool.present(kept), pool.present(other)) == (20, 0)
    pool.wait(engine)
    assert not engine.keeps
    pool.fill(60)
    pool.fill(40)
    assert pool.present(kept) == 0
    assert pool.samples()[metrics.KEPT_NBYTES.name] == 0


@pytest.mark.parametrize("far_is_away", [False, True])
def test_a_kept_prefix_is_kept_far_too_and_near_where_far_is_away(
    far_is_away: bool, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = Pool(100)
    monkeypatch.setattr(pool.store, "far", far.store)
    engine = pool.engine()
    kept = [pool.fill(10), pool.fill(10)]
    for prefix in kept:
        keys = NAMESPACE.keys(prefix.hashes, 0, 0)
        assert all(far.store.submit_put_absent(keys, [bytes(RECORD_NBYTES)] * len(keys)).wait())
        engine.keep(prefix, 10 * TOUCH_EVERY_S)
    pool.wait(engine, seconds=0)
    if far_is_away:
        far.store.close()
        # Of a near and a far pool the documents are far.
        monkeypatch.setattr(pool.store, "announce", far.store.announce)
    for _ in range(3):
        pool.fill(60)
        if not far_is_away:
            far.fill(60)
        pool.wait(engine)
    assert [pool.present(prefix) for prefix in kept] == [10, 10]
    if not far_is_away:
        assert [far.present(prefix) for prefix in kept] == [10, 10]
        far.store.close()


def test_a_hit_starts_the_time_again(pool: Pool) -> None:
    engine = pool.engine()
    kept, unused = pool.fill(10), pool.fill(10)
    for prefix in (kept, unused):
        engine.keep(prefix, 1.5 * TOUCH_EVERY_S)
    pool.wait(engine)
    engine.used([*kept.hashes, *pool.fill(5).hashes])  # a request goes on from it
    engine.used(unused.hashes[:-1])  # another one leaves it before its end
    pool.wait(engine)
    assert len(engine._ends) == 2
    pool.wait(engine)
    assert engine._ends == {kept.hashes[-1]}


def test_a_longer_prefix_takes_the_place_of_what_it_begins_with(pool: Pool) -> None:
    engine = pool.engine(share=0.3)
    turn = pool.fill(20)
    longer = prefix_of([*turn.hashes, *pool.fill(5).hashes])
    too_long = prefix_of([*longer.hashes, *pool.fill(15).hashes])
    for prefix in (turn, longer, too_long):
        engine.keep(prefix, 300)
    pool.wait(engine, seconds=0)
    samples = pool.samples()
    assert engine._ends == {longer.hashes[-1]}, "who has no room for more keeps what it has"
    assert (samples[metrics.KEPT_NBYTES.name], samples[metrics.KEEPS_REFUSED.name]) == (longer.nbytes, 1)


def test_a_hostile_caller_displaces_nobody(pool: Pool) -> None:
    engine, other = pool.engine(), pool.engine("other")
    mine, theirs = pool.fill(10), pool.fill(10, Namespace("other", FACTS))
    engine.keep(mine, 3600)
    other.keep(theirs, 3600)
    pool.wait(engine, other, seconds=0)
    pool.wait(engine, other)  # by now each knows of the other one
    flood = [pool.fill(2) for _ in range(20)]
    for prefix in flood:
        engine.keep(prefix, 86_400)
    pool.wait(engine, other)
    kept = engine._kept_nbytes()
    assert mine.hashes[-1] in engine._ends
    assert kept <= 25 * (RECORD_NBYTES + HEADER_NBYTES), (
        "half of the pool is for what is kept, and half of that"
    )
    assert pool.samples()[metrics.KEEPS_REFUSED.name] == 20 - 7
    used = pool.fill(60, Namespace("other", FACTS))
    pool.wait(engine, other)
    assert (pool.present(mine), pool.present(theirs)) == (10, 10)
    assert pool.present(used) >= 60 - 25


def test_engines_of_a_tenant_share_its_part(pool: Pool) -> None:
    engines = [pool.engine() for _ in range(2)]
    prompts = [pool.fill(20) for _ in range(4)]
    engines[0].keep(prompts[0], 3600)
    engines[0].keep(prompts[1], 3600)
    pool.wait(engines[0], seconds=0)
    assert len(engines[0]._ends) == 2
    engines[1].keep(prompts[2], 3600)
    engines[1].keep(prompts[3], 3600)
    pool.wait(engines[1], seconds=0)
    assert len(engines[1]._ends) == 1
    pool.wait(engines[0])
    assert engines[0]._ends == {prompts[0].hashes[-1]}, "the older one stays"
    pool.wait(engines[0], seconds=KEEPER_LEASE_S)


def test_nothing_is_kept_without_a_share(pool: Pool) -> None:
    engine = pool.engine(share=0)
    engine.keep(pool.fill(1), 300)
    pool.wait(engine, seconds=0)
    assert not engine.keeps
    assert pool.samples()[metrics.KEEPS_REFUSED.name] == 1


def test_a_done_prefix_goes_first_and_what_others_use_of_it_stays(pool: Pool) -> None:
    engine = pool.engine()
    shared = pool.fill(5)
    done = prefix_of([*shared.hashes, *pool.fill(15).hashes])
    before = pool.fill(40)
    engine.let_go(done)
    pool.wait(engine, seconds=0)
    assert pool.samples()[metrics.DONE_KEYS.name] == 20
    assert pool.present(done) == 20, "until room is needed"
    assert pool.store.touch_many(NAMESPACE.keys(shared.hashes, 0, 0)) == [True] * 5
    pool.fill(55)
    assert (pool.present(done), pool.present(before)) == (5, 40)


def test_who_is_done_lets_nothing_go_that_is_kept(pool: Pool) -> None:
    """Of it, of a part of it, of what begins with it or as it does: only the rest goes."""
    engine = pool.engine()
    kept = pool.fill(20)
    longer = prefix_of([*kept.hashes, *pool.fill(5).hashes])
    beside = prefix_of([*kept.hashes[:10], *pool.fill(5).hashes])
    engine.keep(kept, 3600)
    for done in (kept, prefix_of(list(kept.hashes[:10])), longer, beside):
        engine.let_go(done)
    pool.wait(engine, seconds=0)
    assert engine.keeps
    assert pool.samples()[metrics.DONE_KEYS.name] == 10
    pool.fill(80)
    assert (pool.present(kept), pool.present(longer), pool.present(beside)) == (20, 20, 10)


def test_what_was_kept_long_enough_can_be_let_go(pool: Pool) -> None:
    engine, kept = pool.engine(), pool.fill(20)
    engine.keep(kept, 10)
    pool.wait(engine, seconds=0)
    pool.clock.now_s += 11
    engine.let_go(kept)
    pool.wait(engine, seconds=0)
    assert pool.samples()[metrics.DONE_KEYS.name] == 20


def test_another_namespaces_prefix_keeps_nothing_of_this_one(pool: Pool) -> None:
    engine = pool.engine()
    kept = pool.fill(10)
    other = Namespace("default", {**FACTS, "model": "other"})
    assert all(
        pool.store.submit_put_absent(other.keys(kept.hashes, 0, 0), [bytes(RECORD_NBYTES)] * 10).wait()
    )
    engine.keep(kept, 3600)
    engine.let_go(prefix_of(list(kept.hashes), other))
    pool.wait(engine, seconds=0)
    assert pool.samples()[metrics.DONE_KEYS.name] == 10


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_shorter_wish_takes_nothing_from_a_longer_one(pool: Pool, goes_on: bool) -> None:
    """Neither for the same prompt nor for one that begins with it."""
    engine, kept = pool.engine(), pool.fill(20)
    short = prefix_of([*kept.hashes, *pool.fill(5).hashes]) if goes_on else kept
    engine.keep(kept, 3600)
    engine.keep(short, 10)
    pool.wait(engine, seconds=0)
    for _ in range(3):
        pool.wait(engine)
        pool.fill(60)
    assert engine.keeps
    assert pool.present(kept) == 20


def test_an_outage_loses_a_hint_and_no_thread(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prefix = pool.engine(), pool.fill(5)
    engine.keep(prefix, 3600)
    pool.wait(engine, seconds=0)

    def away(*_: object, **__: object) -> Any:
        raise StoreUnavailable("away")

    said: list[str] = []
    monkeypatch.setattr("kvpool.vllm.save.retention.logger.warning", lambda text, *of: said.append(text % of))
    with monkeypatch.context() as down:
        down.setattr(pool.store, "submit_lookup", away)
        down.setattr(pool.store, "expire_many", away)
        for _ in range(3):
            engine.let_go(pool.fill(1))
            pool.wait(engine)
    assert len(said) == 1
    pool.wait(engine)
    assert engine.keeps


def test_a_confined_user_keeps_by_what_it_may_see(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> Any:
        raise StoreUnavailable("NOPERM")

    said: list[str] = []
    monkeypatch.setattr("kvpool.vllm.save.retention.logger.warning", said.append)
    monkeypatch.setattr(pool.store, "announcing_tenants", refused)
    engine = pool.engine()
    engine.keep(pool.fill(50), 300)
    pool.wait(engine, seconds=0)
    assert engine.keeps, "half of the pool"
    monkeypatch.setattr(pool.store, "usage", lambda: [Usage("a server")])
    blind = pool.engine()
    for _ in range(2):
        blind.keep(pool.fill(1), 300)
    pool.wait(blind, seconds=0)
    assert not blind.keeps
    (line,) = said
    assert "+info" in line


def test_a_server_that_is_away_for_a_moment_lets_go_of_nothing(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_nbytes = 50 * (RECORD_NBYTES + HEADER_NBYTES)
    servers = [Usage("a", capacity_nbytes=half_nbytes), Usage("b", capacity_nbytes=half_nbytes)]
    monkeypatch.setattr(pool.store, "usage", lambda: servers)
    engine = pool.engine()
    engine.keep(pool.fill(40), 1e6)
    pool.wait(engine)
    assert engine.keeps
    servers[1] = Usage("b", up=False)
    pool.wait(engine)
    assert engine.keeps, "its size is unknown, and not nothing"
    servers.pop()
    pool.wait(engine)
    assert not engine.keeps, "it belongs to the pool no more"


# ---------------------------------------------------------------------- of requests


def finished(store: Store, params: dict[str, Any], **settings: Any) -> Any:
    """The scheduler's half after a request with these parameters, of six records, which a pool holds."""
    scheduler, asked = (
        half(store, ranks=2, groups=[Group(BLOCK_TOKENS)], **settings),
        request("a", 100, params),
    )
    for rank in range(2):
        keys = NAMESPACE.keys(asked.block_hashes, 0, rank)
        assert all(store.put_many(keys, [bytes(RECORD_NBYTES)] * len(keys)))
    nbytes = RECORD_NBYTES + HEADER_NBYTES
    for rank in range(2):
        scheduler.update(PoolWorkerMetadata(part_nbytes={(0, rank): nbytes}), (), ())
    scheduler.seen(asked)
    scheduler.finished(asked)
    return scheduler


def test_a_request_keeps_its_records_of_all_ranks() -> None:
    with MemoryStore(1 << 20) as store:
        scheduler = finished(store, {"kvpool": {"keep_s": 300}})
        assert eventually(lambda: scheduler._retention.keeps)
        assert eventually(
            lambda: (
                scheduler.counters.take().get(metrics.KEPT_NBYTES.name)
                == 2 * 6 * (RECORD_NBYTES + HEADER_NBYTES)
            )
        )
        scheduler.close()
        assert not store.announcements("kvpool:default:keeper:"), "it is not counted any more"


@pytest.mark.parametrize("params", [{"kvpool": {"done": True}}, {"kv_hint": envelope(("done", {}))}])
def test_a_request_is_done_with_its_records(params: dict[str, Any]) -> None:
    with MemoryStore(1 << 20) as store:
        scheduler = finished(store, params)
        assert eventually(lambda: store.counters()["expires"] == 12)
        scheduler.close()


def test_a_priority_of_an_envelope_counts() -> None:
    with MemoryStore(1 << 20) as store:
        scheduler, asked = (
            half(store),
            request("a", 100, {"kv_hint": envelope(("priority", {"priority": 7}))}),
        )
        scheduler.seen(asked)
        assert scheduler._requests["a"].asked.params.priority == 7
        scheduler.close()


def test_a_request_without_hints_asks_for_nothing() -> None:
    with MemoryStore(1 << 20) as store:
        scheduler = finished(store, {})
        assert scheduler._retention._thread.ident is None
        assert not scheduler._retention._waiting
        assert not counted(scheduler.counters)
        scheduler.close()


def test_a_fault_of_a_hint_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(Retention, "keep", planted)
    with MemoryStore(1 << 20) as store:
        scheduler = finished(store, {"kvpool": {"keep_s": 300}})
        assert scheduler.counters.take()[f"{metrics.REQUEST_FAULTS.name}/hint"] == 1
        assert not scheduler._requests
        scheduler.close()
