"""``Exporter``: the index's metrics, as Prometheus reads them."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from threading import Thread
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpool import metrics
from kvpool.errors import ConfigError
from kvpool.index.fleet import Fleet
from kvpool.index.residency import Residency
from kvpool.wording import parse_address

BUCKETS_S = (50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0)
RESULTS = ("answered", "wrong", "unknown", "failed")
CLOSE_TIMEOUT_S = 5.0


class Exporter(Collector):
    """Shows a fleet's totals and counts lookups, on a page of its own. Any thread may call anything.

    ``residency``: None where there is no pool.
    """

    def __init__(self, fleet: Fleet, residency: Residency | None = None) -> None:
        self._fleet, self._residency = fleet, residency
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        lookups, seconds = metrics.INDEX_LOOKUPS, metrics.INDEX_LOOKUP_SECONDS
        counter = Counter(lookups.name, lookups.help, [lookups.label], registry=self._registry)
        self._lookups = {result: counter.labels(result) for result in RESULTS}
        self._seconds = Histogram(seconds.name, seconds.help, buckets=BUCKETS_S, registry=self._registry)
        self._page: tuple[Any, Thread] | None = None

    def looked_up(self, seconds: float, result: str) -> None:
        """One lookup; see ``kvpool.index.service.Observer``."""
        self._lookups[result].inc()
        if result == "answered":
            self._seconds.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """The totals now; prometheus-client calls it."""
        yield from _families(metrics.INDEX, self._fleet.totals()._asdict())
        if self._residency is not None:
            yield from _families(metrics.RESIDENCY, self._residency.totals()._asdict())

    def serve(self, listen: str) -> int:
        """Show the page on ``HOST:PORT``; port 0: any that is free. Returns the port. Errors: ``ConfigError``."""
        host, port = parse_address(listen)
        try:
            self._page = start_http_server(port, host.strip("[]"), self._registry)
        except (OSError, socket.gaierror) as error:
            raise ConfigError(
                f"cannot show metrics on {listen}: {error.strerror}; choose another address"
            ) from error
        return int(self._page[0].server_port)

    def close(self) -> None:
        """Take the page down. Blocking, for as long as a page is being sent."""
        if self._page is not None:
            server, thread = self._page
            self._page = None
            server.shutdown()
            server.server_close()
            thread.join(CLOSE_TIMEOUT_S)


def _families(shown: Mapping[str, metrics.Metric], totals: Mapping[str, float]) -> Iterator[Metric]:
    for field, metric in shown.items():
        family = CounterMetricFamily if metric.name.endswith("_total") else GaugeMetricFamily
        yield family(metric.name, metric.help, value=totals[field])
