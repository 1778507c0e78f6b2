"""Types of the C++ core (``kvpool/_native/*.cpp``)."""

from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import Buffer

# Operations of IoExecutor.submit.
PUT: int
GET: int
CONTAINS: int
DELETE: int
TOUCH: int
PUT_ABSENT: int
EXPIRE: int

# Result of one key of a batch; Batch.results() has one byte per key, in the order of the keys.
MISS: int  # get, contains, touch, delete: not there (or damaged, and then deleted and counted)
OK: int  # done; for get: the buffer holds exactly the bytes that were put
NO_ROOM: int  # put: the store is full and could not make room
FAULT: int  # an I/O error; Batch.error() has the first one in words
REFUSED: int  # the same, of this key alone: too large, or no right to it
CANCELLED: int  # Batch.cancel() came first
TIMED_OUT: int  # the deadline of the batch came first
PRESENT: int  # put absent: the value was there, or another put of its key that was under way put it
NEAR: int  # OK of a get or a question of presence, of the nearer of two pools

RECORD_HEADER_NBYTES: int
RECORD_VERSION: int
MIN_CAPACITY_NBYTES: int  # of a file pool; less is none

# token_ids: ints from 0 to 2**64 - 1, or a contiguous buffer of 16, 32 or 64 bit integers in native byte order
# (bytes are refused: cast them). extras: block index to its extra keys as CBOR; an index behind the
# last full block is ignored. Tokens behind the last full block are not hashed. ValueError for anything else.
def hash_chain(
    algorithm: str,
    parent: bytes,
    token_ids: Sequence[int] | Buffer,
    block_tokens: int,
    extras: dict[int, bytes],
) -> list[bytes]: ...

class HashCache:
    """kvpool/_native/key/hash_cache.h. Any thread."""

    def __init__(self, max_nbytes: int) -> None: ...
    @property
    def nbytes(self) -> int: ...

# The last 8 bytes of each hash, read big-endian, as packed little-endian u64: what KV events carry. cache: None: all
# are computed. owner: of what is kept there; others' is not used.
def hash_chain64(
    algorithm: str,
    parent: bytes,
    token_ids: Sequence[int] | Buffer,
    block_tokens: int,
    extras: dict[int, bytes],
    cache: HashCache | None = None,
    owner: str = "",
) -> bytes: ...
def digest(algorithm: str, data: Buffer) -> bytes: ...

# What b"".join(hashes) is, in a third of its time for hashes that are not in a cache. ValueError: they are of
# different lengths, or not bytes.
def pack_hashes(hashes: Sequence[bytes]) -> bytes: ...

# XXH3-64.
def checksum(data: Buffer) -> int: ...

# "avx512", "avx2", "sse2" or "portable": what computes the checksums in this process.
def checksum_isa() -> str: ...

# The fields of a record on a server: their names, and how many bytes of the payload each has. The header is behind
# those of the last.
def cut_record(payload_nbytes: int) -> list[tuple[str, int]]: ...

# What those fields take of a server with jemalloc; not its key.
def record_server_nbytes(payload_nbytes: int) -> int: ...

# How far two payloads of KV are from each other. pieces: (element, bytes) of each, which repeat, in the order of the
# payload; elements as torch calls them: float32, float16, bfloat16, float8_e4m3fn, float8_e5m2. By piece: the sum of
# the squares of what they differ by, and of those of ours; inf where one side alone is infinite or no number.
def distances(
    ours: Buffer, theirs: Buffer, pieces: Sequence[tuple[str, int]]
) -> list[tuple[float, float]]: ...

# writer: 16 bytes, or none.
def pack_header(key: str, payload: Buffer, writer: bytes = b"") -> bytes: ...

# None if right, else the first thing wrong: truncated, magic, version, flags, length, fingerprint, hash, group,
# rank or checksum.
def verify_record(key: str, header: Buffer, payload: Buffer) -> str | None: ...

# FAULT or REFUSED: how a server's error reply ends a key.
def error_status(words: str) -> int: ...

