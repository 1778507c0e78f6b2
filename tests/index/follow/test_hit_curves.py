"""The curves that an index learns from the engines' documents, beside a curve of all their requests."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

import msgpack
import numpy as np
import pytest

from kvpool.discovery import sample
from kvpool.discovery.reuse import ReuseCurve
from kvpool.discovery.sample import Sample, SampleWindow
from kvpool.discovery.traffic import WINDOWS, Seen, pack_traffic
from kvpool.discovery.traffic_slots import Traffic
from kvpool.index.answer import HitCurve
from kvpool.index.follow import hit_curves
from kvpool.index.follow.hit_curves import ALL, HitCurves
from kvpool.key.key import traffic_key

ROUND_S = 5.0
EPOCH_S = 1e9
EMPTY = {name: Seen() for name in WINDOWS}


class Clock:
    def __init__(self) -> None:
        self.now_s = 5000.0

    def __call__(self) -> float:
        return self.now_s


class Engine:
    """As ``TrafficAnnouncer`` writes for it."""

    def __init__(self, clock: Clock, number: int, tenant: str = "t") -> None:
        self._clock = clock
        self.tenant, self.key = tenant, traffic_key(tenant, f"{number:016x}")
        self._traffic, self._window = Traffic(clock), SampleWindow()
        self.document, self.epoch_s = b"", EPOCH_S

    def ask(self, prompt: list[int]) -> None:
        hashes = np.array(prompt, np.uint64).tobytes()
        self._traffic.add(hashes, 8, salt=0, block_tokens=16, prompt_tokens=16 * len(prompt))

    def write(self) -> None:
        part = self._window.pack(self._traffic.sampled(), self._clock(), self.epoch_s + self._clock())
        self.document = pack_traffic(self._traffic.windows(), part)


class Pool:
    """Engines, their documents, and an index that reads them."""

    def __init__(self, engines: int, tenants: tuple[str, ...] = ("t",)) -> None:
        self.clock = Clock()
        self.engines = [
            Engine(self.clock, number, tenants[number % len(tenants)]) for number in range(engines)
        ]
        self.index = self.new_index()

    def new_index(self) -> HitCurves:
        return HitCurves(self.clock, wall=lambda: EPOCH_S + self.clock.now_s)

    def documents(self) -> Mapping[str, Mapping[str, bytes]]:
        found: dict[str, dict[str, bytes]] = {}
        for engine in self.engines:
            if engine.document:
                found.setdefault(engine.tenant, {})[engine.key] = engine.document
        return found

    def replay(self, requests: list[tuple[int, list[int]]], seconds: float) -> None:
        """Requests by engine, evenly over so many seconds; engines write and the index reads in their turns."""
        turns = [
            (at * seconds / len(requests), engine, prompt) for at, (engine, prompt) in enumerate(requests)
        ]
        start_s, done = self.clock.now_s, 0
        for round_ in range(int(seconds / ROUND_S) + 12):
            end_s = round_ * ROUND_S
            while done < len(turns) and turns[done][0] < end_s:
                self.clock.now_s = start_s + turns[done][0]
                self.engines[turns[done][1]].ask(turns[done][2])
                done += 1
            self.clock.now_s = start_s + end_s
            for number, engine in enumerate(self.engines):
                if round_ % 3 == number % 3:
                    engine.write()
            self.index.read(self.documents())

    def curve(self, name: str = ALL) -> HitCurve:
        return self.index.shown({}, 0.0)[name]


def sessions(seed: int, turns: int, *, engines: int, living: int = 80) -> Iterator[tuple[int, list[int]]]:
    """Turns of sessions that grow, end and begin with one of few beginnings, mostly on the engine of before."""
    draw = random.Random(seed)
    beginnings = [[draw.getrandbits(64) for _ in range(20)] for _ in range(4)]
    open_: dict[int, list[int]] = {}
    for _ in range(turns):
        number = min(int(draw.paretovariate(0.7)) - 1, living - 1)
        prompt = open_.get(number) or draw.choice(beginnings)
        prompt = prompt + [draw.getrandbits(64) for _ in range(draw.randrange(3, 30))]
        open_[number] = prompt if len(prompt) < 400 else []
        yield (number if draw.random() < 0.8 else draw.randrange(engines)) % engines, prompt


def exact(prompts: list[list[int]]) -> ReuseCurve:
    curve = ReuseCurve(1 << 24)
    for prompt in prompts:
        curve.ask(prompt)
    return curve


def worst_error(curve: HitCurve, prompts: list[list[int]], *, least: int) -> float:
    points = exact(prompts).points()
    assert len(points) >= 100
    return max(abs(point.hit_rate - curve.at(point.blocks)) for point in points if point.blocks >= least)


def prompts_of(requests: list[tuple[int, list[int]]]) -> list[list[int]]:
    return [prompt for _, prompt in requests]


def test_engines_that_sample_all_give_the_exact_curve() -> None:
    pool = Pool(5)
    requests = list(sessions(1, 500, engines=5))
    pool.replay(requests, 1500.0)
    curve = pool.curve()
    assert curve.share == 1
    assert (curve.requests, curve.requested_blocks) == (500, sum(map(len, prompts_of(requests))))
    assert list(zip(curve.sizes, curve.hit_rates, strict=True)) == exact(prompts_of(requests)).points()
    assert curve.block_tokens == 16


def test_a_sampled_curve_is_within_two_points() -> None:
    """Of pools from ten prompts on: smaller ones are nobody's."""
    pool = Pool(4)
    requests = list(sessions(2, 2500, engines=4, living=300))
    pool.replay(requests, 400.0)
    curve = pool.curve()
    assert curve.share <= 1 / 4
    assert worst_error(curve, prompts_of(requests), least=2000) < 0.02
    assert curve.requested_blocks == sum(map(len, prompts_of(requests)))
    assert curve.sizes[-1] == pytest.approx(exact(prompts_of(requests)).distinct_blocks, rel=0.05)


