"""The parts of ``deploy/k8s`` as real programs: indexes, Envoy and shards, started as the manifests say, and asked by
their probes. Kubernetes is not here: the tests are its kubelet and its DNS.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvpool.cli.engine_process import free_ports
from tests import envoy
from tests.conftest import eventually
from tests.deploy.manifests import (
    OVERLAYS,
    ROOT,
    Object,
    arguments,
    containers,
    one,
    options,
    overlay,
)
from tests.index.openai_worker import scripted
from tests.store.servers import FOLDER, find, running

PYTHON = Path(sys.executable)
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the Secrets of ``secure``."""
    folder = tmp_path_factory.mktemp("kubernetes") / "secrets"
    command = [PYTHON, ROOT / "scripts/compose-env", "--kubernetes", folder]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    return folder


def probe(said: Object, ports: dict[str, int], ca: Path) -> bool:
    """What a kubelet makes of a probe; ``ports``: where the named ones, or their numbers, are here."""
    port = ports[str(next(iter(said.values()))["port"])]
    try:
        if "httpGet" in said:
            scheme = said["httpGet"].get("scheme", "HTTP").lower()
            tls = ssl._create_unverified_context() if scheme == "https" else None  # a kubelet checks no name
            urllib.request.urlopen(
                f"{scheme}://127.0.0.1:{port}{said['httpGet']['path']}", timeout=5, context=tls
            ).close()
            return True
        if "grpc" in said:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                asked = health_pb2.HealthCheckRequest(service=said["grpc"]["service"])
                reply = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=5)
            return bool(reply.status == SERVING)
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except (OSError, grpc.RpcError):
        return False
    return True


def the_probe(container: Object, name: str) -> Object:
    return {key: value for key, value in container[name].items() if key in ("httpGet", "grpc", "tcpSocket")}


