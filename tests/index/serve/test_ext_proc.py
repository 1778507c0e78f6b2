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
from kvpool import BlockHasher
from kvpool.index.fleet import Fleet
from tests.support import envoy
from tests.support.deadlines import ends_within, eventually
from tests.support.fleets import say
from tests.support.fronts import envoy_cluster
from tests.support.http_client import TEXT, get, post
from tests.support.index_process import running
from tests.support.openai_worker import scripted
from tests.support.wire import batch, stored

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
def test_chats_and_token_ids_find_their_worker(tmp_path: Path, duplex: bool) -> None:
    with envoy_cluster(tmp_path, duplex=duplex) as there:
        there.hold("c", f"user: {TEXT}\n")
        there.hold("b", TEXT)
        chat = {"model": "m", "messages": [{"role": "user", "content": TEXT}]}
        assert post(there.url, chat, "/v1/chat/completions").worker == "c"
        assert post(there.url, {"model": "m", "prompt": list(TEXT.encode())}).worker == "b"
        assert post(there.url, {"model": "m", "prompt": [TEXT, "another"]}).worker == "b"


@MODES
def test_responses_find_their_worker_by_the_tokens_that_one_of_them_says(
    tmp_path: Path, duplex: bool
) -> None:
    with envoy_cluster(tmp_path, duplex=duplex) as there:
        for worker in there.workers.values():
            worker.render = lambda body: list(body["input"].encode())
        there.hold("c")
        reply = post(there.url, {"model": "m", "input": TEXT}, "/v1/responses")
        assert (reply.worker, reply.headers["x-kvpool-reason"]) == ("c", "prefix")
        assert json.loads(reply.body)["path"] == "/v1/responses"
        assert sum(worker.rendered for worker in there.workers.values()) == 1


@MODES
@pytest.mark.parametrize("size", [0, 1 << 17, (16 << 20) - 100])
def test_bodies_arrive_as_they_were_sent(tmp_path: Path, duplex: bool, size: int) -> None:
    with envoy_cluster(tmp_path, duplex=duplex) as there:
        body = json.dumps({"model": "m", "prompt": "x" * size}).encode() if size else b""
        reply = post(there.url, body)
        assert reply.status == 200
        assert json.loads(reply.body)["sha256"] == hashlib.sha256(body).hexdigest()


