"""Names of hosts, and vLLM's own server in a process of its own, which says what it makes of prompts."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.index.net import resolver
from tests.support.deadlines import eventually
from tests.support.networks import Names


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    """The names of the resolver, in the place of the system's."""
    one = Names()
    monkeypatch.setattr(resolver.socket, "getaddrinfo", one.getaddrinfo)
    yield one
    one.go_on.set()  # those in line, too, while the system's resolver is not asked
    assert eventually(lambda: "kvpool-resolver" not in {thread.name for thread in threading.enumerate()})


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory, testrun_uid: str) -> dict[str, Any]:
    """See ``tests.support.vllm_server``: what it says of the cases of ``tests.support.prompts``.

    Asked once a run, whichever of its processes is first: it imports vLLM.
    """
    said = tmp_path_factory.getbasetemp().parent / f"vllm-server-{testrun_uid}.json"
    with said.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            said.write_text(json.dumps(_asked(tmp_path_factory)))
    found: dict[str, Any] = json.loads(said.read_text())
    return found


def _asked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.support.prompts import CASES
    from tests.support.tiny_tokenizer import write_tokenizer

    folder = str(write_tokenizer(tmp_path_factory.mktemp("server")))
    cases = [(template, kind, {"model": folder, **body}) for template, kind, body in CASES]
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.vllm_server", folder],
        input=json.dumps(cases), capture_output=True, text=True, timeout=600, check=False,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout)
