"""``Router``: ranks the workers of a model by what a prompt would cost there, and holds reservations.

    cost    = prefill + fetch + queue
    prefill = tokens of the prompt that no tier holds
    fetch   = local * tokens that the worker holds behind its device blocks
            + pool * tokens that the pool holds behind those
    queue   = prompt tokens that wait (not known: waiting * waiting requests) + running * running requests
            + usage * share of the KV cache in use + what is reserved

``_lock`` guards ``_reservations`` and ``_picked``: a choice and its reservation are one, so that routers that ask at
the same time see each other's. Any thread may call anything; nothing blocks on I/O.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError
from kvpool.index.answer import Row
from kvpool.index.fleet import Fleet
from kvpool.index.membership import MAX_RANKS
from kvpool.index.place.load import Known, Load, LoadBoard
from kvpool.index.place.reservations import Reservations
from kvpool.index.place.route import Pick, Route, Trust
from kvpool.index.prompt import Prompt, PromptFields, as_prompt
from kvpool.key.hashing import len_tokens

if TYPE_CHECKING:
    from typing_extensions import Unpack

MAX_RESERVE_S = 600.0
MAX_PROMPT_TOKENS = (1 << 32) - 1
MAX_COEFFICIENT = 1e6

_NO_LOAD = Load("")


@dataclass(frozen=True)
class Costs:
    """The coefficients of the formula above, in tokens of a prompt to compute.

    ``local``, ``pool``: for each token that is fetched from the worker's other tiers, or from the pool; 1 would say
    that fetching is no faster than computing. ``waiting``: for each waiting request. ``running``: for each running
    one. ``usage``: for a KV cache that is full. Errors: ``ConfigError``.
    """

    local: float = 0.05
    pool: float = 0.2
    waiting: float = 1024.0
    running: float = 64.0
    usage: float = 1024.0

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if not 0 <= value <= MAX_COEFFICIENT:
                raise ConfigError(
                    f"the coefficient {one.name} is a number from 0 to {MAX_COEFFICIENT:g}, not {value:g}"
                )


class Router:
    """Places requests on the workers of ``fleet``.

    ``loads``: how busy they are; the reader of their metrics writes it there. ``tenant_share``: the part of all
    reservations that one tenant may have. ``clock``: seconds that only go up.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        loads: LoadBoard | None = None,
        costs: Costs | None = None,
        tenant_share: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self.loads = loads or LoadBoard(clock)
        self._costs = costs or Costs()
        self._lock = threading.Lock()
        self._reservations = Reservations(clock, tenant_share)
        self._picked: dict[
            tuple[str, int], int
        ] = {}  # when each rank was last the best, counted; the oldest first
        self._picks = 0

    def route(
        self,
        model: str | Prompt,
        *,
        loads: Iterable[Load] = (),
        limit: int | None = None,
        reserve_s: float | None = None,
        prompt_tokens: int | None = None,
        **fields: Unpack[PromptFields],
    ) -> Route:
        """The ranks of a model's workers, the cheapest for this prompt first.

        The prompt as in ``Fleet.lookup``. ``loads``: what the caller knows of candidates now; kept
        for later questions, too. ``limit``: picks that are wanted; None: all. ``reserve_s``: count this prompt as
        load of the first pick for so long, or until ``release``; not done while too many are. ``prompt_tokens``: of
        the whole prompt, where it is given as hashes; None: of its full blocks.
        Ties go to the rank with the least load, then to the one that was picked least recently. Errors: as
        ``Fleet.lookup``.
        """
        prompt = as_prompt(model, fields)
        if limit is not None and limit < 1:
            raise ConfigError(f"limit is the number of picks, 1 or more, not {limit}")
        if reserve_s is not None and not 0 < reserve_s <= MAX_RESERVE_S:
            raise ConfigError(
                f"a reservation is for more than 0 and at most {MAX_RESERVE_S:g} seconds, not {reserve_s:g}"
            )
        if prompt.token_ids is not None:
            prompt_tokens = len_tokens(prompt.token_ids)
        elif prompt_tokens is not None and not 1 <= prompt_tokens <= MAX_PROMPT_TOKENS:
            raise ConfigError(f"prompt_tokens is from 1 to {MAX_PROMPT_TOKENS}, not {prompt_tokens}")
        tenant = prompt.tenant
        rows = list(self._fleet.lookup(prompt))
        candidates = {(row.worker, row.dp_rank) for row in rows}
        for load in loads:
            if (load.worker, load.dp_rank) in candidates:
                self.loads.report(f"{tenant}/{load.worker}", load)
        known = [self.loads.get(f"{tenant}/{row.worker}", row.dp_rank) for row in rows]
        queues = [queue_cost(one.load, self._costs) for one in known if one is not None]
        typical = sum(queues) / len(queues) if queues else 0.0
        with self._lock:
            picks = [
                score(
                    row,
                    prompt_tokens,
                    one,
                    typical,
                    self._reservations.cost(f"{tenant}/{row.worker}", row.dp_rank),
                    self._costs,
                )
                for row, one in zip(rows, known, strict=True)
            ]
            picks.sort(
                key=lambda pick: (
                    pick.asleep,
                    pick.cost,
                    pick.queue_cost,
                    self._picked.get((f"{tenant}/{pick.worker}", pick.dp_rank), 0),
                    *pick.row[:2],
                )
            )
            return Route(tuple(picks[:limit]), self._take(tenant, picks[0], reserve_s) if picks else "")

    def release(self, tenant: str, reservation: str) -> bool:
        """End a reservation before its time; False if it has ended, or is not of this tenant."""
        with self._lock:
            return self._reservations.release(tenant, reservation)

    def _take(self, tenant: str, best: Pick, reserve_s: float | None) -> str:
        key = (f"{tenant}/{best.worker}", best.dp_rank)
        self._picks += 1
        self._picked.pop(key, None)
        self._picked[key] = self._picks
        if len(self._picked) > MAX_RANKS:
            del self._picked[next(iter(self._picked))]
        if reserve_s is None:
            return ""
        cost = best.prefill_cost + best.fetch_cost + round(self._costs.running)
        return self._reservations.add(tenant, *key, cost, reserve_s)


