"""What both sides of the index's protocol (``protos/kvpool/v1/index.proto``) need: limits, numbers, workers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpool.discovery.worker import DEFAULT_ALGORITHM, DEFAULT_TENANT, Publisher, Worker
from kvpool.index.place.load import LoadSource
from kvpool.index.place.ranking import Trust
from kvpool.v1 import index_pb2 as pb

SERVICE = "kvpool.v1.IndexService"
MAX_PROMPT_NBYTES = 32 << 20  # 4 Mi block hashes
MAX_REQUEST_NBYTES = MAX_PROMPT_NBYTES + (1 << 20)
MAX_REPLY_NBYTES = 64 << 20
MAX_REQUESTS = 256  # prompts in one message
MAX_U32 = (1 << 32) - 1

REPLIES: dict[str, Any] = {
    "Lookup": pb.LookupResponse,
    "Route": pb.RouteResponse,
    "Release": pb.ReleaseResponse,
    "RegisterWorker": pb.RegisterWorkerResponse,
    "RemoveWorker": pb.RemoveWorkerResponse,
    "ListWorkers": pb.ListWorkersResponse,
}
TRUST: Mapping[Trust, int] = {"exact": 1, "degraded": 2, "fallback": 3}
LOAD_SOURCE: Mapping[LoadSource, int] = {"none": 0, "reported": 1, "scraped": 2}


def encode_worker(worker: Worker) -> Any:
    """``Worker``."""
    return pb.Worker(
        name=worker.name,
        tenant=worker.tenant,
        model=worker.model,
        hash_algorithm=worker.hash_algorithm,
        hash_seed_id=worker.hash_seed_id,
        block_tokens=worker.block_tokens,
        address=worker.address,
        incarnation=worker.incarnation,
        namespace=worker.namespace,
        publishers=[
            pb.Publisher(dp_rank=one.dp_rank, events=one.events, replay=one.replay)
            for one in worker.publishers
        ],
    )


def decode_worker(message: Any, default_seed_id: str) -> Worker:
    """Of ``Worker``, with the defaults that its fields have when they are empty."""
    return Worker(
        name=message.name,
        model=message.model,
        block_tokens=message.block_tokens,
        hash_seed_id=message.hash_seed_id or default_seed_id,
        publishers=tuple(Publisher(one.dp_rank, one.events, one.replay) for one in message.publishers),
        tenant=message.tenant or DEFAULT_TENANT,
        hash_algorithm=message.hash_algorithm or DEFAULT_ALGORITHM,
        address=message.address,
        incarnation=message.incarnation,
        namespace=message.namespace,
    )


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]