class Batch:
    """The results to come of one submit(). Dropping it does not stop it; its buffers stay held until it is done."""

    def done(self) -> bool:
        """Whether every key has its result and no native thread touches a buffer any more. Never blocks.

        The buffers are released by the first call on this object, or on its executor, that finds the batch done.
        """

    def wait(self, timeout_s: float) -> bool:
        """Blocks without the GIL, for 0 to 3600 s; returns done(). Signal handlers run meanwhile."""

    def cancel(self) -> None:
        """Cancels at once what no thread has started; what is running stops at its next 256 KiB chunk."""

    def given_up(self) -> bool:
        """Whether it was cancelled or is out of time; what threads have started may still run."""

    def results(self) -> bytes:
        """One status a key, or of a lookup one a record. RuntimeError before done()."""

    def writers(self) -> bytes:
        """Of a GET: 16 bytes a key, who wrote the record that it read; else zeros. RuntimeError before done()."""

    def error(self) -> str | None:
        """The first fault in words: ``put /path: Permission denied``. RuntimeError before done()."""

class IoExecutor:
    """A fixed number of native threads. Belongs to the process that made it: make one after fork()."""

    def submit(
        self,
        op: int,
        keys: Sequence[str],
        buffers: Sequence[Buffer] | None,
        timeout_s: float,
        max_s: float | None = None,
        writer: bytes = b"",
    ) -> Batch:
        """Never blocks. buffers: one C-contiguous buffer a key for PUT, PUT_ABSENT and GET (GET: writable), else None.

        It ends timeout_s after the last byte of its connections, and of others while it waits for one; at the latest
        after max_s (None: timeout_s). writer: of what is put: 16 bytes, or none.

        ValueError, TypeError or BufferError when anything in it is not right, and nothing is submitted then.
        RuntimeError when closed, in a forked child, or with 1,048,576 keys waiting ("queue full ...").
        """

    def lookup(
        self, prefix: str, groups: Sequence[tuple[bytes, int, int, int, int, bool, int]], timeout_s: float
    ) -> Batch:
        """A lookup (store/lookup.h); groups: as ``LookupGroup``'s fields.

        Never blocks; the hashes stay held until the batch is done. It has one result a record: MISS for those that were
        not asked for, too. It counts as one key that waits. ValueError when anything in it is not right; RuntimeError
        as submit().
        """

    def counters(self) -> dict[str, int]:
        """Totals since the start: puts, put_nbytes, present_puts, get_hits, get_misses, get_nbytes, contains_hits,
        contains_misses, deletes, delete_misses, expires, expire_misses, no_room, faults, cancelled, timed_out (keys,
        not batches).

        Gauge: queued (keys that no thread has taken; a lookup counts as one).
        Files: damaged, damaged_<cause> with the causes of verify_record(), evicted, evicted_nbytes,
        eviction_passes; gauge: stored_nbytes (all processes together; never too low).
        Servers: damaged and damaged_<cause> as well, evicted (0: the server does not tell), connections,
        disconnections, failed_dials, moved, asked; gauge: up_connections.
        Near and far: near_hits, far_hits (of gets), filled, not_filled, behind, behind_present, lost, no_room_far,
        refused_far, near_faults, far_faults, uses_told, uses_missing, uses_lost; gauge: behind_waiting
        (store/near_far/near_far.h).
        """

    def close(self, timeout_s: float) -> bool:
        """Cancels everything and joins the threads, for 0 to 3600 s. False: some thread is stuck; call again."""

class RefusedSize:
    """Records that a server's limits do not let through (kvpool/_native/store/refused_size.h). Any thread."""

    def __init__(self) -> None: ...
    # Why a record of so many bytes is not worth a connection now; empty: move it.
    def why(self, nbytes: int) -> str: ...
    # The server ended a connection with such a record under way; ``said``: in its own words about the protocol.
    def ended(self, nbytes: int, words: str, said: bool) -> None: ...
    def moved(self, nbytes: int) -> None: ...
    def forget(self) -> None: ...

class RefusedDirectory(Exception):
    """Why a directory is not taken for a pool, and what to do; without its name."""

# These raise OSError with errno and file name when the directory cannot be made or used, and RefusedDirectory.
# capacity_nbytes: of a pool without one; what stands in it holds for all its processes. 2^63 - 1: of none. None: of a
# pool that is there; opening writes nothing, and nothing is evicted.
# ``lock_patience_s``: for another process that holds a lock of the pool without a turn; then it counts as stopped.
def open_file_executor(
    root: str, capacity_nbytes: int | None, threads: int, lock_patience_s: float = 0.5
) -> IoExecutor: ...

# Of a pool that is there, for all its processes: kvpool/_native/store/pool_capacity.h. MIN_CAPACITY_NBYTES to 2^63 - 2.
def set_pool_capacity(root: str, nbytes: int) -> None: ...

