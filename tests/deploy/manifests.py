"""What kustomize makes of ``deploy/k8s``: objects of Kubernetes, as ``kubectl apply -k`` would send them."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "deploy/k8s"
TOOLS = ROOT / ".cache/kubernetes"
OVERLAYS = tuple(sorted(one.name for one in (K8S / "overlays").iterdir()))
Object = dict[str, Any]


def build(folder: Path) -> list[Object]:
    """The objects of a kustomization."""
    kubectl = TOOLS / "bin/kubectl"
    assert kubectl.exists(), f"there is no {kubectl}: make .cache/kubernetes/.stamp gets it"
    run = subprocess.run(
        [str(kubectl), "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    assert not run.stderr, f"kustomize warns: {run.stderr}"
    return parsed(run.stdout)


def parsed(text: str) -> list[Object]:
    return [each for each in yaml.load_all(text, yaml.CSafeLoader) if each is not None]


@functools.cache
def overlay(name: str) -> tuple[Object, ...]:
    return tuple(build(K8S / "overlays" / name))


def one(objects: tuple[Object, ...], kind: str, name: str) -> Object:
    (found,) = (each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def workloads(objects: tuple[Object, ...]) -> Iterator[Object]:
    """Those that have pods."""
    return (each for each in objects if each["kind"] in ("Deployment", "StatefulSet", "Job"))


def pod_of(workload: Object) -> Object:
    pod: Object = workload["spec"]["template"]["spec"]
    return pod


def containers(workload: Object) -> list[Object]:
    pod = pod_of(workload)
    return [*pod.get("initContainers", []), *pod["containers"]]


def arguments(container: Object, environment: Mapping[str, str] | None = None) -> list[str]:
    """Its arguments, with ``$(NAME)`` from the environment."""
    return [
        re.sub(r"\$\((\w+)\)", lambda found: (environment or {})[found[1]], word)
        for word in container.get("args", [])
    ]


def options(words: list[str]) -> dict[str, str]:
    """``--name=value`` and ``--name value`` of a command line, by name. A switch has the value ""."""
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            found[name] = value
        elif name:
            found[name] = word
    return found


def nbytes(quantity: str) -> int:
    """Of memory, as Kubernetes writes it."""
    number, unit = re.fullmatch(r"(\d+)(Ki|Mi|Gi)", quantity).groups()  # type: ignore[union-attr]
    return int(number) << {"Ki": 10, "Mi": 20, "Gi": 30}[unit]
