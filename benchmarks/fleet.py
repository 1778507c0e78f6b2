"""``python -m benchmarks fleet``: the value of routers' knowledge about a fleet's caches.

The fleet is simulated (``benchmarks.simulated_fleet``), the index is real: workers publish to a ``kvpool
index`` process over ZMQ, as vLLM does; routers ask it over gRPC. All policies but ``random`` know the
workers' backlog and pick the earliest answer; they differ in their knowledge of caches: none, the router's
own placements, or the index. Requests are placed at full speed: the index has less time between turns than
users would give it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import msgpack
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.contest import percentile
from benchmarks.plot import new_figure, save_figure
from benchmarks.publisher import Publishers
from benchmarks.simulated_fleet import BlockCache, Request, SimulatedFleet, Taken, arrivals
from demo.index_process import IndexProcess
from kvpool.errors import IndexUnavailable, KVPoolError
from kvpool.index import PrefixIndex, Worker
from kvpool.index.client.client import IndexClient
from kvpool.key.hashing import seed_id

MODEL = "bench"
BLOCK_TOKENS = 16
LATE_S = 0.002  # a router's patience for an answer
ASK_TIMEOUT_S = 1.0
SETTLE_TIMEOUT_S = 60.0
LOOK_S = 0.02


@dataclass(frozen=True)
class Row:
    """The second half of a run. ``followup_hit_ratio``: share of blocks of a session's last turn found by its
    next turn. ``hit_ratio``: of all prompt blocks. ``load``: each worker's busy seconds. ``late_ratio``: of
    the index's answers, as are the times. None: not asked.
    """

    policy: str
    routers: int
    followup_hit_ratio: float
    hit_ratio: float
    load_max_over_mean: float
    load_cv: float
    late_ratio: float | None = None
    answer_p50_us: float | None = None
    answer_p99_us: float | None = None


class Policy(Protocol):
    def hits(self, request: Request) -> Sequence[int] | None:
        """Leading blocks by worker, as the request's router knows them; None: it picks at random."""

    def placed(self, request: Request, worker: int, taken: Taken) -> None: ...


class _Random:
    def hits(self, _: Request) -> None:
        return None

    def placed(self, request: Request, worker: int, taken: Taken) -> None: ...


class _LeastLoad:
    def __init__(self, workers: int) -> None:
        self._nothing = [0] * workers

    def hits(self, _: Request) -> Sequence[int]:
        return self._nothing

    def placed(self, request: Request, worker: int, taken: Taken) -> None: ...


class _OwnHistory:
    """Each router simulates the workers' caches from its own placements."""

    def __init__(self, workers: int, routers: int) -> None:
        self._workers = workers
        self._caches = [[BlockCache() for _ in range(workers)] for _ in range(routers)]
        self._indexes = [PrefixIndex() for _ in range(routers)]

    def hits(self, request: Request) -> Sequence[int]:
        hits = [0] * self._workers
        for match in self._indexes[request.router].match(_packed(request.prompt)):
            hits[int(match.worker)] = match.device_blocks
        return hits

    def placed(self, request: Request, worker: int, taken: Taken) -> None:
        believed = self._caches[request.router][worker].take(request.prompt, request.answer)
        self._indexes[request.router].apply(f"{worker}", _batch(request, believed))


class _SharedIndex:
    """Workers publish to an index, and routers ask it, each over its own connection."""

    def __init__(self, publishers: Publishers, clients: Sequence[IndexClient], workers: int) -> None:
        self._publishers, self._clients, self._workers = publishers, clients, workers
        self.answers_s: list[float] = []

    def hits(self, request: Request) -> Sequence[int]:
        started = time.perf_counter()
        try:
            found = self._clients[request.router].lookup(MODEL, hashes64=_packed(request.prompt))
            hits: Sequence[int] = found.device_blocks  # by name, and so by number
        except IndexUnavailable:
            hits = [0] * self._workers
        self.answers_s.append(time.perf_counter() - started)
        return hits

    def placed(self, request: Request, worker: int, taken: Taken) -> None:
        self._publishers.publish(worker, _batch(request, taken))


