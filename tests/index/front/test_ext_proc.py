"""The endpoint picker behind a real Envoy, as ``deploy/envoy.yaml`` configures it, with scripted workers behind."""

from __future__ import annotations

import hashlib
import json
import re
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from demo.engine_process import free_ports
from tests.support import envoy
from tests.support.deadlines import ends_within, eventually
from tests.support.fronts import ASKED, envoy_cluster, proxy_cluster
from tests.support.http_client import TEXT, get, post
from tests.support.index_process import running
from tests.support.openai_worker import scripted

pytestmark = pytest.mark.usefixtures("grpc_started")

MESSAGE_TIMEOUT_S = 2.0  # of deploy/envoy.yaml
MODES = pytest.mark.parametrize("duplex", [False, True], ids=["buffered", "duplex"])


@MODES
def test_a_request_goes_to_the_worker_that_holds_its_prompt(tmp_path: Path, duplex: bool) -> None:
    with envoy_cluster(tmp_path, duplex=duplex) as there:
        for name in ("b", "c"):
            text = f"{name} {TEXT}"
            there.hold(name, text)
            reply = post(there.url, {"model": "m", "prompt": text})
            assert (reply.status, reply.worker) == (200, name)
            shown = {key: value for key, value in reply.headers.items() if key.startswith("x-kvpool")}
            blocks = str(len(text) // 16)
            assert shown == {
                "x-kvpool-worker": name, "x-kvpool-reason": "prefix", "x-kvpool-matched-blocks": blocks,
                "x-kvpool-prompt-blocks": blocks,
            }  # fmt: skip
            assert there.workers[name].headers[-1].get("x-kvpool-worker") == name, "the request says it, too"


@MODES
def test_requests_arrive_as_they_were_sent(tmp_path: Path, duplex: bool) -> None:
    with envoy_cluster(tmp_path, duplex=duplex) as there:
        for size in (0, 1 << 17, (16 << 20) - 100):
            body = json.dumps({"model": "m", "prompt": "x" * size}).encode() if size else b""
            reply = post(there.url, body)
            assert reply.status == 200
            assert json.loads(reply.body)["sha256"] == hashlib.sha256(body).hexdigest()
        assert get(f"{there.url}/v1/models").headers["x-kvpool-reason"] in ("unreadable", "load")
        reply = post(there.url, {"model": "m", "input": "x"}, "/v1/embeddings")
        assert (reply.status, reply.headers["x-kvpool-reason"]) == (200, "no-tokens")


def test_who_sends_a_request_cannot_say_where_it_goes(tmp_path: Path) -> None:
    with envoy_cluster(tmp_path) as there:
        there.hold("b")
        forged = {
            "x_gateway_destination_endpoint": there.workers["c"].at, "x_kvpool_worker": "c", "x_kvpool_tenant": "c",
            "x_data_parallel_rank": "7",
        }  # fmt: skip
        reply = post(there.url, {"model": "m", "prompt": TEXT}, **forged)
        assert (reply.worker, reply.headers["x-kvpool-worker"]) == ("b", "b")
        seen = {name.lower(): value for name, value in there.workers["b"].headers[-1].items()}
        assert seen["x-kvpool-worker"] == "b"
        assert seen["x-gateway-destination-endpoint"].split(",")[0] == there.workers["b"].at
        assert "x-data-parallel-rank" not in seen
        post(there.url, {"model": "x", "prompt": TEXT}, x_kvpool_matched_blocks="9")
        for worker in there.workers.values():
            assert all(sent.get("x-kvpool-matched-blocks") != "9" for sent in worker.headers)


@pytest.mark.parametrize("nbytes", [0, 2 << 20])
def test_the_next_best_worker_serves_where_the_best_cannot_be_reached(tmp_path: Path, nbytes: int) -> None:
    with envoy_cluster(tmp_path) as there:
        there.hold("b")
        there.hold("c", TEXT[:32])
        there.workers["b"].stop()
        reply = post(there.url, {"model": "m", "prompt": TEXT, "user": "x" * nbytes})
        assert (reply.status, reply.worker) == (200, "c")
        assert reply.headers["x-kvpool-worker"] == "b", "where it was meant to go"


def test_where_an_index_hangs_a_request_is_served_after_the_deadline_of_its_answer(tmp_path: Path) -> None:
    assert f"message_timeout: {MESSAGE_TIMEOUT_S:g}s" in envoy.CONFIG.read_text()
    with ExitStack() as parts:
        (worker,) = parts.enter_context(scripted("a"))
        known = f"a=tcp://127.0.0.1:{free_ports(1)[0]},model=m,block=16,address=http://{worker.at}"
        index = parts.enter_context(running("--ext-proc", "127.0.0.1:0", "--worker", known))
        found = re.search(r"ext_proc on port ([0-9]+)", index.ready)
        assert found is not None
        front = parts.enter_context(
            envoy.running(
                tmp_path, [worker.at], [f"127.0.0.1:{found[1]}"], message_timeout_s=MESSAGE_TIMEOUT_S
            )
        )

        def is_placed() -> bool:
            reply = post(front.url, {"model": "m", "prompt": TEXT})
            assert (reply.status, reply.worker) == (200, "a")
            return "x-kvpool-reason" in reply.headers

        assert eventually(lambda: front.healthy("workers") == front.healthy("picker") == 1)
        assert eventually(is_placed)
        index.process.send_signal(signal.SIGSTOP)
        parts.callback(index.process.send_signal, signal.SIGCONT)
        with ends_within(MESSAGE_TIMEOUT_S):
            assert not is_placed()
        index.process.send_signal(signal.SIGCONT)
        assert eventually(is_placed)


def test_without_an_index_a_dead_worker_costs_no_request(tmp_path: Path) -> None:
    with envoy_cluster(tmp_path, names=("a", "b")) as there:
        there.index.stop()
        there.workers["b"].stop()
        # Faster than health checks find it: each retry goes to a worker that was not tried.
        statuses = [post(there.url, {"model": "m", "prompt": TEXT}).status for _ in range(30)]
        assert set(statuses) == {200}, statuses
        assert "x-kvpool-reason" not in post(there.url, {"model": "m", "prompt": TEXT}).headers


def test_a_connection_that_a_worker_closes_when_idle_is_not_used_again(tmp_path: Path) -> None:
    with envoy_cluster(tmp_path, names=("a",)) as there:
        assert post(there.url, {"model": "m", "prompt": TEXT}).status == 200
        assert there.front.counters("cluster.workers.upstream_cx_active")[
            "cluster.workers.upstream_cx_active"
        ]

        def idle_timeouts() -> int:
            name = "cluster.workers.upstream_cx_idle_timeout"
            return there.front.counters(name)[name]

        assert eventually(lambda: idle_timeouts() == 1), "before the 5 s of vLLM's server"


@pytest.mark.parametrize("front", ["envoy", "router"])
def test_a_callers_name_of_its_request_reaches_the_worker(front: str, tmp_path: Path) -> None:
    with envoy_cluster(tmp_path) if front == "envoy" else proxy_cluster() as there:
        reply = post(there.url, ASKED, x_request_id="what my log says")
        assert there.workers[reply.worker].seen()["x-request-id"] == "what my log says"


@MODES
def test_a_session_stays_by_the_header_that_is_told(tmp_path: Path, duplex: bool) -> None:
    with envoy_cluster(tmp_path, duplex=duplex, place={"session_header": "X-Conversation"}) as there:

        def placed(**headers: str) -> str:
            body = {"model": "m", "input": "x" * 40_000}
            return str(post(there.url, body, "/v1/embeddings", **headers).worker)

        assert len({placed(x_conversation="s") for _ in range(6)}) == 1
        assert len({placed(x_session_id="s") for _ in range(6)}) > 1
