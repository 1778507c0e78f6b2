"""``Partition``: the workers of a fleet that share a table, and what each of them holds of a prompt.

**A row is true as of its sequence**: the blocks credited are those after exactly that batch. A lookup reads the
versions of all ranks, asks the table, reads the sequences, and reads the versions again; for a rank whose version moved
or was odd it asks once more, under the rank's lock.

Threads: any may ask. Whoever changes ``members`` or ``namespaces`` holds the fleet's lock; a reader takes ``members``
once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from kvpool.discovery.worker import Worker
from kvpool.errors import ConfigError
from kvpool.index.answer import Lookup, TierRow
from kvpool.index.dp_rank import DpRank, staleness_ms
from kvpool.index.table import Places, PrefixIndex
from kvpool.key.hashing import BlockHasher, seed_id

if TYPE_CHECKING:
    from typing_extensions import Buffer

_NOTHING = (0, 0, 0, 0)
# Of many ranks at once, and so without a line of Python for each.
_VERSION = attrgetter("version")
_SEQUENCE = attrgetter("sequence")
_STALE = attrgetter("stale")
_HEARD_AT_MS = attrgetter("heard_at_ms")


class Key(NamedTuple):
    """What workers must share to be in one partition."""

    tenant: str
    model: str
    hash_algorithm: str
    hash_seed_id: str
    block_tokens: int

    @classmethod
    def of(cls, worker: Worker) -> Key:
        return cls(
            worker.tenant, worker.model, worker.hash_algorithm, worker.hash_seed_id, worker.block_tokens
        )


class Members:
    """Ranks by name and number, and what an answer says of them whatever is asked. Immutable; a change makes another.

    So the columns of an answer are made without a call a row.
    """

    __slots__ = ("addresses", "block_tokens", "dp_ranks", "names", "places", "places_of_pool", "ranks")

    def __init__(self, ranks: Iterable[DpRank]) -> None:
        self.ranks = tuple(sorted(ranks, key=lambda rank: (rank.worker.name, rank.publisher.dp_rank)))
        self.names = tuple(rank.worker.name for rank in self.ranks)
        self.dp_ranks = tuple(rank.publisher.dp_rank for rank in self.ranks)
        self.addresses = tuple(rank.worker.address for rank in self.ranks)
        self.block_tokens = tuple(rank.worker.block_tokens for rank in self.ranks)
        self.places: Places = {rank.holder: (place,) for place, rank in enumerate(self.ranks)}
        of_pool: dict[str, list[int]] = {}
        for place, rank in enumerate(self.ranks):
            if rank.pool:
                of_pool.setdefault(rank.pool, []).append(place)
        self.places_of_pool: Places = {pool: tuple(places) for pool, places in of_pool.items()}

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def holders(self) -> list[str]:
        """Theirs in the table, and their pools'."""
        return [*self.places, *self.places_of_pool]


class Pool(NamedTuple):
    """What one namespace has in the pool, as one partition knows it: ``holder`` in its ``table``."""

    tenant: str
    namespace: str
    table: PrefixIndex
    holder: str


class Partition:
    """``namespaces``: of the pool, with the number of workers that use each; 0: only the pool has it.

    ``hasher``: makes the hashes of a prompt's tokens as its workers do; None: ``no_hasher`` says why.
    """

    def __init__(
        self, key: Key, index: PrefixIndex, seed: str | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.key = key
        self.index = index
        self.members = Members(())
        self.namespaces: Counter[str] = Counter()
        self.hasher: BlockHasher | None = None
        self.no_hasher = ""
        self._clock = clock
        if key.hash_seed_id != seed_id(seed):
            self.no_hasher = "hash with another seed than the index: start it with their PYTHONHASHSEED"
        else:
            try:
                self.hasher = BlockHasher(key.block_tokens, key.hash_algorithm, seed)
            except ConfigError:  # the one case that check_worker leaves: xxhash_cbor without a seed
                self.no_hasher = f"hash with {key.hash_algorithm}: start the index with their PYTHONHASHSEED"

    def answer(self, hashes: Buffer, candidates: frozenset[str] | None) -> Lookup:
        """A row for every rank of the candidates; None: of all."""
        members, holders = self._among(candidates)
        if not members:
            return Lookup()
        ranks, count = members.ranks, len(members)
        versions = list(map(_VERSION, ranks))
        matches = self.index.match(hashes, workers=holders)
        device, local = matches.placed(members.places, count, "device", "local")
        pool = [0] * count
        if members.places_of_pool:
            [pool] = matches.placed(members.places_of_pool, count, "pool")
        now_s = self._clock()
        sequences = list(map(_SEQUENCE, ranks))
        stale = list(map(_STALE, ranks))
        heard_at_ms = list(map(_HEARD_AT_MS, ranks))
        versions_after = list(map(_VERSION, ranks))
        for place, (before, after) in enumerate(zip(versions, versions_after, strict=True)):
            if before & 1 or before != after:
                rank = ranks[place]
                with rank.lock:
                    again = rank.index.match(hashes, workers=[rank.holder])
                    [device[place]], [local[place]] = again.placed({rank.holder: (0,)}, 1, "device", "local")
                    sequences[place], stale[place] = rank.sequence, rank.stale
                    heard_at_ms[place] = rank.heard_at_ms
        if True in stale:
            for place, untrusted in enumerate(stale):
                if untrusted:
                    device[place] = local[place] = 0
        return Lookup(
            members.names,
            members.dp_ranks,
            members.addresses,
            members.block_tokens,
            (memoryview(hashes).nbytes // 8,) * count,
            tuple(device),
            tuple(local),
            tuple(pool),
            tuple(sequences),
            staleness_ms(now_s, heard_at_ms),
            tuple(stale),
        )

    def tiers(self, hashes: Buffer, candidates: frozenset[str] | None) -> list[TierRow]:
        """``answer``, tier by tier, as of some batch of each rank that is not named."""
        members, holders = self._among(candidates)
        # Nobody is credited who was stale just before or after: what was read may be of that time.
        stale_before = list(map(_STALE, members.ranks))
        held: dict[int, tuple[int, ...]] = {}  # by place: device, host, disk, local
        pool = [0] * len(members)
        for match in self.index.match(hashes, workers=holders):
            for place in members.places_of_pool.get(match.worker, ()):
                pool[place] = match.pool_blocks
            blocks = (match.device_blocks, match.host_blocks, match.disk_blocks, match.local_blocks)
            for place in members.places.get(match.worker, ()):  # what all ranks that its batches name have
                held[place] = tuple(map(min, blocks, held.get(place, blocks)))
        rows = []
        for place, (rank, was_stale) in enumerate(zip(members.ranks, stale_before, strict=True)):
            untrusted = was_stale or rank.stale
            device, host, disk, local = _NOTHING if untrusted else held.get(place, _NOTHING)
            rows.append(
                TierRow(
                    rank.worker.name, rank.publisher.dp_rank, rank.worker.block_tokens,
                    memoryview(hashes).nbytes // 8, device, host, disk, local, pool[place],
                )
            )  # fmt: skip
        return rows

    def _among(self, candidates: frozenset[str] | None) -> tuple[Members, list[str] | None]:
        """Those who are asked about, and their holders in the table; None: all."""
        if candidates is None:
            return self.members, None
        members = Members(rank for rank in self.members.ranks if rank.worker.name in candidates)
        return members, members.holders
