"""``kvpool top`` beside a real index, on a pipe and on a terminal; and the arithmetic of two looks.

Over 400 lines because each part of the screen is looked at as a user sees it.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from kvpool.cli import top
from kvpool.cli.settings import TopOptions
from kvpool.cli.tables import show
from kvpool.cli.top import Look, rates_of, rows_of
from kvpool.discovery.quota import Standing
from kvpool.index import (
    EngineAudits,
    FleetStatus,
    IndexStatus,
    Publisher,
    PublisherStatus,
    Worker,
    WorkerStatus,
)
from kvpool.index.answer import worst_first
from kvpool.index.client.client import IndexClient
from kvpool.index.fleet.fleet import Fleet
from kvpool.key.hashing import seed_id
from tests.support.command_line import kvpool, kvpool_process, refused
from tests.support.deadlines import eventually
from tests.support.fleets import Served, a_worker, say, serving
from tests.support.wire import batch, packed64, stored

KVPOOL = str(Path(sys.executable).parent / "kvpool")


@pytest.fixture
def served() -> Iterator[Served]:
    fleet = Fleet()
    fleet.add(a_worker("w-1", ranks=2), "flag")
    fleet.add(a_worker("w-2"), "call", 60)
    say(fleet, "default/w-1", 0, 0, batch(stored([1, 2, 3]), stored([4], medium="CPU")))
    fleet.rank("default/w-2", 0).mark(stale=True, problem="it does not answer")
    with serving(fleet) as running:
        yield running


# ---- on a pipe


@pytest.mark.usefixtures("grpc_started")
def test_once(served: Served) -> None:
    served.fleet.lookup("m", hashes64=packed64([1, 2]))
    shown = kvpool("top", "--index", served.target, "--once", env={**os.environ, "COLUMNS": "120"})
    assert (shown.returncode, shown.stderr) == (0, "")
    assert re.search(r"up [0-9]+ s: 2 workers, 3 ranks, 2 stale\n", shown.stdout), shown.stdout
    assert "the index knows 4 blocks, 0 in the pool, and takes " in shown.stdout
    assert "\n0 placements\n" in shown.stdout
    assert re.search(r"w-1 rank 0 +w-1:8000 +ok +3 +1 +0 +- ", shown.stdout), shown.stdout
    assert re.search(r"w-1 rank 1 +w-1:8000 +stale .* not heard from yet", shown.stdout), shown.stdout
    assert re.search(r"w-2 rank 0 +w-2:8000 +stale .* it does not answer", shown.stdout), shown.stdout
    by_device = kvpool("top", "--index", served.target, "--once", "--sort", "device", "--most", "1").stdout
    assert "w-1 rank 0" in by_device
    assert "w-2" not in by_device
    assert "and 2 more ranks, 2 of them stale" in by_device
    for columns in ("50", "60", "79"):
        narrow = kvpool("top", "--index", served.target, "--once", env={**os.environ, "COLUMNS": columns})
        assert max(map(len, narrow.stdout.splitlines())) <= int(columns)
        words = " ".join(narrow.stdout.split())
        assert "w-2" in words
        assert "stale" in words
        assert "no room for" in words
        assert "…" not in words, "nothing is cut"
    piped = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    whole = kvpool_process("top", "--index", served.target, "--once", env=piped)
    assert "no room" not in whole.stdout
    assert re.search(r"w-1 rank 1 +w-1:8000 .* 0 +0 +0 +not heard from yet", whole.stdout), whole.stdout


def screen(width: int, *ranks: PublisherStatus) -> str:
    """Of a worker for each of ``ranks``, with a name and an address as in Kubernetes."""
    workers = tuple(
        WorkerStatus(
            replace(a_worker(f"vllm-7c9d8f6b5-x2x4{n}"), address=f"http://10.244.12.{n}:8000"),
            "pool",
            0,
            (one,),
        )
        for n, one in enumerate(ranks)
    )
    status = FleetStatus(IndexStatus(), workers)
    watch = top._Watch(cast(IndexClient, SimpleNamespace(status=lambda **_: status)), TopOptions())
    watch.look()
    out = Console(file=io.StringIO(), width=width)
    show(out, *watch.parts(width, 0))
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_what_is_0_for_all_has_no_room_first() -> None:
    page = screen(80, PublisherStatus(0, device_blocks=5), PublisherStatus(0, device_blocks=6, gaps=4))
    head = next(line.split() for line in page.splitlines() if line.startswith("worker"))
    assert head == ["worker", "address", "state", "device", "batch/s", "lag", "gaps"]
    assert page.endswith("no room for host, disk, replays, resets (0 in all rows); --json has all\n")
    narrow = screen(60, PublisherStatus(0, device_blocks=5), PublisherStatus(0, device_blocks=6, gaps=4))
    said = "no room for host, disk, replays, resets (0 in all rows), batch/s, gaps; --json has all"
    assert " ".join(narrow.split()).endswith(said)


def test_a_problem_hides_no_address() -> None:
    problem = "it does not answer at tcp://10.244.12.1:5557: connection refused"
    ranks = (PublisherStatus(0, device_blocks=5), PublisherStatus(0, stale=True, problem=problem))
    narrow, wide = screen(80, *ranks), screen(200, *ranks)
    assert max(map(len, narrow.splitlines())) <= 80
    for page in (narrow, wide):
        assert "10.244.12.0:8000" in page
        assert "10.244.12.1:8000" in page
    assert f"vllm-7c9d8f6b5-x2x41: {problem}" in " ".join(narrow.split())
    assert re.search(rf"x2x41 .* {problem}\n", wide), wide


@pytest.mark.usefixtures("grpc_started")
def test_a_worker_that_sleeps_or_has_no_events_is_not_called_stale(served: Served) -> None:
    served.fleet.add(a_worker("night"), "call")
    say(served.fleet, "default/night", 0, 0, batch(stored([1])))
    served.fleet.rank("default/night", 0).empty(1)
    served.fleet.add(a_worker("mute", publishers=(Publisher(0, ""),)), "call")
    served.fleet.rank("default/mute", 0).mark(stale=True, problem="it publishes no KV events")
    shown = kvpool("top", "--index", served.target, "--once", env={**os.environ, "COLUMNS": "120"}).stdout
    assert "4 workers, 5 ranks, 2 stale" in shown
    assert re.search(r"night rank 0 +night:8000 +asleep +1 ", shown), shown
    assert re.search(r"mute rank 0 +mute:8000 +no events +0 +0 +0 +- +- +0 ", shown), shown
    assert served.fleet.totals().stale_ranks == 2
    assert not [line for line in shown.splitlines() if line != line.rstrip()], "blanks behind a line"


@pytest.mark.usefixtures("grpc_started")
def test_no_worker() -> None:
    with serving(Fleet()) as running:
        asked = ("top", "--index", running.target, "--once")
        assert "no worker is in this index: it finds those" in kvpool(*asked).stdout
        assert "no worker of this tenant and model" in kvpool(*asked, "--model", "m").stdout


@pytest.mark.usefixtures("grpc_started")
def test_json_is_stable(served: Served) -> None:
    shown = json.loads(kvpool("top", "--index", served.target, "--once", "--json", "--sort", "host").stdout)
    assert list(shown) == ["index", "ranks", "quotas", "audits"]
    assert shown["index"].pop("uptime_ms") >= 0
    assert shown["index"].pop("instance_id")
    assert shown["index"].pop("memory_nbytes") > 0
    assert shown["index"] == {
        "lookups": 0, "prompt_blocks": 0, "device_blocks": 0, "local_blocks": 0, "pool_blocks": 0, "held_blocks": 4,
        "held_pool_blocks": 0, "lookups_per_s": None, "device_ratio": None, "local_ratio": None, "pool_ratio": None,
        "placements": 0, "placed_prompt_blocks": 0, "placed_matched_blocks": 0, "placements_per_s": None,
        "placed_ratio": None, "pool_servers": 0, "pool_servers_away": 0,
    }  # fmt: skip
    first, second, third = shown["ranks"]
    assert first.pop("staleness_ms") >= 0
    assert first == {
        "tenant": "default", "worker": "w-1", "dp_rank": 0, "model": "m", "source": "flag", "device_blocks": 3,
        "host_blocks": 1, "disk_blocks": 0, "batches": 1, "batches_per_s": None, "stale": False, "publishes": True,
        "gaps": 0, "replays": 0, "resets": 0, "problem": "", "address": "http://w-1:8000",
    }  # fmt: skip
    assert [(row["worker"], row["dp_rank"], row["stale"]) for row in (second, third)] == [
        ("w-1", 1, True), ("w-2", 0, True),
    ]  # fmt: skip
    of_tenant = kvpool("top", "--index", served.target, "--once", "--json", "--tenant", "other").stdout
    assert json.loads(of_tenant)["ranks"] == []


@pytest.mark.usefixtures("grpc_started")
def test_quotas_are_shown_the_fullest_first() -> None:
    gib = 1 << 30
    standings = {f"t{number}": Standing(10 * gib, number * gib, is_said=True) for number in range(6)}
    standings |= {"over": Standing(gib, 2 * gib, is_said=True), "new": Standing(gib, is_said=True)}
    with serving(Fleet(), pool=SimpleNamespace(standings=standings, servers=[], audits=())) as running:
        asked = ("top", "--index", running.target, "--once")
        wide = {**os.environ, "COLUMNS": "120"}
        lines = [line for line in kvpool(*asked, env=wide).stdout.splitlines() if "quota" in line]
        told = json.loads(kvpool(*asked, "--json").stdout)["quotas"]
        alone = kvpool(*asked, "--tenant", "new", env=wide).stdout
    assert lines == [
        "tenant over holds 2.0 GiB of a quota of 1.0 GiB (200%): its workers store nothing new",
        *(f"tenant t{n} holds {n}.0 GiB of a quota of 10.0 GiB ({10 * n}%)" for n in (5, 4, 3, 2)),
        "and 3 more tenants with a quota",
    ]
    assert len(told) == 8
    assert {"tenant": "new", "quota_nbytes": gib, "held_nbytes": None} in told
    assert "tenant new has a quota of 1.0 GiB; what it holds is not counted yet" in alone


@pytest.mark.usefixtures("grpc_started")
def test_what_audits_found_is_shown_the_worst_first() -> None:
    bad = "cd" * 16
    now_s = time.time()
    audits = worst_first(
        [
            *(
                EngineAudits(
                    "default", f"gpu-{n}", f"{n:032x}", 100, n, found_writers=(bad,), found_s=now_s - 60 * n
                )
                for n in range(1, 8)
            ),
            EngineAudits("other", "gpu-9", "ab" * 16, 5, 3, 8, "it computes other than 3 writers", (bad,)),
            EngineAudits("other", "gpu-8", "ef" * 16, 1000),
        ]
    )
    with serving(Fleet(), pool=SimpleNamespace(standings={}, servers=[], audits=audits)) as running:
        asked = ("top", "--index", running.target, "--once")
        wide = {**os.environ, "COLUMNS": "160"}
        lines = [
            line for line in kvpool(*asked, env=wide).stdout.splitlines() if re.search("engine|doctor", line)
        ]
        told = json.loads(kvpool(*asked, "--json").stdout)["audits"]
        alone = kvpool(*asked, "--tenant", "other", env=wide).stdout
    assert lines == [
        "1,736 audited hits of 9 engines, of which 31 differ",
        "engine abababab on gpu-9 doubts itself, and goes without the pool: it computes other than 3 writers",
        f"engine 00000000 on gpu-1 computes other than 1 block, the last 1 min ago, written by {bad}",
        *(
            f"engine 00000000 on gpu-{n} computes other than {n} blocks, the last {n} min ago, written "
            f"by {bad}"
            for n in (2, 3, 4)
        ),
        "and 3 more engines with findings",
        "kvpool doctor --pool says what to do about them",
    ]
    assert len(told) == 9
    assert told[0]["put_away_writers"] == [bad]
    assert "1,008 audited hits of 2 engines, of which 3 differ" in alone
    assert "gpu-1" not in alone


@pytest.mark.usefixtures("grpc_started")
def test_audits_without_a_finding_are_one_line() -> None:
    audits = (EngineAudits("default", "gpu-8", "ef" * 16, 1000),)
    with serving(Fleet(), pool=SimpleNamespace(standings={}, servers=[], audits=audits)) as running:
        shown = kvpool("top", "--index", running.target, "--once").stdout
    assert "1,000 audited hits of 1 engine, of which 0 differ\n" in shown
    assert "kvpool doctor" not in shown


@contextmanager
def watching(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([KVPOOL, "top", "--interval", "0.2", *arguments], **options)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(60)


@pytest.mark.usefixtures("grpc_started")
def test_an_index_that_goes_and_comes_again_is_waited_for(served: Served) -> None:
    arguments = ["--index", served.target, "--json"]
    with watching(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None

        def until(key: str) -> dict[str, Any]:
            for line in process.stdout or ():
                if key in (said := json.loads(line)):
                    return dict(said)
            raise AssertionError("it ended")

        until("ranks")
        served.stop()
        assert f"no index answers on {served.target}" in until("error")["error"]["message"]
        again = Served(served.fleet)
        again.target = served.target
        again.start()
        try:
            assert len(until("ranks")["ranks"]) == 3
        finally:
            again.stop()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, b"")


@pytest.mark.usefixtures("grpc_started")
@pytest.mark.parametrize("form", [["--json"], []])
def test_who_stops_reading_is_no_error(served: Served, form: list[str]) -> None:
    arguments = ["--index", served.target, *form]
    with watching(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        errors = process.stderr.read()
        process.stderr.close()
        assert (process.wait(60), errors) == (0, b"")


@pytest.mark.usefixtures("grpc_started")
def test_one_look_that_was_interrupted_is_none(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(client: IndexClient, **of: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(IndexClient, "status", interrupted)
    ended = kvpool("top", "--index", served.target, "--once")
    assert (ended.returncode, ended.stderr) == (130, "kvpool: interrupted\n")


def test_wrong_use() -> None:
    line = refused("top", "--sort", "devcie")
    assert line == 'kvpool: --sort: unknown order "devcie"; did you mean "device"?'
    assert "no index answers on 127.0.0.1:1" in refused("top", "--index", "127.0.0.1:1", "--once")
    assert "--interval" in refused("top", "--interval", "0")


# ---- on a terminal


@contextmanager
def on_a_terminal(
    served: Served, kind: str
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[bytes], bool]]]:
    """``kvpool top``, and whether its screen shows a text that it did not show before."""
    screen, terminal = pty.openpty()
    shown = b""

    def shows(text: bytes) -> bool:
        nonlocal shown
        if select.select([screen], [], [], 0.1)[0]:
            shown += os.read(screen, 65536)
        _, found, rest = shown.partition(text)
        shown = rest if found else shown
        return bool(found)

    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        environment = {**os.environ, "TERM": kind}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        with watching(
            "--index", served.target, stdin=terminal, stdout=terminal, stderr=terminal, env=environment
        ) as process:
            yield process, lambda text: eventually(lambda: shows(text))
    finally:
        os.close(screen)
        os.close(terminal)


@pytest.mark.usefixtures("grpc_started")
def test_live(served: Served) -> None:
    with on_a_terminal(served, "xterm") as (process, shows):
        assert shows(b"w-1 rank 0")
        say(served.fleet, "default/w-1", 0, 6, batch(stored([11, 12, 13, 14])))
        assert shows(b" 7 ")  # device blocks, on the same screen
        served.stop()
        assert shows(b"trying again")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


@pytest.mark.usefixtures("grpc_started")
def test_who_ends_it_has_the_cursor_back(served: Served) -> None:
    with on_a_terminal(served, "xterm") as (process, shows):
        assert shows(b"\x1b[?25l")
        assert shows(b"w-1 rank 0")
        process.terminate()
        assert shows(b"\x1b[?25h")
        assert process.wait(60) == 0


@pytest.mark.usefixtures("grpc_started")
def test_a_terminal_that_moves_no_cursor_gets_a_table_each_time(served: Served) -> None:
    with on_a_terminal(served, "dumb") as (process, shows):
        for _ in range(3):
            assert shows(b"w-1 rank 0"), "while it runs"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (240, 60)])
def test_the_end_of_a_full_screen_is_seen_though_lines_before_it_wrap(width: int, height: int) -> None:
    workers = tuple(
        replace(
            look(0).status.workers[0], worker=replace(a_worker(f"w-{number}"), address="http://10.0.0.1:8000")
        )
        for number in range(70)
    )
    status = FleetStatus(IndexStatus(pool_servers=3, pool_servers_away=1), workers)
    watch = top._Watch(cast(IndexClient, SimpleNamespace(status=lambda **_: status)), TopOptions())
    watch.look()
    out = Console(file=io.StringIO(), force_terminal=True, width=width, height=height)
    lines = ["".join(part.text for part in line) for line in out.render_lines(top._fitted_to(out, watch))]
    assert height - 1 <= len(lines) <= height
    assert any("1 of 3 servers of the pool cannot be reached" in line for line in lines)
    assert any(re.search("and [0-9]+ more ranks", line) for line in lines[-2:])


# ---- two looks


def look(at_s: float, *, batches: int = 0, incarnation: str = "1", **index: Any) -> Look:
    worker = Worker("w", "m", 16, seed_id(None), (Publisher(0, "tcp://h:1"),), incarnation=incarnation)
    rank = PublisherStatus(0, batches=batches)
    return Look(at_s, FleetStatus(IndexStatus(**index), (WorkerStatus(worker, "flag", 0, (rank,)),)))


def test_rates_are_of_the_time_between_two_looks() -> None:
    before, now = look(10, batches=5), look(12, batches=25)
    assert rows_of(now, None, "name")[0].batches_per_s is None
    assert rows_of(now, before, "name")[0].batches_per_s == 10
    assert rows_of(look(12, batches=3), before, "name")[0].batches_per_s is None  # it has begun again
    other = look(12, batches=25, incarnation="2")
    assert rows_of(other, before, "name")[0].batches_per_s is None


def test_hit_ratios_are_of_the_time_between_two_looks() -> None:
    first = look(
        0, uptime_ms=1, lookups=4, prompt_blocks=100, device_blocks=50, local_blocks=60, pool_blocks=80
    )
    assert rates_of(first, None)[:4] == (None, 0.5, 0.6, 0.8)
    second = look(
        2, uptime_ms=9, lookups=8, prompt_blocks=200, device_blocks=60, local_blocks=160, pool_blocks=80
    )
    assert rates_of(second, first)[:4] == (2.0, 0.1, 1.0, 0.0)
    idle = look(
        4, uptime_ms=11, lookups=8, prompt_blocks=200, device_blocks=60, local_blocks=160, pool_blocks=80
    )
    assert rates_of(idle, second)[:4] == (0.0, 0.3, 0.8, 0.4)  # of all the time: nobody asked since
    again = look(6, uptime_ms=3, lookups=1, prompt_blocks=10, device_blocks=5)
    assert rates_of(again, idle)[:4] == (None, 0.5, 0.0, 0.0)  # it was started again
    assert rates_of(look(8, uptime_ms=5), None) == (None,) * 6
    replica = look(8, uptime_ms=99, lookups=9, prompt_blocks=400, device_blocks=40, instance_id="other")
    assert rates_of(replica, idle)[:4] == (None, 0.1, 0.0, 0.0)  # of another index behind the same address


def test_placements_are_counted_beside_lookups() -> None:
    first = look(0, uptime_ms=1, placements=4, placed_prompt_blocks=100, placed_matched_blocks=80)
    assert rates_of(first, None) == (None, None, None, None, None, 0.8)
    second = look(2, uptime_ms=9, placements=8, placed_prompt_blocks=200, placed_matched_blocks=90)
    assert rates_of(second, first) == (0.0, None, None, None, 2.0, 0.1)
    idle = look(4, uptime_ms=11, placements=8, placed_prompt_blocks=200, placed_matched_blocks=90)
    assert rates_of(idle, second)[4:] == (0.0, 0.45)  # of all the time: nothing was placed since
