"""A store on a server through a client whose calls block: a few threads make the calls, a batch is cut into windows.

A window is some consecutive keys of one batch, the last of which brings it to 1 MiB of values or beyond. A thread
takes the next one of the oldest batch, puts after all others, makes the one or two calls that it needs, and puts down
the results. So a batch runs on all connections, and what is under way is bounded in bytes. A batch that is cancelled or
late loses at once what no thread has taken, and the rest when the calls return, after ``MAX_CALL_S`` at the latest.

When a link falls silent or cannot be dialled, the breaker opens: every key is a fault at once, in the thread that
submits it. One of the store's threads dials again in pauses; when the server answers it, the breaker closes.

Threads: ``_changed`` (a condition) guards ``_queue``, ``_counters``, ``_closing``, ``_doubts``, ``_breaker``,
``_probing`` and the fields of every ``_Batch``; no call is made under it. A ``Link`` belongs to one thread. Buffers
are touched only by the thread that holds their window.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from kvpool import _native
from kvpool.errors import ConfigError, StoreClosed, StoreUnavailable
from kvpool.key.key import parse_key
from kvpool.store.lookup import LookupKeys, RecordBatch
from kvpool.store.server.server import ServerStore, server_name
from kvpool.store.server.topology import Primaries
from kvpool.store.store import DEFAULT_TIMEOUT_S
from kvpool.store.tls import advice
from kvpool.store.url import StoreURL
from kvpool.store.valkey import ValkeyStore

WINDOW_NBYTES = 1 << 20  # of values; a call takes no more keys once it has so many
WINDOW_KEYS = 256
MAX_QUEUED_KEYS = 1 << 20
MAX_CALL_S = 4.0  # one call, so that close() can wait for it
DIAL_S = 2.0
# While a server is away it is asked for PROBE_S, then left alone for a pause: together below a second, so that it is
# used again so soon after its return.
PROBE_S = 0.5
# Under TLS a dial enters the interpreter dozens of times, and where that is busy each may take its switch interval.
TLS_PROBE_S = DIAL_S
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.4
LOOKS = 8  # at a key in use, in each time to live
MAX_LOOKED = 1 << 17  # keys that a thread remembers having looked at
# The last bytes of a payload stand beside the header, which keeps both fields inside the allocator's size classes.
TAIL_NBYTES = 128

_COUNTERS = (
    "puts", "put_nbytes", "get_hits", "get_misses", "get_nbytes", "contains_hits", "contains_misses",
    "deletes", "delete_misses", "no_room", "faults", "cancelled", "timed_out", "damaged", "evicted",
    "connections", "disconnections", "failed_dials", "refused", "up_connections", "queued",
    *(f"damaged_{cause}" for cause in (
        "truncated", "magic", "version", "flags", "length", "fingerprint", "hash", "group", "rank", "checksum"
    )),
)  # fmt: skip
_COUNTED = {
    (_native.PUT, _native.OK): "puts",
    (_native.GET, _native.OK): "get_hits",
    (_native.GET, _native.MISS): "get_misses",
    (_native.CONTAINS, _native.OK): "contains_hits",
    (_native.CONTAINS, _native.MISS): "contains_misses",
    (_native.TOUCH, _native.OK): "contains_hits",
    (_native.TOUCH, _native.MISS): "contains_misses",
    (_native.DELETE, _native.OK): "deletes",
    (_native.DELETE, _native.MISS): "delete_misses",
}
_VERBS = {_native.CONTAINS: b"EXISTS", _native.DELETE: b"UNLINK"}
_COUNTED_ALWAYS = {
    _native.NO_ROOM: "no_room",
    _native.FAULT: "faults",
    _native.CANCELLED: "cancelled",
    _native.TIMED_OUT: "timed_out",
}

Command = tuple[bytes | memoryview, ...]


class LinkFault(Exception):
    """No connection can be made, or the one there was is in doubt; says why."""


class LinkSilent(LinkFault):
    """No answer in time: who asks the same server next would wait as long."""


class LinkRefused(LinkFault):
    """The server does not let us in as we are: user, password, database or rights."""


class Refusal(str):
    """An error reply in the server's words, its first word first; the connection is as good as before."""

    __slots__ = ()


