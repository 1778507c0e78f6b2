"""A host that has too little of something is named as such: no server is to blame, and no disk."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.support.conformance import key
from tests.support.host_limits import NEEDS_ROOT, said_under
from tests.support.servers import running

RAISE_THREADS = "raise the limit of processes and threads (ulimit -u, pids of the container), or of memory"
RAISE_FILES = "raise this process's limit of open files (ulimit -n)"
BLAMES = ("check the disk", "check that the server")


@NEEDS_ROOT
@pytest.mark.parametrize("pool", ["server", "redis-py", "directory"])
def test_a_store_without_threads_says_which_limit_to_raise(tmp_path: Path, pool: str) -> None:
    with running("valkey-server", tmp_path) as server, tempfile.TemporaryDirectory() as of_all:
        Path(of_all).chmod(0o777)
        urls = {
            "server": server.url,
            "redis-py": f"{server.url}?client=redis",
            "directory": f"file://{of_all}/pool?capacity=1MiB",
        }
        before = f"import kvpool, kvpool.store.file; kvpool.open_store({urls['redis-py']!r}).close()"
        said = said_under("threads", f"kvpool.open_store({urls[pool]!r})", before)
    assert "no thread could be started" in said
    assert RAISE_THREADS in said
    assert not any(blame in said for blame in BLAMES)


@pytest.mark.parametrize("pool", ["server", "redis-py", "directory"])
def test_a_store_without_descriptors_says_which_limit_to_raise(tmp_path: Path, pool: str) -> None:
    with running("valkey-server", tmp_path) as server:
        url = {
            "server": server.url,
            "redis-py": f"{server.url}?client=redis",
            "directory": f"file://{tmp_path}/pool?capacity=1MiB",
        }[pool]
        before = f"import kvpool, secrets; kvpool.open_store({url!r}).close()"
        body = f"store = kvpool.open_store({url!r})\nstore.put_many([{key(1)!r}], [bytes(1000)])"
        said = said_under("files", body, before)
    assert "Too many open files" in said
    assert RAISE_FILES in said
    assert not any(blame in said for blame in BLAMES)
