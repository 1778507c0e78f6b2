"""The servers that hold a pool's keys: a named one, a cluster's primaries, or the one that sentinels name.

Asked over short redis-py connections. Answers are checked: a primary named by sentinels must call itself one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvpool import _native
from kvpool.errors import ConfigError, KVPoolError, StoreUnavailable
from kvpool.store.server.connection import connect, deadline
from kvpool.store.server.replies import words_of
from kvpool.store.url import StoreURL
from kvpool.threads import start_thread

if TYPE_CHECKING:
    import redis

TIMEOUT_S = 1.0  # per connect, request and reply
FIND_S = 8.0  # for all servers
LAST_SLOT = 16383
MAX_NODES = 1000
MAX_RANGES = LAST_SLOT + 1
SHOWN_NODES = 4  # in an error
PAUSE_S = 0.5  # between two rounds: at most two a second, however much fails
WAIT_S = 60.0
JOIN_S = 5.0

Ranges = Sequence[tuple[int, int]]  # first and last slot


class Primary(NamedTuple):
    """One server and its hash slots."""

    host: str
    port: int
    slots: Ranges

    def holds(self, slot: int) -> bool:
        return any(first <= slot <= last for first, last in self.slots)


class Primaries:
    """The servers to ask for topology: those of the URL, and discovered ones. Any thread."""

    def __init__(self, url: StoreURL, name: str) -> None:
        self._url, self._name = url, name
        self._asked = 0  # the next call starts elsewhere: views differ while a cluster changes
        self._found: tuple[tuple[str, int], ...] = ()

    def find(self) -> list[Primary]:
        """Ask servers in turn until one answers sensibly.

        Blocks for a second or two per silent server, and ``FIND_S`` in all. Errors: ``StoreUnavailable`` when
        none does, ``ConfigError`` for a permanent refusal; each with the first failure's words.
        """
        import redis

        if not self._url.nodes:
            return [Primary(self._url.host, self._url.port, ((0, LAST_SLOT),))]
        is_cluster = self._url.scheme == "valkey+cluster"
        known = list(dict.fromkeys((*self._found, *self._url.nodes) if is_cluster else self._url.nodes))
        start = self._asked % len(known)
        self._asked += 1
        failure: Exception | None = None
        end_s = time.monotonic() + FIND_S
        for host, port in known[start:] + known[:start]:
            left_s = end_s - time.monotonic()
            if failure is not None and left_s <= 0:
                break
            try:
                with deadline(left_s):
                    primaries = self._slots(host, port) if is_cluster else [self._named(host, port)]
            except ConfigError as error:
                failure = failure or error
                continue
            except Exception as error:  # any client error on any reply
                failure = failure or error
                continue
            self._found = tuple((primary.host, primary.port) for primary in primaries)
            return primaries
        if isinstance(failure, ConfigError):
            raise failure
        if isinstance(failure, (redis.AuthenticationError, redis.exceptions.NoPermissionError)):
            raise ConfigError(
                f"{self._name}: the server refuses: {failure}; correct user or password"
            ) from failure
        what = "nodes" if is_cluster else "sentinels"
        raise StoreUnavailable(
            f"{self._name}: none of its {what} names the servers of the pool: {failure}"
        ) from failure

    def urls(self) -> list[StoreURL]:
        """``find()``, as a URL per server."""
        if not self._url.nodes:
            return [self._url]
        return [self.at(primary.host, primary.port) for primary in self.find()]

    def url_of(self, slot: int) -> StoreURL:
        """The server of this slot. Errors: as ``find()``; ``StoreUnavailable`` for an unassigned slot."""
        if not self._url.nodes:
            return self._url
        for primary in self.find():
            if primary.holds(slot):
                return self.at(primary.host, primary.port)
        raise StoreUnavailable(f"{self._name}: no node serves slot {slot}")

    def at(self, host: str, port: int) -> StoreURL:
        """The URL of one of the servers."""
        return replace(self._url, scheme="valkey", nodes=(), service="", host=host, port=port)

    def _slots(self, host: str, port: int) -> list[Primary]:
        import redis

        with self._asking(self.at(host, port)) as server:
            server.set_response_callback("CLUSTER SLOTS", _as_it_is)  # versions of redis-py differ
            try:
                reply = server.execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]
            except redis.exceptions.NoPermissionError as error:
                raise ConfigError(f"{self._name}: {error}; allow +cluster|slots to this user") from error
            except redis.exceptions.ResponseError as error:
                if not words_of(error).startswith("ERR This instance has cluster support disabled"):
                    raise
                raise ConfigError(
                    f"{self._name}: {host}:{port} is no node of a cluster; write valkey://"
                ) from error
        return _primaries(reply, host)

    def _named(self, host: str, port: int) -> Primary:
        """The primary named by this sentinel, if it confirms its role."""
        asked = replace(
            self.at(host, port),
            user=self._url.sentinel_user,
            password=self._url.sentinel_password,
            password_file=self._url.sentinel_password_file,
            database=0,
        )
        with self._asking(asked) as sentinel:
            named: Any = sentinel.sentinel_get_master_addr_by_name(self._url.service)
        if named is None:
            raise ConfigError(f"{self._name}: {host}:{port} knows no service {self._url.service!r}")
        primary = address_of(*named[:2])
        if primary is None:
            raise _Implausible("it names a server without an address")
        with self._asking(self.at(*primary)) as server:
            role = server.role()
        if not isinstance(role, list) or not role or role[0] not in (b"master", "master"):
            raise _Implausible(f"{primary[0]}:{primary[1]}, which sentinels name, is no primary yet")
        return Primary(*primary, ((0, LAST_SLOT),))

    @contextmanager
    def _asking(self, url: StoreURL) -> Iterator[redis.Redis]:
        with connect(url, timeout_s=TIMEOUT_S, role="topology") as server:
            yield server


class Topology(Protocol):
    """What a data path knows of its servers; see ``_native.Topology``. Any thread."""

    def install(self, found: Sequence[Primary], /) -> None: ...
    def wait_until_stale(self, timeout_s: float, /) -> bool: ...
    def close(self) -> None: ...
    def closed(self) -> bool: ...


class TopologyWatch:
    """Installs ``primaries``' answer into ``topology``: at construction, then whenever it is stale.

    Ownership: the caller closes it after the engine; dropping the store closes its topology, which also ends
    the thread. The thread holds no other reference to the store. Blocks as ``Primaries.find``. Errors: of the
    first reading, unless servers need not answer (``must_answer``); later ones are retried.
    """

    def __init__(self, topology: Topology, primaries: Primaries, must_answer: bool = True) -> None:
        self._topology, self._primaries = topology, primaries
        self._pid = os.getpid()
        self._closed = threading.Event()
        is_current = True
        try:
            self._install()
        except StoreUnavailable:
            if must_answer:
                raise
            is_current = False
        self._thread = threading.Thread(
            target=self._run, args=(is_current,), name="kvpool-topology", daemon=True
        )
        start_thread(self._thread)

    def close(self) -> None:
        """End the thread; blocks for a reading in progress: a second or two per silent server."""
        if os.getpid() != self._pid:
            return  # a forked child has no such thread
        self._closed.set()
        self._topology.close()
        self._thread.join(JOIN_S)

    def _run(self, is_current: bool) -> None:
        while not self._topology.closed():
            if is_current and not self._topology.wait_until_stale(WAIT_S):
                continue
            try:
                self._install()
                is_current = True
            except KVPoolError:
                is_current = False
            self._closed.wait(PAUSE_S)

    def _install(self) -> None:
        found = self._primaries.find()
        try:
            self._topology.install(found)
        except ValueError as error:
            raise StoreUnavailable(f"what the servers say makes no sense: {error}") from error


class _Implausible(Exception):
    """A server's answer is impossible, or premature."""


