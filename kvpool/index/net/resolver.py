"""``Resolver``: addresses of host names, looked up in threads of their own.

The system's resolver may hang for half a minute and cannot be interrupted. So each lookup has a thread;
``MAX_LOOKUPS`` run at a time, ``MAX_LOOKUPS_OF_OWNER`` per owner (a tenant, in an index), others wait in
line. Callers wait on a future.

Threads: any. ``_lock`` guards all fields; no name is looked up under it.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache

from kvpool.errors import KVPoolError, NoThread
from kvpool.text import is_ip_address
from kvpool.threads import start_thread

FRESH_S = 5.0  # lifetime of addresses
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0  # of failed names
MAX_LOOKUPS = 16
MAX_LOOKUPS_OF_OWNER = 4
MAX_NAMES = 16384  # remembered

Addresses = tuple[str, ...]  # numeric, in the system's order of preference; at least one


class Unresolved(KVPoolError):
    """A name has no address now; says which, and why."""


@dataclass(eq=False)
class _Name:
    host: str
    owner: str
    trusted: bool
    answer: Future[Addresses]
    under_way: bool = True
    failures: int = 0  # in a row
    until: float = 0.0  # end of the answer's lifetime


class Resolver:
    """Gives addresses or ``Unresolved``. A hanging lookup does not delay the process's exit.

    ``allows``: whether an owner may get an address of a name (owner, address). ``trusted``: exempt (owner,
    host in lower case, port). ``clock``: monotonic seconds.
    """

    def __init__(
        self,
        *,
        allows: Callable[[str, str], bool] = lambda owner, address: True,
        trusted: Collection[tuple[str, str, int]] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._allows, self._trusted, self._clock = allows, trusted, clock
        self._lock = threading.Lock()
        # By owner, host and whether it is trusted; least recently requested first.
        self._names: OrderedDict[tuple[str, str, bool], _Name] = OrderedDict()
        self._line: OrderedDict[tuple[str, str, bool], None] = OrderedDict()  # waiting for a thread
        self._running: Counter[str] = Counter()  # by owner

    def resolve(self, host: str, owner: str = "", port: int = 0) -> Future[Addresses]:
        """A future of the addresses of a name or numeric address; never blocks. ``port``: of the connection.

        An answer lives for ``FRESH_S`` seconds, a failure for 0.5 to 30, growing. The future cannot be cancelled
        and lasts as long as the system's resolver: wait with a deadline. Errors, in the future: ``Unresolved``.
        """
        if _is_numeric(host):
            return _ended((host,))
        with self._lock:
            key = (owner, host, (owner, host.lower(), port) in self._trusted)
            name = self._names.get(key)
            if name is not None and (name.under_way or self._clock() < name.until):
                self._names.move_to_end(key)
                return name.answer
            if name is None:
                if not self._make_room():
                    return _ended(Unresolved(f"the name {host} is not looked up: {MAX_NAMES} others are"))
                name = self._names[key] = _Name(host, owner, key[2], Future())
            name.answer, name.under_way = _pending(), True
            self._names.move_to_end(key)
            self._line[key] = None
            self._start()
            return name.answer

    # ---- under the lock

    def _make_room(self) -> bool:
        if len(self._names) < MAX_NAMES:
            return True
        oldest = next((key for key, name in self._names.items() if not name.under_way), None)
        if oldest is not None:
            del self._names[oldest]
        return oldest is not None

    def _start(self) -> None:
        """Look up names in line while threads are free."""
        for key in list(self._line):
            if self._running.total() >= MAX_LOOKUPS:
                return
            if self._running[key[0]] < MAX_LOOKUPS_OF_OWNER:
                del self._line[key]
                self._running[key[0]] += 1
                name = self._names[key]
                thread = threading.Thread(
                    target=self._look_up, args=(name,), name="kvpool-resolver", daemon=True
                )
                try:
                    start_thread(thread)
                except NoThread as error:
                    self._note_end(name, ())
                    name.answer.set_exception(Unresolved(f"the name {name.host} is not looked up: {error}"))

    def _note_end(self, name: _Name, found: Addresses) -> None:
        name.under_way = False
        if found:
            name.failures, name.until = 0, self._clock() + FRESH_S
        else:
            backoff_s = min(MIN_BACKOFF_S * 2 ** min(name.failures, 16), MAX_BACKOFF_S)
            name.failures, name.until = name.failures + 1, self._clock() + backoff_s
        self._running[name.owner] -= 1
        if not self._running[name.owner]:
            del self._running[name.owner]

    # ---- in a thread of the name's own

    def _look_up(self, name: _Name) -> None:
        found: Addresses = ()
        why = "it has no address"
        try:
            known = socket.getaddrinfo(name.host, None, type=socket.SOCK_STREAM)
            addresses = dict.fromkeys(str(address[4][0]) for address in known)
            found = tuple(one for one in addresses if name.trusted or self._allows(name.owner, one))
            if addresses and not found:
                why = "its addresses are not in --worker-networks"
        except (OSError, UnicodeError) as error:  # UnicodeError: a label that is too long
            why = (error.strerror if isinstance(error, OSError) else str(error)) or "no reason given"
        with self._lock:
            self._note_end(name, found)
            self._start()
        if found:
            name.answer.set_result(found)
        else:
            name.answer.set_exception(Unresolved(f"the name {name.host} does not resolve: {why}"))


async def ended(found: Future[Addresses], timeout_s: float | None = None) -> None:
    """Wait for an answer, at most so long."""
    answer = asyncio.wrap_future(found)
    answer.add_done_callback(lambda one: one.cancelled() or one.exception())  # else asyncio logs it
    await asyncio.wait({answer}, timeout=timeout_s)


async def addresses_of(found: Future[Addresses]) -> Addresses:
    """Those of an answer, when it is there. Errors: ``Unresolved``, each a new one.

    An answer's own error is everybody's for up to 30 s: raised again, it would keep what each who asked for it holds.
    """
    await ended(found)
    if (error := found.exception()) is not None:
        raise Unresolved(str(error)) from error
    return found.result()


_is_numeric = lru_cache(4096)(is_ip_address)


def _pending() -> Future[Addresses]:
    """Shared by several waiters: none can cancel it."""
    future: Future[Addresses] = Future()
    future.set_running_or_notify_cancel()
    return future


def _ended(answer: Addresses | Unresolved) -> Future[Addresses]:
    future = _pending()
    if isinstance(answer, Unresolved):
        future.set_exception(answer)
    else:
        future.set_result(answer)
    return future
