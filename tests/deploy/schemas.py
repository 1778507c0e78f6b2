"""Of kinds that no package brings a schema of: what ``deploy/k8s`` says of them, so that a typing error or
a field of another version is found. After the projects' own pages of October 2026; no cluster has been asked.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 253}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}


def only(required: str, **properties: Schema) -> Schema:
    """An object of these fields and no others. ``required``: names, with spaces between."""
    return {
        "type": "object", "properties": properties, "required": required.split(), "additionalProperties": False,
    }  # fmt: skip


def kind(group_version: str, name: str, spec: Schema) -> Schema:
    return only(
        "apiVersion kind metadata spec",
        apiVersion={"const": group_version}, kind={"const": name}, metadata={"type": "object"}, spec=spec,
    )  # fmt: skip


TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
SCHEMAS = {
    # api/v1/inferencepool_types.go of gateway-api-inference-extension 1.6
    "InferencePool": kind(
        "inference.networking.k8s.io/v1",
        "InferencePool",
        only(
            "selector targetPorts",  # a pool without endpointPickerRef asks no picker
            selector=only("matchLabels", matchLabels={**TEXTS, "minProperties": 1, "maxProperties": 64}),
            targetPorts={
                "type": "array", "items": only("number", number=PORT), "minItems": 1, "maxItems": 8,
            },
            appProtocol={"enum": ["http", "kubernetes.io/h2c"]},
            endpointPickerRef=only(
                "name port",  # port: where the kind is Service
                group={"type": "string"},
                kind={"const": "Service"},
                name=NAME,
                port=only("number", number=PORT),
                failureMode={"enum": ["FailOpen", "FailClose"]},
            ),
        ),
    ),
    # pkg/apis/serving/v1alpha2/llm_inference_service_types.go of kserve, and its samples of release 0.19
    "LLMInferenceService": kind(
        "serving.kserve.io/v1alpha2",
        "LLMInferenceService",
        only(
            "model template",
            model=only("uri name", uri={"type": "string", "pattern": "^(hf|s3|oci|pvc)://"}, name={"type": "string"}),
            replicas={"type": "integer", "minimum": 0},
            labels=TEXTS,
            template={"type": "object", "required": ["containers"]},
        ),
    ),
    # docs/valkeycluster.md of valkey-io/valkey-operator
    "ValkeyCluster": kind(
        "valkey.io/v1alpha1",
        "ValkeyCluster",
        only(
            "shards replicas",
            image={"type": "string", "minLength": 1},
            shards={"type": "integer", "minimum": 1},
            replicas={"type": "integer", "minimum": 0},
            workloadType={"enum": ["StatefulSet", "Deployment"]},
            exporter=only("enabled", enabled={"type": "boolean"}),
            podDisruptionBudget=only("mode", mode={"enum": ["Cluster", "Disabled"]}),
            config=TEXTS,
            containers={"type": "array", "items": {"type": "object", "required": ["name"]}},
        ),
    ),
}  # fmt: skip
