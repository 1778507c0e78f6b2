"""Notices of changed keys from Redis or Valkey: the invalidation messages of client tracking.

``CLIENT TRACKING ON BCAST PREFIX kvpool:``, redirected to the asking connection. The server sends them for
each write, deletion, eviction, expiry and flush, whatever its settings
(docs/decisions/0029-mark-and-sweep-the-pool.md).

Threads: one per server reads its connection and fills the ``_Inbox``, whose lock guards its fields. The
thread that calls ``take`` owns everything else.
"""

from __future__ import annotations

import threading
import time
from contextlib import closing
from typing import Any

from kvpool.errors import KVPoolError, NoThread, RepliesTooLarge
from kvpool.key.key import KEY_PREFIX, is_key
from kvpool.store.server.connection import connect, deadline
from kvpool.store.server.topology import Primaries
from kvpool.store.store import Invalidations
from kvpool.store.url import StoreURL
from kvpool.threads import start_thread

TIMEOUT_S = 2.0  # of the connect and each reply
POLL_S = 0.25  # latency of a subscriber's end
PING_S = 5.0  # silence before a PING
LINGER_S = 0.01  # notices are gathered this long before take() returns
SERVERS_S = 5.0  # between two readings of the list of servers
RETRY_S = 1.0
REFUSED_S = 30.0  # pause after a server refused, or sent too much
MAX_KEYS = 1 << 16  # pending for take(); beyond it all keys count as missed
CLOSE_S = 5.0

CHANNEL = "__redis__:invalidate"
ADVICE = f"allow +client|id +client|tracking +subscribe &{CHANNEL}"


