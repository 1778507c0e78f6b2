"""A fleet of several models behind the picker and the router: each request reaches a worker of its own model."""

from __future__ import annotations

import json

import pytest

from kvpool.index.fleet import Fleet
from kvpool.index.place.inference_request import MAX_READ_NBYTES
from tests.support.ext_proc import Call, body, calling, headers, picking, reserved, response
from tests.support.fleets import a_worker
from tests.support.fronts import join, proxy_cluster
from tests.support.http_client import get, post
from tests.support.openai_worker import scripted

pytestmark = pytest.mark.usefixtures("grpc_started")

LARGE = "x" * MAX_READ_NBYTES  # more than is read of a body


@pytest.mark.parametrize("prompt", ["x", LARGE], ids=["small", "large"])
def test_the_picker_names_workers_of_the_requests_model(prompt: str) -> None:
    fleet = Fleet()
    for place, name in enumerate("ab"):
        fleet.add(
            a_worker(
                name, port=5557 + 2 * place, address=f"http://127.0.0.1:{9001 + place}", model=f"of-{name}"
            ),
            "flag",
        )
        fleet.rank(f"default/{name}", 0).heard()
    asked = json.dumps({"prompt": prompt, "model": "of-b"}).encode()
    with picking(fleet=fleet, place={"timeout_s": 0.5}) as index, calling(index) as channel:
        for _ in range(2):
            call = Call(channel)
            assert call.place(headers(), body(asked)) == ["127.0.0.1:9002"]
            assert reserved(index) == 1
            call.ask(response())
            call.end()
            assert reserved(index) == 0


@pytest.mark.parametrize("prompt", ["x", LARGE], ids=["small", "large"])
def test_the_router_sends_a_request_to_a_worker_of_its_model(prompt: str) -> None:
    with scripted("a", "b") as workers, proxy_cluster(workers=[]) as there:
        for worker in workers:
            join(there, worker, f"of-{worker.name}")
        for name in ("b", "b", "a", "a"):
            assert post(there.url, {"prompt": prompt, "model": f"of-{name}"}).worker == name
        for name in ("b", "b", "a", "a"):
            assert json.loads(get(f"{there.url}/v1/models/of-{name}").body)["worker"] == name
