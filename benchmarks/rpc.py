"""The cost of a lookup over gRPC, beside an echo of the same bytes: a part of ``python -m benchmarks index``.

A separate process (``python -m benchmarks.rpc BLOCKS WORKERS``) serves an index of prompts of 8,192 blocks.
Beside it an echo moves as many bytes each way, both in ``grpc.aio``. The caller sends packed messages and
does not decode answers, so that both cost the same here. They alternate.
"""

from __future__ import annotations

import asyncio
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from benchmarks.contest import PROMPT_BLOCKS, holdings, unpacked
from benchmarks.events import BLOCK_TOKENS, payloads
from kvpool.errors import IndexUnavailable
from kvpool.index import Publisher, Worker
from kvpool.key.hashing import seed_id
from kvpool.v1 import index_pb2 as pb

MODEL = "bench"
CALLERS = (1, 16)
TURNS = 25  # calls of each caller before the other kind's turn
START_TIMEOUT_S = 300.0
ECHO = "/bench.Echo"

Ask = Callable[[int, int], Awaitable[object]]  # about a prompt, by a caller


@dataclass(frozen=True)
class RpcRow:
    """Microseconds of a call with 8,192 blocks; ``p50_over_echo`` is the ratio of the medians."""

    kind: str  # unary or stream
    callers: int  # at a time
    p50_us: float
    p99_us: float
    echo_p50_us: float
    echo_p99_us: float
    p50_over_echo: float


def measure_rpc(blocks: int, workers: int, rounds: int) -> list[RpcRow]:
    """Blocks for some seconds. Errors: ``IndexUnavailable`` when the other process does not start."""
    prompts = [packed for packed, _ in holdings("sessions", workers, _prompts(blocks))]
    process = subprocess.Popen(
        [sys.executable, "-m", __spec__.name, str(blocks), str(workers)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        if len(words) != 2:
            raise IndexUnavailable("the process that serves the benchmark's index did not come up")
        return asyncio.run(_measure(f"127.0.0.1:{words[0]}", f"127.0.0.1:{words[1]}", prompts, rounds))
    finally:
        process.kill()
        process.communicate()


async def _measure(index: str, echo: str, prompts: Sequence[bytes], rounds: int) -> list[RpcRow]:
    import grpc.aio

    requests = [
        pb.LookupRequest(scope=pb.Scope(model=MODEL), block_hashes=prompt).SerializeToString()
        for prompt in prompts
    ]
    async with grpc.aio.insecure_channel(index) as ours, grpc.aio.insecure_channel(echo) as theirs:
        lookup = ours.unary_unary("/kvpool.v1.IndexService/Lookup")
        answers = [await lookup(request) for request in requests]
        # The echo answers with the number of bytes at the request's front.
        echoed = [
            struct.pack("<I", len(answer)) + request[4:]
            for answer, request in zip(answers, requests, strict=True)
        ]
        echo_call = theirs.unary_unary(f"{ECHO}/Call")

        async def unary(number: int, _: int) -> object:
            return await lookup(requests[number])

        async def unary_echo(number: int, _: int) -> object:
            return await echo_call(echoed[number])

        streams = [ours.stream_stream("/kvpool.v1.IndexService/LookupStream")() for _ in range(max(CALLERS))]
        echo_streams = [theirs.stream_stream(f"{ECHO}/Stream")() for _ in range(max(CALLERS))]

        async def streamed(number: int, caller: int) -> object:
            await streams[caller].write(requests[number])
            return await streams[caller].read()

        async def streamed_echo(number: int, caller: int) -> object:
            await echo_streams[caller].write(echoed[number])
            return await echo_streams[caller].read()

        rows = []
        for kind, ask, echo_ask in (("unary", unary, unary_echo), ("stream", streamed, streamed_echo)):
            rows += [await _row(kind, callers, ask, echo_ask, len(requests), rounds) for callers in CALLERS]
        for stream in (*streams, *echo_streams):
            stream.cancel()
        return rows


async def _row(kind: str, callers: int, ask: Ask, echo: Ask, prompts: int, rounds: int) -> RpcRow:
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(rounds + 1):
        for call, times in ((ask, ours), (echo, theirs)):
            took = await _turn(call, callers, prompts, number)
            if number:  # the first round warms up
                times += took
    ours.sort()
    theirs.sort()
    p50, echo_p50 = ours[len(ours) // 2], theirs[len(theirs) // 2]
    return RpcRow(
        kind,
        callers,
        p50,
        ours[int(len(ours) * 0.99)],
        echo_p50,
        theirs[int(len(theirs) * 0.99)],
        p50 / echo_p50,
    )


async def _turn(call: Ask, callers: int, prompts: int, number: int) -> list[float]:
    times: list[float] = []

    async def one(caller: int) -> None:
        for turn in range(TURNS):
            started = time.perf_counter()
            await call((number * TURNS + turn + caller) % prompts, caller)
            times.append((time.perf_counter() - started) * 1e6)

    await asyncio.gather(*(one(caller) for caller in range(callers)))
    return times


def _prompts(blocks: int) -> int:
    return max(1, blocks // PROMPT_BLOCKS)


# ---- the process that serves


def main() -> None:
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2])))


async def _serve(blocks: int, workers: int) -> None:
    import grpc.aio

    from kvpool.index.fleet.fleet import Fleet
    from kvpool.index.serve.service import IndexServer

    fleet = Fleet()
    ranks = []
    for number in range(workers):
        publisher = Publisher(0, f"tcp://127.0.0.1:{1000 + number}", "")
        fleet.add(
            Worker(
                f"worker-{number}", MODEL, BLOCK_TOKENS, seed_id(None), (publisher,),
                address=f"http://10.0.0.{number}:8000",
            ),
            "flag",
        )  # fmt: skip
        rank = fleet.rank(f"default/worker-{number}", 0)
        assert rank is not None
        rank.heard()
        ranks.append(rank)
    sequences = [0] * workers
    for packed, holders in holdings("sessions", workers, _prompts(blocks)):
        hashes = unpacked(packed)
        for number, leading in holders:
            for payload in payloads(hashes[:leading], tokens=False):
                sequences[number] += 1
                ranks[number].apply(sequences[number], payload)

    async def echo(request: bytes, _: object) -> bytes:
        return bytes(int.from_bytes(request[:4], "little"))

    async def echoes(_: object, context: grpc.aio.ServicerContext) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            await context.write(bytes(int.from_bytes(request[:4], "little")))

    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                ECHO[1:],
                {
                    "Call": grpc.unary_unary_rpc_method_handler(echo),
                    "Stream": grpc.stream_stream_rpc_method_handler(echoes),
                },
            ),
        )
    )
    echo_port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    index = IndexServer(fleet)
    index_port = await index.start("127.0.0.1:0")
    print(index_port, echo_port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    main()
