"""Spans: below the caller's, of sampled requests only, sent over OTLP; nothing while they are off."""

from __future__ import annotations

import json
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kvpool.errors import ConfigError
from kvpool.tracing import Tracing
from kvpool.v1 import index_pb2 as pb
from kvpool.v1.index_pb2_grpc import IndexServiceStub
from tests.support.deadlines import OPENER
from tests.support.index_process import Index, RouterProcess, running

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"}


class Collector:
    """Takes spans over OTLP as a collector does."""

    def __init__(self) -> None:
        collector = self
        self.spans: list[tuple[str, Any]] = []  # (service, span)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def take(self, request: Any) -> None:
        for resource in request.resource_spans:
            (service,) = [
                one.value.string_value for one in resource.resource.attributes if one.key == "service.name"
            ]
            self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_spans_are_below_the_callers(collector: Collector) -> None:
    tracing = Tracing.to(collector.url, "kvpool-index")
    with tracing.span("kvpool.place", SAMPLED) as span:
        span.set(outcome="cost", prompt_blocks=7, model="m", operation="chat", worker="")
    tracing.record("kvpool.load", SAMPLED, 0.25, loaded=True, input_tokens=100, cache_read_tokens=48)
    tracing.close()
    (service, placed), (_, loaded) = collector.spans
    assert service == "kvpool-index"
    assert (placed.name, loaded.name) == ("kvpool.place", "kvpool.load")
    for one in (placed, loaded):
        assert (one.trace_id.hex(), one.parent_span_id.hex()) == (TRACE, PARENT)
    assert attributes(placed) == {
        "kvpool.outcome": "cost", "kvpool.prompt_blocks": 7,
        "gen_ai.request.model": "m", "gen_ai.operation.name": "chat",
    }  # fmt: skip
    assert attributes(loaded) == {
        "kvpool.loaded": True, "gen_ai.usage.input_tokens": 100, "gen_ai.usage.cache_read.input_tokens": 48,
    }  # fmt: skip
    assert loaded.end_time_unix_nano - loaded.start_time_unix_nano == pytest.approx(0.25e9, rel=1e-3)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"traceparent": f"00-{TRACE}-{PARENT}-00"},
        {"traceparent": f"00-{'0' * 32}-{PARENT}-01"},
        {"traceparent": "nonsense"},
    ],
)
def test_no_trace_begins_here(collector: Collector, headers: dict[str, str]) -> None:
    tracing = Tracing.to(collector.url, "kvpool-index")
    with tracing.span("kvpool.place", headers) as span:
        span.set(outcome="cost")
    tracing.record("kvpool.load", headers, 1.0)
    tracing.close()
    assert collector.spans == []


def test_a_span_ends_with_its_request_whatever_happens(collector: Collector) -> None:
    tracing = Tracing.to(collector.url, "kvpool-index")
    with pytest.raises(ZeroDivisionError), tracing.span("kvpool.place", SAMPLED):
        _ = 1 // 0
    tracing.close()
    assert len(collector.spans) == 1


def test_off_costs_nothing() -> None:
    tracing = Tracing()
    with tracing.span("kvpool.place", SAMPLED) as span:
        span.set(outcome="cost")
    assert tracing.span("kvpool.place", SAMPLED) is tracing.span("kvpool.place", SAMPLED)
    tracing.close()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="write the collector's URL"):
        Tracing.to("otel:4318", "kvpool-index")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match="with its extra trace"):
        Tracing.to("http://otel:4318", "kvpool-index")


@contextmanager
def service(kind: type[Index], folder: Path, collector: Collector) -> Iterator[str]:
    """A process that sends its spans to the collector; its address."""
    pool = f"file://{folder}/pool?capacity=16MiB"
    with running("--pool", pool, "--traces", collector.url, kind=kind) as process:
        yield process.target
        _, lines = process.stop()
    assert not any("Traceback" in line for line in lines), lines


def test_an_index_tells_of_calls(tmp_path: Path, collector: Collector) -> None:
    with service(Index, tmp_path, collector) as at, grpc.insecure_channel(at) as channel:
        stub = IndexServiceStub(channel)
        stub.ListWorkers(pb.ListWorkersRequest(), metadata=tuple(SAMPLED.items()), timeout=60)
        stub.ListWorkers(pb.ListWorkersRequest(), timeout=60)
        with pytest.raises(grpc.RpcError):
            stub.Lookup(
                pb.LookupRequest(scope=pb.Scope(model="m"), token_ids=bytes(8)),
                metadata=tuple(SAMPLED.items()),
                timeout=60,
            )
    names = sorted(span.name for _, span in collector.spans)
    assert [name.rpartition(".")[2] for name in names] == ["ListWorkers", "Lookup"], names
    assert {span.parent_span_id.hex() for _, span in collector.spans} == {PARENT}


def test_a_router_tells_of_requests_and_placements(tmp_path: Path, collector: Collector) -> None:
    with service(RouterProcess, tmp_path, collector) as at:
        body = json.dumps({"model": "m", "prompt": [1, 2, 3]}).encode()
        for headers in (SAMPLED, {}):
            request = urllib.request.Request(
                f"http://{at}/v1/completions", body, {"content-type": "application/json", **headers}
            )
            with pytest.raises(urllib.error.HTTPError) as refused:
                OPENER.open(request, timeout=60)
            assert refused.value.code == 503
            refused.value.close()
    assert {name for name, _ in collector.spans} == {"kvpool-router"}
    placed, request = (span for _, span in collector.spans)
    assert (placed.name, request.name) == ("kvpool.place", "kvpool.request")
    assert attributes(placed) == {"kvpool.outcome": "no-worker", "kvpool.tenant": "default"}
    assert attributes(request) == {
        "kvpool.outcome": "refused", "kvpool.path": "/v1/completions", "kvpool.method": "POST",
    }  # fmt: skip
    assert request.start_time_unix_nano <= placed.start_time_unix_nano
    assert request.end_time_unix_nano >= placed.end_time_unix_nano
