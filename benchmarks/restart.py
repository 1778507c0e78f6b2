"""The cost of an index's restart: the last part of ``python -m benchmarks index``.

The snapshot file is of an in-process fleet in the shape ``sessions``. A client's view of ``kill -9`` is
measured on a separate ``kvpool index``. It follows one worker over ZMQ, and requests its batches from this
process: all at first, then only those newer than the snapshot.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contest import PROMPT_BLOCKS, holdings, unpacked
from benchmarks.events import BLOCK_TOKENS, payloads
from benchmarks.publisher import Publishers
from demo.engine_process import child_environment, free_ports
from kvpool.errors import IndexUnavailable, UnknownModel
from kvpool.index import Publisher, Worker
from kvpool.index.client.client import IndexClient
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.snapshot import Snapshot, pack
from kvpool.index.follow import snapshot_file
from kvpool.key.hashing import seed_id

MODEL = "bench"
START_TIMEOUT_S = 60.0
JOIN_TIMEOUT_S = 300.0
POLL_S = 0.005
_LISTENS = re.compile(r"listens on (\S+:[0-9]+)")


@dataclass(frozen=True)
class RestartRow:
    """``copy_ms``: pause of ingest. ``write_s``: copied, packed and on disk. ``restore_s``: read, verified,
    in the table. ``killed_*``: seconds after the kill of the process, which restarts at once.
    """

    blocks: int
    workers: int
    block_nbytes: float
    copy_ms: float
    write_s: float
    restore_s: float
    killed_listens_s: float
    killed_answers_s: float


def measure_restart(blocks: int, workers: int) -> RestartRow:
    """Blocks for some seconds. Errors: ``IndexUnavailable`` when the process does not start."""
    prompts = max(1, blocks // PROMPT_BLOCKS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot"
        nbytes, copy_s, write_s, restore_s = _at_rest(path, prompts, workers)
        path.unlink()
        listens_s, answers_s = _killed(path, prompts)
    count = prompts * PROMPT_BLOCKS
    return RestartRow(count, workers, nbytes / count, copy_s * 1e3, write_s, restore_s, listens_s, answers_s)


def _worker(name: str, events: str = "tcp://127.0.0.1:1", replay: str = "tcp://127.0.0.1:2") -> Worker:
    return Worker(name, MODEL, BLOCK_TOKENS, seed_id(None), (Publisher(0, events, replay),))


def _at_rest(path: Path, prompts: int, workers: int) -> tuple[int, float, float, float]:
    """Bytes of the file, and seconds to copy, to write and to restore."""
    fleet = Fleet()
    sequences = [0] * workers
    for number in range(workers):
        fleet.add(_worker(f"worker-{number}"), "call")
    for packed, theirs in holdings("sessions", workers, prompts):
        hashes = unpacked(packed)
        for number, blocks in theirs:
            rank = fleet.rank(f"default/worker-{number}", 0)
            assert rank is not None
            for payload in payloads(hashes[:blocks], tokens=False):
                rank.apply(sequences[number], payload)
                sequences[number] += 1
    started = time.perf_counter()
    frozen = fleet.snapshot()
    copied = time.perf_counter()
    snapshot_file.write(path, pack(Snapshot(time.time(), "", frozen)))
    written = time.perf_counter()
    again = Fleet()
    found = snapshot_file.read(path)
    assert found is not None
    again.restore(found, age_s=0.0, flags=(), life=None)
    restored = time.perf_counter()
    assert again.totals().blocks == fleet.totals().blocks
    return path.stat().st_size, copied - started, written - started, restored - written


def _killed(path: Path, count: int) -> tuple[float, float]:
    """Seconds from the kill until it listens, and until all prompts are answered as before."""
    prompts = [packed for packed, _ in holdings("sessions", 1, count)]
    batches = [payload for packed in prompts for payload in payloads(unpacked(packed), tokens=False)]
    target = f"127.0.0.1:{free_ports(1)[0]}"
    with Publishers(1) as publishers:
        for batch in batches:
            publishers.publish(0, batch)
        [ends] = publishers.endpoints
        flag = f"worker={ends.events},replay={ends.replay},model={MODEL},block={BLOCK_TOKENS}"
        arguments = ["--listen", target, "--worker", flag, "--snapshot", str(path), "--snapshot-every", "0.5"]
        process = _start(arguments)
        try:
            _wait(lambda: _is_known(target, prompts), JOIN_TIMEOUT_S)
            known_at_s = time.time()
            _wait(lambda: path.exists() and path.stat().st_mtime > known_at_s, JOIN_TIMEOUT_S)
            # A snapshot in progress may predate the last batch.
            known_at_s = path.stat().st_mtime
            _wait(lambda: path.stat().st_mtime > known_at_s, JOIN_TIMEOUT_S)
            process.kill()
            killed = time.perf_counter()
            process.communicate()
            process = _start(arguments)
            listens_s = time.perf_counter() - killed
            _wait(lambda: _is_known(target, prompts[-1:]), JOIN_TIMEOUT_S)
            answers_s = time.perf_counter() - killed
            if not _is_known(target, prompts):
                raise IndexUnavailable("the index that was started again does not know what it knew")
        finally:
            process.kill()
            process.communicate()
    return listens_s, answers_s


def _start(arguments: Sequence[str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", "from kvpool.cli import main; main()", "index", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=child_environment(),
    )
    assert process.stdout is not None
    if _LISTENS.search(process.stdout.readline()) is None:
        process.kill()
        process.communicate()
        raise IndexUnavailable("the index of the benchmark did not come up")
    return process


def _is_known(target: str, prompts: Sequence[bytes]) -> bool:
    with IndexClient(target) as client:
        try:
            for text in prompts:
                (row,) = client.lookup(MODEL, hashes64=text)
                if row.stale or row.device_blocks != PROMPT_BLOCKS:
                    return False
        except (IndexUnavailable, UnknownModel):
            return False
    return True


def _wait(condition: Callable[[], bool], timeout_s: float) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until_s:
            raise IndexUnavailable(f"the index of the benchmark was not ready within {timeout_s:g} s")
        time.sleep(POLL_S)
