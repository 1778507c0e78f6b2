"""``Placer``: places the requests of Envoy and of ``kvpool router``, each given by its path, headers and body.

    body -> InferenceRequest -> Tokenizers, or Renderer: Prompt -> Router: Ranking -> Endpoints: Placement

A request is placed by its prompt if the tokens are known in time, else by load. It is refused only if no
worker could take it: engines report all other faults. One event loop. Over 400 lines because the steps of a placement
stand here in their order.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from kvpool.errors import ConfigError, KVPoolError, UnknownModel
from kvpool.index.cost.ranking import NativeRanking
from kvpool.index.cost.router import Router
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.start import Start
from kvpool.index.front.endpoints import Endpoints
from kvpool.index.front.inference_request import (
    OPERATIONS,
    InferenceRequest,
    engine_json,
    engine_path,
    mark_of,
    named_model,
    read_request,
    why_unread,
)
from kvpool.index.front.placement import (
    BLOCKS,
    MATCHED,
    REASON,
    WORKER,
    Placement,
    Refusal,
    Target,
    fit,
)
from kvpool.index.front.renderer import RENDER_S, NoTokens
from kvpool.index.front.settings import PlacingSettings
from kvpool.index.front.stored_responses import StoredResponses
from kvpool.index.front.token_makers import TokenMakers
from kvpool.index.limits import NotAtOnce, Work
from kvpool.index.net.worker_url import Url, parse_url
from kvpool.index.prompt import NO_BLOCKS, Prompt, Session
from kvpool.index.request_stats import Outcome, Promptless, RequestStats, outcome_of
from kvpool.index.tokens.text_work import INLINE, SHORT, LongText, TooMuchText
from kvpool.tracing import Tracing

MAX_PICKS = 16  # ranks of a worker share its endpoint
RESERVE_S = 60.0  # for a reservation that is not released
SHOWN_S = 2.0  # after which a worker's metrics show a placed request
INLINE_NBYTES = 8 << 10  # of a body, above which a thread does the work; its text takes 2 ms at most
INLINE_TOKENS_NBYTES = 64 << 10
THREADS, THREADS_OF_LINE = 6, 2
MAX_UNDER_WAY, MAX_UNDER_WAY_OF_LINE = 128, 64  # bodies in threads
FAILED = frozenset((500, 502, 504))  # of an engine's fault; 429 and 503: it is full, or does not serve now

logger = logging.getLogger("kvpool.index")


class _Ranked(NamedTuple):
    """A request with its ranking; None: by load, ``promptless``. ``needs_render``: tokens come from a worker's
    /render; ``has_own``: else from a tokenizer that differs. ``is_long``: they come from ``Tokenizers.placed``.
    """

    request: InferenceRequest
    ranking: NativeRanking | None = None
    promptless: Promptless | None = None
    detail: str = ""
    needs_render: bool = False
    has_own: bool = False
    is_long: bool = False


class Placer:
    """Places requests on the workers of ``fleet``, and counts them in ``stats``.

    ``serves``: whether the index is warm; until then a request without a worker may go to any. The caller closes
    the makers of tokens, but for their checks.
    """

    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        makers: TokenMakers,
        endpoints: Endpoints,
        settings: PlacingSettings,
        *,
        stats: RequestStats | None = None,
        serves: Callable[[], bool] = lambda: True,
        tracing: Tracing | None = None,
    ) -> None:
        self._fleet, self._router, self._endpoints, self._settings = fleet, router, endpoints, settings
        self._tokenizers, self._renderer, self._checks = makers
        self._stats, self._serves, self._tracing = stats or RequestStats(), serves, tracing or Tracing()
        self.session_header = settings.session_header.lower()
        self.stored, self.names = StoredResponses(), fleet.names
        self._threads = Work(THREADS, THREADS_OF_LINE, "kvpool-place")
        self._under_way: Counter[str] = Counter()  # by line

    def close(self) -> None:
        """Blocks until running reads of bodies end."""
        self._checks.close()
        self._threads.close()

    async def place(
        self,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        tenant: str,
        subset: frozenset[str] | None = None,
    ) -> Placement:
        """``subset``: candidates' ``IP:PORT``; None: all. No targets: a fault of ours, or a cold index.
        Errors: ``Refusal``.
        """
        began_s = time.perf_counter()
        outcome: Outcome | None = None  # None: the request was given up
        promptless: Promptless | None = None
        with self._tracing.span("kvpool.place", headers) as span:
            try:
                placement = await self._place(path, headers, body, tenant, subset)
                outcome, promptless = placement.reason, placement.promptless
                best = placement.targets[0]
                blocks, held = placement.prompt_blocks, placement.held_blocks
                self._stats.record_placed(blocks, best.matched_blocks if blocks else 0, held if blocks else 0)
                span.set(prompt_blocks=blocks, worker=best.worker, matched_blocks=best.matched_blocks)
                span.set(model=placement.model, operation=OPERATIONS.get(engine_path(path), ""))
                return placement
            except Refusal as refusal:
                outcome = "busy" if refusal.status == 429 else "no-worker"
                if outcome == "busy" or subset is not None or self._serves():
                    raise
                promptless = "no-worker"
                return Placement(tenant, "load", detail=str(refusal))
            except Exception:
                logger.exception("a request was not placed")
                outcome = promptless = "failed"
                return Placement(tenant, "failed")
            finally:
                span.set(outcome=outcome or "given up", tenant=tenant)
                if outcome:
                    self._stats.record_placement(time.perf_counter() - began_s, outcome, promptless)

    def models(self, tenant: str) -> list[str]:
        """The models by name, without other names and adapters of them."""
        return sorted({one.model for one in self._fleet.followed() if one.tenant == tenant and one.address})

    def headers(self, placement: Placement, target: Target | None = None) -> list[tuple[str, str]]:
        """Worker and reason, for the request and its response. ``target``: None: the best, if any."""
        if not self._settings.shows:
            return []
        headers: list[tuple[str, str]] = [(REASON, placement.reason)]
        if target := target or next(iter(placement.targets), None):
            headers.append((WORKER, target.worker))
            if placement.prompt_blocks:
                headers += [(MATCHED, str(target.matched_blocks)), (BLOCKS, str(placement.prompt_blocks))]
        return headers

    def record(self, placement: Placement, target: Target, status: int | None = None) -> None:
        """A target's answer to the request; None: none, or an unknown one. Failures eject its worker."""
        if status is None:
            self._router.record(target.start, placement.mark, "unreached")
        elif status in FAILED:
            self.judge(placement, target, served=False)
        elif status == 404 or status < 300:
            self.names.note(target.start.worker_id, placement.model, served=status != 404)
        if status is not None and 400 <= status < 500 and status != 429:
            self._router.record(target.start, placement.mark, "refused")
        if status is not None and status < 300:
            self._settle(placement, target)

    def judge(self, placement: Placement, target: Target, *, served: bool) -> None:
        """A target has served the request to its end, or its engine has failed it."""
        self._router.record(target.start, placement.mark, "served" if served else "failed")

    def begun(self, placement: Placement, target: Target) -> None:
        """The first of a target's good answer has come."""
        self._router.record(target.start, placement.mark, "begun")

    def doubt(self, placement: Placement, target: Target) -> None:
        """A target did not serve the request, for a failure or a 404: that says nothing of its health."""
        self.names.note(f"{placement.tenant}/{target.worker}", placement.model, served=False)

    def holds(self, placement: Placement, endpoint: str) -> bool:
        """Whether a worker that the request could have gone to serves at ``IP:PORT``."""
        return self._endpoints.holds(endpoint, placement.tenant)

    def _settle(self, placement: Placement, target: Target) -> None:
        """The next request of its session finds what this target computes."""
        if placement.session is not None and target is not placement.targets[0]:
            ranks = [(f"{placement.tenant}/{one.worker}", one.dp_rank or 0) for one in placement.targets]
            self._router.settle(placement.session, ranks[0], ranks[placement.targets.index(target)])

    def release(self, placement: Placement) -> None:
        self._release(placement.tenant, placement.reservation)

    def release_when_shown(self, placement: Placement) -> None:
        """End its reservation once the worker's metrics should show the request."""
        if placement.reservation:
            left_s = placement.made_s + SHOWN_S - time.monotonic()
            asyncio.get_running_loop().call_later(max(0.0, left_s), self.release, placement)

    def _release(self, tenant: str, reservation: str) -> None:
        if reservation:
            self._router.release(tenant, reservation)

    # ---- request -> prompt -> ranking

    async def _place(
        self,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        tenant: str,
        subset: frozenset[str] | None,
    ) -> Placement:
        ends_s = time.monotonic() + self._settings.timeout_s
        path, body = engine_path(path), engine_json(body)
        session_id = headers.get(self.session_header)
        workers: Sequence[str] | None = None
        if subset is not None:
            workers = await self._endpoints.names_at(subset, tenant, self._settings.timeout_s)
            if not workers:
                raise Refusal(503, "no worker is known at any of the endpoints that may serve this request")
        keeper = self.stored.worker(tenant, path, body)
        if keeper and keeper in (workers or (keeper,)) and self._fleet.ranks_of(f"{tenant}/{keeper}"):
            workers = [keeper]
        ranked = await self._read(path, body, tenant, workers, session_id, ends_s)
        if ranked.needs_render:
            try:
                ranked = await self._rendered(ranked.request, headers, ends_s)
            except NoTokens as error:
                self._renderer.warn(ranked.request, error)
                detail = f"{ranked.detail}; {error}" if ranked.detail else str(error)
                ranked = ranked._replace(promptless=error.reason, detail=detail)
                if ranked.has_own:  # tokens that differ still match up to the first difference
                    ranked = await self._read(path, body, tenant, workers, session_id, ends_s, trusts=True)
        if ranked.request.prompt is not None:
            model = self._tokenizers.model_of(ranked.request.prompt, self.names.model)
            render = partial(self._prompt, headers, RENDER_S)
            starts = partial(self._fleet.starts, tenant, self.names.model(tenant, model))
            self._checks.offer(ranked.request, model, render, starts, headers.get("authorization", ""))
        if ranked.ranking is None:
            ranked = ranked._replace(ranking=self._by_load(ranked.request))
        mark = mark_of(tenant, path, body, ranked.request.session)
        return await self._placement(ranked, tenant, mark, ends_s)

    async def _read(
        self,
        path: str,
        body: bytes,
        tenant: str,
        workers: Sequence[str] | None,
        session_id: str | None,
        ends_s: float,
        *,
        trusts: bool = False,
    ) -> _Ranked:
        """``trusts``: tokens that may differ from a worker's are better than none."""

        def read(at_once: bool) -> _Ranked:
            """Any thread; takes time with the body's size. Errors: ``NotAtOnce``."""
            try:
                default = partial(self.names.default, tenant)
                request = read_request(path, body, tenant, workers, default, session_id)
                self.names.check(tenant, request.model)
            except UnknownModel as error:
                return _Ranked(request, None, "unknown-model", str(error))
            except ConfigError as error:  # an unreadable body, or no name of a model
                return _Ranked(unread(), None, why_unread(body), str(error))
            prompt = request.prompt
            has_own = False
            try:
                if prompt is not None and prompt.token_ids is None:
                    model = self._tokenizers.model_of(prompt, self.names.model)
                    has_own = model in self._tokenizers and not trusts
                    makes = trusts or self._checks.trusts(request, model)
                    bounds = INLINE if at_once else SHORT
                    prompt = self._tokenizers.tokens(prompt, model, bounds) if makes else None
            except LongText as error:
                if at_once:
                    raise NotAtOnce from error
                return _Ranked(request, is_long=True)
            except KVPoolError as error:
                return _without(request, error)
            if prompt is None:
                return _Ranked(request, None, "no-prompt", needs_render=True, has_own=has_own)
            return self._ranked(request, prompt, at_once)

        def unread() -> InferenceRequest:
            has_several = self.names.are_several(tenant)  # only then its model matters
            model = named_model(path, body) if has_several else ""
            session = Session.of(tenant, model if has_several else self.names.default(tenant), session_id)
            return InferenceRequest(path, body, tenant, workers, model, session=session)

        if len(body) <= INLINE_NBYTES:
            with suppress(NotAtOnce):
                return read(True)
        others, line = self._under_way.total(), _line(tenant, len(body))
        if others >= MAX_UNDER_WAY or self._under_way[line] >= MAX_UNDER_WAY_OF_LINE:
            return _Ranked(unread(), None, "busy", f"{others} other bodies are being read")
        ranked = await self._in_thread(read, tenant, line, ends_s) or self._late(unread())
        return await self._of_long(ranked.request, ends_s) if ranked.is_long else ranked

    async def _rendered(
        self, request: InferenceRequest, headers: Mapping[str, str], ends_s: float
    ) -> _Ranked:
        """By the tokens that a worker renders. Errors: ``NoTokens``."""
        prompt = await self._prompt(headers, max(0.0, ends_s - time.monotonic()), request)
        prompt = prompt if request.workers is None else replace(prompt, workers=request.workers)
        return await self._of_tokens(request, prompt, ends_s)

    async def _of_long(self, request: InferenceRequest, ends_s: float) -> _Ranked:
        """By its tokens, if they come in time."""
        assert request.prompt is not None
        model = self._tokenizers.model_of(request.prompt, self.names.model)
        try:
            making = self._tokenizers.placed(request.prompt, model, len(request.body))
            prompt = await asyncio.wait_for(making, max(0.0, ends_s - time.monotonic()))
        except asyncio.TimeoutError:
            return self._late(request)
        except KVPoolError as error:
            return _without(request, error)
        return await self._of_tokens(request, prompt, ends_s)

    async def _of_tokens(self, request: InferenceRequest, prompt: Prompt, ends_s: float) -> _Ranked:
        if prompt.nbytes <= INLINE_TOKENS_NBYTES:
            with suppress(NotAtOnce):
                return self._ranked(request, prompt, True)
        work = partial(self._ranked, request, prompt)
        line = _line(request.tenant, prompt.nbytes)
        return await self._in_thread(work, request.tenant, line, ends_s) or self._late(request)

    async def _prompt(
        self, headers: Mapping[str, str], timeout_s: float, request: InferenceRequest
    ) -> Prompt:
        choose = partial(self._renders, request)
        return await self._renderer.prompt(
            request, request.body, headers, choose, self._fleet.lasts, timeout_s
        )

    def _late(self, request: InferenceRequest) -> _Ranked:
        return _Ranked(
            request, None, "late", f"its tokens were not made within {self._settings.timeout_s:g} s"
        )

    async def _renders(
        self, request: InferenceRequest, without: Collection[str], renders: Counter[str]
    ) -> tuple[Url, Start]:
        """The worker with the fewest of these renders, of equals the least busy one, at none of these endpoints.
        Errors: ``KVPoolError``.
        """
        picks = self._by_load(request, takes_turn=False).unpack().picks
        for pick in sorted(picks, key=lambda one: renders[f"{request.tenant}/{one.worker}"]):
            if pick.unreachable:
                continue
            with suppress(KVPoolError):
                endpoint = await self._endpoints.resolve(
                    pick.address, request.tenant, self._settings.timeout_s
                )
                if endpoint not in without:
                    start = self._fleet.start(f"{request.tenant}/{pick.worker}")
                    return parse_url(pick.address)._replace(endpoint=endpoint), start
        raise NoTokens("no-answer", "no worker can be asked for its tokens")

    def _ranked(self, request: InferenceRequest, prompt: Prompt, at_once: bool) -> _Ranked:
        try:
            ranking = self._router.rank(
                prompt,
                limit=MAX_PICKS,
                reserve_s=RESERVE_S,
                session=request.session,
                until_computed=True,
                at_once=at_once,
            )
        except NotAtOnce:
            raise
        except KVPoolError as error:  # hashes that cannot be made, too many blocks, too much work
            return _Ranked(request, None, "unmatched", str(error))
        return _Ranked(request, ranking)

    def _by_load(self, request: InferenceRequest, *, takes_turn: bool = True) -> NativeRanking:
        """Among the workers of its model; among all if none has it. At once: it reads no blocks."""
        models = [request.model]
        if not self.names.knows(request.tenant, request.model):
            models = self.names.models(request.tenant)
        return self._router.rank(
            *(
                Prompt(model, hashes64=NO_BLOCKS, tenant=request.tenant, workers=request.workers)
                for model in models
            ),
            limit=MAX_PICKS,
            reserve_s=RESERVE_S,
            prompt_tokens=request.tokens_estimate,
            session=request.session,
            until_computed=True,
            takes_turn=takes_turn,
        )

    async def _in_thread(
        self, work: Callable[[bool], _Ranked], tenant: str, line: str, ends_s: float
    ) -> _Ranked | None:
        """The result of ``work`` on a thread; None: ``ends_s`` came first.

        After that, or after a cancellation, ``work`` does not begin; if it had, its reservation is released.
        """
        is_over = False

        def begin() -> _Ranked | None:
            return None if is_over else work(False)

        def give_back(done: asyncio.Future[_Ranked | None]) -> None:
            ranked = None if done.cancelled() or done.exception() else done.result()
            if ranked is not None and ranked.ranking is not None:
                self._release(tenant, ranked.ranking.reservation)

        def end(_: asyncio.Future[_Ranked | None]) -> None:
            self._under_way[line] -= 1
            self._under_way += Counter()  # without lines that have none

        self._under_way[line] += 1
        working = asyncio.ensure_future(self._threads.run(line, begin))
        working.add_done_callback(end)
        try:
            await asyncio.wait({working}, timeout=max(0.0, ends_s - time.monotonic()))
        except BaseException:
            is_over = True
            working.add_done_callback(give_back)
            raise
        if working.done():
            return working.result()
        is_over = True
        working.add_done_callback(give_back)
        return None

    # ---- ranking -> placement

    async def _placement(self, ranked: _Ranked, tenant: str, mark: bytes, ends_s: float) -> Placement:
        ranking, reason = ranked.ranking, outcome_of(ranked.promptless)
        assert ranking is not None
        picks, reservation = (unpacked := ranking.unpack()).picks, unpacked.reservation
        try:
            fitting = fit(picks, self._settings.max_waiting)
            if mark and (failed_at := self._router.failed_at(mark)):  # another worker is its second opinion
                fitting = sorted(fitting, key=lambda pick: f"{tenant}/{pick.worker}" == failed_at)
            placed = await self._endpoints.of_picks(fitting, tenant, ends_s, self._settings.max_endpoints)
        except BaseException:
            self._release(tenant, reservation)
            raise
        first, session = next(iter(placed.values())), ranked.request.session
        if mark:
            self._router.try_at(f"{tenant}/{first.worker}")
        if first is not picks[0]:
            self._release(tenant, reservation)
            reservation = ""
            if session is not None:
                keys = [(f"{tenant}/{pick.worker}", pick.dp_rank) for pick in (picks[0], first)]
                self._router.settle(session, *keys)
        if ranking.placed is not None:
            self._stats.record_session(ranking.placed)
        matched = first.row.loadable_blocks
        if reason == "load" and matched:
            reason = "prefix"
        ranks = Counter(pick.row.worker for pick in picks)
        targets = tuple(
            Target(
                endpoint,
                row.address,
                row.worker,
                row.dp_rank if row.dp_rank or ranks[row.worker] > 1 else None,
                row.loadable_blocks,
                self._fleet.start(f"{tenant}/{row.worker}"),
            )
            for endpoint, row in ((endpoint, pick.row) for endpoint, pick in placed.items())
        )
        prompt_blocks = first.row.prompt_blocks if reason in ("load", "prefix") else 0
        held_blocks = max(matched, *ranking.matched()[2:])
        return Placement(
            tenant, reason, targets, prompt_blocks, ranked.detail, reservation, time.monotonic(), held_blocks,
            ranked.promptless, ranked.request.model, session, mark,
        )  # fmt: skip


def _line(tenant: str, nbytes: int) -> str:
    """In which the tenant's bodies of about this size wait: one of 4 MiB takes as long as a hundred of 20 KiB."""
    return f"{tenant} {nbytes.bit_length() // 2}"


def _without(request: InferenceRequest, error: KVPoolError) -> _Ranked:
    """``error``: of the making of its tokens."""
    if isinstance(error, LongText):
        return _Ranked(request, None, "late", str(error))
    if isinstance(error, TooMuchText):  # nor is a worker asked for what is too much here
        return _Ranked(request, None, "too-large", str(error))
    if isinstance(error, ConfigError):  # images, or a chat that the template refuses
        return _Ranked(request, None, "refused", str(error), needs_render=True)
    return _Ranked(request, None, "busy", str(error))  # there is no room
