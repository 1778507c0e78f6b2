"""Threads that the system does not start, one after another, in a process that may have no further one."""

from __future__ import annotations

import threading

import pytest

from kvpool.threads import start_thread
from tests.support.host_limits import NEEDS_ROOT, said_under


@NEEDS_ROOT
def test_a_thread_that_cannot_start_names_its_limit() -> None:
    said = said_under("threads", "start_thread(threading.Thread(target=print, name='mine'))", IMPORTS)
    assert said.startswith("NoThread: no thread could be started (mine); raise the limit of processes")


@NEEDS_ROOT
def test_a_name_that_no_thread_can_look_up_is_unresolved_and_tried_again_later() -> None:
    body = (
        "resolver = Resolver()\n"
        "print(resolver.resolve('localhost').exception())\n"
        "print(resolver.resolve('localhost').exception(), resolver._running)"
    )
    said = said_under("threads", body, f"{IMPORTS}; from kvpool.index.net.resolver import Resolver")
    first, second = said.splitlines()
    assert first.startswith("the name localhost is not looked up: no thread could be started")
    assert second == f"{first} Counter()"


def test_a_thread_that_is_started_twice_is_a_fault_of_ours() -> None:
    thread = threading.Thread(target=int)
    start_thread(thread)
    thread.join()
    with pytest.raises(RuntimeError, match="only be started once"):
        start_thread(thread)


IMPORTS = "import kvpool, threading; from kvpool.threads import start_thread"
