from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Trust(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRUST_UNSPECIFIED: _ClassVar[Trust]
    TRUST_EXACT: _ClassVar[Trust]
    TRUST_DEGRADED: _ClassVar[Trust]
    TRUST_FALLBACK: _ClassVar[Trust]

class LoadSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOAD_SOURCE_UNSPECIFIED: _ClassVar[LoadSource]
    LOAD_SOURCE_REPORTED: _ClassVar[LoadSource]
    LOAD_SOURCE_SCRAPED: _ClassVar[LoadSource]
TRUST_UNSPECIFIED: Trust
TRUST_EXACT: Trust
TRUST_DEGRADED: Trust
TRUST_FALLBACK: Trust
LOAD_SOURCE_UNSPECIFIED: LoadSource
LOAD_SOURCE_REPORTED: LoadSource
LOAD_SOURCE_SCRAPED: LoadSource

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
    __slots__ = ("scope", "block_hashes", "token_ids", "text", "chat", "workers", "requests", "id")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    scope: Scope
    block_hashes: bytes
    token_ids: bytes
    text: str
    chat: ChatPrompt
    workers: _containers.RepeatedScalarFieldContainer[str]
    requests: _containers.RepeatedCompositeFieldContainer[LookupRequest]
    id: int
    def __init__(self, scope: _Optional[_Union[Scope, _Mapping]] = ..., block_hashes: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., workers: _Optional[_Iterable[str]] = ..., requests: _Optional[_Iterable[_Union[LookupRequest, _Mapping]]] = ..., id: _Optional[int] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("messages", "tools_json", "add_generation_prompt", "template_options_json")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_OPTIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools_json: str
    add_generation_prompt: bool
    template_options_json: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools_json: _Optional[str] = ..., add_generation_prompt: bool = ..., template_options_json: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name", "reasoning", "tool_calls_json", "tool_call_id")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: _containers.RepeatedScalarFieldContainer[str]
    name: str
    reasoning: str
    tool_calls_json: str
    tool_call_id: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[_Iterable[str]] = ..., name: _Optional[str] = ..., reasoning: _Optional[str] = ..., tool_calls_json: _Optional[str] = ..., tool_call_id: _Optional[str] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("worker", "dp_rank", "address", "block_tokens", "prompt_blocks", "device_blocks", "local_blocks", "pool_blocks", "sequence", "staleness_ms", "stale", "loadable_blocks", "responses", "status", "id", "pool_media")
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
    LOADABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    POOL_MEDIA_FIELD_NUMBER: _ClassVar[int]
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
    loadable_blocks: _containers.RepeatedScalarFieldContainer[int]
    responses: _containers.RepeatedCompositeFieldContainer[LookupResponse]
    status: Status
    id: int
    pool_media: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker: _Optional[_Iterable[str]] = ..., dp_rank: _Optional[_Iterable[int]] = ..., address: _Optional[_Iterable[str]] = ..., block_tokens: _Optional[_Iterable[int]] = ..., prompt_blocks: _Optional[_Iterable[int]] = ..., device_blocks: _Optional[_Iterable[int]] = ..., local_blocks: _Optional[_Iterable[int]] = ..., pool_blocks: _Optional[_Iterable[int]] = ..., sequence: _Optional[_Iterable[int]] = ..., staleness_ms: _Optional[_Iterable[int]] = ..., stale: _Optional[_Iterable[bool]] = ..., loadable_blocks: _Optional[_Iterable[int]] = ..., responses: _Optional[_Iterable[_Union[LookupResponse, _Mapping]]] = ..., status: _Optional[_Union[Status, _Mapping]] = ..., id: _Optional[int] = ..., pool_media: _Optional[_Iterable[int]] = ...) -> None: ...

class RouteRequest(_message.Message):
    __slots__ = ("scope", "block_hashes", "token_ids", "text", "chat", "workers", "loads", "most", "reserve_ms", "prompt_tokens", "session_id", "prompt_cache_key", "preview")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    RESERVE_MS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CACHE_KEY_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_FIELD_NUMBER: _ClassVar[int]
    scope: Scope
    block_hashes: bytes
    token_ids: bytes
    text: str
    chat: ChatPrompt
    workers: _containers.RepeatedScalarFieldContainer[str]
    loads: _containers.RepeatedCompositeFieldContainer[RankLoad]
    most: int
    reserve_ms: int
    prompt_tokens: int
    session_id: str
    prompt_cache_key: str
    preview: bool
    def __init__(self, scope: _Optional[_Union[Scope, _Mapping]] = ..., block_hashes: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., workers: _Optional[_Iterable[str]] = ..., loads: _Optional[_Iterable[_Union[RankLoad, _Mapping]]] = ..., most: _Optional[int] = ..., reserve_ms: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., session_id: _Optional[str] = ..., prompt_cache_key: _Optional[str] = ..., preview: bool = ...) -> None: ...

class RankLoad(_message.Message):
    __slots__ = ("worker", "dp_rank", "running", "waiting", "queued_tokens", "kv_usage_permille")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_PERMILLE_FIELD_NUMBER: _ClassVar[int]
    worker: str
    dp_rank: int
    running: int
    waiting: int
    queued_tokens: int
    kv_usage_permille: int
    def __init__(self, worker: _Optional[str] = ..., dp_rank: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., kv_usage_permille: _Optional[int] = ...) -> None: ...

class RouteResponse(_message.Message):
    __slots__ = ("rows", "trust", "cost", "prefill_cost", "fetch_cost", "queue_cost", "running", "waiting", "queued_tokens", "kv_usage_permille", "reserved_cost", "load_source", "load_age_ms", "asleep", "reservation", "unreachable", "move_cost", "encode_cost")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TRUST_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    PREFILL_COST_FIELD_NUMBER: _ClassVar[int]
    FETCH_COST_FIELD_NUMBER: _ClassVar[int]
    QUEUE_COST_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_PERMILLE_FIELD_NUMBER: _ClassVar[int]
    RESERVED_COST_FIELD_NUMBER: _ClassVar[int]
    LOAD_SOURCE_FIELD_NUMBER: _ClassVar[int]
    LOAD_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    MOVE_COST_FIELD_NUMBER: _ClassVar[int]
    ENCODE_COST_FIELD_NUMBER: _ClassVar[int]
    rows: LookupResponse
    trust: _containers.RepeatedScalarFieldContainer[Trust]
    cost: _containers.RepeatedScalarFieldContainer[int]
    prefill_cost: _containers.RepeatedScalarFieldContainer[int]
    fetch_cost: _containers.RepeatedScalarFieldContainer[int]
    queue_cost: _containers.RepeatedScalarFieldContainer[int]
    running: _containers.RepeatedScalarFieldContainer[int]
    waiting: _containers.RepeatedScalarFieldContainer[int]
    queued_tokens: _containers.RepeatedScalarFieldContainer[int]
    kv_usage_permille: _containers.RepeatedScalarFieldContainer[int]
    reserved_cost: _containers.RepeatedScalarFieldContainer[int]
    load_source: _containers.RepeatedScalarFieldContainer[LoadSource]
    load_age_ms: _containers.RepeatedScalarFieldContainer[int]
    asleep: _containers.RepeatedScalarFieldContainer[bool]
    reservation: str
    unreachable: _containers.RepeatedScalarFieldContainer[bool]
    move_cost: _containers.RepeatedScalarFieldContainer[int]
    encode_cost: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, rows: _Optional[_Union[LookupResponse, _Mapping]] = ..., trust: _Optional[_Iterable[_Union[Trust, str]]] = ..., cost: _Optional[_Iterable[int]] = ..., prefill_cost: _Optional[_Iterable[int]] = ..., fetch_cost: _Optional[_Iterable[int]] = ..., queue_cost: _Optional[_Iterable[int]] = ..., running: _Optional[_Iterable[int]] = ..., waiting: _Optional[_Iterable[int]] = ..., queued_tokens: _Optional[_Iterable[int]] = ..., kv_usage_permille: _Optional[_Iterable[int]] = ..., reserved_cost: _Optional[_Iterable[int]] = ..., load_source: _Optional[_Iterable[_Union[LoadSource, str]]] = ..., load_age_ms: _Optional[_Iterable[int]] = ..., asleep: _Optional[_Iterable[bool]] = ..., reservation: _Optional[str] = ..., unreachable: _Optional[_Iterable[bool]] = ..., move_cost: _Optional[_Iterable[int]] = ..., encode_cost: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("tenant", "reservation")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    reservation: str
    def __init__(self, tenant: _Optional[str] = ..., reservation: _Optional[str] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: bool = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("name", "tenant", "model", "hash_algorithm", "hash_seed_id", "block_tokens", "address", "incarnation", "namespace", "publishers", "names", "near", "media_namespaces")
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
    NAMES_FIELD_NUMBER: _ClassVar[int]
    NEAR_FIELD_NUMBER: _ClassVar[int]
    MEDIA_NAMESPACES_FIELD_NUMBER: _ClassVar[int]
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
    names: _containers.RepeatedScalarFieldContainer[str]
    near: str
    media_namespaces: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., hash_algorithm: _Optional[str] = ..., hash_seed_id: _Optional[str] = ..., block_tokens: _Optional[int] = ..., address: _Optional[str] = ..., incarnation: _Optional[str] = ..., namespace: _Optional[str] = ..., publishers: _Optional[_Iterable[_Union[Publisher, _Mapping]]] = ..., names: _Optional[_Iterable[str]] = ..., near: _Optional[str] = ..., media_namespaces: _Optional[_Iterable[str]] = ...) -> None: ...

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
    __slots__ = ("tenant", "model", "page_size", "page_token")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    model: str
    page_size: int
    page_token: str
    def __init__(self, tenant: _Optional[str] = ..., model: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers", "next_page_token", "index", "quotas", "audits")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    AUDITS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    next_page_token: str
    index: IndexStatus
    quotas: _containers.RepeatedCompositeFieldContainer[TenantQuota]
    audits: _containers.RepeatedCompositeFieldContainer[EngineAudits]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., index: _Optional[_Union[IndexStatus, _Mapping]] = ..., quotas: _Optional[_Iterable[_Union[TenantQuota, _Mapping]]] = ..., audits: _Optional[_Iterable[_Union[EngineAudits, _Mapping]]] = ...) -> None: ...

class EngineAudits(_message.Message):
    __slots__ = ("tenant", "host", "writer", "same", "differing", "unjudged", "doubts", "put_away_writers", "found_writers", "found_s")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    SAME_FIELD_NUMBER: _ClassVar[int]
    DIFFERING_FIELD_NUMBER: _ClassVar[int]
    UNJUDGED_FIELD_NUMBER: _ClassVar[int]
    DOUBTS_FIELD_NUMBER: _ClassVar[int]
    PUT_AWAY_WRITERS_FIELD_NUMBER: _ClassVar[int]
    FOUND_WRITERS_FIELD_NUMBER: _ClassVar[int]
    FOUND_S_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    host: str
    writer: str
    same: int
    differing: int
    unjudged: int
    doubts: str
    put_away_writers: _containers.RepeatedScalarFieldContainer[str]
    found_writers: _containers.RepeatedScalarFieldContainer[str]
    found_s: float
    def __init__(self, tenant: _Optional[str] = ..., host: _Optional[str] = ..., writer: _Optional[str] = ..., same: _Optional[int] = ..., differing: _Optional[int] = ..., unjudged: _Optional[int] = ..., doubts: _Optional[str] = ..., put_away_writers: _Optional[_Iterable[str]] = ..., found_writers: _Optional[_Iterable[str]] = ..., found_s: _Optional[float] = ...) -> None: ...

class TenantQuota(_message.Message):
    __slots__ = ("tenant", "quota_nbytes", "held_nbytes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    QUOTA_NBYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_NBYTES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    quota_nbytes: int
    held_nbytes: int
    def __init__(self, tenant: _Optional[str] = ..., quota_nbytes: _Optional[int] = ..., held_nbytes: _Optional[int] = ...) -> None: ...

class IndexStatus(_message.Message):
    __slots__ = ("uptime_ms", "lookups", "prompt_blocks", "device_blocks", "local_blocks", "pool_blocks", "held_blocks", "held_pool_blocks", "memory_nbytes", "instance_id", "placements", "placed_prompt_blocks", "placed_matched_blocks", "pool_servers", "pool_servers_away")
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    POOL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_POOL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_NBYTES_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    PLACED_PROMPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PLACED_MATCHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    POOL_SERVERS_FIELD_NUMBER: _ClassVar[int]
    POOL_SERVERS_AWAY_FIELD_NUMBER: _ClassVar[int]
    uptime_ms: int
    lookups: int
    prompt_blocks: int
    device_blocks: int
    local_blocks: int
    pool_blocks: int
    held_blocks: int
    held_pool_blocks: int
    memory_nbytes: int
    instance_id: str
    placements: int
    placed_prompt_blocks: int
    placed_matched_blocks: int
    pool_servers: int
    pool_servers_away: int
    def __init__(self, uptime_ms: _Optional[int] = ..., lookups: _Optional[int] = ..., prompt_blocks: _Optional[int] = ..., device_blocks: _Optional[int] = ..., local_blocks: _Optional[int] = ..., pool_blocks: _Optional[int] = ..., held_blocks: _Optional[int] = ..., held_pool_blocks: _Optional[int] = ..., memory_nbytes: _Optional[int] = ..., instance_id: _Optional[str] = ..., placements: _Optional[int] = ..., placed_prompt_blocks: _Optional[int] = ..., placed_matched_blocks: _Optional[int] = ..., pool_servers: _Optional[int] = ..., pool_servers_away: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("dp_rank", "sequence", "batches", "gaps", "replays", "resets", "staleness_ms", "stale", "problem", "digest", "blocks", "device_blocks", "host_blocks", "disk_blocks", "evicted_blocks")
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
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
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
    evicted_blocks: int
    def __init__(self, dp_rank: _Optional[int] = ..., sequence: _Optional[int] = ..., batches: _Optional[int] = ..., gaps: _Optional[int] = ..., replays: _Optional[int] = ..., resets: _Optional[int] = ..., staleness_ms: _Optional[int] = ..., stale: bool = ..., problem: _Optional[str] = ..., digest: _Optional[int] = ..., blocks: _Optional[int] = ..., device_blocks: _Optional[int] = ..., host_blocks: _Optional[int] = ..., disk_blocks: _Optional[int] = ..., evicted_blocks: _Optional[int] = ...) -> None: ...

class HitCurveRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class HitCurveResponse(_message.Message):
    __slots__ = ("sizes", "hit_rates", "requests", "requested_blocks", "share", "since_s", "block_tokens", "pool_blocks", "block_nbytes")
    SIZES_FIELD_NUMBER: _ClassVar[int]
    HIT_RATES_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POOL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NBYTES_FIELD_NUMBER: _ClassVar[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    hit_rates: _containers.RepeatedScalarFieldContainer[float]
    requests: int
    requested_blocks: int
    share: float
    since_s: float
    block_tokens: float
    pool_blocks: int
    block_nbytes: float
    def __init__(self, sizes: _Optional[_Iterable[int]] = ..., hit_rates: _Optional[_Iterable[float]] = ..., requests: _Optional[int] = ..., requested_blocks: _Optional[int] = ..., share: _Optional[float] = ..., since_s: _Optional[float] = ..., block_tokens: _Optional[float] = ..., pool_blocks: _Optional[int] = ..., block_nbytes: _Optional[float] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SnapshotChunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...
