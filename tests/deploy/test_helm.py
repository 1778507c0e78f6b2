"""``deploy/helm``: its objects are those of ``deploy/k8s``, one by one, and its values are checked."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

import kvpool
from kvpool.cli.doctor.rules import advised_io_threads
from tests.deploy.manifests import (
    K8S,
    OVERLAYS,
    ROOT,
    TOOLS,
    Object,
    containers,
    one,
    options,
    overlay,
    parsed,
)  # fmt: skip

CHART = ROOT / "deploy/helm"
# The values of each overlay.
VALUES = {
    "envoy": [],
    "gateway": ["--set=front=gateway"],
    "near": ["--set=nearPool.enabled=true"],
    "operator": ["--set=pool=operator"],
    "secure": ["--set=secure=true"],
    "trial": [f"--values={CHART / 'values-trial.yaml'}"],
}


def helm() -> str:
    ours = TOOLS / "bin/helm"
    if ours.exists():
        return str(ours)
    assert platform.machine() != "x86_64", f"there is no {ours}: make .cache/kubernetes/.stamp gets it"
    return shutil.which("helm") or pytest.skip(
        "no package has helm for this machine, and none is on the PATH"
    )


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm(), *words], capture_output=True, text=True, timeout=60, check=False)


def rendered(*values: str) -> tuple[Object, ...]:
    made = run("template", "kvpool", str(CHART), "--namespace=kvpool", *values)
    assert made.returncode == 0, made.stderr
    assert not made.stderr, f"helm warns: {made.stderr}"
    return tuple(parsed(made.stdout))


def by_name(objects: tuple[Object, ...]) -> dict[tuple[str, str], Object]:
    """As text, with what is helm's or kustomize's own: the namespace, and names that change with their content."""
    found: dict[tuple[str, str], Object] = {}
    for each in objects:
        text = re.sub(r'"front-[0-9a-z]{10}"', '"front-HASH"', json.dumps(each))
        text = text.replace("\\n\\n ", "\\n ")  # kustomize doubles ends of lines in folded texts
        each = json.loads(text.replace('"valkey-cluster-1"', '"valkey-cluster"'))
        assert each["metadata"].pop("namespace", "kvpool") == "kvpool"
        found[each["kind"], each["metadata"]["name"]] = each
    assert len(found) == len(objects)
    return found


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in ours.keys() | theirs.keys():
            yield from differences(ours.get(key), theirs.get(key), f"{path}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for at, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(*pair, f"{path}[{at}]")
    elif ours != theirs:
        yield f"{path}: {ours!r} and not {theirs!r}"


@pytest.mark.parametrize("name", OVERLAYS)
def test_its_objects_are_those_of_the_overlay(name: str) -> None:
    ours, theirs = by_name(rendered(*VALUES[name])), by_name(overlay(name))
    del theirs["Namespace", "kvpool"]  # of who installs
    assert ours.keys() == theirs.keys()
    assert not list(differences(ours, theirs))


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ("wrokers=1", "wrokers"),
        ("pool=redis", "/pool"),
        ("pool=valkey://:password@host", "/pool"),
        ("secure=true,front=gateway", "/front"),
        ("secure=true,pool=operator", "/pool"),
        ("images.digests.index=sha256:12", "/images/digests/index"),
        ("worker.env[0].name=KVPOOL_POOL", "/worker/env/0/name"),
        ("nearPool.enabled=true,worker.memory=512Mi", "/worker/memory"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(value: str, where: str) -> None:
    refused = run("template", "kvpool", str(CHART), f"--set={value}")
    assert refused.returncode != 0
    assert where in refused.stderr


def test_a_pool_of_ones_own_is_named_by_its_url_or_by_a_secret() -> None:
    for pool in ("valkey://mine:6379", "secret"):
        objects = rendered(f"--set=pool={pool}")
        assert not [each for each in objects if each["metadata"]["name"].startswith("valkey")]
        egress = one(objects, "NetworkPolicy", "index")["spec"]["egress"]
        assert {"ports": [{"port": 6379}]} in egress
        sources = [
            each["valueFrom"]
            for name in ("index", "worker")
            for each in containers(one(objects, "Deployment", name))[0]["env"]
            if each["name"] == "KVPOOL_POOL"
        ]
        place = {"name": "kvpool-pool", "key": "url"}
        kind = "secretKeyRef" if pool == "secret" else "configMapKeyRef"
        assert sources == [{kind: place}, {kind: place}]
        urls = [each["data"]["url"] for each in objects if each["metadata"]["name"] == "kvpool-pool"]
        assert urls == ([] if pool == "secret" else [pool])


@pytest.mark.parametrize("cpu", ["100m", "1", "2", "3", "3500m", "4", "8", "64"])
def test_a_shard_has_the_io_threads_that_doctor_advises_for_its_cpus(cpu: str) -> None:
    cores = int(cpu.removesuffix("m")) // 1000 if cpu.endswith("m") else int(cpu)
    advised = advised_io_threads(cores)
    for values in (["--set=secure=true"], ["--set=pool=operator"]):
        objects = rendered(f"--set-string=valkey.cpu={cpu}", *values)
        if values == ["--set=pool=operator"]:
            said = one(objects, "ValkeyCluster", "kvpool")["spec"]["config"].get("io-threads", "1")
        else:
            (container,) = containers(one(objects, "StatefulSet", "valkey"))
            (told,) = (each["value"] for each in container["env"] if each["name"] == "VALKEY_OPTIONS")
            said = options(told.split()).get("--io-threads", "1")
        assert said == str(advised)


def test_an_image_is_taken_by_its_digest() -> None:
    digest = "sha256:" + "a" * 64
    objects = rendered("--set=images.tag=0.2.0", f"--set=images.digests.index={digest}")
    images = {each: containers(one(objects, "Deployment", each))[0]["image"] for each in ("index", "front")}
    assert images == {
        "index": f"registry.example/kvpool-index@{digest}",
        "front": "registry.example/kvpool-front:0.2.0",
    }


def test_it_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    tags = yaml.safe_load((K8S / "components/images/kustomization.yaml").read_text())["images"]
    said = {chart["version"], chart["appVersion"], *(each["newTag"] for each in tags)}
    assert said == {kvpool.__version__}
