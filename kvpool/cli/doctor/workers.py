"""What ``kvpool doctor`` sees of the workers that announce themselves in a pool."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from kvpool.cli.doctor.finding import Finding, fail, ok, warn
from kvpool.discovery.worker import Worker
from kvpool.discovery.worker_record import merge_ranks, unpack_worker
from kvpool.key.key import is_request_key, workers_prefix
from kvpool.store import Store

CONNECT_S = 1.0
MAX_ENDPOINTS = 64  # of a worker, that are tried
AT_ONCE = 16
EVENTS_ON = (
    "start it with --kv-events-config "
    '\'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", '
    '"replay_endpoint": "tcp://*:5657"}\', with ports of its own for each engine of a host'
)


def announced_workers(store: Store, tenant: str) -> tuple[list[Worker], list[str]]:
    """The workers of a tenant that announce themselves in the pool, and what is wrong with their records."""
    announced = store.announcements(workers_prefix(tenant))
    records = {key: record for key, record in announced.items() if not is_request_key(key)}
    found = [one for key, record in records.items() if (one := unpack_worker(key, record)) is not None]
    workers, problems = merge_ranks(found)
    if len(found) < len(records):
        problems.append(f"{len(records) - len(found)} records of workers cannot be read: of another version?")
    return list(workers.values()), problems


def worker_findings(workers: list[Worker], problems: list[str], tenant: str) -> Iterator[Finding]:
    """Judge the workers that announce themselves. Blocking, for a second for each 16 that do not answer."""
    if not workers:
        yield fail(
            "workers",
            f"no worker of tenant {tenant} has announced itself in the pool",
            "start vLLM with KVPoolConnector and this pool (docs/how-to/vllm.md), or name the --tenant of those "
            "that run; a record lasts for its lease only",
        )
    for sentence in problems:
        yield fail("workers", sentence, "see docs/explanation/prefix-index.md")
    endpoints = [one.events for worker in workers for one in worker.publishers[:MAX_ENDPOINTS] if one.events]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = dict(zip(endpoints, threads.map(_answers, endpoints), strict=True))
    for worker in workers:
        yield from _worker(worker, answers)
    yield from _schemes(workers)


def _worker(worker: Worker, answers: Mapping[str, bool]) -> Iterator[Finding]:
    if not any(one.events for one in worker.publishers):
        says = f"worker {worker.name} publishes no KV events, so no index knows what it holds"
        yield warn("workers", says, EVENTS_ON)
        return
    silent = [
        one.events for one in worker.publishers[:MAX_ENDPOINTS] if one.events and not answers[one.events]
    ]
    if silent:
        yield fail(
            "workers",
            f"worker {worker.name} announces its events at {silent[0]}, where nothing answers",
            'see that it runs; if so, set its "advertise_host" to a name that other hosts can reach, and open the port',
        )
    elif not all(one.replay for one in worker.publishers):
        yield warn(
            "workers",
            f"worker {worker.name} has no replay endpoint: what an index misses once stays unknown",
            'add "replay_endpoint": "tcp://*:5657" to its --kv-events-config, with a port of its own for each engine '
            "of a host",
        )
    else:
        events = ", ".join(one.events for one in worker.publishers[:4])
        yield ok(
            "workers",
            f"worker {worker.name} of model {worker.model}: blocks of {worker.block_tokens} tokens, "
            f"{worker.hash_algorithm}, events at {events}",
        )


def _answers(endpoint: str) -> bool:
    """Whether a TCP connection to it succeeds; True for other transports."""
    address = urlsplit(endpoint)
    if address.scheme != "tcp" or address.hostname is None or address.port is None:
        return True
    try:
        socket.create_connection((address.hostname, address.port), CONNECT_S).close()
    except OSError:
        return False
    return True


def _schemes(workers: Iterable[Worker]) -> Iterator[Finding]:
    """Workers of one model whose hashes mean different things."""
    schemes: dict[str, dict[tuple[str, str, int], str]] = {}
    for worker in workers:
        scheme = (worker.hash_algorithm, worker.hash_seed_id, worker.block_tokens)
        schemes.setdefault(worker.model, {}).setdefault(scheme, worker.name)
    for model, found in schemes.items():
        (first, name), *others = found.items()
        for other, other_name in others:
            words = ("hash algorithm", "PYTHONHASHSEED", "block size")
            differing = [word for word, a, b in zip(words, first, other, strict=True) if a != b]
            yield fail(
                "workers",
                f"workers {name} and {other_name} of model {model} hash in different ways, so they never share",
                f"give them the same {' and '.join(differing)}",
            )
