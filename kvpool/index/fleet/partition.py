"""``Partition``: the workers of a fleet that share a table, and their blocks of a prompt.

**A row is true as of its sequence**: credited blocks are exact after that batch. Replies are native
(``kvpool/_native/index/answer.h``); rows whose rank applied a batch meanwhile are read again here, under its lock.

Threads: any. Writers of ``members``, ``namespaces`` or ``nears`` hold the fleet's lock; readers take ``members`` once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from kvpool import _native
from kvpool.discovery.worker import Worker
from kvpool.errors import ConfigError, KVPoolError
from kvpool.index.answer import Lookup
from kvpool.index.fleet.media import Media, find_media
from kvpool.index.fleet.rank import ONE_SEED, Rank, RankKey, near_holder, pool_holder
from kvpool.index.fleet.table import REFUSED, PrefixIndex, refusal
from kvpool.index.limits import NotAtOnce
from kvpool.index.prompt import Prompt
from kvpool.key.hashing import BlockHasher, Multimodal, seed_id

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Rows that an event loop reads again, each a look at every hash; above the number of applying threads.
MOVED_AT_ONCE = 8
MAX_NAMESPACES = 1024  # of blocks, and as many of outputs of encoders


class Key(NamedTuple):
    """Equal for all workers of a partition."""

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
    """Ranks by name and number, with the columns that no prompt changes. Immutable.

    ``are_all``: all of their partition, not some candidates.
    """

    def __init__(self, ranks: Iterable[Rank], *, are_all: bool = True) -> None:
        self.ranks = tuple(sorted(ranks, key=lambda rank: (rank.worker.name, rank.publisher.dp_rank)))
        self.rows = _native.Rows(
            tuple(
                (
                    rank.worker.name, rank.publisher.dp_rank, rank.worker.address, rank.worker.block_tokens,
                    rank.holder, rank.pool, rank.near, rank,
                )
                for rank in self.ranks
            ),
            are_all,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.ranks)

    def among(self, workers: frozenset[str]) -> Members:
        """Of these workers, by name; itself if there are no others."""
        ranks = [rank for rank in self.ranks if rank.worker.name in workers]
        return self if len(ranks) == len(self.ranks) else Members(ranks, are_all=False)

    @property
    def keys(self) -> list[RankKey]:
        """Of the ranks' present starts."""
        return [rank.key for rank in self.ranks]

    @cached_property
    def encoders(self) -> tuple[Sequence[tuple[str, ...]], Sequence[int]]:
        """The different namespaces of their encoders' outputs, and of which each rank is."""
        kinds: dict[tuple[str, ...], int] = {}
        of_ranks = [kinds.setdefault(rank.worker.media_namespaces, len(kinds)) for rank in self.ranks]
        return list(kinds), of_ranks

    @cached_property
    def places(self) -> Mapping[tuple[str, int], int]:
        """The row of each worker's rank, by id and number."""
        return {rank.key[:2]: row for row, rank in enumerate(self.ranks)}

    def row_of(self, key: RankKey) -> int | None:
        """None: another worker, or another start."""
        row = self.places.get(key[:2])
        return row if row is not None and self.ranks[row].key == key else None


class Answer(NamedTuple):
    """A row for every rank of ``members``, with its blocks of a prompt of these hashes. ``media``: None: no items."""

    members: Members
    rows: _native.Answer
    hashes: Buffer
    media: Media | None = None

    def lookup(self) -> Lookup:
        ranks = self.members.ranks
        return Lookup(
            tuple(rank.worker.name for rank in ranks),
            tuple(rank.publisher.dp_rank for rank in ranks),
            tuple(rank.worker.address for rank in ranks),
            tuple(rank.worker.block_tokens for rank in ranks),
            *self.rows.columns(),  # from ``prompt_blocks`` on
            tuple(self.pool_media() or [0] * len(ranks)),
        )

    def pool_media(self) -> Sequence[int]:
        """Of each row, as in ``Lookup``; empty: all 0."""
        if self.media is None or not any(found.held for found in self.media.found):
            return ()
        return [self.media.found[kind].held for kind in self.media.kinds]


class Pool(NamedTuple):
    """What the pool has of one namespace, in one partition: ``holder`` in its ``table``. ``is_media``: outputs of
    encoders, not blocks.
    """

    tenant: str
    namespace: str
    table: PrefixIndex
    holder: str
    is_media: bool = False


