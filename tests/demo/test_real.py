"""What ``make demo-real`` says, and where it finds a model. Its workers: ``tests/e2e/test_kvpool_vllm.py``."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from demo.real import find_model, report, wrong_with
from demo.worker_process import Answer

ROOT = Path(__file__).parents[2]
FIRST = Answer("A copy of the licence.", 2.68, 2079, 0)
SECOND = replace(FIRST, first_token_s=0.22, cached_tokens=2048)


def test_both_answers_and_times_are_shown() -> None:
    text = "\n".join(report([FIRST, SECOND]))
    assert text.count("A copy of the licence.") == 2
    assert "first token after 2.68 s" in text
    assert "second engine: 2,048 tokens from the pool, first token after 0.22 s" in text
    assert text.endswith("First token 12.2 times sooner, same answer: PASS")


def test_what_fails_is_a_sentence_each() -> None:
    assert wrong_with([FIRST]) == ["an engine did not answer"]
    assert wrong_with([FIRST, replace(SECOND, text="None.")]) == ["the second engine answered otherwise"]
    assert wrong_with([FIRST, FIRST]) == ["0 of 2,079 tokens came from the pool"]
    assert "\n".join(report([FIRST, FIRST])).endswith("FAIL")


def test_a_folder_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert find_model(str(tmp_path)) == tmp_path


def test_a_model_that_is_nowhere_is_one_sentence(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "demo.real", str(tmp_path)],
        capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
    )  # fmt: skip
    *_, line = ended.stderr.splitlines()
    assert ended.returncode == 1
    assert line.startswith(f"python -m demo.real: {tmp_path} is no folder with a config.json, and the hub ")
    assert line.endswith("make demo-real MODEL=/path/to/model")
