"""``list_workers``: the answer to ``ListWorkers``, by tenant and name, in pages. Pure, but for reads.

A page's token is the id of its last worker. Any replica answers the next page; a worker is listed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from kvpool.discovery.quota import Standing
from kvpool.errors import ConfigError
from kvpool.index.answer import EngineAudits, IndexStatus
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.protocol import messages
from kvpool.index.serve.auth import Permissions
from kvpool.v1 import index_pb2 as pb

MAX_PAGE_SIZE = 1024  # workers
MAX_AUDITS = 256  # engines
MAX_PAGE_NBYTES = 4 << 20  # but one worker at least, which has 1,024 ranks


def list_workers(
    fleet: Fleet,
    request: Any,
    caller: Permissions,
    index: IndexStatus,
    quotas: Mapping[str, Standing],
    audits: Sequence[EngineAudits] = (),
) -> Any:
    """``ListWorkersResponse``, with the workers, quotas and audits that ``caller`` may see. Errors: ``ConfigError``.

    ``audits``: the worst first.
    """
    last = _position(request.page_token)
    positions = sorted(
        position
        for worker in fleet.followed()
        if request.tenant in ("", worker.tenant)
        and request.model in ("", worker.model)
        and caller.sees(worker.tenant)
        and (position := (worker.tenant, worker.name)) > last
    )
    page = positions[: min(request.page_size, MAX_PAGE_SIZE) or None]
    reply = pb.ListWorkersResponse(index=messages.encode_index_status(index))
    if not request.page_token:
        reply.quotas.extend(
            messages.encode_quota(tenant, standing)
            for tenant, standing in sorted(quotas.items())
            if request.tenant in ("", tenant) and caller.sees(tenant)
        )
        seen = (one for one in audits if request.tenant in ("", one.tenant) and caller.sees(one.tenant))
        reply.audits.extend(map(messages.encode_audits, islice(seen, MAX_AUDITS)))
    nbytes = 0
    for status in fleet.workers({_id(*position) for position in page}):
        one = messages.encode_worker_status(status)
        nbytes += one.ByteSize()
        if request.page_size and nbytes > MAX_PAGE_NBYTES and reply.workers:
            reply.next_page_token = _id(reply.workers[-1].worker.tenant, reply.workers[-1].worker.name)
            return reply
        reply.workers.append(one)
    if len(page) < len(positions):
        reply.next_page_token = _id(*page[-1])
    return reply


def _id(tenant: str, name: str) -> str:
    return f"{tenant}/{name}"


def _position(page_token: str) -> tuple[str, str]:
    """Of the former page's last worker; before all others without one."""
    tenant, slash, name = page_token.partition("/")
    if page_token and not slash:
        raise ConfigError("page_token is the next_page_token of the page before, as it came")
    return tenant, name
