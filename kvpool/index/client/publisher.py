"""``EventPublisher``: brings the events of one worker to an index that cannot reach the worker's own sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from kvpool.discovery.worker import PUSHED, Worker
from kvpool.errors import ConfigError, IndexUnavailable, KVPoolError
from kvpool.index.client import channel, codec
from kvpool.index.follow.push import Ack, Pushed
from kvpool.v1 import index_pb2 as pb

MAX_KEPT = 10_000  # batches of a rank, as many as vLLM's own publisher keeps
MAX_KEPT_NBYTES = 64 << 20
RENEWALS = 3  # in one lease
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 2.0
TOLD_S = 1.0  # within which a call that has ended says why
CLOSE_S = 1.0

logger = logging.getLogger("kvpool.index")


class _DpRank:
    """``kept``: the newest batches, without a hole. ``sent``: the number of the next one that goes out."""

    def __init__(self) -> None:
        self.kept: deque[tuple[int, bytes]] = deque()
        self.kept_nbytes = 0
        self.next = 0
        self.sent = 0
        self.question: Ack | None = None

    def keep(self, payload: bytes) -> None:
        self.kept.append((self.next, payload))
        self.kept_nbytes += len(payload)
        self.next += 1
        while len(self.kept) > MAX_KEPT or (self.kept_nbytes > MAX_KEPT_NBYTES and len(self.kept) > 1):
            self.kept_nbytes -= len(self.kept.popleft()[1])

    def take_unsent(self) -> tuple[int, bytes] | None:
        if self.sent >= self.next:
            return None
        first = self.kept[0][0]
        number, payload = self.kept[max(0, self.sent - first)]
        self.sent = number + 1
        return number, payload


class EventPublisher:
    """Made by ``AsyncIndexClient.publisher``; a context manager, used in one event loop.

    It registers the worker and keeps its lease, pushes what ``publish`` is given, sends again what the index asks for
    (the newest 10,000 batches of a rank are kept, 64 MiB at most), and connects again for as long as it is open.
    ``problem``: why it cannot push just now, in one line; empty: it can.
    """

    def __init__(
        self,
        target: str,
        register: Callable[[Worker, float], Awaitable[bool]],
        open_call: Callable[[], Any],
        worker: Worker,
        lease_s: float,
    ) -> None:
        if not worker.incarnation or any(one.events != PUSHED for one in worker.publishers):
            raise ConfigError(
                f'worker {worker.name}: to push, it has an incarnation, and events "{PUSHED}" of every publisher'
            )
        self.problem = "not connected yet"
        self._target, self._register, self._open_call = target, register, open_call
        self._worker, self._lease_s = worker, lease_s
        self._ranks = {one.dp_rank: _DpRank() for one in worker.publishers}
        self._woken = asyncio.Event()
        self._closing = asyncio.Event()
        self._runner = asyncio.create_task(self._run())

    def publish(self, payload: bytes, *, dp_rank: int = 0) -> int:
        """One batch, as vLLM's publisher packs it; its number. Never waits: it goes out when it can.

        Errors: ``ConfigError`` for a rank that the worker has not.
        """
        rank = self._ranks.get(dp_rank)
        if rank is None:
            raise ConfigError(f"worker {self._worker.name} has no rank {dp_rank!r:.40}")
        rank.keep(payload)
        self._woken.set()
        return rank.next - 1

    async def close(self) -> None:
        """Push what was published, for a second at most, and end.

        What the index holds of the worker is stale then, and gone with its lease.
        """
        self._closing.set()
        self._woken.set()
        await asyncio.wait({self._runner}, timeout=CLOSE_S)
        self._runner.cancel()
        await asyncio.gather(self._runner, return_exceptions=True)

    async def __aenter__(self) -> EventPublisher:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self) -> None:
        backoff_s = MIN_BACKOFF_S
        while not self._closing.is_set():
            try:
                await self._register(self._worker, self._lease_s)
                self.problem, backoff_s = "", MIN_BACKOFF_S
                await self._push(self._open_call())
                problem = "the index has ended the stream"
            except grpc.RpcError as error:
                problem = str(channel.error_of(self._target, channel.DEFAULT_TIMEOUT_S, error))
            except KVPoolError as error:
                problem = str(error)
            if not self.problem and not self._closing.is_set():
                logger.warning("worker %s is not pushed: %s", self._worker.id, problem)
            self.problem = problem
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._closing.wait(), backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _push(self, call: Any) -> None:
        """For as long as this call goes on. Errors: those of gRPC, ``KVPoolError``."""
        for rank in self._ranks.values():
            rank.question = None
        reader, writer, renewer = (
            asyncio.create_task(work) for work in (self._read(call), self._write(call), self._renew())
        )
        try:
            await asyncio.wait({reader, writer, renewer}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done() and not renewer.done():
                await asyncio.wait({reader}, timeout=TOLD_S)  # it knows the reason
            for task in (reader, renewer):
                if task.done():
                    task.result()
        finally:
            call.cancel()
            for task in (reader, writer, renewer):
                task.cancel()
            await asyncio.gather(reader, writer, renewer, return_exceptions=True)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / RENEWALS)
            await self._register(self._worker, self._lease_s)

    async def _read(self, call: Any) -> None:
        while (reply := await call.read()) is not grpc.aio.EOF:
            try:
                ack = codec.decode_ack(pb.PublishAck.FromString(reply))
            except Exception as error:  # DecodeError, and what protobuf adds to it
                raise IndexUnavailable(f"what {self._target} replied is no PublishAck: {error}") from error
            rank = self._ranks.get(ack.dp_rank)
            if rank is not None and ack.question:
                rank.question = ack
                self._woken.set()

    async def _write(self, call: Any) -> None:
        # The reader reports the end of the call: it knows the reason.
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            for dp_rank in self._ranks:
                await self._send(call, dp_rank, last=True)
            while not self._closing.is_set():
                self._woken.clear()
                for dp_rank, rank in self._ranks.items():
                    await self._send_of(call, dp_rank, rank)
                await self._woken.wait()
            for dp_rank, rank in self._ranks.items():
                await self._send_of(call, dp_rank, rank)
            await call.done_writing()

    async def _send_of(self, call: Any, dp_rank: int, rank: _DpRank) -> None:
        """What has not gone out, and before it the answer to what was asked. A stream of one writer, so in order."""
        while True:
            if (ack := rank.question) is not None:
                rank.question = None
                for number, payload in [one for one in rank.kept if one[0] >= ack.start]:
                    await self._send(call, dp_rank, number, payload, answers=ack.question)
                    rank.sent = max(rank.sent, number + 1)
                await self._send(call, dp_rank, answers=ack.question, last=True)
            elif (unsent := rank.take_unsent()) is not None:
                await self._send(call, dp_rank, *unsent)
            else:
                return

    async def _send(
        self,
        call: Any,
        dp_rank: int,
        number: int = 0,
        payload: bytes = b"",
        *,
        answers: int = 0,
        last: bool = False,
    ) -> None:
        worker = self._worker
        batch = Pushed(worker.id, dp_rank, worker.incarnation, number, payload, answers, last)
        await call.write(codec.encode_batch(batch))
