"""What ``kvpool doctor`` sees of workers where they serve requests: whether they answer, and what their metrics say."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvpool import metrics
from kvpool.cli.doctor.finding import Finding, ok, warn
from kvpool.cli.doctor.http_page import Page, get
from kvpool.discovery.worker import Worker

ABOUT = "serving"
MAX_ASKED = 64
AT_ONCE = 16
# A sample without its labels: NAME{LABELS} VALUE.
_SAMPLE = re.compile(r"(kvpool_\w+)(?:\{.*\})? ([-+0-9.eE]+)")
FAULTS = (metrics.LOOKUP_FAILURES, metrics.REQUEST_FAULTS, metrics.REFUSED_KEYS)


def serving_findings(workers: Sequence[Worker], tls_ca: str | None) -> Iterator[Finding]:
    """Ask each worker for its metrics. Blocking, for three seconds for each 16 that do not answer."""
    asked = [worker for worker in workers if worker.address][:MAX_ASKED]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        pages = threads.map(lambda worker: get(f"{worker.address.rstrip('/')}/metrics", tls_ca), asked)
        for worker, page in zip(asked, pages, strict=True):
            yield _judged(worker, page)
    for worker in workers:
        if not worker.address:
            yield warn(
                ABOUT,
                f"worker {worker.name} does not say where it serves requests: no router can send it any",
                "address=http://HOST:PORT in its --worker",
            )
    if len(workers) > MAX_ASKED:
        yield warn(
            ABOUT, f"{len(workers) - MAX_ASKED} more workers were not asked", f"look at {MAX_ASKED} at a time"
        )


def _judged(worker: Worker, page: Page | str) -> Finding:
    where = f"worker {worker.name} at {worker.address}"
    if isinstance(page, str):
        return warn(
            ABOUT,
            f"{where} does not answer: {page}; no router can send it requests",
            'see that its server runs there; its "http_port", if set, is the number of its --port, its '
            '"advertise_host" a name that others reach',
        )
    if page.status != 200:
        return warn(
            ABOUT, f"{where} answers with {page.status} to /metrics", "see what listens there, and its log"
        )
    sums = samples(page.body)
    if not sums:
        return warn(
            ABOUT,
            f"{where} answers, and its metrics have nothing of kvpool",
            "start it with KVPoolConnector and without --disable-log-stats",
        )
    told = _told(sums)
    if faults := {metric.name: sums[metric.name] for metric in FAULTS if sums.get(metric.name)}:
        said = ", ".join(f"{name} {value:,.0f}" for name, value in faults.items())
        return warn(
            ABOUT,
            f"{where}: {told}; with faults since its start: {said}",
            "its log says which; the lines about the pool and the server above may say why",
        )
    return ok(ABOUT, f"{where}: {told}; no fault")


def _told(sums: Mapping[str, float]) -> str:
    def figure(metric: metrics.Metric) -> str:
        return f"{sums.get(metric.name, 0):,.0f}"

    return (
        f"requests looked up since its start: {figure(metrics.LOOKUP_REQUESTS)}; blocks loaded: "
        f"{figure(metrics.LOADED_BLOCKS)}, stored: {figure(metrics.STORED_BLOCKS)}"
    )


def samples(page: bytes) -> dict[str, float]:
    """By the names of kvpool's metrics on a page, summed over their labels."""
    sums: defaultdict[str, float] = defaultdict(float)
    for line in page.decode("utf-8", "replace").splitlines():
        if (found := _SAMPLE.fullmatch(line.strip())) is not None:
            with contextlib.suppress(ValueError):
                value = float(found[2])
                sums[found[1]] += value
    return dict(sums)
