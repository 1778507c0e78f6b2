"""What Redis or Valkey servers say of keys that change: the invalidation messages of their client tracking.

``CLIENT TRACKING ON BCAST PREFIX kvpool:``, sent to the very connection that asked for them. They are sent whatever the
server's own settings are, for a write, a deletion, an eviction, an end of life and a flush
(docs/decisions/0041-notices-are-invalidation-messages.md).

Threads: one for each server, which reads its connection and nothing else. ``_Inbox`` is where they meet the caller; its
lock guards its fields. All else belongs to the thread that calls ``take``.
"""

from __future__ import annotations

import threading
import time
from contextlib import closing
from typing import Any

from kvpool.errors import KVPoolError
from kvpool.key.key import KEY_PREFIX, is_key
from kvpool.store.notices import Heard
from kvpool.store.server.connection import connect
from kvpool.store.server.topology import Primaries
from kvpool.store.url import StoreURL

TIMEOUT_S = 2.0  # of the connection and each reply
POLL_S = 0.25  # how late a listener notices that it is to end
PING_S = 5.0  # of silence, after which the server is asked whether it is there
LINGER_S = 0.01  # keys come in one look for each hundredth of a second
SERVERS_S = 5.0  # how often it is asked which servers there are
RETRY_S = 1.0
REFUSED_S = 30.0  # until who refuses is asked again
MAX_KEYS = 1 << 16  # that wait for take(): more are missed
CLOSE_S = 5.0

CHANNEL = "__redis__:invalidate"
ADVICE = f"allow +client|id +client|tracking +subscribe &{CHANNEL}"


class ServerNotices:
    """Listens to each server of ``primaries``, and goes on when one is lost or replaced. See ``Notices``.

    ``name``: of the store, for what is said.
    """

    def __init__(self, primaries: Primaries, name: str) -> None:
        self._primaries, self._name = primaries, name
        self._inbox = _Inbox()
        self._ears: dict[StoreURL, _Ear] = {}
        self._asked_s = -SERVERS_S
        self._problem = ""

    def take(self, timeout_s: float) -> Heard:
        """What was heard since the last call; waits for something."""
        self._listen()
        deaf = next((ear.problem for ear in self._ears.values() if ear.problem), self._problem)
        return self._inbox.take(timeout_s)._replace(deaf=deaf)

    def close(self) -> None:
        """Stop listening."""
        self._inbox.closed.set()
        for ear in self._ears.values():
            ear.join()

    def _listen(self) -> None:
        """Have a listener for each server that there is, and none for those that are no more."""
        now_s = time.monotonic()
        if now_s >= self._asked_s + SERVERS_S:
            self._asked_s = now_s
            try:
                urls = self._primaries.urls()
                self._problem = ""
            except KVPoolError as error:
                self._problem, urls = str(error), list(self._ears)
            for url in self._ears.keys() - urls:
                self._ears.pop(url).dismiss()
            for url in urls:
                if url not in self._ears:
                    self._ears[url] = _Ear(url, self._name, self._inbox)
        for ear in self._ears.values():
            ear.open()


class _Inbox:
    """What the listeners have heard and nobody has taken."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self._something = threading.Event()
        self._lock = threading.Lock()
        self._keys: dict[str, None] = {}
        self._emptied = self._missed = False

    def hear(self, keys: list[str] | None) -> None:
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

    def take(self, timeout_s: float) -> Heard:
        if self._something.wait(timeout_s):
            self.closed.wait(min(LINGER_S, timeout_s))
        with self._lock:
            heard = Heard(list(self._keys), self._emptied, self._missed, "")
            self._keys, self._emptied, self._missed = {}, False, False
            self._something.clear()
        return heard


class _Ear:
    """Listens to one server: in a thread for as long as the connection lasts, and in another one some time later."""

    def __init__(self, url: StoreURL, name: str, inbox: _Inbox) -> None:
        self._url, self._name, self._inbox = url, name, inbox
        self._thread: threading.Thread | None = None
        self._dismissed = threading.Event()
        # The thread writes these before it ends, the caller reads them.
        self.problem = ""
        self._again_s = 0.0

    def open(self) -> None:
        """Begin, or begin again if it is time for that."""
        if (self._thread is None or not self._thread.is_alive()) and time.monotonic() >= self._again_s:
            self._thread = threading.Thread(target=self._run, name="kvpool-notices", daemon=True)
            self._thread.start()

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
                self._inbox.miss()  # whatever was before
                while not (self._inbox.closed.is_set() or self._dismissed.is_set()):
                    tracking.read(self._inbox)
        except (redis.RedisError, OSError, ValueError) as error:
            refused = isinstance(error, redis.exceptions.ResponseError)
            self._again_s = time.monotonic() + (REFUSED_S if refused else RETRY_S)
            advice = (
                f"; {ADVICE} to this user" if isinstance(error, redis.exceptions.NoPermissionError) else ""
            )
            self.problem = f"{self._name}: {error}{advice}"


class _Tracking:
    """One connection that is told of changes. Errors: redis-py's; ``ValueError`` for what makes no sense."""

    def __init__(self, server: Any) -> None:
        # None of redis-py's own subscribers: they dial again by themselves, and then nothing is tracked.
        self._connection: Any = server.connection_pool.make_connection()
        try:
            self._connection.connect()
            own = self._ask("CLIENT", "ID")
            self._ask("CLIENT", "TRACKING", "ON", "REDIRECT", own, "BCAST", "PREFIX", KEY_PREFIX)
            self._ask("SUBSCRIBE", CHANNEL)
        except BaseException:
            self.close()
            raise
        self._heard_s = time.monotonic()
        self._pinged = False

    def read(self, inbox: _Inbox) -> None:
        """Wait a moment for a message, and hand it over."""
        if self._connection.can_read(timeout=POLL_S):
            self._connection.extend()
            message: Any = self._connection.read_response()
            self._heard_s, self._pinged = time.monotonic(), False
            if not isinstance(message, list) or not message:
                raise ValueError("it sends what is no message of a subscription")
            if message[0] == b"message" and len(message) == 3:
                inbox.hear(_block_keys(message[2]))
            return
        silence_s = time.monotonic() - self._heard_s
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
    """The keys of blocks among those of a message; None when it says that all are gone."""
    if told is None:
        return None
    if not isinstance(told, list):
        raise ValueError("it sends what is no list of keys")
    names = (name.decode("ascii", "replace") for name in told if isinstance(name, bytes))
    return [name for name in names if is_key(name)]


def refusal(url: StoreURL) -> str:
    """Why the server of ``url`` says nothing of its keys to this user; empty: it does. Blocking, for some seconds."""
    import redis

    try:
        with connect(url, timeout_s=TIMEOUT_S, role="doctor") as server:
            _Tracking(server).close()
    except redis.RedisError as error:
        return str(error)
    return ""
