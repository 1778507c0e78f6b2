"""The messages of ``ext_proc`` that are written out here are those of Envoy, field by field."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from kvpool.v1 import ext_proc_pb2 as pb

MESSAGES = Path(__file__).parents[3] / ".cache/envoy/messages"
# A script, run where Envoy's messages are to be had: their names would be in the way of others here.
SCRIPT = """
import json, sys
from envoy.service.ext_proc.v3 import external_processor_pb2
from google.protobuf import descriptor_pool
pool, found, todo = descriptor_pool.Default(), {}, json.load(sys.stdin)
for name in todo:
    message = pool.FindMessageTypeByName(name)
    found[name] = {
        field.name: [
            field.number, field.type, field.is_repeated if hasattr(field, "is_repeated") else field.label == 3,
            field.message_type.full_name if field.message_type else "",
            {value.name: value.number for value in field.enum_type.values} if field.enum_type else {},
            field.containing_oneof.name if field.containing_oneof else "",
        ] for field in message.fields
    }
json.dump(found, sys.stdout)
"""
OF_OTHER_FILES = {
    "HeaderValue": "envoy.config.core.v3.HeaderValue",
    "HeaderMap": "envoy.config.core.v3.HeaderMap",
    "HeaderValueOption": "envoy.config.core.v3.HeaderValueOption",
    "Metadata": "envoy.config.core.v3.Metadata",
    "HttpStatus": "envoy.type.v3.HttpStatus",
    "ProcessingMode": "envoy.extensions.filters.http.ext_proc.v3.ProcessingMode",
}


def envoys(name: str) -> str:
    """The name that Envoy has for a message of ours."""
    short = name.removeprefix("kvpool.ext_proc.v3.")
    if name == short:  # of protobuf itself
        return name
    first, _, nested = short.partition(".")
    outer = OF_OTHER_FILES.get(first, f"envoy.service.ext_proc.v3.{first}")
    return f"{outer}.{nested}" if nested else outer


def test_each_field_is_envoys() -> None:
    messages = list(pb.DESCRIPTOR.message_types_by_name.values())
    messages += [nested for message in messages for nested in message.nested_types]
    assert len(messages) > 20
    told = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps([envoys(message.full_name) for message in messages]),
        env={**os.environ, "PYTHONPATH": str(MESSAGES)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    theirs: dict[str, Any] = json.loads(told.stdout)
    for message in messages:
        known = theirs[envoys(message.full_name)]
        for field in message.fields:
            number, kind, repeated, of_message, values, oneof = known[field.name]
            assert (field.number, field.is_repeated) == (number, repeated), field.full_name
            if field.full_name.endswith("HttpStatus.code"):
                assert values["OK"] == 200, "its numbers are those of HTTP"
                assert kind == FieldDescriptor.TYPE_ENUM
                continue
            assert field.type == kind, field.full_name
            if field.message_type is not None:
                assert envoys(field.message_type.full_name) == of_message
            if field.enum_type is not None:
                assert {value.name: value.number for value in field.enum_type.values} == values
            assert (field.containing_oneof.name if field.containing_oneof else "") == oneof, field.full_name
