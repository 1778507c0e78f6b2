"""Calls of an index over gRPC: by both clients, byte by byte, and of a server that is no index."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

import kvpool
from kvpool import AsyncIndexClient, IndexClient
from kvpool.index.protocol.messages import REPLIES, SERVICE

PATIENT_S = 60.0


def by_either(target: str, what: str, *arguments: Any, timeout_s: float = PATIENT_S, **options: Any) -> Any:
    """One call by the blocking client, and the same by the asynchronous one; they must agree, in errors as well."""

    def blocking() -> Any:
        with IndexClient(target, timeout_s) as client:
            return getattr(client, what)(*arguments, **options)

    async def asynchronous() -> Any:
        async with AsyncIndexClient(target, timeout_s) as client:
            return await getattr(client, what)(*arguments, **options)

    answers: list[Any] = []
    errors: list[kvpool.KVPoolError] = []
    for call in (blocking, lambda: asyncio.run(asynchronous())):
        try:
            answers.append(call())
        except kvpool.KVPoolError as error:
            errors.append(error)
    if errors:
        assert len(errors) == 2, (errors, answers)
        assert type(errors[0]) is type(errors[1])
        for error in errors:
            assert "\n" not in str(error)
        raise errors[0]
    return answers


@contextmanager
def grpc_server(handle: Callable[[bytes, Any], bytes] | None) -> Iterator[str]:
    """A gRPC server that is no index, or a bad one."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    if handle is not None:
        handlers = {name: grpc.unary_unary_rpc_method_handler(handle) for name in REPLIES}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait(60)


WAIT_S = 60


def raw(channel: grpc.Channel, method: str, request: bytes, timeout_s: float = WAIT_S) -> bytes:
    return channel.unary_unary(f"/{SERVICE}/{method}")(request, timeout=timeout_s)


def refused(channel: grpc.Channel, method: str, request: Any) -> tuple[str, str]:
    """Name of the status code, and its text."""
    packed = request if isinstance(request, bytes) else request.SerializeToString()
    with pytest.raises(grpc.RpcError) as caught:
        raw(channel, method, packed)
    text = caught.value.details()
    assert text
    assert "\n" not in text
    assert "Traceback" not in text
    return caught.value.code().name, text
