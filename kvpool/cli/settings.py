"""Settings of each command: a field declares its option, once."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from kvpool.cli.options import (
    ACCESS,
    DEFAULT_DIRECTORY,
    Index,
    IndexConnection,
    Json,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
    flag,
    is_address,
    is_size,
    is_sized,
    option,
    pool_or_default,
)

# The groups of options in --help.
ADDRESSES, WORKERS, PLACING = "Addresses", "Pool and workers", "Placing requests"
MEMORY, LIFE, SECURITY = "Memory and limits", "Start and end", "TLS and tokens"
LOGS = "Logs and traces"
PROMPT = "Prompt, in one of four forms"
ANSWER = "Answer"
PARTS = "What is examined"
TRACE = "In place of an index, recorded requests"
MODEL = "In place of an index, a model"
ELSE_DEFAULT = f"Without it: {DEFAULT_DIRECTORY}, if it is there."
ORDERS = ("name", "device", "host", "disk", "batches", "lag", "gaps", "resets")


def orders() -> list[str]:
    """For completion; a lambda in an annotation would not see this module's names."""
    return list(ORDERS)


class LogLevel(str, Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(str, Enum):
    TEXT = "text"
    JSON = "json"


class CacheType(str, Enum):
    BFLOAT16 = "bfloat16"
    FP8 = "fp8"


# fmt: off
PlaceTimeout = Annotated[float, option(PLACING, "SECONDS",
        "Longest time to find out the tokens of a request's prompt; then it is placed by load alone. Less than Envoy's "
        "message_timeout.", min=0.001, max=60)]


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    listen: str
    pool: Annotated[str | None, option(WORKERS, "URL",
        "The pool whose workers are followed, such as valkey://HOST:6379. A URL with a password belongs in the "
        "variable: every user of the host can read a process's arguments. Without it: only the workers of --worker.",
        envvar="KVPOOL_POOL")] = None
    pool_keys_per_s: Annotated[int, option(WORKERS, "KEYS",
        "Keys of the pool that are checked in a second, to see what it has lost.", min=1, max=10_000_000)] = 20_000
    worker: Annotated[list[str], option(WORKERS, "NAME=URL,...",
        "A worker that does not announce itself in the pool, such as a stock vLLM: NAME=tcp://HOST:PORT, where its KV "
        "events are, then ,model=MODEL and ,block=TOKENS of a block; once for each. Also: ,address=http://HOST:PORT, "
        "where it serves requests (to send some there), ,replay=tcp://HOST:PORT ,tenant=TENANT ,hash=ALGORITHM and "
        ",ranks=COUNT (data-parallel ones).")] = field(default_factory=list)
    worker_networks: Annotated[list[str], option(WORKERS, "CIDR,...",
        "Where workers that announce themselves may be, such as 10.0.0.0/8, and ipc for Unix sockets. With TENANT=, "
        "such as team=10.1.0.0/16: this tenant's are there alone, and no other's. Without it: everywhere but on this "
        "host and its link; on this host, too, when --listen is loopback."
    )] = field(default_factory=list)
    max_blocks: Annotated[int, option(MEMORY, "BLOCKS",
        "Most distinct blocks that are known of each model; each takes 17 to 30 bytes.", min=1, max=1 << 32)] = 1 << 27
    no_reuse_reports: Annotated[bool, flag(WORKERS, "--no-reuse-reports",
        "No request sets vLLM's kv_cache_report_mode to full: the index is then exact about copies and sliding "
        "windows.")] = False
    max_memory: Annotated[str | None, option(MEMORY, "SIZE",
        "Memory limit, such as 2GiB: three quarters for the tables of all models (when full, blocks that are seldom "
        "asked for are forgotten), one quarter for batches, requests and snapshots. Default: no limit for tables and "
        "snapshots, 1 GiB for the rest.", callback=is_sized)] = None
    metrics: Annotated[str | None, option(ADDRESSES, "HOST:PORT",
        "Where to show Prometheus metrics, at /metrics. Without it: nowhere.", callback=is_address)] = None
    http: Annotated[str | None, option(ADDRESSES, "HOST:PORT",
        "Where to show the status page (/status), and to answer Lookup and Route in JSON (/v1/lookup, /v1/route).",
        callback=is_address)] = None
    no_place_headers: Annotated[bool, flag(PLACING, "--no-place-headers",
        "Leave out the x-kvpool-... headers of requests and responses: where callers must not see the names of "
        "workers.")] = False
    session_header: Annotated[str, option(PLACING, "NAME",
        "The header that names a request's session where its body has no session_id.")] = "x-session-id"
    max_waiting: Annotated[int | None, option(PLACING, "REQUESTS",
        "A worker with so many requests waiting gets no more; where all have as many, the answer is 429. Without it: "
        "no limit.", min=1)] = None
    snapshot: Annotated[str | None, option(LIFE, "FILE",
        "Keep what is known in this file, and begin with it at the next start. Without it: begin with nothing."
    )] = None
    snapshot_every: Annotated[float, option(LIFE, "SECONDS",
        "How often --snapshot is written.", min=0.1, max=86400)] = 60.0
    bootstrap: Annotated[str | None, option(LIFE, "HOST:PORT",
        "Begin with what the index there knows (its --listen, or a router's --grpc); if it does not answer, with "
        "--snapshot.", callback=is_address)] = None
    warm_up: Annotated[float, option(LIFE, "SECONDS",
        "After the start, health says no until all workers and the pool have been read, at most this long.",
        min=0, max=86400)] = 15.0
    tokenizer: Annotated[list[str], option(PLACING, "MODEL=FOLDER",
        "Make the tokens of this model's texts and chats here, with the tokenizer of the folder, or of that name on "
        "the Hugging Face hub; once for each model. Without it: requests are placed by what a worker's /render says, "
        "and lookups need tokens.")] = field(default_factory=list)
    no_scrape: Annotated[bool, flag(PLACING, "--no-scrape",
        "Do not read the workers' metrics for their load.")] = False
    route_cost: Annotated[list[str], option(PLACING, "NAME=NUMBER",
        "A coefficient by which workers are ranked, in prompt tokens to compute; once for each. Default: local (of a "
        "near pool measured, else 0.05), pool (measured, else 0.2), waiting (measured, else 1024), running 64, usage "
        "1024, move 2, encode 0.3; and speed, prompt tokens that a worker computes in a second (measured, else 8000)."
    )] = field(default_factory=list)
    tls_cert: Annotated[str | None, option(SECURITY, "FILE",
        "Serve TLS with this certificate and its chain, PEM; goes with --tls-key.")] = None
    tls_key: Annotated[str | None, option(SECURITY, "FILE",
        "The private key of --tls-cert, PEM.")] = None
    worker_ca: Annotated[str | None, option(SECURITY, "FILE",
        "The authority that certificates of workers at https:// are of, PEM. Without it: those of the system.")] = None
    http_name: Annotated[list[str], option(SECURITY, "NAME",
        "A name of this host, such as index.example.com; once for each. Browsers' pages at kvpool router, and --http "
        "without --tokens, take it beside addresses, names without a dot, and .svc, .local, .internal and .localhost.")
    ] = field(default_factory=list)
    drain: Annotated[float, option(LIFE, "SECONDS",
        "After SIGTERM, how long requests are still answered while health says no, so that callers go elsewhere; a "
        "second SIGTERM ends it.", min=0, max=3600)] = 5.0
    traces: Annotated[str | None, option(LOGS, "URL",
        "An OpenTelemetry collector, such as http://otel:4318 (OTLP over HTTP), for spans of sampled requests. Needs "
        "the extra trace. Without it: nowhere.")] = None
    log_level: Annotated[LogLevel, option(LOGS, None,
        "Lowest level that is logged, to standard error.")] = LogLevel.INFO
    log_format: Annotated[LogFormat, option(LOGS, None,
        "Log format: text, or json (one object a line).")] = LogFormat.TEXT


@dataclass(frozen=True, kw_only=True)
class IndexSettings(FleetSettings):
    proxy: ClassVar[None] = None
    finish: ClassVar[float] = 0.0
    response_timeout: ClassVar[float] = 600.0
    place_timeout: PlaceTimeout = 0.15
    listen: Annotated[str, option(ADDRESSES, "HOST:PORT",
        "Where to serve gRPC; port 0: any that is free.", callback=is_address)] = "127.0.0.1:50051"
    tenant: Annotated[list[str], option(WORKERS, "TENANT",
        "Follow only this tenant's workers in the pool; once for each tenant. Default: all tenants in the pool's "
        "list. A tenant whose pool user has rights to its own keys only is not in that list: name it here."
    )] = field(default_factory=list)
    ext_proc: Annotated[str | None, option(ADDRESSES, "HOST:PORT",
        "Where to be Envoy's endpoint picker (ext_proc), with TLS and tokens as --listen; deploy/envoy.yaml is for it.",
        callback=is_address)] = None
    place_endpoints: Annotated[int, option(PLACING, "COUNT",
        "Workers named for a request, best first, for the proxy to try in turn; 1 for a proxy that takes no list, "
        "such as an Envoy cluster of type ORIGINAL_DST.", min=1, max=4)] = 4
    tenant_share: Annotated[float | None, option(MEMORY, "SHARE",
        "Part of all workers, ranks, models and reservations that one tenant may have. Without it: 0.5 with "
        "--tokens, else 1.", min=0.001, max=1)] = None
    tokens: Annotated[str | None, option(SECURITY, "FILE",
        "Callers need a token of this file; kvpool token makes entries. Without it every caller that reaches a port "
        "may ask.")] = None
    tls_client_ca: Annotated[str | None, option(SECURITY, "FILE",
        "Callers need a certificate of this authority, PEM.")] = None
    max_connection_age: Annotated[float, option(LIFE, "SECONDS",
        "Age at which connections over gRPC and HTTP are ended, so that callers spread over new replicas; 0: never.",
        min=0, max=86400)] = 1800.0
    max_connection_grace: Annotated[float, option(LIFE, "SECONDS",
        "How long streams of such a connection may still go on; 0: for as long as they like.", min=0, max=86400)] = 0.0

    @property
    def grpc(self) -> str:
        return self.listen

    @property
    def tenants(self) -> list[str]:
        return self.tenant


@dataclass(frozen=True, kw_only=True)
class RouterSettings(FleetSettings):
    ext_proc: ClassVar[None] = None
    place_endpoints: ClassVar[int] = 4
    tenant_share: ClassVar[None] = None
    tls_client_ca: ClassVar[None] = None
    max_connection_age: ClassVar[float] = 1800.0
    max_connection_grace: ClassVar[float] = 0.0
    place_timeout: PlaceTimeout = 1.0
    listen: Annotated[str, option(ADDRESSES, "HOST:PORT",
        "Where to take requests over HTTP; port 0: any that is free.", callback=is_address)] = "127.0.0.1:8080"
    tenant: Annotated[str, option(WORKERS, "TENANT",
        "Whose workers serve the requests; no others are followed.")] = "default"
    grpc: Annotated[str | None, option(ADDRESSES, "HOST:PORT",
        "Where to answer over gRPC as kvpool index does: for kvpool top and lookup, and the --bootstrap of another "
        "router. Without it: nowhere.", callback=is_address)] = None
    tokens: Annotated[str | None, option(SECURITY, "FILE",
        "Callers of --grpc and --http need a token of this file; kvpool token makes entries. Requests need none: "
        "workers check the keys of their callers.")] = None
    response_timeout: Annotated[float, option(PLACING, "SECONDS",
        "Longest silence of a worker; then the answer is 504, or a response that has begun is broken off.",
        min=0.1, max=86400)] = 600.0
    finish: Annotated[float, option(LIFE, "SECONDS",
        "After --drain, how long requests under way may take to end; no new ones are taken then.",
        min=0, max=86400)] = 60.0

    @property
    def proxy(self) -> str:
        return self.listen

    @property
    def tenants(self) -> list[str]:
        return [self.tenant]


@dataclass(frozen=True, kw_only=True)
class LookupOptions:
    model: Annotated[str, option(PROMPT, "MODEL", "The model, by the name that requests use.")]
    text: Annotated[str | None, option(PROMPT, "WORDS",
        "The prompt's text, for an index with a --tokenizer. In place of a value, here and below: @FILE, or - for "
        "standard input.")] = None
    token_ids: Annotated[str | None, option(PROMPT, "IDS",
        "The prompt's token ids: JSON, or separated by spaces or commas.")] = None
    hashes: Annotated[str | None, option(PROMPT, "HASHES",
        "The prompt's 64-bit block hashes, decimal, or hexadecimal with 0x.")] = None
    chat: Annotated[str | None, option(PROMPT, "JSON",
        "The prompt as a chat: messages, or the body of a request for /v1/chat/completions.")] = None
    lora_name: Annotated[str | None, option(PROMPT, "NAME",
        "Name of the request's LoRA adapter; needs --lora-path.")] = None
    lora_path: Annotated[str | None, option(PROMPT, "PATH", "Path of the adapter, as on its worker.")] = None
    cache_salt: Annotated[str | None, option(PROMPT, "SALT", "The request's cache_salt.")] = None
    media: Annotated[list[str], option(PROMPT, "IDENTIFIER:OFFSET:LENGTH",
        "An image, clip or sound of the prompt, as a worker's /render says it: its hash, and where its tokens are; "
        "once for each, in their order. With --token-ids or --hashes.")] = field(default_factory=list)
    tenant: Annotated[str, option(ANSWER, "TENANT", "Whose workers are asked about.")] = "default"
    worker: Annotated[list[str], option(ANSWER, "NAME",
        "Only this worker; once for each. Without it: all of the model.")] = field(default_factory=list)
    route: Annotated[bool, flag(ANSWER, "--route",
        "Rank the workers by what the prompt would cost, and say why: no placement.")] = False
    most: Annotated[int, option(ANSWER, "ROWS", "Most rows of the table; 0: all. JSON always has all.", min=0)] = 40
    as_json: Json = False
    index: Index = "127.0.0.1:50051"
    timeout: Annotated[float, option(ACCESS, "SECONDS", "Longest wait for the answer.", min=0.001, max=3600)] = 5.0
    token_file: TokenFile = None
    tls_ca: TlsCa = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None


@dataclass(frozen=True, kw_only=True)
class TopOptions:
    tenant: Annotated[str | None, option(ANSWER, "TENANT", "Only workers of this tenant. Without it: all.")] = None
    model: Annotated[str | None, option(ANSWER, "MODEL", "Only workers of this model. Without it: all.")] = None
    sort: Annotated[str, option(ANSWER, "COLUMN", f"Order of the rows: {', '.join(ORDERS[:-1])} or {ORDERS[-1]}.",
        autocompletion=orders)] = "name"
    most: Annotated[int, option(ANSWER, "ROWS",
        "Most rows of a table that is not live; 0: all. JSON always has all.", min=0)] = 0
    interval: Annotated[float, option(ANSWER, "SECONDS", "Time between two looks.", min=0.2, max=3600)] = 2.0
    once: Annotated[bool, flag(ANSWER, "--once", "Look once, and exit.")] = False
    as_json: Annotated[bool, flag(None, "--json", "Print one JSON object a look instead of tables, of a failure too.")
        ] = False
    index: Index = "127.0.0.1:50051"
    token_file: TokenFile = None
    tls_ca: TlsCa = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None


PoolURL = Annotated[str | None, option(None, "URL",
    "The pool, which gets batches under keys of their own and loses them again. Without it: a directory in "
    "shared memory.", envvar="KVPOOL_POOL")]
Rounds = Annotated[int, option(None, "COUNT", "Interleaved rounds; the median counts.", min=1, max=10_000)]
BatchBytes = Annotated[str, option(None, "SIZE",
    "Bytes of a batch, such as 64MiB, of whatever size its values are.", callback=is_size)]


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    pool: Annotated[str | None, option(PARTS, "URL",
        "The pool, its servers and settings, and the workers that announce themselves there. Where no part is named: "
        f"{DEFAULT_DIRECTORY}, if it is there.",
        envvar="KVPOOL_POOL")] = None
    index: Annotated[list[str], option(PARTS, "HOST:PORT",
        "An index; once for each of its replicas, to compare them.", envvar="KVPOOL_INDEX",
        callback=is_address)] = field(default_factory=list)
    front: Annotated[list[str], option(PARTS, "URL",
        "Where requests are sent, such as http://HOST:8080: Envoy, a gateway or kvpool router; once for each."
        )] = field(default_factory=list)
    picker: Annotated[list[str], option(PARTS, "HOST:PORT",
        "An index's --ext-proc, which Envoy asks; once for each.", callback=is_address)] = field(default_factory=list)
    tenant: Annotated[str, option(PARTS, "TENANT", "Whose part of the pool.")] = "default"
    token_file: TokenFile = None
    tls_ca: TlsCa = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    as_json: Json = False

    def connections(self, targets: list[str]) -> list[IndexConnection]:
        ways = (self.token_file, self.tls_ca, self.tls_cert, self.tls_key)
        return [IndexConnection(target, *ways) for target in targets]


@dataclass(frozen=True, kw_only=True)
class PurgeOptions:
    pool: Annotated[str, option(None, "URL", "The pool to delete from.", envvar="KVPOOL_POOL")]
    tenant: Annotated[str | None, option(None, "TENANT", "Delete all that this tenant has.")] = None
    namespace: Annotated[str | None, option(None, "HEX",
        "Delete this namespace; its first 8 digits do, 32 are all of them.")] = None
    writer: Annotated[str | None, option(None, "HEX",
        "Delete only what this engine wrote, as its records say; its first digits do, at least 8, if no other "
        "writer's are the same.")] = None
    everything: Annotated[bool, flag(None, "--everything", "Delete all blocks of all tenants.")] = False
    dry_run: Annotated[bool, flag(None, "--dry-run", "Show what would be deleted, and delete nothing. Alone: show "
        "all that is there.")] = False
    yes: Annotated[bool, flag(None, "--yes", "Do not ask. Needed where there is no terminal.")] = False
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class QuotaOptions:
    tenant: Annotated[str | None, typer.Argument(metavar="TENANT", show_default=False,
        help="Whose quota. Without it: those of all tenants that have one.")] = None
    size: Annotated[str | None, typer.Argument(metavar="SIZE", show_default=False, callback=is_sized,
        help="What the tenant may hold, such as 50GiB. Without it: show the quota.")] = None
    pool: Annotated[str, option(None, "URL", f"The pool; of a near and a far one, the far one. {ELSE_DEFAULT}",
        envvar="KVPOOL_POOL", callback=pool_or_default, show_default=False)] = ""
    remove: Annotated[bool, flag(None, "--remove", "Take the tenant's quota back.")] = False
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class CapacityOptions:
    size: Annotated[str | None, typer.Argument(metavar="SIZE", show_default=False, callback=is_sized,
        help="Most bytes of the directory, such as 200GiB, for all its processes. Without it: show it.")] = None
    pool: Annotated[str, option(None, "URL", f"The directory; of a near and a far one, the near one. {ELSE_DEFAULT}",
        envvar="KVPOOL_POOL", callback=pool_or_default, show_default=False)] = ""
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    tenant: Annotated[str | None, option(ANSWER, "TENANT",
        "Of an index: this tenant's requests. Without it: those of all.")] = None
    block_tokens: Annotated[int | None, option(ANSWER, "TOKENS",
        "Of a block. Without it: as the index or the trace tells, or 16.", min=1, max=1 << 20)] = None
    token_bytes: Annotated[str | None, option(ANSWER, "SIZE",
        "KV cache of a token, such as 128KiB, for bytes in the table. Without it: as the index knows them.",
        callback=is_size)] = None
    price: Annotated[float | None, option(ANSWER, "MONEY",
        "Of a GiB for a month: shows what each size costs, and a further point of hit rate.", min=0, max=1e9)] = None
    as_json: Json = False
    model: Annotated[str | None, option(MODEL, "MODEL",
        "What its KV cache takes: a folder with config.json, such a file, or ORG/MODEL of the Hugging Face hub. No "
        "weights are read. With --trace: for its bytes.")] = None
    dtype: Annotated[CacheType | None, option(MODEL, None,
        "Of the cache. Without it: both; with --trace bfloat16.")] = None
    tp: Annotated[int, option(MODEL, "RANKS", "Tensor-parallel ranks of an engine.", min=1, max=1024)] = 1
    prefill: Annotated[int, option(MODEL, "TOKENS/S",
        "What an engine computes, for --model's link and disk.", min=1, max=10**9)] = 1000
    trace: Annotated[Path | None, option(TRACE, "FILE",
        "Requests and their blocks, a session or a request a line; no index is asked then.")] = None
    apart: Annotated[float, option(TRACE, "SECONDS", "Between the beginnings of two sessions.", min=0, max=1e9)] = 60.0
    most_blocks: Annotated[int, option(TRACE, "BLOCKS",
        "Most blocks that are followed, about 200 bytes each; of more, a sample.", min=256, max=1 << 28)] = 1 << 21
    index: Index = "127.0.0.1:50051"
    token_file: TokenFile = None
    tls_ca: TlsCa = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None

# fmt: on
