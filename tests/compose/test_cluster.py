"""Two workers in containers share blocks through a Valkey Cluster, and both indexes know what each holds.

The order counts: the last two tests kill a worker and take the cluster down.
"""

from __future__ import annotations

import json
import random
import re
import urllib.request
from typing import Any

import pytest

import kvpool
from kvpool import metrics
from tests.compose.cluster import MODEL, Cluster, cached
from tests.support.deadlines import eventually

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

BLOCK_TOKENS = 128
FULL_BLOCKS = 17
GENERATED_TOKENS = 16
ADDRESSES = ["http://worker-1:8000", "http://worker-2:8000"]
ASK_TIMEOUT_S = 60.0
SEEN_S = 120.0  # for events to reach the index of a busy machine
LEASE_S = 10.0
MARGIN_S = 100.0
HITS = "vllm:external_prefix_cache_hits_total"


def _prompt(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, 8192) for _ in range(FULL_BLOCKS * BLOCK_TOKENS + 24)]


PROMPT = _prompt(0)
PROMPTS = [PROMPT, *map(_prompt, range(1, 10))]


def test_the_second_worker_loads_what_the_first_computed(cluster: Cluster) -> None:
    whole = FULL_BLOCKS * BLOCK_TOKENS
    before = {worker: cluster.metric(worker, HITS) for worker in ("worker-1", "worker-2")}
    computed, loaded = cluster.hand_over(("worker-1", "worker-2"), PROMPTS, GENERATED_TOKENS, whole)
    assert computed["usage"]["prompt_tokens"] == len(PROMPT)
    assert cached(computed) == 0
    assert cached(loaded) == whole
    assert cluster.metric("worker-2", HITS) >= before["worker-2"] + whole
    assert cluster.metric("worker-1", HITS) == before["worker-1"]

    (first,), (second,) = computed["choices"], loaded["choices"]
    assert len(second["token_ids"]) == GENERATED_TOKENS
    assert second["token_ids"] == first["token_ids"]
    assert second["text"] == first["text"]
    assert second["logprobs"]["token_logprobs"] == pytest.approx(
        first["logprobs"]["token_logprobs"], abs=1e-3
    )


def test_another_prompt_is_no_hit(cluster: Cluster) -> None:
    before = cluster.metric("worker-2", HITS)
    answer = cluster.complete("worker-2", [PROMPT[0] + 1, *PROMPT[1:]], 1)
    assert cached(answer) == 0
    assert cluster.metric("worker-2", HITS) == before


@pytest.mark.parametrize("replica", [1, 2])
def test_each_index_knows_what_each_worker_holds(cluster: Cluster, replica: int) -> None:
    other = [PROMPT[0] + 1 + replica, *PROMPT[1:]]
    with kvpool.IndexClient(cluster.address(f"index-{replica}", 50051), timeout_s=ASK_TIMEOUT_S) as index:

        def held(prompt: list[int]) -> dict[str, tuple[int, int, int]]:
            rows = index.lookup(MODEL, token_ids=prompt)
            assert {row.prompt_blocks for row in rows} == {FULL_BLOCKS}
            return {row.address: (row.device_blocks, row.local_blocks, row.pool_blocks) for row in rows}

        both = (FULL_BLOCKS, FULL_BLOCKS, FULL_BLOCKS)
        assert eventually(lambda: held(PROMPT) == dict.fromkeys(ADDRESSES, both), within_s=SEEN_S), held(
            PROMPT
        )

        assert held(other) == dict.fromkeys(ADDRESSES, (0, 0, 0))
        cluster.complete("worker-1", other, 1)
        expected = {ADDRESSES[0]: both, ADDRESSES[1]: (0, 0, FULL_BLOCKS)}
        assert eventually(lambda: held(other) == expected, within_s=SEEN_S), held(other)


def test_no_service_is_root_or_reachable_from_elsewhere(cluster: Cluster) -> None:
    containers = cluster.compose("ps", "--all", "--quiet").split()
    form = "{{.Config.User}} {{.HostConfig.ReadonlyRootfs}} {{json .NetworkSettings.Ports}}"
    inspected = cluster.docker("inspect", "--format", form, *containers).splitlines()
    assert len(inspected) == len(containers) > 0
    for line in inspected:
        user, read_only, ports = line.split(" ", 2)
        assert user not in ("", "0", "root")
        assert read_only == "true"
        assert "0.0.0.0" not in ports
        assert '"::"' not in ports


def test_only_the_front_is_published_unless_it_is_asked_for(cluster: Cluster) -> None:
    shown = cluster.compose("--file", "docker-compose.yml", "config")
    assert shown.count("ports:") == 2, "of the front, and of prometheus, which has a profile"
    containers = cluster.compose("ps", "--quiet", "valkey-1", "valkey-2", "valkey-3").split()
    assert len(containers) == 3
    for container in containers:
        assert cluster.docker("port", container) == ""


def test_what_prometheus_reads_is_there(cluster: Cluster) -> None:
    at = f"http://{cluster.address('prometheus', 9090)}/api/v1"

    def get(path: str) -> Any:
        with urllib.request.urlopen(f"{at}/{path}", timeout=ASK_TIMEOUT_S) as reply:
            return json.load(reply)["data"]

    def up() -> dict[str, str]:
        return {
            one["scrapePool"] + one["labels"]["instance"]: one["health"]
            for one in get("targets")["activeTargets"]
        }

    wanted = {"indexindex-1:9090", "indexindex-2:9090", "workerworker-1:8000", "workerworker-2:8000"}
    assert eventually(lambda: up() == dict.fromkeys(wanted, "up"), within_s=SEEN_S), up()
    (group,) = get("rules")["groups"]
    assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
    used = {name for rule in group["rules"] for name in re.findall(r"kvpool_\w+", rule["query"])}
    without_encoders = used - {metric.name for metric in metrics.ENCODER}
    assert without_encoders <= set(get("label/__name__/values")), "an alert on a metric that no service has"


def test_a_killed_worker_is_forgotten_when_its_lease_ends(cluster: Cluster) -> None:
    with kvpool.IndexClient(cluster.address("index-1", 50051), timeout_s=ASK_TIMEOUT_S) as index:

        def followed() -> list[str]:
            return sorted(status.worker.address for status in index.workers())

        assert followed() == ADDRESSES
        cluster.kill("worker-2")
        assert eventually(lambda: followed() == ADDRESSES[:1], within_s=LEASE_S + MARGIN_S), followed()
        assert [row.address for row in index.lookup(MODEL, token_ids=PROMPT)] == ADDRESSES[:1]


def test_down_leaves_nothing(cluster: Cluster) -> None:
    assert cluster.left()
    cluster.down()
    assert cluster.left() == []
