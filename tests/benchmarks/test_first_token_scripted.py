"""``python -m benchmarks lengths --scripted-tokens``: whence each engine has its prompt. No time is promised."""

from __future__ import annotations

import json

import pytest

from benchmarks.first_token_scripted import BLOCK_NBYTES, STATED_TOKENS, run_scripted

TOKENS = 128


def test_a_hosts_second_engine_moves_no_bytes_over_the_network(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_scripted(server=None, tokens=TOKENS, rounds=1, link_nbytes_s=10**9, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["stated_tokens"]) == (TOKENS, STATED_TOKENS)
    nbytes = TOKENS * found["token_nbytes"]
    assert nbytes == 2 * BLOCK_NBYTES
    moved = {
        (one["engine"], one["how"]): (one["sent_nbytes"] / nbytes, one["received_nbytes"] / nbytes)
        for one in found["scripted"]
    }
    wholes = {one: [round(share, 1) for share in shares] for one, shares in moved.items()}
    assert wholes == {
        ("any", "computed"): [0, 0],
        ("host 1, first", "cold"): [0, 1],  # once with a server alone, once behind a near pool
        ("host 1, second", "pool"): [1, 0],
        ("host 1, third", "pool"): [1, 0],
        ("host 1, second", "near"): [0, 0],
        ("host 1, third", "near"): [0, 0],
        ("host 2, first", "far"): [1, 0],
        ("host 2, second", "near"): [0, 0],
        ("host 2, third", "near"): [0, 0],
        ("any", "local"): [0, 0],
    }
    for one in found["scripted"]:
        assert one["first_token_s"] == pytest.approx(one["lookup_s"] + one["load_s"] + one["compute_s"])
        assert one["hit_tokens"] == (0 if one["how"] in ("computed", "cold") else TOKENS)
        assert (one["load_s"] > 0) == (one["how"] in ("pool", "near", "far"))
        assert one["identical"]
    by_how = {one["how"]: one["stated_s"] for one in found["scripted"]}
    by_model = {one["how"]: one["model_s"] for one in found["scripted"]}
    assert by_model["local"] < by_model["near"] < by_model["far"] == by_model["pool"] < by_model["cold"]
    assert by_how["local"] < by_how["computed"] < by_how["cold"]
