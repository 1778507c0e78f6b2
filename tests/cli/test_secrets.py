"""A secret that is typed into a wrong place is told nowhere: not in an error, and not with ``--json``."""

from __future__ import annotations

import json
import logging

import pytest

from kvpool.config import PoolConfig
from kvpool.errors import ConfigError
from kvpool.text import make_printable, printable
from tests.support.command_line import kvpool

URL = "valkey://u:hunter2@h:6379"
WRONG = [
    ("purge", URL), ("doctor", "--index", URL), ("doctor", "--pool", URL + "?pasword=hunter2"), ("top", "--index", URL),
    ("lookup", "--index", URL, "--model", "m", "--token-ids", "-"), ("size", "--token-bytes", URL),
    ("size", "--trace", URL), ("index", "--listen", URL), ("index", "--tokens", URL), ("index", "--snapshot", URL),
    ("index", "--max-memory", URL), ("index", "--worker", URL), ("index", "--tokenizer", URL), ("router", URL),
    ("quota", URL, "10GiB"), (URL,),
    ("bench", "store", "--pool", "valkey:/u:hunter2@h"), ("doctor", "--front", URL), ("doctor", "--picker", URL),
]  # fmt: skip


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_a_url_in_a_wrong_place_keeps_its_password(words: tuple[str, ...]) -> None:
    ended = kvpool(*words, env={})
    assert ended.returncode != 0
    assert "hunter2" not in ended.stderr + ended.stdout


def test_an_error_as_json_tells_no_password() -> None:
    ended = kvpool("top", "--index", URL, "--json")
    assert "hunter2" not in ended.stdout
    assert json.loads(ended.stdout)["error"]["exit_code"]


@pytest.mark.parametrize("settings", [
    {"pool": "hunter2"}, {"pool": URL, "threads": URL}, {"pool": "file:///x", "tenant": URL},
    {"pool": URL, "load": URL}, {"pool": "file:///x", "store_policy": URL},
])  # fmt: skip
def test_a_setting_with_a_url_keeps_its_password(settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        PoolConfig.load(settings, {})
    assert "hunter2" not in str(caught.value)


def test_a_log_line_tells_no_password_of_a_url() -> None:
    record = logging.LogRecord("kvpool", 20, "", 0, "%s says %s", ("w", f"'{URL}' and {URL}"), None)
    make_printable(record)
    assert record.getMessage() == "w says 'valkey://***@h:6379' and valkey://***@h:6379"
    assert printable("valkey://u:***@h:1 is full") == "valkey://u:***@h:1 is full"
