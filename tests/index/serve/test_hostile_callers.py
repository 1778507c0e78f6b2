"""Callers without a token, and callers that send no request: what they cost the index, and what the others notice."""

from __future__ import annotations

import asyncio
import http.client
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from kvpool import AsyncIndexClient, IndexClient
from kvpool.errors import MalformedEvents
from kvpool.index import Publisher, limits
from kvpool.index.protocol.messages import MAX_REQUEST_NBYTES, SERVICE
from kvpool.index.serve import calls
from kvpool.index.serve.lookup_calls import INLINE_NBYTES
from kvpool.v1 import index_pb2 as pb
from tests.support.credentials import write_tokens
from tests.support.deadlines import ends_within
from tests.support.fleets import Served, a_worker, applying, two_tenants
from tests.support.index_process import peak_nbytes, running
from tests.support.wire import batch, cleared, packed64, stored

pytestmark = pytest.mark.usefixtures("grpc_started")

WAIT_S = 60
PROMISED_S = 0.25  # that a call takes at most, whatever other tenants do
HEALTH = "grpc.health.v1.Health"
SERVING = health_pb2.HealthCheckResponse(status="SERVING").SerializeToString()
ATTACKS = 300  # more than the calls that an index once took at a time
LARGE = [("grpc.max_send_message_length", -1)]


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[Served, dict[str, str]]]:
    """An index that asks for tokens, and one for each of two tenants."""
    with two_tenants(tmp_path) as made:
        yield made


def code_of(call: Callable[[], Any]) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return str(caught.value.code().name)


