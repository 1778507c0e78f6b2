"""``python -m benchmarks pools``: its pools beside real ones, and what it counts. No figure is promised here."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.agents_traffic import made_up, traffic
from benchmarks.pools import Engines, Prompt, Row, prompts, repeated, simulate
from benchmarks.pools_held import SAMPLE, SHORTEST_SPAN_S, Blocks, Counts, Directory, NearFar
from kvpool.discovery.reuse import ReuseCurve
from kvpool.discovery.trace import Hashes, Runs, Session, Trace
from kvpool.discovery.trace import prompts as hashes_of
from kvpool.store import open_store
from kvpool.store.near_far import NearFarStore
from tests.support.command_line import benchmark, benchmark_refused
from tests.support.conformance import key, keys
from tests.support.deadlines import eventually
from tests.support.file_record import file_nbytes
from tests.support.model_configs import CONFIGS

NBYTES = 65536
RECORD_NBYTES = file_nbytes(NBYTES)
NEAR, FAR, BLOCKS = 20, 36, 60
NO_ENGINES = Engines(0, 0)


def numbered(*blocks: int) -> Blocks:
    return np.array(blocks, np.int32)


def hashes(blocks: int) -> Hashes:
    return np.random.default_rng(1).integers(1 << 63, size=blocks, dtype=np.uint64)


# ---------------------------------------------------------------------- the pools


def really_ask(store: NearFarStore, prompt: Sequence[int]) -> int:
    """As ``NearFar.ask``; what is near comes before what is far."""
    missing = (at for at, block in enumerate(prompt[:-1]) if not store.contains_many([key(block)])[0])
    leading = next(missing, len(prompt) - 1)
    names = [key(block) for block in prompt[:leading]]
    assert all(store.touch_many(names))
    for has in (True, False):
        those = [name for name in names if store._near.contains_many([name]) == [has]]
        assert all(store.get_many_into(those, [bytearray(NBYTES) for _ in those]))
    assert eventually(lambda: store.counters()["filled"] == store.counters()["far_hits"])
    store.submit_put_absent(
        [key(block) for block in prompt[leading:]], [bytes(NBYTES)] * len(prompt[leading:])
    ).wait()
    assert eventually(lambda: store.counters()["behind_waiting"] == 0)
    return leading


def test_they_hold_what_real_ones_hold(tmp_path: Path) -> None:
    near, far = (
        f"file://{tmp_path}/{name}?capacity={records * RECORD_NBYTES}&threads=1"
        for name, records in (("near", NEAR), ("far", FAR))
    )
    of, draw = hashes(BLOCKS), random.Random(5)
    pools = NearFar(Directory(NEAR, of), Directory(FAR, of), far_gets_all=True)
    with open_store([near, far]) as store:
        assert isinstance(store, NearFarStore)
        ends_s = time.monotonic() + SHORTEST_SPAN_S / 2  # before far is told of a use
        for _ in range(80):
            if time.monotonic() > ends_s:
                break
            first = draw.randrange(0, BLOCKS, 6)
            prompt = range(first, first + draw.randint(2, 6))
            assert pools.ask(numbered(*prompt), len(prompt) - 1, 0.0) == really_ask(store, prompt)
            assert store._near.contains_many(keys(BLOCKS)) == pools.near.there.tolist()
            assert store._far.contains_many(keys(BLOCKS)) == pools.far.there.tolist()
        counted = store.counters()
    assert (counted["near_hits"], counted["far_hits"], counted["behind"]) == pools.counts[:3]
    assert min(counted["near_hits"], counted["far_hits"], counted["evicted"]) > 0


def test_a_sampled_pool_has_nearly_the_hits_of_an_exact_one() -> None:
    trace = made_up(12, seed=3)
    of = traffic(trace, sessions=12, apart_s=60)
    asked = list(prompts(trace, of, 60))
    curve = ReuseCurve()
    for one in hashes_of(trace, 60):
        curve.ask(one)
    most = 3 * SAMPLE
    pools = NearFar(Directory(most, of.hashes), Directory(0, of.hashes), far_gets_all=True)
    hits = 0
    for one in asked:
        hits += pools.ask(one.blocks, len(one.blocks), one.at_s)
        assert pools.near.there.sum() <= most
    exact = dict(curve.points())
    rate = hits / curve.asked_blocks
    assert exact[max(size for size in exact if size <= 0.75 * most)] < rate <= max(exact.values())


def test_what_is_used_twice_goes_far_where_that_is_asked_for() -> None:
    of = hashes(30)
    pools = NearFar(Directory(30, of), Directory(30, of), far_gets_all=False)
    pools.ask(numbered(*range(20)), 0, 0.0)
    assert pools.counts.written == 0
    for _ in range(2):
        assert pools.ask(numbered(*range(4)), 4, 0.0) == 4
    pools.ask(numbered(25, 7), 1, 0.0)  # another engine has computed 7
    assert np.flatnonzero(pools.far.there).tolist() == [0, 1, 2, 3, 7]
    assert pools.counts == Counts(near=8, far=0, written=5, again=0, read_once=0)


def test_what_went_far_for_a_second_use_does_not_go_for_a_third() -> None:
    of = hashes(30)
    pools = NearFar(Directory(30, of), Directory(2, of), far_gets_all=False)
    pools.ask(numbered(*range(4)), 0, 0.0)
    for _ in range(3):
        assert pools.ask(numbered(*range(4)), 4, 0.0) == 4
    assert pools.counts.written == 4


def test_what_an_engine_has_is_not_loaded() -> None:
    of = hashes(30)
    pools = NearFar(Directory(30, of), Directory(30, of), far_gets_all=False)
    pools.ask(numbered(0, 1, 2, 3), 4, 0.0)
    assert pools.ask(numbered(0, 1, 2, 3), 4, 0.0, device=3) == 4
    assert (pools.counts.near, pools.counts.written) == (1, 1)
    assert pools.ask(numbered(8, 9), 2, 0.0, device=2) == 2
    assert not pools.near.there[8], "it was not computed now"


def test_what_near_has_and_far_evicted_goes_far_again() -> None:
    of = hashes(30)
    pools = NearFar(Directory(30, of), Directory(4, of), far_gets_all=True)
    for first in range(0, 12, 2):
        pools.ask(numbered(first, first + 1), 0, 0.0)
    assert not pools.far.there[0]
    for now_s, again in ((SHORTEST_SPAN_S - 1, 0), (SHORTEST_SPAN_S, 2), (SHORTEST_SPAN_S + 1, 2)):
        assert pools.ask(numbered(0, 1), 2, now_s) == 2
        assert pools.counts.again == again
    assert pools.far.there[:2].all()
    assert pools.counts.written == 14


def test_a_far_value_comes_near_and_counts_as_read_once() -> None:
    of = hashes(30)
    pools = NearFar(Directory(4, of), Directory(30, of), far_gets_all=True)
    for first in range(0, 12, 2):
        pools.ask(numbered(first, first + 1), 0, 0.0)
    assert not pools.near.there[0]
    for _ in range(2):
        assert pools.ask(numbered(0, 1), 2, 0.0) == 2
    assert pools.counts == Counts(near=2, far=2, written=12, again=0, read_once=2)


# ---------------------------------------------------------------------- the command


def row(near: int, far: int, gets: str = "all", engines: Engines = NO_ENGINES, sessions: int = 4) -> Row:
    """Of sessions whose blocks have 1,000 bytes."""
    trace = repeated(made_up(4, seed=3), sessions)
    of = traffic(trace, sessions=sessions, apart_s=60)
    asked: list[Prompt] = list(prompts(trace, of, 60))
    return simulate(
        asked, of.hashes, engines, (near * 1000, far * 1000, gets), of.block_tokens, 1000, sessions * 60
    )


def test_each_size_adds_hits() -> None:
    near, far, both, all_fit = row(1000, 0), row(0, 4000), row(1000, 4000), row(0, 100_000)
    assert 0 < near.hits < far.hits <= both.hits < all_fit.hits == all_fit.ideal
    assert near.written_gb == near.far_hits == far.near_hits == 0
    assert near.fills_a_day is None
    assert all_fit.fills_a_day == pytest.approx(all_fit.written_gb * 1e9 / 100e6 * 86400 / 240)
    assert both.hits == both.near_hits + both.far_hits
    assert both.read_gb < far.read_gb


def test_engines_caches_spare_loads_and_what_is_used_twice() -> None:
    engines = Engines(2, 3_000_000)
    alone, cached = (row(1000, 100_000, engines=one) for one in (NO_ENGINES, engines))
    assert cached.hits == alone.hits == cached.device_hits + cached.near_hits + cached.far_hits
    assert cached.device_hits > 0 == alone.device_hits
    assert cached.written_gb == alone.written_gb
    assert cached.read_gb < alone.read_gb
    assert row(1000, 100_000, "reused", engines).written_gb < cached.written_gb / 2


def test_a_session_that_comes_again_shares_its_beginning_alone() -> None:
    of = [
        traffic(repeated(made_up(2, seed=3), sessions), sessions=sessions, apart_s=60) for sessions in (2, 4)
    ]
    common = 20_000 // 64
    assert len(of[1].hashes) - common == 2 * (len(of[0].hashes) - common)
    requests = Trace([Session([Runs(0.0, 64, 1, 0.0, 0, [(1, 1)])], waits=False)], 64)
    assert repeated(requests, 7) == requests


def test_the_table_has_each_pool_alone_and_both(tmp_path: Path) -> None:
    turns = [
        [5.0 * turn, 64 * 40 * (turn + 1) + 1, 9, 1.0, 4.0, 40 * turn, [[40 * turn + 1, 40]]]
        for turn in range(5)
    ]
    trace = tmp_path / "sessions.jsonl"
    trace.write_text("\n".join([json.dumps({"tools": 640, "system": 0, "turns": turns})] * 3))
    model = tmp_path / "config.json"
    model.write_text(json.dumps(CONFIGS["deepseek-ai/DeepSeek-V3.1"]))
    options = [
        "--trace",
        str(trace),
        "--model",
        str(model),
        "--sessions",
        "5",
        "--workers",
        "1",
        "--near",
        "1GB",
    ]
    table = benchmark("pools", *options).stdout
    assert "25 prompts; all their blocks, 70,272 bytes a token" in table
    rows = [line.split() for line in table.splitlines() if "%" in line]
    assert [one[:4] for one in rows] == [
        ["-", "-", "130,560", "100.00%"], ["1", "GB", "-", "130,560"], ["-", "2,000", "GB", "all"],
        ["1", "GB", "2,000", "GB"], ["1", "GB", "2,000", "GB"],
    ]  # fmt: skip
    report: dict[str, Any] = json.loads(benchmark("pools", *options, "--far", "4GB", "--json").stdout)
    assert [(one["near_nbytes"], one["far_nbytes"], one["far_gets"]) for one in report["rows"]] == [
        (0, 0, ""), (10**9, 0, ""), (0, 4 * 10**9, "all"), (10**9, 4 * 10**9, "all"), (10**9, 4 * 10**9, "reused"),
    ]  # fmt: skip
    assert report["rows"][2]["hits_of_ideal"] == 1
    assert report["turns"] == 25


def test_a_pool_without_room_for_a_block_is_refused() -> None:
    assert "a pool of 1,048,576 bytes holds no block" in benchmark_refused(
        "pools", "--near", "1MiB", "--sessions", "1"
    )
