"""``python -m benchmarks e2e``: real vLLM engines with and without a pool, and with its peers.

First an engine with an empty pool answers everything: its tokens are the reference, and its stores fill the
pool. Then one warmed-up engine per arm runs at the same time; they alternate every few requests, so that
disturbances hit all, and each becomes quiet before the next turn. Last come the probes: new prompts, each
asked twice.

An arm is unavailable, with the engine's words, when its engine does not start or complains early; the arms
``OFF`` and ``OWN`` must start.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.e2e_report import HOST, LMCACHE, OFF, OWN, Answer, Report, draw, show
from benchmarks.e2e_workload import Conversations, Workload, draw_workload, longest_prompt_tokens
from demo.engine_process import (
    EngineFailed,
    EngineProcess,
    connector_config,
    small_engine,
    write_model,
)
from demo.workspace import doing, workspace
from kvpool.errors import ConfigError
from kvpool.key.hashing import BlockHasher
from kvpool.key.key import tenant_prefix
from kvpool.store import StoreURL, open_for_inspection, open_store
from kvpool.text import redact

BLOCK_TOKENS = 128
ANSWER_TOKENS = 16
KV_CACHE_TOKENS = 8192
TURN_REQUESTS = 5
HOST_TIER_NBYTES = 2 << 30
POOL_CAPACITY = "8GiB"
DELETE_TIMEOUT_S = 60.0
PEER_FOLDER = "lmcache-engine"  # below the peers' folder: LMCache for vLLM's interpreter


@dataclass(frozen=True)
class _Arm:
    """``is_shared``: another engine fills its cache first. ``is_needed``: no report without it."""

    name: str
    transfer: dict[str, Any] | None
    environment: Mapping[str, str] = field(default_factory=dict)
    is_shared: bool = False
    is_needed: bool = False


@dataclass(frozen=True)
class Asked:
    """One request, the same in every arm. ``answer``: the first engine's; empty before."""

    kind: str
    number: int
    prompt: list[int]
    answer: list[int]


def run_e2e(
    *,
    pool: str | None,
    chats: int,
    documents: int,
    probes: int,
    prompt_tokens: int,
    width: int,
    layers: int,
    seed: int,
    host_tier: bool,
    peers: Path | None,
    plot: Path | None,
    as_json: bool,
) -> bool:
    """Measure and print; True for a valid run. Starts three or four engines. Errors: ``KVPoolError``."""
    if width % 256:
        raise ConfigError(f"--width {width}: write a multiple of 256")
    console = Console(stderr=True)
    if plot is not None:
        draw(None, plot)  # reports unwritable files early
    workload = draw_workload(
        seed=seed, chats=chats, documents=documents, prompt_tokens=prompt_tokens, probes=probes
    )
    with workspace("kvpool-bench-", console, keep=False) as folder:
        url = pool or f"file://{folder}/pool?capacity={POOL_CAPACITY}"
        open_store(url).close()  # reports a wrong pool early
        tenant = f"bench-e2e-{secrets.token_hex(4)}"
        unavailable: dict[str, str] = {}
        arms = _arms(url, tenant, host_tier, peers, unavailable)
        with doing(console, "a tiny model with random weights is written"):
            model = write_model(folder / "model", width=width, layers=layers)
        token_nbytes = width * layers * 4  # K and V of half the model's heads, 4 bytes a number
        longest = longest_prompt_tokens(prompt_tokens, ANSWER_TOKENS) + ANSWER_TOKENS
        kv_cache_tokens = max(KV_CACHE_TOKENS, 2 * longest)
        options = small_engine(
            model,
            block_tokens=BLOCK_TOKENS,
            longest_tokens=longest,
            kv_cache_nbytes=kv_cache_tokens * token_nbytes,
        )
        with emptied(url, tenant) if pool else contextlib.nullcontext():
            contest = _Contest(folder, options, workload, unavailable, console)
            answers = contest.run(arms)
    report = Report(
        pool=redact(url) if pool else "a directory",
        seed=seed,
        prompt_tokens=prompt_tokens,
        block_tokens=BLOCK_TOKENS,
        held_tokens=contest.held_tokens,
        kv_cache_tokens=kv_cache_tokens,
        unavailable=unavailable,
        answers=answers,
    )
    if plot is not None:
        draw(report, plot)
    show(report, as_json)
    return not report.faults


