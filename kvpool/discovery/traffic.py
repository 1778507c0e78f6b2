"""``Traffic``: how much of what was asked for lately had been asked for before: the most that any cache could spare.

Distinct blocks are counted by HyperLogLog: of a block's hash, 12 bits name a register, and the register keeps the
longest run of leading zeros among the other 52. Registers of different times and workers are put together by their
maximum, so one number of the whole fleet comes out, however often its workers asked for the same block.

A window is made of whole slots: of 5 minutes within the last hour, of an hour before that. So it is up to one slot
longer than its name says. Memory: 38 slots of 4 KiB. Threads: whoever owns it, one at a time.
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
SLOTS = 12  # whole ones beside the one that is being filled
LONG_SLOTS = 24
MAX_DOCUMENT_NBYTES = 16 << 10
MAX_TOKENS = 1e15
VERSION = 1

Registers = npt.NDArray[np.uint8]


@dataclass
class Seen:
    """What was asked for within some time.

    ``block_tokens``: tokens of whole blocks, of all ``prompt_tokens``; of these, ``spared_tokens`` were not computed.
    """

    registers: Registers = field(default_factory=lambda: np.zeros(REGISTERS, np.uint8))
    blocks: int = 0
    block_tokens: int = 0
    prompt_tokens: int = 0
    spared_tokens: int = 0

    def include(self, other: Seen) -> None:
        """Put ``other`` to it."""
        np.maximum(self.registers, other.registers, out=self.registers)
        self.blocks += other.blocks
        self.block_tokens += other.block_tokens
        self.prompt_tokens += other.prompt_tokens
        self.spared_tokens += other.spared_tokens

    @property
    def distinct(self) -> float:
        """About how many different blocks there were."""
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
        """The share of the prompts' tokens in blocks that had been asked for before; 0 where nothing was asked for."""
        if not self.blocks or not self.prompt_tokens:
            return 0.0
        repeated = max(0.0, 1 - self.distinct / self.blocks)
        return min(1.0, repeated * self.block_tokens / self.prompt_tokens)

    @property
    def hit_ratio(self) -> float:
        """The share of the prompts' tokens that were not computed; 0 where nothing was asked for."""
        return self.spared_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class _Slot(NamedTuple):
    number: int
    seen: Seen


class Traffic:
    """What one engine was asked for in the last 24 hours. ``clock``: in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._short: list[_Slot] = [_Slot(self._number(), Seen())]  # oldest first; the last is being filled
        self._long: list[_Slot] = []

    def add(
        self, hashes: bytes, hash_nbytes: int, *, salt: int, block_tokens: int, prompt_tokens: int
    ) -> None:
        """A prompt of ``prompt_tokens`` was asked for.

        ``hashes``: of its full blocks, ``hash_nbytes`` (8 or more) each; ``block_tokens`` of one. ``salt``: 64 bits of
        what keeps them apart from equal hashes of others.
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
        """So many tokens of prompts were not computed."""
        self._turn()
        self._short[-1].seen.spared_tokens += tokens

    def windows(self) -> dict[str, Seen]:
        """By name of the window."""
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
        """Begin another slot where it is time; what is over an hour old goes to the slot of its hour."""
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
    """What ``Traffic.windows`` gives, as a document."""
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
    """What a document says; None when it is none that this version can read."""
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
    """What several engines were asked for, by window. Documents that cannot be read are passed over."""
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
