"""``kvpool bench``: what operators measure, and where the rest went. No figure is promised here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpool.cli import bench_device
from kvpool.cli.bench_device import run_bench_device
from kvpool.cli.timed_client import EXISTS_KEYS, VALUE_NBYTES
from kvpool.errors import ConfigError, KVPoolError
from kvpool.transfer import BlockCopier
from kvpool.transfer.measure import CACHES, CallsMeasured, CopiesMeasured, EngineMeasured
from kvpool.transfer.measure.copies import Speed
from tests.cli.test_app import kvpool, refusal, refused
from tests.store.servers import running


def test_bench_hash_compares_with_vllm() -> None:
    ended = kvpool("bench", "hash", "--tokens", "4096", "--rounds", "3", "--json")
    report = json.loads(ended.stdout)
    assert report["hashes_equal"] is True
    assert set(report["median_s"]) == {"kvpool", "vLLM"}
    assert report["times_faster"] > 0


def test_bench_store_measures_a_pool_by_value_size_and_leaves_nothing(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool?capacity=64MiB"
    arguments = ["bench", "store", "--pool", url, "--rounds", "1", "--batch-bytes", "8MiB"]
    report = json.loads(kvpool(*arguments, "--json").stdout)
    assert [row["value_nbytes"] for row in report["rows"]] == list(VALUE_NBYTES)
    assert all(row["put_gb_per_s"] > 0 and row["get_gb_per_s"] > 0 for row in report["rows"])
    assert {(row["exists_ms"], row["server_memory"]) for row in report["rows"]} == {(None, None)}
    assert list((tmp_path / "pool" / "blocks").glob("*/*")) == [], "the benchmark leaves no record behind"
    table = kvpool(*arguments).stdout
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
        rows = json.loads(ended.stdout)["rows"]
        assert all(row["server_memory"] > 1 for row in rows)
        assert [row["exists_ms"] is not None for row in rows] == [
            (64 << 20) // size >= EXISTS_KEYS for size in VALUE_NBYTES
        ]
        assert server.client.keys() == [b"other"]


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
    assert "lower --batch-bytes" in line
    assert ended.returncode == 2
    assert list((tmp_path / "pool" / "blocks").glob("*/*")) == []


@pytest.mark.parametrize(
    ("arguments", "went"),
    [
        (["index", "--blocks", "16384", "--json"], "python -m benchmarks index in a checkout"),
        (["fleet"], "python -m benchmarks fleet in a checkout"),
        (["e2e", "--pool", "valkey://127.0.0.1"], "python -m benchmarks e2e in a checkout"),
        (["store", "--peers"], "python -m benchmarks store --peers in a checkout"),
        (["store", "--plot", "x.png"], "python -m benchmarks store --plot in a checkout"),
    ],
)
def test_what_left_the_package_says_where_it_went(arguments: list[str], went: str) -> None:
    ended = kvpool("bench", *arguments)
    assert ended.returncode == 2
    assert went in refusal(ended)


SMALL_RUN: dict[str, Any] = {"blocks": 1, "tokens": [16], "rounds": 1}


def test_bench_device_measures_copies_an_engine_and_calls_and_says_what_it_ran_on() -> None:
    arguments = ["bench", "device", "--blocks", "1", "--tokens", "16", "--tokens", "32", "--rounds", "1"]
    report = json.loads(kvpool(*arguments, "--json", timeout_s=250).stdout)
    rows = report["rows"]
    assert [(row["model"], row["layout"], row["block_tokens"]) for row in rows] == [
        (cache.model, cache.layout, tokens) for cache in CACHES for tokens in (16, 32)
    ]
    on_cpu = report["device"] == "cpu"
    assert (report["note"] is not None) == on_cpu
    for row in rows:
        assert row["bytes_equal"] is True
        assert row["launches"] >= 1
        for direction in (row["store"], row["load"], row["both"]):
            assert min(direction.values()) > 0
        assert (row["target"] is None) == (
            on_cpu or row["block_nbytes"] < report["targets"]["from_block_nbytes"]
        )
    assert report["engine"]["bytes_equal"] is True
    assert (report["engine"]["store_slower"] is None) == on_cpu
    assert report["calls"]["bytes_equal"] is True
    assert (report["calls"]["synchronizing"] is None) == on_cpu


def test_bench_device_prints_tables_of_100_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    run_bench_device(**SMALL_RUN, as_json=False)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    assert all(cache.model in printed and cache.layout in printed for cache in CACHES)
    assert "…" not in printed, "nothing is cut off"
    assert "83.4 both ways" in printed
    on_cpu = "No accelerator here" in printed
    assert ("needs an accelerator" in printed) == on_cpu


def test_bench_device_prints_what_an_accelerator_adds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures as a device would give them; no device is asked."""
    speed = Speed(55.5, 55.9, 0.99)
    measured = CopiesMeasured(
        "gpt-oss-120b",
        "LBNHC",
        128,
        8784 << 10,
        64,
        1,
        True,
        speed,
        speed,
        Speed(100.1, 100.2, 0.89),
        "missed",
    )
    cost = EngineMeasured(8192, 1 << 30, True, 221.4, 0.0062, 3.1, 0.008, 3.3, 0.05, "met")
    calls = CallsMeasured(64, {"cudaLaunchKernel": 20, "cudaStreamSynchronize": 2}, 2, 0, True)
    monkeypatch.setattr(bench_device, "measure_copies", lambda *_, **__: measured)
    monkeypatch.setattr(bench_device, "measure_engine", lambda *_, **__: cost)
    monkeypatch.setattr(bench_device, "measure_calls", lambda *_, **__: calls)
    monkeypatch.setenv("COLUMNS", "100")
    run_bench_device(**SMALL_RUN, as_json=False)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    told = " ".join(printed.split())
    assert "gpt-oss-120b LBNHC 128 8784KiB 55.5 55.9 0.99 55.5 55.9 0.99 100.1 100.2 0.89 missed" in told
    assert "products, with stores +0.62% 3.10 ms met (at most 1%)" in told
    assert "with loads all the time +5.00%" in told
    assert "of 64 blocks: 2 (target 0)" in told
    assert "20 cudaLaunchKernel, 2 cudaStreamSynchronize" in told


def test_bench_device_fails_when_blocks_come_back_with_other_bytes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockCopier, "scatter", lambda *_: None)
    with pytest.raises(KVPoolError, match=r"other bytes.*Llama-3-8B LBNHC 16.*engine, pool"):
        run_bench_device(**SMALL_RUN, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert not any(row["bytes_equal"] for row in report["rows"]), "the figures are printed all the same"


def test_bench_device_says_what_to_change() -> None:
    with pytest.raises(ConfigError, match="lower --blocks"):
        run_bench_device(blocks=1 << 14, rounds=1, as_json=True)
    with pytest.raises(ConfigError, match="--trace /nowhere"):
        run_bench_device(**SMALL_RUN, trace=Path("/nowhere/trace.json"), as_json=True)
    assert "--tokens" in refused("bench", "device", "--tokens", "0")
