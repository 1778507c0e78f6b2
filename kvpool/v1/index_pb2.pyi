from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Scope(_message.Message):
    __slots__ = ("model", "tenant", "lora_name", "lora_path", "cache_salt", "multimodal")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    LORA_PATH_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    MULTIMODAL_FIELD_NUMBER: _ClassVar[int]
    model: str
    tenant: str
    lora_name: str
    lora_path: str
    cache_salt: str
    multimodal: _containers.RepeatedCompositeFieldContainer[MultimodalItem]
    def __init__(self, model: _Optional[str] = ..., tenant: _Optional[str] = ..., lora_name: _Optional[str] = ..., lora_path: _Optional[str] = ..., cache_salt: _Optional[str] = ..., multimodal: _Optional[_Iterable[_Union[MultimodalItem, _Mapping]]] = ...) -> None: ...

class MultimodalItem(_message.Message):
    __slots__ = ("identifier", "offset", "length")
    IDENTIFIER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    identifier: str
    offset: int
    length: int
    def __init__(self, identifier: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("scope", "block_hashes", "token_ids", "workers")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    scope: Scope
    block_hashes: bytes
    token_ids: bytes
    workers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, scope: _Optional[_Union[Scope, _Mapping]] = ..., block_hashes: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., workers: _Optional[_Iterable[str]] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("worker", "dp_rank", "address", "block_tokens", "prompt_blocks", "device_blocks", "local_blocks", "pool_blocks", "sequence", "staleness_ms", "stale")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    POOL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STALENESS_MS_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    worker: _containers.RepeatedScalarFieldContainer[str]
    dp_rank: _containers.RepeatedScalarFieldContainer[int]
    address: _containers.RepeatedScalarFieldContainer[str]
    block_tokens: _containers.RepeatedScalarFieldContainer[int]
    prompt_blocks: _containers.RepeatedScalarFieldContainer[int]
    device_blocks: _containers.RepeatedScalarFieldContainer[int]
    local_blocks: _containers.RepeatedScalarFieldContainer[int]
    pool_blocks: _containers.RepeatedScalarFieldContainer[int]
    sequence: _containers.RepeatedScalarFieldContainer[int]
    staleness_ms: _containers.RepeatedScalarFieldContainer[int]
    stale: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, worker: _Optional[_Iterable[str]] = ..., dp_rank: _Optional[_Iterable[int]] = ..., address: _Optional[_Iterable[str]] = ..., block_tokens: _Optional[_Iterable[int]] = ..., prompt_blocks: _Optional[_Iterable[int]] = ..., device_blocks: _Optional[_Iterable[int]] = ..., local_blocks: _Optional[_Iterable[int]] = ..., pool_blocks: _Optional[_Iterable[int]] = ..., sequence: _Optional[_Iterable[int]] = ..., staleness_ms: _Optional[_Iterable[int]] = ..., stale: _Optional[_Iterable[bool]] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("name", "tenant", "model", "hash_algorithm", "hash_seed_id", "block_tokens", "address", "incarnation", "namespace", "publishers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PUBLISHERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    tenant: str
    model: str
    hash_algorithm: str
    hash_seed_id: str
    block_tokens: int
    address: str
    incarnation: str
    namespace: str
    publishers: _containers.RepeatedCompositeFieldContainer[Publisher]
    def __init__(self, name: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., hash_algorithm: _Optional[str] = ..., hash_seed_id: _Optional[str] = ..., block_tokens: _Optional[int] = ..., address: _Optional[str] = ..., incarnation: _Optional[str] = ..., namespace: _Optional[str] = ..., publishers: _Optional[_Iterable[_Union[Publisher, _Mapping]]] = ...) -> None: ...

class Publisher(_message.Message):
    __slots__ = ("dp_rank", "events", "replay")
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    dp_rank: int
    events: str
    replay: str
    def __init__(self, dp_rank: _Optional[int] = ..., events: _Optional[str] = ..., replay: _Optional[str] = ...) -> None: ...

class RegisterWorkerRequest(_message.Message):
    __slots__ = ("worker", "lease_ms")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    lease_ms: int
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class RegisterWorkerResponse(_message.Message):
    __slots__ = ("replaced",)
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    replaced: bool
    def __init__(self, replaced: bool = ...) -> None: ...

class RemoveWorkerRequest(_message.Message):
    __slots__ = ("tenant", "name")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    name: str
    def __init__(self, tenant: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class RemoveWorkerResponse(_message.Message):
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: bool
    def __init__(self, removed: bool = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ("tenant", "model")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    model: str
    def __init__(self, tenant: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers", "index")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    index: IndexStatus
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., index: _Optional[_Union[IndexStatus, _Mapping]] = ...) -> None: ...

class IndexStatus(_message.Message):
    __slots__ = ("uptime_ms", "lookups", "prompt_blocks", "device_blocks", "local_blocks", "pool_blocks", "held_blocks", "held_pool_blocks", "memory_nbytes")
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    POOL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_POOL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_NBYTES_FIELD_NUMBER: _ClassVar[int]
    uptime_ms: int
    lookups: int
    prompt_blocks: int
    device_blocks: int
    local_blocks: int
    pool_blocks: int
    held_blocks: int
    held_pool_blocks: int
    memory_nbytes: int
    def __init__(self, uptime_ms: _Optional[int] = ..., lookups: _Optional[int] = ..., prompt_blocks: _Optional[int] = ..., device_blocks: _Optional[int] = ..., local_blocks: _Optional[int] = ..., pool_blocks: _Optional[int] = ..., held_blocks: _Optional[int] = ..., held_pool_blocks: _Optional[int] = ..., memory_nbytes: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker", "source", "lease_left_ms", "publishers")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    LEASE_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHERS_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    source: str
    lease_left_ms: int
    publishers: _containers.RepeatedCompositeFieldContainer[PublisherStatus]
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ..., source: _Optional[str] = ..., lease_left_ms: _Optional[int] = ..., publishers: _Optional[_Iterable[_Union[PublisherStatus, _Mapping]]] = ...) -> None: ...

class PublisherStatus(_message.Message):
    __slots__ = ("dp_rank", "sequence", "batches", "gaps", "replays", "resets", "staleness_ms", "stale", "problem", "digest", "blocks", "device_blocks", "host_blocks", "disk_blocks")
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    REPLAYS_FIELD_NUMBER: _ClassVar[int]
    RESETS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_MS_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    dp_rank: int
    sequence: int
    batches: int
    gaps: int
    replays: int
    resets: int
    staleness_ms: int
    stale: bool
    problem: str
    digest: int
    blocks: int
    device_blocks: int
    host_blocks: int
    disk_blocks: int
    def __init__(self, dp_rank: _Optional[int] = ..., sequence: _Optional[int] = ..., batches: _Optional[int] = ..., gaps: _Optional[int] = ..., replays: _Optional[int] = ..., resets: _Optional[int] = ..., staleness_ms: _Optional[int] = ..., stale: bool = ..., problem: _Optional[str] = ..., digest: _Optional[int] = ..., blocks: _Optional[int] = ..., device_blocks: _Optional[int] = ..., host_blocks: _Optional[int] = ..., disk_blocks: _Optional[int] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SnapshotChunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...