class Partition:
    """``namespaces``: of the pool, with the number of their workers; 0: known from the pool alone. ``media``: those of
    outputs of encoders, alike. ``nears``: holders of near pools, alike.

    ``hasher``: hashes tokens as its workers do; None: ``no_hasher`` says why. ``hashes``: of all partitions; those of
    a tenant serve only itself.
    """

    def __init__(
        self,
        key: Key,
        index: PrefixIndex,
        seed: str | None,
        clock: Callable[[], float] = time.monotonic,
        hashes: _native.HashCache | None = None,
    ) -> None:
        self.key = key
        self.index = index
        self.members = Members(())
        self.namespaces: Counter[str] = Counter()
        self.media: Counter[str] = Counter()
        self.nears: Counter[str] = Counter()
        self.hasher: BlockHasher | None = None
        self.no_hasher = ""
        self._clock = clock
        if key.hash_seed_id != seed_id(seed):
            self.no_hasher = f"hash with another seed than the index: {ONE_SEED}"
        else:
            try:
                self.hasher = BlockHasher(
                    key.block_tokens, key.hash_algorithm, seed, cache=hashes, owner=key.tenant
                )
            except ConfigError:  # the case that check_worker leaves: xxhash_cbor without a seed
                self.no_hasher = f"hash with {key.hash_algorithm}, which needs a seed: {ONE_SEED}"

    def enter_pools(self, worker: Worker) -> None:
        """Errors: ``KVPoolError`` without room for its namespaces; then it is not entered."""
        namespaces = [worker.namespace] if worker.namespace else []
        self._make_room(self.namespaces, namespaces)
        self._make_room(self.media, worker.media_namespaces)
        self.namespaces.update(namespaces)
        self.media.update(worker.media_namespaces)
        if holder := near_holder(worker):
            self.nears[holder] += 1

    def leave_pools(self, worker: Worker) -> None:
        if worker.namespace:
            self.namespaces[worker.namespace] -= 1
        self.media.subtract(worker.media_namespaces)
        if holder := near_holder(worker):
            self.nears[holder] -= 1
            if not self.nears[holder]:  # nobody tells what it holds
                del self.nears[holder]
                self.index.remove_worker(holder)

    def pools(self) -> list[Pool]:
        known = ((False, self.namespaces), (True, self.media))
        return [
            Pool(self.key.tenant, namespace, self.index, pool_holder(namespace), is_media)
            for is_media, namespaces in known
            for namespace in namespaces
        ]

    def _make_room(self, known: Counter[str], namespaces: Collection[str]) -> None:
        more = len({*namespaces} - known.keys())
        if not more or len(known) + more <= MAX_NAMESPACES:
            return
        for unused in [other for other, workers in known.items() if not workers and other not in namespaces]:
            self.index.remove_worker(pool_holder(unused))
            del known[unused]
        if len(known) + more > MAX_NAMESPACES:
            raise KVPoolError(f"workers of one model name more than {MAX_NAMESPACES} namespaces")

    def hashes(self, prompt: Prompt, lora: tuple[str, str] | None = None) -> Buffer:
        """Of a prompt in tokens; needs ``hasher``. ``lora``: of its model, unless the prompt names one."""
        assert self.hasher is not None
        assert prompt.token_ids is not None
        return self.hasher.hashes64(
            prompt.token_ids,
            lora=prompt.lora or lora,
            cache_salt=prompt.cache_salt,
            multimodal=prompt.multimodal,
        )

    def answer(
        self, members: Members, hashes: Buffer, items: Sequence[Multimodal] = (), *, at_once: bool = False
    ) -> Answer:
        """A row for each of these ranks, for a prompt with these ``items``.

        ``at_once``: waits for no batch, takes about 1 ms, or raises ``NotAtOnce``. Errors: as ``PrefixIndex.match``.
        """
        table, rows, now_ms = self.index.native, members.rows, int(self._clock() * 1000)
        try:  # not refusals(): a context manager takes 1 us, as long as a short lookup
            answer = rows.answer(table, hashes, now_ms, at_once)
            moved = answer.moved()
            if at_once and len(moved) > MOVED_AT_ONCE:
                raise NotAtOnce(f"batches of {len(moved)} ranks came meanwhile")
            for place in moved:
                lock = members.ranks[place].lock
                if not lock.acquire(blocking=not at_once):
                    raise NotAtOnce("a batch is being applied")
                try:
                    rows.again(place, table, hashes, now_ms, answer, at_once)
                finally:
                    lock.release()
            media = find_media(table, *members.encoders, items, at_once) if items else None
        except REFUSED as error:
            raise refusal(error) from error
        return Answer(members, answer, hashes, media)


def merged(answers: Sequence[Answer]) -> Lookup:
    """All rows of the answers, by worker and rank."""
    if len(answers) == 1:
        return answers[0].lookup()
    return Lookup.of(sorted((row for one in answers for row in one.lookup()), key=lambda row: row[:2]))
