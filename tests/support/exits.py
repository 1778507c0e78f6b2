"""Programs that end with a store open, or with threads in native calls, and the exit codes of their processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.conformance import keys

# A store in a global, and daemon threads that wait for an answer, or move values.
WAITS = """
import threading
freeze()
def wait():
    global began
    batch = store.submit_contains(KEYS, timeout_s=60)
    began = True
    batch.wait()
"""
MOVES = """
import threading
value = bytearray(1 << 20)
def wait():
    global began
    while True:
        store.put_many(KEYS, [value], timeout_s=60)
        store.get_many_into(KEYS, [value], timeout_s=60)
        began = True
"""
IN_THREADS = """
began = False
for _ in range(4):
    threading.Thread(target=wait, daemon=True).start()
while not began:
    pass
"""


def exit_of(url: str, *parts: str, python: str | Path = sys.executable) -> int:
    """The exit code of a process that opens ``store`` and runs these lines."""
    opened = ("import os, sys, kvpool", f"KEYS = {keys(1)!r}", f"store = kvpool.open_store({url!r})")
    program = "\n".join((*opened, *parts))
    return subprocess.run([python, "-W", "ignore", "-c", program], timeout=120).returncode
