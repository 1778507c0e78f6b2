"""The recipes of ``docs/how-to/routing.md`` for engines that split the work, run by a real Envoy with an index, and by
``kvpool router``, with scripted workers."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from kvpool import BlockHasher, open_store
from kvpool.cli.engine_process import free_ports
from kvpool.index import Publisher
from kvpool.index.fleet import Fleet
from tests import envoy
from tests.conftest import eventually
from tests.discovery.workers import announced
from tests.docs.recipes import put_in, recipe, started
from tests.index.fleets import Served, say, serving
from tests.index.openai_worker import ScriptedWorker, scripted
from tests.index.publisher import misbehaving
from tests.index.serve.test_ext_proc import TEXT, post
from tests.index.wire import batch, stored

pytestmark = pytest.mark.usefixtures("grpc_started")

PAGE, HEADING = "how-to/routing.md", "## Prefill and decode apart"
NAMES = {"p1": "10.0.0.1:8000", "p2": "10.0.0.2:8000", "d1": "10.0.1.1:8000", "d2": "10.0.1.2:8000"}
ASKED: dict[str, Any] = {
    "model": "m", "messages": [{"role": "user", "content": TEXT}], "max_completion_tokens": 7, "temperature": 0.0
}  # fmt: skip


def configured(workers: dict[str, ScriptedWorker], picker: str, listen: int, admin: int) -> str:
    """``deploy/envoy.yaml``, changed as the page says."""
    said = yaml.safe_load(
        put_in(recipe(PAGE, HEADING, "yaml"), {at: workers[name].at for name, at in NAMES.items()})
    )
    config = yaml.safe_load(
        envoy.configured(
            [workers["d1"].at, workers["d2"].at], [picker], listen=listen, admin=admin, duplex=False
        )
    )
    resources = config["static_resources"]
    decode = next(one for one in resources["clusters"] if one["name"] == "workers")
    prefill = copy.deepcopy(decode)
    prefill["name"] = prefill["load_assignment"]["cluster_name"] = said["cluster"]
    endpoints = prefill["load_assignment"]["endpoints"][0]["lb_endpoints"]
    for endpoint, name in zip(endpoints, ("p1", "p2"), strict=True):
        endpoint["endpoint"]["address"]["socket_address"]["port_value"] = workers[name].port
    resources["clusters"].append(prefill)
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    filters = manager["http_filters"]
    at = next(number for number, one in enumerate(filters) if one["name"] == "envoy.filters.http.ext_proc")
    filters[at]["typed_config"]["metadata_options"]["forwarding_namespaces"] = said["forwarding_namespaces"]
    filters.insert(at, said["filter"])
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]
    at = next(number for number, one in enumerate(routes) if one["match"] == {"prefix": "/"})
    first = copy.deepcopy(routes[at])
    first["match"], first["route"]["cluster"] = said["match"], said["cluster"]
    routes.insert(at, first)
    return str(yaml.safe_dump(config))


class Split:
    """Workers p1 and p2 for prompts, d1 and d2 for the rest, behind Envoy and an index."""

    def __init__(self, workers: dict[str, ScriptedWorker], index: Served, client: openai.OpenAI) -> None:
        self.workers, self.index, self._client = workers, index, client
        self._chat: Callable[..., Any] = _of_the_page("chat")

    def chat(self, **more: Any) -> Any:
        return self._chat(self._client, **ASKED, **more)

    def hold(self, name: str, text: str) -> None:
        """From now on a worker holds the blocks of a text."""
        tokens = list(f"user: {text}\n".encode())
        say(self.index.fleet, f"default/{name}", 0, 0, batch(stored(BlockHasher(16).hashes(tokens))))

    def served(self) -> dict[str, list[dict[str, Any]]]:
        """The bodies that each worker has got."""
        return {name: [json.loads(body) for body in one.bodies] for name, one in self.workers.items()}


def _of_the_page(name: str) -> Callable[..., Any]:
    names: dict[str, Any] = {}
    exec(compile(recipe(PAGE, HEADING, "python"), PAGE, "exec"), names)
    return names[name]  # type: ignore[no-any-return]


@pytest.fixture
def split(tmp_path: Path) -> Iterator[Split]:
    with scripted(*NAMES) as running:
        workers = {worker.name: worker for worker in running}
        fleet = Fleet()
        for worker in running:
            fleet.add(worker.worker(), "flag")
            fleet.heard(f"default/{worker.name}", 0)
        listen, admin = free_ports(2)
        with serving(fleet, place={"timeout_s": 5}) as index:
            config = configured(workers, index.ext_proc, listen, admin)
            with (
                envoy.started(tmp_path, config, listen=listen, admin=admin) as front,
                openai.OpenAI(base_url=f"{front.url}/v1", api_key="none") as client,
            ):
                healthy = {"workers": 2, "prefill": 2, "picker": 1}
                assert eventually(
                    lambda: {name: front.healthy(name) for name in healthy} == healthy, within_s=60
                )
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
        for line, one in zip(recipe(PAGE, HEADING, "sh", 1).splitlines(), workers, strict=True):
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