def test_a_request_without_a_token_is_refused_before_it_is_received(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens.toml", router=(["read"], ["*"]))
    # As many empty loads as fit: 33 MiB that become more than a GiB when they are decoded.
    loads = pb.RouteRequest.DESCRIPTOR.fields_by_name["loads"].number
    request = bytes([loads << 3 | 2, 0]) * (MAX_REQUEST_NBYTES // 2)
    with running("--tokens", str(tmp_path / "tokens.toml"), "--http", "127.0.0.1:0") as index:
        with IndexClient(index.target, WAIT_S, token=tokens["router"]) as client:
            assert client.workers() == []
        before = peak_nbytes(index)
        with grpc.insecure_channel(index.target, options=LARGE) as channel:
            for name in ("Route", "LookupStream", "Snapshot"):
                method = channel.unary_unary(f"/{SERVICE}/{name}")
                futures = [method.future(request, timeout=WAIT_S) for _ in range(4)]
                assert {code_of(future.result) for future in futures} == {"UNAUTHENTICATED"}
        connection = http.client.HTTPConnection("127.0.0.1", index.http_port, timeout=WAIT_S)
        connection.request("POST", "/v1/lookup", headers={"Content-Length": str(8 << 20)})
        assert connection.getresponse().status == 401, "before its body came"
        connection.close()
        assert peak_nbytes(index) - before < MAX_REQUEST_NBYTES, "less than one of them"


def test_large_checks_of_health_are_received_one_at_a_time(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens.toml", router=(["read"], ["*"]))
    with running("--tokens", str(tmp_path / "tokens.toml")) as index:
        with IndexClient(index.target, WAIT_S, token=tokens["router"]) as client:
            assert client.workers() == []
        before = peak_nbytes(index)
        with grpc.insecure_channel(index.target, options=LARGE) as channel:
            for name in ("Check", "Watch"):
                method = channel.unary_stream(f"/{HEALTH}/{name}")
                asked = [method(bytes(MAX_REQUEST_NBYTES), timeout=2.0) for _ in range(16)]
                for call in asked:
                    call.code()
        # Of the 32: one as gRPC's pieces and as bytes, and what the allocator keeps of those before it.
        assert peak_nbytes(index) - before < 6 * MAX_REQUEST_NBYTES


@pytest.mark.parametrize(
    "method", [f"/{HEALTH}/Watch", f"/{HEALTH}/Check", f"/{SERVICE}/Lookup", f"/{SERVICE}/LookupStream"]
)
@pytest.mark.anyio
async def test_callers_without_a_token_turn_no_caller_away(
    guarded: tuple[Served, dict[str, str]], method: str
) -> None:
    served, tokens = guarded
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [
        grpc.aio.insecure_channel(served.target, options=options) for _ in range(4)
    ]  # each has a limit
    attacks = [channels[number % 4].stream_stream(method)() for number in range(ATTACKS)]  # without a request
    watched = health_pb2.HealthCheckRequest().SerializeToString()
    if method.endswith("Watch"):
        await asyncio.gather(*(call.write(watched) for call in attacks), return_exceptions=True)
        await asyncio.gather(*(call.read() for call in attacks), return_exceptions=True)
    # Each has been begun: the index has answered what was asked after it on the same connection.
    for channel in channels:
        for _ in range(3):
            check = channel.unary_unary(f"/{HEALTH}/Check")
            assert await check(b"", timeout=WAIT_S) == SERVING
    async with AsyncIndexClient(served.target, WAIT_S, token=tokens["a"]) as client:
        for _ in range(3):
            assert len(await client.lookup("m", tenant="a", hashes64=bytes(8))) == 1
        async with client.stream() as stream:
            assert len(await stream.lookup("m", tenant="a", hashes64=bytes(8))) == 1
    for call in attacks:
        call.cancel()
    for channel in channels:
        await channel.close()


@pytest.mark.anyio
async def test_a_request_that_does_not_arrive_ends_its_call(
    guarded: tuple[Served, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "REQUEST_S", 0.5)
    monkeypatch.setattr(limits, "CALLS", limits.CALLS._replace(of_tenant=2))
    served, tokens = guarded
    metadata = (("authorization", f"Bearer {tokens['a']}"),)
    async with grpc.aio.insecure_channel(served.target) as channel:
        for _ in range(2):  # what such calls held is free again
            late = [channel.stream_unary(f"/{SERVICE}/Lookup")(metadata=metadata) for _ in range(2)]
            for call in late:
                assert await asyncio.wait_for(call.code(), WAIT_S) is grpc.StatusCode.DEADLINE_EXCEEDED
                assert await call.details() == "the request did not arrive within 0.5 s"
        check = channel.stream_unary(f"/{HEALTH}/Check")()
        assert await asyncio.wait_for(check.code(), WAIT_S) is grpc.StatusCode.DEADLINE_EXCEEDED
        none = channel.stream_unary(f"/{SERVICE}/Lookup")(metadata=metadata)
        await none.done_writing()
        assert await none.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await none.details() == "the call ended without a request"


@pytest.mark.anyio
async def test_health_is_answered_while_checks_do_not_arrive(guarded: tuple[Served, dict[str, str]]) -> None:
    served, _ = guarded
    async with grpc.aio.insecure_channel(served.target) as channel:
        check = channel.unary_unary(f"/{HEALTH}/Check")
        other = health_pb2.HealthCheckRequest(service="other").SerializeToString()
        with pytest.raises(grpc.RpcError):  # NOT_FOUND
            await check(other, timeout=WAIT_S)
        late = channel.stream_unary(f"/{HEALTH}/Check")()
        while await _is_refused(check, other):
            await asyncio.sleep(0.01)
        for name in ("", SERVICE):
            asked = health_pb2.HealthCheckRequest(service=name).SerializeToString()
            assert await check(asked, timeout=WAIT_S) == SERVING
        late.cancel()
        while not await _is_refused(check, other):  # requests are read again
            await asyncio.sleep(0.01)


async def _is_refused(call: Any, request: bytes) -> bool:
    try:
        await call(request, timeout=WAIT_S)
    except grpc.RpcError:
        return True
    return False


@pytest.mark.anyio
async def test_who_waits_for_a_batch_of_one_tenant_delays_no_caller_of_another(
    guarded: tuple[Served, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, tokens = guarded
    waiting = set[str]()
    ask = served.fleet.ask

    def noted(prompt: Any, *, at_once: bool = False) -> Any:
        if not at_once:
            waiting.add(prompt.tenant)
        return ask(prompt, at_once=at_once)

    monkeypatch.setattr(served.fleet, "ask", noted)
    large = packed64(range(1, INLINE_NBYTES))  # more than the event loop answers
    async with (
        AsyncIndexClient(served.target, WAIT_S, token=tokens["a"]) as hostile,
        AsyncIndexClient(served.target, WAIT_S / 3, token=tokens["b"]) as honest,
    ):
        with applying(served.fleet, "a/w"):
            late = [
                asyncio.ensure_future(ask("m", tenant="a", hashes64=bytes(8)))
                for ask in [hostile.lookup, hostile.route] * 16
            ]
            while "a" not in waiting:
                await asyncio.sleep(0.01)
            for prompt in (bytes(8), large):
                assert len(await honest.lookup("m", tenant="b", hashes64=prompt)) == 1
                assert len((await honest.route("m", tenant="b", hashes64=prompt)).picks) == 1
            assert not any(call.done() for call in late)
        await asyncio.gather(*late)


@pytest.mark.anyio
async def test_a_tenant_that_stores_and_clears_in_turns_delays_no_caller_of_another(
    guarded: tuple[Served, dict[str, str]],
) -> None:
    """A batch of 6 MB took many seconds, and with a lookup of its tenant under way every other lookup as long."""
    served, tokens = guarded
    for place in range(16):
        name = f"crowd-{place}"
        served.fleet.add(a_worker(name, tenant="a", publishers=(Publisher(0, ""),)), "flag")
        blocks = [block for block in range(1, 30_000) if block >> place & 1]
        served.fleet.rank(f"a/{name}", 0).apply(0, batch(stored(blocks)))
    turn = [stored([1]), cleared()]
    payload = batch(*turn * 50_000)
    refused = threading.Event()

    def apply() -> None:
        with pytest.raises(MalformedEvents):
            served.fleet.rank("a/w", 0).apply(0, payload)
        refused.set()

    applying_ = threading.Thread(target=apply)
    async with (
        AsyncIndexClient(served.target, WAIT_S, token=tokens["a"]) as hostile,
        AsyncIndexClient(served.target, WAIT_S, token=tokens["b"]) as honest,
    ):
        await honest.lookup("m", tenant="b", hashes64=bytes(8))  # it is connected
        await hostile.lookup("m", tenant="a", hashes64=bytes(8))
        applying_.start()
        while True:
            last = refused.is_set()
            late = asyncio.ensure_future(hostile.lookup("m", tenant="a", hashes64=bytes(8)))
            with ends_within(PROMISED_S):
                await honest.lookup("m", tenant="b", hashes64=bytes(8))
            await late
            if last:
                break
    applying_.join(WAIT_S)
    assert refused.is_set()
