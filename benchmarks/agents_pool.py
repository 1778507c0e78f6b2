"""The pool of ``python -m benchmarks agents``: a real store for the fleet, and before it a near pool of each host.

Payloads are tiny, so how many blocks a pool of so many bytes holds is counted here: the least recently used ones beyond
are deleted. A use is what it is to a real pool: a prompt that is looked up on arrival, or a put. One thread.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

from benchmarks.agents_traffic import Traffic
from kvpool.errors import KVPoolError, StoreUnavailable
from kvpool.key.key import Namespace
from kvpool.store import Store
from kvpool.store.batch import LookupGroup

TENANT = "default"
PAYLOAD = bytes(8)  # of a block
CONNECT_TIMEOUT_S = 30.0
ANSWER_S = 60.0  # simulated time stands still meanwhile


class Held:
    """The blocks in a pool that has room for ``most``, in the order of their last use."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def use(self, blocks: Iterable[int]) -> None:
        """Those that are there."""
        for block in blocks:
            if block in self._blocks:
                self._blocks.move_to_end(block)

    def add(self, blocks: Sequence[int]) -> list[int]:
        """Add what is missing, and use the others. Returns the blocks that made room."""
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        return [self._blocks.popitem(last=False)[0] for _ in range(max(0, len(self._blocks) - self._most))]


class RealPool:
    """Blocks in a store. ``most_blocks``: None: all fit. Waits for its connection, and for its answers.

    After ``die`` the store's server is expected to be gone. Errors: ``KVPoolError``.
    """

    def __init__(self, store: Store, traffic: Traffic, most_blocks: int | None = None) -> None:
        self.store = store
        self.namespace = Namespace(TENANT, {"benchmark": "agents"})
        self._hashes = traffic.hashes.astype(">u8")  # as keys have them
        self._block_tokens = traffic.block_tokens
        self._held = None if most_blocks is None else Held(most_blocks)
        self._is_dead = False
        ends_s = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            try:
                self.leading([0])
                return
            except StoreUnavailable:
                if time.monotonic() > ends_s:
                    raise
                time.sleep(0.05)

    def use(self, blocks: Iterable[int]) -> None:
        """A prompt is looked up: its leading blocks count as used."""
        if self._held is not None:
            self._held.use(takewhile(self._held.__contains__, blocks))

    def leading(self, blocks: Sequence[int]) -> int:
        group = LookupGroup(self._packed(blocks), 8, 0, 1, self._block_tokens)
        try:
            [found] = self.store.submit_lookup(self.namespace, [group], timeout_s=ANSWER_S).records()
        except StoreUnavailable:
            if not self._is_dead:
                raise
            return 0
        return (found + b"\0").index(b"\0")

    def count_absent(self, blocks: Sequence[int]) -> int:
        try:
            return self.store.touch_many(self._keys(blocks), timeout_s=ANSWER_S).count(False)
        except StoreUnavailable:
            if not self._is_dead:
                raise
            return len(blocks)

    def put(self, blocks: Sequence[int]) -> list[int] | None:
        """The blocks that it evicted; None: it is dead. Errors: ``KVPoolError`` when its server has no room."""
        keys = self._keys(blocks)
        try:
            batch = self.store.submit_put_absent(keys, [PAYLOAD] * len(keys), timeout_s=ANSWER_S)
            stored = batch.wait()
        except StoreUnavailable:
            if not self._is_dead:
                raise
            return None
        if not all(stored):
            raise KVPoolError("the pool of the benchmark has no room: give its server more memory")
        evicted = [] if self._held is None else self._held.add(blocks)
        if evicted:
            self.store.delete_many(self._keys(evicted), timeout_s=ANSWER_S)
        return evicted

    def die(self) -> None:
        self._is_dead = True

    def _packed(self, blocks: Sequence[int]) -> bytes:
        packed: bytes = self._hashes[list(blocks)].tobytes()
        return packed

    def _keys(self, blocks: Sequence[int]) -> list[str]:
        packed = self._packed(blocks)
        return self.namespace.keys([packed[at : at + 8] for at in range(0, len(packed), 8)], 0, 0)


class Found(NamedTuple):
    """Leading blocks of a prompt that one load brings."""

    near: Sequence[int]
    far: Sequence[int]


class HostPool:
    """The pool as a host's workers see it: ``near``, None: the host has none, before ``far``."""

    def __init__(self, near: Held | None, far: RealPool) -> None:
        self.near, self._far = near, far

    def use(self, blocks: Sequence[int]) -> None:
        """A prompt arrives. Far is asked for what near lacks."""
        if self.near is not None:
            self.near.use(blocks)
        self._far.use(self._lacking(blocks))

    def find(self, blocks: Sequence[int]) -> Found:
        lacking = self._lacking(blocks)
        far = lacking[: self._far.leading(lacking)] if lacking else []
        ends = blocks.index(lacking[len(far)]) if len(far) < len(lacking) else len(blocks)
        return Found([block for block in blocks[:ends] if self.near is not None and block in self.near], far)

    def count_absent(self, blocks: Sequence[int]) -> int:
        """Of those, how many far lacks."""
        return self._far.count_absent(blocks)

    def put(self, blocks: Sequence[int]) -> list[int] | None:
        """Into far; as ``RealPool.put``."""
        return self._far.put(blocks)

    def _lacking(self, blocks: Sequence[int]) -> list[int]:
        near = self.near
        return list(blocks) if near is None else [block for block in blocks if block not in near]
