"""The calls of the status page: what they show to whom, their limits, and files that forbid everything foreign.

Over 400 lines because all its calls share the fixtures of one index.
"""

from __future__ import annotations

import http.client
import json
import select
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import urlencode

import pytest

from kvpool import BlockHasher, IndexClient
from kvpool.discovery.quota import Standing
from kvpool.discovery.traffic import Seen
from kvpool.discovery.worker import Publisher
from kvpool.index import limits
from kvpool.index.answer import EngineAudits, HitCurve
from kvpool.index.cost.router import Router
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.follow.hit_curves import ALL
from kvpool.index.prompt import Load
from kvpool.index.request_stats import Matched, RequestStats
from kvpool.index.serve import status
from kvpool.index.serve.auth import TokenAuth
from kvpool.index.serve.worker_pages import MAX_AUDITS
from kvpool.index.tokens.tokenizer import Tokenizer
from kvpool.index.tokens.tokenizers import Tokenizers
from tests.support.credentials import write_tokens
from tests.support.deadlines import eventually
from tests.support.fleets import Clock, Served, a_worker, joined, say, serving
from tests.support.tiny_tokenizer import write_tokenizer
from tests.support.wire import batch, removed, stored

pytestmark = pytest.mark.usefixtures("grpc_started")

WAIT_S = 60
TOKENS = list(range(1000, 1170))  # ten blocks of 16, and ten tokens
HASHES = BlockHasher(16).hashes(TOKENS)
HOSTILE = '<img src=x onerror="alert(1)">'


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.raw)


def call(served: Served, method: str, path: str, body: Any = None, token: str = "") -> Reply:
    connection = http.client.HTTPConnection(served.http, timeout=WAIT_S)
    headers = {"content-type": "application/json"}
    if token:
        headers["authorization"] = f"Bearer {token}"
    try:
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, raw, headers)
        reply = connection.getresponse()
        return Reply(reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read())
    finally:
        connection.close()


def data(served: Served, token: str = "", **query: Any) -> Any:
    reply = call(served, "GET", f"/status/data?{urlencode(query)}", token=token)
    assert reply.status == 200, reply.raw
    return reply.body


def holders(served: Served, **question: Any) -> Any:
    reply = call(served, "POST", "/status/prompt", {"model": "m", **question})
    assert reply.status == 200, reply.raw
    return reply.body


def shown(answer: Any) -> list[str]:
    return [worker["name"] for worker in answer["workers"]["rows"]]


@pytest.fixture(autouse=True)
def always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "FRESH_S", -1.0)


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    joined(fleet, a_worker("a"), stored(HASHES[:6]), stored(HASHES[:8], medium="CPU"))
    joined(fleet, a_worker("b", port=5657), stored(HASHES[:2]))
    return fleet


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[Served, dict[str, str]]]:
    """An index with a worker of each of two tenants, and tokens for one tenant, for all, and without the right."""
    path = tmp_path / "tokens.toml"
    tokens = write_tokens(path, a=(["read"], ["a"]), everyone=(["read"], ["*"]), writer=(["publish"], ["a"]))
    fleet = Fleet()
    for tenant in ("a", "b"):
        fleet.add(a_worker(f"of-{tenant}", tenant=tenant, model=f"model-{tenant}"), "flag")
    with serving(fleet, auth=TokenAuth(str(path)), http=True) as served:
        yield served, tokens


# ---- the files


