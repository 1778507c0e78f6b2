"""gRPC keeps a thread and descriptors of its own for the whole process: they are there before anything is counted."""

from __future__ import annotations

import asyncio

import pytest


@pytest.fixture(scope="session")
def grpc_started() -> None:
    from kvpool import IndexUnavailable
    from kvpool.index.async_client import AsyncIndexClient
    from kvpool.index.client import IndexClient
    from tests.index.fleets import serving

    async def ask(target: str) -> None:
        async with AsyncIndexClient(target) as client:
            await client.workers(timeout_s=20)

    with serving() as served:
        asyncio.run(ask(served.target))
        with IndexClient(served.target, timeout_s=20) as client:
            client.workers()
    with IndexClient("127.0.0.1:1") as client, pytest.raises(IndexUnavailable):
        client.workers()
