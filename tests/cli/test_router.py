"""``kvpool router`` as a user meets it: a real process in front of scripted workers."""

from __future__ import annotations

import json
import re
import signal
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpool import BlockHasher, IndexClient
from tests.support.command_line import kvpool, kvpool_process, refusal, refused
from tests.support.credentials import Authority
from tests.support.deadlines import eventually, raises
from tests.support.feeds import Misbehaving, misbehaving
from tests.support.http_client import TEXT, figures, get, post
from tests.support.index_process import RouterProcess, running
from tests.support.openai_worker import ScriptedWorker, scripted
from tests.support.wire import batch, stored

TOKENS = list(TEXT.encode())
ASKED = {"model": "m", "prompt": TOKENS}


@contextmanager
def routing(*options: str) -> Iterator[tuple[RouterProcess, dict[str, ScriptedWorker], dict[str, Any]]]:
    """A router before the workers a and b, and what publishes their events."""
    with ExitStack() as parts:
        workers = {worker.name: worker for worker in parts.enter_context(scripted("a", "b"))}
        publishers: dict[str, Misbehaving] = {}
        flags = []
        for name, worker in workers.items():
            publishers[name] = parts.enter_context(misbehaving())
            flags += ["--worker", publishers[name].flag(name, address=f"http://{worker.at}")]
        router = parts.enter_context(running(*flags, *options, kind=RouterProcess))
        assert isinstance(router, RouterProcess)
        assert eventually(lambda: get(f"{router.url}/health").status == 200)
        yield router, workers, publishers


@pytest.mark.usefixtures("grpc_started")
def test_from_a_publisher_to_a_worker() -> None:
    doors = ("--metrics", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0")
    with routing(*doors) as (router, workers, publishers):
        publishers["b"].publish(batch(stored(BlockHasher(16).hashes(TOKENS))))
        with IndexClient(f"127.0.0.1:{router.port('gRPC')}", 30) as client:
            # over the same loop, uvloop's, as the requests
            assert eventually(lambda: 5 in client.lookup("m", token_ids=TOKENS).device_blocks)
        reply = post(router.url, ASKED)
        assert (reply.worker, reply.headers["x-kvpool-worker"]) == ("b", "b")
        assert reply.headers["x-kvpool-reason"] == "prefix"
        assert post(router.url, {**ASKED, "stream": True}).body.count(b"data: ") == 4
        workers["b"].stop()
        assert post(router.url, ASKED).worker == "a"
        counted = figures(f"http://127.0.0.1:{router.port('metrics')}/metrics")
        assert counted['kvpool_router_responses_total{outcome="2xx"}'] == "3.0"
        assert float(counted['kvpool_index_placements_total{outcome="prefix"}']) >= 2
        with IndexClient(f"127.0.0.1:{router.port('gRPC')}", 30) as client:
            told = client.status().index
            assert (told.placements, told.placed_prompt_blocks) == (3, 15)
            assert told.placed_matched_blocks >= 10
            assert client.route("m", token_ids=TOKENS).picks
            assert client.status().index.placements == 4
        shown = kvpool("top", "--index", f"127.0.0.1:{router.port('gRPC')}", "--once").stdout
        assert re.search(r"^4 placements; share that the worker had: (66.7|100.0)%$", shown, re.MULTILINE), (
            shown
        )
        assert "uvloop" in Path(f"/proc/{router.process.pid}/maps").read_text()
        page = get(f"http://127.0.0.1:{router.http_port}/status/data?page_size=10")
        assert json.loads(page.body)["fleet"]["workers"] == 2, "the status page's"
        code, lines = router.stop()
        assert (code, [line for line in lines if "Traceback" in line]) == (0, [])


def test_what_is_under_way_ends_before_the_router() -> None:
    with routing("--finish", "60") as (router, workers, _), ThreadPoolExecutor(1) as caller:
        for worker in workers.values():
            worker.hold_parts.clear()
        asked = caller.submit(post, router.url, {**ASKED, "stream": True})
        assert eventually(lambda: sum(len(worker.bodies) for worker in workers.values()) == 1)
        router.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: raises(OSError, lambda: get(f"{router.url}/health"))), "no more are taken"
        assert router.process.poll() is None
        for worker in workers.values():
            worker.hold_parts.set()
        assert asked.result().body.count(b"data: ") == 4
        router.process.communicate(timeout=60)
        assert router.process.returncode == 0


def test_a_router_that_drains_says_so_and_answers() -> None:
    with routing("--drain", "600") as (router, _, _):
        router.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: get(f"{router.url}/health").status == 503)
        reply = post(router.url, ASKED)
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert router.stop()[0] == 0, "a second signal ends it"


def test_tls(tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue("server", names=("127.0.0.1",))
    with running("--tls-cert", str(pair.cert), "--tls-key", str(pair.key), kind=RouterProcess) as router:
        context = ssl.create_default_context(cafile=tmp_path / "authority.pem")
        request = urllib.request.Request(f"https://{router.target}/v1/models")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=60, context=context)
        with caught.value as answered:
            said = json.load(answered)["error"]["message"]
        assert said == "the index knows no worker: its log says which it refused or lost"


def test_a_router_that_can_know_no_worker_says_so() -> None:
    with running(kind=RouterProcess) as router:
        code, lines = router.stop()
        assert code == 0
        assert [line for line in lines if "neither --pool nor --worker is given" in line]


def test_refusals(tmp_path: Path) -> None:
    with running(kind=RouterProcess) as router:
        line = refusal(kvpool_process("router", "--listen", router.target))
        assert line.startswith(f"kvpool: cannot listen on {router.target}: Address already in use")
    (tmp_path / "no.pem").write_text("no certificate")
    line = refused("router", "--listen", "127.0.0.1:0", "--worker-ca", str(tmp_path / "no.pem"))
    assert line == f"kvpool: --worker-ca {tmp_path}/no.pem: holds no certificate in PEM"
    worker = "a=tcp://127.0.0.1:1,model=m,block=16"
    line = refused("router", "--worker", worker)
    assert line == (
        "kvpool: --worker a: its address is not known: say where it serves requests, address=http://HOST:PORT"
    )
    line = refused("index", "--ext-proc", "127.0.0.1:0", "--worker", f"{worker},address=127.0.0.1:8000")
    assert line.startswith("kvpool: --worker a: 127.0.0.1:8000: ")
    line = refused("router", "--tokens", str(tmp_path / "tokens.toml"))
    assert line == "kvpool: --tokens is for callers of --grpc and --http: give one of them, too"
