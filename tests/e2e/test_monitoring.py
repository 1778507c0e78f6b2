"""Every expression of the dashboard and every alert, on live services: under a load, without the server, after damage.

Prints the value of each: ``pytest -s tests/e2e/test_monitoring.py``.
"""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path

import pytest

from kvpool import IndexClient
from kvpool.key.key import KEY_PREFIX, is_key
from tests.e2e import monitored
from tests.e2e.monitored import Fleet, Values
from tests.support.deadlines import eventually
from tests.support.engine_forks import write_model
from tests.support.engines import prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

HOT = [prompt(900 + i, 1060) for i in range(6)]  # 48 blocks of 2 MiB
KV_CACHE_NBYTES = 80 << 20  # holds less than these
MAXMEMORY = "145mb"  # holds more
WITHIN_S = 240.0
AWAY = ("KVPoolUnreachable", "KVPoolServerDown", "KVPoolLookupsFailing")
DAMAGED, SWITCHED_OFF = "KVPoolDamagedBlocks", "KVPoolSwitchedOff"
FAULTS = (*AWAY, DAMAGED, SWITCHED_OFF)
Seen = dict[str, Values]


RATIO = "Is it helping?/Hit ratio of the fleet/{{window}}"
CEILING = "Is it helping?/Hit ratio of the fleet/ceiling"


def look(fleet: Fleet) -> Seen:
    """All expressions now, and of each alert what it compares; an alert that fires has ``FIRES``."""
    seen = {name: fleet.ask(expression) for name, (_, expression) in monitored.expressions().items()}
    for name, rule in fleet.rules().items():
        seen[f"alert {name}"] = fleet.ask(rule.compared) | (
            {"FIRES": 1.0} if rule["state"] == "firing" else {}
        )
    return seen


def fires(fleet: Fleet, *names: str) -> bool:
    rules = fleet.rules()
    return all(rules[name]["state"] == "firing" for name in names)


def hit_ratio(fleet: Fleet) -> float:
    return fleet.ask("kvpool_index_hit_ratio").get("1h", 0.0)


def load(fleet: Fleet, rounds: int, first_cold: int) -> None:
    """Prompts that come again, and between them some that do not, so that the pool has to evict."""
    for number in range(rounds):
        fleet.complete(HOT[number % len(HOT)])
        if number % 4 == 3:
            fleet.complete(prompt(first_cold + number, 1060))
        if number % 5 == 0:
            fleet.look_up(HOT[number % len(HOT)])


