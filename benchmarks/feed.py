"""Events from a publisher's process to an index over ZMQ, and the cost of lookups meanwhile.

Part of ``python -m benchmarks index``. A separate process (``python -m benchmarks.feed BLOCKS EVENTS``)
publishes prepacked batches for some workers. A real ``kvpool index`` reads them and reports its progress over
gRPC. Dynamo's HTTP indexer, if present, reads the same publishers.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.contest import PROMPT_BLOCKS, Held, holdings, percentile, unpacked
from benchmarks.dynamo_process import DynamoIndexer
from benchmarks.events import (
    BATCH_EVENTS,
    BLOCK_TOKENS,
    EVENT_BLOCKS,
    event_tokens,
    payloads,
    removals,
)
from kvpool.errors import KVPoolError

if TYPE_CHECKING:
    from benchmarks.publisher import Publishers
    from kvpool.index import PublisherStatus

MODEL = "bench"
PUBLISHERS = 4
LEAST_BLOCKS = 1 << 17
ONE_EVENT_PART = 2  # divisor of blocks with one event a batch, which is slower
LENGTHS = (64, PROMPT_BLOCKS)
ASKED_OF_PEER = 16  # prompts
ASKED = 50  # lookups per length, mood and round
TIMEOUT_S = 300.0
LOOK_S = 0.01  # between two progress requests, which cost the index time
SENTINEL = [1] * BLOCK_TOKENS  # tokens of each publisher's last block


@dataclass(frozen=True)
class IngestRow:
    """10^6 blocks a second, from the first published batch to the last applied."""

    index: str
    batch_events: int
    mblocks_per_s: float


@dataclass(frozen=True)
class BesideRow:
    """Microseconds of a gRPC lookup by one caller; busy: during events at the measured ingest rate."""

    blocks: int
    idle_p50_us: float
    idle_p99_us: float
    busy_p50_us: float
    busy_p99_us: float
    p99_ratio: float
    mblocks_per_s: float  # ingested meanwhile


@dataclass(frozen=True)
class FeedReport:
    """``peer_query``: of 8,192 hashes, in Dynamo's HTTP indexer; None without it."""

    publishers: int
    ingest: list[IngestRow]
    beside_batch_events: int
    beside: list[BesideRow]
    peer_query_p50_us: float | None = None
    peer_query_p99_us: float | None = None


def measure_feed(blocks: int, rounds: int, dynamo: Path | None) -> FeedReport:
    """Blocks for some ten seconds. ``dynamo``: its interpreter. Errors: ``KVPoolError``."""
    ingest: list[IngestRow] = []
    beside: list[BesideRow] = []
    several = max(blocks, LEAST_BLOCKS) // PROMPT_BLOCKS * PROMPT_BLOCKS
    one = several // PROMPT_BLOCKS // ONE_EVENT_PART * PROMPT_BLOCKS
    for amount, batch_events in ((several, BATCH_EVENTS), (one, 1)):
        with _Publishing(amount, batch_events) as publishing, _following(publishing) as index:
            blocks_per_s = amount / index.take_all()
            ingest.append(IngestRow("kvpool", batch_events, blocks_per_s / 1e6))
            if batch_events == BATCH_EVENTS:
                beside = [index.beside(length, ASKED * rounds, blocks_per_s) for length in LENGTHS]
    query: list[float] = []
    if dynamo is not None:
        for amount, batch_events in ((several, BATCH_EVENTS), (one, 1)):
            row, times = _of_dynamo(dynamo, amount, batch_events, rounds)
            ingest.append(row)
            query = query or times
    return FeedReport(
        PUBLISHERS,
        ingest,
        BATCH_EVENTS,
        beside,
        percentile(query, 0.5) if query else None,
        percentile(query, 0.99) if query else None,
    )


