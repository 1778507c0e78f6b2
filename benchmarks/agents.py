"""``python -m benchmarks agents``: sessions of agents on a simulated fleet with a real index and a real pool.

Engines are scripted and time is simulated; ``Fleet``, ``Router``, ``Store`` and the server are those of production. All
policies get the same sessions. Then the smallest fleet loses a worker and the index in the middle, under each policy;
the smallest one of several hosts loses its pool, and has a slow one, under those that know near pools or could.
Others' routers and real engines run in real time, on fleets that a machine holds.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.agents_engines import engines_table, run_engines
from benchmarks.agents_fleet import POLICIES, Disturbance, Policy, Pools, Row, simulate
from benchmarks.agents_fronts import fronts_table, run_fronts
from benchmarks.agents_model import EngineModel
from benchmarks.agents_traffic import Traffic, made_up, traffic
from benchmarks.valkey_shards import find_server
from kvpool.discovery.trace import read_trace
from kvpool.errors import ConfigError

SEED = 42
MADE_UP = "made up"
# By the name of their list.
DISTURBANCES: dict[str, Disturbance | None] = {
    "rows": None, "kills": "kills", "far_killed": "far killed", "far_slow": "far slow",
}  # fmt: skip
LOSE_FAR = ("kvpool", "near")  # policies
BEFALLS = {
    None: "",
    "kills": " The busiest worker and the index are killed when half of the turns have come.",
    "far killed": " The fleet's pool is killed when half of the turns have come, and stays away.",
    "far slow": " Each worker's way to the fleet's pool has 8 MB/s from when half of the turns have come.",
}


@dataclass(frozen=True)
class _Case:
    trace: str
    traffic: Traffic
    policy: Policy
    workers: int
    disturbance: Disturbance | None


def run_agents(
    *,
    traces: Sequence[Path],
    workers: Sequence[int],
    sessions: int,
    apart_s: float,
    cache_nbytes: int,
    pools: Pools,
    only: Sequence[str],
    engines: bool,
    peers: Path | None,
    server: Path | None,
    as_json: bool,
) -> None:
    """Print tables or JSON. No ``traces``: sessions are made up. ``only``: policies; none: all.

    ``sessions``: of each trace; ``apart_s``: between their beginnings. ``engines``: real ones, too. ``peers``:
    environments of others' routers; None: without. Blocks for minutes. Errors: ``KVPoolError``.
    """
    names = [policy.name for policy in POLICIES]
    if unknown := set(only) - set(names):
        raise ConfigError(f"--only {min(unknown)}: the policies are {', '.join(names)}")
    program = find_server(server)
    console = Console(stderr=True)
    replayed = {
        path.name: traffic(read_trace(path), sessions=sessions, apart_s=apart_s) for path in traces
    } or {MADE_UP: traffic(made_up(sessions, SEED), sessions=sessions, apart_s=apart_s)}
    for trace, one in replayed.items():
        model = EngineModel(cache_nbytes, one.block_tokens)
        if model.blocks_of(one.longest_tokens) > model.blocks:
            raise ConfigError(
                f"{trace} has a prompt of {one.longest_tokens:,} tokens with its answer, and a cache has "
                f"{model.blocks * one.block_tokens:,}: raise --cache-bytes"
            )
    sizes = sorted(set(workers))
    cases = [
        _Case(trace, one, policy, count, disturbance)
        for trace, one in replayed.items()
        for disturbance in DISTURBANCES.values()
        for count in _disturbed(sizes, disturbance, pools)
        for policy in POLICIES
        if policy.name in (only or names)
        if disturbance in (None, "kills") or policy.name in LOSE_FAR
    ]
    rows: list[tuple[_Case, Row]] = []
    with (
        tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder,
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("", total=sum(case.traffic.turns for case in cases))

        def begins(doing: str) -> None:
            progress.update(task, description=doing)
            if not console.is_terminal:
                console.print(doing, soft_wrap=True)

        for number, case in enumerate(cases):
            disturbed = f", {case.disturbance}" if case.disturbance else ""
            begins(
                f"{number + 1}/{len(cases)} {case.trace}: {case.policy.name}, {case.workers} workers{disturbed}"
            )
            model = EngineModel(cache_nbytes, case.traffic.block_tokens)
            row = simulate(
                case.policy, case.workers, case.traffic, model, server=program, folder=Path(folder) / f"{number}",
                pools=pools, disturbance=case.disturbance, ended=partial(progress.advance, task),
            )  # fmt: skip
            rows.append((case, row))
        real = run_engines(program, begins) if engines else []
        routers = run_fronts(peers, begins) if peers is not None else []
    if as_json:
        shown = {"sessions": sessions, "apart_s": apart_s, "cache_nbytes": cache_nbytes, **asdict(pools)}
        lists = {
            name: [
                {"trace": case.trace, **asdict(row)} for case, row in rows if case.disturbance == disturbance
            ]
            for name, disturbance in DISTURBANCES.items()
        }
        lists |= {"engines": list(map(asdict, real)), "routers": list(map(asdict, routers))}
        print(json.dumps(shown | lists))
        return
    out = Console()
    if not out.is_terminal:  # a file has no width, and columns would be cut
        out = Console(width=140)
    for trace, one in replayed.items():
        for disturbance in DISTURBANCES.values():
            of = [row for case, row in rows if (case.trace, case.disturbance) == (trace, disturbance)]
            if of:
                out.print(_table(trace, one, of, disturbance))
    if real:
        out.print(engines_table(real))
    if routers:
        out.print(fronts_table(routers))


def _disturbed(sizes: Sequence[int], disturbance: Disturbance | None, pools: Pools) -> Sequence[int]:
    """The fleets, in workers, that such a run has."""
    if disturbance is None:
        return sizes
    if disturbance == "kills":
        return sizes[:1]
    return [size for size in sizes if size > pools.host_workers][:1] or sizes[-1:]


def _table(trace: str, replayed: Traffic, rows: Sequence[Row], disturbance: Disturbance | None) -> Table:
    sessions = f"{len(replayed.sessions):,} sessions, " if replayed.are_sessions else ""
    table = Table(
        title=f"{trace}: {sessions}{replayed.turns:,} turns on simulated workers.{BEFALLS[disturbance]} Ideal: hits "
        "over those of one endless cache. Near, far: blocks from the host's and from the fleet's pool, of all asked "
        "for. TTFT: seconds to the first token. Moved: GB from the fleet's pool, stored: into it. Duplicate: GB in "
        "device memory beside the first copy. Moved sessions had turns on several workers.",
        box=SIMPLE, padding=(0, 1, 0, 0),
    )  # fmt: skip
    columns = [
        "policy",
        "workers",
        "ideal",
        "near",
        "far",
        "TTFT p50",
        "p90",
        "p99",
        "moved",
        "stored",
        "duplicate",
    ]
    columns += ["moved sessions", "moves"] * replayed.are_sessions + ["failed"] * (disturbance == "kills")
    for name in columns:
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for row in rows:
        cells = [
            row.policy, f"{row.workers}", f"{row.hits_of_ideal:.1%}", f"{row.near_hits:.1%}", f"{row.far_hits:.1%}",
            f"{row.ttft_p50_s:.2f}", f"{row.ttft_p90_s:.2f}", f"{row.ttft_p99_s:.2f}", f"{row.moved_gb:,.0f}",
            f"{row.stored_gb:,.0f}", f"{row.duplicate_gb:,.0f}",
        ]  # fmt: skip
        cells += [f"{row.sessions_moved}", f"{row.moves:,}"] if replayed.are_sessions else []
        table.add_row(*cells, *([f"{row.failed}"] if disturbance == "kills" else []))
    return table
