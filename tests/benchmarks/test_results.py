"""``python -m benchmarks keep`` and ``plots``, and that a benchmark of first tokens says when it proves nothing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import first_token, plots
from benchmarks.first_token import Timed, _show_lengths
from benchmarks.valkey_shards import ValkeyShards, find_server
from kvpool.errors import ConfigError
from tests.support.command_line import benchmark


def test_a_kept_result_says_what_was_run_on_what(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "hash.json"
    benchmark("keep", str(file), "--note", "a trial", "--", "hash", "--tokens", "2048", "--rounds", "1")
    kept = json.loads(file.read_text())
    assert kept["command"] == "python -m benchmarks hash --tokens 2048 --rounds 1 --json"
    assert kept["note"] == "a trial"
    assert kept["machine"]["cores"] >= 1
    assert kept["result"]


def test_a_benchmark_that_fails_is_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "no.json"
    done = benchmark("keep", str(file), "--", "hash", "--tokens", "-1")
    assert done.returncode == 1
    assert f"{file} is not written" in done.stderr
    assert not file.exists()


@pytest.mark.allow_leaks("matplotlib keeps its fonts open")
def test_pictures_are_those_of_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = plots.draw_all(tmp_path)
    assert {path.stem for path in drawn} == set(plots.PICTURES)
    [first] = [path for path in drawn if path.stem == "first-token"]
    kept = json.loads((plots.RESULTS / "lengths.json").read_text())
    for row in kept["result"]["rows"]:
        row["first_token_s"] *= 2
    (tmp_path / "results").mkdir()
    for result in plots.RESULTS.glob("*.json"):
        (tmp_path / "results" / result.name).write_text(result.read_text())
    (tmp_path / "results" / "lengths.json").write_text(json.dumps(kept))
    before = first.read_text()
    assert "var(--own)" in before
    assert "#0a0a" not in before
    monkeypatch.setattr(plots, "RESULTS", tmp_path / "results")
    plots.draw_all(tmp_path)
    assert first.read_text() != before


def test_a_result_that_is_not_there_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "RESULTS", tmp_path)
    with pytest.raises(ConfigError, match="python -m benchmarks keep writes one"):
        plots.draw_all(tmp_path)


def test_a_table_of_lengths_counts_answers_of_other_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    _show_lengths(
        [
            Timed(512, "computed", 0.4, 0, True),
            Timed(512, "local", 0.02, 0, True),
            Timed(512, "pool", 0.1, 512, False),
        ]
    )
    assert capsys.readouterr().out.split()[-6:] == ["512", "400", "20", "100", "0.25", "1"]


def test_a_server_of_a_benchmark_can_be_stopped_and_goes_on(tmp_path: Path) -> None:
    with ValkeyShards(find_server(None), tmp_path, shards=1, io_threads=1) as server:
        [process] = server._processes
        state = Path(f"/proc/{process.pid}/stat")
        server.signal(first_token.signal.SIGSTOP)
        assert wait_for(state, "T")
        server.signal(first_token.signal.SIGCONT)
        assert wait_for(state, "S")
        server.signal(first_token.signal.SIGKILL)
        assert process.wait(60) != 0


def wait_for(state: Path, letter: str) -> bool:
    return subprocess.run(
        ["timeout", "10", "bash", "-c", f"until [[ $(cut -d' ' -f3 {state}) == [{letter}R] ]]; do sleep 0.02; done"],
        check=False,
    ).returncode == 0  # fmt: skip