@pytest.mark.parametrize("name", [one for one in OVERLAYS if one not in ("operator", "trial")])
@pytest.mark.usefixtures("grpc_started")
def test_an_index_starts_as_it_says_and_its_probes_are_answered(
    name: str, tmp_path: Path, secrets: Path
) -> None:
    (container,) = containers(one(overlay(name), "Deployment", "index"))
    own = {each["containerPort"]: free for each, free in zip(container["ports"], free_ports(4), strict=True)}
    ports = {**{each["name"]: own[each["containerPort"]] for each in container["ports"]}, "50051": own[50051]}
    words = arguments(container)
    for old, new in (
        *((f"0.0.0.0:{port}", f"127.0.0.1:{free}") for port, free in own.items()),
        ("/run/secrets", str(secrets)),
        ("/var/lib/kvpool", str(tmp_path)),
    ):
        assert any(old in word for word in words) or old == "/run/secrets", old
        words = [word.replace(old, new) for word in words]
    with running("valkey-server", tmp_path) as server:
        index = subprocess.Popen(
            [str(PYTHON.parent / "kvpool"), *words],
            env={**os.environ, "KVPOOL_POOL": f"valkey://127.0.0.1:{server.port}"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            ready, alive = (the_probe(container, f"{kind}Probe") for kind in ("readiness", "liveness"))
            assert eventually(lambda: probe(ready, ports, secrets), within_s=60)
            assert probe(alive, ports, secrets)
            index.send_signal(signal.SIGTERM)
            assert eventually(lambda: not probe(ready, ports, secrets), within_s=10), "it drains"
            patience_s = (
                container["livenessProbe"]["periodSeconds"] * container["livenessProbe"]["failureThreshold"]
            )
            assert patience_s > float(options(words[1:])["--drain"]), "liveness says no, too"
            index.send_signal(signal.SIGTERM)
            _, said = index.communicate(timeout=30)
        finally:
            if index.poll() is None:
                index.kill()
                index.communicate(timeout=30)
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
    subprocess.run([shell, flag, command], check=True, timeout=30)
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
         "--use-dynamic-base-id"], capture_output=True, text=True, timeout=60,
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
        assert subprocess.run(ready, timeout=10).returncode == 0
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
            assert eventually(lambda: subprocess.run(ready, timeout=10).returncode != 0)
            with pytest.raises(subprocess.TimeoutExpired):
                stopping.wait(1)  # the request is still under way
            worker.hold.set()
            said, _ = asking.communicate(timeout=60)
            assert said == "200"
            assert stopping.wait(60) == 0


# ---- shards: each in a network and a file system of its own, as a pod is


def no_networks() -> str:
    """Why no networks can be made here; empty when they can."""
    if os.geteuid() != 0:
        return "networks of pods need root"
    if shutil.which("ip") is None:
        return "there is no ip (Debian: iproute2)"
    name = f"kvk{os.getpid()}-try"
    try:
        _ip("netns", "add", name)
        _ip("netns", "delete", name)
    except subprocess.CalledProcessError as error:
        return f"not permitted here: {error.stderr.decode(errors='replace').strip():.200}"
    return ""


def valkey_cli() -> Path | None:
    for folder in (FOLDER.parent / "root/usr/bin", Path(find("valkey-server")).resolve().parent):
        if (folder / "valkey-cli").exists():
            return folder
    return None


class Pods:
    """Networks of pods that reach each other, and this test them, by addresses and by the names of Kubernetes' DNS."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self._folder, self._prefix = folder, f"kvk{os.getpid()}"
        self._hub = f"{self._prefix}-hub"
        self.addresses = {name: f"10.123.0.{number}" for number, name in enumerate(names, 2)}

    @contextmanager
    def made(self) -> Iterator[Pods]:
        with ExitStack() as ends:
            self._namespace(self._hub, ends)
            _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._hub, "address", "add", "10.123.0.1/24", "dev", "bridge")
            _ip("-n", self._hub, "link", "set", "bridge", "up")
            for number, (name, address) in enumerate(self.addresses.items()):
                space = f"{self._prefix}-{name}"
                self._namespace(space, ends)
                _ip(
                    "-n",
                    self._hub,
                    "link",
                    "add",
                    f"v{number}",
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "eth0",
                    "netns",
                    space,
                )
                _ip("-n", self._hub, "link", "set", f"v{number}", "master", "bridge", "up")
                _ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
                _ip("-n", space, "link", "set", "eth0", "up")
            lines = ["127.0.0.1 localhost"]
            for name, address in self.addresses.items():
                lines.append(f"{address} {name}.valkey {name}.valkey.kvpool.svc")
            (self._folder / "hosts").write_text("\n".join(lines) + "\n")
            yield self

    def _namespace(self, name: str, ends: ExitStack) -> None:
        _ip("netns", "add", name)
        ends.callback(_ip, "netns", "delete", name)
        _ip("-n", name, "link", "set", "lo", "up")

    def command(self, pod: str, command: list[str]) -> list[str]:
        """Run there; ``pod`` "hub": beside them."""
        line = f"mount --bind {self._folder}/hosts /etc/hosts && exec {shlex.join(command)}"
        return ["ip", "netns", "exec", f"{self._prefix}-{pod}", "unshare", "--mount", "sh", "-c", line]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


def as_a_pod(container: Object, folder: Path, secrets: Path, pod: str) -> tuple[list[str], dict[str, str]]:
    """Its command and its environment, with the files of the image and of the Secrets where they are here."""
    tools = valkey_cli()
    assert tools is not None
    environment = {
        "PATH": f"{folder}:{FOLDER}:{os.environ['PATH']}:/usr/sbin:/sbin",
        "POD_NAME": pod, "POD_NAMESPACE": "kvpool",
    }  # fmt: skip
    for each in container["env"]:
        if "value" in each:
            environment[each["name"]] = each["value"].replace("/run/secrets", str(secrets))
        elif reference := each["valueFrom"].get("secretKeyRef"):
            environment[each["name"]] = (secrets / reference["key"]).read_text()
        else:
            assert each["name"] in environment, "by fieldRef"
    words = arguments(container, environment)
    for name in ("valkey-shard", "valkey-cluster"):
        text = (ROOT / "deploy" / name).read_text()
        text = text.replace("/etc/kvpool", str(ROOT / "deploy")).replace("/var/lib/kvpool", str(folder))
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    libraries = ":".join(str(each) for each in (tools.parent / "lib").glob("*-linux-gnu"))
    (folder / "valkey-cli").write_text(
        f'#!/bin/sh\nLD_LIBRARY_PATH={libraries} exec {tools}/valkey-cli "$@"\n'
    )
    (folder / "valkey-cli").chmod(0o755)
    return words, environment


@pytest.mark.parametrize("name", ["secure", "envoy"])
def test_three_pods_and_the_job_make_a_pool(name: str, tmp_path: Path, secrets: Path) -> None:
    if why := no_networks():
        pytest.skip(why)
    if valkey_cli() is None:
        pytest.skip("there is no valkey-cli beside valkey-server")
    (shard,) = containers(one(overlay(name), "StatefulSet", "valkey"))
    (job,) = containers(one(overlay(name), "Job", "valkey-cluster"))
    job = {"env": [], **job}
    names = [
        f"valkey-{number}"
        for number in range(one(overlay(name), "StatefulSet", "valkey")["spec"]["replicas"])
    ]
    if name == "secure":
        url = (secrets / "url").read_text().replace("/run/secrets", str(secrets))
    else:
        url = one(overlay(name), "ConfigMap", "kvpool-pool")["data"]["url"]
    with Pods(tmp_path, [*names, "job"]).made() as pods, ExitStack() as ends:

        def start(pod: str) -> subprocess.Popen[bytes]:
            folder = tmp_path / pod
            folder.mkdir(exist_ok=True)
            words, environment = as_a_pod(shard, folder, secrets, pod)
            log = ends.enter_context((folder / "log").open("ab"))
            process = subprocess.Popen(
                pods.command(pod, words), env=environment, stdout=log, stderr=log, start_new_session=True
            )
            ends.callback(end, process)
            return process

        def ready(pod: str) -> bool:
            _, environment = as_a_pod(shard, tmp_path / pod, secrets, pod)
            command = pods.command(pod, shard["readinessProbe"]["exec"]["command"])
            return (
                subprocess.run(command, env=environment, timeout=10, stderr=subprocess.DEVNULL).returncode
                == 0
            )

        def contains() -> str:
            """What a client beside them makes of the URL: "True" when what it put is there."""
            script = (
                "import sys, kvpool\n"
                "keys = kvpool.Namespace('default', {'model': 'm'}).keys("
                "[bytes(31) + bytes([n]) for n in range(64)], group=0, rank=0)\n"
                "with kvpool.open_store(sys.argv[1]) as store:\n"
                "    store.put_many(keys, [b'x' * 64] * 64, timeout_s=10)\n"
                "    print(all(store.contains_many(keys, timeout_s=10)))\n"
            )
            run = subprocess.run(
                pods.command("hub", [str(PYTHON), "-c", script, url]), capture_output=True, text=True,
                timeout=60, cwd=ROOT,
            )  # fmt: skip
            return run.stdout.strip() or run.stderr[-2000:]

        running_pods = {pod: start(pod) for pod in names}
        for pod in names:
            assert eventually(lambda pod=pod: ready(pod), within_s=60), (tmp_path / pod / "log").read_text()  # type: ignore[misc]
        (tmp_path / "job").mkdir()
        words, environment = as_a_pod(job, tmp_path / "job", secrets, "job")
        for _ in range(2):  # it may run again
            run = subprocess.run(
                pods.command("job", words), env=environment, capture_output=True, text=True, timeout=120
            )
            assert run.returncode == 0, run.stderr
            assert run.stdout == "a cluster of 3 shards serves\n"
        assert eventually(lambda: contains() == "True", within_s=60), contains()
        # A pod that comes again: empty, and part of the cluster.
        end(running_pods["valkey-1"])
        start("valkey-1")
        assert eventually(lambda: ready("valkey-1"), within_s=60)
        assert eventually(lambda: contains() == "True", within_s=60), contains()


def end(process: subprocess.Popen[bytes]) -> None:
    """With all that it has started: a shard leaves one behind that looks for the others."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)
