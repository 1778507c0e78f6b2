"""``PrefixIndex``: KV events in, leading blocks per worker and tier out.

Table and decoding are native (``kvpool/_native/index/table.h``, ``events.h``); types and errors are here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kvpool import _native
from kvpool.discovery.worker import MAX_DP_RANK
from kvpool.errors import ConfigError, KVPoolError, MalformedEvents, SnapshotRefused
from kvpool.index.limits import NotAtOnce
from kvpool.key.hashing import MAX_BLOCK_TOKENS
from kvpool.text import unknown

if TYPE_CHECKING:
    from typing_extensions import Buffer

Tier = Literal["device", "host", "disk", "pool"]
TIERS: tuple[Tier, ...] = ("device", "host", "disk", "pool")  # as in kvpool/_native/index/holders.h

DEFAULT_MAX_BLOCKS = 1 << 27  # 134 million: 2 to 4 GB
MAX_BLOCKS = 1 << 32

Column = Literal["device", "host", "disk", "pool", "local", "any", "memory"]

_COLUMNS: tuple[Column, ...] = (*TIERS, "local", "any", "memory")  # as in kvpool/_native/index/table.h


REFUSED = (_native.TooMuchWork, _native.NotAtOnce, ValueError, TypeError, BufferError)


class ClearedTooOften(MalformedEvents):
    """A batch stores and clears in turns, a walk over the table each time: its worker's blocks are dropped."""


def malformed(error: _native.MalformedEvents) -> MalformedEvents:
    kind = ClearedTooOften if isinstance(error, _native.ClearedTooOften) else MalformedEvents
    return kind(f"a batch of KV events is malformed: {error}")


def refusal(error: Exception) -> KVPoolError:
    """Of ``REFUSED``: ``KVPoolError`` at a limit, else ``ConfigError``; or ``NotAtOnce``."""
    if isinstance(error, _native.NotAtOnce):
        return NotAtOnce(str(error))
    return KVPoolError(str(error)) if isinstance(error, _native.TooMuchWork) else ConfigError(str(error))


@contextmanager
def refusals() -> Iterator[None]:
    try:
        yield
    except REFUSED as error:
        raise refusal(error) from error


class Applied(NamedTuple):
    """Changes by one batch, or all: block hashes, and events where the name says so."""

    stored: int  # new at this holder
    copied: int  # another physical copy at this holder
    repeated: int  # unchanged: stored before
    removed: int  # gone from this holder
    uncopied: int  # one physical copy fewer, others are left
    unknown: int  # removed, but not held by this holder
    refused: int  # stored, but without room
    doubted: int  # stored, of a sliding window from the prompt's root: perhaps gone already, so not credited
    cleared_events: int
    skipped_events: int  # of an unknown type or medium
    evicted: int  # cold blocks, of any worker, that made room
    lookahead_events: int  # stored, with hashes that cover tokens behind their block: no prompt has them


class Content(NamedTuple):
    """One worker's blocks, comparable between indexes with the same events.

    ``digest``: 64 bits over every block with its rank, KV-cache group, tier and copies, in any order; 0:
    nothing. ``blocks``: counted once per rank, group and tier.
    """

    digest: int
    blocks: int


class Match(NamedTuple):
    """How many leading blocks of a prompt one rank of one worker can use; 0: not even the first.

    ``pool_blocks``: in storage that this worker announced. ``local_blocks``: each block on device, host or disk.
    ``any_blocks``: local or in the pool.
    ``memory_blocks``: on device or host. Only these three count on across tiers.
    """

    worker: str
    dp_rank: int
    device_blocks: int
    host_blocks: int
    disk_blocks: int
    pool_blocks: int
    local_blocks: int
    any_blocks: int
    memory_blocks: int


def _column(name: Column) -> Any:
    number = _COLUMNS.index(name)
    return property(lambda matches: memoryview(matches._native.column(number)).cast("I"))


class Matches:
    """The answer of ``PrefixIndex.match``, in columns: row i of each belongs to ``workers[i]``.

    Only ranks that hold the first block in some tier have a row, unordered. A number column is a read-only
    ``memoryview`` of native 32-bit unsigned integers, with counts as in ``Match``. Iterating gives ``Match``es.
    Immutable.
    """

    __slots__ = ("_native",)

    def __init__(self, native: _native.Matches) -> None:
        self._native = native

    def __len__(self) -> int:
        return len(self._native)

    @property
    def workers(self) -> list[str]:
        """Names; a worker with several data-parallel ranks has several rows."""
        return self._native.workers()

    @property
    def dp_ranks(self) -> memoryview:
        return memoryview(self._native.dp_ranks()).cast("I")

    device_blocks: memoryview = _column("device")
    host_blocks: memoryview = _column("host")
    disk_blocks: memoryview = _column("disk")
    pool_blocks: memoryview = _column("pool")
    local_blocks: memoryview = _column("local")
    any_blocks: memoryview = _column("any")
    memory_blocks: memoryview = _column("memory")

    def __iter__(self) -> Iterator[Match]:
        columns = [getattr(self, f"{name}_blocks").tolist() for name in _COLUMNS]
        return map(Match._make, zip(self.workers, self.dp_ranks.tolist(), *columns, strict=True))

    def __repr__(self) -> str:
        return f"Matches({list(self)!r})"


