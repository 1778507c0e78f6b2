"""Pings over HTTP/2: those that usual clients send on a silent stream, a flood of them, and Envoy's."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path

import grpc
import pytest

from kvpool.index.cost.router import Router
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.serve import grpc_server
from kvpool.v1 import health_pb2
from tests.support import envoy
from tests.support.deadlines import eventually
from tests.support.fleets import serving
from tests.support.fronts import ASKED, followed
from tests.support.http_client import all_of, post
from tests.support.openai_worker import scripted
from tests.support.proxy import Harm, Proxy, Way

pytestmark = pytest.mark.usefixtures("grpc_started")

WATCH = "/grpc.health.v1.Health/Watch"
PING = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00"  # the head of a frame (RFC 9113, 6.7)
ACK = b"\x00\x00\x08\x06\x01\x00\x00\x00\x00"
SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
PINGS = 6  # gRPC's own limit ends a stream at the third or fourth


def test_a_silent_stream_lasts_while_its_client_pings_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of it at a twentieth of the time."""
    monkeypatch.setattr(grpc_server, "PING_S", grpc_server.PING_S / 20)
    options = (
        ("grpc.keepalive_time_ms", 500),
        ("grpc.keepalive_timeout_ms", 60_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
    with serving(Fleet()) as served, closing(Proxy(int(served.target.rpartition(":")[2]))) as proxy:
        with grpc.insecure_channel(f"127.0.0.1:{proxy.port}", options) as channel:
            stream = channel.unary_stream(
                WATCH,
                health_pb2.HealthCheckRequest.SerializeToString,
                health_pb2.HealthCheckResponse.FromString,
            )(health_pb2.HealthCheckRequest())
            assert next(stream).status == health_pb2.HealthCheckResponse.SERVING
            assert eventually(
                lambda: proxy.passed(Way.ASKED).count(PING) >= PINGS or not stream.is_active(), within_s=60
            )
            assert stream.is_active(), stream.details()
            assert eventually(lambda: proxy.passed(Way.ANSWERED).count(ACK) >= PINGS)
            assert b"too_many_pings" not in proxy.passed(Way.ANSWERED)
            stream.cancel()
        with grpc.insecure_channel(f"127.0.0.1:{proxy.port}", options) as channel:  # no stream is open
            grpc.channel_ready_future(channel).result(60)
            before = proxy.passed(Way.ASKED).count(PING)
            assert eventually(lambda: proxy.passed(Way.ASKED).count(PING) >= before + PINGS, within_s=60)
            assert b"too_many_pings" not in proxy.passed(Way.ANSWERED)


def test_a_flood_of_pings_ends_its_connection() -> None:
    with serving(Fleet()) as served:
        host, _, port = served.target.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60) as client:
            client.sendall(SETTINGS + (PING + bytes(8)) * 8)
            assert b"too_many_pings" in all_of(client)


def test_envoy_replaces_a_connection_to_its_picker_that_died_silently(tmp_path: Path) -> None:
    """In less time. Without, requests go unplaced until the kernel gives up, each after message_timeout."""
    shipped = "{interval: 10s, timeout: 5s}"
    text = envoy.CONFIG.read_text().replace(shipped, "{interval: 1s, timeout: 2s}")
    with (
        scripted("a") as workers,
        serving(fleet := followed(workers), place={}, router=Router(fleet)) as index,
        closing(Proxy(int(index.ext_proc.rpartition(":")[2]))) as proxy,
        envoy.running(
            tmp_path, [workers[0].at], [f"127.0.0.1:{proxy.port}"], text=text, message_timeout_s=2
        ) as front,
    ):

        def is_placed() -> bool:
            return "x-kvpool-worker" in post(front.url, ASKED).headers

        def died() -> bool:
            """The connection of a health check may have been the one."""
            proxy.arm(Way.ANSWERED, 1, Harm.SILENCE)
            return not is_placed()

        assert eventually(is_placed)
        assert eventually(died)
        assert eventually(is_placed)