class ServerNotices:
    """Subscribes to each of ``primaries``, again after a loss or a replacement. See ``Notices``."""

    def __init__(self, primaries: Primaries, name: str) -> None:
        self._primaries, self._name = primaries, name
        self._inbox = _Inbox()
        self._subscribers: dict[StoreURL, _Subscriber] = {}
        self._asked_s = -SERVERS_S
        self._problem = ""

    def take(self, timeout_s: float) -> Invalidations:
        self._subscribe()
        problems = (one.problem for one in self._subscribers.values() if one.problem)
        return self._inbox.take(timeout_s)._replace(problem=next(problems, self._problem))

    def close(self) -> None:
        self._inbox.closed.set()
        for subscriber in self._subscribers.values():
            subscriber.join()

    def _subscribe(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._asked_s + SERVERS_S:
            self._asked_s = now_s
            try:
                urls = self._primaries.urls()
                self._problem = ""
            except KVPoolError as error:
                self._problem, urls = str(error), list(self._subscribers)
            for url in self._subscribers.keys() - urls:
                self._subscribers.pop(url).dismiss()
            for url in urls:
                if url not in self._subscribers:
                    self._subscribers[url] = _Subscriber(url, self._name, self._inbox)
        for subscriber in self._subscribers.values():
            subscriber.open()


class _Inbox:
    def __init__(self) -> None:
        self.closed = threading.Event()
        self._something = threading.Event()
        self._lock = threading.Lock()
        self._keys: dict[str, None] = {}
        self._emptied = self._missed = False

    def add(self, keys: list[str] | None) -> None:
        """``keys``: None for a flush."""
        with self._lock:
            if keys is None:
                self._emptied = True
            elif len(self._keys) + len(keys) <= MAX_KEYS:
                self._keys.update(dict.fromkeys(keys))
            else:
                self._keys, self._missed = {}, True
            if self._keys or self._emptied or self._missed:
                self._something.set()

    def miss(self) -> None:
        with self._lock:
            self._missed = True
        self._something.set()

    def take(self, timeout_s: float) -> Invalidations:
        if self._something.wait(timeout_s):
            self.closed.wait(min(LINGER_S, timeout_s))
        with self._lock:
            taken = Invalidations(list(self._keys), self._emptied, self._missed, "")
            self._keys, self._emptied, self._missed = {}, False, False
            self._something.clear()
        return taken


class _Subscriber:
    """Follows one server: a thread per connection, restarted a while after each loss."""

    def __init__(self, url: StoreURL, name: str, inbox: _Inbox) -> None:
        self._url, self._name, self._inbox = url, name, inbox
        self._thread: threading.Thread | None = None
        self._dismissed = threading.Event()
        # Written by the thread before it ends, read by the caller.
        self.problem = ""
        self._again_s = 0.0

    def open(self) -> None:
        """Start the thread if none runs and the pause is over."""
        if (self._thread is None or not self._thread.is_alive()) and time.monotonic() >= self._again_s:
            self._thread = threading.Thread(target=self._run, name="kvpool-notices", daemon=True)
            try:
                start_thread(self._thread)
            except NoThread as error:
                self._thread, self.problem = None, f"{self._name}: {error}"
                self._again_s = time.monotonic() + RETRY_S

    def dismiss(self) -> None:
        self._dismissed.set()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        import redis

        try:
            with (
                connect(self._url, timeout_s=TIMEOUT_S, role="notices") as server,
                closing(_Tracking(server)) as tracking,
            ):
                self.problem = ""
                self._inbox.miss()  # a new connection missed earlier changes
                while not (self._inbox.closed.is_set() or self._dismissed.is_set()):
                    tracking.read(self._inbox)
        except (redis.RedisError, OSError, ValueError, RepliesTooLarge) as error:
            # Too large counts as refusal: names of many MiB would otherwise cost a round every second.
            refused = isinstance(error, redis.exceptions.ResponseError | RepliesTooLarge)
            self._again_s = time.monotonic() + (REFUSED_S if refused else RETRY_S)
            advice = (
                f"; {ADVICE} to this user" if isinstance(error, redis.exceptions.NoPermissionError) else ""
            )
            self.problem = f"{self._name}: {error}{advice}"


class _Tracking:
    """One tracked connection. Errors: redis-py's; ``ValueError`` for a malformed message."""

    def __init__(self, server: Any) -> None:
        # redis-py's PubSub reconnects by itself, and the new connection is not tracked.
        self._connection: Any = server.connection_pool.make_connection()
        try:
            self._connection.connect()
            own = self._ask("CLIENT", "ID")
            self._ask("CLIENT", "TRACKING", "ON", "REDIRECT", own, "BCAST", "PREFIX", KEY_PREFIX)
            self._ask("SUBSCRIBE", CHANNEL)
        except BaseException:
            self.close()
            raise
        self._received_s = time.monotonic()
        self._pinged = False

    def read(self, inbox: _Inbox) -> None:
        """Wait at most ``POLL_S`` for a message, and put it into ``inbox``."""
        with deadline(POLL_S):  # past the last step's end it would not wait at all
            self._connection.extend()
            comes = self._connection.can_read(timeout=POLL_S)
        if comes:
            self._connection.extend()
            message: Any = self._connection.read_response()
            self._received_s, self._pinged = time.monotonic(), False
            if not isinstance(message, list) or not message:
                raise ValueError("it sent no message of a subscription")
            if message[0] == b"message" and len(message) == 3:
                inbox.add(_block_keys(message[2]))
            return
        silence_s = time.monotonic() - self._received_s
        if self._pinged and silence_s > PING_S + TIMEOUT_S:
            raise ValueError("it has fallen silent")
        if not self._pinged and silence_s > PING_S:
            self._pinged = True
            self._connection.send_command("PING", check_health=False)

    def close(self) -> None:
        self._connection.disconnect()

    def _ask(self, *words: Any) -> Any:
        self._connection.send_command(*words, check_health=False)
        return self._connection.read_response()


def _block_keys(told: Any) -> list[str] | None:
    """Block keys in a message; None: a flush."""
    if told is None:
        return None
    if not isinstance(told, list):
        raise ValueError("it sent no list of keys")
    names = (name.decode("ascii", "replace") for name in told if isinstance(name, bytes))
    return [name for name in names if is_key(name)]


def refusal(url: StoreURL) -> str:
    """The server's reason to refuse this user notices; empty: none. Blocks for some seconds."""
    import redis

    try:
        with connect(url, timeout_s=TIMEOUT_S, role="doctor") as server:
            _Tracking(server).close()
    except redis.RedisError as error:
        return str(error)
    return ""
