"""The metrics page, as Prometheus reads it."""

from __future__ import annotations

import http.client
import socket
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvpool.index.fleet.fleet import Fleet
from kvpool.index.net import listener as listener_module
from kvpool.index.request_stats import Matched, RequestStats
from kvpool.index.serve import metrics as exporter_module
from kvpool.index.serve.metrics import Exporter
from tests.support.deadlines import eventually
from tests.support.fleets import Clock, a_worker, say
from tests.support.metrics_pages import showing
from tests.support.wire import batch, stored

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Page:
    """A fleet, a stats, and what is shown of them."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.fleet = Fleet(clock=self.clock)
        self.stats = RequestStats()
        self.exporter = Exporter(self.fleet, self.stats)
        self.port = 0

    def read(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        with OPENER.open(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as reply:
            families = text_string_to_metric_families(reply.read().decode())
            return {
                (
                    sample.name.removeprefix("kvpool_index_"),
                    tuple(sorted(sample.labels.items())),
                ): sample.value
                for family in families
                for sample in family.samples
            }


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    monkeypatch.setattr(exporter_module, "FRESH_S", -1.0)
    made = Page()
    with showing(made.exporter) as made.port:
        yield made


def labelled(figures: dict[Any, float], name: str) -> dict[tuple[str, ...], float]:
    """By the values of the labels, in the order of their names."""
    return {
        tuple(value for _, value in labels): figure
        for (found, labels), figure in figures.items()
        if found == name
    }


def test_blocks_by_tier(page: Page) -> None:
    for name in ("a", "b"):
        page.fleet.add(a_worker(name, namespace="a" * 32, near="1" * 32), "flag")
        events = [stored([1, 2, 3]), stored([1, 9], medium="CPU"), stored([7], medium="DISK")]
        pool = stored([1, 2, 3, 4], medium="STORAGE")
        near = stored([2, 3], parent=1, medium="CPU", ownership="kvpool")
        say(page.fleet, f"default/{name}", 0, 0, batch(*events, pool, near))
    figures = page.read()
    held = {("device",): 6, ("host",): 4, ("disk",): 2, ("near",): 2, ("pool",): 4}
    assert labelled(figures, "tier_blocks") == held
    assert figures["blocks", ()] == 6
    assert figures["memory_bytes", ()] > 0
    page.fleet.remove("default/a")
    held = {("device",): 3, ("host",): 2, ("disk",): 1, ("near",): 2, ("pool",): 4}
    assert labelled(page.read(), "tier_blocks") == held


def test_staleness_of_each_rank(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    page.fleet.add(a_worker("a", ranks=2, tenant="t"), "flag")
    page.fleet.add(a_worker('b"\\'), "flag")
    page.clock.now_s += 2
    page.fleet.rank("t/a", 1).heard()
    page.clock.now_s += 1.5
    # labels by their names: rank, tenant, worker
    shown = {("0", "default", 'b"\\'): 3.5, ("0", "t", "a"): 3.5, ("1", "t", "a"): 1.5}
    assert labelled(page.read(), "staleness_seconds") == shown
    assert page.read()["max_staleness_seconds", ()] == 3.5


def test_the_ranks_that_are_shown_are_the_same_at_each_scrape(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter_module, "MAX_RANKS_SHOWN", 2)
    names = ("a", "b", "c")
    for name in names:
        page.fleet.add(a_worker(name), "flag")
    for current in names:  # each of them is once the one that is least behind
        page.clock.now_s += 5
        page.fleet.rank(f"default/{current}", 0).heard()
        figures = page.read()
        assert {worker for _, _, worker in labelled(figures, "staleness_seconds")} == {"a", "b"}
    assert figures["max_staleness_seconds", ()] == 10, "of a"


def test_lookups(page: Page) -> None:
    stats = page.stats
    stats.record_lookup(0.0004, "answered", Matched(10, 5, 10, 0))
    stats.record_lookup(0.5, "answered", Matched(10, 0, 0, 3))
    stats.record_lookup(70.0, "answered", Matched())  # nobody there, or no whole block
    stats.record_lookup(1.0, "wrong")
    stats.record_refusal("INVALID_ARGUMENT")
    stats.record_stream(1)
    figures = page.read()
    results = {("answered",): 3, ("wrong",): 1, ("unknown",): 0, ("failed",): 0}
    assert labelled(figures, "lookups_total") == results
    assert labelled(figures, "refused_requests_total") == {("INVALID_ARGUMENT",): 1}
    assert figures["streams", ()] == 1
    seconds = labelled(figures, "lookup_seconds_bucket")
    assert (seconds[("0.0002",)], seconds[("0.0005",)], seconds[("0.5",)], seconds[("+Inf",)]) == (0, 1, 2, 3)
    assert figures["lookup_seconds_count", ()] == 3
    assert figures["lookup_seconds_sum", ()] == pytest.approx(70.5004)
    ratios = {
        (where, bound): figure
        for (name, labels), figure in figures.items()
        if name == "matched_ratio_bucket"
        for bound, where in [tuple(value for _, value in labels)]
    }
    assert (ratios["device", "0.0"], ratios["device", "0.5"], ratios["device", "+Inf"]) == (1, 2, 2)
    assert (ratios["local", "0.99"], ratios["local", "1.0"]) == (1, 2)
    assert (ratios["pool", "0.25"], ratios["pool", "0.5"]) == (1, 2)
    assert labelled(figures, "matched_ratio_sum") == {("device",): 0.5, ("local",): 1.0, ("pool",): 0.3}


def test_many_who_ask_are_shown_one_page(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each had one of its own, for which all workers were looked at."""
    monkeypatch.setattr(exporter_module, "FRESH_S", 1e9)
    looked: list[int] = []
    totals = page.fleet.totals
    monkeypatch.setattr(page.fleet, "totals", lambda: (looked.append(1), totals())[1])
    readers = [http.client.HTTPConnection("127.0.0.1", page.port, timeout=60) for _ in range(8)]
    for reader in readers:
        reader.request("GET", "/metrics")
    pages = {reader.getresponse().read() for reader in readers}
    for reader in readers:
        reader.close()
    assert len(pages) == len(looked) == 1
    monkeypatch.setattr(exporter_module, "FRESH_S", -1.0)
    page.read()
    assert len(looked) == 2


@pytest.mark.parametrize(
    ("limit", "value"), [("CONNECTIONS", listener_module.CONNECTIONS._replace(total=0)), ("HEAD_S", 0.5)]
)
def test_silent_connections_are_ended(
    page: Page, monkeypatch: pytest.MonkeyPatch, limit: str, value: object
) -> None:
    """Each kept a thread for ever."""
    monkeypatch.setattr(listener_module, limit, value)
    with socket.create_connection(("127.0.0.1", page.port), timeout=60) as silent:
        assert eventually(lambda: silent.recv(1) == b"")
