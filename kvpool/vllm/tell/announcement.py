"""An engine's announcement to indexes (its name, its KV events) and the thread that writes it.

``describe`` reads vLLM's configuration (``KVEventsConfig``, ``ZmqEventPublisher``) and our settings;
``local_host`` asks the system. ``EngineAnnouncer`` has a thread: a slow pool delays neither start nor step.

Threads: the worker's model thread calls; the announcing thread sets ``_announcer`` and ``_announced``.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import itertools
import logging
import re
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvpool.config import PoolConfig, hash_seed
from kvpool.discovery.announcer import Announcer
from kvpool.discovery.facts import KEEP_EVERY_S, announce_facts, keep_facts
from kvpool.discovery.worker import MAX_SERVED, MAX_SERVED_NBYTES, Publisher, Worker
from kvpool.errors import KVPoolError, NoThread
from kvpool.key.hashing import seed_id
from kvpool.key.key import EPOCH_FACT, Namespace
from kvpool.store import Store, StoreURL
from kvpool.store.file import pool_id
from kvpool.threads import start_thread
from kvpool.vllm.engine import internals
from kvpool.vllm.tell.media import said

logger = init_logger("vllm.kvpool")


LOOPBACK = "127.0.0.1"
HTTP_PORT = 8000  # vLLM's, without --port
_TCP = re.compile(r"tcp://(.+):([0-9]{1,5})")
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_SEEN_BY_NONE = "indexes and routers will not see what this worker holds (the pool works all the same)"


class Announcement(NamedTuple):
    """``worker``: with this rank's publisher. ``problems``: obstacles; ``events_off``: the only one. ``media``: of
    ``Announcer``.
    """

    worker: Worker
    problems: tuple[str, ...] = ()
    events_off: bool = False
    media: Callable[[], tuple[str, ...]] | None = None


def describe(config: VllmConfig, cache: KVCacheConfig, settings: PoolConfig, namespace: str) -> Announcement:
    """This rank's announcement. ``namespace``: 32 hex digits."""
    host = settings.advertise_host or local_host(settings.pool)
    command = _Command.read(sys.argv)
    http = f"{_bracketed(host)}:{settings.http_port or command.port}"
    dp_rank = _dp_rank(config)
    where = _where(config, host, dp_rank)
    served = config.model_config.served_model_name
    model = served[0] if isinstance(served, list) else served or config.model_config.model
    _, hash_block_tokens = internals.block_sizes(config, cache)
    worker = Worker(
        name=settings.worker or where.name or http,
        model=model,
        block_tokens=hash_block_tokens,
        hash_seed_id=seed_id(hash_seed()),
        publishers=(Publisher(dp_rank, where.events, where.replay),),
        tenant=settings.tenant,
        hash_algorithm=config.cache_config.prefix_caching_hash_algo,
        address=f"{command.scheme}://{http}",
        incarnation=secrets.token_hex(8),
        namespace=namespace,
        names=_further(command.served, model),
        near=_near(settings.pool),
    )
    media = functools.partial(said, config.instance_id)
    return Announcement(worker, where.problems, where.events_off, media)


def _near(pool: str) -> str:
    near = StoreURL.parse(pool).near
    return pool_id(near.path) if near is not None else ""


class _Command(NamedTuple):
    """A server's HTTP address and served names by its command line.

    ``sys.argv`` is the same in all of an engine's processes, forked or spawned
    (``multiprocessing.spawn.get_preparation_data``); vLLM's configuration lacks the address, and all names but one.
    """

    port: int = HTTP_PORT
    scheme: str = "http"
    served: Sequence[str] = ()

    @classmethod
    def read(cls, arguments: Sequence[str]) -> _Command:
        given: dict[str, str] = {}
        for text, after in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
            option, separator, value = text.partition("=")
            given[option.replace("_", "-")] = value if separator else after
        at = [
            place for place, text in enumerate(arguments) if text.replace("_", "-") == "--served-model-name"
        ]
        behind = arguments[at[-1] + 1 :] if at else ()
        port = given.get("--port", "")
        return cls(
            int(port) if re.fullmatch("[0-9]{1,5}", port) and 1 <= int(port) <= 65535 else HTTP_PORT,
            "https" if given.get("--ssl-certfile") else "http",
            list(itertools.takewhile(lambda text: not text.startswith("-"), behind)),
        )


