"""The generated code: as the pinned generator makes it, and good under the protobuf of either major version."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor

from kvpool import BlockHasher
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.protocol.messages import SERVICE, decode_prompt, decode_worker, encode_lookup, pack_tokens
from kvpool.key.hashing import seed_id
from kvpool.v1 import index_pb2
from tests.golden.make import filled
from tests.support.fleets import Clock, serving

ROOT = Path(__file__).parents[3]
TOOLS = ROOT / ".cache" / "proto"
KINDS = {
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_UINT64: "uint64",
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_FIXED64: "fixed64",
    FieldDescriptor.TYPE_DOUBLE: "double",
}
GENERATED = [
    f"{name}_pb2{ending}"
    for name in ("ext_proc", "health", "index", "reflection")
    for ending in (".py", ".pyi")
] + ["index_pb2_grpc.py"]

ROUND_TRIP = """
import sys
import google.protobuf, grpc
from kvpool.v1 import ext_proc_pb2, health_pb2, index_pb2, index_pb2_grpc, reflection_pb2
sent = index_pb2.LookupRequest(
    scope=index_pb2.Scope(model="m", multimodal=[index_pb2.MultimodalItem(identifier="i", offset=3, length=4)]),
    block_hashes=bytes(range(16)), workers=["a"])
assert index_pb2.LookupRequest.FromString(sent.SerializeToString()) == sent
assert sent.WhichOneof("prompt") == "block_hashes"
assert index_pb2_grpc.IndexServiceServicer.Lookup and not hasattr(index_pb2_grpc.IndexServiceServicer, "Nothing")
print(google.protobuf.__version__, grpc.__version__, sent.SerializeToString().hex())
"""


GOLDEN: list[dict[str, Any]] = json.loads((ROOT / "tests" / "golden" / "protocol.json").read_text())


def golden(kind: str, at_least: int = 3) -> list[dict[str, Any]]:
    found = [row for row in GOLDEN if row["kind"] == kind]
    assert len(found) >= at_least
    return found


def tools() -> Path:
    assert (TOOLS / ".stamp").exists(), "the generator is missing: run make .cache/proto/.stamp"
    return TOOLS


def round_trip(python_path: str) -> tuple[str, str, str]:
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", ROUND_TRIP],
        env={**os.environ, "PYTHONPATH": python_path}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    protobuf, grpc, sent = ended.stdout.split()
    return protobuf, grpc, sent


def test_the_generated_code_is_not_stale(tmp_path: Path) -> None:
    made = subprocess.run(
        [ROOT / "scripts" / "proto", sys.executable, tools(), tmp_path],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert sorted(path.name for path in (tmp_path / "kvpool" / "v1").iterdir()) == sorted(GENERATED)
    for name in GENERATED:
        here = (ROOT / "kvpool" / "v1" / name).read_text()
        assert here == (tmp_path / "kvpool" / "v1" / name).read_text(), f"{name} is stale: run make proto"


def test_it_runs_on_the_lowest_versions_and_on_those_installed() -> None:
    lowest = round_trip(str(tools()))
    assert lowest[:2] == ("6.31.1", "1.75.1")
    installed = round_trip("")
    assert installed[:2] == (version("protobuf"), version("grpcio"))
    assert lowest[2] == installed[2]


def test_the_lowest_versions_are_those_of_the_extra() -> None:
    extra = (ROOT / "pyproject.toml").read_text().split("\nclient = [", 1)[1].split("]", 1)[0]
    assert '"grpcio>=1.75.1"' in extra
    assert '"protobuf>=6.31.1"' in extra


def surface(file: Any = index_pb2.DESCRIPTOR) -> list[str]:
    """What a caller depends on: calls, fields and values, a line each."""
    lines = [f"{file.package}: go_package {file.GetOptions().go_package}"]
    for service in file.services_by_name.values():
        for method in service.methods:
            asked = ("stream " if method.client_streaming else "") + method.input_type.name
            answered = ("stream " if method.server_streaming else "") + method.output_type.name
            lines.append(f"{service.full_name}.{method.name}({asked}) returns ({answered})")
    for message in file.message_types_by_name.values():
        lines.append(message.full_name)
        for field in message.fields:
            kind = KINDS.get(field.type) or (field.message_type or field.enum_type).name
            once = "repeated " if field.is_repeated else "optional " if field.has_presence else ""
            lines.append(f"{message.full_name}.{field.name} = {field.number}: {once}{kind}")
        lines += [
            f"{message.full_name}: one of {', '.join(field.name for field in one.fields)}"
            for one in message.oneofs
            if len(one.fields) > 1
        ]
    for enum in file.enum_types_by_name.values():
        lines += [f"{enum.full_name}.{value.name} = {value.number}" for value in enum.values]
    return sorted(lines)


def test_what_v1_has_stays() -> None:
    """What is added here is added to the file; nothing leaves it, and nothing in it changes, while this is v1."""
    promised = (ROOT / "tests" / "golden" / "v1.txt").read_text().splitlines()
    assert sorted(set(promised) - set(surface())) == [], "v1 is stable: this must stay"
    assert sorted(set(surface()) - set(promised)) == [], "new in v1: write it into tests/golden/v1.txt"


COLUMNS = {"LookupResponse", "RouteResponse"}  # row i of each: named for one row
NAMED_BEFORE = {"Scope.multimodal", "ChatMessage.content"}


def test_names_follow_the_style_guide_of_protobuf() -> None:
    """https://protobuf.dev/programming-guides/style/; what v1 has named otherwise keeps its name."""
    file = index_pb2.DESCRIPTOR
    for message in file.message_types_by_name.values():
        assert re.fullmatch(r"([A-Z][a-z0-9]*)+", message.name)
        for field in message.fields:
            name = f"{message.name}.{field.name}"
            assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z][a-z0-9]*)*", field.name), name
            is_column = message.name in COLUMNS and field.message_type is None
            if field.is_repeated and not is_column and name not in NAMED_BEFORE:
                assert field.name.endswith("s"), f"{name} is repeated: name it in the plural"
    for enum in file.enum_types_by_name.values():
        prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.name).upper()
        assert all(value.name.startswith(f"{prefix}_") for value in enum.values)
        assert enum.values_by_number[0].name == f"{prefix}_UNSPECIFIED"