def queue_cost(load: Load, costs: Costs) -> float:
    """What is there before a request, without reservations."""
    queued = load.queued_tokens if load.queued_tokens is not None else costs.waiting * load.waiting
    return queued + costs.running * load.running + costs.usage * load.kv_usage


def score(
    row: Row,
    prompt_tokens: int | None,
    known: Known | None,
    typical: float,
    reserved_cost: int,
    costs: Costs,
) -> Pick:
    """What a prompt costs at one rank. ``typical``: the queue of a rank whose load is not ``known``. Pure."""
    held = max(row.local_blocks, row.pool_blocks)
    tokens = row.prompt_blocks * row.block_tokens if prompt_tokens is None else prompt_tokens
    prefill = max(0, tokens - held * row.block_tokens)
    local, pool = row.local_blocks - row.device_blocks, held - row.local_blocks
    fetch = round((costs.local * local + costs.pool * pool) * row.block_tokens)
    queue = round(typical if known is None else queue_cost(known.load, costs)) + reserved_cost
    load = known.load if known is not None else _NO_LOAD
    return Pick(
        row=row,
        trust=_trust(row),
        cost=prefill + fetch + queue,
        prefill_cost=prefill,
        fetch_cost=fetch,
        queue_cost=queue,
        running=load.running,
        waiting=load.waiting,
        queued_tokens=load.queued_tokens or 0,
        kv_usage_permille=round(load.kv_usage * 1000),
        reserved_cost=reserved_cost,
        load_source=known.source if known is not None else "none",
        load_age_ms=round(known.age_s * 1000) if known is not None else 0,
        asleep=known is not None and known.asleep,
    )


def _trust(row: Row) -> Trust:
    if not row.stale:
        return "exact"
    return "degraded" if row.sequence else "fallback"