def test_the_page_needs_no_token_and_forbids_what_is_foreign(guarded: tuple[Served, dict[str, str]]) -> None:
    served, _ = guarded
    at_root = call(served, "GET", "/")
    assert (at_root.status, at_root.headers["location"]) == (307, "status")
    for name in ("", *(f"/{file}" for file in status.FILES)):
        reply = call(served, "GET", f"/status{name}")
        assert reply.status == 200, name
        policy = dict(part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == policy["connect-src"] == "'self'"
        assert "unsafe" not in reply.headers["content-security-policy"]
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert b"model-a" not in reply.raw
        assert b"http://" not in reply.raw.replace(b"http://www.w3.org/2000/svg", b"")
        assert b"https://" not in reply.raw
        for making_html in (b"innerHTML", b"insertAdjacentHTML", b"document.write", b"eval(", b"style="):
            assert making_html not in reply.raw, (name, making_html)
    assert call(served, "GET", "/status/..%2fhttp.py").status == 404
    assert call(served, "POST", "/status").status == 405


def test_the_hit_ratio_of_the_engines(fleet: Fleet, tmp_path: Path) -> None:
    """The index read them from the pool, and only its metrics showed them."""
    half = Seen(blocks=1, block_tokens=80, prompt_tokens=100, spared_tokens=50)
    pool = SimpleNamespace(
        servers=(), traffic={"15m": half, "1h": Seen()}, curves={}, standings={}, audits=()
    )
    tokens = write_tokens(tmp_path / "t.toml", a=(["read"], ["a"]), everyone=(["read"], ["*"]))
    with serving(fleet, auth=TokenAuth(str(tmp_path / "t.toml")), http=True, pool=pool) as served:
        shown = data(served, tokens["everyone"])
        assert shown["traffic"] == {"15m": {"hit_ratio": 0.5}}, "nothing was asked for in the hour"
        assert shown["curve"] is None
        assert data(served, tokens["a"])["traffic"] is None, "sums over all tenants"


def test_the_curve_of_all_and_of_each_tenant(fleet: Fleet, tmp_path: Path) -> None:
    of_all = HitCurve((1, 2, 40), (0.0, 1 / 3, 0.5), 7, 90, 0.25, 1e9, 16.0, 20, 4096.0)
    curves = {ALL: of_all, "a": replace(of_all, requests=3), "b": replace(of_all, requests=4)}
    pool = SimpleNamespace(servers=(), traffic={}, curves=curves, standings={}, audits=())
    tokens = write_tokens(
        tmp_path / "t.toml", a=(["read"], ["a"]), c=(["read"], ["c"]), every=(["read"], ["*"])
    )
    with serving(fleet, auth=TokenAuth(str(tmp_path / "t.toml")), http=True, pool=pool) as served:
        assert data(served, tokens["every"])["curve"] == {
            "tenant": "", "tenants": ["", "a", "b"], "points": [[1, 0.0], [2, 0.3333], [40, 0.5]], "requests": 7,
            "requested_blocks": 90, "share": 0.25, "since_s": 1e9, "pool_blocks": 20, "block_nbytes": 4096.0,
        }  # fmt: skip
        assert data(served, tokens["every"], curve="b")["curve"]["requests"] == 4
        for asked in ("", "a", "b", "nobody"):
            own = data(served, tokens["a"], curve=asked)["curve"]
            assert (own["tenant"], own["tenants"], own["requests"]) == ("a", ["a"], 3)
        assert data(served, tokens["c"])["curve"] is None


def test_quotas_and_what_tenants_hold_of_them(fleet: Fleet, tmp_path: Path) -> None:
    """On the page, and in the status that kvpool top reads."""
    standings = {
        "a": Standing(1000, 250, is_said=True),
        "b": Standing(1000, 990, is_said=True),
        "c": Standing(5),
    }
    pool = SimpleNamespace(servers=(), traffic={}, curves={}, standings=standings, audits=())
    tokens = write_tokens(tmp_path / "t.toml", a=(["read"], ["a"]), every=(["read"], ["*"]))
    with serving(fleet, auth=TokenAuth(str(tmp_path / "t.toml")), http=True, pool=pool) as served:
        shown = data(served, tokens["every"])["quotas"]
        assert [(one["tenant"], one["held_nbytes"], one["quota_nbytes"]) for one in shown] == [
            ("b", 990, 1000), ("a", 250, 1000), ("c", None, 5),
        ]  # fmt: skip
        assert [one["tenant"] for one in data(served, tokens["a"])["quotas"]] == ["a"]
        with IndexClient(served.target, WAIT_S, token=tokens["every"]) as client:
            told = client.status().quotas
            assert [(one, *told[one][:2]) for one in told] == [
                ("a", 1000, 250),
                ("b", 1000, 990),
                ("c", 5, None),
            ]
            assert list(client.status(tenant="b").quotas) == ["b"]
        with IndexClient(served.target, WAIT_S, token=tokens["a"]) as client:
            assert list(client.status().quotas) == ["a"]


def test_what_the_audits_of_engines_found(fleet: Fleet, tmp_path: Path) -> None:
    """On the page, and in the status that kvpool top reads: of a caller's own tenants."""
    many = [EngineAudits("a", f"h{n}", f"{n:032x}", 10, 1, found_s=float(n)) for n in range(300, 0, -1)]
    audits = [*many, EngineAudits("b", "x", "ab" * 16, 5, 0, 8)]
    pool = SimpleNamespace(servers=(), traffic={}, curves={}, standings={}, audits=audits)
    tokens = write_tokens(
        tmp_path / "t.toml", b=(["read"], ["b"]), c=(["read"], ["c"]), every=(["read"], ["*"])
    )
    with serving(fleet, auth=TokenAuth(str(tmp_path / "t.toml")), http=True, pool=pool) as served:
        shown = data(served, tokens["every"])["audits"]
        assert {name: shown[name] for name in ("engines", "same", "differing", "unjudged")} == {
            "engines": 301, "same": 3005, "differing": 300, "unjudged": 8,
        }  # fmt: skip
        assert [row["host"] for row in shown["rows"]] == [f"h{n}" for n in range(300, 250, -1)]
        own = data(served, tokens["b"])["audits"]
        assert (own["engines"], own["differing"], [row["host"] for row in own["rows"]]) == (1, 0, ["x"])
        assert data(served, tokens["c"])["audits"] is None
        with IndexClient(served.target, WAIT_S, token=tokens["every"]) as client:
            assert list(client.status().audits) == many[:MAX_AUDITS]
            assert list(client.status(tenant="b").audits) == audits[-1:]
        with IndexClient(served.target, WAIT_S, token=tokens["b"]) as client:
            assert [one.tenant for one in client.status().audits] == ["b"]


def test_every_file_of_the_page_is_served() -> None:
    folder = Path(status.__file__).parent / "page"
    assert {one.name for one in folder.iterdir()} == {"index.html", *status.FILES}


# ---- who sees what


def test_without_a_token_nothing_is_shown(guarded: tuple[Served, dict[str, str]]) -> None:
    served, tokens = guarded
    question = {"model": "model-a", "tenant": "a", "token_ids": TOKENS}
    for token, expected in (("", 401), ("wrong", 401), (tokens["writer"], 403)):
        for method, path, body in (("GET", "/status/data", None), ("POST", "/status/prompt", question)):
            reply = call(served, method, path, body, token)
            assert (reply.status, set(reply.body)) == (expected, {"error"})
            assert b"of-a" not in reply.raw


def test_a_token_of_a_tenant_shows_that_tenant(guarded: tuple[Served, dict[str, str]]) -> None:
    served, tokens = guarded
    mine = data(served, tokens["a"])
    assert shown(mine) == ["of-a"]
    assert mine["fleet"]["models"] == [{"tenant": "a", "model": "model-a", "tokenizer": False}]
    assert mine["totals"] is mine["pool"] is mine["history"] is None, "sums over all tenants"
    assert "of-b" not in json.dumps(mine)
    assert "model-b" not in json.dumps(mine)
    all_of_it = data(served, tokens["everyone"])
    assert shown(all_of_it) == ["of-a", "of-b"]
    assert all_of_it["totals"]["blocks"] == 0
    other = {"model": "model-b", "tenant": "b", "token_ids": TOKENS}
    assert call(served, "POST", "/status/prompt", other, tokens["a"]).status == 403
    assert call(served, "POST", "/status/prompt", other, tokens["everyone"]).status == 200


def test_answers_are_kept_by_nobody(fleet: Fleet) -> None:
    with serving(fleet, http=True) as served:
        reply = call(served, "GET", "/status/data")
        assert reply.headers["cache-control"] == "no-store"
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["x-content-type-options"] == "nosniff"


# ---- what is shown


def test_workers_with_their_health_and_load() -> None:
    clock = Clock()
    fleet = Fleet(clock=clock)
    router = Router(fleet, clock=clock)
    for place, name in enumerate(("asleep", "away", "good", "late", "part")):
        joined(fleet, a_worker(name, port=6000 + 4 * place), stored(HASHES[:3]), removed(HASHES[2:3]))
    fleet.add(a_worker("silent", publishers=(Publisher(0, ""),)), "flag")
    joined(fleet, a_worker("two", ranks=2, port=6100))
    fleet.rank("default/away", 0).mark(stale=True, problem="no answer")
    clock.now_s += 60
    for name in ("asleep", "good", "late", "part"):
        fleet.rank(f"default/{name}", 0).heard()
        is_asleep = name == "asleep"
        router.loads.scrape(f"default/{name}", Load(name, 0, 3, 1, None, 0.5), asleep=is_asleep)
    fleet.rank("default/late", 0).mark(stale=True, problem="batches are missing")
    fleet.rank("default/part", 0).reset("a gap that nothing closed")
    fleet.rank("default/part", 0).mark(stale=False)
    with serving(fleet, http=True, router=router) as served:
        answer = data(served)
        rows = {worker["name"]: worker for worker in answer["workers"]["rows"]}
        assert {name: row["health"] for name, row in rows.items()} == {
            "asleep": "asleep", "away": "unreachable", "good": "healthy", "late": "stale", "part": "incomplete",
            "silent": "silent", "two": "unreachable",
        }  # fmt: skip
        assert answer["fleet"]["health"] == {
            "unreachable": 2, "stale": 1, "asleep": 1, "incomplete": 1, "silent": 1, "healthy": 1,
        }  # fmt: skip
        assert (rows["good"]["running"], rows["good"]["waiting"], rows["good"]["kv_usage"]) == (3, 1, 0.5)
        assert rows["silent"]["running"] is rows["silent"]["kv_usage"] is None
        assert rows["good"]["device_blocks"] == 2
        assert rows["late"]["problem"] == "batches are missing"
        assert rows["two"]["ranks"] == 2
        assert answer["fleet"]["tiers"] == {"device": 8, "host": 0, "disk": 0}
        assert shown(data(served, health="stale")) == ["late"]


def test_a_near_pool_counts_once_for_its_host_and_no_worker() -> None:
    fleet = Fleet(clock=Clock())
    for place, name in enumerate(("one", "two")):
        near = stored([1, 2, 3], parent=9, medium="CPU", ownership="kvpool", locality="LOCAL")
        worker = a_worker(name, port=5000 + 2 * place, namespace="a" * 32, near="1" * 32)
        joined(fleet, worker, near, stored([1]))
    with serving(fleet, http=True) as served:
        answer = data(served)
    assert (answer["totals"]["near_blocks"], answer["totals"]["pool_blocks"]) == (3, 0)
    assert answer["fleet"]["tiers"] == {"device": 2, "host": 0, "disk": 0}


def test_a_page_of_many_workers_at_a_time() -> None:
    fleet = Fleet()
    for number in range(450):
        fleet.add(a_worker(f"w-{number:03}", port=2000 + 2 * number), "flag")
    with serving(fleet, http=True) as served:
        names: list[str] = []
        after = ""
        for count in (200, 200, 50):
            answer = data(served, limit=200, after=after)
            assert answer["workers"]["before"] == len(names)
            names += shown(answer)
            after = answer["workers"]["next"]
            assert len(shown(answer)) == count
        assert after == ""
        assert names == sorted(names)
        assert len(set(names)) == 450
        first = call(served, "GET", "/status/data")
        assert len(first.body["workers"]["rows"]) == status.ROWS
        assert len(first.raw) < 40_000, "50 workers, however many there are"
        found = data(served, find="W-44")
        assert shown(found) == [f"w-44{digit}" for digit in range(10)]
        assert found["workers"]["matching"] == 10
        assert found["fleet"]["workers"] == 450


@pytest.mark.parametrize(
    "query", [{"limit": 201}, {"limit": "-1"}, {"limit": "x"}, {"since": "9" * 40}, {"health": "ill"}]
)
def test_a_wrong_query_is_refused(fleet: Fleet, query: dict[str, Any]) -> None:
    with serving(fleet, http=True) as served:
        reply = call(served, "GET", f"/status/data?{urlencode(query)}")
        assert reply.status == 400
        assert next(iter(query)) in reply.body["error"]


def test_names_come_as_they_are(fleet: Fleet) -> None:
    fleet.add(a_worker(HOSTILE, model=HOSTILE, port=7000), "call")
    with serving(fleet, http=True) as served:
        assert HOSTILE in shown(data(served)), "JSON; the page makes text of it"
        reply = call(served, "GET", "/status/data?health=" + "%3Cb%3E")
        assert reply.headers["content-type"] == "application/json"


def test_the_last_hour_in_samples(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = RequestStats()
    with serving(fleet, http=True, stats=stats, every_s=0.05) as served:
        stats.record_lookup(0.001, "answered", Matched(10, 4, 6, 8))
        stats.record_placed(20, 12, 15)
        wanted = [2, 30, 23, 1, 20, 12]

        def last() -> Any:
            return data(served)["history"]["samples"][-1]

        assert eventually(lambda: last()[1:7] == wanted)
        assert last()[7] is None, "no pool"
        history = data(served)["history"]
        assert history["first"] == 0
        number = len(history["samples"])
        later = data(served, since=number)["history"]
        assert later["first"] == number
        assert len(later["samples"]) <= len(data(served)["history"]["samples"]) - number
        assert data(served, since=10**6)["history"]["first"] == 0, "of an index before this one: all of it"


# ---- who holds a prompt


def test_who_holds_a_prompt(fleet: Fleet) -> None:
    with serving(fleet, http=True) as served:
        answer = holders(served, token_ids=TOKENS)
        first, second = answer.pop("rows")
        assert answer == {"tokens": 170, "ranks": 2, "holding": 2}
        assert (first["worker"], second["worker"]) == ("a", "b")
        held = {name: first[name] for name in first if name.endswith("_blocks")}
        assert held == {
            "prompt_blocks": 10, "device_blocks": 6, "local_blocks": 8, "pool_blocks": 0, "loadable_blocks": 8,
        }  # fmt: skip
        assert (first["first"], second["first"]) == (True, False)
        assert first["cost"] < second["cost"]
        before = data(served)["totals"]
        holders(served, token_ids=TOKENS)
        assert data(served)["totals"]["lookups"] == before["lookups"] == 0, "it counts in no hit rate"


def test_a_prompt_as_text(fleet: Fleet, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load("m", str(write_tokenizer(tmp_path / "tokenizer")))
    tokenizers = Tokenizers({"m": tokenizer})
    with serving(fleet, http=True, tokenizers=tokenizers) as served:
        assert data(served)["fleet"]["models"][0]["tokenizer"] is True
        assert holders(served, text="the user asks the system")["tokens"] > 3
    tokenizers.close()


@pytest.mark.parametrize(
    ("question", "code", "says"),
    [
        ({"model": "other", "token_ids": [1]}, 404, 'unknown model "other"'),
        ({"model": "m", "text": "hello"}, 400, "--tokenizer"),
        ({"model": "m", "text": ""}, 400, "empty"),
        ({"model": "m"}, 400, "only once"),
        ({"model": "m", "token_ids": [1], "text": "hello"}, 400, "only once"),
        ({"model": "m", "token_ids": [-1]}, 400, "not what is read here"),
        ({"model": "m", "token_ids": []}, 400, "tokens"),
        ({"model": "m", "token_ids": [1], "hashes": [1]}, 400, "not what is read here"),
        ({"model": "m", "tenant": "../x", "token_ids": [1]}, 400, "tenant"),
        (b"[" * 100_000, 400, "not what is read here"),
        (b'{"model": "m", "token_ids": [' + b"1," * (1 << 19) + b"1]}", 413, "at most 1048576 bytes"),
    ],
)
def test_a_wrong_question_is_refused_with_what_to_do(
    fleet: Fleet, question: Any, code: int, says: str
) -> None:
    with serving(fleet, http=True) as served:
        reply = call(served, "POST", "/status/prompt", question)
        assert (reply.status, says in reply.body["error"]) == (code, True), reply.body


def test_an_answer_about_a_prompt_names_some_of_many_ranks() -> None:
    fleet = Fleet()
    for number in range(status.MAX_HOLDERS + 30):
        fleet.add(a_worker(f"w-{number:03}", port=2000 + 2 * number), "flag")
    say(fleet, "default/w-079", 0, 0, batch(stored(HASHES)))
    with serving(fleet, http=True) as served:
        answer = holders(served, token_ids=TOKENS)
        assert (answer["ranks"], answer["holding"], len(answer["rows"])) == (80, 1, 50)
        assert answer["rows"][0]["worker"] == "w-079"


# ---- limits


def test_who_asks_too_often_is_refused_and_others_are_not(
    guarded: tuple[Served, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, tokens = guarded
    goes_on = threading.Event()

    def slowly(*_: Any) -> Any:
        assert goes_on.wait(WAIT_S)
        return []

    monkeypatch.setattr(status, "rows_of", slowly)
    connections = [
        http.client.HTTPConnection(served.http, timeout=WAIT_S) for _ in range(limits.PAGES.of_tenant + 3)
    ]
    try:
        for connection in connections:
            connection.request("GET", "/status/data", headers={"authorization": f"Bearer {tokens['a']}"})
        sockets = [connection.sock for connection in connections]
        assert eventually(lambda: len(select.select(sockets, [], [], 0)[0]) >= 3)
        goes_on.set()
        replies = [connection.getresponse() for connection in connections]
        codes = [reply.status for reply in replies]
        assert codes.count(429) == 3, codes
        assert codes.count(200) == limits.PAGES.of_tenant
        refused = next(reply for reply in replies if reply.status == 429)
        assert "status pages" in json.loads(refused.read())["error"]
    finally:
        goes_on.set()
        for connection in connections:
            connection.close()
    assert call(served, "GET", "/health").status == 200
    assert call(served, "GET", "/status/data", token=tokens["a"]).status == 200, "their places are free again"


def test_the_fleet_is_looked_at_once_for_all_who_ask_within_that_time(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    real = status.rows_of

    def counted(*given: Any) -> Any:
        nonlocal looks
        looks += 1
        return real(*given)

    monkeypatch.setattr(status, "FRESH_S", 60.0)
    monkeypatch.setattr(status, "rows_of", counted)
    with serving(fleet, http=True) as served:
        for _ in range(5):
            data(served)
    assert looks == 1
