"""``kvpool size`` on traces in both forms, and on an index."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.discovery import trace
from kvpool.discovery.trace import prompts, read_trace
from kvpool.index import HitCurve
from kvpool.index.follow.hit_curves import ALL
from tests.support.command_line import kvpool, refused
from tests.support.fleets import serving

# Three turns of one session and two of another, which begin with the same 128 tokens.
SESSIONS: list[Any] = [
    {"tools": 100, "system": 28, "turns": [
        [0.0, 320, 10, 1.0, 0.0, 0, [[1, 5]]],
        [30.0, 448, 10, 1.0, 9.0, 5, [[6, 2]]],
        [90.0, 384, 10, 1.0, 9.0, 3, [[8, 3]]],
    ]},
    {"tools": 100, "system": 28, "turns": [[0.0, 192, 10, 1.0, 0.0, 0, [[1, 3]]], [5.0, 192, 10, 1.0, 1.0, 3, []]]},
]  # fmt: skip
REQUESTS: list[Any] = [[0, 1000, 5, [[0, 2]]], [10, 1500, 5, [[0, 1], [2, 2]]], [20, 500, 5, [[0, 1]]]]


def written(path: Path, lines: list[Any]) -> Path:
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def curve(path: Path, *options: str) -> dict[str, Any]:
    ended = kvpool("size", "--trace", str(path), "--json", *options)
    assert ended.returncode == 0, ended.stderr
    answer: dict[str, Any] = json.loads(ended.stdout)
    return answer


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_sessions_share_what_they_begin_with(name: str, tmp_path: Path) -> None:
    found = curve(written(tmp_path / name, SESSIONS))
    assert found["block_tokens"] == 64
    # Of 24 blocks asked for: 5 and 3 by the first session, 2 by the second, and its whole second turn.
    assert found["points"][-1] == {"blocks": 11, "hit_rate": pytest.approx(13 / 24)}


def test_when_sessions_begin_is_an_option(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", SESSIONS)
    far = curve(path, "--apart", "1000")["points"]
    assert far != curve(path)["points"]
    assert far[-1] == curve(path)["points"][-1]


def test_requests_have_numbers_in_common(tmp_path: Path) -> None:
    path = written(tmp_path / "c.jsonl", REQUESTS)
    assert curve(path) == {
        "block_tokens": 512,
        "points": [
            {"blocks": blocks, "hit_rate": pytest.approx(hits / 6)}
            for blocks, hits in enumerate((0, 1, 2, 2), 1)
        ],
    }
    assert curve(path, "--block-tokens", "500")["block_tokens"] == 500


def test_requests_without_a_block_in_common_make_no_table(tmp_path: Path) -> None:
    ended = kvpool("size", "--trace", str(written(tmp_path / "a.jsonl", REQUESTS[:1])))
    assert ended.returncode == 0
    head, says = ended.stdout.splitlines()
    assert head.startswith("1 request for 2 blocks of 512 tokens")
    assert says == "no block was asked for twice: a pool of no size has a hit"


def test_the_table_says_what_to_buy(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", SESSIONS)
    ended = kvpool("size", "--trace", str(path), "--token-bytes", "1MiB")
    assert ended.returncode == 0
    first, *rows = ended.stdout.splitlines()
    assert first == "5 requests for 24 blocks of 64 tokens, 11 of them distinct; exact"
    assert rows[-1].split() == ["100%", "54.2%", "8", "512", "512.0", "MiB"]
    sampled = kvpool("size", "--trace", str(_long(tmp_path)), "--most-blocks", "256")
    assert "estimated from one block in" in " ".join(sampled.stdout.split())


def test_a_price_of_a_gib_says_what_a_pool_and_a_further_point_cost(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", SESSIONS)
    priced = ("--token-bytes", "16MiB", "--price", "2.5")  # a block: 1 GiB
    *_, row = kvpool("size", "--trace", str(path), *priced).stdout.splitlines()
    assert row.split() == ["100%", "54.2%", "8", "512", "8.0", "GiB", "20.00", "-"]
    points = curve(path, *priced)["points"]
    assert [one["price"] for one in points] == [one["blocks"] * 2.5 for one in points]
    lines = kvpool("size", "--trace", str(path), *priced).stdout.splitlines()
    assert lines[1].split("  ")[-2:] == ["a month", "a point more"]
    money = [row.split()[-2:] for row in lines[3:]]
    rates = [{one["blocks"]: one["hit_rate"] for one in points}[int(row.split()[2])] for row in lines[3:]]
    before, paid = 0.0, 0.0
    for rate, (price, step) in zip(rates, money, strict=True):
        expected = f"{(float(price) - paid) / (100 * (rate - before)):.2f}" if rate > before else "-"
        assert step == expected
        before, paid = rate, float(price)
    line = refused("size", "--trace", str(path), "--price", "2.5")
    assert (
        line == "kvpool: --price is of a GiB: say what a token takes, by --token-bytes or a trace's --model"
    )
    for bad in ("nan", "inf", "-1", "2.5EUR"):
        assert "Invalid value for '--price'" in refused("size", "--trace", str(path), "--price", bad)


def _long(folder: Path) -> Path:
    return written(folder / "long.jsonl", [[at, 64 * 9, 1, [[9 * at, 9]]] for at in range(200)])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "has no blocks"),
        (b"[]\n", "line 1, is no session and no request"),
        (b'{"turns": []}\n', "line 1, is no session"),
        (b"[0, 10, 1, [[0, -1]]]\n", "-1 is no count"),
        (b"[0, 10, 1, [[9223372036854775807, 1]]]\n", "9223372036854775807 is no count"),
        (b"[0, 10, 1, [[0, 99999999999]]]\n", "a prompt of 99,999,999,999 blocks"),
        (
            b'{"tools": 0, "system": 0, "turns": [[0, 64, 1, 0, 0, 3, []]]}\n',
            "turn 1 keeps 3 blocks of fewer",
        ),
        (b"\xff\xfe\n", "line 1"),
        (b"\x1f\x8bgarbage", "cannot be read"),
    ],
)
def test_what_is_no_trace_is_named(text: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(text)
    assert why in refused("size", "--trace", str(tmp_path / "t"))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "cannot be read" in refused("size", "--trace", str(tmp_path / "none"))


# ---- of an index

LIVE = HitCurve((1, 50, 100), (0.0, 0.25, 0.5), 7, 400, 0.25, 1.5e9, 16.0, 60, float(1 << 30))


@pytest.mark.usefixtures("grpc_started")
def test_an_index_tells_the_curve_of_all_and_of_a_tenant() -> None:
    curves = {ALL: LIVE, "t": HitCurve((1,), (0.125,), 2, 8, 1.0, 1.5e9)}
    pool: Any = SimpleNamespace(servers=(), curves=curves)
    with serving(pool=pool) as index:
        ended = kvpool("size", "--index", index.target)
        assert ended.returncode == 0, ended.stderr
        text = " ".join(ended.stdout.split())
        assert text.startswith("since 2017-07-1")
        assert (
            "7 requests for 400 blocks of 16 tokens, 100 of them distinct; estimated from one block in 4"
            in text
        )
        assert "50% 25.0% 50 800 50.0 GiB" in text
        assert (
            "today's size, 60 blocks, 60.0 GiB: a quarter 0.0%, half 0.0%, as it is 25.0%, twice 50.0%, four"
            in text
        )
        priced = kvpool("size", "--index", index.target, "--price", "2").stdout
        assert "50% 25.0% 50 800 50.0 GiB 100.00 4.00" in " ".join(priced.split())
        answer = json.loads(kvpool("size", "--index", index.target, "--json").stdout)
        assert answer == {
            "block_tokens": 16, "requests": 7, "requested_blocks": 400, "share": 0.25, "since_s": 1.5e9,
            "pool_blocks": 60, "block_nbytes": float(1 << 30),
            "points": [{"blocks": n, "hit_rate": rate} for n, rate in ((1, 0.0), (50, 0.25), (100, 0.5))],
        }  # fmt: skip
        of_tenant = kvpool(
            "size", "--index", index.target, "--tenant", "t", "--block-tokens", "32", "--token-bytes", "1MiB"
        )
        assert "2 requests for 8 blocks of 32 tokens, 1 of them distinct; exact" in " ".join(
            of_tenant.stdout.split()
        )
        assert "today's size is not known" in of_tenant.stdout
        assert "--price is of a GiB: say" in refused(
            "size", "--index", index.target, "--tenant", "t", "--price", "1"
        )
        assert "knows no request of tenant x" in refused("size", "--index", index.target, "--tenant", "x")


@pytest.mark.usefixtures("grpc_started")
def test_an_index_without_a_pool_says_so() -> None:
    with serving() as index:
        assert "knows no request yet: it needs --pool" in refused("size", "--index", index.target)


def test_a_short_trace_of_long_prompts_takes_no_more_memory_than_one_of_them(tmp_path: Path) -> None:
    """A few digits name a million blocks; a thousand sessions wait for their turn."""
    session = {"tools": 0, "system": 0, "turns": [[0, 1 << 20, 1, 1, 0, 0, [[1, 1 << 20]]]] * 2}
    path = written(tmp_path / "trace", [session] * 1000)
    before = int(Path("/proc/self/statm").read_text().split()[1])
    asked = prompts(read_trace(path, 1), apart_s=60)
    assert [len(next(asked)) for _ in range(3)] == [1 << 20] * 3
    grown = (int(Path("/proc/self/statm").read_text().split()[1]) - before) * os.sysconf("SC_PAGE_SIZE")
    assert grown < 512 << 20, "a thousand would be 8 GiB"


@pytest.mark.parametrize(("lines", "why"), [
    ([[0, 1, 1, [[0, (1 << 20) + 1]]]], "1,048,576 are read"),
    ([[0, 1, 1, [[0, 0]] * 2000]] * 3, "more than 5,000 prompts and runs"),
    (["x" * (1 << 21)], "a line of more than 1MiB"),
])  # fmt: skip
def test_a_trace_has_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[Any], why: str
) -> None:
    monkeypatch.setattr(trace, "MAX_PARTS", 5000)
    monkeypatch.setattr(trace, "MAX_LINE_NBYTES", 1 << 20)
    assert why in refused("size", "--trace", str(written(tmp_path / "trace", lines)))