def test_what_prometheus_sees(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    with monitored.fleet(tmp_path, model, maxmemory=MAXMEMORY, kv_cache_nbytes=KV_CACHE_NBYTES) as fleet:
        load(fleet, 24, 5000)
        with IndexClient(fleet.index) as client:
            assert [one.worker.address for one in client.workers()] == [fleet.worker], (
                "the port is its --port"
            )
        # An engine writes to the pool what it was asked for in turns of 15 s; a quick one has served all within one.
        assert eventually(lambda: hit_ratio(fleet) > 0.3), fleet.ask("kvpool_index_hit_ratio")
        load(fleet, 8, 6000)
        assert eventually(lambda: sum(fleet.ask("kvpool_requests_total").values()) >= 40)
        healthy: Seen = {}

        def is_told() -> bool:
            """A request waits for others of its time before the curve has it, and a full pool may evict what an engine
            wrote, until it writes again.
            """
            healthy.update(look(fleet))
            return 0.3 < healthy[RATIO].get("1h", 0.0) <= healthy[CEILING].get("", 0.0) + 0.05

        assert eventually(is_told, within_s=WITHIN_S), table(healthy)

        fleet.server.kill()
        load_until(fleet, *AWAY, first_cold=7000)
        away = look(fleet)

        fleet.server.start()
        assert eventually(lambda: fleet.ask("min(kvpool_index_pool_up)") == {"": 1.0})
        load_until_up(fleet)
        damage(fleet)
        load_until(fleet, DAMAGED, first_cold=8000)
        print(table(healthy, away, look(fleet)))
        fleet.load_weights(
            write_model(tmp_path / "other", seed=2)
        )  # its cache has blocks of the earlier ones
        load_until(fleet, SWITCHED_OFF, first_cold=9000)
        damaged = look(fleet)
    print(table(healthy, away, damaged))

    # This fleet has one pool, and too few hits for audits; these panels: ``tests/monitoring/test_deploy.py``.
    elsewhere = (
        "alert ",
        "Does the near pool help?/",
        "Are items encoded once?/",
        "Is it broken?/Distance of audited hits/",
    )
    panels = {name for name in healthy if not name.startswith(elsewhere)}
    assert [name for name in sorted(panels) if not healthy[name]] == [], "an expression that gives nothing"
    # Others may fire on a busy machine: the rules wait 2 s here.
    assert [name for name in FAULTS if "FIRES" in healthy[f"alert {name}"]] == [], "before their fault"
    ceiling = healthy[CEILING][""]
    assert ceiling < 0.95
    at_sizes = healthy["Is it helping?/Hit ratio by the pool's size/{{size}}"]
    assert at_sizes["0.25"] <= at_sizes["1"] <= at_sizes["4"] <= at_sizes["all"] == ceiling
    results = healthy["Is it helping?/Requests by result/{{result}}"]
    assert results["hit"] > 0 < results["miss"]
    assert results["hit"] > 5 * results["load_failed"], "some blocks are evicted between lookup and load"
    assert results["switched_off"] == results["no_answer"] == 0.0
    assert 0 < healthy["Is it full?/Fill of each server/{{server}}"][""] <= 1.1
    assert healthy["Is it helping?/Residence time/{{server}}"][""] > 0
    assert away["Is it broken?/Connected/server {{server}}"] == {"": 0.0}
    assert away["Is it broken?/Connected/engine {{instance}}"] == {"": 0.0}
    assert damaged["Is it broken?/Switched on/{{instance}} {{engine}}"] == {"": 0.0}
    assert damaged["Is it broken?/Damaged blocks/{{cause}}"]["checksum"] > 0


def load_until(fleet: Fleet, *alerts: str, first_cold: int) -> None:
    end_s = (
        time.monotonic() + WITHIN_S
    )  # and not so many requests: a quick engine has served them before a rule fires
    for number in itertools.count():
        load(fleet, 2, first_cold + 10 * (number % 100))
        if fires(fleet, *alerts):
            return
        assert time.monotonic() < end_s, f"{alerts} do not fire: {look(fleet)}"


def load_until_up(fleet: Fleet) -> None:
    """Until the engine has its connections again, and the pool what is asked for."""
    for _ in range(30):
        load(fleet, len(HOT), 9500)
        if fleet.ask("min(kvpool_up)") == {"": 1.0} and fleet.server.client.dbsize() > 36:
            return
    raise AssertionError("the engine does not find the server again")


def damage(fleet: Fleet) -> None:
    """Turn a bit or two in every block that is in the pool."""
    client = fleet.server.client
    for key in client.scan_iter(f"{KEY_PREFIX}*"):
        if is_key(key.decode()):
            body = bytearray(client.hget(key, "b"))
            body[100] ^= 0x11
            client.hset(key, "b", bytes(body))


def table(*phases: Seen) -> str:
    rows = ["| | under load | server killed | damaged blocks, other weights |", "|---|---|---|---|"]
    for name in phases[0]:
        rows.append(f"| {name} | " + " | ".join(shown(phase[name]) for phase in phases) + " |")
    return "\n".join(rows)


def shown(values: Values) -> str:
    return ", ".join(f"{name} {number(value)}".strip() for name, value in values.items()) or "nothing"


def number(value: float) -> str:
    return "NaN" if math.isnan(value) else f"{value:.4g}"
