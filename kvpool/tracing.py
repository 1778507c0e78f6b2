"""OpenTelemetry spans of traced requests: those whose ``traceparent`` (W3C) is sampled.

Nothing is imported while traces are off; a request without ``traceparent`` costs one header look-up. The
sender decides about sampling; kvpool begins no trace. Threads: any.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from kvpool.errors import ConfigError
from kvpool.text import with_extra

HEADERS = ("traceparent", "tracestate")
CLOSE_MS = 3000  # to flush unsent spans
Value = str | int | float | bool
# Attributes by OpenTelemetry's conventions for generative AI; all others are kvpool's own.
GEN_AI = {
    "operation": "gen_ai.operation.name",
    "model": "gen_ai.request.model",
    "input_tokens": "gen_ai.usage.input_tokens",
    "cache_read_tokens": "gen_ai.usage.cache_read.input_tokens",
}


class Span:
    """A span in progress; a no-op for untraced requests."""

    def __init__(self, span: Any = None) -> None:
        self._span = span

    def set(self, **attributes: Value) -> None:
        """Set attributes but empty ones, each under its name of ``GEN_AI``, or ``kvpool.`` and its name."""
        if self._span is not None:
            for name, value in attributes.items():
                if value != "":
                    self._span.set_attribute(GEN_AI.get(name, f"kvpool.{name}"), value)


_NO_SPAN = nullcontext(Span())


class Tracing:
    """Makes spans with ``tracer``; None: traces are off. ``close`` ends ``provider``."""

    def __init__(self, tracer: Any = None, provider: Any = None) -> None:
        self._tracer, self._provider = tracer, provider

    @classmethod
    def to(cls, endpoint: str, service: str) -> Tracing:
        """Send spans to a collector over OTLP/HTTP: ``endpoint`` is its base, such as http://otel:4318.

        A thread sends; above 2,048 waiting spans, new ones are dropped. Errors: ``ConfigError``.
        """
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"--traces {endpoint}: write the collector's URL, such as http://otel:4318")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as error:
            raise ConfigError(f"--traces needs the package {error.name}: {with_extra('trace')}") from error
        provider = TracerProvider(resource=Resource.create({"service.name": service}))
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider.get_tracer("kvpool"), provider)

    @classmethod
    def of_process(cls) -> Tracing:
        """Send spans where this process sends its own, such as vLLM with ``--otlp-traces-endpoint``."""
        try:
            from opentelemetry import trace
        except ModuleNotFoundError:
            return cls()
        return cls(trace.get_tracer("kvpool"))

    def span(self, name: str, headers: Mapping[str, str]) -> AbstractContextManager[Span]:
        """A span around the block, child of the one in ``headers``."""
        if self._tracer is None or HEADERS[0] not in headers:
            return _NO_SPAN
        return self._under_way(name, headers)

    def record(
        self, name: str, headers: Mapping[str, str] | None, seconds: float, **attributes: Value
    ) -> None:
        """Record a span of ``seconds`` that ends now."""
        if self._tracer is None or not headers or (context := _sampled(headers)) is None:
            return
        ended_ns = time.time_ns()
        span = self._tracer.start_span(name, context=context, start_time=ended_ns - int(seconds * 1e9))
        Span(span).set(**attributes)
        span.end(ended_ns)

    def close(self) -> None:
        """Flush. Blocks for some seconds at most."""
        if self._provider is not None:
            self._provider.force_flush(CLOSE_MS)
            self._provider.shutdown()
            self._provider = self._tracer = None

    @contextmanager
    def _under_way(self, name: str, headers: Mapping[str, str]) -> Iterator[Span]:
        context = _sampled(headers)
        if context is None:
            yield Span()
            return
        span = self._tracer.start_span(name, context=context)
        try:
            yield Span(span)
        finally:
            span.end()


def _sampled(headers: Mapping[str, str]) -> Any:
    """The sampled context in ``headers``; None: absent or unsampled."""
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {name: headers[name] for name in HEADERS if name in headers}
    context = TraceContextTextMapPropagator().extract(carrier)
    named = trace.get_current_span(context).get_span_context()
    return context if named.is_valid and named.trace_flags.sampled else None
