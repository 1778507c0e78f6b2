"""``Traffic``: what one engine was asked for: the tokens that it did not compute, and a sample of the blocks.

Its document in the pool also has the news of the engine's audits.

A window consists of whole slots: 5 minutes each within the last hour, an hour each before. It is up to one
slot longer than its name. Not thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import msgpack
import numpy as np

from kvpool.discovery.audit_news import AuditNews, pack_news, unpack_news
from kvpool.discovery.sample import SampledRequest, Sampler

HASH_NBYTES = 8  # of each block's hash
WINDOWS: Mapping[str, float] = {"15m": 900.0, "1h": 3600.0, "24h": 86400.0}
SLOT_S = 300.0
LONG_SLOT_S = 3600.0
SLOTS = 12  # whole slots beside the one being filled
LONG_SLOTS = 24
MAX_DOCUMENT_NBYTES = 56 << 10
MAX_ENGINES = 1024  # of a tenant, whose documents are read
MAX_TOKENS = 1e15
VERSION = 2


@dataclass
class Seen:
    """Traffic of a time span: ``block_tokens`` in whole blocks, ``spared_tokens`` not computed."""

    blocks: int = 0
    block_tokens: int = 0
    prompt_tokens: int = 0
    spared_tokens: int = 0

    def include(self, other: Seen) -> None:
        self.blocks += other.blocks
        self.block_tokens += other.block_tokens
        self.prompt_tokens += other.prompt_tokens
        self.spared_tokens += other.spared_tokens

    @property
    def hit_ratio(self) -> float:
        """Share of prompt tokens that were not computed; 0 without requests."""
        return self.spared_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class _Slot(NamedTuple):
    number: int
    seen: Seen


class Traffic:
    """One engine's traffic of the last 24 hours. ``clock``: in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sampler = Sampler(clock())
        self._short: list[_Slot] = [_Slot(self._number(), Seen())]  # oldest first; the last is being filled
        self._long: list[_Slot] = []

    def add(
        self, hashes: bytes, hash_nbytes: int, *, salt: int, block_tokens: int, prompt_tokens: int
    ) -> None:
        """Count a prompt of ``prompt_tokens``.

        ``hashes``: of its full blocks, ``hash_nbytes`` (at least 8) each, ``block_tokens`` a block. ``salt``:
        64 bits that separate them from equal hashes of other namespaces.
        """
        self._turn()
        seen = self._short[-1].seen
        blocks = len(hashes) // hash_nbytes
        seen.blocks += blocks
        seen.block_tokens += blocks * block_tokens
        seen.prompt_tokens += prompt_tokens
        if not blocks:
            return
        table = np.frombuffer(hashes, np.uint8, blocks * hash_nbytes).reshape(blocks, hash_nbytes)
        numbers = np.ascontiguousarray(table[:, -HASH_NBYTES:]).view(np.uint64)[:, 0] ^ np.uint64(salt)
        self._sampler.add(numbers, self._clock())

    def spare(self, tokens: int) -> None:
        self._turn()
        self._short[-1].seen.spared_tokens += tokens

    def sampled(self) -> list[SampledRequest]:
        """Requests with sampled blocks, since the last call."""
        return self._sampler.take()

    def windows(self) -> dict[str, Seen]:
        """By window name."""
        self._turn()
        now = self._short[-1].number
        found = {}
        for name, window_s in WINDOWS.items():
            found[name] = in_window = Seen()
            for slot in self._short:
                if slot.number >= now - window_s // SLOT_S:
                    in_window.include(slot.seen)
            for slot in self._long if window_s > LONG_SLOT_S else ():
                in_window.include(slot.seen)
        return found

    def _number(self) -> int:
        return int(self._clock() // SLOT_S)

    def _turn(self) -> None:
        """Begin a new slot when due; move slots older than an hour into the slot of their hour."""
        now = self._number()
        if self._short[-1].number == now:
            return
        self._short.append(_Slot(now, Seen()))
        while self._short[0].number < now - SLOTS:
            slot = self._short.pop(0)
            hour = int(slot.number * SLOT_S // LONG_SLOT_S)
            if not self._long or self._long[-1].number != hour:
                self._long.append(_Slot(hour, Seen()))
            self._long[-1].seen.include(slot.seen)
        while self._long and self._long[0].number < now * SLOT_S // LONG_SLOT_S - LONG_SLOTS:
            self._long.pop(0)


class TrafficDocument(NamedTuple):
    """``sample``: for ``unpack_sample``; None: no request has a sampled block. ``audits``: None: none, or nonsense."""

    windows: dict[str, Seen]
    sample: Any
    audits: AuditNews | None = None


def pack_traffic(
    windows: Mapping[str, Seen], sample: Mapping[str, Any] | None = None, audits: AuditNews | None = None
) -> bytes:
    """``sample``: of ``SampleWindow``."""
    table = {
        name: [seen.blocks, seen.block_tokens, seen.prompt_tokens, seen.spared_tokens]
        for name, seen in windows.items()
    }
    parts = {"version": VERSION, "windows": table, "sample": sample}
    document: bytes = msgpack.packb(parts if audits is None else parts | {"audits": pack_news(audits)})
    return document


def unpack_traffic(document: bytes) -> TrafficDocument | None:
    """The inverse of ``pack_traffic``; None when this version cannot read it."""
    if len(document) > MAX_DOCUMENT_NBYTES:
        return None
    try:
        record: Any = msgpack.unpackb(document, max_map_len=16, max_array_len=16, max_ext_len=0)
        if record["version"] != VERSION:
            return None
        windows = {name: _seen(*record["windows"][name]) for name in WINDOWS}
        return TrafficDocument(windows, record["sample"], unpack_news(record.get("audits")))
    except (ValueError, TypeError, KeyError, msgpack.UnpackException):
        return None


def audits_of(documents: Mapping[str, bytes]) -> list[AuditNews]:
    """Of engines' documents, those with news."""
    found = map(unpack_traffic, islice(documents.values(), MAX_ENGINES))
    return [one.audits for one in found if one is not None and one.audits is not None]


def _seen(*counts: Any) -> Seen:
    if len(counts) != 4 or not all(type(count) is int and 0 <= count <= MAX_TOKENS for count in counts):
        raise ValueError("no counts")
    return Seen(*counts)
