"""``scripts/gpu-proof``: the dry run of all its parts, what its table and its JSON say, and parts that fail."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_verdict import (
    Part,
    Target,
    judge_copies,
    judge_engines,
    judge_latency,
    judge_pool,
    judge_tests,
    table,
)
from tests.support.deadlines import eventually

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "scripts" / "gpu-proof"
WITH_ENGINES = ["engines", "hybrids", "latency", "near"]
DRY_RUN_TIMEOUT_S = 900  # 45 on a quiet machine of 2 cores
MACHINE = {
    "accelerator": "GPU", "driver": "1", "torch": "2", "cores": 1, "processor": "P", "memory_nbytes": 1 << 30,
    "kernel": "6",
}  # fmt: skip


@pytest.fixture(scope="module")
def program() -> Any:
    loader = SourceFileLoader("gpu_proof", str(PROGRAM))
    spec = spec_from_loader("gpu_proof", loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules["gpu_proof"] = module  # its dataclasses look for their module there
    loader.exec_module(module)
    return module


def proof(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), "--python", sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DRY_RUN_TIMEOUT_S, check=False)


@pytest.mark.timeout(DRY_RUN_TIMEOUT_S + 60)
def test_the_dry_run_runs_every_part_and_leaves_a_table_and_one_file(tmp_path: Path) -> None:
    run = proof("--small", "--out", str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr
    written = json.loads((tmp_path / "gpu-proof.json").read_text())
    assert written["small"]
    assert {"accelerator", "driver", "torch", "cores", "memory_nbytes"} <= set(written["machine"])
    assert written["commit"] in run.stdout
    parts = {part["name"]: part for part in written["parts"]}
    assert list(parts) == ["tests", "copies", "pool", *WITH_ENGINES]
    assert parts["tests"]["status"] in ("ran", "not run")
    assert parts["copies"]["status"] == parts["pool"]["status"] == "ran"
    assert all("no vLLM with CUDA here" in parts[name]["says"] for name in WITH_ENGINES)
    assert all(part["seconds"] <= part["limit_s"] for part in parts.values())
    (copies,), (pool,) = parts["copies"]["report"], parts["pool"]["report"]
    assert copies["rows"]
    assert [(row["shards"], row["near"], row["fault"]) for row in pool["rows"]] == [
        (1, False, None), (2, False, None), (0, False, None), (1, True, None),
    ]  # fmt: skip
    assert all(way["gb_per_s"] > 0 for row in pool["rows"] for way in (row["store"], row["load"]))
    assert all(
        row["load"]["server_s_per_gb"] > 0 for row in pool["rows"] if row["shards"] and not row["near"]
    )
    assert all(name in run.stdout for name in parts)
    assert "not judged" in run.stdout
    assert max(map(len, run.stdout.splitlines())) <= 120


def test_without_an_accelerator_only_the_dry_run_is_begun(tmp_path: Path, program: Any) -> None:
    if program.probed(program.Run(sys.executable, tmp_path, False))["accelerator"]:
        pytest.skip("there is one here")
    run = proof("--out", str(tmp_path), "copies")
    assert run.returncode == 1
    assert "--small" in run.stderr


def test_a_kit_is_unpacked_once_and_runs_in_place_of_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = tmp_path / "content" / "scripts"
    scripts.mkdir(parents=True)
    (scripts / "gpu-proof").write_text("import sys; print(*sys.argv)")
    kit, unpacked = tmp_path / "kit.tar.xz", tmp_path / "unpacked"
    with tarfile.open(kit, "w:xz") as content:
        content.add(scripts, "scripts")
    unpacked.mkdir()
    monkeypatch.setenv("TMPDIR", str(unpacked))
    runs = [
        proof("copies", "pool", "--kit", str(kit), "--out", str(tmp_path / "out"), "--small")
        for _ in range(2)
    ]
    (folder,) = unpacked.iterdir()
    wanted = f"{folder}/scripts/gpu-proof copies pool --out {tmp_path}/out --small --python {sys.executable}"
    assert [run.stdout.strip() for run in runs] == [wanted, wanted]
    assert ["unpacking" in run.stderr for run in runs] == [True, False]
    assert "make gpu-kit" in proof("--kit", str(tmp_path / "none"), "--small").stderr


def test_a_part_that_is_unknown_is_one_clear_line(tmp_path: Path) -> None:
    run = proof("--small", "--out", str(tmp_path), "copie")
    assert run.returncode == 2
    assert "copie is no part: name some of tests, copies, pool, engines, hybrids, latency, near" in run.stderr


def test_the_kits_programs_find_what_they_share_with_the_tests() -> None:
    """No engine starts here, so that nothing else would say that a name has gone."""
    code = (
        "import sys; sys.path[:0] = ['.', 'scripts/gpu-kit']; import check, latency; "
        "print(check.PYTHON_ONLY, check.TRITON, latency.NEAR)"  # what dry_run.py takes, and the program's part
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_the_kit_has_all_that_kvpool_asks_for() -> None:
    asked = re.findall(r'^ +"([A-Za-z0-9_-]+)[^"]*"', pyproject_part("dependencies"), re.MULTILINE)
    packed = (ROOT / "scripts" / "gpu-kit" / "packages.txt").read_text()
    assert len(asked) > 5
    assert [name for name in asked if re.search(rf"^{name}\b", packed, re.MULTILINE) is None] == []


def pyproject_part(name: str) -> str:
    text = (ROOT / "pyproject.toml").read_text()
    return text.split(f"\n{name} = [", 1)[1].split("\n]", 1)[0]


def test_a_part_that_is_killed_takes_along_what_it_started(tmp_path: Path, program: Any) -> None:
    # As an engine is: in a session of its own, so that a signal to the part's group does not reach it.
    child = "import os, time; os.setsid(); time.sleep(600)"
    part = Part("pool", 5)
    part.command = [
        "-c",
        f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {child!r}]); "
        "print(child.pid, flush=True); child.wait()",
    ]
    run = program.Run(sys.executable, tmp_path, True)
    out, log = tmp_path / "out", tmp_path / "log"
    assert program.to_the_end(run, part, out, log) is None
    (pid,) = out.read_text().split()
    assert eventually(
        lambda: not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes()
    )


@pytest.mark.parametrize(
    ("code", "said", "status"),
    [
        ("print('{\"ok\": true}')", "", "held"),
        ("print('{\"ok\": false}')", "", "not held"),
        ("print('{\"ok\": true}'); raise SystemExit(1)", "", "not held"),
        (
            "print('{\"ok\": true}'); raise RuntimeError('the device is gone')",
            "the device is gone",
            "not held",
        ),
        ("raise SystemExit(7)", "exit status 7", "failed"),
        ("pass", "exit status 0", "failed"),
        ("import time; print('{\"ok\": true}', flush=True); time.sleep(60)", "killed after 5 s", "failed"),
    ],
)
def test_how_a_part_ends_is_its_status(
    code: str, said: str, status: str, tmp_path: Path, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_s = 5 if "killed" in said else 60  # so that an interpreter has begun on any machine
    kind = program.Kind(limit_s, limit_s, lambda run, limit_s: ["-c", code], judge_engines, (0, 1))
    monkeypatch.setitem(program.KINDS, "copies", kind)
    part = program.ran(program.Run(sys.executable, tmp_path, False), "copies")
    assert part.status == status
    assert said in part.says or said in (tmp_path / "copies.log").read_text()
    if status != "failed" or "killed" in said:
        assert part.report, "what it had found is kept"


def held(targets: list[Target]) -> list[bool | None]:
    return [target.held for target in targets]


def copied(
    *ratios: tuple[float, int], slower: float | None = 0.009, waits: int | None = 0, equal: bool = True
) -> list[Any]:
    """What python -m benchmarks device prints, of rows with a ratio and the bytes of a block each."""
    better = {"over_plain": 0.95}
    rows = [
        {
            "block_nbytes": nbytes,
            "bytes_equal": True,
            "store": better,
            "load": better,
            "both": {"over_plain": ratio},
        }
        for ratio, nbytes in ratios
    ]
    engine = {"store_slower": slower, "bytes_equal": equal}
    targets = {"over_plain": 0.9, "from_block_nbytes": 512 << 10, "store_slower": 0.01, "synchronizing": 0}
    return [
        {
            "targets": targets,
            "rows": rows,
            "engine": engine,
            "calls": {"synchronizing": waits, "bytes_equal": True},
        }
    ]


def test_copies_are_judged_by_their_worst_row_from_512_kib_on() -> None:
    large, small = 512 << 10, 256 << 10
    assert held(judge_copies(copied((0.91, large), (0.5, small)))) == [True] * 4
    assert held(judge_copies(copied((0.91, large), (0.89, large), slower=0.02, waits=1))) == [
        True,
        *[False] * 3,
    ]
    assert held(judge_copies(copied(slower=None, waits=None, equal=False))) == [False, None, None, None]


def test_a_pool_is_judged_by_its_best_loads_from_servers_and_by_every_row() -> None:
    def row(shards: int, speed: float, fault: str | None = None, near: bool = False) -> dict[str, Any]:
        return {"shards": shards, "near": near, "fault": fault, "load": {"gb_per_s": speed}}

    assert held(judge_pool([{"rows": [row(1, 4), row(8, 11), row(0, 30)]}])) == [True, True]
    assert held(judge_pool([{"rows": [row(8, 9), row(0, 30), row(8, 30, near=True)]}])) == [True, False]
    assert held(judge_pool([{"rows": [row(8, 11), row(4, 0, "no answer")]}])) == [False, True]


def test_tests_and_engines_that_did_not_run_hold_nothing() -> None:
    assert held(judge_tests([{"tests": 3, "failed": 0, "skipped": 1}])) == [True]
    assert held(judge_tests([{"tests": 3, "failed": 1, "skipped": 0}])) == [False]
    assert held(judge_tests([{"tests": 3, "failed": 0, "skipped": 3}])) == [False]
    assert held(judge_engines([{"ok": True}, {"note": "x"}])) == [True]
    assert (
        held(judge_engines([{"ok": True}, {"ok": False}])) == held(judge_engines([{"note": "x"}])) == [False]
    )


def test_latencies_are_shown_and_only_hits_are_judged() -> None:
    lengths = [{"tokens": 2048, "first_token_ms": {"pool": 9.0}, "between_tokens_ms": {"pool": 1.0}}]
    found, shown = judge_latency([{"case": "valkey", "ok": True, "lengths": lengths}])
    assert found.held
    assert shown == Target("valkey, 2048 tokens, pool: first, next ms", "", "9.0, 1.00", True)
    assert held(judge_latency([{"case": "valkey", "ok": False, "lengths": lengths}])) == [False]


def test_the_table_names_what_was_not_held() -> None:
    part = Part("copies", 300, "not held", targets=judge_copies(copied((0.5, 1 << 20), slower=None)))
    shown = table({"machine": MACHINE, "commit": "abc", "small": False}, [part])
    assert "copies over a plain copy, from 512 KiB on >= 0.9 0.50 NOT HELD" in " ".join(shown.split())
    assert "no figure" in shown
