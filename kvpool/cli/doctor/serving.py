"""Workers and fronts for ``kvpool doctor``."""

from __future__ import annotations

import contextlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import urlsplit

from kvpool import metrics
from kvpool.cli.doctor import rules
from kvpool.cli.doctor.misses import miss_findings
from kvpool.cli.doctor.page import read_page
from kvpool.cli.doctor.rules import Finding, judge
from kvpool.cli.doctor.subjects import Front, Served
from kvpool.discovery.worker import Worker
from kvpool.errors import ConfigError
from kvpool.text import redact

REASON = (
    "x-kvpool-reason"  # of a response that a picker saw; kvpool.index.front.placement, too, takes an extra
)
# A sample without its labels: NAME{LABELS} VALUE.
_SAMPLE = re.compile(r"(kvpool_\w+)(\{.*\})? ([-+0-9.eE]+)")
FAULTS = (metrics.LOOKUP_FAILURES, metrics.REQUEST_FAULTS, metrics.REFUSED_KEYS)


def serving_findings(workers: Sequence[Worker], pages: Mapping[str, Served]) -> Iterator[Finding]:
    """``pages``: of ``served``, by the worker's id; those with an address and without one were not asked."""
    subjects = [pages[worker.id] for worker in workers if worker.id in pages]
    silent = [Served(worker) for worker in workers if not worker.address]
    for subject in (*subjects, *silent):
        yield from judge("serving", rules.SERVING, subject, first=True)
    sums: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for subject in subjects:
        for name, label, value in subject.labelled:
            sums[name][label] += value
    yield from miss_findings(sums, workers)
    if more := len(workers) - len(subjects) - len(silent):
        change = f"look at {len(subjects)} at a time"
        yield Finding("warn", "serving", f"{more:,} more workers were not asked", change)


def served(worker: Worker, tls_ca: str | None) -> Served:
    """Its metrics, or why there are none. Blocking, for three seconds at most. Never raises."""
    page = read_page(f"{worker.address.rstrip('/')}/metrics", tls_ca)
    sums, labelled = samples(page.body), [*_samples(page.body)]

    def figure(metric: metrics.Metric) -> str:
        return f"{sums.get(metric.name, 0):,.0f}"

    return Served(
        worker=worker,
        where=f"worker {worker.label}",
        away=page.away,
        status=page.status,
        samples=sums,
        labelled=labelled,
        figures=f"requests looked up since its start: {figure(metrics.LOOKUP_REQUESTS)}; blocks loaded: "
        f"{figure(metrics.LOADED_BLOCKS)}, stored: {figure(metrics.STORED_BLOCKS)}",
        off=(metrics.ENABLED.name, "", 0.0) in labelled,
        faults=", ".join(f"{one.name} {sums[one.name]:,.0f}" for one in FAULTS if sums.get(one.name)),
    )


def samples(page: bytes) -> dict[str, float]:
    """By the names of kvpool's metrics on a page, summed over their labels."""
    sums: defaultdict[str, float] = defaultdict(float)
    for name, _, value in _samples(page):
        sums[name] += value
    return dict(sums)


def _samples(page: bytes) -> Iterator[tuple[str, str, float]]:
    """Name, value of kvpool's own label ("": it has none), and value of each sample of kvpool."""
    for line in page.decode("utf-8", "replace").splitlines():
        if (found := _SAMPLE.fullmatch(line.strip())) is not None:
            metric = metrics.BY_NAME.get(found[1])
            own = metric and metric.label and re.search(rf'[{{,]{metric.label}="(\w*)"', found[2] or "")
            with contextlib.suppress(ValueError):
                yield found[1], own[1] if own else "", float(found[3])


def front_findings(
    url: str, workers: Sequence[Worker], tls_ca: str | None, *, has_picker: bool = False
) -> Iterator[Finding]:
    """Read a front's models. ``has_picker``: one should have placed the request for them."""
    page = read_page(f"{url}/v1/models", tls_ca)
    models: set[str] | None = None
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        models = {str(one["id"]) for one in json.loads(page.body)["data"]}
    front = Front(
        url=url, away=page.away, status=page.status, models=models, names=", ".join(sorted(models or ())) or "none",
        excerpt=page.excerpt,
    )  # fmt: skip
    yield from judge("front", rules.FRONT, front, first=True)
    if page.status == 200 and models is not None:
        for model in sorted({worker.model for worker in workers if worker.address} - models):
            yield from judge("front", rules.FRONT_MODEL, front._replace(model=model))
        if has_picker and REASON not in page.headers:
            yield from judge("front", rules.FRONT_UNASKED, front)


def check_url(url: str, option: str) -> str:
    """The URL without a slash at its end. Errors: ``ConfigError``."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
        raise ConfigError(f"{option} {redact(url)}: write http://HOST:PORT or https://HOST:PORT")
    return url.rstrip("/")
