"""Metrics pages as a vLLM server shows them, and servers that show them, or something else; and an index's own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from kvpool.index.follow.metrics_page import EngineLoad
from kvpool.index.serve.metrics import Exporter


def page(engines: dict[int, EngineLoad], model: str = "m") -> bytes:
    """The gauges that count, of a server with these engines."""
    written = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    lines = ["# HELP vllm:num_requests_running Number of requests in model execution batches."]
    for number, engine in engines.items():
        labels = f'engine="{number}",model_name="{written}"'
        lines += [
            f"vllm:num_requests_running{{{labels}}} {float(engine.running)}",
            f"vllm:num_requests_waiting{{{labels}}} {float(engine.waiting)}",
            f"vllm:kv_cache_usage_perc{{{labels}}} {engine.kv_usage}",
            f'vllm:engine_sleep_state{{{labels},sleep_state="awake"}} {float(not engine.asleep)}',
            f'vllm:engine_sleep_state{{{labels},sleep_state="weights_offloaded"}} {float(engine.asleep)}',
            f'vllm:engine_sleep_state{{{labels},sleep_state="discard_all"}} 0.0',
        ]
        if engine.capacity_tokens is not None:
            tokens = engine.capacity_tokens
            lines.append(f'vllm:cache_config_info{{engine="{number}",kv_cache_size_tokens="{tokens}"}} 1.0')
        if engine.gate is not None:
            names = (
                "load_tokens",
                "load_seconds",
                "prefill_tokens",
                "prefill_seconds",
                "near_tokens",
                "near_seconds",
            )
            lines += [
                f"kvpool_gate_{name}_total{{{labels}}} {value}"
                for name, value in zip(names, engine.gate, strict=True)
            ]
    return "\n".join([*lines, ""]).encode()


def answer(body: bytes, status: str = "200 OK") -> bytes:
    """A whole HTTP reply, after which the connection is closed."""
    head = f"HTTP/1.1 {status}\r\ncontent-type: text/plain\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return head.encode() + body


class PageServer:
    """Answers each request with what ``say`` does to its connection: real sockets, one thread a connection."""

    def __init__(self, say: Callable[[socket.socket], None]) -> None:
        self.say = say
        self.asked: list[bytes] = []
        self.closing = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def show(self, engines: dict[int, EngineLoad]) -> None:
        """A good page from now on."""
        body = answer(page(engines))
        self.say = lambda connection: connection.sendall(body)

    def close(self) -> None:
        self.closing.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        self._listener.close()

    def _accept(self) -> None:
        while not self.closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            thread = threading.Thread(target=self._serve, args=(connection,))
            thread.start()
            self._threads.append(thread)

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(10)
            head = b""
            while b"\r\n\r\n" not in head:
                part = connection.recv(4096)
                if not part:
                    return
                head += part
            self.asked.append(head)
            self.say(connection)


@contextlib.contextmanager
def serving_page(engines: dict[int, EngineLoad] | None = None) -> Iterator[PageServer]:
    server = PageServer(lambda connection: None)
    server.show(engines or {0: EngineLoad()})
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def showing(exporter: Exporter) -> Iterator[int]:
    """The metrics page of an index, in an event loop of its own; its port."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        try:
            yield asyncio.run_coroutine_threadsafe(exporter.serve("127.0.0.1:0"), loop).result(60)
        finally:
            asyncio.run_coroutine_threadsafe(exporter.close(), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
