"""``python -m benchmarks device``: its figures, its tables, and bytes that came back wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import device
from benchmarks.device import run_device
from benchmarks.measure import CACHES, CallsMeasured, CopiesMeasured, EngineMeasured
from benchmarks.measure.copies import Speed
from kvpool.errors import ConfigError, KVPoolError
from kvpool.transfer import BlockCopier
from tests.support.command_line import benchmark

SMALL_RUN: dict[str, Any] = {"blocks": 1, "tokens": [16], "rounds": 1}


def test_it_measures_copies_an_engine_and_calls_and_says_what_it_ran_on() -> None:
    arguments = ["device", "--blocks", "1", "--tokens", "16", "--tokens", "32", "--rounds", "1"]
    report = json.loads(benchmark(*arguments, "--json").stdout)
    rows = report["rows"]
    assert [(row["model"], row["layout"], row["block_tokens"]) for row in rows] == [
        (cache.model, cache.layout, tokens) for cache in CACHES for tokens in (16, 32)
    ]
    on_cpu = report["device"] == "cpu"
    assert (report["note"] is not None) == on_cpu
    for row in rows:
        assert row["bytes_equal"] is True
        assert row["launches"] >= 1
        for direction in (row["store"], row["load"], row["both"]):
            assert min(direction.values()) > 0
        assert (row["target"] is None) == (
            on_cpu or row["block_nbytes"] < report["targets"]["from_block_nbytes"]
        )
    assert report["engine"]["bytes_equal"] is True
    assert (report["engine"]["store_slower"] is None) == on_cpu
    assert report["calls"]["bytes_equal"] is True
    assert (report["calls"]["synchronizing"] is None) == on_cpu


def test_it_prints_what_an_accelerator_adds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures as a device would give them; no device is asked."""
    speed = Speed(55.5, 55.9, 0.99)
    measured = CopiesMeasured(
        "gpt-oss-120b", "LBNHC", 128, 8784 << 10, 64, 1, True, speed, speed, Speed(100.1, 100.2, 0.89), "missed",
    )  # fmt: skip
    cost = EngineMeasured(8192, 1 << 30, True, 221.4, 0.0062, 3.1, 0.008, 3.3, 0.05, "met")
    calls = CallsMeasured(64, {"cudaLaunchKernel": 20, "cudaStreamSynchronize": 2}, 2, 0, True)
    monkeypatch.setattr(device, "measure_copies", lambda *_, **__: measured)
    monkeypatch.setattr(device, "measure_engine", lambda *_, **__: cost)
    monkeypatch.setattr(device, "measure_calls", lambda *_, **__: calls)
    monkeypatch.setenv("COLUMNS", "100")
    run_device(**SMALL_RUN, as_json=False)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    told = " ".join(printed.split())
    assert "gpt-oss-120b LBNHC 128 8784KiB 55.5 55.9 0.99 55.5 55.9 0.99 100.1 100.2 0.89 missed" in told
    assert "products, with stores +0.62% 3.10 ms met (at most 1%)" in told
    assert "with loads all the time +5.00%" in told
    assert "of 64 blocks: 2 (target 0)" in told
    assert "20 cudaLaunchKernel, 2 cudaStreamSynchronize" in told


def test_it_fails_when_blocks_come_back_with_other_bytes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockCopier, "scatter", lambda *_: None)
    with pytest.raises(KVPoolError, match=r"other bytes.*Llama-3-8B LBNHC 16.*engine, pool"):
        run_device(**SMALL_RUN, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert not any(row["bytes_equal"] for row in report["rows"]), "the figures are printed all the same"


def test_it_says_what_to_change() -> None:
    with pytest.raises(ConfigError, match="lower --blocks"):
        run_device(blocks=1 << 14, rounds=1, as_json=True)
    with pytest.raises(ConfigError, match="--trace /nowhere"):
        run_device(**SMALL_RUN, trace=Path("/nowhere/trace.json"), as_json=True)
