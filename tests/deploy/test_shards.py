"""Shards and the Job of ``deploy/k8s`` as real servers: each in a network of its own, as a pod is, by the names that
Kubernetes' DNS would give them.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.deploy.manifests import ROOT, Object, arguments, containers, one, overlay
from tests.support.deadlines import eventually
from tests.support.servers import FOLDER, find

PYTHON = Path(sys.executable)


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
                veth = ("type", "veth", "peer", "name", "eth0", "netns", space)
                _ip("-n", self._hub, "link", "add", f"v{number}", *veth)
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
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)


def as_a_pod(
    container: Object, folder: Path, secrets: Path, pod: str, server: str
) -> tuple[list[str], dict[str, str]]:
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
    folder.mkdir()
    for name in ("valkey-shard", "valkey-cluster"):
        text = (ROOT / "deploy" / name).read_text()
        text = text.replace("/etc/kvpool", str(ROOT / "deploy")).replace("/var/lib/kvpool", str(folder))
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "valkey-server").symlink_to(find(server))
    libraries = ":".join(str(each) for each in (tools.parent / "lib").glob("*-linux-gnu"))
    (folder / "valkey-cli").write_text(
        f'#!/bin/sh\nLD_LIBRARY_PATH={libraries} exec {tools}/valkey-cli "$@"\n'
    )
    (folder / "valkey-cli").chmod(0o755)
    return words, environment


# The image has 9.1; that of the tests speaks no TLS.
@pytest.mark.parametrize(("name", "server"), [("secure", "valkey-server"), ("envoy", "valkey-server-9")])
def test_three_pods_and_the_job_make_a_pool(name: str, server: str, tmp_path: Path, secrets: Path) -> None:
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
    # Once: a program that is being written cannot be started.
    prepared = {pod: as_a_pod(shard, tmp_path / pod, secrets, pod, server) for pod in names}
    with Pods(tmp_path, [*names, "job"]).made() as pods, ExitStack() as ends:

        def start(pod: str) -> subprocess.Popen[bytes]:
            words, environment = prepared[pod]
            log = ends.enter_context((tmp_path / pod / "log").open("ab"))
            process = subprocess.Popen(
                pods.command(pod, words), env=environment, stdout=log, stderr=log, start_new_session=True
            )
            ends.callback(end, process)
            return process

        def ready(pod: str) -> bool:
            _, environment = prepared[pod]
            command = pods.command(pod, shard["readinessProbe"]["exec"]["command"])
            return (
                subprocess.run(command, env=environment, timeout=60, stderr=subprocess.DEVNULL).returncode
                == 0
            )

        def contains() -> str:
            """What a client beside them makes of the URL: "True" when what it put is there."""
            script = (
                "import sys, kvpool\n"
                "keys = kvpool.Namespace('default', {'model': 'm'}).keys("
                "[bytes(31) + bytes([n]) for n in range(64)], group=0, rank=0)\n"
                "with kvpool.open_store(sys.argv[1]) as store:\n"
                "    store.put_many(keys, [b'x' * 64] * 64, timeout_s=60)\n"
                "    print(all(store.contains_many(keys, timeout_s=60)))\n"
            )
            run = subprocess.run(
                pods.command("hub", [str(PYTHON), "-c", script, url]), capture_output=True, text=True,
                timeout=60, cwd=ROOT,
            )  # fmt: skip
            return run.stdout.strip() or run.stderr[-2000:]

        running_pods = {pod: start(pod) for pod in names}
        for pod in names:
            assert eventually(lambda pod=pod: ready(pod)), (tmp_path / pod / "log").read_text()  # type: ignore[misc]
        words, environment = as_a_pod(job, tmp_path / "job", secrets, "job", server)
        for _ in range(2):  # it may run again
            run = subprocess.run(
                pods.command("job", words), env=environment, capture_output=True, text=True, timeout=120
            )
            assert run.returncode == 0, run.stderr
            assert run.stdout == "a cluster of 3 shards serves\n"
        assert eventually(lambda: contains() == "True"), contains()
        # A pod that comes again: empty, and part of the cluster.
        end(running_pods["valkey-1"])
        start("valkey-1")
        assert eventually(lambda: ready("valkey-1"))
        assert eventually(lambda: contains() == "True"), contains()


def end(process: subprocess.Popen[bytes]) -> None:
    """With all that it has started: a shard leaves one behind that looks for the others."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)
