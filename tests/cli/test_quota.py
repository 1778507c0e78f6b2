"""``kvpool quota`` on real pools: what it says, shows and refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool import open_store
from kvpool.discovery.quota import read_standings, write_held
from kvpool.key.key import quota_keys
from tests.support.command_line import kvpool, refused
from tests.support.servers import running


@pytest.fixture(params=["file", "valkey-server", "near and far"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    url = f"file://{tmp_path}/pool?capacity=1MiB"
    open_store(url).close()
    if request.param == "file":
        yield url
        return
    with running("valkey-server", tmp_path) as server:
        yield server.url if request.param == "valkey-server" else f"{url} {server.url}"


def said(pool: str, *arguments: str) -> list[dict[str, Any]]:
    ended = kvpool("quota", *arguments, "--pool", pool, "--json")
    assert ended.returncode == 0, ended.stderr
    tenants: list[dict[str, Any]] = json.loads(ended.stdout)["tenants"]
    return tenants


def row(tenant: str, held_nbytes: int | None, quota_nbytes: int | None) -> dict[str, Any]:
    return {"tenant": tenant, "held_nbytes": held_nbytes, "quota_nbytes": quota_nbytes}


def test_quotas_are_said_shown_raised_and_taken_back(pool: str) -> None:
    assert said(pool) == []
    assert said(pool, "b", "50GiB") == [row("b", None, 50 << 30)]
    assert said(pool, "a", "0") == [row("a", None, 0)]
    far = pool.split(" ")[-1]
    with open_store(far) as store:
        write_held(store, "b", 60 << 30, 60)
        store.announce(quota_keys("c")[0], b"garbage", lease_s=60)
    assert said(pool) == [row("a", None, 0), row("b", 60 << 30, 50 << 30), row("c", None, None)]
    table = kvpool("quota", "--pool", pool).stdout
    assert [line.split() for line in table.splitlines()[2:]] == [
        ["a", "not", "counted", "0", "bytes"],
        ["b", "60.0", "GiB", "50.0", "GiB", "120%"],
        ["c", "not", "counted", "unreadable"],
    ]
    assert said(pool, "b", "70GiB") == [row("b", 60 << 30, 70 << 30)]
    assert said(pool, "b", "--remove") == []
    assert said(pool, "c", "--remove") == []
    assert said(pool) == [row("a", None, 0)]
    assert kvpool("quota", "b", "--pool", pool).stdout == "Tenant b has no quota.\n"
    with open_store(far) as store:
        assert read_standings(store, ["b"])["b"].is_said, "an index that knew it does not write it again"
    assert kvpool("purge", "--pool", far, "--everything", "--yes").returncode == 0
    assert said(pool) == [row("a", None, 0)], "no block, and nobody's announcement"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("t", "many"), 'size: "many" is not a size: write a whole number with a unit'),
        (("--", "t", "-5GiB"), 'size: "-5GiB" is not a size'),
        (("t", "1.5GiB"), 'size: "1.5GiB" is not a size'),
        (("t", "10"), 'size: "10" has no unit: write 10GiB or 10MiB, or 10B for bytes'),
        (("t", "9999999999999GiB"), "is too large: a size is at most"),
        (("t:held", "5GiB"), "tenant 't:held' is not allowed: use 1 to 64 letters"),
        (("--remove",), "--remove takes the quota of one TENANT back"),
        (("t", "5GiB", "--remove"), "--remove takes the quota of one TENANT back"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(
    tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    url = f"file://{tmp_path}/pool?capacity=1MiB"
    open_store(url).close()
    assert says in refused("quota", "--pool", url, *arguments)
    assert said(url) == []


def test_a_pool_that_is_away_is_an_error() -> None:
    assert "127.0.0.1:1" in refused("quota", "t", "5GiB", "--pool", "valkey://127.0.0.1:1")
