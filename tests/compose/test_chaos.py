"""Parts of the cluster die and come back, one at a time, while callers go on asking its front.

Counted for each: requests that failed beyond those that were under way on what died (none may), and what
share of the prompts was not computed before and after.
``SOAK_S=300 make test-compose`` runs all of them; without it no worker is restarted, which takes minutes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import kvpool
from tests.compose.cluster import MODEL, Cluster
from tests.compose.traffic import (
    BLOCK_TOKENS,
    CALLERS,
    SHARED_BLOCKS,
    Answer,
    Front,
    Traffic,
    hit_ratio,
    words,
)
from tests.support.deadlines import eventually
from tests.support.soak import LONG_SOAK

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

WATCH_S = 6.0  # before and after, for figures to compare
AWAY_S = 240.0  # for a part to be back, on a machine that is busy with what else runs
MAY_LOSE = 0.1  # of the hit ratio, for what the part that died held is computed once more
MAX_LOST = 2 * CALLERS  # two workers are restarted, at most
BURST = 24
SPREAD_S = 120.0
REST_S = 2.0  # for the indexes to see in the metrics of the workers that they have nothing to do
FULL = SHARED_BLOCKS * BLOCK_TOKENS


@pytest.fixture
def front(cluster: Cluster) -> Iterator[Front]:
    client = Front(cluster.front_url, MODEL)
    yield client
    client.close()


def test_a_prefix_goes_to_its_holder_and_away_from_it_under_load(cluster: Cluster, front: Front) -> None:
    text = words("affinity", FULL)
    first = front.ask(text + " w3")
    assert (first.error, first.cached_tokens) == ("", 0)

    def is_known(index: kvpool.IndexClient) -> bool:
        tokens = [int(word[1:]) for word in text.split()]
        rows = {row.worker: row.device_blocks for row in index.lookup(MODEL, token_ids=tokens)}
        return rows.get(first.worker) == SHARED_BLOCKS

    for replica in ("index-1", "index-2"):
        with kvpool.IndexClient(cluster.address(replica, 50051), timeout_s=10) as index:
            assert eventually(lambda index=index: is_known(index)), replica
    repeated = []
    for _ in range(6):
        time.sleep(REST_S)
        repeated.append(front.ask(f"{text} w4"))
    assert {(one.worker, one.reason, one.cached_tokens) for one in repeated} == {
        (first.worker, "prefix", FULL)
    }

    from concurrent.futures import ThreadPoolExecutor

    # How busy the holder is, the indexes see in its metrics, once a second: callers go on until they have seen it.
    loaded_by_other, end_s = threading.Event(), time.monotonic() + SPREAD_S

    def call(number: int) -> list[Answer]:
        answers: list[Answer] = []
        while not answers or not (loaded_by_other.is_set() or time.monotonic() > end_s):
            answers.append(front.ask(f"{text} {words(f'{number} {len(answers)}', 8)}", 48))
            # Of a request that the index did not place in time, no worker is told.
            if answers[-1].worker not in ("", first.worker) and answers[-1].cached_tokens == FULL:
                loaded_by_other.set()
        return answers

    with ThreadPoolExecutor(BURST) as callers:
        burst = [answer for answers in callers.map(call, range(BURST)) for answer in answers]
    assert {one.error for one in burst} == {""}
    assert {one.worker for one in burst} - {"", first.worker}, (
        "all went to the holder, however much it had to do"
    )
    # The other one loads the blocks from the pool, but for those whose lookup found no time on a busy machine.
    assert sum(one.cached_tokens == FULL for one in burst) > 0.75 * len(burst)
    assert loaded_by_other.is_set()


class Stops:
    """When parts were being stopped: a request that was under way then may fail."""

    def __init__(self) -> None:
        self._times_s: list[tuple[float, float]] = []

    @contextmanager
    def of_one(self) -> Iterator[None]:
        began_s = time.monotonic()
        yield
        self._times_s.append((began_s, time.monotonic()))

    def excuse(self, answer: Answer) -> bool:
        return any(answer.began_s <= end_s and answer.ended_s >= began_s for began_s, end_s in self._times_s)


@contextmanager
def counted(cluster: Cluster, *, retries: int = 0) -> Iterator[Stops]:
    """Callers ask around the block, which says what it stops that may take requests with it."""
    stops = Stops()
    with Traffic.running(cluster.front_url, MODEL, retries=retries) as traffic:
        time.sleep(2 * WATCH_S)  # the first half computes what is shared
        from_s = time.monotonic()
        yield stops
        back_s = time.monotonic()
        time.sleep(WATCH_S)
        # A client that tries again pauses for seconds in between.
        assert eventually(lambda: len(traffic.answers(back_s)) >= 2 * CALLERS, within_s=AWAY_S)
        end_s = time.monotonic()
    answers = traffic.answers(from_s - WATCH_S)
    failed = [one for one in answers if one.error and not stops.excuse(one)]
    lost = [one for one in answers if one.error and stops.excuse(one)]
    before, after = traffic.answers(from_s - WATCH_S, from_s), traffic.answers(back_s, end_s)
    hits_before, hits_after = hit_ratio(before), hit_ratio(after)
    assert not failed, "\n".join(f"{one.began_s - from_s:+.2f} s: {one}" for one in failed[:20])
    assert len(lost) <= MAX_LOST
    assert hits_after >= hits_before - MAY_LOSE
    assert traffic.answers(from_s, back_s), "requests went on meanwhile"


def test_an_index_dies(cluster: Cluster) -> None:
    with counted(cluster):
        cluster.crash("index-1")
        assert eventually(lambda: cluster.is_healthy("index-1"), within_s=AWAY_S)


@LONG_SOAK
def test_a_worker_dies_and_its_prompts_are_loaded_by_the_other(cluster: Cluster, front: Front) -> None:
    text = words("of a worker that dies", FULL) + " w3"
    computed = front.ask(text, 16)
    assert not computed.error
    with counted(cluster) as stops:
        with stops.of_one():
            cluster.crash(cluster.service_of(computed.worker))
        loaded = front.ask(text, 16)
        assert loaded.error == ""
        assert (loaded.cached_tokens, loaded.token_ids) == (FULL, computed.token_ids)
        assert eventually(lambda: cluster.is_healthy(cluster.service_of(computed.worker)), within_s=AWAY_S)


def test_a_shard_dies(cluster: Cluster) -> None:
    with counted(cluster):
        cluster.crash("valkey-1")
        assert eventually(lambda: cluster.serves_all_slots(("valkey-1", "valkey-2")), within_s=AWAY_S)


def test_envoy_dies(cluster: Cluster) -> None:
    """There is one: callers find it gone for a second, and OpenAI's client tries again by itself."""
    with counted(cluster, retries=6) as stops:
        with stops.of_one():
            cluster.crash("front")
        assert eventually(lambda: cluster.is_healthy("front"), within_s=AWAY_S)


@LONG_SOAK
def test_all_parts_are_restarted_one_after_the_other(cluster: Cluster) -> None:
    """vLLM answers 500 to a request that reaches it while it stops."""
    with counted(cluster) as stops:
        for service in ("valkey-1", "valkey-2", "valkey-3"):
            cluster.restart(service)
            assert eventually(
                lambda: cluster.serves_all_slots(("valkey-1", "valkey-2", "valkey-3")), within_s=AWAY_S
            ), service
        for service in ("index-1", "index-2"):
            cluster.restart(service)
            assert eventually(lambda service=service: cluster.is_healthy(service), within_s=AWAY_S), service
        for service in ("worker-1", "worker-2"):
            with stops.of_one():
                cluster.restart(service)
            assert eventually(lambda service=service: cluster.is_healthy(service), within_s=AWAY_S), service
        cluster.signal("front", "HUP")
        assert eventually(lambda: cluster.is_healthy("front"), within_s=AWAY_S)
