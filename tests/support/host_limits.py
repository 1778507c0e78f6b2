"""Processes that reach a limit of their host: of threads, or of open files."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NOBODY = 65534
LIMITS = {
    # Root has no limit of processes, so the child becomes nobody, who has this process and no other.
    "threads": f"os.setgid({NOBODY}); os.setuid({NOBODY}); limit(resource.RLIMIT_NPROC, 1)",
    # The listing itself has a descriptor.
    "files": "limit(resource.RLIMIT_NOFILE, len(os.listdir('/proc/self/fd')) - 1)",
}
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="a process without threads has a user of its own")
_PROGRAM = """
import os, resource
def limit(which, most):
    resource.setrlimit(which, (most, most))
{before}
{limit}
try:
{body}
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}", flush=True)
os._exit(0)
"""


def said_under(limit: str, body: str, before: str = "") -> str:
    """What ``body`` prints, or raises, under one of ``LIMITS``; ``before`` runs without it, and imports."""
    indented = "".join(f"    {line}\n" for line in body.splitlines())
    program = _PROGRAM.format(before=before, limit=LIMITS[limit], body=indented)
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
