"""``kvpool bench``: what operators measure, and where the rest went. No figure is promised here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.cli.bench_store import EXISTS_KEYS, MODEL_NBYTES, VALUE_NBYTES
from tests.support.command_line import kvpool, refusal, refused
from tests.support.servers import running


def test_bench_store_measures_a_pool_by_value_size_and_leaves_nothing(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool?capacity=64MiB"
    arguments = ["bench", "store", "--pool", url, "--rounds", "1", "--batch-bytes", "8MiB"]
    report = json.loads(kvpool(*arguments, "--json").stdout)
    assert [row["value_nbytes"] for row in report["rows"]] == list(VALUE_NBYTES)
    assert all(row["put_gb_per_s"] > 0 and row["get_gb_per_s"] > 0 for row in report["rows"])
    assert {(row["exists_ms"], row["server_memory"]) for row in report["rows"]} == {(None, None)}
    assert list((tmp_path / "pool" / "blocks").glob("*/*")) == [], "the benchmark leaves no record behind"
    table = kvpool(*arguments, env={**os.environ, "COLUMNS": "80"}).stdout
    assert all(name in table for name in ("512KiB", "put", "get"))
    assert max(map(len, table.splitlines())) <= 80


UNTIL_A_SIGNAL = """
import signal
from kvpool.cli.bench_store import benched_pool
from kvpool.store import open_store
with benched_pool(None, 1 << 20) as (url, folder), open_store(url):
    print(folder, flush=True)
    signal.pause()
"""


def test_a_benchmark_that_is_terminated_leaves_no_pool_in_memory() -> None:
    command = [sys.executable, "-c", UNTIL_A_SIGNAL]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert running.stdout is not None
        folder = Path(running.stdout.readline().strip())
        assert (folder / "pool" / "blocks").is_dir()
        running.terminate()
        assert running.wait(60) != 0
        assert not folder.exists()
    finally:
        running.kill()
        running.communicate()


def test_bench_store_on_a_server_asks_for_existence_and_memory_and_leaves_other_keys(tmp_path: Path) -> None:
    with running("valkey-server", tmp_path) as server:
        server.client.set("other", "theirs")
        ended = kvpool(
            "bench", "store", "--pool", server.url, "--rounds", "1", "--batch-bytes", "64MiB", "--json"
        )
        report = json.loads(ended.stdout)
        rows, models = report["rows"], report["models"]
        assert [name for name, nbytes in MODEL_NBYTES.items() if nbytes <= 64 << 20] == list(models)
        assert all(1 <= memory < 1.5 for memory in models.values())
        assert all(row["server_memory"] > 1 for row in rows)
        assert [row["exists_ms"] is not None for row in rows] == [
            (64 << 20) // size >= EXISTS_KEYS for size in VALUE_NBYTES
        ]
        assert server.client.keys() == [b"other"]


def test_bench_store_on_a_near_and_a_far_pool_asks_the_far_one_for_memory(tmp_path: Path) -> None:
    with running("valkey-server", tmp_path) as server:
        pool = f"file://{tmp_path}/near?capacity=256MiB {server.url}"
        ended = kvpool("bench", "store", "--pool", pool, "--rounds", "1", "--batch-bytes", "64MiB", "--json")
        assert all(row["server_memory"] > 1 for row in json.loads(ended.stdout)["rows"])


def test_bench_store_refuses_a_server_that_would_evict_for_it(tmp_path: Path) -> None:
    with running(
        "valkey-server", tmp_path, "--maxmemory", "10mb", "--maxmemory-policy", "allkeys-lru"
    ) as server:
        server.client.set("other", "theirs")
        line = refused("bench", "store", "--pool", server.url, "--rounds", "1", "--batch-bytes", "8MiB")
        assert "before it evicts" in line
        assert "--batch-bytes" in line
        assert server.client.keys() == [b"other"]


def test_bench_store_in_a_pool_that_is_too_small_is_one_clear_line(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool?capacity=2MiB"
    ended = kvpool("bench", "store", "--pool", url, "--batch-bytes", "8MiB")
    said, line = ended.stderr.splitlines()
    assert said == "measuring puts and gets, about a minute", (
        "off a terminal nothing else shows that it works"
    )
    assert "make room on its disk, or lower --batch-bytes" in line
    assert ended.returncode == 2
    assert list((tmp_path / "pool" / "blocks").glob("*/*")) == []


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        (["demo", "--json"], "run make demo in a checkout"),
        (["demo", "--help"], "run make demo in a checkout"),
        (["bench", "index", "--blocks", "16384", "--json"], "python -m benchmarks index in a checkout"),
        (["bench", "fleet"], "python -m benchmarks fleet in a checkout"),
        (["bench", "e2e", "--pool", "valkey://127.0.0.1"], "python -m benchmarks e2e in a checkout"),
        (["bench", "hash"], "python -m benchmarks hash in a checkout"),
        (["bench", "device", "--rounds", "1"], "python -m benchmarks device in a checkout"),
        (["bench", "store", "--peers"], "python -m benchmarks store --peers in a checkout"),
        (["bench", "store", "--plot", "x.png"], "python -m benchmarks store --plot in a checkout"),
    ],
)
def test_a_command_that_left_the_package_says_what_to_run(arguments: list[str], instead: str) -> None:
    ended = kvpool(*arguments)
    assert ended.returncode == 2
    assert instead in refusal(ended)
