"""What a worker's environment runs: kvpool without an extra, where gRPC and the index's libraries may be missing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvpool import Namespace, open_store

# Of the extras ``client`` and ``index``, and of none beside them.
LIBRARIES = (
    "grpc", "google.protobuf", "aiohttp", "anyio", "msgspec", "numpy", "prometheus_client", "uvloop",
    "jinja2", "tokenizers", "transformers", "opentelemetry", "glide_sync",
)  # fmt: skip
PROGRAM = f"""
import sys
for name in {LIBRARIES!r}:
    sys.modules[name] = None
from kvpool.cli.app import main
main()
"""


def without_extras(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = f"file://{tmp_path_factory.mktemp('pool') / 'pool'}"
    with open_store(url) as store:
        (key,) = Namespace("a", {"model": "m"}).keys([bytes(32)], 0, 0)
        assert store.put_many([key], [b"value"]) == [True]
    return url


@pytest.mark.parametrize(
    "command",
    [
        ("purge", "--tenant", "a", "--yes"),
        ("bench", "store", "--rounds", "1", "--batch-bytes", "1MiB"),
        ("vllm", "--help"),
        ("token", "--help"),
    ],
    ids=lambda command: command[0],
)
def test_a_command_of_a_worker_runs(pool: str, command: tuple[str, ...]) -> None:
    of_a_pool = () if "--help" in command else ("--pool", pool)
    ended = without_extras(*command, *of_a_pool)
    assert ended.returncode == 0, ended


def test_the_doctor_examines_a_pool(pool: str) -> None:
    ended = without_extras("doctor", "--pool", pool, "--json")
    found = json.loads(ended.stdout)["findings"]
    assert {"pool", "workers"} <= {one["about"] for one in found}, ended


def test_the_doctor_says_what_to_install_for_an_index() -> None:
    ended = without_extras("doctor", "--index", "127.0.0.1:1")
    assert ended.returncode != 0
    assert "with its extra index" in ended.stderr
    assert "pip install" in ended.stderr
