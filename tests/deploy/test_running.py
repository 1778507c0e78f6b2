"""The parts of ``deploy/k8s`` as real programs: indexes, Envoy and shards, started as the manifests say, and asked by
their probes. Kubernetes is not here: the tests are its kubelet and its DNS.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from demo.engine_process import free_ports
from tests.deploy.manifests import OVERLAYS, Object, arguments, containers, one, overlay
from tests.support import envoy
from tests.support.deadlines import eventually
from tests.support.openai_worker import scripted
from tests.support.servers import running

PYTHON = Path(sys.executable)
SERVING = health_pb2.HealthCheckResponse.SERVING


def probe(said: Object, ports: dict[str, int], ca: Path) -> bool:
    """What a kubelet makes of a probe; ``ports``: where the named ones, or their numbers, are here."""
    port = ports[str(next(iter(said.values()))["port"])]
    try:
        if "httpGet" in said:
            scheme = said["httpGet"].get("scheme", "HTTP").lower()
            tls = ssl._create_unverified_context() if scheme == "https" else None  # a kubelet checks no name
            urllib.request.urlopen(
                f"{scheme}://127.0.0.1:{port}{said['httpGet']['path']}", timeout=60, context=tls
            ).close()
            return True
        if "grpc" in said:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                asked = health_pb2.HealthCheckRequest(service=said["grpc"]["service"])
                reply = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=60)
            return bool(reply.status == SERVING)
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
    except (OSError, grpc.RpcError):
        return False
    return True


def the_probe(container: Object, name: str) -> Object:
    return {key: value for key, value in container[name].items() if key in ("httpGet", "grpc", "tcpSocket")}


@pytest.mark.parametrize("name", [one for one in OVERLAYS if one not in ("near", "operator", "trial")])
@pytest.mark.usefixtures("grpc_started")
def test_an_index_starts_as_it_says_and_its_probes_are_answered(
    name: str, tmp_path: Path, secrets: Path
) -> None:
    (container,) = containers(one(overlay(name), "Deployment", "index"))
    with running("valkey-server", tmp_path) as server:
        own = {
            each["containerPort"]: free for each, free in zip(container["ports"], free_ports(4), strict=True)
        }
        ports = {
            **{each["name"]: own[each["containerPort"]] for each in container["ports"]},
            "50051": own[50051],
        }
        words = arguments(container)
        for old, new in (
            *((f"0.0.0.0:{port}", f"127.0.0.1:{free}") for port, free in own.items()),
            ("/run/secrets", str(secrets)),
            ("/var/lib/kvpool", str(tmp_path)),
        ):
            assert any(old in word for word in words) or old == "/run/secrets", old
            words = [word.replace(old, new) for word in words]
        index = subprocess.Popen(
            [str(PYTHON.parent / "kvpool"), *words],
            env={**os.environ, "KVPOOL_POOL": f"valkey://127.0.0.1:{server.port}"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            ready, alive = (the_probe(container, f"{kind}Probe") for kind in ("readiness", "liveness"))
            assert eventually(lambda: probe(ready, ports, secrets))
            assert probe(alive, ports, secrets)
            index.send_signal(signal.SIGTERM)
            assert eventually(lambda: not probe(ready, ports, secrets)), "it drains"
            assert probe(alive, ports, secrets), "a kubelet lets it drain"
            index.send_signal(signal.SIGTERM)
            _, said = index.communicate(timeout=60)
        finally:
            if index.poll() is None:
                index.kill()
                index.communicate(timeout=60)
    assert index.returncode == 0, said
    assert (tmp_path / "index.snapshot").exists()


def made_by_the_init_container(folder: Path) -> str:
    """``deploy/envoy.yaml`` with the names of a cluster: what the shell command of the pod makes."""
    made, main = containers(one(overlay("envoy"), "Deployment", "front"))
    (endpoints,) = (
        each for each in overlay("envoy") if each["kind"] == "ConfigMap" and "endpoints.sed" in each["data"]
    )
    (folder / "endpoints.sed").write_text(endpoints["data"]["endpoints.sed"])
    (shell, flag, command) = made["command"]
    for old, new in (
        ("/etc/kvpool-front", str(folder)),
        ("/etc/kvpool/envoy.yaml", str(envoy.CONFIG)),
        (main["args"][0], str(folder / "envoy.yaml")),
    ):
        assert old in command
        command = command.replace(old, new)
    subprocess.run([shell, flag, command], check=True, timeout=60)
    return (folder / "envoy.yaml").read_text()


@pytest.mark.parametrize("kind", ["made", "secret"])
def test_envoy_names_the_services_of_the_cluster(kind: str, tmp_path: Path, secrets: Path) -> None:
    text = made_by_the_init_container(tmp_path) if kind == "made" else (secrets / "envoy.yaml").read_text()
    found = {
        cluster["name"]: [
            tuple(end["endpoint"]["address"]["socket_address"].values())
            for end in cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
        ]
        for cluster in yaml.safe_load(text)["static_resources"]["clusters"]
    }
    assert found == {"workers": [("worker", 8000)], "picker": [("index-pods", 50052)]}
    for name, port in (("worker", 8000), ("index-pods", 50052)):
        service = one(overlay("envoy"), "Service", name)["spec"]
        assert service["clusterIP"] == "None"
        assert port in [each["port"] for each in service["ports"]]
    file = tmp_path / "checked.yaml"
    file.write_text(text.replace("/run/secrets", str(secrets)))
    run = subprocess.run(
        [str(envoy.BINARY), "--mode", "validate", "--config-path", str(file), "--log-level", "error",
         "--disable-hot-restart"], capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


def test_a_front_that_goes_is_not_ready_and_waits_for_what_is_under_way(tmp_path: Path) -> None:
    (container,) = (
        each for each in containers(one(overlay("envoy"), "Deployment", "front")) if each["name"] == "front"
    )
    text = made_by_the_init_container(tmp_path)
    with (
        scripted("a") as (worker,),
        envoy.running(tmp_path, [worker.at], ["127.0.0.1:9"], text=text) as front,
    ):
        admin = re.findall(
            r"127\.0\.0\.1, port_value: (\d+)\}", next(tmp_path.glob("envoy-*.yaml")).read_text()
        )[0]

        def here(command: list[str]) -> list[str]:
            assert "127.0.0.1/9901" in command[-1]
            return [*command[:-1], command[-1].replace("127.0.0.1/9901", f"127.0.0.1/{admin}")]

        ready = here(container["readinessProbe"]["exec"]["command"])
        assert eventually(lambda: front.healthy("workers") == 1)
        assert subprocess.run(ready, timeout=60).returncode == 0
        worker.hold.clear()
        body = json.dumps({"model": "m", "prompt": "x"}).encode()
        request = urllib.request.Request(
            f"{front.url}/v1/completions", body, {"content-type": "application/json"}
        )
        with ExitStack() as ends:
            ends.callback(worker.hold.set)
            asking = subprocess.Popen(
                ["curl", "-s", "--max-time", "60", "-o", str(tmp_path / "reply"), "-w", "%{http_code}",
                 "-H", "content-type: application/json", "-d", body.decode(), request.full_url],
                stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            ends.callback(asking.wait, 60)
            active = "http.openai.downstream_rq_active"
            assert eventually(lambda: front.counters(active)[active] == 1)
            stop = here(container["lifecycle"]["preStop"]["exec"]["command"])
            assert "sleep 15\n" in stop[-1]
            stop[-1] = stop[-1].replace("sleep 15\n", "sleep 0\n").replace("sleep 5\n", "sleep 0.1\n")
            stopping = subprocess.Popen(stop)
            ends.callback(stopping.wait, 60)
            assert eventually(lambda: subprocess.run(ready, timeout=60).returncode != 0)
            with pytest.raises(subprocess.TimeoutExpired):
                stopping.wait(1)  # the request is still under way
            worker.hold.set()
            said, _ = asking.communicate(timeout=60)
            assert said == "200"
            assert stopping.wait(60) == 0