def _of_dynamo(python: Path, blocks: int, batch_events: int, rounds: int) -> tuple[IngestRow, list[float]]:
    with (
        _Publishing(blocks, batch_events) as publishing,
        DynamoIndexer(python, MODEL, BLOCK_TOKENS, publishing.events) as theirs,
    ):
        publishing.tell("wait")
        publishing.read()
        started = time.perf_counter()
        publishing.tell("all")
        publishing.read()
        _wait(lambda: theirs.holders(SENTINEL) == PUBLISHERS, "take what was published")
        taken_s = time.perf_counter() - started
        return IngestRow("Dynamo", batch_events, blocks / taken_s / 1e6), sorted(
            theirs.query(_tokens(blocks), rounds)
        )


class _Publishing:
    def __init__(self, blocks: int, batch_events: int) -> None:
        self.blocks = blocks
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, str(blocks), str(batch_events)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        self.events: list[str] = []
        self.replays: list[str] = []

    def __enter__(self) -> _Publishing:
        try:
            words = self.read()
        except BaseException:
            self._end()
            raise
        self.events, self.replays = words[:PUBLISHERS], words[PUBLISHERS:]
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def tell(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n".encode())

    def read(self) -> list[str]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], TIMEOUT_S)[0]:
            raise KVPoolError(f"the benchmark's publisher did not answer within {TIMEOUT_S:g} s")
        words = self._process.stdout.readline().decode().split()
        if not words:
            raise KVPoolError("the benchmark's publisher ended; what it said is above")
        return words

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()


class _Index:
    """A ``kvpool index`` subscribed to the publishers."""

    def __init__(self, address: str, publishing: _Publishing) -> None:
        from kvpool.index import Publisher, Worker
        from kvpool.index.client.client import IndexClient
        from kvpool.key.hashing import seed_id

        self._publishing = publishing
        self._client = IndexClient(address, timeout_s=TIMEOUT_S)
        for number, (events, replay) in enumerate(zip(publishing.events, publishing.replays, strict=True)):
            worker = Worker(
                f"worker-{number}", MODEL, BLOCK_TOKENS, seed_id(None), (Publisher(0, events, replay),)
            )
            self._client.register(worker)
        publishing.tell("wait")
        publishing.read()
        _wait(lambda: not any(one.stale for one in self._ranks()), "follow its workers")

    def close(self) -> None:
        self._client.close()

    def take_all(self) -> float:
        started = time.perf_counter()
        self._publishing.tell("all")
        published = int(self._publishing.read()[0])
        _wait(lambda: sum(one.batches for one in self._ranks()) == published, "take what was published")
        return time.perf_counter() - started

    def beside(self, length: int, count: int, blocks_per_s: float) -> BesideRow:
        """Lookups in rotation, idle, then during stores and removals of other blocks."""
        prompts = [packed[: 8 * length] for packed, _ in _prompts(self._publishing.blocks)]
        idle = self._lookups(prompts, count)
        before, started = self._blocks_taken(), time.perf_counter()
        self._publishing.tell(f"flood {blocks_per_s / EVENT_BLOCKS / BATCH_EVENTS}")
        self._publishing.read()
        busy = self._lookups(prompts, count)
        taken, seconds = self._blocks_taken() - before, time.perf_counter() - started
        self._publishing.tell("stop")
        published = int(self._publishing.read()[0])
        _wait(lambda: sum(one.batches for one in self._ranks()) == published, "take what was published")
        return BesideRow(
            length, percentile(idle, 0.5), percentile(idle, 0.99), percentile(busy, 0.5), percentile(busy, 0.99),
            percentile(busy, 0.99) / percentile(idle, 0.99), taken / seconds / 1e6,
        )  # fmt: skip

    def _lookups(self, prompts: list[bytes], count: int) -> list[float]:
        times = []
        for number in range(count):
            started = time.perf_counter()
            rows = self._client.lookup(MODEL, hashes64=prompts[number % len(prompts)])
            times.append((time.perf_counter() - started) * 1e6)
            if max(rows.device_blocks) != len(prompts[0]) // 8:
                raise KVPoolError("the index does not know a prompt that was published")
        return sorted(times)

    def _blocks_taken(self) -> int:
        return sum(one.batches for one in self._ranks()) * BATCH_EVENTS * EVENT_BLOCKS

    def _ranks(self) -> list[PublisherStatus]:
        return [one for status in self._client.workers() for one in status.publishers]