@MODES
def test_what_is_wrong_with_a_request_is_for_the_worker_to_say(tmp_path: Path, duplex: bool) -> None:
    with envoy_cluster(tmp_path, duplex=duplex) as there:
        for body, reason in (
            (b"{", "unreadable"),
            (b"[1, 2]", "unreadable"),
            (b"\xff\xfe", "unreadable"),
            (b'{"model": "m", "prompt": 7}', "unreadable"),
            (b'{"model": 7}', "unreadable"),
            (b'{"model": "m", "prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "unreadable"),
            (b'{"model": "other", "prompt": "x"}', "unknown-model"),
            (b'{"prompt": "x"}', "unreadable"),
        ):
            reply = post(there.url, body)
            assert (reply.status, reply.headers["x-kvpool-reason"]) == (200, reason), body
            assert json.loads(reply.body)["sha256"] == hashlib.sha256(body).hexdigest()


@MODES
def test_requests_without_a_body_and_other_paths(tmp_path: Path, duplex: bool) -> None:
    with envoy_cluster(tmp_path, duplex=duplex) as there:
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


def test_without_an_index_requests_are_served(tmp_path: Path) -> None:
    with envoy_cluster(tmp_path) as there:
        there.index.stop()
        assert {post(there.url, {"model": "m", "prompt": TEXT}).status for _ in range(20)} == {200}
        assert "x-kvpool-reason" not in post(there.url, {"model": "m", "prompt": TEXT}).headers


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


def test_an_old_connection_to_the_index_costs_no_request(tmp_path: Path) -> None:
    ended = "cluster.picker.upstream_cx_close_notify"
    with envoy_cluster(tmp_path, max_connection_age_s=0.2) as there:
        replies = []

        def have_ended() -> bool:
            replies.append(post(there.url, {"model": "m", "prompt": TEXT}))
            return there.front.counters(ended)[ended] >= 3

        assert eventually(have_ended)
        assert {(reply.status, reply.headers.get("x-kvpool-reason")) for reply in replies} == {(200, "load")}


def test_without_an_index_a_dead_worker_costs_no_request(tmp_path: Path) -> None:
    with envoy_cluster(tmp_path, names=("a", "b")) as there:
        there.index.stop()
        there.workers["b"].stop()
        # Faster than health checks find it: each retry goes to a worker that was not tried.
        statuses = [post(there.url, {"model": "m", "prompt": TEXT}).status for _ in range(30)]
        assert set(statuses) == {200}, statuses


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


def test_callers_do_not_reach_what_is_between_engines(tmp_path: Path) -> None:
    with envoy_cluster(tmp_path, names=("a",)) as there:
        assert post(there.url, {"request_ids": ["x"]}, "/inference/v1/abort_requests").status == 404
        assert there.workers["a"].bodies == []


def test_a_worker_that_says_no_tokens_in_time_costs_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with envoy_cluster(tmp_path, place={"timeout_s": 0.2}) as there:
        there.hold("b")
        for worker in there.workers.values():
            worker.render_delay_s = 1.0
        assert post(there.url, {"model": "m", "prompt": TEXT}).headers["x-kvpool-reason"] == "no-tokens"
        # They were made all the same, for the next one.
        assert eventually(
            lambda: post(there.url, {"model": "m", "prompt": TEXT}).headers["x-kvpool-reason"] == "prefix"
        )
        assert sum(worker.rendered for worker in there.workers.values()) == 1
        for worker in there.workers.values():
            worker.render, worker.render_delay_s = None, 0.0
        for _ in range(5):
            reply = post(there.url, {"model": "m", "prompt": f"another {TEXT}"})
            assert (reply.status, reply.headers["x-kvpool-reason"]) == (200, "no-tokens")
        assert sum(worker.rendered for worker in there.workers.values()) == 2, "one was enough to know"
        assert [
            one.getMessage().partition(": start ")[2] for one in caplog.records if "/render" in one.message
        ] == ["kvpool with --tokenizer, or the workers with --enable-scale-out"], "said once"


def test_what_is_under_way_counts_until_it_is_answered(tmp_path: Path) -> None:
    with envoy_cluster(tmp_path) as there:
        from concurrent.futures import ThreadPoolExecutor

        for worker in there.workers.values():
            worker.hold.clear()
        with ThreadPoolExecutor(9) as callers:
            asked = [
                callers.submit(post, there.url, {"model": "m", "prompt": f"{number} {TEXT}"})
                for number in range(9)
            ]
            assert eventually(
                lambda: sorted(len(worker.bodies) for worker in there.workers.values()) == [3, 3, 3]
            ), "none was given more, for each reserves its work"
            for worker in there.workers.values():
                worker.hold.set()
            assert {one.result().status for one in asked} == {200}
        router = there.index._options["router"]
        assert eventually(lambda: len(router._reservations) == 0)


def test_two_that_are_one_worker_have_one_endpoint_and_the_rank_is_told(tmp_path: Path) -> None:
    fleet = Fleet()
    with envoy_cluster(tmp_path, fleet=fleet, names=("a",)) as there:
        worker = there.workers["a"]
        fleet.remove("default/a")
        fleet.add(worker.worker(ranks=2), "flag")
        for rank in (0, 1):
            fleet.rank("default/a", rank).heard()
        say(fleet, "default/a", 1, 0, batch(stored(BlockHasher(16).hashes(list(TEXT.encode())))))
        reply = post(there.url, {"model": "m", "prompt": TEXT})
        assert reply.headers["x-kvpool-reason"] == "prefix"
        seen = {name.lower(): value for name, value in worker.headers[-1].items()}
        assert seen["x-data-parallel-rank"] == "1"
        assert seen["x-gateway-destination-endpoint"] == worker.at
