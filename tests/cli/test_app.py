"""The command line as a user meets it: answers, one clear line when something is wrong, and no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.stores.servers import running


def kvpool(*arguments: str, timeout_s: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the console script of this environment."""
    command = [str(Path(sys.executable).parent / "kvpool"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, **options)


def refused(*arguments: str, **options: Any) -> str:
    """Run a command that must fail; the one line that it prints."""
    ended = kvpool(*arguments, **options)
    assert ended.returncode not in (0, 120), ended
    lines = ended.stderr.strip().splitlines()
    assert len(lines) == 1, ended.stderr
    assert lines[0].startswith("kvpool: ")
    assert ended.stdout == ""
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["demo", "--set", "pol=file:///x"], 'unknown setting "pol"; did you mean "pool"?'),
        (["demo", "--set", "budget_s=-1"], '"budget_s"'),
        (["demo", "--set", "budget_s"], "NAME=VALUE"),
        (["demo", "--pool", "file://relative/path"], "three slashes"),
        (["demo", "--pool", "fiel:///x"], 'did you mean "file"?'),
        (["demo", "--pool", "file:///etc/passwd"], "choose a directory"),
        (["demo", "--pool", "file:///x?capacty=1GiB"], "capacity"),
        (["demo", "--pool", "valkeys://user:secret@host"], "not available in this version"),
        (["bench", "store", "--pool", "file:///proc/nowhere"], "file:///proc/nowhere"),
        (["bench", "store", "--rounds", "0"], "--rounds"),
        (["bench", "store", "--batch-bytes", "0"], "--batch-bytes"),
        (["bench", "store", "--batch-bytes", "many"], "not a size"),
        (["bench", "index", "--blocks", "10"], "--blocks"),
        (["bench", "index", "--workers", "0"], "--workers"),
        (["bench", "nothing"], "nothing"),
        (["demo", "--colour"], "--colour"),
    ],
)
def test_wrong_use_is_one_clear_line(arguments: list[str], says: str) -> None:
    line = refused(*arguments)
    assert says in line
    assert "secret" not in line


AS_NOBODY = """
import os, sys
import kvpool.cli.demo, kvpool.stores.file, kvpool.stores.memory  # while the interpreter's files can be read
from kvpool.cli.app import main
if os.getuid() == 0:  # no permission stops root
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
main()
"""


def test_a_folder_without_write_access_is_one_clear_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    for folder in tmp_path.parents:
        if folder.name.startswith("pytest-") and folder.stat().st_uid == os.getuid():
            folder.chmod(0o755)
    arguments = ["demo", "--pool", f"file://{tmp_path}/pool"]
    ended = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode != 0
    (line,) = ended.stderr.strip().splitlines()
    assert "Permission denied" in line
    assert "write access" in line


def test_help_names_every_command() -> None:
    text = kvpool("--help").stdout
    assert all(name in text for name in ("demo", "bench"))
    assert "hash" in kvpool("bench", "--help").stdout
    assert kvpool("--version").stdout.strip().count(".") == 2


def test_bench_hash_compares_with_vllm() -> None:
    ended = kvpool("bench", "hash", "--tokens", "4096", "--rounds", "3", "--json")
    report = json.loads(ended.stdout)
    assert report["hashes_equal"] is True
    assert set(report["median_s"]) == {"kvpool", "vLLM"}
    assert report["times_faster"] > 0


def test_bench_store_measures_every_size(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool?capacity=64MiB"
    ended = kvpool("bench", "store", "--pool", url, "--rounds", "1", "--batch-bytes", "8MiB", "--json")
    report = json.loads(ended.stdout)
    sizes = {(row["client"], row["value_nbytes"]) for row in report["rows"]}
    assert sizes == {
        (client, nbytes)
        for client in ("kvpool", "python files")
        for nbytes in (64 << 10, 512 << 10, 2 << 20, 4 << 20)
    }
    assert all(
        row[name] > 0 for row in report["rows"] for name in ("put_idle", "put_busy", "get_idle", "get_busy")
    )
    assert list((tmp_path / "pool" / "blocks").glob("*/*/*/*")) == [], "the benchmark leaves no record behind"
    table = kvpool("bench", "store", "--pool", url, "--rounds", "1", "--batch-bytes", "1MiB").stdout
    assert "python files" in table


def test_bench_store_on_a_server_compares_clients_and_leaves_other_keys(tmp_path: Path) -> None:
    with running("valkey-server", tmp_path) as server:
        server.client.set("other", "theirs")
        arguments = ["bench", "store", "--pool", server.url, "--rounds", "1", "--batch-bytes", "8MiB"]
        report = json.loads(kvpool(*arguments, "--json").stdout)
        rows = report["rows"]
        assert {row["client"] for row in rows} == {"kvpool", "glide", "redis-py"}
        assert {row["values"] * row["value_nbytes"] for row in rows} == {8 << 20}
        assert all(row[name] > 0 for row in rows for name in ("put_idle", "put_busy", "get_idle", "get_busy"))
        assert all((row["server_memory"] or 0) > 1 for row in rows if row["client"] == "kvpool")
        for size, times in report["times_the_best_other"].items():
            own, *others = (row for row in rows if row["value_nbytes"] == int(size))
            best = max(row["get_busy"] for row in others)
            assert times["get_busy"] == pytest.approx(own["get_busy"] / best)
        assert server.client.keys() == [b"other"]
        assert server.client.info("stats")["evicted_keys"] == 0


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
    assert list((tmp_path / "pool" / "blocks").glob("*/*/*/*")) == []


def test_bench_index_agrees_with_a_dictionary() -> None:
    arguments = ["bench", "index", "--blocks", "16384", "--rounds", "1", "--workers", "3", "--workers", "70"]
    report = json.loads(kvpool(*arguments, "--json").stdout)
    shapes = [(row["shape"], row["workers"], row["blocks"]) for row in report["rows"]]
    assert shapes == [("sessions", 3, 16384), ("sessions", 70, 16384), ("everybody", 8, 16384)]
    figures = [name for name in report["rows"][0] if name != "shape"]
    assert all(row[name] > 0 for row in report["rows"] for name in figures)
    assert "dict" in kvpool(*arguments).stdout