def test_one_engine_with_a_low_rate_lowers_that_of_the_curve() -> None:
    pool = Pool(2)
    pool.replay([(0, [7, 8]), (1, [7, 8])], 10.0)
    assert pool.curve().share == 1
    sampler = pool.engines[1]._traffic._sampler
    sampler._shift, sampler._ends_s = 5, float("inf")
    draw = random.Random(3)
    pool.replay([(1, [draw.getrandbits(64) for _ in range(400)]) for _ in range(2)], 10.0)
    assert pool.curve().share == 1 / 32


def test_clocks_of_engines_are_not_trusted() -> None:
    """Those of two hosts are an hour early and late: their requests are as far apart as rounds, not more."""
    pool = Pool(3)
    requests = list(sessions(1, 500, engines=3))
    pool.replay(requests, 1500.0)
    right = pool.curve()
    skewed = Pool(3)
    for engine, off_s in zip(skewed.engines, (-3600.0, 0.0, 3600.0), strict=True):
        engine.epoch_s += off_s
    skewed.replay(requests, 1500.0)
    curve = skewed.curve()
    assert curve.hit_rates[-1] == pytest.approx(right.hit_rates[-1], abs=0.002)
    assert max(abs(curve.at(size) - right.at(size)) for size in right.sizes if size > 2000) < 0.01


# ---- tenants


def test_tenants_have_curves_of_their_own_and_share_no_block() -> None:
    pool = Pool(2, tenants=("a", "b"))
    prompt = list(range(1 << 40, (1 << 40) + 10))
    pool.replay([(0, prompt), (1, prompt), (0, prompt)], 30.0)
    assert (pool.curve("a").hit_rates[-1], pool.curve("b").hit_rates[-1]) == (0.5, 0.0)
    assert pool.curve().hit_rates[-1] == pytest.approx(1 / 3)
    assert pool.curve().sizes[-1] == 20


