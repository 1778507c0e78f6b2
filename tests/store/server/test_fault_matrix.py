"""Every fault that a server can make is a miss or ``StoreUnavailable`` in bounded time, for every client.

A row is one harm. While it lasts, batches of each kind are tried: no wrong byte, no kept value that is not there, no
call beyond its deadline. Then the server on the same port is good, and so is the next batch of the same store. When it
is closed, nothing holds a buffer (threads and descriptors: see ``no_leaks``).
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest

from kvpool.errors import StoreUnavailable
from kvpool.store.store import Store
from tests.support.conformance import Buffer, keys, opened, payload
from tests.support.deadlines import ends_within, eventually
from tests.support.misbehaving import Harm, HungUp, Misbehaving, Peer, bulk, misbehaving, says, to
from tests.support.records import HEADER_NBYTES, fields_of, pack_header
from tests.support.servers import CLIENTS, with_client

DEADLINE_S = 0.4
BACK_WITHIN_S = 1.0
KEYS = keys(6)
NBYTES = 17_000  # in two fields
VALUES = [payload(number, NBYTES) for number in range(len(KEYS))]
STALE = [payload(100 + number, NBYTES) for number in range(len(KEYS))]


# ---------------------------------------------------------------------- harms


def record(text: bytes, header_of: bytes, payload_: bytes) -> bytes:
    """The reply to HMGET: this header, and these bytes."""
    return reply(*fields_of(text.decode(), payload_, header_of).values())


def reply(*fields: bytes | None) -> bytes:
    return b"*2\r\n" + b"".join(map(bulk, fields))


def value_of(words: Sequence[bytes], values: Sequence[bytes]) -> bytes:
    return values[KEYS.index(words[1].decode())]


def honest_header(words: Sequence[bytes]) -> bytes:
    return pack_header(words[1].decode(), value_of(words, VALUES))


def changed(
    header: Callable[[bytes], bytes] = bytes, body: Callable[[bytes], bytes] = bytes
) -> Callable[[Sequence[bytes], bytes], bytes]:
    """A good record, but for one of its fields."""

    def change(words: Sequence[bytes], good: bytes) -> bytes:
        parts = fields_of(words[1].decode(), value_of(words, VALUES))
        return reply(body(parts[b"b"]), header(parts[b"h"]))

    return change


def stale_payload(words: Sequence[bytes], good: bytes) -> bytes:
    return record(words[1], honest_header(words), value_of(words, STALE))


def stale_tail(words: Sequence[bytes], good: bytes) -> bytes:
    """Only the bytes beside the header are old."""
    value = value_of(words, VALUES)[:-HEADER_NBYTES] + value_of(words, STALE)[-HEADER_NBYTES:]
    return record(words[1], honest_header(words), value)


def of_another_key(words: Sequence[bytes], good: bytes) -> bytes:
    """A whole and good record, of another key."""
    other = (KEYS.index(words[1].decode()) + 1) % len(KEYS)
    return record(words[1], pack_header(KEYS[other], VALUES[other]), VALUES[other])


def flipped(place: int) -> Callable[[Sequence[bytes], bytes], bytes]:
    def flip(words: Sequence[bytes], good: bytes) -> bytes:
        value = bytearray(value_of(words, VALUES))
        value[place] ^= 1
        return record(words[1], honest_header(words), bytes(value))

    return flip


def nil_for_the_third(words: Sequence[bytes], good: bytes) -> bytes:
    return b"$-1\r\n" if words[1] == KEYS[2].encode() else good


def absent_third(words: Sequence[bytes], good: bytes) -> bytes:
    return b"*2\r\n$-1\r\n$-1\r\n" if words[1] == KEYS[2].encode() else good


def half_absent_third(words: Sequence[bytes], good: bytes) -> bytes:
    if words[1] != KEYS[2].encode() or words[0] != b"HMGET":
        return good
    return reply(None, fields_of(KEYS[2], VALUES[2])[b"h"])


def bytewise(peer: Peer, words: Sequence[bytes], good: bytes) -> None:
    for place in range(len(good)):
        peer.send(good[place : place + 1])


def twice(peer: Peer, words: Sequence[bytes], good: bytes) -> None:
    peer.send(good + good)


def swapped() -> Harm:
    """Each reply goes to the next request."""
    held: dict[Peer, bytes] = {}

    def harm(peer: Peer, words: Sequence[bytes], good: bytes) -> None:
        peer.owes = True
        before, held[peer] = held.get(peer), good
        if before is not None:
            peer.send(before)

    return harm


def garbage(peer: Peer, words: Sequence[bytes], good: bytes) -> None:
    peer.send(random.Random(good).randbytes(200) + b"\r\n")


def drips(peer: Peer, words: Sequence[bytes], good: bytes) -> None:
    peer.drip(good if len(good) > 300 else b"0" * 4000, 0.01)


def silent(peer: Peer, words: Sequence[bytes], good: bytes) -> None:
    peer.fall_silent()


def hangs_up(peer: Peer, words: Sequence[bytes], good: bytes) -> None:
    raise HungUp


def half_then(end: Harm) -> Harm:
    def harm(peer: Peer, words: Sequence[bytes], good: bytes) -> None:
        peer.send(good[: len(good) // 2])
        end(peer, words, good)

    return harm


def announces(begin: bytes) -> Harm:
    """Much is announced, one byte is sent."""

    def harm(peer: Peer, words: Sequence[bytes], good: bytes) -> None:
        peer.send(begin + b"x")
        peer.fall_silent()

    return harm


def announces_header(peer: Peer, words: Sequence[bytes], good: bytes) -> None:
    if words[0] != b"HMGET":
        return peer.send(good)
    body = fields_of(words[1].decode(), value_of(words, VALUES))[b"b"]
    peer.send(b"*2\r\n" + bulk(body) + b"$67108864\r\nx")
    return peer.fall_silent()


class Row(NamedTuple):
    """A harm, and what the store may make of it: ``hits``: the good values are there all the same.

    ``of_all``: tried on every client in every run; the others on our own, and on those in Python by make soak. These
    read replies by themselves: what is ours is how we judge a value, an error and a silence.
    """

    harm: Callable[[], Harm]
    when_dialled: bool = False
    of_all: bool = False
    hits: bool = False
    # GLIDE gives a surplus reply to whoever asks next, so what it says of a put may be said of another.
    misleads_glide: bool = False


ROWS: dict[str, Row] = {
    "a body that is too short": Row(lambda: to(b"HMGET", changed(body=lambda body: body[:-1])), of_all=True),
    "a body that is too long": Row(lambda: to(b"HMGET", changed(body=lambda body: body + b"x"))),
    "a header that is too long": Row(lambda: to(b"HMGET", changed(header=lambda header: header + b"x"))),
    "old bytes under a new header": Row(lambda: to(b"HMGET", stale_payload), of_all=True),
    "old last bytes under a new header": Row(lambda: to(b"HMGET", stale_tail)),
    "a record of another key": Row(lambda: to(b"HMGET", of_another_key), of_all=True),
    "a flipped first bit": Row(lambda: to(b"HMGET", flipped(0))),
    "a flipped last bit": Row(lambda: to(b"HMGET", flipped(-1))),
    "nil instead of an array": Row(lambda: to(b"HMGET", nil_for_the_third), hits=True, of_all=True),
    "an absent record among others": Row(lambda: to(b"HMGET", absent_third), hits=True),
    "an absent body among others": Row(lambda: to(b"HMGET", half_absent_third), hits=True),
    "replies byte by byte": Row(lambda: bytewise, hits=True),
    "each reply twice": Row(lambda: twice, hits=True, misleads_glide=True, of_all=True),
    "each reply one request late": Row(swapped, hits=True),
    "garbage": Row(lambda: garbage, of_all=True),
    "another protocol": Row(lambda: says(b"HTTP/1.1 400 Bad Request\r\n\r\n")),
    "an array that is too large": Row(lambda: says(b"*1048577\r\n")),
    "a reply of another type": Row(lambda: says(b"$3\r\nabc\r\n")),
    "LOADING": Row(
        lambda: says(b"-LOADING Redis is loading the dataset in memory\r\n"), when_dialled=True, of_all=True
    ),
    "OOM": Row(lambda: says(b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"), of_all=True),
    "MOVED": Row(lambda: says(b"-MOVED 3999 127.0.0.1:1\r\n")),
    "ASK": Row(lambda: says(b"-ASK 3999 127.0.0.1:1\r\n")),
    "an error without a name": Row(lambda: says(b"-\r\n")),
    "a slow drip": Row(lambda: drips, hits=True),
    "silence": Row(lambda: silent, of_all=True),
    "silence, for those who dial, too": Row(lambda: silent, when_dialled=True, of_all=True),
    "silence in the middle of a reply": Row(lambda: half_then(silent)),
    "an end before a reply": Row(lambda: hangs_up),
    "an end before a reply, for those who dial, too": Row(lambda: hangs_up, when_dialled=True),
    "an end in the middle of a reply": Row(lambda: half_then(hangs_up), of_all=True),
    "64 MiB are announced": Row(lambda: announces(b"$67108864\r\n")),
    "64 MiB of a body are announced": Row(lambda: announces(b"*2\r\n$67108864\r\n")),
    "64 MiB of a header are announced": Row(lambda: announces_header),
}


@pytest.fixture
def server() -> Iterator[Misbehaving]:
    with misbehaving() as server:
        yield server


class Trial:
    """What a store is asked, and what may come of it; keeps a weak eye on every buffer that it was given."""

    def __init__(self, store: Store, server: Misbehaving) -> None:
        self._store, self._server = store, server
        self._given: list[weakref.ref[Buffer]] = []

    def get(self, *, hits: bool) -> list[bool]:
        targets = self._buffers([bytes(NBYTES)] * len(KEYS))
        found = self._bounded(lambda: self._store.get_many_into(KEYS, targets, timeout_s=DEADLINE_S))
        for target, value, hit in zip(targets, VALUES, found, strict=True):
            assert not hit or target == value, "a hit of other bytes"
            assert hits or not hit, "nothing here can be a hit"
            target.extend(b"!")  # refused while somebody holds it
        return found

    def put(self, *, is_misled: bool = False) -> list[bool]:
        sources = self._buffers(VALUES)
        kept = self._bounded(lambda: self._store.put_many(KEYS, sources, timeout_s=DEADLINE_S))
        for text, source, value, stays in zip(KEYS, sources, VALUES, kept, strict=True):
            assert is_misled or not stays or self._server.holds(text, value), (
                "said to be kept, and is not there"
            )
            source.extend(b"!")
        return kept

    def put_absent(self, *, is_misled: bool = False) -> list[bool]:
        sources = self._buffers(VALUES)
        there = self._bounded(
            lambda: self._store.submit_put_absent(KEYS, sources, timeout_s=DEADLINE_S).wait()
        )
        for text, source, value, stays in zip(KEYS, sources, VALUES, there, strict=True):
            assert is_misled or not stays or self._server.holds(text, value), "said to be there, and is not"
            source.extend(b"!")
        return there

    def contains(self) -> list[bool]:
        return self._bounded(lambda: self._store.contains_many(KEYS, timeout_s=DEADLINE_S))

    def recovers(self) -> bool:
        """Whether a put and a get of all keys are right; a wrong answer fails the test."""
        try:
            if not all(self._store.put_many(KEYS, VALUES, timeout_s=2)):
                return False
            targets = self._buffers([bytes(NBYTES)] * len(KEYS))
            found = self._store.get_many_into(KEYS, targets, timeout_s=2)
        except StoreUnavailable:
            return False
        assert found == [True] * len(KEYS)
        assert targets == VALUES
        assert self._store.contains_many(KEYS) == [True] * len(KEYS)
        return True

    def nothing_is_held(self) -> bool:
        gc.collect()
        return all(ref() is None for ref in self._given)

    def _buffers(self, values: Sequence[bytes]) -> list[Buffer]:
        buffers = [Buffer(value) for value in values]
        self._given += [weakref.ref(buffer) for buffer in buffers]
        return buffers

    def _bounded(self, call: Callable[[], list[bool]]) -> list[bool]:
        """What it answers, in time; a fault is a miss of every key."""
        with ends_within(DEADLINE_S):
            try:
                return call()
            except StoreUnavailable:
                return [False] * len(KEYS)


@pytest.mark.parametrize(
    ("client", "name"),
    [
        pytest.param(client, name, marks=[] if client == "native" or row.of_all else [pytest.mark.soak])
        for client in CLIENTS
        for name, row in ROWS.items()
    ],
)
def test_a_fault_is_a_miss_in_bounded_time(server: Misbehaving, client: str, name: str) -> None:
    row = ROWS[name]
    with opened(with_client(f"{server.url}?connections=2", client)) as store:
        trial = Trial(store, server)
        assert eventually(trial.recovers), "the good server is no good"
        server.misbehave(row.harm(), when_dialled=row.when_dialled)
        for _ in range(2):
            for number, value in enumerate(VALUES):
                server.put(KEYS[number], value)
            trial.get(hits=row.hits)
            trial.contains()
            trial.put(is_misled=row.misleads_glide and client == "glide")
            for name in KEYS[::2]:
                server.forget(name)
            trial.put_absent(is_misled=row.misleads_glide and client == "glide")
        server.behave()
        with ends_within(BACK_WITHIN_S):
            assert eventually(trial.recovers)
        for _ in range(3):
            assert trial.recovers()
    assert trial.nothing_is_held()
