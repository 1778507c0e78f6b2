"""Commands without a URL: they take the directory of ``kvpool vllm``, where it is there, and say so."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvpool import open_store
from kvpool.cli import options
from kvpool.cli.vllm import DEFAULT_POOL
from tests.support.command_line import kvpool, refused


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """In place of /dev/shm/kvpool; it is not there yet."""
    for name in ("KVPOOL_POOL", "KVPOOL_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(options, "DEFAULT_DIRECTORY", f"{tmp_path}/pool")
    return f"{tmp_path}/pool"


@pytest.mark.parametrize("command", ["doctor", "capacity", "quota"])
def test_the_directory_of_kvpool_vllm_is_taken_without_a_url(command: str, directory: str) -> None:
    open_store(f"file://{directory}?capacity=16MiB").close()
    for more in ((), ("--json",)):
        ended = kvpool(command, *more)
        assert (
            ended.stderr
            == f"kvpool: without --pool this is about file://{directory}, the pool of kvpool vllm\n"
        )
        assert "error" not in ended.stdout
    if command == "doctor":
        report = json.loads(ended.stdout)
        assert report["not_examined"] == ["index", "front", "picker"]
        assert f"{directory} is a pool, with 0.0 MiB in it" in [one["says"] for one in report["findings"]]


def test_a_url_wins(directory: str, tmp_path: Path) -> None:
    open_store(f"file://{directory}?capacity=16MiB").close()
    open_store(f"file://{tmp_path}/other?capacity=32MiB").close()
    url = f"file://{tmp_path}/other"
    for ended in (
        kvpool("capacity", "--pool", url),
        kvpool("capacity", env={**os.environ, "KVPOOL_POOL": url}),
    ):
        assert ended.stdout.startswith(f"{tmp_path}/other: capacity 32MiB")
        assert ended.stderr == ""
    assert kvpool("doctor", "--index", "127.0.0.1:1").stderr == ""


def test_without_the_directory_a_pool_is_asked_for(directory: str) -> None:
    assert refused("doctor").startswith("kvpool: name what to examine: --pool URL")
    for command in ("capacity", "quota"):
        assert (
            refused(command) == f"kvpool: name the pool: --pool URL, or KVPOOL_POOL; there is no {directory}"
        )
        assert kvpool(command).returncode == 2
    assert "--pool" in refused("purge", "--everything", "--yes"), "what is deleted is named"


def test_it_is_the_directory_that_kvpool_vllm_makes() -> None:
    assert f"file://{options.DEFAULT_DIRECTORY}?capacity=10GiB" == DEFAULT_POOL
