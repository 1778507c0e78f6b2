"""Types of the C++ core (``kvpool/_native/*.cpp``)."""

from collections.abc import Mapping, Sequence

from typing_extensions import Buffer

# Operations of Engine.submit.
PUT: int
GET: int
CONTAINS: int
DELETE: int

# Result of one key of a batch; Batch.results() has one byte per key, in the order of the keys.
MISS: int  # get, contains, delete: not there (or damaged, and then deleted and counted)
OK: int  # done; for get: the buffer holds exactly the bytes that were put
NO_ROOM: int  # put: the store is full and could not make room
FAULT: int  # an I/O error; Batch.error() has the first one in words
CANCELLED: int  # Batch.cancel() came first
TIMED_OUT: int  # the deadline of the batch came first

RECORD_HEADER_NBYTES: int

def hash_chain(
    algorithm: str,
    parent: bytes,
    token_ids: Sequence[int] | Buffer,
    block_tokens: int,
    extras: Mapping[int, bytes],
) -> list[bytes]: ...
def hash_chain64(
    algorithm: str,
    parent: bytes,
    token_ids: Sequence[int] | Buffer,
    block_tokens: int,
    extras: Mapping[int, bytes],
) -> bytes: ...
def digest(algorithm: str, data: Buffer) -> bytes: ...
def checksum_isa() -> str: ...
def pack_header(key: str, payload: Buffer) -> bytes: ...
def verify_record(key: str, header: Buffer, payload: Buffer) -> str | None: ...

class Batch:
    def done(self) -> bool: ...
    def wait(self, timeout_s: float) -> bool: ...
    def cancel(self) -> None: ...
    def results(self) -> bytes: ...
    def error(self) -> str | None: ...

class Engine:
    def submit(
        self, op: int, keys: Sequence[str], buffers: Sequence[Buffer] | None, timeout_s: float
    ) -> Batch: ...
    def fileno(self) -> int: ...
    def counters(self) -> dict[str, int]: ...
    def close(self, timeout_s: float) -> bool: ...

def open_file_engine(root: str, capacity_nbytes: int, threads: int) -> Engine: ...
