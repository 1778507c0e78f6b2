"""How many fields a packed message may have, before protobuf reads it."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError

from kvpool.errors import ConfigError
from kvpool.index.protocol import packed as module
from kvpool.index.protocol.packed import check_fields
from kvpool.v1 import index_pb2 as pb

ITEM = pb.MultimodalItem(identifier="image", offset=1 << 20, length=3)
LOAD = pb.RankLoad(worker="w", dp_rank=300, running=7, queued_tokens=1 << 40)
CHAT = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=["a", "b"])])
# With how many fields of it count: those within messages that have lists, not those of an item or a load.
MESSAGES = [
    (pb.RouteRequest(loads=[LOAD] * 9, workers=["w"] * 3, most=300), 13),
    (pb.RouteRequest(scope=pb.Scope(model="m", multimodal=[ITEM] * 5), token_ids=bytes(100)), 8),
    (pb.LookupRequest(chat=CHAT, scope=pb.Scope(model="m"), id=(1 << 64) - 1), 8),
    (pb.LookupRequest(requests=[pb.LookupRequest(workers=["w"] * 50)] * 2), 2),
    (
        pb.RegisterWorkerRequest(
            worker=pb.Worker(name="w", publishers=[pb.Publisher(events="tcp://h:1")] * 6)
        ),
        8,
    ),
]


@pytest.mark.parametrize(("message", "count"), MESSAGES)
def test_fields_are_counted_where_they_can_be_many(
    monkeypatch: pytest.MonkeyPatch, message: Any, count: int
) -> None:
    packed = message.SerializeToString()
    monkeypatch.setattr(module, "MAX_FIELDS", count)
    check_fields(packed, message.DESCRIPTOR)
    assert len(packed) > 2 * count, "else nothing is counted"
    monkeypatch.setattr(module, "MAX_FIELDS", count - 1)
    with pytest.raises(ConfigError, match=f"at most {count - 1} fields"):
        check_fields(packed, message.DESCRIPTOR)


@pytest.mark.parametrize(("message", "count"), MESSAGES)
def test_a_message_that_is_cut_off_is_judged_as_protobuf_judges_it(
    monkeypatch: pytest.MonkeyPatch, message: Any, count: int
) -> None:
    monkeypatch.setattr(module, "MAX_FIELDS", count)
    packed = message.SerializeToString()
    for nbytes in range(2 * count + 1, len(packed)):
        cut = packed[:nbytes]
        try:
            check_fields(cut, message.DESCRIPTOR)
        except DecodeError:
            with pytest.raises(DecodeError):
                message.FromString(cut)


@pytest.mark.parametrize("tail", [b"\x0b\x0c", b"\xff" * 11, b"\x0a\xff\x01", b"\x09\x00", b"\x08"])
def test_what_is_no_message_is_refused(monkeypatch: pytest.MonkeyPatch, tail: bytes) -> None:
    monkeypatch.setattr(module, "MAX_FIELDS", 10)
    packed = pb.RouteRequest(loads=[LOAD] * 8).SerializeToString()
    check_fields(packed, pb.RouteRequest.DESCRIPTOR)
    with pytest.raises(DecodeError):
        check_fields(packed + tail, pb.RouteRequest.DESCRIPTOR)
