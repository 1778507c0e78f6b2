"""Log lines: what is below the level is left out, and each JSON line is one object."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from kvpool.cli.index import log_to_stderr
from kvpool.cli.settings import LogFormat, LogLevel


@pytest.fixture(autouse=True)
def logger() -> Iterator[logging.Logger]:
    ours = logging.getLogger("kvpool")
    before = (ours.handlers, ours.level, ours.propagate)
    yield logging.getLogger("kvpool.index")
    ours.handlers, ours.propagate = before[0], before[2]
    ours.setLevel(before[1])


def test_lines_are_objects(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr(LogLevel.INFO, LogFormat.JSON)
    logger.debug("left out")
    logger.info('worker %s\nis "gone"', "a")
    try:
        raise ValueError("no")
    except ValueError:
        logger.exception("it failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {"level": "info", "logger": "kvpool.index", "message": 'worker a\nis "gone"'}
    assert second["level"] == "error"
    assert second["exception"].endswith("ValueError: no")


def test_words_of_others_command_no_terminal(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log_to_stderr(LogLevel.INFO, LogFormat.TEXT)
    logger.info("worker %s", "a\x1b[2J\x07")
    assert capsys.readouterr().err.endswith("worker a\ufffd[2J\ufffd\n")
    try:
        raise ValueError("a\x1b[2J\x07")
    except ValueError:
        logger.exception("it failed")
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert said.endswith("ValueError: a\ufffd[2J\ufffd\n")


def test_text_names_the_level(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr(LogLevel.WARNING, LogFormat.TEXT)
    log_to_stderr(LogLevel.WARNING, LogFormat.TEXT)
    logger.info("left out")
    logger.warning("said once")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("WARNING said once")