class Link(Protocol):
    """One connection through some client. Used by one thread; every call is bounded by its ``timeout_s``."""

    def dial(self, timeout_s: float) -> None:
        """Make sure that the server answers, over the connection that stands or a new one. Errors: ``LinkFault``."""

    def is_stale(self) -> bool:
        """Whether the connection ended, or brought what nobody had asked for, since the last reply."""

    def exchange(self, commands: Sequence[Command], timeout_s: float) -> list[Any]:
        """Send all, and return one reply each: bytes, int, list, None or ``Refusal``. Errors: ``LinkFault``."""

    def drop(self) -> None:
        """Give up the connection; ``dial`` makes the next one."""

    def close(self) -> None:
        """Give everything back."""


class _Breaker(NamedTuple):
    """While a server is away: why, and how long nobody asks it again. Closed: ``why`` is empty."""

    why: str = ""
    pause_s: float = 0.0
    next_dial_s: float = 0.0  # monotonic


class _Batch:
    """One submitted batch. Its fields are guarded by the store's ``_changed``; see ``transfer.Batch``."""

    def __init__(
        self,
        store: BlockingStore,
        operation: int,
        keys: Sequence[str],
        views: Sequence[memoryview] | None,
        timeout_s: float,
    ) -> None:
        self.operation, self.keys, self.views = operation, keys, views
        self.deadline_s = time.monotonic() + timeout_s
        self.statuses = bytearray([_native.CANCELLED]) * len(keys)
        self.next = 0  # first key that no thread has taken
        # Keys that count as waiting in the queue.
        self.weight = min(1, len(keys)) if isinstance(keys, LookupKeys) else len(keys)
        self.windows = 0  # under way
        self.cancelled = False
        self.fault: str | None = None
        self.ended = threading.Event()
        self._store = store

    def done(self) -> bool:
        if not self.ended.is_set() and time.monotonic() >= self.deadline_s:
            self._store._give_up(self, _native.TIMED_OUT)
        return self.ended.is_set()

    def wait(self, timeout_s: float) -> bool:
        until_deadline_s = self.deadline_s - time.monotonic()
        if 0 < until_deadline_s < timeout_s:
            if self.ended.wait(until_deadline_s):
                return True
            timeout_s -= until_deadline_s
        return self.done() or self.ended.wait(timeout_s)

    def cancel(self) -> None:
        self._store._give_up(self, _native.CANCELLED)

    def results(self) -> bytes:
        assert self.ended.is_set()
        return bytes(self.statuses)

    def error(self) -> str | None:
        return self.fault


class _Window(NamedTuple):
    """Keys of a batch, from ``start`` up to ``end``, in the hands of one thread."""

    batch: _Batch
    start: int
    end: int


class _Probe(NamedTuple):
    """To dial, and so to find out whether the server is back."""


