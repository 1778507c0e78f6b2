"""Fixtures for every test: nothing may outlive the test that made it."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Their assertions show both sides, as those of test files do.
pytest.register_assert_rewrite("tests.support")

from tests.support.deadlines import eventually  # noqa: E402

# A shell that runs the tests in the background has them ignore this, and what they start would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests count hits: those of audits ask for them.
os.environ.setdefault("KVPOOL_AUDIT_SHARE", "0")

# A busy machine is no failed test.
settings.register_profile("kvpool", deadline=None)
settings.load_profile("kvpool")


_SETTLE_S = 60.0
_ROOM_NBYTES = 1 << 30
# What a library opens once for a whole process, and keeps.
_PROCESS_WIDE = ("/dev/null", "/dev/urandom", "/dev/random", "anon_inode:[eventpoll]", "/dev/nvidia")


def _threads() -> set[str]:
    """Python threads, and native threads of ours, which carry our name."""
    found = {
        f"thread {thread.name} ({thread.ident})" for thread in threading.enumerate() if thread.is_alive()
    }
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
        except OSError:  # it ended while we looked
            continue
        if name.startswith("kvpool"):
            found.add(f"native thread {name} ({task.name})")
    return found


def _descriptors() -> set[str]:
    found: set[str] = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)  # noqa: PTH115
        except OSError:  # the listing's own
            continue
        if not target.startswith(_PROCESS_WIDE):
            found.add(f"descriptor {link.name} -> {target}")
    return found


def _children() -> set[str]:
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found |= {f"child process {pid}" for pid in (task / "children").read_text().split()}
        except OSError:
            continue
    return found


def _held() -> set[str]:
    return _threads() | _descriptors() | _children()


def _import_vllm() -> None:
    """Import it once, before anything is counted, and without its warnings, which are not ours to mend."""
    if "vllm.v1.request" in sys.modules:
        return
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("vllm.v1.request")
        importlib.import_module("vllm.v1.core.kv_cache_utils")


def pytest_sessionstart(session: pytest.Session) -> None:
    """One sentence, and not each test of a pool in a directory by its own assertion."""
    from kvpool.store.file_system import FileSystem

    system = FileSystem.of(tempfile.gettempdir())
    if system.room_nbytes(0) < _ROOM_NBYTES:
        pytest.exit(
            f"{tempfile.gettempdir()}: {system.free_nbytes >> 20:,} MiB are free, and tests of pools need "
            f"{(system.reserve_nbytes + _ROOM_NBYTES) >> 20:,}: make room, or set TMPDIR",
            returncode=pytest.ExitCode.USAGE_ERROR,
        )


def pytest_collection_finish() -> None:
    """What the tests' modules brought stays: no later search for garbage goes through it, which took up to a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test that leaves a thread, a descriptor or a child process behind.

    A test that starts what lives as long as the process says so: ``@pytest.mark.allow_leaks("why")``.
    """
    if request.node.get_closest_marker("vllm") is not None:
        _import_vllm()
    if request.node.get_closest_marker("allow_leaks") is not None:
        yield
        return
    before = _held()
    yield
    left: set[str] = set()

    def gone() -> bool:
        nonlocal left
        left = _held() - before
        if left:
            gc.collect()
            left = _held() - before
        return not left

    assert eventually(gone, within_s=_SETTLE_S), f"left behind: {sorted(left)}"


@pytest.fixture
def everyones() -> Iterator[Path]:
    """A folder that another user may enter. Not in ``tmp_path``: a second pytest takes the right away again."""
    with tempfile.TemporaryDirectory(prefix="kvpool-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """What tests that are coroutines run on."""
    return "asyncio"


@pytest.fixture(scope="session")
def grpc_started() -> None:
    """gRPC keeps a thread and descriptors for the whole process: before anything is counted."""
    from kvpool import IndexUnavailable
    from kvpool.index.client.async_client import AsyncIndexClient
    from kvpool.index.client.client import IndexClient
    from tests.support.fleets import serving

    async def ask(target: str) -> None:
        async with AsyncIndexClient(target) as client:
            await client.workers(timeout_s=60)

    with serving() as served:
        asyncio.run(ask(served.target))
        with IndexClient(served.target, timeout_s=60) as client:
            client.workers()
    with IndexClient("127.0.0.1:1") as client, pytest.raises(IndexUnavailable):
        client.workers()
