"""Indexes and endpoint pickers for ``kvpool doctor``: their workers, and differences of replicas.

It takes the extra ``client``, which a worker's environment may lack.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

from kvpool.cli.doctor import rules, subjects
from kvpool.cli.doctor.rules import Finding, judge
from kvpool.cli.doctor.workers import Workers
from kvpool.cli.exits import in_options
from kvpool.cli.options import IndexConnection
from kvpool.errors import AccessDenied, IndexUnavailable, KVPoolError, UnknownModel
from kvpool.index.answer import PublisherStatus, WorkerStatus
from kvpool.index.client.channel import NOTHING_LISTENS, without_advice
from kvpool.text import counted

COMPARISONS = 10  # of two indexes, until every rank agrees
BETWEEN_S = 0.2
CALL_S = 5.0  # a busy index is late, not away


class IndexLook(NamedTuple):
    """What an index says of its workers. ``found``: why it says nothing; empty: it answers."""

    connection: IndexConnection
    statuses: list[WorkerStatus]
    found: list[Finding]


def look_at(index: IndexConnection) -> IndexLook:
    """Blocking."""
    with index.open(CALL_S) as client:
        try:
            return IndexLook(index, client.workers(), [])
        except IndexUnavailable as error:
            return IndexLook(index, [], list(_away(index, error)))


def _away(index: IndexConnection, error: IndexUnavailable) -> Iterator[Finding]:
    denied = isinstance(error, AccessDenied)
    says = str(error) if denied else in_options(without_advice(error))
    away = subjects.IndexAway(index.target, denied, says, says.endswith(NOTHING_LISTENS))
    return judge("index", rules.INDEX_AWAY, away, first=True)


def add_followed(look: IndexLook, workers: Workers) -> None:
    for status in look.statuses:
        well = any(not one.stale for one in status.publishers)
        workers.add_followed(look.connection.target, status.worker, well=well)


def index_findings(look: IndexLook, workers: Workers) -> Iterator[Finding]:
    """``workers``: have been asked; those that answer nowhere have their finding already. Blocking."""
    if look.found:
        yield from look.found
        return
    index, statuses, serves = look.connection, look.statuses, False
    with contextlib.suppress(IndexUnavailable):
        serves = index.is_serving(timeout_s=CALL_S)
    state = subjects.Index(
        target=index.target,
        workers=counted(len(statuses), "worker"),
        ranks=counted(sum(len(status.publishers) for status in statuses), "rank"),
        followed=bool(statuses),
        serves=serves,
    )
    yield from judge("index", rules.INDEX, state)
    known = {status.worker.id for status in statuses}
    for status in statuses:
        if any(one.events for one in status.worker.publishers):
            yield from _ranks(status, workers)
        elif status.worker.id not in workers.announced:  # a finding of the pool, else
            yield from judge("index", rules.INDEX_MUTE, status.worker)
    with index.open(CALL_S) as client:
        for of_tenant, model in sorted({(one.worker.tenant, one.worker.model) for one in statuses}):
            try:
                client.lookup(model, token_ids=[0], tenant=of_tenant)
            except UnknownModel as error:  # the index cannot hash as the workers do
                yield from judge("index", rules.INDEX_HASHING, str(error))
            except IndexUnavailable as error:
                yield from _away(index, error)
                break
    for worker in workers.announced.values():
        if worker.id not in known and not workers.is_away(worker):
            yield from judge("index", rules.INDEX_LACKS, worker)


def _ranks(status: WorkerStatus, workers: Workers) -> Iterator[Finding]:
    events = {one.dp_rank: one.events for one in status.worker.publishers}
    for one in status.publishers:
        if one.stale and workers.has_finding(status.worker):
            continue
        rank = subjects.Rank(
            label=status.worker.label, dp_rank=one.dp_rank, problem=one.problem, stale=one.stale, resets=one.resets,
            events=events.get(one.dp_rank, ""),
        )  # fmt: skip
        yield from judge("index", rules.RANK, rank, first=True)


def replica_findings(one: IndexConnection, other: IndexConnection, workers: Workers) -> Iterator[Finding]:
    """Differences of two indexes about common workers that answer. Blocking, for two seconds if any.

    Ranks are compared at equal sequences, so a lagging index is no finding. Ranks with evicted blocks are skipped.
    """
    differing: dict[_Rank, tuple[int, int]] = {}
    compared: set[_Rank] = set()
    with one.open(CALL_S) as client, other.open(CALL_S) as its_client:
        for turn in range(COMPARISONS):
            if turn:
                time.sleep(BETWEEN_S)
            try:
                here, there = _contents(client.workers()), _contents(its_client.workers())
            except IndexUnavailable:  # a finding of index_findings
                return
            both = here.keys() & there.keys()
            full = {rank for rank in both if here[rank].evicted_blocks or there[rank].evicted_blocks}
            compared -= full
            for rank in full:
                differing.pop(rank, None)
            for rank in both - full:
                if here[rank].sequence != there[rank].sequence:
                    continue
                compared.add(rank)
                differing.pop(rank, None)
                if here[rank].digest != there[rank].digest:
                    differing[rank] = (here[rank].blocks, there[rank].blocks)
            if not differing and compared >= both - full:
                break
    ends = one.target, other.target
    for (worker_id, _, dp_rank), blocks in sorted(differing.items()):
        rank_pair = subjects.Difference(*ends, workers.name(worker_id), dp_rank, blocks)
        yield from judge("replicas", rules.REPLICA_RANK, rank_pair)
    for worker_id in sorted({rank[0] for rank in here.keys() ^ there.keys()}):
        if (worker := workers.by_id.get(worker_id)) is None or not workers.is_away(worker):
            worker_pair = subjects.Difference(*ends, workers.name(worker_id))
            yield from judge("replicas", rules.REPLICA_WORKER, worker_pair)
    pair = subjects.Replicas(
        *ends,
        full=counted(len(full), "rank") if full else "",
        is_same=not differing,
        compared=counted(len(compared), "rank"),
    )
    yield from judge("replicas", rules.REPLICAS, pair)


def picker_findings(picker: IndexConnection) -> Iterator[Finding]:
    try:
        state = subjects.Picker(picker.target, serves=picker.is_serving(picker=True, timeout_s=CALL_S))
    except KVPoolError as error:
        away = in_options(without_advice(error)).replace("no index answers", "no picker answers")
        state = subjects.Picker(picker.target, away)
    yield from judge("picker", rules.PICKER, state, first=True)


_Rank = tuple[str, str, int]  # worker, its incarnation, rank


def _contents(statuses: list[WorkerStatus]) -> dict[_Rank, PublisherStatus]:
    return {
        (status.worker.id, status.worker.incarnation, one.dp_rank): one
        for status in statuses
        for one in status.publishers
        if not one.stale
    }