def _arms(
    pool: str, tenant: str, host_tier: bool, peers: Path | None, unavailable: dict[str, str]
) -> list[_Arm]:
    arms = [_Arm(OFF, None, is_needed=True)]
    if host_tier:
        extra = {"cpu_bytes_to_use": HOST_TIER_NBYTES}
        transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
        arms.append(_Arm(HOST, {**transfer, "kv_connector_extra_config": extra}))
    else:
        unavailable[HOST] = "it was not asked for: --no-host-tier"
    arms.append(_Arm(OWN, connector_config(pool, {"tenant": tenant}), is_shared=True, is_needed=True))
    server = StoreURL.parse(pool)
    if peers is None:
        unavailable[LMCACHE] = "it was not asked for: --peers"
    elif server.scheme != "valkey" or not server.host or server.password or server.database:
        unavailable[LMCACHE] = "it is set against a plain server: --pool valkey://HOST:PORT --peers"
    else:
        arms.append(_lmcache(server, peers / PEER_FOLDER))
    return arms


def _lmcache(server: StoreURL, installed: Path) -> _Arm:
    if not (installed / "lmcache").is_dir():
        raise ConfigError(f"{installed}: LMCache is not there; make bench-peers installs it")
    return _Arm(
        LMCACHE,
        {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
        {
            "PYTHONPATH": str(installed.resolve()),
            "PYTHONHASHSEED": "0",  # it hashes by the interpreter's own
            "LMCACHE_CHUNK_SIZE": str(BLOCK_TOKENS),
            "LMCACHE_LOCAL_CPU": "False",
            "LMCACHE_REMOTE_URL": f"redis://{server.host}:{server.port}",
            "LMCACHE_REMOTE_SERDE": "naive",
            "LMCACHE_TRACK_USAGE": "false",
        },
        is_shared=True,
    )


class _Contest:
    """``unavailable``: reasons, by arm. ``held_tokens``: of a cache with all prompts' full blocks."""

    def __init__(
        self,
        folder: Path,
        options: dict[str, Any],
        workload: Workload,
        unavailable: dict[str, str],
        console: Console,
    ) -> None:
        self._folder, self._options, self._workload, self._console = folder, options, workload, console
        self._unavailable = unavailable
        self.held_tokens = 0

    def run(self, arms: Sequence[_Arm]) -> list[Answer]:
        """Errors: ``EngineFailed``, of a needed arm, or midway."""
        [own] = [arm for arm in arms if arm.name == OWN]
        with self._engine(own, "fills") as engine:
            self._started(own, engine)
            with doing(self._console, "it answers first, and fills the pool"):
                asked = self._answered_first(engine)
        for arm in arms:
            if arm.is_shared and arm is not own:
                with self._engine(arm, "fills") as engine:
                    if self._started(arm, engine):
                        with doing(self._console, f"it fills what {arm.name} reads"):
                            self._fill(engine, asked)
        wanted = [arm for arm in arms if arm.name not in self._unavailable]
        with contextlib.ExitStack() as running:
            up = [(arm, running.enter_context(self._engine(arm, "reads"))) for arm in wanted]
            up = [(arm, engine) for arm, engine in up if self._started(arm, engine)]
            with doing(self._console, "they warm up"):
                for _, engine in up:
                    self._warm_up(engine)
            return self._measured(up, asked)

    def _engine(self, arm: _Arm, does: str) -> EngineProcess:
        options = dict(self._options)
        if arm.transfer is not None:
            options["kv_transfer_config"] = arm.transfer
        return EngineProcess(f"{arm.name} {does}".replace(" ", "-"), self._folder, options, arm.environment)

    def _started(self, arm: _Arm, engine: EngineProcess) -> bool:
        """Whether it can be measured; the reason why not goes to ``unavailable``."""
        with doing(self._console, f"the engine of arm {arm.name} starts"):
            try:
                engine.wait_ready()
            except EngineFailed as error:
                if arm.is_needed:
                    raise
                self._unavailable[arm.name] = engine.complaint() or str(error)
                return False
        # LMCache continues without its own engine, and then delays each request.
        complaint = None if arm.is_needed else engine.complaint()
        if complaint is not None:
            self._unavailable[arm.name] = complaint
        return complaint is None

    def _answered_first(self, engine: EngineProcess) -> list[Asked]:
        said = Conversations(self._workload)
        asked: list[Asked] = []
        for number, request in enumerate(self._workload.requests):
            prompt = said.prompt(request)
            answer = engine.generate(prompt, ANSWER_TOKENS)["tokens"]
            said.answered(request, prompt, answer)
            asked.append(Asked(request.kind, number, prompt, answer))
        hasher = BlockHasher(BLOCK_TOKENS)
        self.held_tokens = BLOCK_TOKENS * len({block for one in asked for block in hasher.hashes(one.prompt)})
        for number, probe in enumerate(self._workload.probes):
            prompt = list(probe)
            asked.append(Asked("probe", number, prompt, engine.generate(prompt, ANSWER_TOKENS)["tokens"]))
        engine.generate(list(self._workload.warm_up), ANSWER_TOKENS)
        return asked

    def _fill(self, engine: EngineProcess, asked: Sequence[Asked]) -> None:
        for prompt in [*(one.prompt for one in asked), list(self._workload.warm_up)]:
            engine.generate(prompt, ANSWER_TOKENS)

    def _warm_up(self, engine: EngineProcess) -> None:
        shared = list(self._workload.warm_up)
        for prompt in (shared, shared, shared[::-1]):
            engine.generate(prompt, ANSWER_TOKENS)
        engine.wait_quiet()

    def _measured(self, up: Sequence[tuple[_Arm, EngineProcess]], asked: Sequence[Asked]) -> list[Answer]:
        answers: list[Answer] = []
        turns = list(_turns(asked))
        progress = Progress(console=self._console, transient=True, disable=not self._console.is_terminal)
        with progress:
            task = progress.add_task("asking", total=len(turns) * len(up))
            for number, turn in enumerate(turns):
                first = number % len(up)
                for arm, engine in [*up[first:], *up[:first]]:
                    progress.update(task, description=f"asking {arm.name}")
                    answers += [ask(engine, arm.name, one) for one in turn]
                    if not engine.wait_quiet():
                        self._console.print(f"{engine.name} does not become quiet", highlight=False)
                    progress.advance(task)
        return answers


def _turns(asked: Sequence[Asked]) -> Iterator[list[Asked]]:
    """A few requests at a time; then each probe, twice."""
    requests = [one for one in asked if one.kind != "probe"]
    for at in range(0, len(requests), TURN_REQUESTS):
        yield requests[at : at + TURN_REQUESTS]
    for one in asked:
        if one.kind == "probe":
            yield [one, replace(one, kind="again")]


def ask(engine: EngineProcess, arm: str, one: Asked) -> Answer:
    """Blocks. Errors: ``EngineFailed``."""
    said = engine.generate(one.prompt, ANSWER_TOKENS)
    return Answer(
        arm=arm,
        kind=one.kind,
        number=one.number,
        prompt_tokens=len(one.prompt),
        cached_tokens=said["cached_tokens"],
        loaded_tokens=int(said["pool_tokens"]),
        answer_tokens=len(said["tokens"]),
        first_token_s=said["first_token_s"],
        finished_s=said["finished_s"],
        identical=said["tokens"] == one.answer,
    )


@contextlib.contextmanager
def emptied(pool: str, tenant: str) -> Iterator[None]:
    """A tenant of this run, removed from the pool at the end."""
    try:
        yield
    finally:
        prefix = tenant_prefix(tenant)
        for url in StoreURL.parse(pool).pools():
            with open_for_inspection(url) as store:
                for batch in store.scan(prefix):
                    store.delete_many([block.key for block in batch], timeout_s=DELETE_TIMEOUT_S)
                store.withdraw_all(prefix)