# Makes an empty or missing directory a pool; of one that is a pool already, what is missing in it.
def make_file_pool(root: str) -> None: ...

class PoolListing:
    """kvpool/_native/store/pool_listing.h. One thread at a time; the GIL is released."""

    def __init__(self, root: str, tenant: str, namespace: str, most_records: int) -> None: ...
    def look(self) -> int: ...  # OSError
    def changes(self) -> list[tuple[int, list[int], list[int]]]: ...  # group, hashes that came, that went
    def told(self) -> None: ...
    def forget(self) -> None: ...

# Bytes in all, free, and those of the free ones that a pool leaves to others; zeros: unknown.
def file_system(path: bytes) -> tuple[int, int, int]: ...

# The file of all authorities that this Linux distribution trusts; empty: in none of the usual places.
def system_authorities() -> str: ...

class RespError(RuntimeError):
    """A Redis or Valkey server refused at open, in its own words: ``host:6379: AUTH: WRONGPASS ...``."""

class TlsError(RuntimeError):
    """A file for TLS cannot be used: its path and why, nothing of its contents."""

# user, password, its file, database, ttl_s, connections, tls, client, version: of any server; empty text for what is
# not used. The files of password and TLS are read at each dial, those of TLS if they changed.
# `tls`: paths of PEM files: authorities (empty: the system's), a client's certificate and its key (both or none); None:
# in plain.
ServerSettings = tuple[str, str, str, int, float, int, tuple[str, str, str] | None, str, str]

# A Redis or Valkey server: give host and port, or unix_path. Connects once and checks, for at most 2 s an address,
# then keeps `connections` of its own. OSError when the server cannot be reached, RespError when it refuses, TlsError
# before either.
def open_resp_executor(host: str, port: int, unix_path: str, settings: ServerSettings) -> IoExecutor: ...

class Topology:
    """Which node serves which of the 16,384 hash slots (kvpool/_native/store/topology.h). Any thread."""

    # (host, port, [(first slot, last slot), ...]) of each node. Blocks for the resolver where a host is a name.
    # ValueError: what a server said makes no sense.
    def install(self, nodes: Sequence[tuple[str, int, Sequence[tuple[int, int]]]]) -> None: ...

    # Blocks until the data path has reason to think that it changed, until close(), or for 0 to 3600 s; whether
    # there was one.
    def wait_until_stale(self, timeout_s: float) -> bool: ...
    def close(self) -> None: ...
    def closed(self) -> bool: ...

# Whether it can be the host of a node: a name or a numeric address.
def is_host(host: str) -> bool: ...

class Replies:
    """A server's replies (RESP2) as bytes, int, list, None, or ``to_error(words)``, from pieces of any size."""

    def __init__(self, to_error: Callable[[bytes], object]) -> None: ...

    # ValueError: no RESP2, or beyond a limit of store/resp_parser.h. It is useless from then on.
    def feed(self, data: Buffer) -> None: ...

    # Whether a whole reply is there for take(); RuntimeError of take() without.
    def ready(self) -> bool: ...
    def take(self) -> Any: ...

    # Whether all that was fed is taken.
    def empty(self) -> bool: ...

# Several servers: none is asked before the first install(). The topology is closed with the executor.
def open_routed_resp_executor(settings: ServerSettings) -> tuple[IoExecutor, Topology]: ...

# Forwards to two others (store/near_far/near_far.h). all_goes_far: of what is put near; else what is used twice.
# far_ttl_s: of an unused value far; 0: for ever. Close it first.
def open_near_far_executor(
    near: IoExecutor, far: IoExecutor, all_goes_far: bool, far_ttl_s: float
) -> IoExecutor: ...

class TooMuchWork(RuntimeError):
    """Raised by Table.match and what calls it: a prompt that others would wait for too long."""

class NotAtOnce(RuntimeError):
    """Raised by Rows.answer and again with at_once: it waits for a batch, or takes more than an event loop may."""

class MalformedEvents(ValueError):
    """Raised by Table.apply; nothing was applied. Says what is wrong, at which byte."""

class ClearedTooOften(MalformedEvents):
    """Raised by Table.apply for a batch that stores and clears in turns; the worker holds nothing any more."""