# ---- golden vectors


def fields_set(message: Any, fields: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The fields of a vector, and of the messages in it."""
    for name, value in fields.items():
        yield message.name, name
        if (kind := message.fields_by_name[name].message_type) is not None:
            for one in value if isinstance(value, list) else [value]:
                yield from fields_set(kind, one)


def test_every_field_is_set_in_a_vector() -> None:
    messages = index_pb2.DESCRIPTOR.message_types_by_name
    every = {(name, field.name) for name, message in messages.items() for field in message.fields}
    vectors = golden("message")
    assert every == {one for case in vectors for one in fields_set(messages[case["message"]], case["fields"])}


@pytest.mark.parametrize("case", golden("message"), ids=lambda case: case["message"])
def test_golden_messages(case: dict[str, Any]) -> None:
    message = filled(getattr(index_pb2, case["message"])(), case["fields"])
    packed = bytes.fromhex(case["hex"])
    assert type(message).FromString(packed) == message
    assert message.SerializeToString(deterministic=True) == packed


@pytest.mark.parametrize("case", golden("prompt"), ids=lambda case: case["name"])
def test_golden_prompts(case: dict[str, Any]) -> None:
    hasher = BlockHasher(case["block_tokens"], case["algorithm"], case["seed"])
    extra = {
        "lora": tuple(case["lora"]) if case["lora"] else None,
        "cache_salt": case["cache_salt"],
        "multimodal": [tuple(item) for item in case["multimodal"]],
    }
    assert [digest.hex() for digest in hasher.hashes(case["token_ids"], **extra)] == case["digests"]
    assert hasher.hashes64(case["token_ids"], **extra).hex() == case["block_hashes"]
    assert pack_tokens(case["token_ids"]).hex() == case["token_ids_packed"]
    assert seed_id(case["seed"]) == case["hash_seed_id"]


def told(case: dict[str, Any]) -> Fleet:
    """A fleet of the worker of a vector, with its batches."""
    fleet = Fleet(clock=Clock())
    worker = decode_worker(index_pb2.Worker.FromString(bytes.fromhex(case["worker"])), "")
    fleet.add(worker, "call")
    for dp_rank, sequence, payload in case["batches"]:
        fleet.rank(worker.id, dp_rank).apply(sequence, bytes.fromhex(payload))
        fleet.rank(worker.id, dp_rank).heard()
    return fleet


@pytest.mark.parametrize("case", golden("exchange"), ids=lambda case: case["name"])
def test_golden_exchanges(case: dict[str, Any]) -> None:
    fleet = told(case)
    request = index_pb2.LookupRequest.FromString(bytes.fromhex(case["request"]))
    lookup = encode_lookup(fleet.lookup(decode_prompt(request)))
    assert lookup.SerializeToString(deterministic=True).hex() == case["reply"]


@pytest.mark.usefixtures("grpc_started")
@pytest.mark.parametrize("case", golden("stream", at_least=1), ids=lambda case: case["name"])
def test_golden_streams(case: dict[str, Any]) -> None:
    """Texts of errors are not part of the vectors."""
    replies = [bytes.fromhex(reply) for _, reply in case["messages"]]
    with serving(told(case)) as served, grpc.insecure_channel(served.target) as channel:
        requests = [bytes.fromhex(request) for request, _ in case["messages"]]
        answers = channel.stream_stream(f"/{SERVICE}/LookupStream")(iter(requests), timeout=60)
        found = [index_pb2.LookupResponse.FromString(answer) for answer in answers]
    for one in (*found, *(response for reply in found for response in reply.responses)):
        assert bool(one.status.message) == one.HasField("status")
        one.status.message = ""
        if not one.status.code:
            one.ClearField("status")
    assert [one.SerializeToString(deterministic=True) for one in found] == replies