def _further(served: Sequence[str], model: str) -> tuple[str, ...]:
    """Names beside the model's, as many as a record has room for: an index reads all in ``/v1/models``."""
    names: list[str] = []
    left_nbytes = MAX_SERVED_NBYTES
    for name in dict.fromkeys(served if model in served else ()):
        if name not in ("", model) and name.isprintable() and len(names) < MAX_SERVED:
            left_nbytes -= len(name.encode())
            if left_nbytes >= 0:
                names.append(name)
    return tuple(names)


class _Where(NamedTuple):
    """The address of this rank's events, and the worker's name from it; empty: none."""

    name: str = ""
    events: str = ""
    replay: str = ""
    problems: tuple[str, ...] = ()
    events_off: bool = False


def _where(config: VllmConfig, host: str, dp_rank: int) -> _Where:
    events = config.kv_events_config
    if events is None or not events.enable_kv_cache_events or events.publisher != "zmq":
        wanted = (
            '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", '
            '"replay_endpoint": "tcp://*:5657"}'
        )
        own = "with ports of its own for each engine of a host"
        problem = f"{_SEEN_BY_NONE}: add --kv-events-config '{wanted}', {own}"
        return _Where(problems=(problem,), events_off=True)
    try:
        published = internals.rank_endpoint(events.endpoint, dp_rank)
        replayed = internals.rank_endpoint(events.replay_endpoint, dp_rank)
    except ValueError as error:  # the engine rejects it too
        return _Where(problems=(f"{_SEEN_BY_NONE}: --kv-events-config: {error}",))
    assert published is not None
    if not _listens(published):
        problem = (
            f"{_SEEN_BY_NONE}: with the endpoint {events.endpoint} vLLM does not listen for subscribers but "
            "connects to one; write tcp://*:PORT"
        )
        return _Where(problems=(problem,))
    address = _reachable(published, host)
    if address is None:
        problem = (
            f"{_SEEN_BY_NONE}: others cannot reach the endpoint {events.endpoint}; write tcp://*:PORT, "
            "with a port of its own for each engine of a host"
        )
        return _Where(problems=(problem,))
    name = _name(config, host, events.endpoint, published)
    replay = _reachable(replayed, host) if replayed else None
    if replay is not None:
        return _Where(name, address, replay)
    what = f"the replay endpoint {replayed} is nowhere to be found" if replayed else "there is none"
    problem = (
        "an index that misses an event of this worker must forget all that it holds, for it cannot ask again: "
        f'{what}; add "replay_endpoint":"tcp://*:PORT" to --kv-events-config'
    )
    return _Where(name, address, problems=(problem,))


