"""``kvpool bench``: what operators measure, and where the rest went. No figure is promised here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpool.cli.bench_device import run_bench_device
from kvpool.cli.timed_client import EXISTS_KEYS, VALUE_NBYTES
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
    assert "lower --batch-bytes" in refused("bench", "store", "--pool", url, "--batch-bytes", "8MiB")
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


def test_bench_device_measures_both_directions_and_says_what_it_ran_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["bench", "device", "--blocks", "8", "--rounds", "2"]
    report = json.loads(kvpool(*arguments, "--json").stdout)
    assert [row["shape"] for row in report["rows"]] == ["Llama-3-8B", "DeepSeek-V3"]
    assert [row["block_nbytes"] for row in report["rows"]] == [2 << 20, 61 * 16 * 576 * 2]
    on_cpu = report["device"] == "cpu"
    assert (report["note"] is not None) == on_cpu
    for row in report["rows"]:
        assert row["bytes_equal"] is True
        assert row["launches"] == 1
        for direction in (row["store"], row["load"]):
            assert direction["gb_per_s"] > 0
            assert direction["over_plain"] > 0
            assert (direction["product_cost"] is None) == on_cpu
    run_bench_device(blocks=2, rounds=1, as_json=False)
    table = capsys.readouterr().out
    assert all(name in table for name in ("Llama-3-8B", "DeepSeek-V3", "equal"))
    assert ("No accelerator here" in table) == on_cpu
