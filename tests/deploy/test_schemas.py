"""``deploy/k8s``: the objects of every overlay are as Kubernetes, and the projects of its custom resources, say."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import referencing
import referencing.jsonschema
import yaml

from tests.deploy.manifests import (
    K8S,
    OVERLAYS,
    ROOT,
    TOOLS,
    Object,
    arguments,
    containers,
    one,
    options,
    overlay,
    parsed,
)
from tests.deploy.schemas import SCHEMAS

every_overlay = pytest.mark.parametrize("name", OVERLAYS)
# Kinds of npm's packages, by the module that has their schema.
MODELS = {
    ("gateway.networking.k8s.io/v1", "Gateway"): "@kubernetes-models/gateway-api",
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): "@kubernetes-models/gateway-api",
    ("monitoring.coreos.com/v1", "PodMonitor"): "@kubernetes-models/prometheus-operator",
    ("monitoring.coreos.com/v1", "PrometheusRule"): "@kubernetes-models/prometheus-operator",
}


def schema_of_kubernetes(each: Object) -> dict[str, Any] | None:
    """The strict one, without unknown fields."""
    group, _, version = each["apiVersion"].rpartition("/")
    kind = each["kind"].lower()
    name = f"{kind}-{group.split('.')[0]}-{version}" if group else f"{kind}-{version}"
    file = TOOLS / "schemas" / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


@functools.cache
def retrieve(uri: str) -> referencing.Resource[Any]:
    return referencing.Resource.from_contents(
        json.loads((TOOLS / "schemas" / uri.rpartition("/")[2]).read_text()),
        default_specification=referencing.jsonschema.DRAFT4,
    )


def judge(each: Object, schema: dict[str, Any]) -> None:
    validator = jsonschema.Draft202012Validator(schema, registry=referencing.Registry(retrieve=retrieve))
    problems = [f"{error.json_path}: {error.message:.200}" for error in validator.iter_errors(each)]
    assert not problems, (each["kind"], each["metadata"]["name"], problems)


@every_overlay
def test_every_object_has_the_fields_of_its_kind(name: str) -> None:
    counted = 0
    for each in overlay(name):
        schema = schema_of_kubernetes(each) or SCHEMAS.get(each["kind"])
        if schema is None:
            assert (each["apiVersion"], each["kind"]) in MODELS, each["kind"]
            continue
        judge(each, schema)
        counted += 1
    assert counted > 15


def test_a_field_that_is_misspelled_is_found() -> None:
    worker = json.loads(json.dumps(one(overlay("envoy"), "Deployment", "worker")))
    worker["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(AssertionError, match="livenesProbe"):
        judge(worker, schema_of_kubernetes(worker) or {})
    pool = json.loads(json.dumps(one(overlay("gateway"), "InferencePool", "workers")))
    pool["spec"]["extensionRef"] = pool["spec"].pop("endpointPickerRef")  # as before v1
    with pytest.raises(AssertionError, match="extensionRef"):
        judge(pool, SCHEMAS["InferencePool"])


def test_kserve_starts_workers_as_ours_and_the_inference_pool_has_them() -> None:
    (sample,) = parsed((K8S / "samples/kserve.yaml").read_text())
    judge(sample, SCHEMAS["LLMInferenceService"])
    ours = one(overlay("gateway"), "Deployment", "worker")
    judge({**ours, "spec": {**ours["spec"], "template": {"spec": sample["spec"]["template"]}}},
          schema_of_kubernetes(ours) or {})  # fmt: skip
    pool = one(overlay("gateway"), "InferencePool", "workers")["spec"]
    labels = sample["spec"]["labels"]
    assert pool["selector"]["matchLabels"].items() <= labels.items()
    assert labels == ours["spec"]["template"]["metadata"]["labels"], "policies and monitors select by them"
    (main,), (worker,) = sample["spec"]["template"]["containers"], containers(ours)
    assert main["name"] == "main", "KServe's name of it"

    def said(container: Object) -> dict[str, Any]:
        found = options(arguments(container))
        for name in ("--model", "--served-model-name"):
            found.pop(name, None)
        return {k: json.loads(v) if v.startswith("{") else v for k, v in found.items()}

    assert said(main) == said(worker)
    for name in ("image", "ports", "lifecycle", "resources", "securityContext"):
        assert main[name] == worker[name], name
    assert [each for each in worker["env"] if each["name"] != "HF_TOKEN"] == main["env"]
    assert {each["number"] for each in pool["targetPorts"]} == {main["readinessProbe"]["httpGet"]["port"]}


def prometheus_rule() -> Object:
    """By the command of the page."""
    page = (ROOT / "docs/how-to/kubernetes.md").read_text()
    (command,) = re.findall(
        r"^(\{ .*PrometheusRule.*?) \| kubectl apply -f -$", page, re.MULTILINE | re.DOTALL
    )
    made = subprocess.run(
        ["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    rule: Object = yaml.safe_load(made.stdout)
    return rule


def test_custom_resources_are_as_their_projects_define_them(tmp_path: Path) -> None:
    models = TOOLS / "models/node_modules"
    node = shutil.which("node")
    if node is None or not models.exists():
        pytest.skip("there is no npm: make .cache/kubernetes/.stamp gets the schemas by it")
    rule = prometheus_rule()
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy/alerts.yml").read_text())
    judged = [
        [
            f"{MODELS[each['apiVersion'], each['kind']]}/{each['apiVersion']}/{each['kind']}",
            each["kind"],
            each,
        ]
        for each in [*(each for name in OVERLAYS for each in overlay(name)), rule]
        if (each["apiVersion"], each["kind"]) in MODELS
    ]
    assert {kind for _, kind, _ in judged} == {kind for _, kind in MODELS}
    wrong = json.loads(json.dumps(judged))
    for _, _, each in wrong:
        each["spec"] = {"rules": 1, "selector": 1, "listeners": 1, "groups": 1}

    def say(each: list[Any]) -> list[bool]:
        """What the packages say: whether each is one of its kind."""
        (tmp_path / "objects.json").write_text(json.dumps(each))
        (tmp_path / "node_modules").symlink_to(models) if not (tmp_path / "node_modules").exists() else None
        script = (
            'import {readFileSync} from "fs"; for (const [module, kind, object] of '
            'JSON.parse(readFileSync("objects.json"))) { const Model = (await import(module))[kind];'
            'try { new Model(object).validate(); console.log("true") } catch (error) {'
            "console.error(error.message); console.log(false) } }"
        )
        (tmp_path / "judge.mjs").write_text(script)
        run = subprocess.run([node, "judge.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert run.returncode == 0, run.stderr
        return [line == "true" for line in run.stdout.split()]

    assert say(judged) == [True] * len(judged)
    assert say(wrong) == [False] * len(judged)
