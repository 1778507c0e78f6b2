"""``Names``: which workers serve a name, as a model or as a LoRA adapter of it.

A worker serves its announced model and names, and those of its latest ``/v1/models``, which has the adapters that
are loaded now. Names are apart by tenant, as workers are.

Threads: callers of ``enter``, ``leave`` and ``read`` hold the fleet's lock. All other methods take no lock: each
reads a whole value, or changes one in a single step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple

from kvpool.discovery.worker import MAX_TEXT_NBYTES, Worker, check_text
from kvpool.errors import ConfigError, UnknownModel
from kvpool.index.fleet.partition import Members, Partition
from kvpool.index.limits import Limits
from kvpool.key.key import check_tenant
from kvpool.text import unknown

MAX_READ = 1024  # names of a worker beside the announced ones; vLLM's own limits of adapters are far below
NAME_NBYTES = 512  # of memory beside a name's text and its adapter's path
# Of the known models, in an error; with more, or a longer name, the nearest is not sought: callers could ask for
# 0.1 s of the event loop by each name.
MAX_NAMED, MAX_COMPARED = 10, 128

logger = logging.getLogger("kvpool.index")


class Name(NamedTuple):
    """``adapter``: its path, as the worker loaded it, which enters the hash; empty: the model itself.
    ``max_model_len``: tokens of a prompt and its answer, as the worker lists it; 0: unknown.
    """

    text: str
    adapter: str = ""
    max_model_len: int = 0

    @property
    def lora(self) -> tuple[str, str] | None:
        return (self.text, self.adapter) if self.adapter else None


class Serving(NamedTuple):
    """The ranks of a partition that serve a name, and the adapter that it means there."""

    partition: Partition
    members: Members
    lora: tuple[str, str] | None = None


class _Servers:
    """Workers of one partition that serve a name which is not their model's. ``workers``: by name."""

    def __init__(self, partition: Partition, lora: tuple[str, str] | None) -> None:
        self.partition, self.lora = partition, lora
        self.workers: dict[str, None] = {}
        self._state = object()  # another one after each change
        self._known: tuple[Members, object, Members] | None = None

    def add(self, worker: str) -> None:
        if worker not in self.workers:
            self.workers[worker] = None
            self._state = object()

    def remove(self, worker: str) -> None:
        if worker in self.workers:
            self.workers.pop(worker, None)
            self._state = object()

    @property
    def serving(self) -> Serving:
        members, state, known = self.partition.members, self._state, self._known
        if known is None or known[0] is not members or known[1] is not state:
            known = self._known = (members, state, members.among(frozenset(self.workers)))
        return Serving(self.partition, known[2], self.lora)


class _Worker:
    """The names of one worker but its model's: ``known`` are entered."""

    def __init__(self, worker: Worker, partition: Partition) -> None:
        self.worker, self.partition = worker, partition
        self.read: dict[str, Name] = {}
        self.known: dict[str, Name] = {}
        self.nbytes = 0
        self.is_refused = False


