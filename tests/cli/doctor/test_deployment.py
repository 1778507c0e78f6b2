"""``kvpool doctor`` on the parts of a deployment beside pool and index: workers where they serve, fronts, pickers."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import free_ports
from kvpool import Namespace, open_store
from kvpool.cli.doctor.page import MAX_NBYTES, Page, read_page
from kvpool.cli.doctor.serving import REASON, front_findings, samples
from kvpool.cli.doctor.workers import Workers
from kvpool.discovery.facts import announce_facts
from kvpool.discovery.worker import Publisher
from kvpool.errors import IndexUnavailable
from kvpool.index.client.client import IndexClient
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.front import placement
from tests.support.command_line import kvpool, refused
from tests.support.doctor import announced, examined, sentences, worker
from tests.support.feeds import misbehaving
from tests.support.fleets import a_worker, serving
from tests.support.metrics_pages import PageServer, answer, serving_page

PAGE = b"""# HELP kvpool_lookup_requests_total Requests whose prefix was looked up in the pool.
kvpool_lookup_requests_total{engine="0",model_name="m"} 7.0
kvpool_lookup_requests_total{engine="1",model_name="m"} 3.0
kvpool_loaded_blocks_total{engine="0",model_name="m"} 1200.0
vllm:num_requests_running{engine="0"} 1.0
"""
FAULT = b'kvpool_lookup_failures_total{cause="timeout",engine="0"} 2.0\n'


def shows(pages: PageServer, body: bytes, status: str = "200 OK") -> None:
    pages.say = lambda connection: connection.sendall(answer(body, status))


def test_samples_are_summed_over_their_labels() -> None:
    assert samples(PAGE) == {"kvpool_lookup_requests_total": 10.0, "kvpool_loaded_blocks_total": 1200.0}
    assert samples(b'kvpool_x{a="} 5"} 1e3\nkvpool_y nonsense\nkvpool_z -') == {"kvpool_x": 1000.0}


def test_workers_are_asked_where_they_serve(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool"
    nowhere = f"http://127.0.0.1:{free_ports(1)[0]}"
    with misbehaving() as publisher, serving_page() as pages:

        def judged(address: str) -> tuple[str, str]:
            with announced(url, worker("w", publisher.publisher, address=address)):
                _, findings = examined("--pool", url)
            (one,) = [one for one in findings if one["about"] == "serving"]
            return one["level"], one["says"]

        shows(pages, PAGE)
        level, says = judged(pages.address)
        assert (level, says) == (
            "ok",
            f"worker w at {pages.address}: requests looked up since its start: 10; blocks loaded: 1,200, stored: 0; no "
            "fault",
        )
        shows(pages, PAGE + FAULT)
        level, says = judged(pages.address)
        assert level == "warn"
        assert "kvpool_lookup_failures_total 2" in says
        shows(pages, PAGE + b'kvpool_enabled{engine="0"} 1.0\nkvpool_enabled{engine="1"} 0.0\n')
        level, says = judged(pages.address)
        assert (level, says.partition(": ")[0]) == (
            "fail",
            f"worker w at {pages.address} goes without the pool",
        )
        shows(pages, b"vllm:num_requests_running 1.0\n")
        assert judged(pages.address)[1].endswith("its metrics have nothing of kvpool")
        shows(pages, b"no", "404 Not Found")
        assert "answers with 404" in judged(pages.address)[1]
        level, says = judged(nowhere)
        assert level == "warn"
        assert "does not answer: Connection refused" in says


def test_a_front_is_asked_for_its_models(tmp_path: Path) -> None:
    models = json.dumps({"object": "list", "data": [{"id": "m"}]}).encode()
    with serving_page() as pages:

        def judged(*arguments: str) -> tuple[int, str]:
            code, findings = examined("--front", pages.address, *arguments)
            return code, sentences(findings, "fail" if code else "ok")

        shows(pages, models)
        assert judged() == (0, f"{pages.address} answers; models: m -> ")
        assert b"GET /v1/models" in pages.asked[-1]
        for none in (b"{}", b"[" * 100_000):
            shows(pages, none)
            assert "is no front of vLLM workers" in judged()[1]
        shows(pages, b"no healthy upstream", "503 Service Unavailable")
        code, says = judged()
        assert (code, "is answered with 503: no healthy upstream" in says) == (1, True)
        shows(pages, b"{}", "401 Unauthorized")
        _, findings = examined("--front", pages.address)
        assert "wants a key (401)" in sentences(findings, "warn")
        shows(pages, models)
        url = f"file://{tmp_path}/pool"
        with misbehaving() as publisher:
            other = worker("w", publisher.publisher, model="other", address=pages.address)
            with announced(url, other):
                _, findings = examined("--pool", url, "--front", pages.address)
        assert f'{pages.address} does not list "other"' in sentences(findings, "warn")
    code, findings = examined("--front", pages.address)
    assert code == 1
    assert "does not answer: Connection refused -> start it" in sentences(findings, "fail")
    assert "write http://HOST:PORT" in refused("doctor", "--front", "10.0.0.1:8080")


@pytest.mark.parametrize("said", [
    b"H", b"HTTP/1.1 200 OK\r\nx: ", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;",
])  # fmt: skip
def test_a_page_that_drips_for_ever_ends_in_time(said: bytes) -> None:
    def drips(connection: socket.socket) -> None:
        connection.sendall(said)
        while not pages.closing.wait(0.1):
            connection.sendall(b"x")

    with serving_page() as pages:
        pages.say = drips
        assert read_page(f"{pages.address}/metrics", None) == Page(away="no answer within 3 s")


def test_a_page_without_end_is_read_to_a_bound() -> None:
    def floods(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while not pages.closing.is_set():
            connection.sendall(bytes(1 << 20))

    with serving_page() as pages:
        pages.say = floods
        assert len(read_page(pages.address, None).body) == MAX_NBYTES


def test_a_front_that_sends_elsewhere_is_told_and_not_followed() -> None:
    with serving_page() as elsewhere, serving_page() as pages:
        shows(pages, b"", f"307 Temporary Redirect\r\nlocation: {elsewhere.address}/v1/models?token=hunter2")
        (found,) = front_findings(pages.address, [], None)
        assert elsewhere.asked == []
    assert found.level == "fail"
    assert f"is answered with 307: it sends on to {elsewhere.address}/v1/models?token=***" in found.says


@pytest.mark.parametrize("url", ["http://u:hunter2@h:1", "http://h:1?key=hunter2", "ftp://u:hunter2@h"])
def test_a_fronts_url_has_no_secret_and_none_is_told(url: str) -> None:
    said = refused("doctor", "--front", url)
    assert "write http://HOST:PORT" in said
    assert "hunter2" not in said


def test_a_front_that_asks_no_picker_is_found_out() -> None:
    assert REASON == placement.REASON
    models = json.dumps({"data": [{"id": "m"}]}).encode()
    with serving_page() as pages:

        def warned(placed: bool, has_picker: bool) -> list[str]:
            shows(pages, models, "200 OK" + "\r\nx-kvpool-reason: load" * placed)
            found = front_findings(pages.address, [], None, has_picker=has_picker)
            return [one.says for one in found if one.level == "warn"]

        (says,) = warned(placed=False, has_picker=True)
        assert "no picker placed its request" in says
        assert warned(placed=True, has_picker=True) == warned(placed=False, has_picker=False) == []


@pytest.mark.usefixtures("grpc_started")
def test_a_picker_and_an_index_are_asked_for_their_health() -> None:
    fleet = Fleet()
    fleet.add(a_worker("w"), "flag")
    with serving(fleet, place={}, is_warm=lambda: False, warm_up_s=3600.0) as served:
        code, findings = examined("--index", served.target, "--picker", served.ext_proc)
        assert code == 1
        assert f"{served.ext_proc} says that it does not serve" in sentences(findings, "fail")
        assert f"{served.target} says that it does not serve yet" in sentences(findings, "warn")
    with serving(fleet, place={}) as served:
        _, findings = examined("--index", served.target, "--picker", served.ext_proc)
        assert f"{served.ext_proc} picks endpoints" in sentences(findings, "ok")
        assert "does not serve" not in sentences(findings, "warn")
    code, findings = examined("--picker", "127.0.0.1:1")
    assert code == 1
    assert "no picker answers on 127.0.0.1:1: nothing listens there" in sentences(findings, "fail")


@pytest.mark.usefixtures("grpc_started")
@pytest.mark.usefixtures("grpc_started")
def test_an_index_that_goes_meanwhile_is_a_finding_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, asked = Fleet(), []
    for name in "ab":
        fleet.add(a_worker(name, model=name), "flag")

    def goes(client: IndexClient, model: str, **fields: Any) -> None:
        asked.append(model)
        raise IndexUnavailable(f"no index answers on {index.target}: its host does not answer")

    monkeypatch.setattr(IndexClient, "lookup", goes)
    with serving(fleet) as index:
        code, findings = examined("--index", index.target)
    assert (code, asked) == (1, ["a"]), "it is asked once"
    assert "answers: it follows 2 workers with 2 ranks" in sentences(findings, "ok")
    assert f"no index answers on {index.target}: its host does not answer" in sentences(findings, "fail")


def test_a_worker_that_answers_nowhere_is_one_finding(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool"
    events, serves, *others = free_ports(4)
    dead = worker("dead", Publisher(0, f"tcp://127.0.0.1:{events}"), address=f"http://127.0.0.1:{serves}")
    stock = a_worker("stock", address="", publishers=tuple(
        Publisher(rank, f"tcp://127.0.0.1:{port}") for rank, port in enumerate(others)
    ))  # fmt: skip
    fleet = Fleet()
    for one in (dead, stock):
        fleet.add(one, "call")
        for publisher in one.publishers:
            fleet.rank(one.id, publisher.dp_rank).mark(stale=True, problem="it is silent")

    with announced(url, dead), serving(fleet) as served, serving(Fleet()) as other:

        def about(name: str) -> list[tuple[str, str]]:
            _, findings = examined("--pool", url, "--index", served.target, "--index", other.target)
            return [(one["level"], one["says"]) for one in findings if f"worker {name} " in one["says"]]

        assert about("dead") == [(
            "fail",
            f"worker dead answers nowhere: not at {dead.address} (Connection refused), not where its events are "
            f"({dead.publishers[0].events})",
        )]  # fmt: skip
        assert [level for level, _ in about("stock")] == ["fail"]
        fleet.rank(dead.id, 0).mark(stale=False)
        ((level, says),) = about("dead")
        assert level == "warn", "this host may be the one that reaches nobody"
        assert f"answers nowhere from this host: not at {dead.address}" in says
        assert f"The index {served.target} hears it" in says


def test_what_a_doctor_cannot_try_is_not_called_away() -> None:
    there = Workers([a_worker("w", address="", publishers=(Publisher(0, "ipc:///events"),))], None)
    there.ask()
    assert [one.level for one in there.findings()] == ["warn"]
    assert not there.is_away(there.by_id["default/w"])


def test_a_name_that_no_resolver_takes_is_away() -> None:
    """Whoever writes to the pool chooses the names of its records."""
    publishers = (Publisher(0, "tcp://a..b:5557"),)
    there = Workers([a_worker("w", address="http://a..b:8000", publishers=publishers)], None)
    there.ask()
    assert there.is_away(there.by_id["default/w"])


def test_a_model_has_one_name_that_requests_ask_for(tmp_path: Path) -> None:
    """A record of facts has another, which no path is in."""
    url = f"file://{tmp_path}/pool"
    namespace = Namespace("default", {"weights": "a" * 32})
    with misbehaving() as publisher, open_store(url) as store:
        announce_facts(store, namespace, "llama")
        served = worker("w", publisher.publisher, model="/models/llama", namespace=namespace.hex)
        with announced(url, served):
            _, findings = examined("--pool", url)
    named = {one["about"]: one["says"] for one in findings if "llama" in one["says"]}
    assert set(named) == {"sharing", "workers"}
    assert named["sharing"].startswith('workers of model "/models/llama" have one namespace')
    assert ' of model "/models/llama": ' in named["workers"]


def test_what_is_examined_can_stand_in_the_environment(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool"
    open_store(url).close()

    def report(**variables: str) -> dict[str, Any]:
        ended = kvpool("doctor", "--json", env={**os.environ, **variables})
        return dict(json.loads(ended.stdout))

    assert report(KVPOOL_POOL=url)["not_examined"] == ["index", "front", "picker"]
    both = report(KVPOOL_INDEX="127.0.0.1:1 127.0.0.1:2")
    assert both["not_examined"] == ["pool", "front", "picker"]
    assert len([one for one in both["findings"] if one["about"] == "index"]) == 2
