"""Which workers serve at the endpoints of a subset: found without a look at each worker, and without a wait for names
that nothing needs."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.errors import ConfigError
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.front import endpoints
from kvpool.index.front.endpoints import Endpoints
from kvpool.index.net.resolver import Addresses, Unresolved
from kvpool.index.net.worker_url import parse_url
from tests.support.fleets import a_worker
from tests.support.networks import KnownNames


def a_fleet(**addresses: str) -> Fleet:
    fleet = Fleet()
    for place, (name, address) in enumerate(addresses.items()):
        fleet.add(a_worker(name, port=5557 + 2 * place, address=address), "flag")
    return fleet


def at(*wanted: str) -> frozenset[str]:
    return frozenset(wanted)


@pytest.mark.anyio
async def test_the_workers_at_the_endpoints_of_a_subset() -> None:
    fleet = a_fleet(
        one="http://10.0.0.1:8000", six="http://[fd00::6]:8000", named="http://named", gone="http://gone:1",
        none="", rank="http://10.0.0.1:8000/",
    )  # fmt: skip
    fleet.add(a_worker("other", tenant="t", address="http://10.0.0.9:8000"), "flag")
    there = Endpoints(fleet, KnownNames(named="10.0.0.3"))
    assert await there.names_at(at("10.0.0.3:80"), "default", 60) == ["named"]
    found = await there.names_at(
        at("10.0.0.1:8000", "[fd00::6]:8000", "10.0.0.9:8000", "1.1.1.1:1"), "default", 60
    )
    assert sorted(found) == ["one", "rank", "six"]
    assert await there.names_at(at("10.0.0.9:8000"), "t", 60) == ["other"]
    assert await there.names_at(at("10.0.0.1:1", "no endpoint", ""), "default", 60) == []


@pytest.mark.parametrize(
    "rest", ["10.0.0.1:8000/v1", "10.0.0.1:8000?x=1", "10.0.0.1:8000#x", "user:secret@10.0.0.1:8000"]
)
def test_an_address_is_a_host_and_a_port(rest: str) -> None:
    """A path or a user would be dropped: requests would go elsewhere than the address says."""
    with pytest.raises(ConfigError, match="no user, path or query: write http://HOST:PORT") as caught:
        parse_url(f"http://{rest}")
    assert "secret" not in str(caught.value)


@pytest.mark.anyio
async def test_requests_without_an_address_leave_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    """One answer is for all of them, for 30 s: an error that is raised again has the frames of each."""
    answer: Future[Addresses] = Future()
    names: Any = SimpleNamespace(resolve=lambda *of: answer)
    there = Endpoints(Fleet(), names)
    with pytest.raises(Unresolved, match="not resolved within"):
        await there.resolve("http://gone:1", "default", 0.01)
    answer.set_exception(Unresolved("the name gone does not resolve"))
    await asyncio.sleep(0.01)
    for _ in range(3):
        with pytest.raises(Unresolved, match="the name gone does not resolve"):
            await there.resolve("http://gone:1", "default", 60)
    error = answer.exception()
    assert error is not None
    assert error.__traceback__ is None
    gc.collect()
    assert not caplog.text


@pytest.mark.anyio
async def test_a_request_does_not_look_at_each_worker() -> None:
    fleet = a_fleet(**{f"w{number}": f"http://w{number}:8000" for number in range(50)})
    names = KnownNames(**{f"w{number}": f"10.0.0.{number}" for number in range(50)})
    there = Endpoints(fleet, names)
    for number in range(50):
        assert await there.names_at(at(f"10.0.0.{number}:8000"), "default", 60) == [f"w{number}"]
    assert names.asked <= 100, "once, and once more where a second has passed"


@pytest.mark.anyio
async def test_who_joins_leaves_or_moves_is_seen_at_once() -> None:
    fleet = a_fleet(a="http://10.0.0.1:8000", b="http://10.0.0.2:8000")
    there = Endpoints(fleet, KnownNames())
    both = at("10.0.0.1:8000", "10.0.0.2:8000")
    assert sorted(await there.names_at(both, "default", 60)) == ["a", "b"]
    fleet.remove("default/a")
    assert await there.names_at(both, "default", 60) == ["b"]
    fleet.add(a_worker("c", port=6000, address="http://10.0.0.1:8000"), "flag")
    assert sorted(await there.names_at(both, "default", 60)) == ["b", "c"]
    fleet.add(a_worker("c", port=6000, address="http://10.0.0.3:8000"), "flag")
    assert await there.names_at(at("10.0.0.3:8000"), "default", 60) == ["c"]


@pytest.mark.anyio
async def test_a_name_that_moves_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "PLACES_S", 0.0)
    names = KnownNames(one="10.0.0.1")
    there = Endpoints(a_fleet(one="http://one:8000"), names)
    assert await there.names_at(at("10.0.0.1:8000"), "default", 60) == ["one"]
    names.known["one"] = "10.0.0.2"
    assert await there.names_at(at("10.0.0.2:8000"), "default", 60) == ["one"]
    names.known.clear()
    assert await there.names_at(at("10.0.0.2:8000"), "default", 60) == ["one"], "what was known last"


@pytest.mark.anyio
async def test_a_name_that_hangs_holds_up_no_request_that_can_do_without_it() -> None:
    names = KnownNames("slow", one="10.0.0.1")
    there = Endpoints(a_fleet(one="http://one:8000", slow="http://slow:8000"), names)
    assert await there.names_at(at("10.0.0.1:8000", "10.0.0.2:8000"), "default", 600) == ["one"]
    assert await there.names_at(at("10.0.0.2:8000"), "default", 0.05) == [], "after its timeout"
    waits = asyncio.create_task(there.names_at(at("10.0.0.2:8000"), "default", 600))
    await asyncio.sleep(0)
    names.hanging["slow"].set_result(("10.0.0.2",))
    assert await waits == ["slow"]


@pytest.mark.anyio
async def test_the_endpoints_of_so_many_tenants_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "MAX_TENANTS", 2)
    there = Endpoints(a_fleet(one="http://10.0.0.1:8000"), KnownNames())
    for tenant in ("default", "x", "default", "y", "z", "default"):
        found = await there.names_at(at("10.0.0.1:8000"), tenant, 60)
        assert found == (["one"] if tenant == "default" else [])
        assert len(there._places) <= 2
