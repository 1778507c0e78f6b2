"""``Traffic``: counts what one engine was asked for: the tokens that it did not compute, and a sample of the blocks.

A window consists of whole slots: 5 minutes each within the last hour, an hour each before. It is up to one
slot longer than its name. Not thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvpool.discovery.sample import SampledRequest, Sampler
from kvpool.discovery.traffic import WINDOWS, Seen

HASH_NBYTES = 8  # of each block's hash
SLOT_S = 300.0
LONG_SLOT_S = 3600.0
SLOTS = 12  # whole slots beside the one being filled
LONG_SLOTS = 24


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