def _as_it_is(reply: Any, **_: Any) -> Any:
    return reply


def _primaries(reply: Any, asked: str) -> list[Primary]:
    """Parse CLUSTER SLOTS: ``[[first, last, [host, port, id, [name, value, ...]], ...], ...]``.

    No host: the ``asked`` one. A node without a usable address is left out, with its slots: a later map has it.
    """
    if not isinstance(reply, list) or len(reply) > MAX_RANGES:
        raise _Implausible("its reply to CLUSTER SLOTS makes no sense")
    slots: dict[tuple[str, int], list[tuple[int, int]]] = {}
    left_out: set[str] = set()
    for entry in reply:
        try:
            first, last, (host, port, *more), *_ = entry
        except (TypeError, ValueError) as error:
            raise _Implausible("its reply to CLUSTER SLOTS makes no sense") from error
        if not (type(first) is int and type(last) is int and 0 <= first <= last <= LAST_SLOT):
            raise _Implausible("its reply to CLUSTER SLOTS names slots that there are not")
        primary = address_of(host or asked, port) or address_of(_ip(more), port)
        if primary is None:
            left_out.add(f"{_text(host)!r:.80}:{port!r:.10}")
        else:
            slots.setdefault(primary, []).append((first, last))
    if left_out and not slots:
        raise _Implausible(f"its nodes have no address: {', '.join(sorted(left_out)[:SHOWN_NODES])}")
    if not slots:
        raise _Implausible("no node of the cluster serves any slot")
    if len(slots) > MAX_NODES:
        raise _Implausible(f"a cluster has at most {MAX_NODES} nodes")
    return [Primary(*server, ranges) for server, ranges in sorted(slots.items())]


def _ip(more: Sequence[Any]) -> Any:
    """A node's numeric address beside its preferred one, which it may not know yet."""
    described = more[1] if len(more) > 1 and isinstance(more[1], list) else []
    return dict(zip(described[::2], described[1::2], strict=False)).get(b"ip")


def address_of(host: Any, port: Any) -> tuple[str, int] | None:
    """As a server names another one; None: that is no address."""
    host = _text(host)
    if (
        not isinstance(host, str)
        or not _native.is_host(host)
        or type(port) is not int
        or not 1 <= port <= 65535
    ):
        return None
    return host, port


def _text(host: Any) -> Any:
    return host.decode("ascii", "replace") if isinstance(host, bytes) else host
