"""``python -m benchmarks store``: what it measures, prints and leaves behind. No figure is promised here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.store_clients import Peer
from kvpool.cli.bench_store import Values
from kvpool.store import StoreURL
from tests.support.command_line import benchmark, benchmark_refused, environment
from tests.support.servers import running

SIZES = (64 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20)
CELLS = ("put_idle", "put_busy", "get_idle", "get_busy")


def test_bench_store_measures_every_size(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool?capacity=64MiB"
    plot = tmp_path / "plot.png"
    arguments = ["store", "--pool", url, "--rounds", "1", "--batch-bytes", "8MiB"]
    report = json.loads(benchmark(*arguments, "--plot", str(plot), "--json").stdout)
    assert {(row["client"], row["value_nbytes"]) for row in report["rows"]} == {
        (client, nbytes)
        for client in ("kvpool", "bare loop", "bare again", "python files")
        for nbytes in SIZES
    }
    assert all(row["gb_per_s"][cell] > 0 for row in report["rows"] for cell in CELLS)
    assert list((tmp_path / "pool" / "blocks").glob("*/*")) == [], "the benchmark leaves no record behind"
    assert plot.read_bytes().startswith(b"\x89PNG")
    table = benchmark(*arguments).stdout
    assert all(name in table for name in ("python files", "bare loop", "over best"))
    assert max(map(len, table.splitlines())) <= 80


def test_bench_store_on_a_server_compares_clients_and_leaves_other_keys(tmp_path: Path) -> None:
    with running("valkey-server", tmp_path) as server:
        server.client.set("other", "theirs")
        arguments = ["store", "--pool", server.url, "--rounds", "1", "--batch-bytes", "64MiB"]
        report = json.loads(benchmark(*arguments, "--json").stdout)
        rows = report["rows"]
        assert {row["client"] for row in rows} == {"kvpool", "bare loop", "bare again", "glide", "redis-py"}
        whole = [row for row in rows if row["client"] in ("kvpool", "bare loop", "bare again")]
        assert {count * row["value_nbytes"] for row in whole for count in row["values"].values()} == {
            64 << 20
        }
        assert all(row["gb_per_s"][cell] > 0 for row in rows for cell in CELLS)
        assert all(
            row["over_bare"][cell] == 1 for row in rows if row["client"] == "bare loop" for cell in CELLS
        )
        assert all((row["server_memory"] or 0) > 1 for row in rows if row["client"] == "kvpool")
        for size, times in report["over_best"].items():
            speeds = {row["client"]: row["gb_per_s"] for row in rows if row["value_nbytes"] == int(size)}
            best = max(speeds[name]["get_busy"] for name in ("glide", "redis-py"))
            assert times["get_busy"] == pytest.approx(speeds["kvpool"]["get_busy"] / best)
        asked = [row for row in rows if row["exists_ms"]]
        assert {(row["client"], row["value_nbytes"]) for row in asked} == {
            (client, 64 << 10) for client in ("kvpool", "glide", "redis-py")
        }
        assert all(row["exists_ms"][mood] > 0 for row in asked for mood in ("idle", "busy"))
        assert server.client.keys() == [b"other"]
        assert server.client.info("stats")["evicted_keys"] == 0


def test_bench_store_starts_a_cluster_for_every_client() -> None:
    arguments = ["store", "--shards", "3", "--rounds", "1", "--batch-bytes", "64MiB", "--json"]
    report = json.loads(benchmark(*arguments).stdout)
    assert report["pool"].startswith("valkey+cluster://")
    assert {(row["client"], row["value_nbytes"]) for row in report["rows"]} == {
        (client, nbytes) for client in ("kvpool", "glide", "redis-py") for nbytes in SIZES
    }
    assert all(row["gb_per_s"][cell] > 0 for row in report["rows"] for cell in CELLS)
    assert "leave --pool away" in benchmark_refused(
        "store", "--pool", "valkey://127.0.0.1:1", "--shards", "1"
    )


@pytest.mark.parametrize("name", ["glide", "redis"])
def test_peer_moves_values_in_a_process_of_its_own(tmp_path: Path, name: str) -> None:
    environment(tmp_path, name)
    with running("valkey-server", tmp_path) as server:
        server.client.set("other", "theirs")
        with Peer(name, StoreURL.parse(server.url), tmp_path) as peer:
            peer.fill(Values(70_000, 20))
            assert server.client.dbsize() == 21
            with peer.busy():
                assert peer.put(20) > 0
                assert peer.get(7) > 0
            assert peer.exists(20) > 0
            server.client.unlink(*server.client.keys("kvpool:*")[:1])
            with pytest.raises(RuntimeError, match="did not find"):
                peer.exists(20)
            peer.empty()
        assert server.client.keys() == [b"other"]


def test_peer_that_is_not_there_or_cannot_start_is_one_clear_line(tmp_path: Path) -> None:
    with running("valkey-server", tmp_path) as server:
        arguments = ["store", "--pool", server.url, "--peers", "--peers-folder", str(tmp_path / "peers")]
        assert "make bench-peers" in benchmark_refused(*arguments)
        environment(tmp_path / "peers", "lmcache")
        assert "lmcache could not open" in benchmark_refused(*arguments)
        assert server.client.keys() == []