class Matches:
    """One row a (worker, rank). Columns are packed native u32."""

    def __len__(self) -> int: ...
    def workers(self) -> list[str]: ...
    def dp_ranks(self) -> bytes: ...
    def column(self, column: int) -> bytes:
        """Leading blocks. 0 to 3: in the device, host, disk, pool tier; 4: in any of the first three; 5: in any."""

class MemoryBudget:
    """kvpool/_native/index/table.h: what the tables that share it may take. Any thread."""

    def __init__(self, limit_nbytes: int) -> None: ...
    @property
    def used_nbytes(self) -> int: ...

class Table:
    """kvpool/_native/index/table.h. Any thread; the GIL is released while the table is read or changed."""

    # max_blocks: 1 to 2**32. block_tokens: of a block that is hashed; 0: not known.
    def __init__(
        self, max_blocks: int, reuse_reports: bool, block_tokens: int, budget: MemoryBudget | None
    ) -> None: ...

    # The counts of Applied in table.h, in their order. dp_rank: where the batch names none. pool, near: who holds
    # what the batch says of the pool, of a near pool; None: the worker. The bytes of payload must not change
    # meanwhile. ValueError: no name of 1 to 256 bytes, or too many workers.
    def apply(
        self, worker: str, payload: Buffer, dp_rank: int, pool: str | None, near: str | None
    ) -> tuple[int, ...]: ...

    # hashes64: packed little-endian u64, at most 4,194,304 of them. Unknown workers are left out. ValueError: the
    # prompt goes in circles. TooMuchWork: others would wait for too long.
    def match(self, hashes64: Buffer, workers: Sequence[str] | None) -> Matches: ...

    # Whether the worker holds each hash in the pool. at_once: it waits for no batch; NotAtOnce.
    def pooled(self, worker: str, hashes64: Buffer, at_once: bool) -> list[bool]: ...

    # False: not known.
    def remove_worker(self, worker: str) -> bool: ...

    # tiers: bits 0 to 3 for device, host, disk, pool. dp_rank None: all ranks. False: no such rank.
    def clear(self, worker: str, dp_rank: int | None, tiers: int) -> bool: ...

    # One segment of the table; cursor 0 begins, and 0 comes back at the end.
    def mark(self, worker: str, cursor: int) -> int: ...

    # (blocks removed from the worker, marks that are left).
    def sweep(self, worker: str) -> tuple[int, int]: ...

    # Holdings of a worker that left to make room, since they were last cleared.
    def evicted(self, worker: str) -> int: ...
    def workers(self) -> list[str]: ...

    # (digest, blocks) of what it holds, as Content in table.h; None: not known.
    def content(self, worker: str) -> tuple[int, int] | None: ...
    def image(self) -> TableImage: ...
    # Blocks of all its ranks and groups in the device, host, disk and pool tier; zeros for one that is not known.
    def held_by(self, worker: str) -> list[int]: ...
    def stats(self) -> dict[str, Any]: ...

class RankState:
    """kvpool/_native/index/answer.h. Any thread reads; one at a time writes."""

    version: int  # odd: a change is under way
    sequence: int
    heard_at_ms: int
    stale: bool
    has_feed: bool  # it publishes what it holds
    def __init__(self) -> None: ...

class Answer:
    """What the ranks of Rows hold of a prompt."""

    def moved(self) -> tuple[int, ...]:
        """Rows that have to be asked again under the lock of their rank."""
    def columns(
        self,
    ) -> tuple[
        tuple[int, ...],
        tuple[int, ...],
        tuple[int, ...],
        tuple[int, ...],
        tuple[int, ...],
        tuple[int, ...],
        tuple[bool, ...],
        tuple[int, ...],
    ]:
        """Prompt, device, local and pool blocks, sequences, staleness in ms, whether stale, loadable blocks."""
    def most(self) -> tuple[int, int, int, int]:
        """Prompt blocks, and the most that one row has on its device, locally and in the pool."""
    def pack(self) -> bytes:
        """A packed LookupResponse, byte for byte as protobuf makes it."""

class Rows:
    """Ranks in the order of their answer; immutable. The GIL is released while the table is read."""

    # rows: worker, dp_rank, address, block_tokens, name in the table, of its pool, its near pool there (empty: none),
    # state.
    # are_all: they are all that the table has.
    def __init__(
        self, rows: tuple[tuple[str, int, str, int, str, str, str, RankState], ...], are_all: bool
    ) -> None: ...

    # hashes64: packed little-endian u64. now_ms: by the clock of heard_at_ms. at_once: or NotAtOnce.
    def answer(self, table: Table, hashes64: Buffer, now_ms: int, at_once: bool) -> Answer: ...
    def again(
        self, row: int, table: Table, hashes64: Buffer, now_ms: int, answer: Answer, at_once: bool
    ) -> None: ...

