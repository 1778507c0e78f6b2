"""What ``make demo-real`` says, and where it finds a model. Its workers: ``tests/e2e/test_kvpool_vllm.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib import util
from pathlib import Path

import pytest

from demo import pictures
from demo.pictures import Seen
from demo.real import find_model, report, wrong_with
from demo.worker_process import Answer

ROOT = Path(__file__).parents[2]
FIRST = Answer("A copy of the licence.", 2.68, 2079, 0)
SECOND = replace(FIRST, first_token_s=0.22, cached_tokens=2048)
SEEN = Seen(Answer("A status page.", 1.31, 1469, 0), 1, 0)
LOADED = Seen(Answer("A status page.", 0.48, 1469, 0), 0, 5_000_000)


def test_both_answers_and_times_are_shown() -> None:
    text = "\n".join(report([FIRST, SECOND], [], []))
    assert text.count("A copy of the licence.") == 2
    assert "first token after 2.68 s" in text
    assert "second engine: 2,048 tokens from the pool, first token after 0.22 s" in text
    assert text.endswith("First token 12.2 times sooner, same answer: PASS")


def test_what_fails_is_a_sentence_each() -> None:
    assert wrong_with([FIRST]) == ["an engine did not answer"]
    assert wrong_with([FIRST, replace(SECOND, text="None.")]) == ["the second engine answered otherwise"]
    assert wrong_with([FIRST, FIRST]) == ["0 of 2,079 tokens came from the pool"]
    assert "\n".join(report([FIRST, FIRST], [], wrong_with([FIRST, FIRST]))).endswith("FAIL")


def test_a_picture_has_its_runs_times_and_bytes() -> None:
    text = "\n".join(report([FIRST, SECOND], [SEEN, LOADED], []))
    assert "first engine: encoder runs 1, first token after 1.31 s" in text
    assert "second engine: encoder runs 0, 5,000,000 bytes from the pool, first token after 0.48 s" in text
    assert text.count("A status page.") == 2
    assert text.endswith("PASS")


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ([SEEN], "an engine did not answer about the picture"),
        ([replace(SEEN, runs=2), LOADED], "the first engine encoded the picture 2 times"),
        ([SEEN, replace(LOADED, runs=1)], "did not have the picture's output from the pool"),
        ([SEEN, replace(LOADED, loaded_nbytes=0)], "did not have the picture's output from the pool"),
        ([SEEN, replace(LOADED, answer=FIRST)], "answered otherwise about the picture"),
        (
            [SEEN, replace(LOADED, answer=replace(LOADED.answer, cached_tokens=64))],
            "64 tokens of the picture's prompt",
        ),
    ],
)
def test_a_picture_that_fails_is_a_sentence(seen: list[Seen], words: str) -> None:
    (sentence,) = pictures.wrong_with(seen)
    assert words in sentence


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "llama"}, ""),
        ({"audio_config": {"hidden_size": 1}}, ""),
        ({"vision_config": {"hidden_size": 1}, "is_encoder_decoder": True}, ""),
        ({"vision_config": {"hidden_size": 1}}, None),
    ],
)
def test_who_sees_is_shown_a_picture(
    config: object, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(util, "find_spec", lambda name: "found")
    assert pictures.why_not(tmp_path) == said
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    without = pictures.why_not(tmp_path)
    assert without == "" if said == "" else without is not None and "torchvision" in without


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
