"""What one call of a proxy makes the endpoint picker hold, and for how long."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from kvpool.index.front import ext_proc
from kvpool.index.front.placement import Refusal, hold
from kvpool.index.limits import INFERENCE, PLACEMENTS, Limits
from kvpool.index.request_stats import RequestStats
from kvpool.index.serve import calls
from kvpool.v1 import ext_proc_pb2 as pb
from tests.support.deadlines import eventually
from tests.support.ext_proc import (
    BODY,
    PROCESS,
    Call,
    body,
    calling,
    destinations,
    headers,
    picking,
    response,
    set_headers,
)
from tests.support.index_process import Index, peak_nbytes, running

pytestmark = pytest.mark.usefixtures("grpc_started")

MiB = 1 << 20
LARGE = [("grpc.max_send_message_length", -1)]
STREAMED = pb.ProcessingMode.STREAMED


def field(number: int, value: bytes) -> bytes:
    """A packed field of bytes, or a message."""
    size, packed = len(value), bytearray([number << 3 | 2])
    while size > 0x7F:
        packed.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes(packed) + bytes([size]) + value


def refusal(channel: grpc.Channel, packed: bytes) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as refused:
        next(channel.stream_stream(PROCESS)(iter([packed]), timeout=60))
    return refused.value


@contextmanager
def picker(*arguments: str) -> Iterator[tuple[Index, grpc.Channel]]:
    """One in a process of its own, and a way to it."""
    with running("--ext-proc", "127.0.0.1:0", *arguments) as index:
        found = re.search(r"ext_proc on port ([0-9]+)", index.ready)
        assert found is not None, index.ready
        with grpc.insecure_channel(f"127.0.0.1:{found[1]}", options=LARGE) as channel:
            yield index, channel


def resident_nbytes(index: Index) -> int:
    status = Path(f"/proc/{index.process.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) << 10


# ---- what is read


def test_a_message_of_millions_of_headers_is_refused_before_it_is_parsed() -> None:
    """One MiB of empty ones became 36 MiB and held everything up for 0.7 s."""
    empty = field(2, field(1, b"\x0a\0" * (8 * MiB)))
    with picker() as (index, channel):
        assert Call(channel).ask(headers()).WhichOneof("response") == "request_headers"
        before = peak_nbytes(index)
        refused = refusal(channel, empty)
        assert (refused.code(), refused.details()) == (
            grpc.StatusCode.INVALID_ARGUMENT, "a request has at most 131072 fields",
        )  # fmt: skip
        assert peak_nbytes(index) - before < 100 * MiB
        refused = refusal(channel, field(2, bytes(17 * MiB)))
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, "by its first bytes"


@pytest.mark.parametrize(
    "sent",
    [[("x", "")] * ext_proc.MAX_HEADERS, [("x", "v" * ext_proc.MAX_HEADERS_NBYTES)]],
    ids=["many", "long"],
)
@pytest.mark.parametrize("kind", ["request_headers", "response_headers"])
def test_more_headers_than_are_read_end_the_call(sent: list[tuple[str, str]], kind: str) -> None:
    message = headers(sent=sent)
    if kind == "response_headers":
        message.response_headers.CopyFrom(message.request_headers)
    with picking("a") as index, calling(index) as channel:
        refused = refusal(channel, message.SerializeToString())
        assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.details() == "at most 1000 headers in 262144 bytes are read"


def test_metadata_within_metadata_ends_the_call_and_is_no_fault_of_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    value = b""
    for _ in range(3000):
        value = field(6, field(1, value))  # a Value that is a list of one Value
    entry = field(1, field(1, b"x") + field(2, field(1, field(1, b"x") + field(2, value))))
    packed = field(8, entry) + field(4, field(1, bytes(MiB)))
    with picking("a") as index, calling(index) as channel:
        assert refusal(channel, packed).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not caplog.records


# ---- what is held


def test_headers_that_are_held_are_counted_and_only_those_that_matter() -> None:
    with picking("a") as index, calling(index) as channel:
        two = [Call(channel) for _ in range(2)]
        two[0].ask(headers(sent=[("cookie", "c" * 50_000)]))
        small = index.held_nbytes()
        assert 0 < small < 100
        two[1].ask(headers(sent=[("authorization", "a" * 50_000)]))
        assert index.held_nbytes() > small + 50_000
        for call in two:
            call._replies.cancel()
        assert eventually(lambda: index.held_nbytes() == 0)


def test_headers_for_which_there_is_no_room_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with picking("a") as index, calling(index) as channel:
        monkeypatch.setattr(index.fleet.limits, "limit_nbytes", 100_000)
        reply = Call(channel).ask(headers(sent=[("authorization", "a" * 50_000)]))
        assert reply.immediate_response.status.code == 503
        hint = headers()
        named = [f"10.0.0.1:{port}" for port in range(1000)]
        hint.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(
            {ext_proc.SUBSET: ",".join(named)}
        )
        assert Call(channel).ask(hint).immediate_response.status.code == 503, "a set of them is larger"
        assert Call(channel).place() == ["127.0.0.1:9001"]


def test_a_body_is_not_kept_for_as_long_as_its_response_lasts() -> None:
    large, waiting = BODY[:-1] + b" " * (15 * MiB) + b"}", 12
    with picker() as (index, channel):

        def place() -> Call:
            call = Call(channel)
            call.ask(headers())
            call.ask(body(large))
            return call

        held = [place()]
        before = resident_nbytes(index)
        held += [place() for _ in range(waiting)]
        assert eventually(lambda: resident_nbytes(index) - before < waiting * 15 * MiB // 2)
        for call in held:
            call._replies.cancel()


def test_a_host_leaves_room_for_the_bodies_of_others() -> None:
    limits = Limits(3200)  # an eighth of it for all bodies
    hold(limits, 0, 300, "one")
    with pytest.raises(Refusal, match="too many requests are being read"):
        hold(limits, 300, 1, "one")
    hold(limits, 0, 100, "two")
    with pytest.raises(Refusal, match="too many requests are being read"):
        hold(limits, 0, 1, "three")
    limits.give(300, INFERENCE, host="one")
    hold(limits, 0, 200, "two")
    limits.give(300, INFERENCE, host="two")
    assert (limits.used_nbytes, dict(limits._used_by)) == (0, {})


# ---- calls, and connections


def test_a_host_leaves_calls_for_others_and_one_proxy_has_as_many_as_before() -> None:
    limits = Limits()
    assert PLACEMENTS.of_host == 4096
    entered = [limits.calls(PLACEMENTS, f"ipv4:10.0.0.1:{port}", None) for port in range(4096)]
    for one in entered:
        one.__enter__()
    with pytest.raises(Exception, match="4096 requests are open from this host"):
        limits.calls(PLACEMENTS, "ipv4:10.0.0.1:9", None).__enter__()
    with limits.calls(PLACEMENTS, "ipv4:10.0.0.2:9", None):
        pass
    for one in entered:
        one.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("late_s", "code", "says"),
    [
        ("REQUEST_S", grpc.StatusCode.DEADLINE_EXCEEDED, "the request did not arrive within 0.5 s"),
        (
            "LATE_S",
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "too many requests are arriving slowly: send it again later",
        ),
    ],
)
def test_a_call_whose_headers_do_not_come_ends_and_one_that_waits_for_its_body_goes_on(
    monkeypatch: pytest.MonkeyPatch, late_s: str, code: grpc.StatusCode, says: str
) -> None:
    """1,000 calls with an unfinished MiB took a GiB for as long as they liked."""
    with picking("a") as index, calling(index) as channel:
        call = Call(channel)
        call.ask(headers())
        monkeypatch.setattr(calls, late_s, 0.5)
        with monkeypatch.context() as patched:
            if late_s == "LATE_S":
                patched.setattr(index.fleet.limits, "limit_nbytes", 0)
            late = Call(channel)
            assert (late._replies.code(), late._replies.details()) == (code, says)
        assert destinations(call.ask(body())) == ["127.0.0.1:9001"]


@pytest.mark.parametrize(("late_s", "what"), [("BODY_S", "body"), ("RESPONSE_S", "response")])
@pytest.mark.parametrize("mode", [pb.ProcessingMode.BUFFERED, pb.ProcessingMode.FULL_DUPLEX_STREAMED])
def test_a_call_whose_body_or_response_does_not_come_ends(
    monkeypatch: pytest.MonkeyPatch, late_s: str, what: str, mode: int
) -> None:
    """gRPC held what had come of it for as long as its caller liked: 1,000 unfinished MiB were a GiB."""
    monkeypatch.setattr(ext_proc, late_s, 0.5)
    with picking("a") as index, calling(index) as channel:
        late = Call(channel)
        late.say(headers(mode), *([body()] if what == "response" else []))
        with pytest.raises(grpc.RpcError):
            list(late._replies)
        assert late._replies.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert late._replies.details() == f"the {what} did not arrive within 0.5 s"
        assert eventually(lambda: index.held_nbytes() == 0)


def test_an_old_connection_is_ended_and_calls_over_it_go_on() -> None:
    with picking("a", max_connection_age_s=0.3) as index, calling(index) as channel:
        call = until_told(channel)
        assert destinations(call.ask(body())) == ["127.0.0.1:9001"]
        assert all(Call(channel).place() == ["127.0.0.1:9001"] for _ in range(5))


def test_the_option_for_the_age_of_connections_is_for_this_port_too() -> None:
    with picker("--max-connection-age", "0.3") as (_, channel):
        until_told(channel).end()


def until_told(channel: grpc.Channel) -> Call:
    """A call whose connection the picker has told to end."""
    states: list[grpc.ChannelConnectivity] = []
    channel.subscribe(states.append)
    call = Call(channel)
    call.ask(headers())
    ready, idle = grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.IDLE
    assert eventually(lambda: ready in states)
    assert eventually(lambda: idle in states[states.index(ready) :]), "the picker has said so"
    return call


# ---- a wrong configuration


def test_bodies_in_a_mode_that_is_not_supported_are_placed_once_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ext_proc._warn_of.cache_clear()
    stats = RequestStats()
    with picking("a", "b", stats=stats) as index, calling(index) as channel:
        for _ in range(2):
            call = Call(channel)
            placed = set_headers(call.ask(headers(STREAMED)).request_headers.response.header_mutation)
            for end in (False, False, True):
                reply = call.ask(body(BODY, end=end))
                assert reply == pb.ProcessingResponse(request_body=pb.BodyResponse())
            shown = set_headers(call.ask(response()).response_headers.response.header_mutation)
            assert shown["x-kvpool-worker"] == placed["x-kvpool-worker"]
            assert call.ask(body(BODY)) == pb.ProcessingResponse(request_body=pb.BodyResponse()), "late"
            call.end()
        assert sum(stats.totals().placements.values()) == 2
    said = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(said) == 1
    assert said[0].startswith("Envoy sends bodies of requests in the mode STREAMED")