class Names:
    """``models``: partitions by (tenant, model), as of ``Workers``. ``limits``: has room for each name."""

    def __init__(self, models: Mapping[tuple[str, str], tuple[Partition, ...]], limits: Limits) -> None:
        self._models, self._limits = models, limits
        self._workers: dict[str, _Worker] = {}  # by id
        self._servers: dict[str, dict[str, tuple[_Servers, ...]]] = {}  # by tenant, and name
        self._doubted: set[str] = set()  # workers whose list may be another now

    # ---- changes

    def enter(self, worker: Worker, partition: Partition) -> None:
        """A worker that joins, or whose announcement has changed."""
        known = self._workers.setdefault(worker.id, _Worker(worker, partition))
        known.worker = worker
        self._update(known)

    def leave(self, worker_id: str) -> None:
        if (known := self._workers.pop(worker_id, None)) is not None:
            self._doubted.discard(worker_id)
            for name in known.known.values():
                self._remove(known, name)
            self._limits.give(known.nbytes, known.worker.tenant)

    def read(self, worker_id: str, names: Iterable[Name]) -> None:
        """All that a present worker lists now. Names that no worker may announce are left out."""
        if (known := self._workers.get(worker_id)) is not None:
            known.read = {name.text: name for name in islice(names, MAX_READ) if _is_fit(name)}
            self._update(known)

    def _update(self, of: _Worker) -> None:
        worker = of.worker
        wanted = {text: Name(text) for text in worker.names} | of.read
        wanted.pop(worker.model, None)
        nbytes = _nbytes(wanted.values())
        if nbytes > of.nbytes and not self._limits.take(nbytes - of.nbytes, worker.tenant):
            if not of.is_refused:
                logger.warning(
                    "worker %s: no memory is left for its %d names, and requests for new ones are placed by load: "
                    "raise --max-memory",
                    worker.id, len(wanted),
                )  # fmt: skip
            of.is_refused = True
            wanted = {text: name for text, name in wanted.items() if of.known.get(text) == name}
            nbytes = _nbytes(wanted.values())
        else:
            of.is_refused = False
        self._limits.give(max(0, of.nbytes - nbytes), worker.tenant)
        for text, name in of.known.items():
            if wanted.get(text) != name:
                self._remove(of, name)
        for name in wanted.values():
            self._add(of, name)  # a denied one, too
        of.known, of.nbytes = wanted, nbytes

    def _add(self, of: _Worker, name: Name) -> None:
        named = self._servers.setdefault(of.worker.tenant, {})
        several = named.get(name.text, ())
        servers = next(
            (one for one in several if one.partition is of.partition and one.lora == name.lora), None
        )
        if servers is None:
            servers = _Servers(of.partition, name.lora)
            named[name.text] = (*several, servers)
        servers.add(of.worker.name)

    def _remove(self, of: _Worker, name: Name) -> None:
        tenant = of.worker.tenant
        named = self._servers.get(tenant, {})
        several = named.get(name.text, ())
        for servers in several:
            if servers.partition is of.partition and servers.lora == name.lora:
                servers.remove(of.worker.name)
        if left := tuple(one for one in several if one.workers):
            named[name.text] = left
        else:
            named.pop(name.text, None)
        if not named:
            self._servers.pop(tenant, None)

    # ---- answers of workers

    def deny(self, worker_id: str, name: str) -> bool:
        """A worker says that it serves no such name: forgotten until the next reading. False: it was not read there.

        Announced names stay: an engine serves them as long as it runs.
        """
        known = self._workers.get(worker_id)
        if known is None or name not in known.read or name in (known.worker.model, *known.worker.names):
            return False
        for servers in self._servers.get(known.worker.tenant, {}).get(name, ()):
            if servers.partition is known.partition:
                servers.remove(known.worker.name)
        return True

    def note(self, worker_id: str, name: str, *, served: bool) -> None:
        """How a worker answered to a name. If that is not as it was read, it is soon read again."""
        known = self._workers.get(worker_id)
        if known is not None and name and served != (name == known.worker.model or name in known.known):
            self._doubted.add(worker_id)

    def take_doubt(self, worker_id: str) -> bool:
        """Whether a worker was doubted; no longer."""
        was_doubted = worker_id in self._doubted
        self._doubted.discard(worker_id)
        return was_doubted

    # ---- answers to requests

    def serving(self, tenant: str, name: str) -> list[Serving]:
        """Who serves a name; empty: a known model without workers now. Errors: ``ConfigError``; ``UnknownModel``."""
        partitions = self._models.get((tenant, name)) if isinstance(name, str) else None
        serving = [] if partitions is None else [Serving(one, one.members, None) for one in partitions]
        if tenant in self._servers and isinstance(name, str):  # most tenants have none
            serving += [one.serving for one in self._others(tenant, name)]
        if partitions is None and not serving:
            raise self._unknown(tenant, name)
        return serving

    def knows(self, tenant: str, name: str) -> bool:
        return (tenant, name) in self._models or bool(self._others(tenant, name))

    def check(self, tenant: str, name: str) -> None:
        """Errors: as ``serving``."""
        if not self.knows(tenant, name):
            raise self._unknown(tenant, name)

    def model(self, tenant: str, name: str) -> str:
        """Whose tokens requests for ``name`` have; itself, if workers of several models serve it, or none."""
        models = [name] if (tenant, name) in self._models else []
        models += [one.partition.key.model for one in self._others(tenant, name)]
        return models[0] if len(set(models)) == 1 else name

    def models(self, tenant: str) -> list[str]:
        return [name for owner, name in list(self._models) if owner == tenant]

    def default(self, tenant: str) -> str:
        """The model of a request that names none, for which each engine takes its own; empty: there are several."""
        models = self.models(tenant)
        return models[0] if len(models) == 1 else ""

    def are_several(self, tenant: str) -> bool:
        """Whether requests of a tenant may name one or another."""
        return len(self.models(tenant)) > 1 or bool(self._servers.get(tenant))

    def listed(self, tenant: str, most: int) -> list[tuple[Name, str]]:
        """The names of present workers, each with its model, as one of the workers lists it: all models, and behind
        them the ``most`` other names that were known first.
        """
        models = {
            name: rank.worker
            for (owner, name), partitions in list(self._models.items())
            if owner == tenant
            for partition in partitions
            for rank in partition.members.ranks
            if rank.worker.address
        }
        others = islice(self._servers.get(tenant, {}).copy().items(), most)  # only a copy is one step
        return [
            *((self._read(worker.id, Name(name)), name) for name, worker in sorted(models.items())),
            *sorted(
                (
                    self._read(f"{tenant}/{worker}", Name(text, one.lora[1] if one.lora else "")),
                    one.partition.key.model,
                )
                for text, several in others
                if text not in models
                for one in [one for one in several if one.workers][:1]
                for worker in list(one.workers)[:1]
            ),
        ]

    def _read(self, worker_id: str, name: Name) -> Name:
        known = self._workers.get(worker_id)
        return name if known is None else known.read.get(name.text, name)

    def _others(self, tenant: str, name: str) -> list[_Servers]:
        return [one for one in self._servers.get(tenant, {}).get(name, ()) if one.workers]

    def _unknown(self, tenant: str, name: str) -> Exception:
        check_tenant(tenant)
        if not isinstance(name, str) or not name or len(name) > MAX_TEXT_NBYTES:
            return ConfigError(f"name the model, with at most {MAX_TEXT_NBYTES} characters")
        if models := self.models(tenant):
            return UnknownModel(_unknown_model(name, models))
        return UnknownModel(  # names no other tenant: the caller may have no access to it
            f'unknown model "{name}": this index follows no worker of tenant "{tenant}"; kvpool top shows whom it '
            "follows, kvpool doctor why not others"
        )


def _is_fit(name: Name) -> bool:
    try:
        check_text("a name", name.text, MAX_TEXT_NBYTES, empty=False)
        check_text("the path of an adapter", name.adapter, MAX_TEXT_NBYTES)
    except ConfigError:
        return False
    return True


def _nbytes(names: Iterable[Name]) -> int:
    return sum(NAME_NBYTES + len(name.text) + len(name.adapter) for name in names)


def _unknown_model(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    if len(names) <= MAX_NAMED and len(name) <= MAX_COMPARED:
        return unknown("model", name, names)
    are = "known are" if len(names) <= MAX_NAMED else f"{len(names)} are known, among them"
    return f'unknown model "{name}"; {are} {", ".join(names[:MAX_NAMED])}'
