"""``examples/routers`` for NGINX and Envoy, run by these in front of scripted workers."""

from __future__ import annotations

import os
import re
import shlex
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from demo.engine_process import free_ports
from kvpool import BlockHasher
from tests.support import envoy
from tests.support.deadlines import eventually
from tests.support.feeds import misbehaving
from tests.support.fleets import say, serving
from tests.support.fronts import followed
from tests.support.http_client import TEXT, get, post
from tests.support.index_process import running
from tests.support.openai_worker import ScriptedWorker, scripted
from tests.support.recipes import ROUTERS, put_in, started
from tests.support.servers import find
from tests.support.wire import batch, stored

ASKED = {"model": "m", "prompt": TEXT}
WORKERS = ("10.0.0.1:8000", "10.0.0.2:8000")


def nginx_config() -> str:
    return (ROUTERS / "nginx.conf").read_text()


@contextmanager
def nginx(folder: Path, config: str, places: dict[str, str]) -> Iterator[str]:
    """NGINX with that configuration; its URL. Its files are in ``folder``."""
    (port,) = free_ports(1)
    own = "".join(
        f"{kind}_temp_path {folder}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = put_in(config, {**places, "listen 8080": f"listen 127.0.0.1:{port}"})
    file = folder / "nginx.conf"
    file.write_text(put_in(config, {"http {\n": f"http {{\naccess_log off;\n{own}"}))
    user = "user root; " if os.getuid() == 0 else ""  # else its processes could not read the folder
    command = [
        find("nginx"), "-p", str(folder), "-c", str(file), "-e", "stderr",
        "-g", f"{user}daemon off; pid {folder}/nginx.pid;",
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with started(command, folder / "nginx.log", f"{url}/health"):
        yield url


@contextmanager
def envoy_without_index(folder: Path, workers: list[ScriptedWorker]) -> Iterator[str]:
    said = yaml.safe_load((ROUTERS / "envoy-without-index.yaml").read_text())
    config = yaml.safe_load(envoy.CONFIG.read_text())
    resources = config["static_resources"]
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"] = [
        one for one in manager["http_filters"] if one["name"] != "envoy.filters.http.ext_proc"
    ]
    (cluster,) = (one for one in resources["clusters"] if one["name"] == "workers")
    resources["clusters"] = [cluster]
    del cluster["load_balancing_policy"]
    cluster.update(said["cluster"])
    (route,) = (
        one
        for one in manager["route_config"]["virtual_hosts"][0]["routes"]
        if one["match"] == {"prefix": "/"}
    )
    route["route"].update(said["route"])
    listen, admin = free_ports(2)
    resources["listeners"][0]["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": listen}
    config["admin"]["address"]["socket_address"]["port_value"] = admin
    addresses = [{"socket_address": {"address": "127.0.0.1", "port_value": one.port}} for one in workers]
    ends = [{"endpoint": {"address": address}} for address in addresses]
    cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": ends}]
    with envoy.started(folder, yaml.safe_dump(config), listen=listen, admin=admin) as front:
        assert eventually(lambda: front.healthy("workers") == len(workers))
        yield front.url


@pytest.fixture
def workers() -> Iterator[list[ScriptedWorker]]:
    with scripted("a", "b") as running:
        yield running


@pytest.fixture(params=["nginx", "envoy"])
def front(request: pytest.FixtureRequest, tmp_path: Path, workers: list[ScriptedWorker]) -> Iterator[str]:
    """The URL of the one or the other."""
    if request.param == "nginx":
        places = dict(zip(WORKERS, (one.at for one in workers), strict=True))
        with nginx(tmp_path, nginx_config(), places) as url:
            yield url
    else:
        with envoy_without_index(tmp_path, workers) as url:
            yield url


def served_by(url: str, **headers: str) -> str:
    reply = post(url, ASKED, **headers)
    assert reply.status == 200, reply
    return reply.worker


def test_a_session_stays_at_its_worker_and_others_are_spread(front: str) -> None:
    assert {served_by(front) for _ in range(40)} == {"a", "b"}
    sessions = [f"session-{number}" for number in range(20)]
    placed = [served_by(front, x_session_id=session) for session in sessions]
    assert set(placed) == {"a", "b"}
    assert [served_by(front, x_session_id=session) for session in sessions] == placed


def test_the_sessions_of_a_worker_that_is_gone_are_served(front: str, workers: list[ScriptedWorker]) -> None:
    # So many that some are hashed to the dead worker again and again, as often as a front looks for another one.
    sessions = [f"session-{number}" for number in range(500)]
    placed = {session: served_by(front, x_session_id=session) for session in sessions}
    workers[0].stop()
    # A front that has not seen yet that a connection ends may lose what it sends on it.
    first = next(session for session in sessions if placed[session] == "a")
    assert eventually(lambda: post(front, ASKED, x_session_id=first).status == 200)
    for session in sessions:
        assert served_by(front, x_session_id=session) == "b", placed[session]


class OneMore(threading.Event):
    """Until it is set it lets one pass."""

    left = 1

    def is_set(self) -> bool:
        if super().is_set():
            return True
        self.left -= 1
        return self.left == 0


def test_a_stream_passes_as_it_comes(front: str, workers: list[ScriptedWorker]) -> None:
    for worker in workers:
        worker.hold_parts = OneMore()
    body = b'{"model": "m", "prompt": "x", "stream": true}'
    request = urllib.request.Request(f"{front}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        for number in range(2):  # while the rest of it is held back
            assert f'"number": {number}' in reply.readline().decode()
            reply.readline()
        for worker in workers:
            worker.hold_parts.set()
        assert reply.read().count(b"data: ") == 2


def test_a_prompt_of_a_mebibyte_and_paths_of_engines(front: str) -> None:
    assert post(front, {"model": "m", "prompt": "x" * (1 << 20)}).status == 200
    assert post(front, {"request_ids": ["x"]}, "/inference/v1/abort_requests").status == 404


@pytest.mark.usefixtures("grpc_started")
def test_nginx_before_routers_places_by_prefix(tmp_path: Path, workers: list[ScriptedWorker]) -> None:
    upstream = (ROUTERS / "nginx-before-routers.conf").read_text()
    config, count = re.subn(
        r"  upstream workers \{\n.*?\n  \}\n", lambda _: upstream, nginx_config(), flags=re.DOTALL
    )
    assert count == 1
    fleet = followed(workers)
    place: dict[str, Any] = {"timeout_s": 60}
    with serving(fleet, place=place, proxy={}) as one, serving(fleet, place=place, proxy={}) as other:
        places = {"127.0.0.1:8081": one.proxy, "127.0.0.1:8082": other.proxy}
        with nginx(tmp_path, config, places) as url:
            for number, holder in enumerate("abab"):
                text = f"{number} {TEXT}"
                blocks = BlockHasher(16).hashes(list(text.encode()))
                say(fleet, f"default/{holder}", 0, number // 2, batch(stored(blocks)))
                for _ in range(4):
                    reply = post(url, {"model": "m", "prompt": text})
                    assert (reply.worker, reply.headers["x-kvpool-reason"]) == (holder, "prefix")
            assert get(f"{url}/health").status == 200
        assert all(router.proxy_stats.totals().responses["2xx"] for router in (one, other))


def test_llm_ds_envoy_takes_the_index_as_its_picker(tmp_path: Path, workers: list[ScriptedWorker]) -> None:
    words = shlex.split((ROUTERS / "llm-d-index.sh").read_text(), comments=True)
    place = [word for at, word in enumerate(words) if "--place" in word or "--place" in words[at - 1]]
    assert place == ["--place-timeout", "1", "--place-endpoints", "1"]
    with ExitStack() as parts:
        flags = ["--ext-proc", "127.0.0.1:0", *place]
        publishers = [parts.enter_context(misbehaving()) for _ in workers]
        for worker, one in zip(workers, publishers, strict=True):
            flags.append(f"--worker={one.flag(worker.name, address=f'http://{worker.at}')}")
        index = parts.enter_context(running(*flags))
        listen, admin = free_ports(2)
        picker = [f"127.0.0.1:{index.port('ext_proc')}"]
        config = yaml.safe_load(
            envoy.configured([workers[0].at], picker, listen=listen, admin=admin, duplex=True)
        )
        clusters = config["static_resources"]["clusters"]
        clusters[:] = [yaml.safe_load((ROUTERS / "llm-d-cluster.yaml").read_text()), *clusters[1:]]
        front = parts.enter_context(
            envoy.started(tmp_path, yaml.safe_dump(config), listen=listen, admin=admin)
        )
        assert eventually(lambda: front.healthy("picker") == 1)
        for number, holder in enumerate("abab"):
            text = f"{number} {TEXT}"
            blocks = BlockHasher(16).hashes(list(text.encode()))
            publishers["ab".index(holder)].publish(batch(stored(blocks)))

            def placed(text: str = text) -> tuple[str, str]:
                reply = post(front.url, {"model": "m", "prompt": list(text.encode())})
                assert reply.status == 200
                return reply.worker, reply.headers["x-kvpool-reason"]

            assert eventually(lambda holder=holder, placed=placed: placed() == (holder, "prefix"))  # type: ignore[misc]
