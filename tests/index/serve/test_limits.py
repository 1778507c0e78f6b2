"""What one caller can take from the others: calls, streams, and replies that it does not read."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from kvpool import AsyncIndexClient
from kvpool.index import limits
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.protocol.messages import SERVICE
from kvpool.index.request_stats import RequestStats
from kvpool.v1 import index_pb2 as pb
from tests.support.fleets import a_worker, serving, two_tenants
from tests.support.wire import packed64

pytestmark = pytest.mark.usefixtures("grpc_started")

WAIT_S = 60
QUIET = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536))  # windows that do not grow


WHERE = {"of_host": "from this host", "total": "on this index", "of_tenant": "for this tenant"}


@pytest.mark.parametrize("limit", WHERE)
@pytest.mark.parametrize(("kind", "method"), [("CALLS", "Lookup"), ("STREAMS", "LookupStream")])
def test_a_call_above_a_limit_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, method: str, limit: str
) -> None:
    few = getattr(limits, kind)._replace(**{limit: 2})
    monkeypatch.setattr(limits, kind, few)

    async def run(target: str) -> None:
        async with (
            grpc.aio.insecure_channel(target) as channel,
            AsyncIndexClient(target, WAIT_S, token=tokens["a"]) as client,
            AsyncExitStack() as streams,
        ):

            def begin(name: str) -> Any:
                metadata = (("authorization", f"Bearer {tokens[name]}"),)
                return channel.stream_stream(f"/{SERVICE}/{method}")(metadata=metadata)

            async def answer(call: Any, tenant: str) -> int:
                asked = pb.LookupRequest(scope=pb.Scope(model="m", tenant=tenant), block_hashes=bytes(8))
                await call.write(asked.SerializeToString())
                return len(pb.LookupResponse.FromString(await asyncio.wait_for(call.read(), WAIT_S)).worker)

            held = [begin("a") for _ in range(2)]
            while served.fleet.limits._open[few] < 2:
                await asyncio.sleep(0.01)
            refused = begin("a")
            assert await asyncio.wait_for(refused.code(), WAIT_S) is grpc.StatusCode.RESOURCE_EXHAUSTED
            said = await refused.details()
            assert said.startswith(f"2 {few.what} are open {WHERE[limit]}: ")
            assert "\n" not in said
            for other in map(begin, "bc" if limit == "of_tenant" else ""):
                assert await answer(other, "b") == 1
                other.cancel()
            apart = await streams.enter_async_context(client.stream()) if kind == "CALLS" else client
            assert len(await apart.lookup("m", tenant="a", hashes64=bytes(8))) == 1, "of the other kind"
            assert [await answer(call, "a") for call in held] == [1, 1]
            held[0].cancel()
            while served.fleet.limits._open[few] > 1:
                await asyncio.sleep(0.01)
            assert await answer(begin("a"), "a") == 1
            held[1].cancel()

    with two_tenants(tmp_path) as (served, tokens):
        asyncio.run(run(served.target))


def test_replies_that_nobody_reads_stop_their_stream_and_no_other() -> None:
    """What waits is bounded by the windows of the connection: the index answers no more until something is read."""
    workers, most = 300, 20_000
    asked = pb.LookupRequest(
        scope=pb.Scope(model="m"), block_hashes=packed64(range(1000))
    ).SerializeToString()
    stats = RequestStats()

    def lookups() -> int:
        return stats.totals().results["answered"]

    async def run(target: str) -> None:
        async with grpc.aio.insecure_channel(target, options=QUIET) as channel:
            call = channel.stream_stream(f"/{SERVICE}/LookupStream")()
            sent = 0
            writing: asyncio.Future[None]
            while sent < most:
                writing = asyncio.ensure_future(call.write(asked))
                answered, looks = lookups(), 0
                while not writing.done() and looks < 20:  # one pause of a busy machine is one look
                    await asyncio.wait({writing}, timeout=0.1)
                    answered, looks = lookups(), looks + 1 if lookups() == answered else 0
                if not writing.done():
                    break  # the index takes no more
                sent += 1
            assert sent < most
            answered = lookups()
            assert answered < sent
            async with AsyncIndexClient(target, WAIT_S) as other, other.stream() as stream:
                assert len(await other.lookup("m", hashes64=bytes(8))) == workers
                assert len(await stream.lookup("m", hashes64=bytes(8))) == workers
            assert lookups() == answered + 2
            read = 0
            while read <= answered or not writing.done():  # it goes on where it stood
                answer = await asyncio.wait_for(call.read(), WAIT_S)
                assert len(pb.LookupResponse.FromString(answer).worker) == workers
                read += 1
            call.cancel()

    fleet = Fleet()
    for number in range(workers):
        fleet.add(a_worker(f"w{number}"), "flag")
    with serving(fleet, stats=stats) as served:
        asyncio.run(run(served.target))