class BlockingStore(ServerStore):
    """A store whose values are moved by ``url.threads`` threads, each with a ``Link`` of the subclass's making.

    Blocking: one link is dialled, for 2 seconds an address at most. Errors: ``ConfigError`` when the server refuses
    user, password or database, or a file for TLS cannot be used; ``StoreUnavailable`` when it cannot be reached.
    """

    def __init__(self, url: StoreURL) -> None:
        super().__init__(server_name(url))
        if url.tls is not None:
            # It reads what the server says before it hangs up, and tells what to change; redis-py and GLIDE do not.
            ValkeyStore(replace(url, threads=1)).close()
        self._set_up(url, Primaries(url, self._name))
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._queue: deque[_Batch] = deque()
        self._closing = False
        self._doubts = 0  # how often a link failed
        self.probe_s = PROBE_S if url.tls is None else TLS_PROBE_S
        self._breaker = _Breaker()
        self._probing = False  # a thread of the store dials, to close the breaker
        self._counters: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))
        lanes = [_Lane(self, self._link()) for _ in range(url.threads)]
        try:
            lanes[0].open()
        except LinkRefused as error:
            raise ConfigError(
                f"{self._name}: the server refuses: {error}; correct user, password or database"
            ) from error
        except LinkFault as error:
            raise StoreUnavailable(f"{self._name}: cannot connect: {error}; {advice(str(error))}") from error
        self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Daemons: a program that forgets to close the store ends all the same.
        self._threads = [
            threading.Thread(target=lane.run, name=f"kvpool-{url.client}-{index}", daemon=True)
            for index, lane in enumerate(lanes)
        ]
        for thread in self._threads:
            thread.start()

    def counters(self) -> dict[str, int]:
        self._check_open()
        with self._changed:
            counters = dict(self._counters)
            if self._breaker.why:
                counters["up_connections"] = 0
            return counters

    def fileno(self) -> int:
        self._check_open()
        return self._event_fd

    # ------------------------------------------------------------------ what a client adds

    @abstractmethod
    def _link(self) -> Link:
        """A link that is not dialled yet."""

    # ------------------------------------------------------------------ batches

    def _submit(
        self, operation: int, keys: Sequence[str], views: Sequence[memoryview] | None, timeout_s: float
    ) -> _Batch:
        keys = tuple(keys)
        for key in keys:
            parse_key(key)
        return self._enqueue(_Batch(self, operation, keys, views, timeout_s))

    def _submit_lookup(self, keys: LookupKeys, timeout_s: float) -> RecordBatch:
        return RecordBatch(self._enqueue(_Batch(self, _native.TOUCH, keys, None, timeout_s)), keys)

    def _enqueue(self, batch: _Batch) -> _Batch:
        if os.getpid() != self._pid:
            raise StoreUnavailable(f"{self._name}: opened before fork(): open one in this process")
        with self._changed:
            if self._closing:
                raise StoreClosed(f"{self._name}: the store is closed")
            waiting = self._counters["queued"]
            if batch.weight > MAX_QUEUED_KEYS - waiting:
                raise StoreUnavailable(
                    f"{self._name}: queue full: {waiting} keys are waiting, at most {MAX_QUEUED_KEYS} may"
                )
            self._counters["queued"] += batch.weight
            if batch.keys:
                self._queue.append(batch)
                if self._breaker.why:
                    self._refuse_queued()
                self._changed.notify_all()
            else:
                self._end_if_over(batch)
        return batch

    def _take(self) -> _Window | _Probe | None:
        """What a thread is to do next. None: the store closes."""
        with self._changed:
            while True:
                if not self._queue:
                    if self._closing:
                        return None
                    pause_s: float | None = None
                    if self._breaker.why and not self._probing:
                        pause_s = self._breaker.next_dial_s - time.monotonic()
                        if pause_s <= 0:
                            self._probing = True
                            return _Probe()
                    self._changed.wait(pause_s)
                    continue
                # Nobody waits for a put; a request waits for the others.
                batch = next((one for one in self._queue if one.operation != _native.PUT), self._queue[0])
                if time.monotonic() >= batch.deadline_s:
                    self._drop_rest(batch, _native.TIMED_OUT)
                    continue
                if isinstance(batch.keys, LookupKeys):
                    self._skip_unwanted(batch, batch.keys)
                    if batch.next == len(batch.keys):
                        continue
                start, end = batch.next, _window_end(batch)
                batch.next = end
                batch.windows += 1
                if not isinstance(batch.keys, LookupKeys):
                    self._weigh(batch, batch.weight - (end - start))
                if end == len(batch.keys):
                    self._weigh(batch, 0)
                    self._queue.remove(batch)
                return _Window(batch, start, end)

    def _put_down(self, batch: _Batch, start: int, statuses: Sequence[int], fault: str | None) -> None:
        """The results of one window; whoever calls this has let go of its buffers."""
        with self._changed:
            batch.statuses[start : start + len(statuses)] = bytes(statuses)
            batch.fault = batch.fault or fault
            batch.windows -= 1
            if isinstance(batch.keys, LookupKeys):
                batch.keys.take(start, statuses)
            for status, times in Counter(statuses).items():
                self._count(batch.operation, status, times)
            if batch.views is not None:
                moved = {_native.PUT: "put_nbytes", _native.GET: "get_nbytes"}[batch.operation]
                self._counters[moved] += sum(
                    batch.views[start + place].nbytes
                    for place, status in enumerate(statuses)
                    if status == _native.OK
                )
            self._end_if_over(batch)

    def _give_up(self, batch: _Batch, status: int) -> None:
        """Take what no thread has taken out of the queue; windows under way end by themselves."""
        with self._changed:
            if not batch.ended.is_set():
                batch.cancelled = batch.cancelled or status == _native.CANCELLED
                self._drop_rest(batch, status)

    def _drop_rest(self, batch: _Batch, status: int) -> None:
        """Give every key that no thread has taken ``status``; the caller holds the lock."""
        rest = len(batch.keys) - batch.next
        if rest:
            batch.statuses[batch.next :] = bytes([status]) * rest
            batch.next = len(batch.keys)
            self._queue.remove(batch)
            self._weigh(batch, 0)
            self._count(batch.operation, status, rest)
        self._end_if_over(batch)

    def _skip_unwanted(self, batch: _Batch, keys: LookupKeys) -> None:
        """What of a lookup is not worth asking any more is not there; the caller holds the lock."""
        wanted = keys.next_wanted(batch.next)
        batch.statuses[batch.next : wanted] = bytes([_native.MISS]) * (wanted - batch.next)
        batch.next = wanted
        if wanted == len(keys):
            self._queue.remove(batch)
            self._weigh(batch, 0)
            self._end_if_over(batch)

    def _weigh(self, batch: _Batch, weight: int) -> None:
        """The caller holds the lock."""
        self._counters["queued"] -= batch.weight - weight
        batch.weight = weight

    def _end_if_over(self, batch: _Batch) -> None:
        """Let go of the buffers and tell, if nothing is left of a batch; the caller holds the lock."""
        if batch.windows or batch.next < len(batch.keys) or batch.ended.is_set():
            return
        batch.views = None
        batch.ended.set()
        os.eventfd_write(self._event_fd, 1)

    def _count(self, operation: int, status: int, times: int) -> None:
        self._counters[_COUNTED_ALWAYS.get(status) or _COUNTED[operation, status]] += times

    def _refuse_queued(self) -> None:
        """The server is away: what waits is a fault at once; the caller holds the lock."""
        for batch in list(self._queue):
            batch.fault = batch.fault or self._breaker.why
            self._counters["refused"] += len(batch.keys) - batch.next
            self._drop_rest(batch, _native.FAULT)

    def _open_breaker(self, breaker: _Breaker) -> None:
        """The caller holds the lock."""
        self._breaker = breaker
        self._refuse_queued()
        self._changed.notify_all()

    def doubts(self) -> int:
        """How often a link failed: a thread that finds this changed looks to its own; for the store's threads."""
        with self._changed:
            return self._doubts

    def doubt(self) -> None:
        """A link failed; for the store's own threads."""
        with self._changed:
            self._doubts += 1

    def fell_silent(self, why: str) -> None:
        """A link got no answer in time; for the store's own threads."""
        with self._changed:
            if not self._breaker.why:
                self._open_breaker(_Breaker(why))

    def check_not_away(self) -> None:
        """For the store's own threads. Errors: ``LinkFault`` that says why, while the breaker is open."""
        with self._changed:
            if self._breaker.why:
                raise LinkFault(self._breaker.why)

    def dialled(self, failure: str | None) -> None:
        """One of the store's own threads has dialled; ``failure``: why in vain."""
        with self._changed:
            self._probing = False
            if failure is None:
                self._breaker = _Breaker()
                return
            self._counters["failed_dials"] += 1
            pause_s = min(max(2 * self._breaker.pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            self._open_breaker(_Breaker(failure, pause_s, time.monotonic() + pause_s))

    def count(self, name: str, times: int = 1) -> None:
        """Add to one counter; for the store's own threads."""
        with self._changed:
            self._counters[name] += times

    def _close(self) -> None:
        if (
            os.getpid() == self._pid
        ):  # in a forked child there are no threads, and the lock may be held for ever
            self._end_threads()
        self._close_kept()
        os.close(self._event_fd)

    def _end_threads(self) -> None:
        with self._changed:
            self._closing = True
            for batch in list(self._queue):
                batch.cancelled = True
                self._drop_rest(batch, _native.CANCELLED)
            self._changed.notify_all()
        end_s = time.monotonic() + DEFAULT_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(end_s - time.monotonic(), 0.0))
        if any(thread.is_alive() for thread in self._threads):
            raise StoreUnavailable(f"{self._name}: a thread is stuck in the client; it was left behind")


def _window_end(batch: _Batch) -> int:
    end = min(batch.next + WINDOW_KEYS, len(batch.keys))
    if batch.views is None:
        return end
    nbytes = 0
    for index in range(batch.next, end):
        nbytes += batch.views[index].nbytes
        if nbytes >= WINDOW_NBYTES:
            return index + 1
    return end


class _Lane:
    """One thread of a store, with its link: takes windows until the store closes."""

    def __init__(self, store: BlockingStore, link: Link) -> None:
        self._store, self._link = store, link
        self._ttl_ms = b"%d" % (store._url.ttl_s * 1000)
        self._is_up = False
        self._touches = True  # this user may TOUCH, as far as is known
        self._renews = True  # and ask for times to live
        self._looked: dict[
            bytes, int
        ] = {}  # keys in use: the span in which their time to live was last looked at
        self._in_use: list[bytes] = []  # those that are to be looked at next
        self._doubts = 0  # of the store, when this link was last found to work

    def open(self) -> None:
        """Dial for the first time. Errors: ``LinkFault``; then nothing is left open."""
        try:
            self._dial(DIAL_S)
        except LinkFault:
            self._link.close()
            raise

    def run(self) -> None:
        try:
            while (work := self._store._take()) is not None:
                if isinstance(work, _Probe):
                    with contextlib.suppress(LinkFault):
                        self._dial(self._store.probe_s)
                else:
                    self._store._put_down(work.batch, work.start, *self._outcome(*work))
                    self._renew()
                del work  # an idle thread holds no batch
        finally:
            self._down()
            self._link.close()

    def _outcome(self, batch: _Batch, start: int, end: int) -> tuple[Sequence[int], str | None]:
        """A status for each key of the window, and the first fault in words."""
        keys = [key.encode("ascii") for key in batch.keys[start:end]]
        views = batch.views[start:end] if batch.views is not None else ()
        try:
            if batch.operation == _native.PUT:
                return self._put(batch, keys, views)
            if batch.operation == _native.GET:
                return self._get(batch, keys, views)
            if batch.operation == _native.TOUCH:
                return self._touch(batch, keys)
            return self._ask(batch, _VERBS[batch.operation], keys)
        except LinkFault as error:
            self._fail()
            if isinstance(error, LinkSilent):
                self._store.fell_silent(str(error))
            return self._all_lost(batch, end - start), str(error)
        except Exception as error:  # whatever a client may think of: no thread is lost to a reply
            words = f"{type(error).__name__}: {error}"
            self._fail()
            return self._all_lost(batch, end - start), words

    @staticmethod
    def _all_lost(batch: _Batch, count: int) -> Sequence[int]:
        if time.monotonic() >= batch.deadline_s:
            return [_native.TIMED_OUT] * count
        return [_native.CANCELLED if batch.cancelled else _native.FAULT] * count

    # ------------------------------------------------------------------ what a window asks

    def _ask(self, batch: _Batch, verb: bytes, keys: Sequence[bytes]) -> tuple[Sequence[int], str | None]:
        replies = self._exchange(batch, [(verb, key) for key in keys])
        return _statuses([reply if isinstance(reply, Refusal) else _yes(reply) for reply in replies])

    def _touch(self, batch: _Batch, keys: Sequence[bytes]) -> tuple[Sequence[int], str | None]:
        statuses, fault = self._ask(batch, b"TOUCH" if self._touches else b"EXISTS", keys)
        if fault is not None and self._touches and _is_command_refused(fault):
            self._touches = False  # whether they are there can be asked all the same
            statuses, fault = self._ask(batch, b"EXISTS", keys)
        self._use([key for key, status in zip(keys, statuses, strict=True) if status == _native.OK])
        return statuses, fault

    def _use(self, keys: Sequence[bytes], *, begins: bool = False) -> None:
        """These were used. ``begins``: and put, so that their time to live begins now."""
        span_s = max(self._store._url.ttl_s / LOOKS, 1e-3)
        span = int(time.monotonic() / span_s)
        due = [key for key in keys if self._looked.get(key) != span]
        if len(self._looked) + len(due) > MAX_LOOKED:
            self._looked.clear()
        self._looked.update(dict.fromkeys(due, span))
        if self._renews and not begins:
            self._in_use += due

    def _renew(self) -> None:
        """Look at the keys in use, and let the time to live of those begin anew that have little of it left."""
        keys, self._in_use = self._in_use, []
        if not keys or not self._is_up:
            return
        ttl_ms = self._store._url.ttl_s * 1000
        try:
            left = self._link.exchange([(b"PTTL", key) for key in keys], MAX_CALL_S)
            if any(isinstance(reply, Refusal) for reply in left):
                self._renews = False
                return
            old = [key for key, ms in zip(keys, left, strict=True) if -1 <= ms <= ttl_ms - ttl_ms // 4]
            if old:
                self._link.exchange([(b"PEXPIRE", key, self._ttl_ms) for key in old], MAX_CALL_S)
        except Exception:  # a link in doubt, or whatever a client may think of
            self._fail()

    def _put(
        self, batch: _Batch, keys: Sequence[bytes], views: Sequence[memoryview]
    ) -> tuple[Sequence[int], str | None]:
        commands: list[Command] = []
        for key, view in zip(keys, views, strict=True):
            header = _native.pack_header(key.decode("ascii"), view)
            split = max(0, view.nbytes - TAIL_NBYTES)
            # Together, so that no record is without a time to live, wherever the connection is cut.
            commands.append((b"MULTI",))
            commands.append((b"HSET", key, b"b", view[:split], b"h", header + bytes(view[split:])))
            commands.append((b"PEXPIRE", key, self._ttl_ms))
            commands.append((b"EXEC",))
        replies = self._exchange(batch, commands)
        outcomes = [_kept(replies[place : place + 4]) for place in range(0, len(replies), 4)]
        self._use([key for key, kept in zip(keys, outcomes, strict=True) if kept == _native.OK], begins=True)
        return _statuses(outcomes)

    def _get(
        self, batch: _Batch, keys: Sequence[bytes], views: Sequence[memoryview]
    ) -> tuple[Sequence[int], str | None]:
        replies = self._exchange(batch, [(b"HMGET", key, b"h", b"b") for key in keys])
        if batch.cancelled:  # nobody waits for the bytes
            return [_native.CANCELLED] * len(keys), None
        outcomes: list[int | Refusal] = []
        damaged: list[bytes] = []
        for place, (key, view) in enumerate(zip(keys, views, strict=True)):
            reply, replies[place] = replies[place], None  # one value at a time is held twice
            if isinstance(reply, Refusal) and not reply.startswith("WRONGTYPE"):
                outcomes.append(reply)
                continue
            damage = _read(key.decode("ascii"), reply, view)
            outcomes.append(_native.OK if damage == "" else _native.MISS)
            if damage == "":
                self._use([key])
            if damage:
                damaged.append(key)
                self._store.count("damaged")
                self._store.count(f"damaged_{damage}")
        if damaged:
            # Before the miss is told, so that whoever sees it does not find the record again.
            self._exchange(batch, [(b"UNLINK", key) for key in damaged])
        return _statuses(outcomes)

    # ------------------------------------------------------------------ the link

    def _exchange(self, batch: _Batch, commands: Sequence[Command]) -> list[Any]:
        """Replies to all of ``commands``, over a link that is dialled first where none stands."""
        if self._is_up and self._link.is_stale():
            self._down()
        if not self._is_up or self._doubts != self._store.doubts():
            self._store.check_not_away()
            self._dial(min(DIAL_S, _left(batch)))
        replies = self._link.exchange(commands, min(MAX_CALL_S, _left(batch)))
        if len(replies) != len(commands):
            raise LinkFault("its reply does not fit what it was asked")
        return replies

    def _dial(self, timeout_s: float) -> None:
        doubts = self._store.doubts()
        try:
            self._link.dial(timeout_s)
        except LinkFault as error:
            self._down()
            self._store.dialled(str(error))
            raise
        except Exception as error:  # whatever a client may think of
            words = f"{type(error).__name__}: {error}"
            self._down()
            self._store.dialled(words)
            raise LinkFault(words) from error
        self._store.dialled(None)
        if not self._is_up:
            self._store.count("connections")
            self._store.count("up_connections")
        if not self._is_up:
            self._touches = self._renews = True  # its rights may have changed
        self._is_up, self._doubts = True, doubts

    def _fail(self) -> None:
        """The link is in doubt, and those of the other threads are until they are tried."""
        if self._is_up:
            self._store.doubt()
        self._down()

    def _down(self) -> None:
        """Give the link up; the next window dials."""
        if self._is_up:
            self._is_up = False
            self._store.count("disconnections")
            self._store.count("up_connections", -1)
        self._link.drop()


def _left(batch: _Batch) -> float:
    """Seconds until the deadline of ``batch``. Errors: ``LinkFault`` when it has passed."""
    left_s = batch.deadline_s - time.monotonic()
    if left_s <= 0:
        raise LinkFault("no answer in time")
    return left_s


def _statuses(outcomes: Sequence[int | Refusal]) -> tuple[Sequence[int], str | None]:
    words = next((outcome for outcome in outcomes if isinstance(outcome, Refusal)), None)
    statuses = [_native.FAULT if isinstance(outcome, Refusal) else outcome for outcome in outcomes]
    return statuses, None if words is None else str(words)


def _yes(reply: Any) -> int:
    """The answer to EXISTS or UNLINK of one key."""
    if reply not in (0, 1):
        raise LinkFault("its reply does not fit what it was asked")
    return _native.OK if reply else _native.MISS


def _kept(replies: Sequence[Any]) -> int | Refusal:
    """What the answers to MULTI, HSET, PEXPIRE and EXEC mean for one key; the first error says why."""
    done = replies[-1] if isinstance(replies[-1], list) else []
    for reply in (*replies, *done):
        if isinstance(reply, Refusal):
            return _native.NO_ROOM if reply.startswith("OOM") else reply
    if len(done) != 2 or done[0] not in (0, 1, 2) or done[1] not in (0, 1):
        raise LinkFault("its reply does not fit what it was asked")
    return _native.OK if done[1] else _native.NO_ROOM


def _is_command_refused(words: str) -> bool:
    """Whether an error is about a command and not about a key: no right to it, or no such command."""
    return words.startswith(("NOPERM", "ERR")) and "command" in words


def _read(key: str, reply: Any, view: memoryview) -> str | None:
    """Put the record that HMGET answered into ``view``: "" if it proves itself, else its damage; None: a miss."""
    if isinstance(reply, Refusal):  # a key of another type
        return "magic"
    if not isinstance(reply, list) or len(reply) != 2:
        raise LinkFault("its reply does not fit what it was asked")
    head, body = reply
    if head is None and body is None:
        return None
    if not all(isinstance(field, bytes) for field in (head, body) if field is not None):
        raise LinkFault("its reply does not fit what it was asked")
    if head is None or len(head) < _native.RECORD_HEADER_NBYTES:
        return "truncated"
    header, tail = head[: _native.RECORD_HEADER_NBYTES], head[_native.RECORD_HEADER_NBYTES :]
    split = max(0, view.nbytes - TAIL_NBYTES)
    if body is None or len(body) != split or len(tail) != view.nbytes - split:
        # What the header says of itself comes first, as everywhere.
        cause = _native.verify_record(key, header, view)
        return cause if cause not in (None, "checksum") else "length"
    view[:split], view[split:] = body, tail
    return _native.verify_record(key, header, view) or ""