class RankLoad:
    """kvpool/_native/index/ranking.h: what was last said of how busy a rank is, and what was promised to it. Under the
    GIL."""

    pool_cost: float | None  # of a token from the pool, as measured
    near_cost: float | None  # and from the near pool of its host
    speed: float | None  # tokens that it computes in a second, as measured
    session_tokens: int  # of the sessions whose home it is
    capacity_tokens: int | None  # of its KV cache
    reserved_cost: int
    def __init__(self) -> None: ...
    # It is the best for a request of this cost; numbers go up.
    def pick(self, number: int, cost: float) -> None: ...
    # A request without a session brings so many tokens.
    def place(self, now_s: float, tokens: int) -> None: ...
    # Requests; prompt tokens, None: not known; 0 to 1.
    def report(
        self, now_s: float, running: int, waiting: int, queued_tokens: int | None, kv_usage: float
    ) -> None: ...
    def scrape(
        self,
        now_s: float,
        running: int,
        waiting: int,
        queued_tokens: int | None,
        kv_usage: float,
        asleep: bool,
    ) -> None: ...
    # A page could not be read.
    def fail(self, now_s: float) -> None: ...
    # The load, as above; its source, 1: reported, 2: scraped; its age in seconds; asleep. None: not known.
    def known(
        self, now_s: float, keep_s: float
    ) -> tuple[tuple[int, int, int | None, float], int, float, bool] | None: ...

class Ranking:
    """The rows of some answers, the cheapest for the prompt first (kvpool/_native/index/ranking.h)."""

    # parts: an answer, what is known of each of its rows, and of the prompt's items, by kind of encoder: how many the
    # pool has, and (end, tokens) of each that it lacks; and the kind of each row; None: the prompt has no items. costs:
    # local, pool, waiting, running, usage, speed, move, encode; whether what is known of a rank takes the place of
    # local, pool, waiting, and speed. session: a number that orders equal rows, whether its requests follow each other,
    # whether that number chooses its home, and its home: part, row, tokens of the prompt that it holds; the same if its
    # events are not to be trusted.
    def __init__(
        self,
        parts: list[
            tuple[
                Answer,
                list[RankLoad | None],
                tuple[Sequence[tuple[int, Sequence[tuple[int, int]]]], Sequence[int]] | None,
            ]
        ],
        costs: tuple[float, ...],
        prompt_tokens: int | None,
        now_s: float,
        keep_s: float,
        keep_failed_s: float,
        limit: int | None,
        session: tuple[int, bool, bool, tuple[int, int, int, int, int] | None] | None = None,
    ) -> None: ...
    def __len__(self) -> int: ...
    # Part and row of the first, what it costs to compute, to fetch and to encode there, and tokens that its device
    # memory lacks.
    def best(self) -> tuple[int, int, int, int]: ...
    # A packed RouteResponse, byte for byte as protobuf makes it.
    def pack(self, reservation: str) -> bytes: ...
    # A row, and the other fields of a Pick in their order; trust and source as numbers.
    def picks(self) -> list[tuple[Any, ...]]: ...

# Commas, and opening brackets and braces, of a text; in strings, too.
def json_size(text: Buffer) -> tuple[int, int]: ...

# The token ids of a list in JSON, packed native u32. ValueError: what ``text`` is not.
def read_token_list(text: Buffer, most: int) -> bytes: ...

# (model, tenant, workers, whether the prompt is token ids, its first byte, the byte behind its last) of a packed
# LookupRequest; None: protobuf has to judge it (kvpool/_native/index/lookup_request.h).
def read_lookup_request(packed: Buffer) -> tuple[str, str, list[str], bool, int, int] | None: ...

class DamagedImage(ValueError):
    """Raised by table_of. Says what is wrong."""

class TableImage:
    """A copy of what a table holds (kvpool/_native/index/table_image.h)."""

    def pack(self) -> bytes: ...

# A table with what is packed. The bytes must not change meanwhile.
def table_of(
    packed: Buffer, max_blocks: int, reuse_reports: bool, block_tokens: int, budget: MemoryBudget | None
) -> Table: ...
