"""``python -m benchmarks keep FILE -- COMMAND ...``: keep a benchmark's JSON with machine and command."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpool.errors import ConfigError, KVPoolError


def machine() -> dict[str, Any]:
    """This machine's properties behind a figure. Linux only."""
    about = Path("/proc/cpuinfo").read_text().splitlines()
    [cpu, *_] = [line.partition(":")[2].strip() for line in about if line.startswith("model name")] or [
        "unknown"
    ]
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / (1 << 20)),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
    }


def keep(file: Path, arguments: Sequence[str], note: str) -> None:
    """Run the benchmark and write ``file``. Errors: ``ConfigError``, ``KVPoolError`` when it fails."""
    if not arguments:
        raise ConfigError("name the benchmark behind --: python -m benchmarks keep FILE -- store --rounds 9")
    command = ["python", "-m", "benchmarks", *arguments, "--json"]
    done = subprocess.run([sys.executable, *command[1:]], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise KVPoolError(f"{' '.join(command)} ended with {done.returncode}: {file} is not written")
    kept = {
        "command": " ".join(command),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": machine(),
        "note": note,
        "result": json.loads(done.stdout),
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(kept, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from error
