"""``python -m benchmarks gpu``: a row that fails says why, and the others are measured. No figure is promised here.

``tests/test_gpu_proof.py`` runs all rows of the dry run.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.command_line import benchmark, benchmark_refused


def test_rows_without_a_server_say_why_and_files_are_measured(tmp_path: Path) -> None:
    broken = tmp_path / "valkey-server"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    run = benchmark("gpu", "--small", "--json", "--server", str(broken))
    assert run.returncode == 1
    rows = json.loads(run.stdout)["rows"]
    (files,), servers = ([row for row in rows if bool(row["shards"]) is there] for there in (False, True))
    assert all("does not serve" in row["fault"] and row["load"] is None for row in servers)
    assert files["fault"] is None
    assert files["load"]["gb_per_s"] > 0
    assert files["load"]["server_s_per_gb"] == 0
    assert run.stderr.count("does not serve") == len(servers), "what was measured is said as it goes"


def test_a_server_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    assert "name a valkey-server" in benchmark_refused("gpu", "--small", "--server", str(tmp_path / "none"))
