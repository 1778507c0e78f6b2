"""Waits for a condition, and bounds in time that hold on a busy machine, too."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path


def eventually(condition: Callable[[], bool], *, within_s: float = 60.0) -> bool:
    """Wait until ``condition()`` holds, for at most ``within_s`` seconds; says whether it did."""
    deadline_s = time.monotonic() + within_s
    pause_s = 0.002
    while not condition():
        if time.monotonic() >= deadline_s:
            return False
        threading.Event().wait(pause_s)
        pause_s = min(1.1 * pause_s, 0.05)  # what is waited for needs the cores
    return True


async def until(condition: Callable[[], bool], *, within_s: float = 60.0) -> None:
    """``eventually``, while the event loop runs on. Errors: ``TimeoutError``."""

    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(wait(), within_s)


def raises(error: type[Exception], call: Callable[[], object]) -> bool:
    """Whether the call fails so."""
    try:
        call()
    except error:
        return True
    return False


# No proxy of the environment's is in between.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def answers(url: str, process: subprocess.Popen[bytes], log: Path) -> bool:
    """Whether a program answers there that lives; else its log fails the test."""
    assert process.poll() is None, log.read_text(errors="replace")[-4000:]
    try:
        with OPENER.open(url, timeout=60) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


# Beyond its deadline: ten times what a quiet machine takes to wake a thread and to let buffers go.
MARGIN_S = 5.0


class Stopwatch:
    """Runs from when it is made, but not while a thread of this process or of its children waits for a core.

    What several threads waited is added up. Where nothing else runs they do not wait.
    """

    def __init__(self) -> None:
        self._started_s, self._before_ns = time.monotonic(), _waited_ns()

    def ran_s(self) -> float:
        ran_s = time.monotonic() - self._started_s
        return ran_s - self.waited_s()

    def waited_s(self) -> float:
        waited_ns = sum(ns - self._before_ns.get(thread, 0) for thread, ns in _waited_ns().items())
        return waited_ns * 1e-9


@contextlib.contextmanager
def ends_within(limit_s: float) -> Iterator[None]:
    """The block ends or raises after at most ``limit_s`` and ``MARGIN_S`` seconds of a ``Stopwatch``."""
    watch = Stopwatch()
    try:
        yield
    finally:
        assert watch.ran_s() < limit_s + MARGIN_S


def _waited_ns(process: str = "self") -> dict[str, int]:
    """How long each thread of a process, and of those that it has started, could have run and had no core."""
    found: dict[str, int] = {}
    for task in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found[task.name] = int((task / "schedstat").read_text().split()[1])
            for child in (task / "children").read_text().split():
                found |= _waited_ns(child)
    return found