def test_the_only_tenant_keeps_its_curve_when_another_comes() -> None:
    pool = Pool(2, tenants=("a", "b"))
    requests = [(0, prompt) for _, prompt in sessions(6, 60, engines=1)]
    pool.replay(requests[:30], 150.0)
    assert pool.curve("a") == pool.curve()
    assert len(pool.index._curves) == 1
    pool.replay([(1, [1, 2, 3]), *requests[30:]], 150.0)
    alone = exact(prompts_of(requests)).points()
    curve = pool.curve("a")
    assert list(zip(curve.sizes, curve.hit_rates, strict=True)) == alone
    assert (curve.requests, pool.curve("b").requests, pool.curve().requests) == (60, 1, 61)


def test_a_hostile_tenant_does_not_change_the_curve_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [(0, prompt) for _, prompt in sessions(4, 60, engines=1)]
    alone = Pool(1, tenants=("good",))
    alone.replay(requests, 40.0)
    pool = Pool(1, tenants=("good",))
    honest = pool.documents
    draw = np.random.default_rng(1)

    def with_hostile() -> Mapping[str, Mapping[str, bytes]]:
        return {
            **honest(),
            "evil": {traffic_key("evil", "0" * 16): hostile(draw, pool.clock.now_s)},
        }

    monkeypatch.setattr(pool, "documents", with_hostile)
    pool.replay(requests, 40.0)
    assert pool.curve("good") == alone.curve("good")
    assert pool.curve("evil").requests > 0


def hostile(draw: np.random.Generator, now_s: float) -> bytes:
    """As many blocks as a document takes, and the smallest numbers that there are."""
    numbers = draw.integers(0, 1 << 20, sample.MAX_BLOCKS, dtype=np.uint64)
    count = sample.MAX_REQUESTS
    part = {
        "written_s": EPOCH_S + now_s, "shift": sample.MAX_SHIFT, "first": [int(now_s * 1000), 1 << 40],
        "ages_ms": bytes(4 * count), "requests": np.arange(1, count + 1, dtype="<u4").tobytes(),
        "blocks": (np.arange(1, count + 1, dtype="<u4") * 4_000_000).tobytes(),
        "sampled": np.full(count, sample.MAX_BLOCKS // count, "<u2").tobytes(), "numbers": numbers.tobytes(),
    }  # fmt: skip
    return pack_traffic(EMPTY, part)


# ---- bounds


def test_memory_is_bounded_whatever_documents_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hit_curves, "MAX_ENGINES", 30)
    clock, draw = Clock(), np.random.default_rng(2)
    curves = HitCurves(clock, wall=lambda: EPOCH_S + clock.now_s)
    for round_ in range(5):
        clock.now_s += ROUND_S
        curves.read(
            {
                f"t{tenant}": {
                    traffic_key("t", f"{round_ * 100 + n:016x}"): hostile(draw, clock.now_s)
                    for n in range(40)
                }
                for tenant in range(hit_curves.MAX_TENANTS + 3)
            }
        )
        assert all(len(known) <= 2 * hit_curves.MAX_ENGINES for known in curves._known.values())
        for curve in curves._curves.values():
            waiting = 0 if curve._waiting is None else len(curve._waiting.numbers)
            assert waiting <= hit_curves.MAX_BLOCKS + hit_curves.BLOCKS_PER_S * 40
    assert len(curves._curves) == hit_curves.MAX_TENANTS + 1
    assert ALL in curves._curves
    curves.read({})
    assert not curves._known


def test_a_flood_thins_the_sample_and_loses_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hit_curves, "MAX_BLOCKS", 512)
    monkeypatch.setattr(hit_curves, "BLOCKS_PER_S", 8.0)
    costs: list[int] = []
    follow = hit_curves._follow

    def counted(curve: ReuseCurve, part: Sample) -> None:
        costs.append(len(part.numbers) + hit_curves.REQUEST_COST * len(part.sampled))
        follow(curve, part)

    monkeypatch.setattr(hit_curves, "_follow", counted)
    pool = Pool(2)
    requests = list(sessions(8, 400, engines=2))
    pool.replay(requests, 400.0)
    assert 0 < sum(costs) <= 512 + 8 * 500
    curve = pool.curve()
    assert curve.share < 1 / 8
    behind = pool.index._curves[ALL]._unsampled
    assert curve.requests + behind[0] == 400
    assert curve.requested_blocks + behind[1] == sum(map(len, prompts_of(requests)))


