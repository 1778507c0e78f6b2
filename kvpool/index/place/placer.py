"""``Placer``: which workers should serve a request, best first, for a proxy that holds its path and body.

    body -> InferenceRequest -> Tokenizers, or Renderer: tokens -> Router: ranks by cost -> Endpoints: IP:PORT

A request is placed by its prompt where the tokens are known in time, else by load. What is wrong with a request is for
the engine to say: only what no worker could take is refused here. One event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from kvpool.discovery.worker import DEFAULT_TENANT
from kvpool.errors import ConfigError, KVPoolError, UnknownModel
from kvpool.index.fleet import Fleet
from kvpool.index.place.endpoints import Endpoints, parse_url
from kvpool.index.place.inference_request import InferenceRequest, read_request
from kvpool.index.place.named_model import named_model
from kvpool.index.place.placement import AllBusy, NoWorker, Placement, Reason, Target
from kvpool.index.place.renderer import Asked, NoTokens, Renderer
from kvpool.index.place.route import Pick, Route
from kvpool.index.place.router import Router
from kvpool.index.place.tokenizers import Tokenizers
from kvpool.index.prompt import Prompt
from kvpool.index.refusals import NotAtOnce

MAX_ENDPOINTS = 4  # the best, and where a proxy tries next
MAX_PICKS = 16  # ranks of a worker share its endpoint
PLACE_S = 0.15  # Envoy waits 0.2 s for a picker unless it is told otherwise
RESERVE_S = 60.0  # for a reservation that is not released
SHOWN_S = 2.0  # after which the metrics of a worker show what was placed there
INLINE_NBYTES = 8 << 10  # of a body, above which a thread does the work; its text takes 2 ms at most
INLINE_TOKENS_NBYTES = 64 << 10
THREADS = 2
MAX_UNDER_WAY = 64  # bodies that threads read
NOBODY = b"\0" * 8  # a prompt of one block that no worker holds


class _Ranked(NamedTuple):
    """``held_blocks``: the most leading blocks of the prompt that one rank, of all candidates, or the pool has."""

    route: Route
    held_blocks: int = 0


class _Found(NamedTuple):
    """What a body says. ``why``: why its prompt is not known, with ``reason``. ``ranked``: where the prompt is known
    and could be ranked. ``asks``: a worker may know its tokens."""

    request: InferenceRequest
    reason: Reason = "load"
    why: str = ""
    ranked: _Ranked | None = None
    asks: bool = False


class Placer:
    """Places requests on the workers of ``fleet``.

    ``tokenizers``: for models whose tokens are made here; for others a worker is asked. ``timeout_s``: for all of a
    placement. ``max_waiting``: requests that may wait at a worker before it takes no more; None: any number.
    ``max_endpoints``: that a placement names, 1 to ``MAX_ENDPOINTS``.
    """

    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        tokenizers: Tokenizers,
        renderer: Renderer,
        endpoints: Endpoints,
        *,
        timeout_s: float = PLACE_S,
        max_waiting: int | None = None,
        max_endpoints: int = MAX_ENDPOINTS,
    ) -> None:
        self._fleet, self._router, self._endpoints = fleet, router, endpoints
        self._tokenizers, self._renderer = tokenizers, renderer
        self._timeout_s, self._max_waiting, self._max_endpoints = timeout_s, max_waiting, max_endpoints
        self._threads = ThreadPoolExecutor(THREADS, "kvpool-place")
        self._under_way = 0
        self._turn = 0  # requests that were placed on workers of several models

    def close(self) -> None:
        """Blocking, for as long as the bodies that are read take."""
        self._threads.shutdown(cancel_futures=True)

    async def place(
        self,
        path: str,
        body: bytes,
        *,
        tenant: str = DEFAULT_TENANT,
        subset: frozenset[str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Placement:
        """Where to send a request. ``subset``: ``IP:PORT`` of those that may serve it; None: all. ``headers``: to send
        to a worker that is asked for its tokens. Errors: ``NoWorker``, ``AllBusy``."""
        ends_s = time.monotonic() + self._timeout_s
        names = None
        if subset is not None:
            names = await self._endpoints.names_at(subset, tenant, self._timeout_s)
            if not names:
                raise NoWorker("no worker is known at any of the endpoints that may serve this request")
        found = await self._find(path, body, tenant, names, ends_s)
        reason, detail, ranked = found.reason, found.why, found.ranked
        if found.asks:
            try:
                prompt = await self._renderer.prompt(
                    found.request,
                    tenant,
                    body,
                    headers or {},
                    lambda without: self._worker_to_ask(found.request, tenant, names, without),
                    max(0.0, ends_s - time.monotonic()),
                )
                reason, detail = "load", ""
                ranked = await self._route_of(found.request, prompt, tenant, names, ends_s)
            except NoTokens as error:
                detail = f"{detail}; {error}" if detail else str(error)
        if ranked is None:
            ranked = _Ranked(await self._by_load(found.request, tenant, names))
        return await self._placement(ranked, tenant, reason, detail, ends_s)

    def models(self, tenant: str) -> list[str]:
        """Those that requests can name; not adapters, which only workers know."""
        return sorted({one.model for one in self._fleet.followed() if one.tenant == tenant and one.address})

    def release(self, placement: Placement) -> None:
        """End its reservation now."""
        if placement.reservation:
            self._router.release(placement.tenant, placement.reservation)

    def release_when_shown(self, placement: Placement) -> None:
        """End its reservation once the worker's metrics show the request, if it has got there."""
        if placement.reservation:
            left_s = placement.made_s + SHOWN_S - time.monotonic()
            asyncio.get_running_loop().call_later(max(0.0, left_s), self.release, placement)

    async def _find(
        self, path: str, body: bytes, tenant: str, names: list[str] | None, ends_s: float
    ) -> _Found:
        def find(at_once: bool) -> _Found:
            return self._found(path, body, tenant, names, at_once)

        if len(body) <= INLINE_NBYTES:
            with suppress(NotAtOnce):
                return find(True)
        why = f"{MAX_UNDER_WAY} other bodies are being read"
        if self._under_way < MAX_UNDER_WAY:
            found = await self._in_thread(find, tenant, ends_s)
            if found is not None:
                return found
            why = f"its tokens were not made within {self._timeout_s:g} s"
        return _Found(self._unread(path, body, tenant), "no-tokens", why)

    def _unread(self, path: str, body: bytes, tenant: str) -> InferenceRequest:
        """A request that is placed without its prompt. Its model is not read where all workers have the same."""
        has_several = len(self._fleet.models(tenant)) > 1
        return InferenceRequest(path, len(body), named_model(path, body) if has_several else "")

    async def _in_thread(self, find: Callable[[bool], _Found], tenant: str, ends_s: float) -> _Found | None:
        """None: it takes too long. What it reserves then, or after a cancellation, is given back."""
        self._under_way += 1
        work = asyncio.get_running_loop().run_in_executor(self._threads, find, False)
        work.add_done_callback(self._has_ended)
        try:
            await asyncio.wait({work}, timeout=max(0.0, ends_s - time.monotonic()))
        except BaseException:
            work.add_done_callback(partial(self._give_back, tenant))
            raise
        if work.done():
            return work.result()
        work.add_done_callback(partial(self._give_back, tenant))
        return None

    def _has_ended(self, _: asyncio.Future[_Found]) -> None:
        self._under_way -= 1

    def _give_back(self, tenant: str, work: asyncio.Future[_Found]) -> None:
        ranked = None if work.cancelled() or work.exception() else work.result().ranked
        if ranked is not None and ranked.route.reservation:
            self._router.release(tenant, ranked.route.reservation)

    def _found(self, path: str, body: bytes, tenant: str, names: list[str] | None, at_once: bool) -> _Found:
        """Any thread; takes as long as the body is. Errors: ``NotAtOnce``."""
        try:
            request = read_request(path, body)
            self._fleet.check_model(request.model, tenant)
        except UnknownModel as error:
            return _Found(request, "unknown-model", str(error))
        except ConfigError as error:  # a body, or a model's name, that is none
            return _Found(self._unread(path, body, tenant), "unreadable", str(error))
        try:
            prompt = self._prompt(request, tenant)
        except ConfigError as error:  # images, or a chat that the template refuses
            return _Found(request, "no-tokens", str(error), asks=True)
        if prompt is None:
            return _Found(request, "no-tokens", asks=True)
        return _Found(request, ranked=self._ranked(prompt, names, at_once))

    def _prompt(self, request: InferenceRequest, tenant: str) -> Prompt | None:
        """In tokens; None: they are not made here. Errors: ``ConfigError``: they cannot be."""
        salt = request.cache_salt or None
        if request.token_ids is not None:
            return Prompt(request.model, request.token_ids, tenant=tenant, cache_salt=salt)
        if request.is_rendered_by_engine or request.model not in self._tokenizers:
            return None
        if request.text is None and request.chat is None:
            return None
        return self._tokenizers.tokens(
            Prompt(request.model, text=request.text, chat=request.chat, tenant=tenant, cache_salt=salt)
        )

    async def _route_of(
        self, request: InferenceRequest, prompt: Prompt, tenant: str, names: list[str] | None, ends_s: float
    ) -> _Ranked | None:
        def find(at_once: bool) -> _Found:
            return _Found(request, ranked=self._ranked(prompt, names, at_once))

        if prompt.nbytes <= INLINE_TOKENS_NBYTES:
            with suppress(NotAtOnce):
                return find(True).ranked
        found = await self._in_thread(find, tenant, ends_s)
        return found.ranked if found else None

    def _ranked(self, prompt: Prompt, names: list[str] | None, at_once: bool) -> _Ranked | None:
        asked = prompt if names is None else replace(prompt, workers=names)
        try:
            ranking = self._router.rank(
                asked, limit=MAX_PICKS, reserve_s=RESERVE_S, until_computed=True, at_once=at_once
            )
            return _Ranked(ranking.route(), max(ranking.most()[2:]))
        except NotAtOnce:
            raise
        except KVPoolError:  # hashes that cannot be made, too many blocks, too much work
            return None

    async def _by_load(
        self, request: InferenceRequest, tenant: str, names: list[str] | None, *, takes_turn: bool = True
    ) -> Route:
        """Of the workers of its model; of all where none has that model. Errors: ``NoWorker``."""
        models = self._fleet.models(tenant)
        if request.model in models:
            models = [request.model]
        self._turn += takes_turn
        at = self._turn % max(1, len(models))  # so that of equals it is not always the first model's
        models = [*models[at:], *models[:at]]

        def find(at_once: bool) -> _Found:
            def ranked(model: str, *, takes_turn: bool) -> Route:
                return self._router.rank(
                    Prompt(model, hashes64=NOBODY, tenant=tenant, workers=names),
                    limit=MAX_PICKS,
                    reserve_s=RESERVE_S,
                    prompt_tokens=request.tokens_estimate,
                    until_computed=True,
                    takes_turn=takes_turn,
                    at_once=at_once,
                ).route()

            if len(models) == 1:
                return _Found(request, ranked=_Ranked(ranked(models[0], takes_turn=takes_turn)))
            picks = [(pick, model) for model in models for pick in ranked(model, takes_turn=False).picks]
            picks.sort(key=lambda one: _cost(one[0]))
            if not picks or not takes_turn:
                return _Found(request, ranked=_Ranked(Route(tuple(pick for pick, _ in picks))))
            best = picks[0][1]
            taken = ranked(best, takes_turn=True)  # the best of all has the reservation
            others = (*taken.picks[1:], *(pick for pick, model in picks if model != best))
            route = Route((*taken.picks[:1], *sorted(others, key=_cost)), taken.reservation)
            return _Found(request, ranked=_Ranked(route))

        try:
            found: _Found | None = find(True)
        except NotAtOnce:
            found = await self._in_thread(find, tenant, time.monotonic() + self._timeout_s)
        if found is None or found.ranked is None:
            raise NoWorker("the index takes a large batch of events: send it again later")
        return found.ranked.route

    async def _worker_to_ask(
        self, request: InferenceRequest, tenant: str, names: list[str] | None, without: Collection[str]
    ) -> Asked:
        """The worker with the least to do, at none of these URLs. Errors: ``KVPoolError``."""
        for pick in (await self._by_load(request, tenant, names, takes_turn=False)).picks:
            if pick.unreachable:
                continue
            try:
                url = parse_url(pick.address)
                at = await self._endpoints.resolve(pick.address, tenant, self._timeout_s)
            except KVPoolError:
                continue
            if (found := f"{'https' if url.is_tls else 'http'}://{at}") not in without:
                return Asked(found, url.host)
        raise NoTokens("no worker can be asked for its tokens")

    async def _placement(
        self, ranked: _Ranked, tenant: str, reason: Reason, detail: str, ends_s: float
    ) -> Placement:
        route = ranked.route
        try:
            picks = self._fit(route.picks)
            placed = await self._resolved(picks, tenant, ends_s)
        except BaseException:
            if route.reservation:
                self._router.release(tenant, route.reservation)
            raise
        first = next(iter(placed.values()))
        reservation = route.reservation
        if reservation and first is not route.picks[0]:
            self._router.release(tenant, reservation)
            reservation = ""
        if reason == "load" and first.row.loadable_blocks:
            reason = "prefix"
        ranks = Counter(pick.worker for pick in route.picks)
        return Placement(
            tenant,
            reason,
            tuple(
                Target(
                    at,
                    pick.address,
                    pick.worker,
                    pick.dp_rank if pick.dp_rank or ranks[pick.worker] > 1 else None,
                    pick.row.loadable_blocks,
                )
                for at, pick in placed.items()
            ),
            first.row.prompt_blocks if reason in ("load", "prefix") else 0,
            detail,
            reservation,
            time.monotonic(),
            max(ranked.held_blocks, first.row.loadable_blocks),
        )

    def _fit(self, picks: tuple[Pick, ...]) -> list[Pick]:
        awake = [pick for pick in picks if not pick.asleep]
        if not awake:
            raise NoWorker("all workers sleep" if picks else "no worker has joined the index")
        # Where none can be reached, the index may be the one that is cut off.
        reachable = [pick for pick in awake if not pick.unreachable] or awake
        if self._max_waiting is None:
            return reachable
        found = [pick for pick in reachable if pick.waiting < self._max_waiting]
        if not found:
            raise AllBusy(f"each worker has {self._max_waiting} or more requests waiting")
        return found

    async def _resolved(self, picks: list[Pick], tenant: str, ends_s: float) -> dict[str, Pick]:
        """The best pick at each endpoint, in order. Errors: ``NoWorker``."""
        placed: dict[str, Pick] = {}
        why = ""
        for pick in picks:
            try:
                at = await self._endpoints.resolve(pick.address, tenant, max(0.01, ends_s - time.monotonic()))
            except KVPoolError as error:
                why = why or str(error)
                continue
            placed.setdefault(at, pick)
            if len(placed) == self._max_endpoints:
                break
        if not placed:
            raise NoWorker(f"no worker can be addressed: {why}")
        return placed


def _cost(pick: Pick) -> tuple[bool, bool, int]:
    return pick.unreachable, pick.asleep, pick.cost