def local_host(pool: str) -> str:
    """This host's address on the first route to the pool's server; without one the loopback. Sends nothing."""
    url = StoreURL.parse(pool)
    if not url.host:
        return LOOPBACK
    with contextlib.suppress(
        socket.gaierror, UnicodeError
    ):  # UnicodeError: a label that is empty or too long
        for family, _, _, _, address in socket.getaddrinfo(url.host, url.port, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return LOOPBACK


def _dp_rank(config: VllmConfig) -> int:
    """The rank that vLLM adds to ports (``EventPublisherFactory.create`` in its scheduler)."""
    parallel = config.parallel_config
    return int(getattr(parallel, "data_parallel_index", parallel.data_parallel_rank))


def _listens(endpoint: str) -> bool:
    """As ``ZmqEventPublisher._is_bind_endpoint``: other endpoints are connected to."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _name(config: VllmConfig, host: str, endpoint: str, published: str) -> str:
    """HOST:PORT of the events, unique on a host; ranks behind one HTTP address are named by rank 0's port."""
    own = getattr(config.parallel_config, "data_parallel_external_lb", False)
    where = (published if own else endpoint).removeprefix("ipc://")
    match = _TCP.fullmatch(where)
    return f"{_bracketed(host)}:{match[2] if match else _NOT_IN_A_NAME.sub('-', where).strip('-')[-60:]}"


def _reachable(endpoint: str, host: str) -> str | None:
    """The remote address of a listening ``endpoint``; None if unknown."""
    if endpoint.startswith("ipc://"):
        return endpoint
    match = _TCP.fullmatch(endpoint)
    if match is None or not 1 <= int(match[2]) <= 65535:
        return None
    return f"tcp://{_bracketed(_one_address(match[1]) or host)}:{match[2]}"


def _one_address(listens: str) -> str | None:
    """The only address of a listener; None: several, or an interface by name."""
    try:
        address = ipaddress.ip_address(listens.strip("[]"))
    except ValueError:
        return None
    return None if address.is_unspecified else str(address)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


CLOSE_S = 5.0  # longest wait for the thread
FACTS_RETRY_S = 5.0  # while the pool does not take them


class EngineAnnouncer:
    """``model``: its display name. ``describe``: the engine's announcement, given its namespace."""

    def __init__(
        self, config: PoolConfig, model: str, describe: Callable[[str], Announcement] | None
    ) -> None:
        self._config, self._model, self._describe = config, model, describe
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._left = threading.Event()  # the current namespace
        self._announcer: Announcer | None = None
        self._announced: Namespace | None = None  # whose facts are in the pool
        self._compared: Namespace | None = None  # with others, in the log

    @property
    def asked(self) -> bool:
        return self._announcer is not None and self._announcer.requested

    def enter(self, store: Store, namespace: Namespace | None) -> None:
        """Continue in ``namespace``; None: without the pool, of which indexes then count nothing. Does not block."""
        self.leave()
        self._left = threading.Event()
        fresh = threading.Thread(
            target=self._announce_after,
            args=(self._thread, store, namespace, self._left),
            name="kvpool-announcing",
            daemon=True,
        )
        try:
            start_thread(fresh)
        except NoThread as error:  # never reaches the engine
            logger.warning("kvpool: this engine is not announced: %s", error)
        else:
            self._thread = fresh

    def leave(self) -> None:
        """Continue without a namespace for a while; the announcement stays."""
        self._left.set()

    def close(self, store: Store) -> None:
        """Withdraw the engine. Blocks for ``CLOSE_S`` at most, plus the withdrawal."""
        self._closed.set()
        self._left.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        if self._announcer is not None:
            self._announcer.close()
            self._announcer = None
        self._withdraw_epoch(store)

    def _announce_after(
        self,
        earlier: threading.Thread | None,
        store: Store,
        namespace: Namespace | None,
        left: threading.Event,
    ) -> None:
        if earlier is not None:
            earlier.join()
        if left.is_set():  # closed meanwhile, or in another namespace
            return
        if namespace is None:
            if self._announcer is not None:
                self._announcer.enter("")
            return
        has_facts = self._announce_facts(store, namespace)
        if self._announcer is not None:
            self._announcer.enter(namespace.hex)
        elif self._describe is not None:
            self._announce_worker(store, self._describe, namespace)
        if self._closed.is_set() and self._announcer is not None:  # it took longer than close() waits
            self._announcer.close()
        while not left.wait(KEEP_EVERY_S if has_facts else FACTS_RETRY_S):
            if has_facts:
                with contextlib.suppress(KVPoolError):  # loads and lookups already log the pool's state
                    keep_facts(store, namespace, self._model)
            else:
                has_facts = self._announce_facts(store, namespace, logging.DEBUG)

    def _announce_facts(self, store: Store, namespace: Namespace, level: int = logging.WARNING) -> bool:
        """Record the facts, and log how this worker's differ from earlier ones. ``level``: of a failure."""
        self._withdraw_epoch(store)
        self._announced = namespace
        try:
            differences = announce_facts(store, namespace, self._model)
        except KVPoolError as error:
            logger.log(level, "kvpool could not announce its namespace: %s", error)
            return False
        for sentence in differences if namespace != self._compared else ():
            logger.warning("kvpool: %s", sentence)
        self._compared = namespace
        return True

    def _withdraw_epoch(self, store: Store) -> None:
        if self._announced is not None and EPOCH_FACT in self._announced.facts:
            with contextlib.suppress(KVPoolError):
                store.withdraw(self._announced.facts_key)

    def _announce_worker(
        self, store: Store, describe: Callable[[str], Announcement], namespace: Namespace
    ) -> None:
        """Announce this worker to indexes. Obstacles are only logged."""
        try:
            announced = describe(namespace.hex)
            for problem in announced.problems:
                logger.log(logging.INFO if announced.events_off else logging.WARNING, "kvpool: %s", problem)
            worker = announced.worker
            self._announcer = Announcer(
                store,
                worker,
                lease_s=self._config.lease_s,
                log=logger,
                media=announced.media,
            )
        except Exception as error:  # the engine starts all the same
            logger.warning("kvpool could not announce this worker: %s: %s", type(error).__name__, error)
            return
        (publisher,) = worker.publishers
        logger.info(
            "kvpool: announced as worker %s at %s, rank %d, events %s, replay %s",
            worker.id,
            worker.address,
            publisher.dp_rank,
            publisher.events or "none",
            publisher.replay or "none",
        )