def test_more_engines_than_are_read_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hit_curves, "MAX_ENGINES", 3)
    pool = Pool(5)
    pool.replay([(number, [number]) for number in range(5)], 10.0)
    assert pool.index.read(pool.documents())["1h"].blocks == pool.curve().requests == 3


@pytest.mark.parametrize(
    "sample_part",
    [
        7,
        "x",
        [],
        {},
        {"shift": 0},
        {"written_s": "now", "shift": 0, "first": [0, 0]},
        {"written_s": 1.0, "shift": 99},
    ],
)
def test_a_document_that_makes_no_sense_is_passed_over(sample_part: object) -> None:
    pool = Pool(1)
    honest = pool.documents()
    curves = pool.new_index()
    curves.read({"t": {traffic_key("t", "f" * 16): pack_traffic(EMPTY, sample_part), **honest.get("t", {})}})  # type: ignore[arg-type]
    assert curves.shown({}, 0.0) == {}


def test_a_document_of_the_version_before_is_passed_over() -> None:
    pool = Pool(1)
    pool.replay([(0, [1, 2])], 5.0)
    old = msgpack.packb({"version": 1, "windows": {name: [bytes(4096), 1, 16, 16, 4] for name in WINDOWS}})
    windows = pool.index.read({"t": {traffic_key("t", "0" * 16): old, **pool.documents()["t"]}})
    assert windows["1h"].prompt_tokens == 32


# ---- lives


def test_an_index_that_starts_learns_from_then_on() -> None:
    pool = Pool(2)
    requests = list(sessions(1, 200, engines=2))
    pool.replay(requests[:100], 200.0)
    pool.index = pool.new_index()
    begun_s = EPOCH_S + pool.clock.now_s
    pool.replay(requests[100:], 200.0)
    curve = pool.curve()
    assert curve.requests == 100
    assert curve.since_s >= begun_s
    assert list(zip(curve.sizes, curve.hit_rates, strict=True)) == exact(prompts_of(requests[100:])).points()


def test_an_engine_that_starts_anew_is_another() -> None:
    pool = Pool(2)
    requests = list(sessions(1, 100, engines=2))
    pool.replay(requests[:50], 100.0)
    pool.engines[0] = Engine(pool.clock, 77)
    pool.replay(requests[50:], 100.0)
    curve = pool.curve()
    assert curve.requests == 100
    assert list(zip(curve.sizes, curve.hit_rates, strict=True)) == exact(prompts_of(requests)).points()


def test_a_document_that_was_away_for_a_while_is_not_counted_again() -> None:
    pool = Pool(1)
    pool.replay([(0, [1, 2, 3])], 5.0)
    pool.engines[0].ask([1, 2])
    pool.engines[0].write()
    for documents in (pool.documents(), {"t": {}}, pool.documents()):
        pool.clock.now_s += hit_curves.HOLD_S
        pool.index.read(documents)
    assert pool.curve().requests == 2


def test_a_curve_has_the_last_day_or_two() -> None:
    pool = Pool(1)
    pool.replay([(0, [1, 2])], 5.0)
    first_s = pool.curve().since_s
    for day in range(1, 4):
        pool.clock.now_s += hit_curves.LIFE_S
        pool.replay([(0, [10 * day, 2])], 5.0)
        expected = {1: 2, 2: 2, 3: 2}[day]
        assert pool.curve().requests == expected, day
    assert pool.curve().since_s > first_s + hit_curves.LIFE_S
    for _ in range(3):
        pool.clock.now_s += hit_curves.LIFE_S
        pool.index.read({})
    assert pool.index.shown({}, 0.0) == {}
