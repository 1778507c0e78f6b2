"""``Names``: what is known of each worker's names, what bounds it, and what is left when workers go."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading

import pytest

from kvpool.errors import ConfigError, UnknownModel
from kvpool.index.fleet import names
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.names import Name
from tests.support.fleets import a_worker, joined
from tests.support.wire import packed64, stored

HASHES = packed64([1, 2])


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    joined(fleet, a_worker("a", names=("m1", "m2")), stored([1]))
    joined(fleet, a_worker("b", port=6000), stored([1, 2]))
    return fleet


def lists(fleet: Fleet, worker: str, *listed: Name | str, tenant: str = "default") -> None:
    given = [Name(one) if isinstance(one, str) else one for one in listed]
    fleet.read_names(fleet.start(f"{tenant}/{worker}"), given)


def rows(fleet: Fleet, name: str, **fields: object) -> list[tuple[str, int]]:
    return [(row.worker, row.device_blocks) for row in fleet.lookup(name, hashes64=HASHES, **fields)]  # type: ignore[arg-type]


def serving(fleet: Fleet, name: str, tenant: str = "default") -> list[str]:
    if not fleet.names.knows(tenant, name):
        return []
    return [rank.worker.name for one in fleet.names.serving(tenant, name) for rank in one.members.ranks]


def others(fleet: Fleet, most: int) -> list[tuple[Name, str]]:
    """The names beside the only model."""
    (name, model), *behind = fleet.names.listed("default", most)
    assert (name.text, model) == ("m", "m")
    return behind


def test_announced_and_listed_names_are_those_of_their_workers(fleet: Fleet) -> None:
    assert rows(fleet, "m") == [("a", 1), ("b", 2)]
    assert rows(fleet, "m1") == rows(fleet, "m2") == [("a", 1)]
    lists(fleet, "b", "m", "m1", Name("sql", "/p"))
    assert rows(fleet, "m1") == [("a", 1), ("b", 2)]
    assert rows(fleet, "sql") == [("b", 2)]
    assert rows(fleet, "m1", workers=["b"]) == [("b", 2)]
    lists(fleet, "b", "m")
    assert (serving(fleet, "m1"), serving(fleet, "sql")) == (["a"], [])
    with pytest.raises(UnknownModel, match='"sql"'):
        fleet.lookup("sql", hashes64=HASHES)
    lists(fleet, "a")
    assert serving(fleet, "m1") == ["a"], "an engine serves what it announces as long as it runs"
    joined(fleet, a_worker("a"))
    assert serving(fleet, "m1") == [], "it no longer announces it"


def test_a_name_of_workers_that_hash_differently_is_that_of_all(fleet: Fleet) -> None:
    joined(fleet, a_worker("c", port=7000, model="n", block_tokens=32), stored([1]))
    lists(fleet, "c", "n", "m")
    assert rows(fleet, "m") == [("a", 1), ("b", 2), ("c", 1)]
    assert rows(fleet, "n") == [("c", 1)]
    assert fleet.names.model("default", "n") == "n"
    assert fleet.names.model("default", "m1") == "m"
    assert fleet.names.model("default", "m") == "m", "no longer known: two models have this name"
    lists(fleet, "c", "n", "m1")
    assert fleet.names.model("default", "m1") == "m1"


def test_who_comes_or_goes_changes_who_serves_a_name(fleet: Fleet) -> None:
    lists(fleet, "a", "m", Name("sql", "/p"))
    for _ in range(3):
        joined(fleet, a_worker("c", port=7000))
        assert rows(fleet, "sql") == [("a", 1)]
        lists(fleet, "c", Name("sql", "/p"))
        assert rows(fleet, "sql") == [("a", 1), ("c", 0)]
        fleet.remove("default/c")
        assert rows(fleet, "sql") == [("a", 1)]
    fleet.remove("default/a")
    assert (serving(fleet, "sql"), serving(fleet, "m1")) == ([], [])
    fleet.remove("default/b")
    assert fleet.names._servers == fleet.names._workers == {}


def test_a_list_of_an_earlier_start_is_not_of_this_one(fleet: Fleet) -> None:
    fleet.add(a_worker("a", incarnation="1"), "flag")
    start = fleet.start("default/a")
    fleet.add(a_worker("a", incarnation="2"), "flag")
    fleet.read_names(start, [Name("sql", "/p")])
    assert serving(fleet, "sql") == []


def test_tenants_have_names_of_their_own(fleet: Fleet) -> None:
    joined(fleet, a_worker("evil", tenant="t", model="x", names=("m", "m1")))
    lists(fleet, "evil", "m", "m2", Name("sql", "/p"), tenant="t")
    assert serving(fleet, "m") == ["a", "b"]
    assert serving(fleet, "m1") == serving(fleet, "m2") == ["a"]
    assert serving(fleet, "sql") == []
    assert serving(fleet, "sql", "t") == ["evil"]
    with pytest.raises(UnknownModel, match=r'unknown model "x"; known are m$'):
        fleet.lookup("x", hashes64=HASHES)


def test_a_denied_name_is_forgotten_until_the_next_reading(fleet: Fleet) -> None:
    lists(fleet, "a", "m", "m1", Name("sql", "/p"))
    lists(fleet, "b", "m", Name("sql", "/p"))
    denies = fleet.names.deny
    assert denies("default/a", "sql")
    assert denies("default/a", "sql"), "to another request, which was on its way"
    assert (serving(fleet, "sql"), fleet.names.knows("default", "sql")) == (["b"], True)
    assert [denies("default/a", name) for name in ("m", "m1", "none")] == [False] * 3, "announced, or unknown"
    assert not denies("default/none", "sql")
    assert serving(fleet, "m1") == ["a"]
    assert denies("default/b", "sql")
    assert not fleet.names.knows("default", "sql")
    lists(fleet, "b", "m")
    lists(fleet, "a", "m", Name("sql", "/p"))
    assert serving(fleet, "sql") == ["a"]


def test_names_are_listed_up_to_a_number_and_while_a_worker_serves_them(fleet: Fleet) -> None:
    """A tenant may have 100,000, which would all be sorted for each caller: 1.1 s of the event loop."""
    lists(fleet, "b", "m1", Name("sql", "/p"), "m3")
    known = [(Name("m1"), "m"), (Name("m2"), "m"), (Name("m3"), "m"), (Name("sql", "/p"), "m")]
    assert others(fleet, 9) == known
    assert others(fleet, 3) == [known[0], known[1], known[3]], "the first that were known"
    assert fleet.names.listed("other", 9) == []
    assert fleet.names.listed("default", 1) == [(Name("m"), "m"), known[0]]
    fleet.names.deny("default/b", "sql")
    assert others(fleet, 9) == known[:3]


def test_an_answer_that_is_not_as_it_was_read_raises_a_doubt(fleet: Fleet) -> None:
    lists(fleet, "a", "m", Name("sql", "/p"))
    note, doubted = fleet.names.note, fleet.names.take_doubt
    for name, served, is_news in (
        ("m", True, False), ("sql", True, False), ("m1", True, False), ("new", False, False), ("", True, False),
        ("m", False, True), ("sql", False, True), ("new", True, True),
    ):  # fmt: skip
        note("default/a", name, served=served)
        assert [doubted("default/a"), doubted("default/a")] == [is_news, False], (name, served)
    note("default/none", "m", served=False)
    assert not doubted("default/none")


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 1025, "é" * 600, "\ud800", "\x1b[31m"])
def test_names_that_no_worker_may_announce_are_left_out(fleet: Fleet, name: str) -> None:
    lists(fleet, "a", name, "fit", Name("sql", name or "\n"))
    assert others(fleet, 4096) == [(Name(one), "m") for one in ("fit", "m1", "m2")]
    announced = a_worker("c", port=7000, names=(name,))
    with pytest.raises(ConfigError, match="worker c: names"):
        fleet.add(announced, "flag")


def test_a_worker_that_lists_more_than_its_part_is_read_in_part(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kvpool.index")
    used_nbytes = fleet.limits.used_nbytes
    lists(fleet, "a", *(f"n{number}" for number in range(3 * names.MAX_READ)))
    assert len(others(fleet, 4096)) == names.MAX_READ + 2
    endless = (Name(f"\n{number}") for number in itertools.count())
    fleet.read_names(fleet.start("default/a"), endless)
    assert len(others(fleet, 4096)) == 2, "those that do not fit count, too: looking takes time"
    for number in range(20):
        lists(fleet, "a", *(f"{number}-{one}" for one in range(100)))
    assert len(others(fleet, 4096)) == 102
    assert fleet.limits.used_nbytes - used_nbytes < 200 * names.NAME_NBYTES
    lists(fleet, "a", "kept", Name("sql", "/p"))
    monkeypatch.setattr(fleet.limits, "limit_nbytes", fleet.limits.used_nbytes)
    for _ in range(2):
        lists(fleet, "a", "kept", *(f"x{number}" for number in range(500)))
        assert [name.text for name, _ in others(fleet, 4096)] == ["kept", "m1", "m2"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("worker default/a: no memory is left for its 503 names")
    assert "--max-memory" in line
    fleet.remove("default/a")
    fleet.remove("default/b")
    assert fleet.limits.used_nbytes == 0


def test_readers_meet_writers() -> None:
    fleet, ends = Fleet(), threading.Event()
    for place in range(4):
        joined(fleet, a_worker(f"w{place}", port=6000 + 10 * place))

    def write(worker: str) -> None:
        while not ends.is_set():
            lists(fleet, worker, "m", "n", Name("sql", "/p"))
            fleet.names.deny(f"default/{worker}", "sql")
            lists(fleet, worker, "m")

    interval = sys.getswitchinterval()
    threads = [threading.Thread(target=write, args=(f"w{place}",)) for place in range(4)]
    try:
        sys.setswitchinterval(1e-5)
        for thread in threads:
            thread.start()
        for _ in range(3000):
            for name in ("n", "sql", "m"):
                with contextlib.suppress(UnknownModel):  # it went between both questions
                    assert set(serving(fleet, name)) <= {f"w{place}" for place in range(4)}
            others(fleet, 4096)
    finally:
        sys.setswitchinterval(interval)
        ends.set()
        for thread in threads:
            thread.join(60)
    for place in range(4):
        lists(fleet, f"w{place}", "m", "n", Name("sql", "/p"))
    assert serving(fleet, "n") == serving(fleet, "sql") == [f"w{place}" for place in range(4)]
