"""``kvpool bench``: what it measures, prints and leaves behind. No figure is promised here."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvpool.cli.bench_clients import Peer, Values
from kvpool.cli.bench_contest import contest
from kvpool.cli.bench_device import run_bench_device
from kvpool.cli.bench_index import Dictionary
from kvpool.cli.simulated_fleet import BlockCache, Taken, arrivals
from kvpool.store import StoreURL
from tests.cli.test_app import kvpool, refused
from tests.store.servers import running


def test_bench_hash_compares_with_vllm() -> None:
    ended = kvpool("bench", "hash", "--tokens", "4096", "--rounds", "3", "--json")
    report = json.loads(ended.stdout)
    assert report["hashes_equal"] is True
    assert set(report["median_s"]) == {"kvpool", "vLLM"}
    assert report["times_faster"] > 0


SIZES = (64 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20)
CELLS = ("put_idle", "put_busy", "get_idle", "get_busy")


def test_bench_store_measures_every_size(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool?capacity=64MiB"
    plot = tmp_path / "plot.png"
    arguments = ["bench", "store", "--pool", url, "--rounds", "1", "--batch-bytes", "8MiB"]
    report = json.loads(kvpool(*arguments, "--plot", str(plot), "--json").stdout)
    assert {(row["client"], row["value_nbytes"]) for row in report["rows"]} == {
        (client, nbytes)
        for client in ("kvpool", "bare loop", "bare again", "python files")
        for nbytes in SIZES
    }
    assert all(row["gb_per_s"][cell] > 0 for row in report["rows"] for cell in CELLS)
    assert list((tmp_path / "pool" / "blocks").glob("*/*")) == [], "the benchmark leaves no record behind"
    assert plot.read_bytes().startswith(b"\x89PNG")
    table = kvpool(*arguments).stdout
    assert all(name in table for name in ("python files", "bare loop", "over best"))
    assert max(map(len, table.splitlines())) <= 80


def test_bench_store_on_a_server_compares_clients_and_leaves_other_keys(tmp_path: Path) -> None:
    with running("valkey-server", tmp_path) as server:
        server.client.set("other", "theirs")
        arguments = ["bench", "store", "--pool", server.url, "--rounds", "2", "--batch-bytes", "8MiB"]
        report = json.loads(kvpool(*arguments, "--json").stdout)
        rows = report["rows"]
        assert {row["client"] for row in rows} == {"kvpool", "bare loop", "bare again", "glide", "redis-py"}
        whole = [row for row in rows if row["client"] in ("kvpool", "bare loop", "bare again")]
        assert {count * row["value_nbytes"] for row in whole for count in row["values"].values()} == {8 << 20}
        assert all(row["gb_per_s"][cell] > 0 for row in rows for cell in CELLS)
        assert all(
            row["over_bare"][cell] == 1 for row in rows if row["client"] == "bare loop" for cell in CELLS
        )
        assert all((row["server_memory"] or 0) > 1 for row in rows if row["client"] == "kvpool")
        for size, times in report["over_best"].items():
            speeds = {row["client"]: row["gb_per_s"] for row in rows if row["value_nbytes"] == int(size)}
            best = max(speeds[name]["get_busy"] for name in ("glide", "redis-py"))
            assert times["get_busy"] == pytest.approx(speeds["kvpool"]["get_busy"] / best)
        assert server.client.keys() == [b"other"]
        assert server.client.info("stats")["evicted_keys"] == 0


def test_bench_store_asks_how_long_existence_takes(tmp_path: Path) -> None:
    with running("valkey-server", tmp_path) as server:
        report = json.loads(
            kvpool(
                "bench", "store", "--pool", server.url, "--rounds", "1", "--batch-bytes", "64MiB", "--json"
            ).stdout
        )
    asked = [row for row in report["rows"] if row["exists_ms"]]
    assert {(row["client"], row["value_nbytes"]) for row in asked} == {
        (client, 64 << 10) for client in ("kvpool", "glide", "redis-py")
    }
    assert all(row["exists_ms"][mood] > 0 for row in asked for mood in ("idle", "busy"))


def _environment(folder: Path, name: str, command: str) -> None:
    program = folder / name / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{command}\n")
    program.chmod(0o755)


@pytest.mark.parametrize("name", ["glide", "redis"])
def test_peer_moves_values_in_a_process_of_its_own(tmp_path: Path, name: str) -> None:
    _environment(tmp_path, name, f'exec "{sys.executable}" "$@"')
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
        arguments = [
            "bench",
            "store",
            "--pool",
            server.url,
            "--peers",
            "--peers-folder",
            str(tmp_path / "peers"),
        ]
        assert "make bench-peers" in refused(*arguments)
        _environment(tmp_path / "peers", "lmcache", f'exec "{sys.executable}" "$@"')
        assert "lmcache could not open" in refused(*arguments)
        assert server.client.keys() == []


def test_plot_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    line = refused("bench", "store", "--plot", str(tmp_path / "nowhere" / "plot.png"))
    assert "cannot write the plot" in line


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


def test_bench_index_agrees_with_a_dictionary() -> None:
    arguments = ["bench", "index", "--blocks", "16384", "--rounds", "1", "--workers", "3", "--workers", "70"]
    report = json.loads(kvpool(*arguments, "--json").stdout)
    shapes = [(row["shape"], row["workers"], row["blocks"]) for row in report["rows"]]
    assert shapes == [("sessions", 3, 16384), ("sessions", 70, 16384), ("everybody", 8, 16384)]
    for row in report["rows"]:
        assert set(row["results"]) == {"kvpool", "dict"}
        assert row["tokens_mpairs_per_s"] > 0
        assert row["block_nbytes_most"] >= row["results"]["kvpool"]["block_nbytes"] > 0
        for result in row["results"].values():
            assert result["ingest_mpairs_per_s"] > 0
            assert result["remove_worker_us"] > 0
            assert [(one["blocks"], one["kind"]) for one in result["asked"]] == [
                (blocks, kind)
                for kind in ("full", "half", "none", "holes")
                for blocks in (64, 512, 1024, 8192)
            ]
            assert all(one["p99_us"] >= one["p50_us"] > 0 for one in result["asked"])
            assert not any(one["wrong"] for one in result["asked"])
    assert [(row["kind"], row["callers"]) for row in report["rpc"]] == [
        ("unary", 1),
        ("unary", 16),
        ("stream", 1),
        ("stream", 16),
    ]
    for row in report["rpc"]:
        assert row["p50_over_echo"] == pytest.approx(row["p50_us"] / row["echo_p50_us"])
    restart = report["restart"]
    assert (restart["blocks"], restart["workers"]) == (16384, 70)
    assert 8 < restart["block_nbytes"] < 30
    assert 0 < restart["killed_listens_s"] <= restart["killed_answers_s"]
    assert 0 < restart["copy_ms"] < restart["write_s"] * 1e3
    assert restart["restore_s"] > 0
    feed = report["feed"]
    assert [(row["index"], row["batch_events"]) for row in feed["ingest"]] == [("kvpool", 64), ("kvpool", 1)]
    assert all(row["mblocks_per_s"] > 0 for row in feed["ingest"])
    assert [row["blocks"] for row in feed["beside"]] == [64, 8192]
    for row in feed["beside"]:
        assert row["mblocks_per_s"] > 0, "something came while it was asked"
        assert row["p99_ratio"] == pytest.approx(row["busy_p99_us"] / row["idle_p99_us"])
    shown = kvpool(*arguments).stdout
    assert all(name in shown for name in ("dict", "stream", "8,192 holes", "events a batch"))


def test_contest_tells_who_is_wrong() -> None:
    class Forgetful(Dictionary):
        """Does not take holes for holes."""

        def take_away(self, worker: int, hashes: Sequence[int]) -> None:
            pass

    right, wrong = (contest(one, "sessions", 8, 4, 1) for one in (Dictionary(), Forgetful()))
    assert right.pairs == wrong.pairs
    assert not any(one.wrong for one in right.asked)
    assert {one.kind for one in wrong.asked if one.wrong} == {"holes"}


def test_dynamo_that_is_not_there_or_cannot_start_is_one_clear_line(tmp_path: Path) -> None:
    arguments = ["bench", "index", "--peers", "--peers-folder", str(tmp_path)]
    assert "make bench-peers" in refused(*arguments)
    _environment(tmp_path, "dynamo", f'exec "{sys.executable}" "$@"')
    assert "No module named 'dynamo'" in refused(*arguments)


def test_bench_fleet_finds_more_with_a_shared_index(tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    arguments = ["bench", "fleet", "--workers", "12", "--requests", "300", "--routers", "1", "--routers", "8"]
    report = json.loads(kvpool(*arguments, "--plot", str(plot), "--json").stdout)
    rows = {(row["policy"], row["routers"]): row for row in report["rows"]}
    policies = ("random", "least load", "own history", "shared index")
    assert list(rows) == [(policy, routers) for policy in policies for routers in (1, 8)]
    for (policy, _), row in rows.items():
        assert 0 <= row["followup_hit_ratio"] <= 1
        assert 0 <= row["hit_ratio"] <= 1
        assert row["load_max_over_mean"] >= 1
        assert (row["late_ratio"] is not None) == (policy == "shared index")
    followups = {which: row["followup_hit_ratio"] for which, row in rows.items()}
    assert followups["shared index", 8] > followups["own history", 8] > followups["random", 8]
    assert followups["shared index", 8] > 0.9
    assert plot.read_bytes().startswith(b"\x89PNG")
    table = kvpool(*arguments[:6], "--routers", "2").stdout
    assert all(policy in table for policy in policies)


def test_a_fleet_of_one_seed_is_one_fleet() -> None:
    one, again = (list(arrivals(5, 3, 200, seed=7)) for _ in range(2))
    assert one == again
    assert [request.at_s for request in one] == sorted(request.at_s for request in one)
    assert {request.router for request in one} == {0, 1, 2}
    alone = list(arrivals(5, 1, 200, seed=7))
    assert [request.prompt for request in alone] == [request.prompt for request in one]
    said: set[tuple[int, ...]] = set()
    for request in one:
        assert not request.earlier or request.prompt[: request.earlier] in said
        said.add(request.prompt + request.answer)


def test_a_cache_keeps_the_beginning_of_what_was_used_last() -> None:
    cache = BlockCache(6)
    assert cache.take((1, 2, 3), (4,)) == Taken(0, (1, 2, 3, 4), [])
    assert cache.take((5, 6), (7,)) == Taken(0, (5, 6, 7), [4])
    assert cache.take((1, 2, 3), (8,)) == Taken(3, (8,), [7])
    assert cache.take((5, 9), (10, 11)) == Taken(1, (9, 10, 11), [6, 8, 3])


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
