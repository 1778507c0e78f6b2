"""Work of a ``BlockMover``: jobs, which callers submit, and parts, each one batch in flight.

Threads: the mover's owner.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

from kvpool.clock import Clock
from kvpool.store import Batch
from kvpool.transfer.device import Event

COPY_PAUSE_S = 5e-5  # between polls of an awaited copy: a part takes 0.1 ms at 40 GB/s


class Keyed(Protocol):
    @property
    def key(self) -> str: ...


Item = TypeVar("Item", bound=Keyed)


class Need(Enum):
    """The useful blocks of a load with misses."""

    ALL = "none: the load fails as a whole"
    LEADING = "those before the first that is missing"
    EACH = "all that came"


class Moved(NamedTuple):
    job: Hashable
    cause: str  # label of the metrics for an incomplete job; "" when complete
    moved: list[bool]  # by block: loaded, or present in the pool
    missing: list[int]  # items of a load that the pool lacks
    sent: int  # blocks whose bytes moved: not those present before
    nbytes: int  # of them
    seconds: float
    error: Exception | None  # the exception behind ``cause``
    near: float = 0.0  # share of a load's items that came from the nearer of two pools
    refused: Sequence[bool] = ()  # by block of a store: refused for itself, however often it is sent
    writers: frozenset[bytes] = frozenset()  # of what a load found, those that it did not take included

    @property
    def ok(self) -> bool:
        return not self.cause


class Finished(NamedTuple):
    """Ended work since the last poll; each job once.

    ``staged``: tags of ``KVCacheMover.stage`` whose blocks are no longer read; they precede ``stores``.
    """

    loads: list[Moved]
    staged: list[int]
    stores: list[Moved]

    @property
    def stored(self) -> list[tuple[int, bool]]:
        """(tag, present in the pool) of staged records."""
        return [
            (tag, ok)
            for store in self.stores
            for tag, ok in zip(cast("tuple[int, ...]", store.job), store.moved, strict=True)
        ]

    @property
    def refused(self) -> list[int]:
        """Tags of staged records that the store refused for themselves."""
        return [
            tag
            for store in self.stores
            for tag, no in zip(cast("tuple[int, ...]", store.job), store.refused, strict=False)
            if no
        ]


@dataclass(eq=False)
class Job(Generic[Item]):
    """Items to load or to store; each block is ``width`` consecutive items."""

    name: Hashable
    is_load: bool
    items: Sequence[Item]
    timeout_s: float  # of each batch; of a load's, without progress
    started: float
    deadline: float
    after: Event  # a load may write its blocks after this
    priority: int = 0
    width: int = 1
    need: Need = Need.ALL
    short: bool = False  # more is wanted, and known to be missing
    taken: int = 0  # items taken by parts
    parts: int = 0
    cause: str = ""  # of its failure; "" so far
    error: Exception | None = None
    missing: list[int] = field(default_factory=list)
    near: int = 0  # items of a load that the nearer of two pools had
    writers: set[bytes] = field(default_factory=set)  # of a load's items

    def __post_init__(self) -> None:
        self.moved = bytearray(len(self.items))
        self.known = bytearray(len(self.items))  # in the pool before it was sent
        self.refused = bytearray(len(self.items))  # by the store, for itself

    @property
    def pending(self) -> bool:
        return self.taken < len(self.items) and not self.cause

    def blocks(self, items: bytearray) -> list[bool]:
        """By block: whether all its items are set."""
        return [all(items[first : first + self.width]) for first in range(0, len(items), self.width)]

    def refused_blocks(self) -> list[bool]:
        """By block: whether the store refused an item of it for itself."""
        return [
            any(self.refused[first : first + self.width]) for first in range(0, len(self.items), self.width)
        ]

    def moved_blocks(self) -> list[bool]:
        """By block: whether it was moved and is useful."""
        moved = self.blocks(self.moved)
        if self.is_load and self.need is Need.ALL and self.cause:
            return [False] * len(moved)
        if self.is_load and self.need is Need.LEADING and False in moved:
            first = moved.index(False)
            return moved[:first] + [False] * (len(moved) - first)
        return moved


class Stage(Enum):
    """The stage of a part. Stores: GATHER (with staging), SEND; loads: GET, SCATTER (with staging)."""

    GATHER = "blocks are copied to its slots"
    SEND = "the store takes what it does not have"
    GET = "the store fills its slots"
    SCATTER = "its slots are copied to blocks"

    @property
    def copies(self) -> bool:
        return self in (Stage.GATHER, Stage.SCATTER)


@dataclass(eq=False)
class Part(Generic[Item]):
    stage: Stage
    job: Job[Item]
    places: list[int]  # of its items in the job
    slots: list[Any]
    copy: Event | None = None  # of GATHER and SCATTER
    transfer: Batch | None = None  # of SEND and GET
    deadline: float = 0.0  # of the transfer
    reported: bool = False  # as a batch that does not stop

    @property
    def items(self) -> list[Item]:
        return [self.job.items[place] for place in self.places]

    @property
    def keys(self) -> list[str]:
        return [self.job.items[place].key for place in self.places]

    def begin(self, stage: Stage, transfer: Batch, deadline: float) -> None:
        self.stage, self.transfer, self.deadline, self.copy = stage, transfer, deadline, None

    def over(self) -> bool:
        if self.stage.copies:
            assert self.copy is not None
            return self.copy.query()
        assert self.transfer is not None
        return self.transfer.done()

    def cancel(self) -> None:
        """Cancel its transfer; a copy cannot stop, but ends soon."""
        if not self.stage.copies:
            assert self.transfer is not None
            self.transfer.cancel()

    def settle(self, timeout_s: float, clock: Clock) -> None:
        """Wait at most ``timeout_s`` for its end."""
        if not self.stage.copies:
            assert self.transfer is not None
            self.transfer.settle(timeout_s)
            return
        until = clock.monotonic() + timeout_s
        while not self.over() and (left := until - clock.monotonic()) > 0:
            clock.sleep(min(COPY_PAUSE_S, left))
