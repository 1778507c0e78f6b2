"""``Router``: ranks the workers of a model by the cost of a prompt there, and holds reservations.

    cost    = prefill + fetch + queue + move + encode
    prefill = tokens of the prompt behind the loadable blocks
    fetch   = local * tokens that the worker holds behind its device blocks
            + pool * tokens that the pool holds behind those
    queue   = waiting prompt tokens (unknown: waiting * waiting requests), less speed * the age of the load
            + running * running requests
            + usage * (share of the KV cache in use - 0.8, not below 0) / 0.2 + reserved cost
              (2^40 of a worker that fails: ``Ejections``), less the tokens of the prompt that earlier requests
              compute there now (``InFlight``)
    move    = of a session's request: move * (pool, without one 1) * tokens of others that its blocks displace, which
              are fetched again:
              with a home (``Sessions``), tokens of the prompt in the home's device memory and not in this one;
              without, tokens of the prompt not in this one for which homes here, and what was placed without a session,
              leave no room in its KV cache
    encode  = encode * tokens of the prompt's different items that end behind the loadable blocks and whose encoder's
              output the rank cannot load from the pool

All of it as many times as the rank takes longer for a token than the median of the ranks, if that is twice or more.

Of ranks of equal cost, a session's request goes to the one whose homes have the fewest tokens, then to the one that a
hash of both chooses: indexes that know the same homes agree. A ``prompt_cache_key`` chooses so among those with room,
and the last pick counts for the others. Where nobody knows a session's tokens its home is the rank that the hash
chooses, unless known tokens led it elsewhere: an index that is asked in turn with others must not decide alone.

Ranks are scored and sorted natively (``kvpool/_native/index/ranking.h``).

Threads: any; no I/O. ``_lock`` guards ``_reservations``, ``_in_flight``, ``_ejections``, ``_sessions`` and
``_picks``: choice and reservation are one step, so concurrent routers see each other's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kvpool import _native
from kvpool.errors import ConfigError
from kvpool.index.answer import Ranking
from kvpool.index.cost.ejections import Ejections, Judged
from kvpool.index.cost.load import KEEP_FAILED_S, KEEP_S, InFlight, LoadBoard, Reservations
from kvpool.index.cost.ranking import NativeRanking
from kvpool.index.cost.sessions import Sessions
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.partition import Answer
from kvpool.index.fleet.rank import RankKey
from kvpool.index.fleet.start import Start
from kvpool.index.prompt import Load, Prompt, PromptFields, Session, as_prompt
from kvpool.index.request_stats import Placed
from kvpool.key.hashing import len_tokens

if TYPE_CHECKING:
    from typing_extensions import Unpack

MAX_RESERVE_S = 600.0
MAX_PROMPT_TOKENS = (1 << 32) - 1
MAX_COEFFICIENT = 1e6
POOL = 0.2  # of a token from the pool, until it is measured
LOCAL = 0.05  # of a token from near, until it is measured
WAITING = 1024.0  # of a waiting request at a rank without placements
SPEED = 8000.0  # tokens that a rank computes in a second, until it is measured
# Of a token of an item that an encoder computes. An encoder of 0.3 to 0.7 billion parameters computes one to four
# patches for each token of a language model of 7 to 8 billion: 0.04 to 0.4 of its work.
ENCODE = 0.3


@dataclass(frozen=True)
class Costs:
    """The coefficients of the formula above, in tokens of a prompt to compute.

    ``local``, ``pool``: per token from the worker's other tiers, or the pool; 1: fetching is as slow as
    computing. None: as measured per rank (``local``: of its near pool), ``LOCAL`` or ``POOL`` if unknown.
    ``waiting``: per waiting request; None: the mean cost of the rank's last placements, else ``WAITING``.
    ``running``: per running request.
    ``usage``: for a full KV cache; up to four fifths it is free. ``speed``: prompt tokens that a worker
    computes in a second, which shorten queues and reservations; None: as measured per rank, else ``SPEED``, and one of
    half the fleet's median or less costs as many times more. ``move``: tokens that others fetch again for each one
    that a session displaces; these displace others in turn. ``encode``: per token of an item that an encoder computes;
    workers do not tell theirs. Errors: ``ConfigError``.
    """

    local: float | None = None
    pool: float | None = None
    waiting: float | None = None
    running: float = 64.0
    usage: float = 1024.0
    speed: float | None = None
    move: float = 2.0
    encode: float = ENCODE

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is None and one.name in ("local", "pool", "waiting", "speed"):
                continue
            if not 0 <= value <= MAX_COEFFICIENT:
                raise ConfigError(
                    f"the coefficient {one.name} is a number from 0 to {MAX_COEFFICIENT:g}, not {value:g}"
                )

    def native(self) -> tuple[float, ...]:
        local = LOCAL if self.local is None else self.local
        pool = POOL if self.pool is None else self.pool
        waiting = WAITING if self.waiting is None else self.waiting
        speed = SPEED if self.speed is None else self.speed
        measures = self.local is None, self.pool is None, self.waiting is None, self.speed is None
        return local, pool, waiting, self.running, self.usage, speed, self.move, self.encode, *measures


class Router:
    """Places requests on the workers of ``fleet``.

    ``tenant_share``: of reservations and sessions, per tenant. ``clock``: monotonic seconds.
    ``loads``: for the scraper.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        costs: Costs | None = None,
        tenant_share: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self.loads = LoadBoard(clock, fleet.rank)
        self._costs = costs or Costs()
        self._packed_costs = self._costs.native()
        self._lock = threading.Lock()
        self._reservations = Reservations(clock, self.loads, tenant_share)
        self._in_flight = InFlight(self.loads, self._reservations)
        self._ejections = Ejections(clock, self._reservations, fleet.ranks_of, fleet.start, fleet.peers)
        self._sessions = Sessions(clock, self.loads, tenant_share)
        self._picks = 0  # choices so far

    def route(
        self,
        model: str | Prompt,
        *,
        loads: Iterable[Load] = (),
        limit: int | None = None,
        reserve_s: float | None = None,
        prompt_tokens: int | None = None,
        session_id: str | None = None,
        prompt_cache_key: str | None = None,
        **fields: Unpack[PromptFields],
    ) -> Ranking:
        """The ranks of a model's workers, the cheapest for this prompt first.

        The prompt as in ``Fleet.lookup``. ``loads``: known loads of candidates, kept for later. ``limit``: most
        picks; None: all. ``reserve_s``: count this prompt as load of the first pick for so long, or until
        ``release``; skipped above the limit. ``prompt_tokens``: of the whole prompt, if given as hashes; None: of
        its full blocks. ``session_id``: of requests that follow each other. ``prompt_cache_key``: without it, of
        requests that alike ranks share. Ties go to the least load, then to the least recent pick. Errors: as
        ``Fleet.lookup``.
        """
        prompt = as_prompt(model, fields)
        return self.rank(
            prompt,
            loads=loads,
            limit=limit,
            reserve_s=reserve_s,
            prompt_tokens=prompt_tokens,
            session=Session.of(prompt.tenant, prompt.model, session_id, prompt_cache_key),
        ).unpack()

    def rank(
        self,
        *prompts: Prompt,
        loads: Iterable[Load] = (),
        limit: int | None = None,
        reserve_s: float | None = None,
        prompt_tokens: int | None = None,
        session: Session | None = None,
        until_computed: bool = False,
        takes_turn: bool = True,
        at_once: bool = False,
    ) -> NativeRanking:
        """``route``, not yet unpacked. ``prompts``: of several models of a tenant: their workers in one ranking.

        ``until_computed``: a reservation at a known load ends with the expected computation, ``reserve_s`` at
        the latest. ``takes_turn`` False: nothing is picked or reserved. ``at_once``: see ``Fleet.ask``.
        """
        if limit is not None and limit < 1:
            raise ConfigError(f"limit is the number of picks, 1 or more, not {limit}")
        if reserve_s is not None and not 0 < reserve_s <= MAX_RESERVE_S:
            raise ConfigError(
                f"a reservation is for more than 0 and at most {MAX_RESERVE_S:g} seconds, not {reserve_s:g}"
            )
        if prompts and (token_ids := prompts[0].token_ids) is not None:
            prompt_tokens = len_tokens(token_ids)
        elif prompt_tokens is not None and not 1 <= prompt_tokens <= MAX_PROMPT_TOKENS:
            raise ConfigError(f"prompt_tokens is from 1 to {MAX_PROMPT_TOKENS}, not {prompt_tokens}")
        answers = [answer for prompt in prompts for answer in self._fleet.ask(prompt, at_once=at_once)]
        if reported := {(f"{prompts[0].tenant}/{load.worker}", load.dp_rank): load for load in loads}:
            for answer in answers:
                for key in reported.keys() & answer.members.places.keys():
                    self.loads.report(key[0], reported[key])
        with self._lock:
            self._reservations.expire()
            self._ejections.renew()
            with self._in_flight.credited(answers) as credit:
                native = _native.Ranking(
                    [(answer.rows, self.loads.of(answer.members.keys), answer.media) for answer in answers],
                    self._packed_costs,
                    prompt_tokens,
                    self.loads.clock(),
                    KEEP_S,
                    KEEP_FAILED_S,
                    limit,
                    session and self._session(session, answers, prompt_tokens, credit),
                )
            reservation, placed = "", None
            if len(native) and takes_turn:
                reservation = self._take(
                    answers, native, reserve_s, until_computed, credit, session, prompt_tokens
                )
                if session is not None and session.stays:
                    placed = self._place(session, answers, native, prompt_tokens)
        return NativeRanking(native, reservation, answers, placed)

    def release(self, tenant: str, reservation: str) -> bool:
        """End a reservation early; False: it has ended, or is of another tenant."""
        with self._lock:
            return self._reservations.release(tenant, reservation)

    def record(self, start: Start, mark: bytes, judged: Judged) -> None:
        """The outcome of a request at a worker, which counts for its ejection: see ``Ejections``."""
        with self._lock:
            self._ejections.record(start, mark, judged)

    def try_at(self, worker_id: str) -> None:
        """See ``Ejections``."""
        with self._lock:
            self._ejections.try_at(worker_id)

    def failed_at(self, mark: bytes) -> str | None:
        """See ``Ejections``."""
        with self._lock:
            return self._ejections.failed_at(mark)

    def check(self, start: Start, *, failed: bool) -> None:
        """The outcome of a worker's health check."""
        with self._lock:
            self._ejections.check(start, failed=failed)

    def settle(self, session: Session, placed: tuple[str, int], rank: tuple[str, int]) -> None:
        """A session's request that was ``placed`` at one worker's rank went to another."""
        if (served := self._fleet.rank(*rank)) is not None:
            with self._lock:
                self._sessions.settle(session, placed, served.key, served.batches)

    def _session(
        self,
        session: Session,
        answers: Sequence[Answer],
        prompt_tokens: int | None,
        credit: Mapping[RankKey, int],
    ) -> tuple[int, bool, bool, tuple[int, int, int, int, int] | None]:
        """As ``_native.Ranking`` takes it."""
        home = self._sessions.home(session) if session.stays else None
        if session.stays and _are_unknown(answers) and (home is None or not home.hashes):
            return session.seed, True, True, None
        if home is not None:
            for part, answer in enumerate(answers):
                if (row := answer.members.row_of(home.rank)) is not None:
                    if not home.goes_on(memoryview(answer.hashes).cast("B")):
                        break
                    rank = answer.members.ranks[row]
                    size = rank.worker.block_tokens
                    tokens = _tokens(answer, size, prompt_tokens)
                    kept = self._sessions.kept(home, rank.batches, answer.hashes, size, tokens)
                    # What is computed there now is credited to its reservation.
                    kept = kept if home.rank not in credit else (0, 0)
                    return session.seed, True, False, (part, row, *kept, home.counted)
        return session.seed, session.stays, False, None

    def _place(
        self,
        session: Session,
        answers: Sequence[Answer],
        native: _native.Ranking,
        prompt_tokens: int | None,
    ) -> Placed:
        part, row, _, _ = native.best()
        answer = answers[part]
        rank = answer.members.ranks[row]
        tokens = _tokens(answer, rank.worker.block_tokens, prompt_tokens)
        model = rank.worker.model
        return self._sessions.place(session, rank.key, rank.batches, answer.hashes, tokens, model)

    def _take(
        self,
        answers: Sequence[Answer],
        native: _native.Ranking,
        reserve_s: float | None,
        until_computed: bool,
        credit: Mapping[RankKey, int],
        session: Session | None,
        prompt_tokens: int | None,
    ) -> str:
        part, row, cost, fresh = native.best()
        key = answers[part].members.ranks[row].key
        if session is None or not session.stays:
            self.loads.place(key, fresh)
        elif _are_unknown(answers) and ((home := self._sessions.home(session)) is None or home.rank != key):
            cost = prompt_tokens or 0  # its hash chose the rank, which has never seen it
        cost = max(0, cost - credit.get(key, 0)) + round(self._costs.running)
        self._picks += 1
        self.loads.pick(key, self._picks, min(cost, MAX_COEFFICIENT))
        if reserve_s is None:
            return ""
        # A known load already includes running work.
        ends = until_computed and self.loads.get(*key[:2]) is not None
        speed = (self.loads.speed(key) or SPEED) if self._costs.speed is None else self._costs.speed
        each_s = 1 / speed if ends and speed else None
        name = self._reservations.add(key.worker_id.partition("/")[0], key, cost, reserve_s, each_s)
        self._in_flight.add(key, bytes(answers[part].hashes), name)
        return name


def _tokens(answer: Answer, block_tokens: int, prompt_tokens: int | None) -> int:
    if prompt_tokens is not None:
        return prompt_tokens
    return len(memoryview(answer.hashes).cast("B")) // 8 * block_tokens


def _are_unknown(answers: Sequence[Answer]) -> bool:
    """Nobody knows the prompt's tokens."""
    return not any(memoryview(answer.hashes).nbytes for answer in answers)