@contextlib.contextmanager
def _following(publishing: _Publishing) -> Iterator[_Index]:
    from demo.index_process import IndexProcess

    with (
        tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder,
        IndexProcess(Path(folder), f"file://{folder}/pool") as process,
        contextlib.closing(_Index(process.address, publishing)) as index,
    ):
        yield index


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise KVPoolError(f"an index did not {what} within {TIMEOUT_S:g} s")
        time.sleep(LOOK_S)


def _prompts(blocks: int) -> Iterator[Held]:
    return holdings("sessions", 1, max(1, blocks // PROMPT_BLOCKS))


def _tokens(blocks: int) -> list[list[int]]:
    some = itertools.islice(_prompts(blocks), ASKED_OF_PEER)
    return [
        [
            token
            for at in range(0, PROMPT_BLOCKS, EVENT_BLOCKS)
            for token in event_tokens(hashes[at], EVENT_BLOCKS * BLOCK_TOKENS)
        ]
        for hashes in (unpacked(packed) for packed, _ in some)
    ]


# ---- the process that publishes


def main() -> None:
    """Serve commands. ``wait``: for a reader. ``all``: publish everything once. ``flood N``: store and remove
    other blocks in N batches a second until the next line. Each answer is the number of batches so far, a
    flood's at its start. The rate keeps gigabytes from piling up in a slower index's sockets.
    """
    from benchmarks.publisher import Publishers

    blocks, batch_events = int(sys.argv[1]), int(sys.argv[2])
    batches: list[list[bytes]] = [[] for _ in range(PUBLISHERS)]
    for number, (packed, _) in enumerate(_prompts(blocks)):
        hashes = unpacked(packed)
        batches[number % PUBLISHERS] += payloads(hashes, tokens=True, batch_events=batch_events)
    flood = []
    for packed, _ in holdings("everybody", 1, 2 * PUBLISHERS):
        hashes = tuple(block ^ 1 for block in unpacked(packed))
        flood.append(
            payloads(hashes, tokens=True, batch_events=batch_events)
            + removals(hashes, batch_events=batch_events)
        )
    with Publishers(PUBLISHERS) as publishers:
        print(
            *(one.events for one in publishers.endpoints), *(one.replay for one in publishers.endpoints), flush=True
        )  # fmt: skip

        def count() -> int:
            return sum(publishers.published(number) for number in range(PUBLISHERS))

        for line in sys.stdin:
            if line == "wait\n":
                publishers.wait_subscribed()
                print(count(), flush=True)
            elif line == "all\n":
                for turn in range(max(map(len, batches))):
                    for number, theirs in enumerate(batches):
                        if turn < len(theirs):
                            publishers.publish(number, theirs[turn])
                for number in range(PUBLISHERS):
                    publishers.publish(number, _sentinel(number))
                print(count(), flush=True)
            elif line.startswith("flood "):
                print(count(), flush=True)
                _flood(publishers, flood, float(line.split()[1]))
            else:
                print(count(), flush=True)


def _flood(publishers: Publishers, prompts: list[list[bytes]], batches_per_s: float) -> None:
    started, sent = time.monotonic(), 0
    for turn in itertools.count():
        for batch in prompts[turn % len(prompts)]:
            if select.select(
                [sys.stdin], [], [], max(0.0, started + sent / batches_per_s - time.monotonic())
            )[0]:
                return
            publishers.publish(turn % PUBLISHERS, batch)
            sent += 1


def _sentinel(number: int) -> bytes:
    import msgpack

    event = {
        "type": "BlockStored", "block_hashes": [(1 << 63) + number], "parent_block_hash": None,
        "token_ids": SENTINEL, "block_size": BLOCK_TOKENS, "lora_id": None, "medium": "GPU", "lora_name": None,
    }  # fmt: skip
    packed: bytes = msgpack.packb([0.0, [event], 0])
    return packed


if __name__ == "__main__":
    main()
