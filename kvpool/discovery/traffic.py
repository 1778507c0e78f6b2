"""``Traffic``: the share of requested tokens that was requested before: the bound of any cache's hit ratio.

HyperLogLog counts distinct blocks: 12 bits of a block's hash name a register, which keeps the longest run of
leading zeros of the other 52. The maximum of registers merges times and workers, so repeated blocks count
once across a fleet.

A window consists of whole slots: 5 minutes each within the last hour, an hour each before. It is up to one
slot longer than its name. Memory: 38 slots of 4 KiB. Not thread-safe.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

REGISTERS = 1 << 12  # a standard error of 1.04 / 64 of the distinct blocks
HASH_NBYTES = 8  # of each block's hash
WINDOWS: Mapping[str, float] = {"15m": 900.0, "1h": 3600.0, "24h": 86400.0}
SLOT_S = 300.0
LONG_SLOT_S = 3600.0
SLOTS = 12  # whole slots beside the one being filled
LONG_SLOTS = 24
MAX_DOCUMENT_NBYTES = 16 << 10
MAX_TOKENS = 1e15
VERSION = 1

Registers = npt.NDArray[np.uint8]


@dataclass
class Seen:
    """Traffic of a time span: ``block_tokens`` in whole blocks, ``spared_tokens`` not computed."""

    registers: Registers = field(default_factory=lambda: np.zeros(REGISTERS, np.uint8))
    blocks: int = 0
    block_tokens: int = 0
    prompt_tokens: int = 0
    spared_tokens: int = 0

    def include(self, other: Seen) -> None:
        np.maximum(self.registers, other.registers, out=self.registers)
        self.blocks += other.blocks
        self.block_tokens += other.block_tokens
        self.prompt_tokens += other.prompt_tokens
        self.spared_tokens += other.spared_tokens

    @property
    def distinct(self) -> float:
        counts = np.bincount(self.registers, minlength=1)
        zeros = int(counts[0])
        estimate = (
            0.7213
            / (1 + 1.079 / REGISTERS)
            * REGISTERS**2
            / float(np.ldexp(counts.astype(float), -np.arange(len(counts))).sum())
        )
        if zeros and estimate <= 2.5 * REGISTERS:
            return REGISTERS * math.log(REGISTERS / zeros)
        return estimate

    @property
    def ceiling(self) -> float:
        """Share of prompt tokens in blocks that were requested before; 0 without requests."""
        if not self.blocks or not self.prompt_tokens:
            return 0.0
        repeated = max(0.0, 1 - self.distinct / self.blocks)
        return min(1.0, repeated * self.block_tokens / self.prompt_tokens)

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
        places = (numbers & np.uint64(REGISTERS - 1)).astype(np.intp)
        # The exponent of a number below 2^52 is its bit length, exactly.
        runs = 53 - np.frexp((numbers >> np.uint64(12)).astype(np.float64))[1]
        np.maximum.at(seen.registers, places, runs.astype(np.uint8))

    def spare(self, tokens: int) -> None:
        self._turn()
        self._short[-1].seen.spared_tokens += tokens

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


def pack_traffic(windows: Mapping[str, Seen]) -> bytes:
    table = {
        name: [
            seen.registers.tobytes(),
            seen.blocks,
            seen.block_tokens,
            seen.prompt_tokens,
            seen.spared_tokens,
        ]
        for name, seen in windows.items()
    }
    document: bytes = msgpack.packb({"version": VERSION, "windows": table})
    return document


def unpack_traffic(document: bytes) -> dict[str, Seen] | None:
    """The inverse of ``pack_traffic``; None when this version cannot read it."""
    if len(document) > MAX_DOCUMENT_NBYTES:
        return None
    try:
        record: Any = msgpack.unpackb(document, max_map_len=16, max_array_len=16, max_ext_len=0)
        if record["version"] != VERSION:
            return None
        return {name: _seen(*record["windows"][name]) for name in WINDOWS}
    except (ValueError, TypeError, KeyError, msgpack.UnpackException):
        return None


def together(documents: Iterable[bytes]) -> dict[str, Seen]:
    """Merge several engines' documents, by window; unreadable ones are skipped."""
    found = {name: Seen() for name in WINDOWS}
    for document in documents:
        for name, seen in (unpack_traffic(document) or {}).items():
            found[name].include(seen)
    return found


def _seen(registers: bytes, *counts: int) -> Seen:
    if len(registers) != REGISTERS or len(counts) != 4:
        raise ValueError("no registers")
    if not all(type(count) is int and 0 <= count <= MAX_TOKENS for count in counts):
        raise ValueError("no counts")
    table = np.frombuffer(registers, np.uint8)
    if int(table.max()) > 53:
        raise ValueError("no run of zeros")
    return Seen(table.copy(), *counts)
