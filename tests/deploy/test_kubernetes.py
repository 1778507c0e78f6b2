"""``deploy/k8s``: every overlay has known fields, and agrees with the command line, the images and itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from kvpool.cli.app import app
from kvpool.config import PoolConfig
from kvpool.text import parse_nbytes
from tests.deploy.manifests import (
    K8S,
    OVERLAYS,
    ROOT,
    Object,
    arguments,
    build,
    containers,
    nbytes,
    one,
    options,
    overlay,
    pod_of,
    workloads,
)

every_overlay = pytest.mark.parametrize("name", OVERLAYS)
IMAGES = set(re.findall(r"^FROM .* AS (\S+)$", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE))


@every_overlay
def test_options_are_those_of_the_index(name: str) -> None:
    known = {opt for each in get_command(app).commands["index"].params for opt in each.opts}  # type: ignore[attr-defined]
    (index,) = containers(one(overlay(name), "Deployment", "index"))
    words = arguments(index)
    assert words[0] == "index"
    given = options(words[1:])
    assert len(given) == len(words) - 1, "each once, and with ="
    assert given.keys() <= known, given.keys() - known
    ports = {each["name"]: each["containerPort"] for each in index["ports"]}
    doors = {"grpc": "--listen", "ext-proc": "--ext-proc", "http": "--http", "metrics": "--metrics"}
    assert {door: f"0.0.0.0:{port}" for door, port in ports.items()} == {
        door: given[option] for door, option in doors.items()
    }
    limit = nbytes(index["resources"]["limits"]["memory"])
    assert parse_nbytes(given["--max-memory"]) <= limit - (128 << 20)
    assert (
        float(given["--drain"]) + 10
        < pod_of(one(overlay(name), "Deployment", "index"))["terminationGracePeriodSeconds"]
    )


@every_overlay
def test_settings_are_those_of_the_connector(name: str) -> None:
    workload = one(overlay(name), "Deployment", "worker")
    (worker,) = containers(workload)
    given = options(arguments(worker))
    connector = json.loads(given["--kv-transfer-config"])
    assert connector["kv_connector_module_path"] == "kvpool.vllm"
    environment = {each["name"] for each in worker["env"]}
    ours = {each.removeprefix("KVPOOL_").lower() for each in environment if each.startswith("KVPOOL_")}
    assert ours == {"pool", "advertise_host"}
    assert ours | connector["kv_connector_extra_config"].keys() <= PoolConfig.model_fields.keys()
    events = json.loads(given["--kv-events-config"])
    ports = {each["name"]: each["containerPort"] for each in worker["ports"]}
    assert ports == {
        "http": int(given["--port"]),
        "events": int(events["endpoint"].rpartition(":")[2]),
        "replay": int(events["replay_endpoint"].rpartition(":")[2]),
    }
    (_, wait) = worker["lifecycle"]["preStop"]["exec"]["command"]
    assert (
        pod_of(workload)["terminationGracePeriodSeconds"] > int(wait) + int(given["--shutdown-timeout"]) + 10
    )


@pytest.mark.parametrize(
    "file",
    ["docker-compose.yml", "docker-compose.secure.yml", "docker-compose.gpu.yml", "docker-compose.near.yml"],
)
def test_nobody_outside_compose_reaches_an_index(file: str) -> None:
    """What gRPC holds of a call before its token is bounded by who reaches the port alone."""
    services = yaml.safe_load((ROOT / file).read_text())["services"]
    assert {name for name, one in services.items() if "ports" in one} <= {"front", "prometheus"}
    assert all(one.get("network_mode") is None for one in services.values())
    base = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for name in ("index-1", "index-2"):
        assert "mem_limit" in base[name], "it alone ends and begins anew"
        assert base[name]["restart"] == "unless-stopped"


def test_workers_are_started_as_those_of_compose() -> None:
    """All but model and sizes."""
    for name, file in (("trial", "docker-compose.yml"), ("envoy", "docker-compose.gpu.yml")):
        compose = yaml.safe_load((ROOT / file).read_text())["x-worker"]["command"]
        (worker,) = containers(one(overlay(name), "Deployment", "worker"))
        sizes = {"--model", "--max-model-len", "--gpu-memory-utilization", "--shutdown-timeout"}

        def said(words: list[str], left_out: set[str] = sizes) -> dict[str, Any]:
            return {
                option: json.loads(value) if value.startswith("{") else value
                for option, value in options(words).items()
                if option not in left_out
            }

        assert said(arguments(worker)) == said(compose)


@every_overlay
def test_no_pod_may_more_than_it_needs(name: str) -> None:
    for workload in workloads(overlay(name)):
        pod = pod_of(workload)
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == 10001, "that of deploy/Dockerfile"
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(workload):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
            shares = (name, container["name"]) == ("near", "worker")  # memory that others of its node reserve
            assert container["resources"]["limits"]["memory"] == container["resources"]["requests"][
                "memory"
            ] or (
                shares or "init" in container["name"] or container["name"] in ("endpoints", "valkey-cluster")
            )
            assert (
                {each["name"] for each in container["volumeMounts"]}
                <= {
                    *(each["name"] for each in pod["volumes"]),
                    *(each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", [])),
                }
                if "volumeMounts" in container
                else True
            )
        if workload["kind"] != "Job":
            for container in pod["containers"]:
                assert container["readinessProbe"]
                assert container["livenessProbe"]
        assert "hostPath" not in json.dumps(pod)


@every_overlay
def test_images_are_those_of_the_dockerfile(name: str) -> None:
    used = {container["image"] for workload in workloads(overlay(name)) for container in containers(workload)}
    for image in used:
        found = re.fullmatch(r"registry\.example/kvpool-([a-z-]+):0\.1\.0", image)
        assert found, f"components/images does not say where {image} is"
        assert found[1] in IMAGES, image


@every_overlay
def test_selectors_and_ports_meet_their_pods(name: str) -> None:
    objects = overlay(name)
    pods = [(each["spec"]["template"]["metadata"]["labels"], pod_of(each)) for each in workloads(objects)]

    def matching(selector: dict[str, str]) -> list[Object]:
        return [pod for labels, pod in pods if selector.items() <= labels.items()]

    def named_ports(pod: Object) -> dict[str, int]:
        return {p["name"]: p["containerPort"] for c in pod["containers"] for p in c.get("ports", [])}

    budgets, checked = set(), 0
    for each in objects:
        kind, spec = each["kind"], each.get("spec", {})
        if kind == "Service":
            (pod,) = matching(spec["selector"])
            for port in spec["ports"]:
                assert named_ports(pod)[port["targetPort"]] == port["port"]
                checked += 1
        elif kind == "PodDisruptionBudget":
            (pod,) = matching(spec["selector"]["matchLabels"])
            assert spec["maxUnavailable"] == 1
            budgets.add(each["metadata"]["name"])
        elif kind == "PodMonitor":
            (pod,) = matching(spec["selector"]["matchLabels"])
            assert all(end["port"] in named_ports(pod) for end in spec["podMetricsEndpoints"])
            labels = next(labels for labels, one_pod in pods if one_pod is pod)
            assert labels[spec["jobLabel"]] in ("index", "worker"), "as deploy/alerts.yml asks for it"
        elif kind == "InferencePool":
            (pod,) = matching(spec["selector"]["matchLabels"])
            assert [port["number"] for port in spec["targetPorts"]] == [named_ports(pod)["http"]]
            picker = spec["endpointPickerRef"]
            service = one(objects, "Service", picker["name"])
            assert picker["port"]["number"] in {
                p["port"] for p in service["spec"]["ports"] if p["name"] == "ext-proc"
            }
        elif kind == "StatefulSet":
            assert one(objects, "Service", spec["serviceName"])["spec"]["clusterIP"] == "None"
    assert checked > 4
    assert budgets >= {each["metadata"]["name"] for each in workloads(objects) if each["kind"] != "Job"}


def allowed(objects: tuple[Object, ...], source: str, target: str, port: int) -> bool:
    """Whether the policies let pods of the workload ``source`` reach that port of ``target``."""
    labels = {
        each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"]
        for each in workloads(objects)
    }

    labels |= {"stranger": {}, "client": {"kvpool-index-client": "true"}}  # others in the namespace

    def selects(selector: Object, name: str) -> bool:
        wanted: dict[str, str] = selector.get("matchLabels", {})
        return wanted.items() <= labels[name].items()

    def passes(rules: list[Object], side: str, other: str) -> bool:
        return any(
            (side not in rule or any("podSelector" in peer and "namespaceSelector" not in peer
             and selects(peer["podSelector"], other) for peer in rule[side]))
            and port in {each["port"] for each in rule["ports"]}
            for rule in rules
        )  # fmt: skip

    policies = [each["spec"] for each in objects if each["kind"] == "NetworkPolicy"]
    into = [
        each for each in policies if "Ingress" in each["policyTypes"] and selects(each["podSelector"], target)
    ]
    out_of = [
        each for each in policies if "Egress" in each["policyTypes"] and selects(each["podSelector"], source)
    ]
    return (not into or any(passes(each.get("ingress", []), "from", source) for each in into)) and (
        not out_of or any(passes(each.get("egress", []), "to", target) for each in out_of)
    )


NEEDED = {
    ("index", "worker", 8000), ("index", "worker", 5557), ("index", "worker", 5657), ("index", "index", 50051),
    ("index", "valkey", 6379), ("worker", "valkey", 6379), ("valkey", "valkey", 6379), ("valkey", "valkey", 16379),
    ("valkey-cluster", "valkey", 6379), ("front", "index", 50052), ("front", "worker", 8000),
}  # fmt: skip


@every_overlay
def test_policies_allow_what_is_needed_and_nothing_else(name: str) -> None:
    objects = overlay(name)
    names = {each["metadata"]["name"] for each in workloads(objects)}
    ports = {8000, 5557, 5657, 50051, 50052, 50053, 9090, 6379, 16379}
    found = {
        (source, target, port)
        for source in sorted(names | {"stranger", "client"}) for target in names for port in ports
        if allowed(objects, source, target, port)
    }  # fmt: skip
    wanted = {each for each in NEEDED if {each[0], each[1]} <= names}
    of_clients = {("client", "index", 50051), ("client", "index", 50053)}
    assert wanted <= found, wanted - found
    assert found - wanted <= of_clients, found - wanted - of_clients


@every_overlay
def test_secrets_are_named_and_never_written(name: str) -> None:
    assert not [each for each in overlay(name) if each["kind"] == "Secret"]
    for workload in workloads(overlay(name)):
        for container in containers(workload):
            for each in container.get("env", []):
                secret = re.search("TOKEN|AUTH|PASSWORD", each["name"])
                assert not (secret and "value" in each), each["name"]
                assert "@" not in each.get("value", ""), "a URL with a password"
    for each in overlay(name):
        if each["kind"] == "ConfigMap":
            assert "@" not in json.dumps(each["data"])


def test_every_secret_of_the_secure_overlay_is_made(secrets: Path) -> None:
    made = {each["metadata"]["name"]: set(each["data"]) for each in build(secrets)}
    assert {each["metadata"]["namespace"] for each in build(secrets)} == {"kvpool"}
    asked: dict[str, set[str]] = {}

    def walk(each: Any) -> None:
        if isinstance(each, list):
            for item in each:
                walk(item)
        elif isinstance(each, dict):
            if (reference := each.get("secretKeyRef")) and not reference.get("optional"):
                asked.setdefault(reference["name"], set()).add(reference["key"])
            if volume := each.get("secret"):
                name = volume.get("secretName") or volume["name"]
                asked.setdefault(name, set()).update(item["key"] for item in volume.get("items", []))
            for item in each.values():
                walk(item)

    walk(list(overlay("secure")))
    assert asked.keys() == made.keys()
    for name, keys in asked.items():
        assert keys <= made[name], name
    # What arguments and the files themselves name is mounted there.
    mounted = {
        "index": made["kvpool-ca"] | made["kvpool-index"],
        "front": made["kvpool-ca"] | made["kvpool-front"],
        "valkey": made["kvpool-ca"] | asked["kvpool-valkey"],
        "worker": made["kvpool-ca"],
        "valkey-cluster": made["kvpool-ca"],
    }
    texts = {"front": (secrets / "envoy.yaml").read_text()}
    url = (secrets / "url").read_text()
    for workload in workloads(overlay("secure")):
        name = workload["metadata"]["name"]
        text = json.dumps(workload) + texts.get(name, "") + (url if name in ("index", "worker") else "")
        assert set(re.findall(r"/run/secrets/([\w.-]+)", text)) <= mounted[name], name
    assert "ca.key" not in json.dumps(sorted(map(sorted, made.values())))


def test_the_operators_servers_are_configured_as_ours() -> None:
    told = one(overlay("operator"), "ValkeyCluster", "kvpool")["spec"]["config"]
    lines = (ROOT / "deploy/valkey.conf").read_text().splitlines()
    ours = dict(line.split(" ", 1) for line in lines if line and not line.startswith("#"))
    del ours["bind"], ours["protected-mode"]  # the operator's own
    ours["cluster-require-full-coverage"] = "no"  # of deploy/valkey-shard
    assert "--cluster-require-full-coverage no" in (ROOT / "deploy/valkey-shard").read_text()
    assert told.keys() == ours.keys()
    assert {key for key in told if told[key] != ours[key]} == {"maxmemory"}


@every_overlay
def test_a_shard_has_a_third_of_its_memory_for_connections(name: str) -> None:
    if name == "operator":
        spec = one(overlay(name), "ValkeyCluster", "kvpool")["spec"]
        maxmemory, container = spec["config"]["maxmemory"], spec["containers"][0]
    else:
        (container,) = containers(one(overlay(name), "StatefulSet", "valkey"))
        (told,) = (each["value"] for each in container["env"] if each["name"] == "VALKEY_OPTIONS")
        maxmemory = options(told.split())["--maxmemory"]
    used = int(maxmemory.removesuffix("gb")) << 30
    limit = nbytes(container["resources"]["limits"]["memory"])
    assert used * 3 <= limit * 2


def test_the_page_names_every_overlay_and_component() -> None:
    page = (ROOT / "docs/how-to/kubernetes.md").read_text()
    for each in [*OVERLAYS, *(folder.name for folder in (K8S / "components").iterdir())]:
        assert f"`{each}`" in page, each
    assert "not run on a cluster" in page.lower()
