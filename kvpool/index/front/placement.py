"""``Placement``: a request's targets and reason, or the ``Refusal`` in its place. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from kvpool.errors import KVPoolError
from kvpool.index.answer import Pick
from kvpool.index.cost.load import EJECTED
from kvpool.index.fleet.start import Start
from kvpool.index.limits import INFERENCE, Limits
from kvpool.index.prompt import Session
from kvpool.index.request_stats import Outcome, Promptless

# Headers of requests and responses.
DESTINATION = "x-gateway-destination-endpoint"
WORKER, MATCHED, BLOCKS, REASON = (
    "x-kvpool-worker", "x-kvpool-matched-blocks", "x-kvpool-prompt-blocks", "x-kvpool-reason",
)  # fmt: skip
RANK = "x-data-parallel-rank"  # vllm/entrypoints/serve/engine/serving.py
OURS = (DESTINATION, WORKER, MATCHED, BLOCKS, REASON, RANK)  # dropped from requests and workers' responses

SESSION = "x-session-id"  # vllm/entrypoints/generate/base/serving.py

MAX_BODY_NBYTES = 16 << 20
RETRY_AFTER_S = 1
_KINDS = {
    403: "PermissionDeniedError",
    404: "NotFoundError",
    413: "BadRequestError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class Refusal(KVPoolError):
    """A response in place of a worker's: an HTTP status and the reason."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status

    @property
    def headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if self.status in (429, 503):
            headers["retry-after"] = str(RETRY_AFTER_S)
        return headers

    @property
    def body(self) -> bytes:
        kind = _KINDS.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        error = {"message": str(self), "type": kind, "param": None, "code": self.status}
        return msgspec.json.encode({"error": error})


def hold(limits: Limits, have_nbytes: int, nbytes: int, host: str) -> None:
    """Take room for a body that grows from ``have_nbytes``, of the host's part. Errors: ``Refusal``."""
    if have_nbytes + nbytes > MAX_BODY_NBYTES:
        raise Refusal(413, f"a request has at most {MAX_BODY_NBYTES} bytes")
    if not limits.take(nbytes, INFERENCE, host=host):
        raise Refusal(503, "too many requests are being read: send it again later")


def fit(picks: Sequence[Pick], max_waiting: int | None) -> Sequence[Pick]:
    """Candidates for a request. ``max_waiting``: as in ``PlacingSettings``. Errors: ``Refusal``."""
    awake = [pick for pick in picks if not pick.asleep]
    if not picks:
        raise Refusal(503, "the index knows no worker: its log says which it refused or lost")
    if not awake:
        raise Refusal(503, "all workers sleep")
    # If none is reachable, the index itself may be cut off.
    reachable = [pick for pick in awake if not pick.unreachable] or awake
    # If all fail, the fault may be the requests'.
    well = [pick for pick in reachable if pick.reserved_cost < EJECTED] or reachable
    if max_waiting is None:
        return well
    taking = [pick for pick in well if pick.waiting < max_waiting]
    if not taking:
        raise Refusal(429, f"each worker has {max_waiting} or more requests waiting")
    return taking


class Target(NamedTuple):
    """A worker for a request. ``endpoint``: ``IP:PORT``; ``address``: its URL. ``dp_rank``: None: its only
    rank. ``matched_blocks``: of the prompt, need no compute. ``start``: the worker's.
    """

    endpoint: str
    address: str
    worker: str
    dp_rank: int | None
    matched_blocks: int
    start: Start


@dataclass(frozen=True, slots=True)
class Placement:
    """``targets``: the best first, each with its own endpoint; empty: any worker. ``prompt_blocks``: 0:
    unknown. ``detail``: more on the reason; may be empty. ``reservation``: of the best, for
    ``Placer.release``; empty: none. ``held_blocks``: of the prompt, the most of any rank or the pool.
    ``promptless``: why it was placed without its prompt; None: with it. ``model``: as the request names it;
    empty: none. ``session``: None: the request names none. ``mark``: as in ``Ejections``.
    """

    tenant: str
    reason: Outcome
    targets: tuple[Target, ...] = ()
    prompt_blocks: int = 0
    detail: str = ""
    reservation: str = ""
    made_s: float = 0.0
    held_blocks: int = 0
    promptless: Promptless | None = None
    model: str = ""
    session: Session | None = None
    mark: bytes = b""
