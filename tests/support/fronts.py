"""Workers behind a front: the index's own proxy, or Envoy that asks the index."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvpool import BlockHasher
from kvpool.index.cost.router import Router
from kvpool.index.fleet.fleet import Fleet
from tests.support import envoy
from tests.support.deadlines import eventually
from tests.support.fleets import Served, say, serving
from tests.support.http_client import TEXT, all_of
from tests.support.openai_worker import BadWorker, ScriptedWorker, scripted
from tests.support.wire import batch, stored

ASKED = {"model": "m", "prompt": list(TEXT.encode())}  # no worker has to be asked for its tokens


def followed(
    workers: Sequence[ScriptedWorker | BadWorker], fleet: Fleet | None = None, **fields: Any
) -> Fleet:
    """A fleet with these, which hold nothing and are heard."""
    fleet = fleet or Fleet()
    for worker in workers:
        fleet.add(worker.worker(**fields), "flag")
        fleet.rank(f"default/{worker.name}", 0).heard()
    return fleet


class Cluster:
    """Workers behind a front at ``url``."""

    def __init__(self, workers: list[ScriptedWorker], index: Served, url: str) -> None:
        self.workers = {worker.name: worker for worker in workers}
        self.index, self.url = index, url
        self._sequence = 0

    def hold(self, name: str, text: str = TEXT) -> None:
        """From now on a worker holds the blocks of a text."""
        hashes = BlockHasher(16).hashes(list(text.encode()))
        say(self.index.fleet, f"default/{name}", 0, self._sequence, batch(stored(hashes)))
        self._sequence += 1


def join(there: Cluster, worker: ScriptedWorker, model: str, **fields: Any) -> None:
    followed([worker], there.index.fleet, model=model, **fields)


class ProxyCluster(Cluster):
    def __init__(self, workers: list[ScriptedWorker], index: Served, router: Router) -> None:
        super().__init__(workers, index, f"http://{index.proxy}")
        self.router, self.port = router, int(index.proxy.rpartition(":")[2])

    def outcomes(self) -> dict[str, int]:
        return {name: count for name, count in self.index.proxy_stats.totals().responses.items() if count}

    def retries(self) -> dict[str, int]:
        return {name: count for name, count in self.index.proxy_stats.totals().retries.items() if count}

    def ends(self) -> bool:
        """Whether nothing is under way or held any longer."""
        under_way = self.index.proxy_stats.totals().under_way
        return under_way == 0 and len(self.router._reservations) == 0 and self.index.held_nbytes() == 0

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def raw(self, sent: bytes) -> bytes:
        """All that comes back until the proxy ends the connection."""
        with self.connect() as client:
            client.sendall(sent)
            return all_of(client)


@contextmanager
def proxy_cluster(
    *names: str,
    place: dict[str, Any] | None = None,
    proxy: dict[str, Any] | None = None,
    workers: list[ScriptedWorker] | None = None,
    **options: Any,
) -> Iterator[ProxyCluster]:
    with ExitStack() as parts:
        if workers is None:
            workers = parts.enter_context(scripted(*(names or ("a", "b", "c"))))
        fleet = followed(workers)
        router = Router(fleet)
        index = parts.enter_context(
            serving(
                fleet, place={"timeout_s": 60, **(place or {})}, proxy=proxy or {}, router=router, **options
            )
        )
        yield ProxyCluster(workers, index, router)


@contextmanager
def beside(bad: BadWorker, *good: str) -> Iterator[ProxyCluster]:
    """A cluster of these and of a worker that misbehaves, which holds the prompt."""
    try:
        with proxy_cluster(*good) as there:
            followed([bad], there.index.fleet)
            there.hold(bad.name)
            yield there
    finally:
        bad.stop()


class EnvoyCluster(Cluster):
    def __init__(self, workers: list[ScriptedWorker], index: Served, front: envoy.Envoy) -> None:
        super().__init__(workers, index, front.url)
        self.front = front


@contextmanager
def envoy_cluster(
    folder: Path,
    *,
    duplex: bool = False,
    place: dict[str, Any] | None = None,
    names: tuple[str, ...] = ("a", "b", "c"),
    **options: Any,
) -> Iterator[EnvoyCluster]:
    with ExitStack() as parts:
        workers = parts.enter_context(scripted(*names))
        fleet = followed(workers, options.pop("fleet", None))
        options.setdefault("router", Router(fleet))
        index = parts.enter_context(serving(fleet, place={"timeout_s": 60, **(place or {})}, **options))
        front = parts.enter_context(
            envoy.running(folder, [w.at for w in workers], [index.ext_proc], duplex=duplex)
        )
        assert eventually(lambda: front.healthy("workers") == len(workers) and front.healthy("picker") == 1)
        yield EnvoyCluster(workers, index, front)
