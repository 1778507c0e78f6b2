"""``python -m benchmarks e2e`` as small as it goes, on a server: what it measures, and what it leaves there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.e2e_report import HOST, LMCACHE, OFF, OWN
from benchmarks.e2e_workload import QUESTIONS, TURNS
from tests.support.command_line import benchmark
from tests.support.servers import running
from tests.support.soak import LONG_SOAK

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


@pytest.mark.soak
@LONG_SOAK
def test_bench_e2e_loads_what_it_measures_and_leaves_nothing(tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    with running("valkey-server", tmp_path) as server:
        server.client.set("other", "theirs")
        ended = benchmark(
            "e2e", "--pool", server.url, "--chats", "1", "--documents", "1", "--probes", "1",
            "--prompt-tokens", "600", "--width", "256", "--layers", "4", "--no-host-tier",
            "--plot", str(plot), "--json", timeout_s=600,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        assert server.client.keys() == [b"other"]
    report = json.loads(ended.stdout)
    assert report["faults"] == []
    assert set(report["unavailable"]) == {HOST, LMCACHE}
    assert [(row["arm"], row["kind"], row["requests"]) for row in report["rows"]] == [
        (arm, kind, count) for arm in (OFF, OWN) for kind, count in (("chat", TURNS), ("document", QUESTIONS))
    ]
    asked = {(one["arm"], one["kind"], one["number"]): one for one in report["answers"]}
    for (arm, kind, number), one in asked.items():
        assert one["identical"]
        assert 0 < one["first_token_s"] < one["finished_s"]
        assert one["prompt_tokens"] == asked[OFF, kind, number]["prompt_tokens"]
        assert (one["loaded_tokens"] > 0) <= (arm == OWN)
    assert asked[OFF, "probe", 0]["cached_tokens"] == 0
    assert asked[OFF, "again", 0]["cached_tokens"] == 512
    assert asked[OWN, "probe", 0]["loaded_tokens"] == 512
    assert asked[OWN, "again", 0]["loaded_tokens"] == 0
    off, own = report["probes"]
    assert own["over_recompute"] == pytest.approx(own["first_s"] / off["first_s"])
    assert own["over_local_hit"] == pytest.approx(own["first_s"] / off["again_s"])
    assert plot.read_bytes().startswith(b"\x89PNG")
