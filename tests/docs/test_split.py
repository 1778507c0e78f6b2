"""The recipes of ``docs/how-to/prefill-decode.md``, run by a real Envoy with an index, and by ``kvpool router``, with
scripted workers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from demo.engine_process import free_ports
from kvpool import BlockHasher, open_store
from kvpool.index import Publisher
from tests.support import envoy
from tests.support.announced_workers import announced
from tests.support.deadlines import eventually
from tests.support.feeds import misbehaving
from tests.support.fleets import Served, say, serving
from tests.support.fronts import followed
from tests.support.http_client import TEXT, post
from tests.support.openai_worker import ScriptedWorker, scripted
from tests.support.recipes import SPLIT_PAGE, put_in, recipe, split_chat, split_front, started
from tests.support.wire import batch, stored

pytestmark = pytest.mark.usefixtures("grpc_started")

NAMES = ("p1", "p2", "d1", "d2")
ASKED: dict[str, Any] = {
    "model": "m", "messages": [{"role": "user", "content": TEXT}], "max_completion_tokens": 7, "temperature": 0.0
}  # fmt: skip


class Split:
    """Workers p1 and p2 for prompts, d1 and d2 for the rest, behind Envoy and an index."""

    def __init__(self, workers: dict[str, ScriptedWorker], index: Served, client: openai.OpenAI) -> None:
        self.workers, self.index, self._client = workers, index, client
        self._chat = split_chat()

    def chat(self, **more: Any) -> Any:
        return self._chat(self._client, **ASKED, **more)

    def hold(self, name: str, text: str) -> None:
        """From now on a worker holds the blocks of a text."""
        tokens = list(f"user: {text}\n".encode())
        say(self.index.fleet, f"default/{name}", 0, 0, batch(stored(BlockHasher(16).hashes(tokens))))

    def served(self) -> dict[str, list[dict[str, Any]]]:
        """The bodies that each worker has got."""
        return {name: [json.loads(body) for body in one.bodies] for name, one in self.workers.items()}


@pytest.fixture
def split(tmp_path: Path) -> Iterator[Split]:
    with scripted(*NAMES) as running:
        workers = {worker.name: worker for worker in running}
        listen, admin = free_ports(2)
        with serving(followed(running), place={"timeout_s": 60}) as index:
            prefill, decode = ([workers[name].at for name in names] for names in (("p1", "p2"), ("d1", "d2")))
            config = split_front(prefill, decode, index.ext_proc, listen, admin)
            with (
                envoy.started(tmp_path, config, listen=listen, admin=admin) as front,
                openai.OpenAI(base_url=f"{front.url}/v1", api_key="none") as client,
            ):
                healthy = {"workers": 2, "prefill": 2, "picker": 1}
                assert eventually(lambda: {name: front.healthy(name) for name in healthy} == healthy)
                yield Split(workers, index, client)


def test_a_prompt_goes_to_one_group_and_the_request_to_the_other(split: Split) -> None:
    for _ in range(6):
        assert split.chat().model_extra["worker"] in ("d1", "d2")
    bodies = split.served()
    assert bodies["p1"] + bodies["p2"] == [{**_without_length(), "max_tokens": 1}] * 6
    assert bodies["d1"] + bodies["d2"] == [ASKED] * 6


@pytest.mark.parametrize(("holder", "others"), [("p2", ("d1", "d2")), ("d1", ("p1", "p2"))])
def test_each_is_placed_by_what_its_group_holds(split: Split, holder: str, others: tuple[str, ...]) -> None:
    split.hold(holder, TEXT)
    for _ in range(6):
        split.chat()
    bodies = split.served()
    assert len(bodies[holder]) == sum(len(bodies[name]) for name in others) == 6
    for name in others:  # the index chose them, and did not name the holder first
        worker = split.workers[name]
        assert {sent["x-kvpool-worker"] for sent in worker.headers} <= {name}


def test_a_stream_comes_from_the_second_group(split: Split) -> None:
    with split.chat(stream=True) as stream:
        assert {part.model_extra["worker"] for part in stream} <= {"d1", "d2"}
    bodies = split.served()
    assert [body.get("stream") for body in bodies["p1"] + bodies["p2"]] == [None]


def test_without_those_that_prefill_requests_are_served(split: Split) -> None:
    for name in ("p1", "p2"):
        split.workers[name].stop()
    assert split.chat().model_extra["worker"] in ("d1", "d2")


def test_without_an_index_each_group_gets_its_requests(split: Split) -> None:
    split.index.stop()
    for _ in range(6):
        split.chat()
    bodies = split.served()
    assert len(bodies["p1"] + bodies["p2"]) == len(bodies["d1"] + bodies["d2"]) == 6


def test_two_routers_serve_a_group_each(tmp_path: Path) -> None:
    pool = f"file://{tmp_path / 'pool'}"
    with ExitStack() as parts:
        workers = [ScriptedWorker(name, host=f"127.0.{group}.1") for group, name in enumerate(("p", "d"), 1)]
        store = parts.enter_context(open_store(pool))
        for one in workers:
            one.start()
            parts.callback(one.stop)
            host = one.at.partition(":")[0]
            told = parts.enter_context(misbehaving(host=host))
            publisher = Publisher(0, *(f"tcp://{host}:{port}" for port in told.ports))
            parts.enter_context(
                announced(
                    store, one.worker(publishers=(publisher,), incarnation="one", namespace="ab" * 16), 10
                )
            )
        for line, one in zip(
            recipe(SPLIT_PAGE, "## Behind kvpool router", "sh").splitlines(), workers, strict=True
        ):
            (port,) = free_ports(1)
            listen = "0.0.0.0:8081" if one.name == "p" else "0.0.0.0:8080"
            network = "10.0.0.0/24" if one.name == "p" else "10.0.1.0/24"
            host = one.at.partition(":")[0]
            places = {listen: f"0.0.0.0:{port}", "valkey://valkey:6379": pool, network: f"{host}/24"}
            command = [
                str(Path(sys.executable).parent / line.split()[0]),
                *put_in(line, places).split()[1:],
                "--drain=0",
            ]
            url = f"http://127.0.0.1:{port}"
            parts.enter_context(started(command, tmp_path / f"{one.name}.log", f"{url}/health"))
            assert eventually(lambda url=url: post(url, {"model": "m", "prompt": TEXT}).status == 200)  # type: ignore[misc]
            assert {post(url, {"model": "m", "prompt": f"{number}"}).worker for number in range(6)} == {
                one.name
            }


def _without_length() -> dict[str, Any]:
    return {name: value for name, value in ASKED.items() if name != "max_completion_tokens"}
