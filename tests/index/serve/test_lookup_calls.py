"""Lookups by id, and many in one message, as any gRPC client meets them; and an earlier client, which knows neither."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvpool.index.fleet.fleet import Fleet
from kvpool.index.protocol.messages import MAX_REQUESTS, SERVICE
from kvpool.index.request_stats import RequestStats
from kvpool.index.serve import lookup_calls
from kvpool.index.serve.auth import TokenAuth
from kvpool.v1 import index_pb2 as pb
from tests.support.credentials import write_tokens
from tests.support.fleets import Served, a_worker, joined, serving
from tests.support.wire import packed64, stored

pytestmark = pytest.mark.usefixtures("grpc_started")

WAIT_S = 60
INVALID, NOT_FOUND, DENIED, EXHAUSTED, INTERNAL = 3, 5, 7, 8, 13  # gRPC's numbers


def a_fleet() -> Fleet:
    fleet = Fleet()
    for tenant in ("default", "other"):
        joined(fleet, a_worker("a", tenant=tenant), stored(list(range(1, 65))), sequence=4)
    return fleet


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(a_fleet(), stats=RequestStats()) as running:
        yield running


def asking(blocks: int, model: str = "m", number: int = 0, tenant: str = "") -> Any:
    hashes = packed64(list(range(1, blocks + 1)))
    return pb.LookupRequest(scope=pb.Scope(model=model, tenant=tenant), block_hashes=hashes, id=number)


def packed(request: Any) -> bytes:
    return request if isinstance(request, bytes) else request.SerializeToString()


def streamed(target: str, *requests: Any, token: str = "") -> list[Any]:
    """The replies to one stream; its status is raised."""
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(target) as channel:
        call = channel.stream_stream(f"/{SERVICE}/LookupStream")
        answers = call(iter(map(packed, requests)), timeout=WAIT_S, metadata=metadata)
        return [pb.LookupResponse.FromString(answer) for answer in answers]


def called(target: str, request: Any) -> Any:
    with grpc.insecure_channel(target) as channel:
        answer = channel.unary_unary(f"/{SERVICE}/Lookup")(packed(request), timeout=WAIT_S)
    return pb.LookupResponse.FromString(answer)


@pytest.mark.parametrize(
    ("request_", "code", "says"),
    [
        (pb.LookupRequest(scope=pb.Scope(model="m"), id=9), INVALID, "holds a prompt"),
        (pb.LookupRequest(scope=pb.Scope(model="m"), block_hashes=bytes(12), id=9), INVALID, "12 bytes"),
        (pb.LookupRequest(scope=pb.Scope(model="m"), token_ids=bytes(6), id=9), INVALID, "6 bytes"),
        (pb.LookupRequest(scope=pb.Scope(model="m"), text="x", id=9), INVALID, "has no tokenizer"),
        (asking(1, tenant="a/b", number=9), INVALID, "tenant"),
        (asking(1, tenant="nobody", number=9), NOT_FOUND, "nobody"),
        # text that is no UTF-8, which protobuf does not read; the fields around it are whole
        (b"\x0a\x03\x0a\x01\xff\x12\x08" + bytes(8) + b"\x79\x09" + bytes(7), INVALID, "not a kvpool.v1."),
        (b"\x79\x09" + bytes(7) + b"\x0a\x03\x0a\x01\xff", INVALID, "not a kvpool.v1."),
        (
            pb.LookupRequest(requests=[asking(1)] * (MAX_REQUESTS + 1), id=9),
            INVALID,
            f"at most {MAX_REQUESTS} requests",
        ),
        (pb.LookupRequest(requests=[asking(1)], block_hashes=bytes(8), id=9), INVALID, "and not both"),
    ],
)  # fmt: skip
def test_what_is_refused_by_its_id(served: Served, request_: Any, code: int, says: str) -> None:
    reply, after = streamed(served.target, request_, asking(5, number=10))
    assert (reply.id, reply.status.code) == (9, code)
    assert says in reply.status.message
    assert "\n" not in reply.status.message
    assert (after.id, list(after.device_blocks)) == (10, [5])


def test_an_earlier_client_is_answered_in_order_and_its_stream_ends_with_the_status(served: Served) -> None:
    replies = streamed(served.target, *(asking(blocks) for blocks in (3, 1, 2)))
    assert [list(reply.device_blocks) for reply in replies] == [[3], [1], [2]]
    assert all(reply.id == 0 and not reply.HasField("status") for reply in replies)
    for wrong, code in (
        (asking(1, model="unknown"), grpc.StatusCode.NOT_FOUND),
        (b"\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
        (asking(1).SerializeToString() + b"\x79\x01", grpc.StatusCode.INVALID_ARGUMENT),  # an id that is cut
    ):
        with pytest.raises(grpc.RpcError) as caught:
            streamed(served.target, asking(1), wrong, asking(1))
        assert caught.value.code() is code


def test_a_fault_of_ours_ends_no_stream_and_stays_in_our_log(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ask = served.fleet.ask

    def broken(prompt: Any, **fields: Any) -> Any:
        if prompt.tenant == "other":
            raise ZeroDivisionError("secret of the house")
        return ask(prompt, **fields)

    monkeypatch.setattr(served.fleet, "ask", broken)
    caplog.set_level(logging.ERROR, "kvpool.index")
    wrong, right = streamed(served.target, asking(1, tenant="other", number=1), asking(2, number=2))
    assert wrong.status.code == INTERNAL
    assert "secret" not in wrong.status.message
    assert "ZeroDivisionError" in caplog.text
    assert list(right.device_blocks) == [2]
    caplog.clear()  # its traceback holds the server


def test_many_prompts_in_one_message_are_answered_each_by_itself(served: Served) -> None:
    asked = pb.LookupRequest(
        requests=[
            asking(3),
            asking(1, model="unknown", number=5),
            asking(64, number=6),
            pb.LookupRequest(requests=[asking(1)]),
            pb.LookupRequest(),
            asking(20_000),  # answered by another thread of the index
        ],
        id=1 << 63,
    )
    for reply in (called(served.target, asked), *streamed(served.target, asked)):
        assert reply.id == 1 << 63
        assert not reply.HasField("status")
        found = [(one.id, one.status.code, list(one.device_blocks)) for one in reply.responses]
        assert found == [
            (0, 0, [3]), (5, NOT_FOUND, []), (6, 0, [64]), (0, INVALID, []), (0, INVALID, []), (0, 0, [64]),
        ]  # fmt: skip


def test_one_of_many_that_protobuf_does_not_read_is_refused_alone(served: Served) -> None:
    wrong, right = b"\x0a\x03\x0a\x01\xff", asking(7).SerializeToString()
    sent = b"".join(b"\x3a" + bytes([len(one)]) + one for one in (wrong, right))
    first, second = called(served.target, sent).responses
    assert first.status.code == INVALID
    assert list(second.device_blocks) == [7]


def test_many_beside_a_field_of_a_later_version_are_answered(served: Served) -> None:
    later = pb.LookupRequest(requests=[asking(7)]).SerializeToString() + b"\xa0\x06\x01"  # field 100
    (one,) = called(served.target, later).responses
    assert list(one.device_blocks) == [7]


@pytest.mark.parametrize("front", [b"", b"\x0a\x03\x0a\x01m"], ids=["alone", "beside a scope"])
def test_a_request_of_millions_of_requests_is_refused_before_it_is_parsed(
    served: Served, front: bytes
) -> None:
    """Protobuf would make 16 million messages of it."""
    sent = front + b"\x3a\x00" * (16 << 20)
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(served.target, options) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{SERVICE}/Lookup")(sent, timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "a request has at most 20000 fields" in caught.value.details()


def test_the_reply_to_many_is_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    one = len(called(served.target, asking(1)).SerializeToString())
    monkeypatch.setattr(lookup_calls, "MAX_RESPONSES_NBYTES", 2 * one)
    reply = called(served.target, pb.LookupRequest(requests=[asking(1)] * 4))
    assert [response.status.code for response in reply.responses] == [0, 0, EXHAUSTED, EXHAUSTED]
    assert "fewer prompts" in reply.responses[-1].status.message


def test_each_of_many_is_counted_and_so_is_each_refusal() -> None:
    stats = RequestStats()
    with serving(a_fleet(), stats=stats) as served:
        called(served.target, pb.LookupRequest(requests=[asking(1), asking(2), asking(1, model="x")]))
        streamed(served.target, asking(1, number=1), asking(1, model="x", number=2))
    totals = stats.totals()
    assert totals.results == {"answered": 3, "wrong": 0, "unknown": 2, "failed": 0}
    assert totals.refused == {"NOT_FOUND": 2}


def test_tenants_are_judged_for_each_question_and_the_right_for_the_stream(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    tokens = write_tokens(path, one=(["read"], ["default"]), none=(["publish"], ["*"]))
    many = pb.LookupRequest(requests=[asking(1, tenant="other"), asking(2)], id=3)
    with serving(a_fleet(), auth=TokenAuth(str(path))) as served:
        asked = (asking(1, tenant="other", number=1), asking(2, number=2), many)
        denied, answered, mixed = streamed(served.target, *asked, token=tokens["one"])
        assert (denied.id, denied.status.code) == (1, DENIED)
        assert list(answered.device_blocks) == [2]
        assert [one.status.code for one in mixed.responses] == [DENIED, 0]
        for token, code in (
            ("", grpc.StatusCode.UNAUTHENTICATED),
            (tokens["none"], grpc.StatusCode.PERMISSION_DENIED),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                streamed(served.target, asking(1, number=1), token=token)
            assert caught.value.code() is code
