"""The engine of a store on a blocking client: threads with a link each take slices of batches.

Over 400 lines because all that a link is asked, and what its answers mean, stands here.

Threads: any may call ``ClientExecutor``; its queue has the lock.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from kvpool import _native
from kvpool.errors import NoThread
from kvpool.key.key import parse_key
from kvpool.store.batch import WRITER_NBYTES, LookupGroup
from kvpool.store.clients.batch_queue import BatchQueue, Probe, QueuedBatch, Slice
from kvpool.store.clients.link import (
    DIAL_S,
    PATIENCE_S,
    PUT_COMMANDS,
    Command,
    ErrorReply,
    Link,
    LinkEnded,
    LinkFault,
    LinkSilent,
    Unanswered,
    found,
    get_command,
    probe_s,
    put_commands,
    put_outcome,
    read_record,
)
from kvpool.store.clients.lookup_keys import LookupKeys
from kvpool.store.clients.shards import Shards
from kvpool.store.server.replies import first_word, is_command_refused, is_joining_refused
from kvpool.store.url import StoreURL
from kvpool.threads import start_thread

MAX_CALL_S = 4.0  # per call, so that close() can wait for it
LOOKS = 96  # checks of a used key's time to live, per time to live
SPANS_LEFT = 2  # of an expiring key, between two checks
MAX_LOOKED = 1 << 17  # checked keys that a thread remembers
MAX_JOINED = 64  # keys of one command

_Outcome = tuple[Sequence[int], str | None]  # a status per key, and the first fault in words


class ClientExecutor:
    """Threads, each with a link; see ``_native.IoExecutor``. ``shards``: of a cluster.

    Blocks to dial the first. Errors: ``LinkFault``, ``NoThread``, with no link left open.
    """

    def __init__(self, url: StoreURL, links: Sequence[Link], shards: Shards | None = None) -> None:
        self._pid = os.getpid()
        self._queue, self._shards = BatchQueue(), shards
        joins = shards is None
        threads = [
            LinkThread(self._queue, link, ttl_s=url.ttl_s, probe_s=probe_s(url), joins=joins)
            for link in links
        ]
        threads[0].open()
        # Daemons, so that a program that forgets to close the store still ends.
        self._threads = [
            threading.Thread(target=thread.run, name=f"kvpool-{url.client}-{index}", daemon=True)
            for index, thread in enumerate(threads)
        ]
        try:
            for thread in self._threads:
                start_thread(thread)
        except NoThread:
            if self._threads[0].ident is None:  # else that thread closes its link
                links[0].close()
            self._threads = [thread for thread in self._threads if thread.ident is not None]
            self.close(DIAL_S)
            raise

    def submit(
        self,
        op: int,
        keys: Sequence[str],
        buffers: Sequence[Any] | None,
        timeout_s: float,
        max_s: float,
        writer: bytes = b"",
    ) -> QueuedBatch:
        keys = tuple(keys)
        for key in keys:
            parse_key(key)
        if len(writer) not in (0, WRITER_NBYTES):
            raise ValueError(f"a writer is {WRITER_NBYTES} bytes, or none")
        return self._submit(op, keys, buffers, timeout_s, max_s, writer)

    def lookup(self, prefix: str, groups: Sequence[LookupGroup], timeout_s: float) -> QueuedBatch:
        return self._submit(_native.TOUCH, LookupKeys(prefix, groups), None, timeout_s, timeout_s)

    def counters(self) -> dict[str, int]:
        counters = self._queue.counters()
        return counters if self._shards is None else self._shards.counted(counters)

    def close(self, timeout_s: float) -> bool:
        if os.getpid() != self._pid:  # a forked child has no threads, and the lock may be held for ever
            return True
        self._queue.close()
        end_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(end_s - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _submit(
        self,
        op: int,
        keys: Sequence[str] | LookupKeys,
        buffers: Sequence[Any] | None,
        timeout_s: float,
        max_s: float,
        writer: bytes = b"",
    ) -> QueuedBatch:
        if os.getpid() != self._pid:
            raise RuntimeError("opened before fork(): open one in this process")
        return self._queue.submit(QueuedBatch(self._queue, op, keys, buffers, timeout_s, max_s, writer))


class LinkThread:
    """One thread and its link: takes slices, makes their calls, and reports results.

    ``run`` is the thread; ``open`` is called before it starts. The thread owns all fields. ``probe_s``: limit
    of a dial to an unreachable server. ``joins``: one command may have many keys.
    """

    def __init__(self, queue: BatchQueue, link: Link, *, ttl_s: float, probe_s: float, joins: bool) -> None:
        self._queue, self._link, self._probe_s, self._may_join = queue, link, probe_s, joins
        self._ttl_s, self._ttl_ms = ttl_s, int(ttl_s * 1000)
        self._is_up = False
        self._joins = joins  # until refused
        self._may_touch = True  # until refused: TOUCH
        self._may_renew = True  # until refused: times to live
        self._looked: dict[bytes, int] = {}  # used key -> the span of its last check
        self._in_use: list[bytes] = []  # used keys to check next
        self._failures = 0  # the queue's count when this link last worked

    def open(self) -> None:
        """Dial for the first time. Errors: ``LinkFault``, with nothing left open."""
        try:
            self._dial(DIAL_S)
        except LinkFault:
            self._link.close()
            raise

    def run(self) -> None:
        try:
            while (work := self._queue.take()) is not None:
                if isinstance(work, Probe):
                    with contextlib.suppress(LinkFault):
                        self._dial(self._probe_s)
                else:
                    self._queue.put_down(work.batch, work.start, *self._carry_out(work))
                    self._renew()
                del work  # an idle thread holds no batch
        finally:
            self._down()
            self._link.close()

    def _carry_out(self, taken: Slice) -> _Outcome:
        batch, start, end = taken
        try:
            return self._call(batch, start, end)
        except LinkFault as error:
            self._fail()
            if isinstance(error, LinkSilent):
                self._queue.fell_silent(str(error))
            words = str(error)
        except Exception as error:  # any client error: a thread survives every reply
            self._fail()
            words = f"{type(error).__name__}: {error}"
        if time.monotonic() >= batch.deadline_s:
            return [_native.TIMED_OUT] * (end - start), words
        return [_native.CANCELLED if batch.cancelled else _native.FAULT] * (end - start), words

    # ------------------------------------------------------------------ the calls of a slice

    def _call(self, batch: QueuedBatch, start: int, end: int) -> _Outcome:
        keys = [key.encode("ascii") for key in batch.keys[start:end]]
        if batch.operation == _native.CONTAINS:
            return _outcome(self._presence(batch, b"EXISTS", keys))
        if batch.operation == _native.DELETE:
            return self._ask(batch, b"UNLINK", keys)
        if batch.operation == _native.TOUCH:
            return self._touch(batch, keys)
        if batch.operation == _native.EXPIRE:
            return self._expire(batch, keys)
        assert batch.views is not None
        views = batch.views[start:end]
        if batch.operation == _native.PUT:
            return self._move(batch, keys, views)
        if batch.operation == _native.PUT_ABSENT:
            return self._put_absent(batch, keys, views)
        assert batch.operation == _native.GET, batch.operation
        return self._move(batch, keys, views)

    def _move(self, batch: QueuedBatch, keys: Sequence[bytes], views: Sequence[memoryview]) -> _Outcome:
        """Put or get, but for records that end connections."""
        is_get = batch.operation == _native.GET
        refused = self._queue.gets_refused if is_get else self._queue.puts_refused
        whys = [refused.why(view.nbytes) for view in views]
        places = [place for place, why in enumerate(whys) if not why]
        statuses, fault = [_native.REFUSED] * len(keys), next(filter(None, whys), None)
        self._queue.count("refused", len(keys) - len(places))
        if not places:
            return statuses, fault
        wanted = [views[place] for place in places]
        try:
            call = self._get if is_get else self._put
            found, words = call(batch, [keys[place] for place in places], wanted)
        except LinkEnded as error:
            nbytes = max(view.nbytes for view in wanted)
            text = f"{str(error).rstrip('.')}, with {nbytes} bytes of a block under way"
            refused.ended(nbytes, text, error.said)
            raise LinkEnded(text, error.said) from error
        for place, status in zip(places, found, strict=True):
            statuses[place] = status
            if status in (_native.OK, _native.NO_ROOM):
                refused.moved(views[place].nbytes)
        return statuses, fault or words

    def _ask(self, batch: QueuedBatch, verb: bytes, keys: Sequence[bytes], *more: bytes) -> _Outcome:
        return _outcome(self._found(batch, verb, keys, *more))

    def _found(
        self, batch: QueuedBatch, verb: bytes, keys: Sequence[bytes], *more: bytes
    ) -> list[int | ErrorReply]:
        return [found(reply) for reply in self._exchange(batch, [(verb, key, *more) for key in keys])]

    def _presence(self, batch: QueuedBatch, verb: bytes, keys: Sequence[bytes]) -> list[int | ErrorReply]:
        """By commands of many keys, which count; those that find some and not all are asked again key by key."""
        if not self._joins or len(keys) == 1:
            return self._found(batch, verb, keys)
        starts = range(0, len(keys), MAX_JOINED)
        counts = self._exchange(batch, [(verb, *keys[start : start + MAX_JOINED]) for start in starts])
        answers: list[int | ErrorReply] = [_native.MISS] * len(keys)
        unclear: list[int] = []
        for start, count in zip(starts, counts, strict=True):
            places = range(start, min(start + MAX_JOINED, len(keys)))
            if count == len(places):
                answers[places.start : places.stop] = [_native.OK] * len(places)
            elif count != 0:
                unclear += places
                if (
                    isinstance(count, ErrorReply)
                    and not is_command_refused(count)
                    and is_joining_refused(count)
                ):
                    self._joins = False  # a cluster behind a plain URL, or a user who may see some keys only
        if unclear:
            asked = self._found(batch, verb, [keys[place] for place in unclear])
            for place, answer in zip(unclear, asked, strict=True):
                answers[place] = answer
        return answers

    def _touch(self, batch: QueuedBatch, keys: Sequence[bytes]) -> _Outcome:
        answers = self._presence(batch, b"TOUCH" if self._may_touch else b"EXISTS", keys)
        if self._may_touch and any(
            isinstance(one, ErrorReply) and is_command_refused(one) for one in answers
        ):
            self._may_touch = False
            answers = self._presence(batch, b"EXISTS", keys)
        statuses, fault = _outcome(answers)
        self._use([key for key, status in zip(keys, statuses, strict=True) if status == _native.OK])
        return statuses, fault

    def _put(self, batch: QueuedBatch, keys: Sequence[bytes], views: Sequence[memoryview]) -> _Outcome:
        ttl_ms = b"%d" % self._ttl_ms
        commands = [
            command
            for key, view in zip(keys, views, strict=True)
            for command in put_commands(key, view, ttl_ms, batch.writer)
        ]
        replies = self._exchange(batch, commands)
        outcomes = [
            put_outcome(replies[place : place + PUT_COMMANDS])
            for place in range(0, len(replies), PUT_COMMANDS)
        ]
        self._use([key for key, kept in zip(keys, outcomes, strict=True) if kept == _native.OK], begins=True)
        return _outcome(outcomes)

    def _put_absent(self, batch: QueuedBatch, keys: Sequence[bytes], views: Sequence[memoryview]) -> _Outcome:
        answers, fault = self._touch(batch, keys)
        statuses = [_native.PRESENT if answer == _native.OK else answer for answer in answers]
        missing = [place for place, status in enumerate(statuses) if status == _native.MISS]
        if missing:
            kept, put_fault = self._move(
                batch, [keys[place] for place in missing], [views[place] for place in missing]
            )
            for place, status in zip(missing, kept, strict=True):
                statuses[place] = status
            fault = fault or put_fault
        return statuses, fault

    def _get(self, batch: QueuedBatch, keys: Sequence[bytes], views: Sequence[memoryview]) -> _Outcome:
        replies = self._exchange(batch, [get_command(*one) for one in zip(keys, views, strict=True)])
        if batch.cancelled:  # the caller has given up
            return [_native.CANCELLED] * len(keys), None
        outcomes: list[int | ErrorReply] = []
        damaged: list[bytes] = []
        for place, (key, view) in enumerate(zip(keys, views, strict=True)):
            reply, replies[place] = replies[place], None  # only one value at a time is held twice
            if isinstance(reply, ErrorReply) and first_word(reply) != "WRONGTYPE":
                outcomes.append(reply)
                continue
            damage, writer = read_record(key.decode("ascii"), reply, view)
            outcomes.append(_native.OK if damage == "" else _native.MISS)
            if damage == "":
                batch.writers_of[key] = writer
                self._use([key])
            if damage:
                damaged.append(key)
                self._queue.count("damaged")
                self._queue.count(f"damaged_{damage}")
        if damaged:
            # Before the miss is reported, so that its caller does not find the record again.
            self._exchange(batch, [(b"UNLINK", key) for key in damaged])
        return _outcome(outcomes)

    # ------------------------------------------------------------------ times to live

    def _expire(self, batch: QueuedBatch, keys: Sequence[bytes]) -> _Outcome:
        for key in keys:
            self._looked.pop(key, None)  # the next use renews it
        return self._ask(batch, b"PEXPIRE", keys, b"%d" % max(1, self._ttl_ms // LOOKS * SPANS_LEFT))

    def _use(self, keys: Sequence[bytes], *, begins: bool = False) -> None:
        """Record uses. ``begins``: after a put, which starts the time to live."""
        span_s = max(self._ttl_s / LOOKS, 1e-3)
        span = int(time.monotonic() / span_s)
        due = [key for key in keys if self._looked.get(key) != span]
        if len(self._looked) + len(due) > MAX_LOOKED:
            self._looked.clear()
        self._looked.update(dict.fromkeys(due, span))
        if self._may_renew and not begins:
            self._in_use += due

    def _renew(self) -> None:
        """Restart the time to live of used keys that have spent a quarter of it."""
        keys, self._in_use = self._in_use, []
        if not keys or not self._is_up:
            return
        try:
            left = self._link.exchange([(b"PTTL", key) for key in keys], MAX_CALL_S)
            if any(
                isinstance(reply, ErrorReply) and first_word(reply) in ("NOPERM", "ERR") for reply in left
            ):
                self._may_renew = False
                return
            oldest_ms = self._ttl_ms - self._ttl_ms // 4
            old = [
                key
                for key, ms in zip(keys, left, strict=True)
                if isinstance(ms, int) and -1 <= ms <= oldest_ms
            ]
            if old:
                self._link.exchange([(b"PEXPIRE", key, b"%d" % self._ttl_ms) for key in old], MAX_CALL_S)
        except Exception:  # a link fault, or any client error
            self._fail()

    # ------------------------------------------------------------------ the link

    def _exchange(self, batch: QueuedBatch, commands: Sequence[Command]) -> list[Any]:
        """Replies to all ``commands``, over a link that is dialled if down."""
        if self._is_up and self._link.is_stale():
            self._down()
        if not self._is_up or self._failures != self._queue.failures():
            self._queue.check_not_away()
            self._dial(min(DIAL_S, _left(batch)))
        replies = self._link.exchange(commands, min(MAX_CALL_S, _left(batch)))
        if len(replies) != len(commands):
            raise LinkFault("it sent too few replies or too many")
        return replies

    def _dial(self, timeout_s: float) -> None:
        failures = self._queue.failures()
        try:
            self._link.dial(timeout_s)
        except LinkFault as error:
            self._down()
            self._queue.dialled(str(error))
            raise
        except Exception as error:  # any error of a client
            words = f"{type(error).__name__}: {error}"
            self._down()
            self._queue.dialled(words)
            raise LinkFault(words) from error
        self._queue.dialled(None)
        if not self._is_up:
            self._queue.count("connections")
            self._queue.count("up_connections")
            self._may_touch = self._may_renew = True  # the user's rights may have changed
            self._joins = self._may_join
        self._is_up, self._failures = True, failures

    def _fail(self) -> None:
        """Drop the link; other threads check theirs before the next use."""
        if self._is_up:
            self._queue.failed()
        self._down()

    def _down(self) -> None:
        if self._is_up:
            self._is_up = False
            self._queue.count("disconnections")
            self._queue.count("up_connections", -1)
        self._link.drop()


def _left(batch: QueuedBatch) -> float:
    """Seconds for a call of ``batch``: until its deadline, or a little behind it. Errors: ``LinkFault`` past it."""
    left_s = batch.deadline_s - time.monotonic()
    if left_s <= 0:
        raise LinkFault("no answer in time")
    return max(left_s, PATIENCE_S)


def _outcome(outcomes: Sequence[int | ErrorReply]) -> _Outcome:
    words = next((str(outcome) for outcome in outcomes if isinstance(outcome, ErrorReply)), None)
    return [_status(outcome) for outcome in outcomes], words


def _status(outcome: int | ErrorReply) -> int:
    if isinstance(outcome, Unanswered):
        return _native.FAULT
    return _native.error_status(outcome) if isinstance(outcome, ErrorReply) else outcome