class PrefixIndex:
    """Which workers hold which blocks, from their KV events; exact as of the last batch applied, until it is full.

    An index is **one partition**: its workers must share model, tenant, hash algorithm, hash seed and hash
    block size, since a 64-bit hash alone names a block.

    ``max_blocks``: distinct blocks, 1 to 2**32. ``memory``: shared with other indexes; each may have its
    first MiB, and none shrinks; None: no limit. A full index evicts blocks that were not stored or requested
    for a while, and counts them (``evicted``). Its workers are then credited with less, never more than they
    hold. A block costs 17 to 30 bytes where prompts share prefixes. ``reuse_reports``: some requests may run
    with vLLM's ``kv_cache_report_mode`` set to ``full``; ``docs/explanation/prefix-index.md`` has its cost.
    False counts copies exactly, and credits all blocks of a sliding window. ``block_tokens``: of a hashed
    block, for models with KV-cache groups of larger blocks; None: all groups have blocks of that size.

    Any thread; calls release the interpreter's lock while they work. A match waits for a batch that is being
    applied, and sees all of it or nothing. No I/O.
    """

    __slots__ = ("native",)

    def __init__(
        self,
        *,
        max_blocks: int = DEFAULT_MAX_BLOCKS,
        reuse_reports: bool = True,
        block_tokens: int | None = None,
        memory: _native.MemoryBudget | None = None,
    ) -> None:
        if type(max_blocks) is not int or not 1 <= max_blocks <= MAX_BLOCKS:
            raise ConfigError(f"max_blocks is a whole number from 1 to {MAX_BLOCKS}, not {max_blocks!r}")
        if type(reuse_reports) is not bool:
            raise ConfigError(f"reuse_reports is True or False, not {reuse_reports!r}")
        if block_tokens is not None and (
            type(block_tokens) is not int or not 1 <= block_tokens <= MAX_BLOCK_TOKENS
        ):
            raise ConfigError(
                f"block_tokens is a whole number from 1 to {MAX_BLOCK_TOKENS} or None, not {block_tokens!r}"
            )
        self.native = _native.Table(max_blocks, reuse_reports, block_tokens or 0, memory)

    @classmethod
    def of_image(
        cls,
        packed: Buffer,
        *,
        max_blocks: int = DEFAULT_MAX_BLOCKS,
        reuse_reports: bool = True,
        block_tokens: int | None = None,
        memory: _native.MemoryBudget | None = None,
    ) -> PrefixIndex:
        """An index from the bytes of ``image().pack()``; totals start from 0.

        Blocks without room are refused, and counted as ``evicted`` for their holders. Errors:
        ``SnapshotRefused`` for damaged bytes; ``ConfigError`` for the rest.
        """
        made = cls(max_blocks=max_blocks, reuse_reports=reuse_reports, block_tokens=block_tokens)
        try:
            made.native = _native.table_of(packed, max_blocks, reuse_reports, block_tokens or 0, memory)
            made.workers()
        except UnicodeDecodeError as error:
            raise SnapshotRefused("no image of a prefix index: its names are no text") from error
        except (ValueError, TypeError, BufferError) as error:
            raise SnapshotRefused(f"no image of a prefix index: {error}") from error
        return made

    def apply(
        self,
        worker: str,
        payload: Buffer,
        *,
        dp_rank: int = 0,
        pool: str | None = None,
        near: str | None = None,
    ) -> Applied:
        """Apply one batch of events: the last frame of a message of vLLM's publisher, as received.

        ``worker``: its name, 1 to 256 bytes of UTF-8; a new one is added. ``payload``: msgpack ``[timestamp,
        [events], data-parallel rank]``, at most 64 MiB, a million events and four million hashes.
        ``dp_rank``: the rank where the payload names none. ``pool``: the holder of the batch's pool blocks,
        as a worker of that name with rank 0, for workers that share a pool; ``near``: of those that lie in a near
        pool; None: the worker itself. Errors:
        ``MalformedEvents``, with nothing applied; ``ClearedTooOften``; ``ConfigError``.
        """
        _check_rank(dp_rank)
        try:
            return Applied._make(self.native.apply(worker, payload, dp_rank, pool, near))
        except _native.MalformedEvents as error:
            raise malformed(error) from error
        except (ValueError, TypeError, BufferError) as error:
            raise ConfigError(str(error)) from error

    def match(self, hashes64: Buffer, *, workers: Sequence[str] | None = None) -> Matches:
        """How many leading blocks of a prompt each worker can use, by tier.

        ``hashes64``: of ``BlockHasher.hashes64``: one little-endian u64 a block, at most 4,194,304.
        ``workers``: only these, known or not; None: all. A worker without a row holds no block of the prompt.
        With several KV-cache groups, counts are lengths from which all groups could go on: full attention
        needs every block, a sliding window its last ones. Errors: ``ConfigError``, also for circular hashes;
        ``KVPoolError`` for a prompt that takes too long (``Walk`` in the native core).
        """
        try:  # not refusals(): a context manager takes 1 us, as long as a short lookup
            return Matches(self.native.match(hashes64, workers))
        except REFUSED as error:
            raise refusal(error) from error

    def remove_worker(self, worker: str) -> bool:
        """Forget a worker and its blocks, at once; False: unknown.

        Takes time with the number of holder sets, not of blocks. Errors: ``ConfigError``.
        """
        with refusals():
            return self.native.remove_worker(worker)

    def clear(self, worker: str, *, dp_rank: int | None = None, tier: Tier | None = None) -> bool:
        """Forget a worker's blocks, but not the worker: of one rank or all, in one tier or all.

        False: no such rank. Errors: ``ConfigError``.
        """
        if dp_rank is not None:
            _check_rank(dp_rank)
        if tier is not None and tier not in TIERS:
            raise ConfigError(unknown("tier", str(tier), TIERS))
        tiers = (1 << len(TIERS)) - 1 if tier is None else 1 << TIERS.index(tier)
        with refusals():
            return self.native.clear(worker, dp_rank, tiers)

    def mark(self, worker: str, cursor: int = 0) -> int:
        """Mark all blocks that ``worker`` holds in the pool, for mark and sweep.

        Begin with cursor 0, and pass the returned cursor until it is 0. Then list the pool, ``apply`` present
        blocks as stored, which unmarks them, and ``sweep`` until no mark is left. Stored events unmark, too.
        Each call covers about 2,000 blocks of the table. Errors: ``ConfigError``.
        """
        with refusals():
            return self.native.mark(worker, cursor)

    def sweep(self, worker: str) -> tuple[int, int]:
        """Remove about 2,000 marked blocks: (blocks removed from ``worker``, marks left). Errors: ``ConfigError``."""
        with refusals():
            return self.native.sweep(worker)

    def evicted(self, worker: str) -> int:
        """Holdings of a worker that were evicted since its last clear.

        Above 0 it may be credited with less than it holds. Errors: ``ConfigError``.
        """
        with refusals():
            return self.native.evicted(worker)

    def workers(self) -> list[str]:
        """The names of all present workers, sorted."""
        return self.native.workers()

    def content(self, worker: str) -> Content | None:
        """Comparable between indexes; None: unknown."""
        with refusals():
            found = self.native.content(worker)
        return None if found is None else Content._make(found)

    def image(self) -> _native.TableImage:
        """A copy of the whole index; its ``pack()`` gives bytes for ``of_image``.

        Batches wait for the copy, about 10 ms for a million blocks, and not for packing.
        """
        return self.native.image()

    def held_by(self, worker: str) -> dict[Tier, int]:
        """A worker's blocks in each tier; zeros if unknown. Errors: ``ConfigError``."""
        with refusals():
            return dict(zip(TIERS, self.native.held_by(worker), strict=True))

    def __len__(self) -> int:
        """Distinct blocks with a holder."""
        return int(self.native.stats()["blocks"])

    @property
    def memory_nbytes(self) -> int:
        """Bytes of the table, free places included. It never shrinks."""
        return int(self.native.stats()["nbytes"])

    def counters(self) -> dict[str, int]:
        """Totals of all batches, under the names of ``Applied``, with ``batches`` and ``malformed_batches``.

        Gauges: ``blocks``, ``workers``, ``holders`` (rank and KV-cache group), ``holder_sets`` (distinct),
        ``copied_blocks`` (with more than one physical copy at a holder), ``unswept_blocks`` (places without
        holders, freed a few with each batch), ``memory_nbytes``, and ``device_blocks`` and so on per tier,
        once for each holder.
        """
        stats = self.native.stats()
        names = {"copies": "copied_blocks", "unswept": "unswept_blocks", "nbytes": "memory_nbytes"}
        totals = Applied._make(stats.pop("applied"))._asdict()
        totals |= {f"{tier}_blocks": n for tier, n in zip(TIERS, stats.pop("tier_blocks"), strict=True)}
        return totals | {names.get(name, name): value for name, value in stats.items()}

    def __repr__(self) -> str:
        stats = self.native.stats()
        return f"<PrefixIndex of {stats['blocks']} blocks at {stats['workers']} workers>"


def _check_rank(dp_rank: int) -> None:
    if type(dp_rank) is not int or not 0 <= dp_rank <= MAX_DP_RANK:
        raise ConfigError(f"dp_rank is a whole number from 0 to {MAX_DP_RANK}, not {dp_rank!r}")
