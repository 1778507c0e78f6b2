"""The load of ranks: what was last said counts, and for a while only."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool import ConfigError, Load
from kvpool.index.cost import load as load_module
from kvpool.index.cost.load import KEEP_S, KnownLoad, LoadBoard
from tests.support.fleets import Clock


def test_the_later_of_two_sources_counts() -> None:
    clock = Clock()
    board = LoadBoard(clock)
    assert board.get("t/a", 0) is None
    board.scrape("t/a", Load("a", running=1), asleep=False)
    clock.now_s += 1
    board.report("t/a", Load("a", running=2))
    clock.now_s += 2
    assert board.get("t/a", 0) == KnownLoad(Load("a", running=2), "reported", 2.0, False)
    assert board.get("t/a", 1) is None
    assert board.get("u/a", 0) is None
    board.scrape("t/a", Load("a", running=3), asleep=True)
    assert board.get("t/a", 0) == KnownLoad(Load("a", running=3), "scraped", 0.0, True)
    clock.now_s += 1
    board.report("t/a", Load("a", running=4))
    assert board.get("t/a", 0) == KnownLoad(Load("a", running=4), "reported", 0.0, True), (
        "asleep is of the metrics"
    )


def test_what_is_old_is_not_known() -> None:
    clock = Clock()
    board = LoadBoard(clock)
    board.scrape("t/a", Load("a", running=1), asleep=True)
    clock.now_s += KEEP_S / 2
    board.report("t/a", Load("a", running=2))
    clock.now_s += KEEP_S / 2 + 1
    assert board.get("t/a", 0) == KnownLoad(Load("a", running=2), "reported", KEEP_S / 2 + 1, False)
    clock.now_s += KEEP_S / 2
    assert board.get("t/a", 0) is None


def test_it_keeps_so_many_and_old_ones_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "MAX_KEPT", 2)
    clock = Clock()
    board = LoadBoard(clock)
    for name in "abc":
        board.report(f"t/{name}", Load(name))
        board.scrape(f"t/{name}", Load(name), asleep=False)
    assert [board.get(f"t/{name}", 0) is not None for name in "abc"] == [True, True, False]
    board.report("t/a", Load("a", running=7))
    assert board.get("t/a", 0) == KnownLoad(Load("a", running=7), "reported", 0.0, False), (
        "those that are kept go on"
    )
    clock.now_s += KEEP_S + 1
    board.report("t/c", Load("c"))
    assert [board.get(f"t/{name}", 0) is not None for name in "abc"] == [False, False, True]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dp_rank", -1), ("running", 1 << 32), ("running", 1.5), ("waiting", True), ("waiting", None),
        ("queued_tokens", -1), ("queued_tokens", 1 << 60), ("kv_usage", -0.1), ("kv_usage", 1.1),
        ("kv_usage", float("nan")), ("kv_usage", True),
    ],
)  # fmt: skip
def test_what_is_no_load(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        Load("a", **{field: value})