def run_fleet(
    *, workers: int, routers: Sequence[int], requests: int, seed: int, plot: Path | None, as_json: bool
) -> None:
    """Simulate for about a minute, and print or plot. ``requests``: of each run. Errors: ``KVPoolError``."""
    if plot is not None:
        _draw([], plot)  # reports unwritable files early
    rows: list[Row] = []
    console = Console(stderr=True)
    with (
        _shared(workers, max(routers)) as shared,
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        policies: dict[str, Callable[[int], Policy]] = {
            "random": lambda _: _Random(),
            "least load": lambda _: _LeastLoad(workers),
            "own history": lambda count: _OwnHistory(workers, count),
            "shared index": lambda _: shared(),
        }
        task = progress.add_task("placing", total=len(policies) * len(routers))
        for name, count in itertools.product(policies, routers):
            progress.update(task, description=f"placing by {name}, {count} routers")
            rows.append(_run(name, policies[name](count), workers, count, requests, seed))
            progress.advance(task)
    if plot is not None:
        _draw(rows, plot)
    if as_json:
        shown = {"workers": workers, "requests": requests, "seed": seed, "late_s": LATE_S}
        print(json.dumps(shown | {"rows": [asdict(row) for row in rows]}))
    else:
        Console().print(_table(rows, workers, requests))


def _run(name: str, policy: Policy, workers: int, routers: int, count: int, seed: int) -> Row:
    """As many uncounted requests fill the fleet first."""
    fleet = SimulatedFleet(workers)
    draw = random.Random(seed)
    blocks = hit = earlier = earlier_hit = 0
    worked_before_s: list[float] = []
    for number, request in enumerate(arrivals(workers, routers, 2 * count, seed)):
        if number == count:
            worked_before_s = list(fleet.worked_s)
            if isinstance(policy, _SharedIndex):
                policy.answers_s.clear()
        hits = policy.hits(request)
        worker = draw.randrange(workers) if hits is None else fleet.earliest(request, hits)
        taken = fleet.serve(worker, request)
        policy.placed(request, worker, taken)
        if number >= count:
            blocks += len(request.prompt)
            hit += taken.hit
            earlier += request.earlier
            earlier_hit += min(taken.hit, request.earlier)
    worked_s = [after - before for after, before in zip(fleet.worked_s, worked_before_s, strict=True)]
    mean_s = statistics.fmean(worked_s)
    answers_s = sorted(policy.answers_s) if isinstance(policy, _SharedIndex) else []
    return Row(
        policy=name,
        routers=routers,
        followup_hit_ratio=earlier_hit / max(1, earlier),
        hit_ratio=hit / blocks,
        load_max_over_mean=max(worked_s) / mean_s,
        load_cv=statistics.pstdev(worked_s) / mean_s,
        late_ratio=sum(one > LATE_S for one in answers_s) / len(answers_s) if answers_s else None,
        answer_p50_us=percentile(answers_s, 0.5) * 1e6 if answers_s else None,
        answer_p99_us=percentile(answers_s, 0.99) * 1e6 if answers_s else None,
    )


@contextlib.contextmanager
def _shared(workers: int, routers: int) -> Iterator[Callable[[], _SharedIndex]]:
    """An index that follows the simulated workers; each of its policies begins with empty caches."""
    with contextlib.ExitStack() as parts:
        folder = parts.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-bench-"))
        publishers = parts.enter_context(Publishers(workers))
        index = parts.enter_context(IndexProcess(Path(folder), f"file://{folder}/pool"))
        clients = [
            parts.enter_context(IndexClient(index.address, timeout_s=ASK_TIMEOUT_S)) for _ in range(routers)
        ]
        for number, endpoint in enumerate(publishers.endpoints):
            clients[0].register(
                Worker(f"{number:04}", MODEL, BLOCK_TOKENS, seed_id(None), (endpoint,)),
                timeout_s=SETTLE_TIMEOUT_S,
            )

        def empty() -> _SharedIndex:
            for number in range(workers):
                publishers.publish(number, _packed_batch(0.0, [{"type": "AllBlocksCleared"}]))
            _settle(clients[0], publishers, workers)
            return _SharedIndex(publishers, clients, workers)

        yield empty


def _settle(client: IndexClient, publishers: Publishers, workers: int) -> None:
    """Wait until the index has applied every published batch, and trusts every worker."""
    deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        ranks = [
            (int(status.worker.name), one)
            for status in client.workers(timeout_s=SETTLE_TIMEOUT_S)
            for one in status.publishers
        ]
        if len(ranks) == workers and all(
            not one.stale and one.sequence + 1 == publishers.published(number) for number, one in ranks
        ):
            return
        if time.monotonic() > deadline_s:
            raise KVPoolError(f"the index did not follow its workers within {SETTLE_TIMEOUT_S:g} s")
        time.sleep(LOOK_S)


def _packed(hashes: Sequence[int]) -> bytes:
    return b"".join(block.to_bytes(8, "little") for block in hashes)


def _batch(request: Request, taken: Taken) -> bytes:
    """A step's events, without tokens, which an index skips anyway."""
    parent = request.prompt[taken.hit - 1] if taken.hit else None
    events: list[dict[str, Any]] = [
        {"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU", "group_idx": 0}
        for block in taken.evicted
    ]
    events.append(
        {
            "type": "BlockStored", "block_hashes": taken.stored, "parent_block_hash": parent, "token_ids": [],
            "block_size": BLOCK_TOKENS, "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
    )  # fmt: skip
    return _packed_batch(request.at_s, events)


def _packed_batch(at_s: float, events: Sequence[dict[str, Any]]) -> bytes:
    packed: bytes = msgpack.packb([at_s, events, 0])
    return packed


def _table(rows: Sequence[Row], workers: int, count: int) -> Table:
    table = Table(
        title=f"{workers} simulated workers, {count:,} requests of sessions that grow. Again: of the blocks that the "
        f"last turn left behind, what the next one found. Late: answers of the index after {LATE_S * 1e3:g} ms; their "
        "p50 and p99 in us.",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for name in ("policy", "routers", "again", "hits", "load max", "cv", "late", "p50", "p99"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for row in rows:
        asked = [""] * 3
        if row.late_ratio is not None:
            asked = [f"{row.late_ratio:.1%}", f"{row.answer_p50_us:.0f}", f"{row.answer_p99_us:.0f}"]
        table.add_row(
            row.policy, f"{row.routers}", f"{row.followup_hit_ratio:.2f}", f"{row.hit_ratio:.2f}",
            f"{row.load_max_over_mean:.2f}", f"{row.load_cv:.2f}", *asked,
        )  # fmt: skip
    return table


def _draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG: panels of hits and load over the number of routers. Without rows: only its errors."""
    figure = new_figure(12, 4)
    titles = {
        "followup_hit_ratio": "hit ratio of follow-ups",
        "load_max_over_mean": "busiest worker over the mean",
    }
    for panel, (column, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for policy in dict.fromkeys(row.policy for row in rows):
            own = [row for row in rows if row.policy == policy]
            panel.plot(
                [row.routers for row in own], [getattr(row, column) for row in own], marker="o", label=policy
            )
        panel.set_title(title)
        panel.set_xlabel("routers")
        panel.grid(alpha=0.3)
        panel.set_ylim(bottom=0)
        if rows:
            panel.set_xticks(sorted({row.routers for row in rows}))
            panel.legend()
    save_figure(figure, path)
