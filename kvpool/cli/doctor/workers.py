"""``Workers`` for ``kvpool doctor``: those of the pool and of the indexes, each asked once at all of its addresses.

A worker that answers at none of them is one finding, however many parts of the deployment miss it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from kvpool.cli.doctor import rules
from kvpool.cli.doctor.rules import Finding, judge
from kvpool.cli.doctor.serving import served
from kvpool.cli.doctor.subjects import Announcement, Away, Hashing, Served
from kvpool.discovery.worker import Worker

CONNECT_S = 1.0
MAX_ENDPOINTS = 64  # per worker
MAX_ASKED = 64  # workers, for their metrics
AT_ONCE = 16


class Workers:
    """``announced``: those of the pool, by id; ``by_id``: these and those of the indexes. ``tls_ca``: for https.

    ``pages``: what each said about its metrics, of the first ``MAX_ASKED`` with an address.
    """

    def __init__(self, announced: Iterable[Worker], tls_ca: str | None) -> None:
        self._tls_ca = tls_ca
        self.announced = {worker.id: worker for worker in announced}
        self.by_id = dict(self.announced)
        self.pages: dict[str, Served] = {}
        self._answers: dict[str, bool | None] = {}  # by endpoint of events; None: cannot be tried
        self._followers: dict[str, str] = {}

    def add_followed(self, target: str, worker: Worker, *, well: bool) -> None:
        """A worker of the index at ``target``. ``well``: it hears a rank of it."""
        self.by_id.setdefault(worker.id, worker)
        if well:
            self._followers.setdefault(worker.id, target)

    def ask(self) -> None:
        """Blocking: a second per 16 endpoints that do not answer, three per 16 servers."""
        endpoints = [one for worker in self.by_id.values() for one in _events(worker)]
        asked = [worker for worker in self.by_id.values() if worker.address][:MAX_ASKED]
        with ThreadPoolExecutor(AT_ONCE) as threads:
            self._answers = dict(zip(endpoints, threads.map(_answers, endpoints), strict=True))
            pages = threads.map(lambda worker: served(worker, self._tls_ca), asked)
            self.pages = {worker.id: page for worker, page in zip(asked, pages, strict=True)}

    def name(self, worker_id: str) -> str:
        """With its tenant; one that came meanwhile has no address here."""
        worker = self.by_id.get(worker_id)
        return worker_id if worker is None else f"{worker.tenant}/{worker.label}"

    def silent_events(self, worker: Worker) -> list[str]:
        return [one for one in _events(worker) if self._answers[one] is False]

    def is_away(self, worker: Worker) -> bool:
        """Whether none of its addresses answers, of one at least that can be tried."""
        page = self.pages.get(worker.id)
        tried = [self._answers[one] for one in _events(worker) if self._answers[one] is not None]
        tried += [] if page is None else [not page.away]
        return bool(tried) and not any(tried)

    def has_finding(self, worker: Worker) -> bool:
        """Whether ``findings`` says already that a publisher of it does not answer."""
        return self.is_away(worker) or (worker.id in self.announced and bool(self.silent_events(worker)))

    def findings(self) -> Iterator[Finding]:
        """Of the announced ones, and of those that answer nowhere."""
        there = []
        for worker in self.by_id.values():
            if self.is_away(worker):
                yield from judge("workers", rules.AWAY, self._away(worker), first=True)
            elif worker.id in self.announced:
                there.append(worker)
                yield from judge("workers", rules.WORKER, self._announcement(worker), first=True)
        yield from _hashing(there)

    def _away(self, worker: Worker) -> Away:
        page, events = self.pages.get(worker.id), self.silent_events(worker)
        places = [] if page is None else [f"not at {worker.address} ({page.away})"]
        places += [f"not where its events are ({', '.join(events[:4])})"] if events else []
        follower = self._followers.get(worker.id, "")
        return Away(worker.name, ", ".join(places), follower)

    def _announcement(self, worker: Worker) -> Announcement:
        return Announcement(
            worker=worker,
            has_events=any(one.events for one in worker.publishers),
            silent=next(iter(self.silent_events(worker)), ""),
            has_replay=all(one.replay for one in worker.publishers),
            events=", ".join(one.events for one in worker.publishers[:4]),
        )


def _events(worker: Worker) -> list[str]:
    return [one.events for one in worker.publishers[:MAX_ENDPOINTS] if one.events]


def _answers(endpoint: str) -> bool | None:
    """Whether a TCP connection succeeds; None for other transports."""
    address = urlsplit(endpoint)
    if address.scheme != "tcp" or address.hostname is None or address.port is None:
        return None
    try:
        socket.create_connection((address.hostname, address.port), CONNECT_S).close()
    except (OSError, UnicodeError):  # UnicodeError: a name with a label that is empty or too long
        return False
    return True


def _hashing(workers: Sequence[Worker]) -> Iterator[Finding]:
    schemes: dict[str, dict[tuple[str, str, int], Worker]] = {}
    for worker in workers:
        scheme = (worker.hash_algorithm, worker.hash_seed_id, worker.block_tokens)
        schemes.setdefault(worker.model, {}).setdefault(scheme, worker)
    words = ("hash algorithm", "PYTHONHASHSEED", "block size")
    for model, found in schemes.items():
        (first, worker), *others = found.items()
        for other, other_worker in others:
            differing = " and ".join(word for word, a, b in zip(words, first, other, strict=True) if a != b)
            pair = Hashing(model, worker, other_worker, differing)
            yield from judge("workers", rules.HASHING, pair)
