"""What ``make demo`` says at its end, and what it leaves behind; that it works is a test with engines."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from demo.two_engines import Held, Row, next_commands, verdict, wrong_with
from demo.workspace import doing, workspace
from kvpool.errors import KVPoolError
from tests.support.command_line import refusal

GOOD = Row(2050, 16, 16, 2048, 0.940, 0.100, True, (Held(0, 0), Held(16, 16)), (Held(0, 16), Held(16, 16)))


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "pol=file:///x"], 'unknown setting "pol"; did you mean "pool"?'),
        (["--set", "lookup_timeout_s"], "NAME=VALUE"),
        (["--pool", "fiel:///x"], 'did you mean "file"?'),
        (["--colour"], "--colour"),
    ],
)
def test_wrong_use_is_one_clear_line(arguments: list[str], says: str) -> None:
    command = [sys.executable, "-m", "demo", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert says in refusal(ended, "python -m demo")


def silent() -> Console:
    return Console(file=io.StringIO(), width=200)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_it_ends_with_what_was_shown() -> None:
    assert verdict([GOOD, GOOD]) == (
        "First token 9.4 times sooner (940 ms computed, 100 ms from the pool, medians of 2 prompts), same tokens: PASS"
    )


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (replace(GOOD, identical=False), "the second engine generated other tokens"),
        (replace(GOOD, pool_blocks=14), "14 of 16 blocks came from the pool"),
        (replace(GOOD, second=(Held(0, 0), Held(16, 16))), "the index did not know what the engines held"),
    ],
)
def test_each_part_that_was_not_shown_is_named(row: Row, says: str) -> None:
    assert wrong_with([GOOD, row]) == [f"prompt of 2,050 tokens: {says}"]
    assert verdict([GOOD, row]).endswith(f"{says}\nFAIL")
    assert "PASS" not in verdict([GOOD, row])


def test_the_next_commands_name_one_pool() -> None:
    serve, examine = next_commands()
    assert serve.endswith("kvpool vllm --pool 'file:///dev/shm/kvpool?capacity=10GiB' -- serve MODEL")
    assert examine.endswith("kvpool doctor --pool 'file:///dev/shm/kvpool?capacity=10GiB'")


def test_a_step_is_one_line_off_a_terminal() -> None:
    console = silent()
    with doing(console, "first engine starts"):
        assert said(console) == ""
    assert said(console) == "first engine starts: 0.0 s\n"
    console = silent()
    with pytest.raises(KVPoolError), doing(console, "first engine starts"):
        raise KVPoolError
    assert said(console) == "first engine starts: failed after 0.0 s\n"


def filled(folder: Path) -> None:
    (folder / "pool").mkdir()
    (folder / "first.json").write_text("{}")
    (folder / "first.log").write_text("why")


@pytest.mark.parametrize("how", ["raises", "is not good"])
def test_one_that_fails_keeps_its_logs_and_names_them(how: str) -> None:
    console = silent()
    try:
        with workspace("kvpool-test-", console, keep=False, good=lambda: how != "is not good") as folder:
            filled(folder)
            if how == "raises":
                raise KVPoolError("the engine did not start")
    except KVPoolError:
        assert how == "raises"
    try:
        assert said(console) == f"logs are kept: {folder}/first.log\n"
        assert [item.name for item in folder.iterdir()] == ["first.log"]
        assert (folder / "first.log").read_text() == "why"
    finally:
        (folder / "first.log").unlink()
        folder.rmdir()


@pytest.mark.parametrize("failure", [None, KeyboardInterrupt, "early"])
def test_nothing_is_left_where_it_works_is_interrupted_or_fails_before_there_is_a_log(
    failure: object,
) -> None:
    console = silent()
    try:
        with workspace("kvpool-test-", console, keep=False) as folder:
            if failure == "early":
                raise KVPoolError
            filled(folder)
            if failure is not None:
                raise KeyboardInterrupt
    except (KVPoolError, KeyboardInterrupt):
        pass
    assert not folder.exists()
    assert said(console) == ""
