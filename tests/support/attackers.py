"""Hostile callers, publishers and tenants of an index, all at once: ``python -m tests.support.attackers``.

Told by the environment: ``TARGETS``, ``HTTP``, the token ``EVIL`` (read and publish, for tenant evil), ``POOL``,
``VICTIM`` (events and replay endpoint of another tenant's worker). Each attack has a thread and goes on until standard
input ends; what it is answered does not matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import os
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import grpc
import grpc.aio
import redis

from kvpool import IndexClient
from kvpool.index import Publisher, Worker
from kvpool.index.protocol.messages import MAX_REQUEST_NBYTES, SERVICE
from kvpool.key.hashing import seed_id
from kvpool.v1 import index_pb2 as pb
from tests.support.feeds import frames, misbehaving, raw_publisher
from tests.support.wire import batch, cleared, packed64, stored

TENANT = "evil"
PAUSE_S = 0.2
MiB = 1 << 20
LARGE = [("grpc.max_send_message_length", -1)]
HEALTH = "/grpc.health.v1.Health"


class Attackers:
    """``targets``: of indexes over gRPC; ``pages``: over HTTP; ``victim``: endpoints of an honest worker."""

    def __init__(
        self, targets: list[str], pages: list[str], token: str, pool: str, victim: list[str]
    ) -> None:
        self._targets, self._pages, self._token = targets, pages, token
        self._pool, self._victim = pool, victim
        self._metadata = (("authorization", f"Bearer {token}"),)
        self.begun: set[str] = set()

    def large_requests_without_a_token(self, target: str) -> None:
        request = bytes([pb.RouteRequest.DESCRIPTOR.fields_by_name["loads"].number << 3 | 2, 0])
        with grpc.insecure_channel(target, options=LARGE) as channel, contextlib.suppress(grpc.RpcError):
            channel.unary_unary(f"/{SERVICE}/Route")(request * (MAX_REQUEST_NBYTES // 2), timeout=5)

    def calls_that_send_nothing(self, target: str) -> None:
        async def begin() -> None:
            async with grpc.aio.insecure_channel(target) as channel:
                calls = [channel.stream_stream(f"/{SERVICE}/Lookup")() for _ in range(150)]
                calls += [channel.stream_stream(f"{HEALTH}/Watch")() for _ in range(150)]
                await asyncio.sleep(2)
                for call in calls:
                    call.cancel()

        asyncio.run(begin())

    def prompts_that_go_in_circles(self, target: str) -> None:
        with self._client(target) as client:
            client.lookup("m", tenant=TENANT, hashes64=packed64([1, 2]) * 30_000)

    def bad_questions_on_streams(self, target: str) -> None:
        with grpc.insecure_channel(target) as channel:
            bad = [pb.LookupRequest(id=number + 1).SerializeToString() for number in range(500)]
            replies = channel.stream_stream(f"/{SERVICE}/LookupStream")(
                iter([*bad, b"\xff"]), timeout=5, metadata=self._metadata
            )
            with contextlib.suppress(grpc.RpcError):
                for _ in replies:
                    pass

    def names_that_do_not_resolve(self, target: str) -> None:
        with self._client(target) as client:
            for number in range(20):
                self._register(client, f"nowhere-{number}", f"tcp://nowhere-{time.monotonic_ns()}.invalid:1")

    def workers_without_end(self, target: str) -> None:
        with self._client(target) as client:
            for number in range(300):
                self._register(client, f"many-{number}", "", model=f"m-{number}")

    def endpoints_of_others(self, target: str) -> None:
        with self._client(target) as client:
            endpoints = ("ipc:///run/x.sock", "tcp://169.254.169.254:80", "tcp://[::]:1")
            for number, endpoint in enumerate(endpoints):
                self._register(client, f"other-{number}", endpoint)

    def messages_without_end(self, target: str) -> None:
        with raw_publisher(frames(*[58 * MiB] * 12)) as publisher, self._client(target) as client:
            self._register(client, "flood", publisher.events)
            time.sleep(4)

    def batches_of_the_largest_size(self, target: str) -> None:
        payload = batch(stored(list(range(1, 1 << 21))))
        message = bytes((1, 0)) + b"\x01\x08" + bytes(8) + b"\x02" + len(payload).to_bytes(8, "big") + payload

        def say(connection: socket.socket) -> None:
            connection.settimeout(10)
            for _ in range(4):
                connection.sendall(message)

        with raw_publisher(say) as publisher, self._client(target) as client:
            self._register(client, "large", publisher.events)
            time.sleep(4)

    def pages_of_megabytes(self, target: str) -> None:
        page = b"vllm:num_requests_running 1\n" * (7 * MiB // 28)

        class Page(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(page)

            def log_message(self, *_: Any) -> None:
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            with self._client(target) as client:
                address = f"http://127.0.0.1:{server.server_port}"
                self._register(client, "page", "", address=address)
                time.sleep(4)
            server.shutdown()

    def bodies_over_http(self, _: str) -> None:
        for page in self._pages:
            request = urllib.request.Request(
                f"http://{page}/v1/lookup",
                b'{"scope": {"model": "m"}, "block_hashes": "' + b"QUJD" * (7 * MiB // 4) + b'"}',
                {"authorization": f"Bearer {self._token}", "content-type": "application/json"},
            )  # fmt: skip
            with contextlib.suppress(OSError):
                urllib.request.urlopen(request, timeout=5).read()

    def bodies_sent_to_health(self, _: str) -> None:
        self._send_halves("GET /health HTTP/1.1", "127.0.0.2", "127.0.0.3")

    def bodies_sent_by_halves(self, _: str) -> None:
        head = f"POST /v1/lookup HTTP/1.1\r\ncontent-type: application/json\r\nauthorization: Bearer {self._token}"
        self._send_halves(head, "127.0.0.4", "127.0.0.5", "127.0.0.6")

    def _send_halves(self, head: str, *hosts: str) -> None:
        """Bodies that do not end, four from each address."""
        sent = f"{head}\r\nhost: h\r\ncontent-length: {7 * MiB}\r\n\r\n".encode() + b" " * (7 * MiB - 1)
        for page in self._pages:
            name, _, port = page.rpartition(":")
            with ExitStack() as held:
                for host in hosts * 4:
                    with contextlib.suppress(OSError):
                        connection = socket.create_connection((name, int(port)), 5, (host, 0))
                        held.enter_context(connection).sendall(sent)
                time.sleep(2)

    def endpoints_of_others_spelled_in_other_ways(self, target: str) -> None:
        events, replay = self._victim
        names = ("localhost", "127.1", "0x7f.1", "2130706433", "[::ffff:127.0.0.1]")
        with self._client(target) as client:
            for number, name in enumerate(names):
                first, second = (one.replace("127.0.0.1", name) for one in (events, replay))
                self._register(client, f"spelled-{number}", first, replay=second)
                self._register(client, f"turned-{number}", second, replay=first)
        time.sleep(2)

    def batches_that_store_and_clear(self, target: str) -> None:
        events = [stored(list(range(1, 100_000))), *[cleared()] * 20_000]
        by_turns = [event for _ in range(2000) for event in (stored(list(range(1, 50))), cleared())]
        with misbehaving() as publisher, self._client(target) as client:
            self._follow(client, "clears", publisher.publisher)
            for _ in range(10):
                publisher.publish(batch(*events, dp_rank=3))
                publisher.publish(batch(*by_turns, dp_rank=3))
            time.sleep(4)

    def known_hashes_in_turns(self, target: str) -> None:
        with misbehaving() as publisher, self._client(target) as client:
            self._follow(client, "turns", publisher.publisher)
            publisher.publish(batch(stored([1, 2]), dp_rank=3))
            time.sleep(1)
            for _ in range(20):
                with contextlib.suppress(Exception):
                    client.lookup("m", tenant=TENANT, hashes64=packed64([1, 2] * 30_000))

    def known_hashes_of_many_workers(self, target: str) -> None:
        prompt = list(range(1, 8001))
        with ExitStack() as parts:
            client = parts.enter_context(self._client(target))
            for number in range(16):
                publisher = parts.enter_context(misbehaving())
                self._follow(client, f"part-{number}", publisher.publisher)
                publisher.publish(batch(stored([one for one in prompt if one % 17 != number]), dp_rank=3))
                publisher.publish(batch(stored(prompt[: 400 * (number + 1)], medium="CPU"), dp_rank=3))
            time.sleep(2)
            for _ in range(20):
                with contextlib.suppress(Exception):
                    client.lookup("m", tenant=TENANT, hashes64=packed64(prompt))

    def slow_pages_of_many_workers(self, target: str) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as silent, self._client(target) as client:
            address = f"http://127.0.0.1:{silent.getsockname()[1]}"
            for number in range(200):
                self._register(client, f"slow-{number}", "", address=address)
            time.sleep(10)

    def announcements_that_are_none(self, _: str) -> None:
        host, _, port = self._pool.removeprefix("valkey://").rpartition(":")
        with redis.Redis(host, int(port), socket_timeout=2) as server:
            server.zadd("kvpool:::announced", {TENANT: 4e15})
            for number in range(2):
                key = f"kvpool:{TENANT}:worker:{number}:huge"
                server.zadd(f"kvpool:{TENANT}::announced", {key: 4e15})
                server.setrange(f"{key}:announced", 100 * MiB, b"x")
            time.sleep(2)
            server.delete(f"kvpool:{TENANT}::announced")
            server.set(f"kvpool:{TENANT}::announced", "no sorted set")
            time.sleep(2)
            server.delete(f"kvpool:{TENANT}::announced")

    def all(self) -> list[Callable[[str], None]]:
        others = ("all", "run")
        return [getattr(self, name) for name in vars(type(self)) if name[0] != "_" and name not in others]

    def run(self) -> None:
        """Until standard input ends."""
        for attack in self.all():
            threading.Thread(target=self._again_and_again, args=(attack,), daemon=True).start()
        sys.stdin.read()
        print("\n".join(sorted(self.begun)), flush=True)
        os._exit(0)

    def _again_and_again(self, attack: Callable[[str], None]) -> None:
        while True:
            for target in self._targets:
                with contextlib.suppress(Exception):
                    self.begun.add(attack.__name__)
                    attack(target)
                time.sleep(PAUSE_S)

    def _client(self, target: str) -> IndexClient:
        return IndexClient(target, timeout_s=5, token=self._token)

    def _register(self, client: IndexClient, name: str, events: str, replay: str = "", **fields: Any) -> None:
        self._follow(client, name, Publisher(0, events, replay), **fields)

    def _follow(self, client: IndexClient, name: str, publisher: Publisher, **fields: Any) -> None:
        known: dict[str, Any] = {"model": "m", "tenant": TENANT, "incarnation": "1", **fields}
        worker = Worker(
            name=name, block_tokens=16, hash_seed_id=seed_id(None), publishers=(publisher,), **known
        )
        with contextlib.suppress(Exception):
            client.register(worker, 30)


if __name__ == "__main__":
    told = os.environ
    Attackers(
        told["TARGETS"].split(), told["HTTP"].split(), told["EVIL"], told["POOL"], told["VICTIM"].split()
    ).run()
