"""``Exporter``: the index's metrics, for Prometheus."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from kvpool import metrics
from kvpool.discovery.quota import Standing
from kvpool.discovery.traffic import Seen
from kvpool.index.answer import HitCurve
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.table import TIERS
from kvpool.index.follow.hit_curves import ALL
from kvpool.index.follow.pool_follower import PoolFollower
from kvpool.index.net.listener import SERVER, HttpListener, refused_reply
from kvpool.index.request_stats import Histogram, ProxyStats, ProxyTotals, RequestStats
from kvpool.metrics import Metric
from kvpool.store.store import Usage

# Shown one by one, the first by name, so that scrapes agree. Each is a time series.
MAX_RANKS_SHOWN = 1024
SIZES = (0.25, 0.5, 1, 2, 4)  # of today's, whose hit ratios are shown
FRESH_S = 1.0  # lifetime of a page: a pass over 10,000 workers takes a quarter of a second
HEADERS = {"content-type": "text/plain; version=0.0.4; charset=utf-8", **SERVER}


class Exporter(Collector):
    """A fleet's totals and the counts of ``stats``, on a page. One event loop: ``serve``, ``close``.

    ``pool``, ``proxy``: None: absent. ``_thread`` makes the page, and owns ``_page`` and ``_made_s``.
    """

    def __init__(
        self,
        fleet: Fleet,
        stats: RequestStats,
        pool: PoolFollower | None = None,
        proxy: ProxyStats | None = None,
    ) -> None:
        self._fleet, self._stats, self._pool, self._proxy = fleet, stats, pool, proxy
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._thread = ThreadPoolExecutor(1, "kvpool-metrics")
        self._page, self._made_s = b"", 0.0
        self._listener = HttpListener(self._show, fleet.limits)

    def collect(self) -> Iterator[Family]:
        yield from self._of_fleet()
        yield from self._of_stats()
        if self._pool is not None:
            yield from _families(metrics.POOL_RECONCILER, self._pool.totals()._asdict())
            yield from _of_servers(self._pool.servers)
            yield from _of_traffic(self._pool.traffic)
            yield from _of_curves(self._pool.curves)
            yield from _of_standings(self._pool.standings)
        if self._proxy is not None:
            yield from self._of_proxy(self._proxy.totals())

    def _of_fleet(self) -> Iterator[Family]:
        totals = self._fleet.totals()._asdict()
        yield from _families(metrics.INDEX, totals)
        yield _by_label(
            GaugeMetricFamily,
            metrics.INDEX_TIER_BLOCKS,
            {tier: totals[f"{tier}_blocks"] for tier in (*TIERS, "near")},
        )
        staleness = metrics.INDEX_STALENESS_SECONDS
        shown = GaugeMetricFamily(staleness.name, staleness.help, labels=metrics.INDEX_RANK_LABELS)
        ranks = [
            (rank.staleness_ms, status.worker, rank.dp_rank)
            for status in self._fleet.workers()
            for rank in status.publishers
        ]
        for staleness_ms, worker, dp_rank in ranks[:MAX_RANKS_SHOWN]:
            shown.add_metric([worker.tenant, worker.name, str(dp_rank)], staleness_ms / 1000)
        yield shown
        most = metrics.INDEX_MAX_STALENESS_SECONDS
        yield GaugeMetricFamily(
            most.name, most.help, value=max((rank[0] for rank in ranks), default=0) / 1000
        )

    def _of_stats(self) -> Iterator[Family]:
        totals = self._stats.totals()
        yield _by_label(CounterMetricFamily, metrics.INDEX_LOOKUPS, totals.results)
        yield _by_label(CounterMetricFamily, metrics.INDEX_REFUSED, totals.refused)
        streams = metrics.INDEX_STREAMS
        yield GaugeMetricFamily(streams.name, streams.help, value=totals.streams)
        yield _by_label(CounterMetricFamily, metrics.INDEX_PLACEMENTS, totals.placements)
        yield _by_label(CounterMetricFamily, metrics.INDEX_PROMPTLESS, totals.promptless)
        yield _by_label(CounterMetricFamily, metrics.INDEX_SESSION_REQUESTS, totals.sessions)
        yield _by_label(CounterMetricFamily, metrics.INDEX_TOKEN_CHECKS, totals.checks)
        yield _histograms(metrics.INDEX_PLACEMENT_SECONDS, {"": totals.placement_seconds})
        yield _histograms(metrics.INDEX_LOOKUP_SECONDS, {"": totals.seconds})
        yield _histograms(metrics.INDEX_MATCHED_RATIO, totals.ratios)

    def _of_proxy(self, totals: ProxyTotals) -> Iterator[Family]:
        requests = metrics.ROUTER_REQUESTS
        yield GaugeMetricFamily(requests.name, requests.help, value=totals.under_way)
        yield _by_label(CounterMetricFamily, metrics.ROUTER_RESPONSES, totals.responses)
        yield _by_label(CounterMetricFamily, metrics.ROUTER_RETRIES, totals.retries)
        yield _histograms(metrics.ROUTER_FIRST_BYTE_SECONDS, {"": totals.first_byte_seconds})

    async def serve(self, listen: str) -> int:
        """Listen on ``HOST:PORT``; port 0: any free one. Returns the port. Errors: ``ConfigError``."""
        return await self._listener.start(listen, "show metrics on")

    async def close(self) -> None:
        """Waits for running responses, a few seconds at most."""
        await self._listener.stop()
        await asyncio.to_thread(self._thread.shutdown)

    async def _show(self, request: web.BaseRequest) -> web.Response:
        if request.method not in ("GET", "HEAD"):
            return refused_reply(405, "the metrics are read with GET")
        page = await asyncio.get_running_loop().run_in_executor(self._thread, self._made)
        return web.Response(body=page, headers=HEADERS)

    def _made(self) -> bytes:
        if not self._page or time.monotonic() - self._made_s > FRESH_S:
            self._page = generate_latest(self._registry)
            self._made_s = time.monotonic()
        return self._page


def _families(shown: Mapping[str, Metric], totals: Mapping[str, float]) -> Iterator[Family]:
    for field, metric in shown.items():
        family = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
        yield family(metric.name, metric.help, value=totals[field])


def _of_servers(servers: Sequence[Usage]) -> Iterator[Family]:
    for field, metric in metrics.POOL_SERVERS.items():
        family = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
        shown = family(metric.name, metric.help, labels=[metric.label])
        for server in servers:
            if (value := getattr(server, field)) is not None:
                shown.add_metric([server.server], float(value))
        yield shown


def _of_traffic(windows: Mapping[str, Seen]) -> Iterator[Family]:
    ratios = {window: seen.hit_ratio for window, seen in windows.items() if seen.prompt_tokens}
    yield _by_label(GaugeMetricFamily, metrics.INDEX_HIT_RATIO, ratios)


def _of_curves(curves: Mapping[str, HitCurve]) -> Iterator[Family]:
    of_all = _at_sizes(curves[ALL]) if ALL in curves else {}
    yield _by_label(GaugeMetricFamily, metrics.INDEX_HIT_RATIO_AT_SIZE, of_all)
    metric, labels = metrics.INDEX_TENANT_HIT_RATIO_AT_SIZE, metrics.INDEX_TENANT_SIZE_LABELS
    shown = GaugeMetricFamily(metric.name, metric.help, labels=labels)
    for tenant in sorted(curves.keys() - {ALL}):
        for size, ratio in _at_sizes(curves[tenant]).items():
            shown.add_metric([tenant, size], ratio)
    yield shown


def _of_standings(standings: Mapping[str, Standing]) -> Iterator[Family]:
    for field, metric in metrics.TENANT_STANDINGS.items():
        values = {tenant: getattr(standings[tenant], field) for tenant in sorted(standings)[:MAX_RANKS_SHOWN]}
        known = {tenant: float(value) for tenant, value in values.items() if value is not None}
        yield _by_label(GaugeMetricFamily, metric, known)


def _at_sizes(curve: HitCurve) -> dict[str, float]:
    known = {f"{size:g}": curve.at(size * curve.pool_blocks) for size in SIZES if curve.pool_blocks}
    return known | {"all": curve.hit_rates[-1]}


def _by_label(
    kind: type[CounterMetricFamily | GaugeMetricFamily], metric: Metric, values: Mapping[str, float]
) -> Family:
    family = kind(metric.name, metric.help, labels=[metric.label])
    for label, value in values.items():
        family.add_metric([label], value)
    return family


def _histograms(metric: Metric, histograms: Mapping[str, Histogram]) -> Family:
    family = HistogramMetricFamily(metric.name, metric.help, labels=[metric.label] if metric.label else [])
    for label, histogram in histograms.items():
        bounds = [*map(str, histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        family.add_metric([label] if metric.label else [], buckets, histogram.sum)
    return family
