"""``Status``: the status page's files, and its data: the fleet now, the last hour, the holders of a prompt.

Any caller gets the files, which have no data; data needs the token typed into the page. The headers forbid
all but these files: workers' names come from tenants, who may be hostile.

``_thread`` makes answers, and owns ``_rows`` and ``_made_s``: a pass over 10,000 workers takes a quarter of a
second, so one pass serves all requests within ``FRESH_S``. A task of the event loop takes samples, and owns them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from typing import Annotated, Any, NamedTuple, TypeVar
from uuid import uuid4

import msgspec
from aiohttp import web

from kvpool.discovery.quota import fullest_first
from kvpool.discovery.traffic import Seen
from kvpool.discovery.worker import DEFAULT_TENANT
from kvpool.errors import ConfigError
from kvpool.index import limits
from kvpool.index.answer import HitCurve, Pick
from kvpool.index.cost.router import Router
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.follow.hit_curves import ALL
from kvpool.index.follow.pool_follower import PoolFollower, total
from kvpool.index.net.listener import SERVER, HttpRequest, Refused, json_reply
from kvpool.index.prompt import Prompt
from kvpool.index.protocol.messages import MAX_U32
from kvpool.index.request_stats import PlacedRequests, RequestStats, Reuse
from kvpool.index.serve.auth import ALL_TENANTS, Permissions
from kvpool.index.serve.lookup_calls import in_tokens
from kvpool.index.serve.worker_rows import HEALTHS, WorkerRow, page_of, rows_of
from kvpool.index.tokens.tokenizers import Tokenizers
from kvpool.key.hashing import len_tokens
from kvpool.store.server.connection import library_version

EVERY_S = 5.0  # between two samples
SAMPLES = 720  # an hour
FRESH_S = 1.0
MAX_ROWS = 200  # of workers in one answer
ROWS = 50
MAX_MODELS = 200  # named in an answer
MAX_QUOTAS = 50  # tenants in an answer
MAX_AUDITS = 50  # engines in an answer
MAX_HOLDERS = 50  # ranks in an answer about a prompt
MAX_PROMPT_NBYTES = 1 << 20  # of JSON: 200,000 tokens; decoded with the interpreter's lock held, 10 ms
MAX_FIND_CHARS = 128
HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}

_OF_ROW = (
    "worker", "dp_rank", "block_tokens", "prompt_blocks", "device_blocks", "local_blocks", "pool_blocks",
    "loadable_blocks", "stale",
)  # fmt: skip
_OF_PICK = ("trust", "asleep", "unreachable", "cost", "queue_cost")

Value = TypeVar("Value")


class _Question(msgspec.Struct, forbid_unknown_fields=True):
    """The holders of this prompt. One of ``text`` and ``token_ids``."""

    model: str
    tenant: str = DEFAULT_TENANT
    text: str | None = None
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, le=MAX_U32)]] | None = None


class Sample(NamedTuple):
    """``at_s``: seconds since the start. ``reuse``, ``placed``: since then. ``pool_nbytes``: used; None: unknown."""

    at_s: float
    reuse: Reuse
    placed: PlacedRequests
    pool_nbytes: int | None


class Status:
    """``pool``: None: absent. ``is_serving``: of health. ``start`` it in the event loop, then ``close``.

    Its lookups are in no hit ratio. ``every_s``: between two samples of the last hour.
    """

    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        tokenizers: Tokenizers,
        stats: RequestStats,
        pool: PoolFollower | None,
        is_serving: Callable[[], bool],
        *,
        every_s: float = EVERY_S,
    ) -> None:
        self._fleet, self._router, self._tokenizers = fleet, router, tokenizers
        self._stats, self._pool, self._is_serving = stats, pool, is_serving
        self._every_s = every_s
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)
        self._taken = 0  # samples in all
        self._started_s = time.monotonic()
        self._sampling: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "kvpool-status")
        self._instance = uuid4().hex
        self._rows: list[WorkerRow] = []
        self._made_s = 0.0

    def start(self) -> None:
        self._sampling = asyncio.create_task(self._sample())

    async def close(self) -> None:
        """Waits for running answers, a few seconds at most."""
        if self._sampling is not None:
            self._sampling.cancel()
            await asyncio.gather(self._sampling, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown)

    # ---- the calls

    async def data(self, request: HttpRequest, caller: Permissions) -> web.Response:
        """The fleet, as far as the caller may see it; a page of its workers. Errors: ``ConfigError`` for the query."""
        caller.check("read", None)
        limit = _whole(request.query, "limit", ROWS, MAX_ROWS)
        since = _whole(request.query, "since", 0, 1 << 53)
        if (health := request.query.get("health", "")) and health not in HEALTHS:
            raise ConfigError(f"health is one of {', '.join(HEALTHS)}, not {health!r:.40}")
        find = request.query.get("find", "")[:MAX_FIND_CHARS].casefold()
        after = request.query.get("after", "").partition("/")
        curve = request.query.get("curve", ALL)
        with self._fleet.limits.calls(limits.PAGES, f"{request.host}:", caller.tenants):
            is_serving = self._is_serving()
            history = self._since(since)

            def answer() -> bytes:
                seen = [row for row in self._looked() if caller.sees(row.status.worker.tenant)]
                shown: dict[str, Any] = {
                    "index": {
                        "instance": self._instance,
                        "version": library_version(),
                        "serving": is_serving,
                        "uptime_s": time.monotonic() - self._stats.started_s,
                    },
                    "fleet": self._summary(seen),
                    "workers": page_of(seen, (after[0], after[2]), limit, health, find),
                    "totals": None,  # sums over all tenants are for callers with all tenants
                    "pool": None,
                    "traffic": None,
                    "history": None,
                    "curve": self._curve(caller, curve),
                    "quotas": self._quotas(caller),
                    "audits": self._audits(caller),
                }
                if caller.sees(ALL_TENANTS):
                    shown |= self._of_all()
                    shown["history"] = history
                return msgspec.json.encode(shown)

            return json_reply(await self._in_thread(answer), headers=HEADERS)

    async def prompt(self, request: HttpRequest, caller: Permissions) -> web.Response:
        """Ranks by their blocks of a prompt, those with the most first. Errors: as ``Fleet.lookup``."""
        caller.check("read", None)
        with self._fleet.limits.calls(limits.PAGES, f"{request.host}:", caller.tenants):
            question = await self._in_thread(lambda: _decode(request))
            caller.check("read", question.tenant)
            prompt = Prompt(question.model, question.token_ids, text=question.text, tenant=question.tenant)
            prompt = await in_tokens(prompt, self._fleet, self._tokenizers)
            reply = await self._in_thread(lambda: msgspec.json.encode(self._holders(prompt)))
            return json_reply(reply, headers=HEADERS)

    async def _sample(self) -> None:
        while True:
            totals = self._stats.totals()
            servers = [] if self._pool is None else self._pool.servers
            used_nbytes = total(one.used_nbytes for one in servers)
            at_s = time.monotonic() - self._started_s
            self._samples.append(Sample(at_s, totals.reuse, totals.placed, used_nbytes))
            self._taken += 1
            await asyncio.sleep(self._every_s)

    def _since(self, number: int) -> dict[str, Any]:
        """All kept samples from ``number`` on, and the number of the first."""
        first = self._taken - len(self._samples)
        begin = number if first <= number <= self._taken else first
        samples = [
            (round(one.at_s, 1), *one.reuse, *one.placed, one.pool_nbytes)
            for one in list(self._samples)[begin - first :]
        ]
        return {"every_s": self._every_s, "first": begin, "samples": samples}

    # ---- in the thread

    def _looked(self) -> list[WorkerRow]:
        if time.monotonic() - self._made_s > FRESH_S:
            self._rows = rows_of(self._fleet.workers(), self._router.loads)
            self._made_s = time.monotonic()
        return self._rows

    def _summary(self, rows: Sequence[WorkerRow]) -> dict[str, Any]:
        health = Counter(row.health for row in rows)
        models = Counter((row.status.worker.tenant, row.status.worker.model) for row in rows)
        named = sorted(models)[:MAX_MODELS]
        return {
            "workers": len(rows),
            "ranks": sum(len(row.status.publishers) for row in rows),
            "health": {name: health[name] for name in HEALTHS},
            "staleness_ms": max((row.staleness_ms for row in rows if row.health != "silent"), default=0),
            "tiers": {tier: sum(row.blocks(tier) for row in rows) for tier in ("device", "host", "disk")},
            "models": [
                {"tenant": tenant, "model": model, "tokenizer": model in self._tokenizers}
                for tenant, model in named
            ],
            "models_left_out": len(models) - len(named),
        }

    def _of_all(self) -> dict[str, Any]:
        totals, stats = self._fleet.totals(), self._stats.totals()
        servers = [] if self._pool is None else self._pool.servers
        pool = {
            "servers": len(servers),
            "away": [one.server for one in servers if not one.up],
            "used_nbytes": total(one.used_nbytes for one in servers),
            "capacity_nbytes": total(one.capacity_nbytes for one in servers),  # None: a server has no limit
            "evicted_keys": total(one.evicted for one in servers),
        }
        return {
            "totals": {
                "blocks": totals.blocks,
                "near_blocks": totals.near_blocks,
                "pool_blocks": totals.pool_blocks,
                "evicted_blocks": totals.evicted_blocks,
                "memory_nbytes": totals.memory_nbytes,
                "lookups": stats.lookups,
                "placements": sum(stats.placements.values()),
            },
            "pool": None if self._pool is None else pool,
            "traffic": None if self._pool is None else _windows(self._pool.traffic),
        }

    def _curve(self, caller: Permissions, name: str) -> dict[str, Any] | None:
        """The curve of this tenant, or of all; None: there is none that the caller may see."""
        curves = {} if self._pool is None else self._pool.curves
        seen = [one for one in sorted(curves) if caller.sees(ALL_TENANTS if one == ALL else one)]
        if not seen:
            return None
        shown = name if name in seen else seen[0]
        return {"tenant": shown, "tenants": seen, **_packed(curves[shown])}

    def _quotas(self, caller: Permissions) -> list[dict[str, Any]]:
        """Of the tenants that the caller may see, the fullest first."""
        standings = {} if self._pool is None else self._pool.standings
        seen = fullest_first((tenant, one) for tenant, one in standings.items() if caller.sees(tenant))
        return [one.as_json(tenant) for tenant, one in seen[:MAX_QUOTAS]]

    def _audits(self, caller: Permissions) -> dict[str, Any] | None:
        """Of engines of the tenants that the caller may see: sums, and the worst first. None: nobody audits hits."""
        audits = () if self._pool is None else self._pool.audits
        seen = [one for one in audits if caller.sees(one.tenant)]
        if not seen:
            return None
        sums = {name: sum(getattr(one, name) for one in seen) for name in ("same", "differing", "unjudged")}
        return {"engines": len(seen), **sums, "rows": [asdict(one) for one in seen[:MAX_AUDITS]]}

    def _holders(self, prompt: Prompt) -> dict[str, Any]:
        picks = self._router.rank(prompt, takes_turn=False).unpack().picks
        ordered = sorted(picks, key=_by_held)
        assert prompt.token_ids is not None
        return {
            "tokens": len_tokens(prompt.token_ids),
            "ranks": len(picks),
            "holding": sum(pick.row.loadable_blocks > 0 for pick in picks),
            "rows": [_holder(pick, is_first=pick is picks[0]) for pick in ordered[:MAX_HOLDERS]],
        }

    async def _in_thread(self, work: Callable[[], Value]) -> Value:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _windows(traffic: Mapping[str, Seen]) -> dict[str, Any]:
    """Requested blocks of the engines, by window; without empty windows."""
    return {window: {"hit_ratio": seen.hit_ratio} for window, seen in traffic.items() if seen.prompt_tokens}


def _packed(curve: HitCurve) -> dict[str, Any]:
    points = [(size, round(rate, 4)) for size, rate in zip(curve.sizes, curve.hit_rates, strict=True)]
    of_curve = ("requests", "requested_blocks", "share", "since_s", "pool_blocks", "block_nbytes")
    return {"points": points} | {name: getattr(curve, name) for name in of_curve}


def _by_held(pick: Pick) -> tuple[int, int, str, int]:
    row = pick.row
    size = row.block_tokens
    return -row.loadable_blocks * size, -row.device_blocks * size, row.worker, row.dp_rank


def _holder(pick: Pick, *, is_first: bool) -> dict[str, Any]:
    of_row = {name: getattr(pick.row, name) for name in _OF_ROW}
    return of_row | {name: getattr(pick, name) for name in _OF_PICK} | {"first": is_first}


def _decode(request: HttpRequest) -> _Question:
    if len(request.raw) > MAX_PROMPT_NBYTES:
        line = f"the page asks about prompts of at most {MAX_PROMPT_NBYTES} bytes: use kvpool lookup"
        raise Refused(413, "RESOURCE_EXHAUSTED", line)
    try:
        question = msgspec.json.decode(request.raw, type=_Question)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"the question is not what is read here: {said:.200}") from error
    if question.text == "":
        raise ConfigError("the prompt is empty")
    return question


def _whole(query: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = query.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 16 or not 0 <= int(text) <= most:
        raise ConfigError(f"{name} is a whole number up to {most}, not {text!r:.40}")
    return int(text)


# ---- the files

STATUS_PATH = "/status"
_MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
FILES = (
    "status.css", "icon.svg", "main.js", "dom.js", "format.js", "overview.js", "chart.js", "workers.js", "prompt.js",
    "curve.js",
)  # fmt: skip
FILE_HEADERS = {
    **SERVER,
    # Trusted types: a script that makes HTML of text fails in the browsers that know them.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def file_replies() -> dict[str, Callable[[], web.Response]]:
    """By path: of each file, and from ``/`` to the page. Reads them once. Blocking, for ten small files."""
    paths = {STATUS_PATH: "index.html"} | {f"{STATUS_PATH}/{name}": name for name in FILES}
    replies: dict[str, Callable[[], web.Response]] = {
        path: partial(
            web.Response,
            body=(files("kvpool.index.serve") / "page" / name).read_bytes(),
            headers={**FILE_HEADERS, "content-type": _MEDIA_TYPES[name.rpartition(".")[2]]},
        )
        for path, name in paths.items()
    }
    to_page = {**FILE_HEADERS, "location": STATUS_PATH.lstrip("/")}
    return replies | {"/": partial(web.Response, status=307, headers=to_page)}
