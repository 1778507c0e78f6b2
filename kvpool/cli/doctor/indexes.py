"""What ``kvpool doctor`` sees of indexes: whom they follow, why a worker is not followed, and where replicas differ."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

from kvpool.cli.doctor.finding import Finding, fail, ok, warn
from kvpool.cli.doctor.workers import EVENTS_ON
from kvpool.cli.exits import in_options
from kvpool.cli.index_connection import IndexConnection
from kvpool.discovery.worker import Worker
from kvpool.errors import AccessDenied, IndexUnavailable, UnknownModel
from kvpool.index.answer import WorkerStatus
from kvpool.index.client.channel import NOTHING_LISTENS, without_advice
from kvpool.index.client.client import IndexClient
from kvpool.index.dp_rank import LOOKAHEAD, LOOKAHEAD_OFF, ONE_SEED, UNHASHED
from kvpool.text import counted

COMPARISONS = 10  # of two indexes, until they say the same of every rank
BETWEEN_S = 0.2


def index_findings(
    index: IndexConnection, announced: list[Worker] | None, tenant: str
) -> tuple[list[Finding], list[Worker]]:
    """Judge an index; also the workers that it follows. ``announced``: those in the pool; None: not asked. Blocking."""
    with index.open() as client:
        try:
            statuses = client.workers()
        except AccessDenied as error:
            return [fail("index", str(error), "give a token with the right to read: --token-file")], []
        except IndexUnavailable as error:
            return [_away(index, in_options(without_advice(error)))], []
        findings = list(_judged(index, client, statuses, announced, tenant))
    return findings, [status.worker for status in statuses]


def _away(index: IndexConnection, says: str) -> Finding:
    if says.endswith(NOTHING_LISTENS):
        change = f"start it: kvpool index --listen {index.target} --pool URL; or correct --index"
    elif says.startswith("no index answers"):
        change = "correct --index"
    else:
        change = "see what runs there and its log; or correct --index and the options of TLS"
    return fail("index", says, change)


def _judged(
    index: IndexConnection,
    client: IndexClient,
    statuses: list[WorkerStatus],
    announced: list[Worker] | None,
    tenant: str,
) -> Iterator[Finding]:
    count = sum(len(status.publishers) for status in statuses)
    yield ok(
        "index",
        f"{index.target} answers: it follows {counted(len(statuses), 'worker')} with {counted(count, 'rank')}",
    )
    if not statuses:
        yield fail(
            "index",
            "it follows no worker, so it cannot place prompts",
            "name the pool of the workers with its --pool, or each stock vLLM with --worker",
        )
    elif not _serves(index):
        yield warn(
            "index",
            f"{index.target} says that it does not serve yet: it warms up, or is ending",
            "ask again in some seconds; its log says for whom it waits",
        )
    in_pool = {worker.id for worker in announced or ()}
    for status in statuses:
        if any(one.events for one in status.worker.publishers):
            yield from _followed(status)
        elif status.worker.id not in in_pool:  # of those in the pool that was said
            says = f"worker {status.worker.name} publishes no KV events: it is known and not followed"
            yield warn("index", says, EVENTS_ON)
    yield from _hashing(client, statuses)
    known = {status.worker.id for status in statuses}
    for worker in announced or ():
        if worker.id not in known:
            yield fail(
                "index",
                f"worker {worker.name} of tenant {tenant} is in the pool and not in the index",
                "start the index with the same --pool; it looks every second. If it has, its log says why it does "
                "not follow this worker (docs/explanation/prefix-index.md)",
            )


def _serves(index: IndexConnection) -> bool:
    try:
        return index.is_serving()
    except IndexUnavailable:
        return False


def _followed(status: WorkerStatus) -> Iterator[Finding]:
    name = status.worker.name
    for one in status.publishers:
        if one.problem == LOOKAHEAD:
            yield fail("index", f"rank {one.dp_rank} of worker {name}: {one.problem}", LOOKAHEAD_OFF)
        elif one.stale:
            events = next((p.events for p in status.worker.publishers if p.dp_rank == one.dp_rank), "")
            yield fail(
                "index",
                f"rank {one.dp_rank} of worker {name} is stale: {one.problem or 'it was not heard from'}",
                f"see whether its events are on and {events} can be reached from the index; without a replay "
                "endpoint it is heard from with its first batch"
                if events
                else EVENTS_ON,
            )
        elif one.problem.startswith(UNHASHED):
            yield fail("index", f"rank {one.dp_rank} of worker {name}: {one.problem}", ONE_SEED)
        elif one.resets:
            yield warn(
                "index",
                f"what rank {one.dp_rank} of worker {name} holds was forgotten {one.resets} times: "
                f"{one.problem or 'it was started anew'}",
                "give it a replay endpoint, if it has none",
            )
        elif one.problem:
            yield warn(
                "index",
                f"rank {one.dp_rank} of worker {name}: {one.problem}",
                "it tells all it holds in its next step where it is asked; stock vLLM cannot be asked",
            )


def _hashing(client: IndexClient, statuses: list[WorkerStatus]) -> Iterator[Finding]:
    """Whether the index can hash tokens as the workers do."""
    for tenant, model in sorted({(status.worker.tenant, status.worker.model) for status in statuses}):
        try:
            client.lookup(model, token_ids=[0], tenant=tenant)
        except UnknownModel as error:
            yield fail("index", str(error), "or ask it by block hashes")


def replica_findings(target: IndexConnection, other: IndexConnection) -> Iterator[Finding]:
    """Whether two indexes know the same of the workers that both follow. Blocking, for two seconds where they do not.

    They are compared at equal sequences, so one that is a little behind is no finding; and a rank of which one of them
    has evicted blocks is not compared.
    """
    differing: dict[_Rank, tuple[int, int]] = {}
    compared: set[_Rank] = set()
    with target.open() as one, other.open() as two:
        for turn in range(COMPARISONS):
            if turn:
                time.sleep(BETWEEN_S)
            try:
                here, there = _contents(one.workers()), _contents(two.workers())
            except IndexUnavailable:  # a finding of index_findings
                return
            full = {rank for rank in here.keys() & there.keys() if here[rank].evicted or there[rank].evicted}
            common = (here.keys() & there.keys()) - full
            for rank in full:
                differing.pop(rank, None)
                compared.discard(rank)
            for rank in common:
                if here[rank].sequence != there[rank].sequence:
                    continue
                compared.add(rank)
                if here[rank].digest == there[rank].digest:
                    differing.pop(rank, None)
                else:
                    differing[rank] = (here[rank].blocks, there[rank].blocks)
            if not differing and compared >= common:
                break
    for (worker, _, dp_rank), (blocks, its_blocks) in sorted(differing.items()):
        yield fail(
            "replicas",
            f"after the same batch of rank {dp_rank} of worker {worker}, {target.target} knows of {blocks} blocks and "
            f"{other.target} of {its_blocks}, and not of the same",
            "the one that has missed batches (resets in ListWorkers) knows less: start it anew with --bootstrap of the "
            "other",
        )
    for worker in sorted({rank[0] for rank in here.keys() ^ there.keys()}):
        yield warn(
            "replicas",
            f"worker {worker} is not followed well, or as the same start, by both {target} and {other}",
            "give both the same --pool and --worker",
        )
    if full:
        yield warn(
            "replicas",
            f"not compared are {counted(len(full), 'rank')}: an index that is full has forgotten blocks of theirs",
            "raise its --max-blocks or --max-memory",
        )
    if not differing:
        yield ok("replicas", f"{target} and {other} know the same of {counted(len(compared), 'rank')}")


_Rank = tuple[str, str, int]  # worker, its incarnation, rank


class _Holdings(NamedTuple):
    sequence: int
    digest: int
    blocks: int
    evicted: int


def _contents(statuses: list[WorkerStatus]) -> dict[_Rank, _Holdings]:
    """Of each rank that is trusted."""
    return {
        (status.worker.id, status.worker.incarnation, one.dp_rank): _Holdings(
            one.sequence, one.digest, one.blocks, one.evicted_blocks
        )
        for status in statuses
        for one in status.publishers
        if not one.stale
    }
