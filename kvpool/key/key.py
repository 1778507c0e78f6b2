"""The parts and spelling of store keys. Over 400 lines because no other module writes or parses them.

A block's key is ``kvpool:{tenant}:{namespace}:{hash hex}:{group}:{rank}`` (without the braces) in printable
ASCII:

- tenant: 1 to 64 of ``[A-Za-z0-9_-]``; first, so that one ACL pattern covers it;
- namespace: 32 lowercase hex digits, the fingerprint of every fact that changes the meaning of the bytes;
- hash: the engine's chained block hash, 16 to 128 lowercase hex digits;
- group, rank: canonical decimals from 0 to 65535.

Nothing here blocks; every object is immutable and thread-safe.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from types import MappingProxyType
from typing import NamedTuple, NewType

from kvpool._native import RECORD_VERSION
from kvpool.errors import ConfigError

BlockHash = NewType("BlockHash", bytes)
Fact = str | int | bool

KEY_PREFIX = "kvpool:"
FACTS_SUFFIX = ":facts"  # of the key of a namespace's facts
QUOTA_PREFIX = "kvpool-quota:"  # beside all tenants' keys: their users may read these, and not write
EPOCH_FACT = "epoch"  # of one engine alone, whose weights may have changed since its start
MEMORY_FACT = "weights_in_memory"  # of engines whose weights changed since their start: what they hold now
RECORD_FACT = "record_version"  # of every namespace: readers of one version meet no records of another
FINGERPRINT_NBYTES = 16
MIN_HASH_NBYTES = 8
MAX_HASH_NBYTES = 64
MAX_INDEX = 65535
MAX_FACTS = 4096
MAX_FACT_CHARS = 4096

TENANT_PATTERN = r"[A-Za-z0-9_-]{1,64}"
WORKER_NAME_PATTERN = r"[A-Za-z0-9._:\[\]-]{1,128}"
_TENANT = re.compile(TENANT_PATTERN)
_WORKER_NAME = re.compile(WORKER_NAME_PATTERN)
_INDEX_PATTERN = r"0|[1-9][0-9]{0,4}"
_KEY = re.compile(
    rf"kvpool:({TENANT_PATTERN}):([0-9a-f]{{32}}):((?:[0-9a-f]{{2}}){{8,64}}):({_INDEX_PATTERN}):({_INDEX_PATTERN})"
)
_FACTS_KEY = re.compile(rf"kvpool:({TENANT_PATTERN}):([0-9a-f]{{32}}){FACTS_SUFFIX}")
_ANY_KEY = re.compile(rf"kvpool:({TENANT_PATTERN}):")
_ENGINE_KEY = re.compile(rf"kvpool:({TENANT_PATTERN}):(traffic|keeper):[0-9a-f]{{16}}")
_ASKED = "?"  # impossible in a worker's name
_WORKER_KEY = re.compile(rf"kvpool:({TENANT_PATTERN}):worker:({_INDEX_PATTERN}):({WORKER_NAME_PATTERN})")


def check_tenant(tenant: str) -> str:
    """Return ``tenant`` if a key can contain it. Errors: ``ConfigError`` that says the allowed characters."""
    if not isinstance(tenant, str) or _TENANT.fullmatch(tenant) is None:
        raise ConfigError(
            f"tenant {tenant!r} is not allowed: use 1 to 64 letters, digits, underscores or hyphens"
        )
    return tenant


def check_worker_name(name: str) -> str:
    """Return ``name`` if a worker can announce it. Errors: ``ConfigError`` that says the allowed characters."""
    if not isinstance(name, str) or _WORKER_NAME.fullmatch(name) is None:
        raise ConfigError(
            f"worker name {name!r:.80} is not allowed: use 1 to 128 letters, digits and any of . _ : [ ] -"
        )
    return name


class BlockKey(NamedTuple):
    tenant: str
    fingerprint: bytes  # 16 bytes
    hash: BlockHash  # 8 to 64 bytes
    group: int
    rank: int


class FoundKey(NamedTuple):
    """A block's key with the 64-bit form of its hash, as an index stores it."""

    tenant: str
    namespace: str  # 32 hex digits
    hash64: int
    group: int
    rank: int


def split_key(key: str) -> FoundKey:
    """Split a key for which ``is_key`` is true; fast enough for millions."""
    _, tenant, namespace, block_hash, group, rank = key.split(":")
    return FoundKey(tenant, namespace, int(block_hash[-16:], 16), int(group), int(rank))


def parse_key(key: str) -> BlockKey:
    """Parse one block's key. Errors: ``ConfigError`` unless it is spelled exactly as here."""
    match = _KEY.fullmatch(key) if isinstance(key, str) else None
    if match is None:
        raise ConfigError(f"{key!r} is not a kvpool key: kvpool:TENANT:NAMESPACE:HASH:GROUP:RANK")
    group, rank = int(match[4]), int(match[5])
    if group > MAX_INDEX or rank > MAX_INDEX:
        raise ConfigError(f"{key!r} is not a kvpool key: group and rank are at most {MAX_INDEX}")
    return BlockKey(match[1], bytes.fromhex(match[2]), BlockHash(bytes.fromhex(match[3])), group, rank)


def found_key(tenant: str, namespace: str, block_hash: str, group: str, rank: str) -> str | None:
    """The key from its parts as text; None when they are not a block's."""
    key = f"{KEY_PREFIX}{tenant}:{namespace}:{block_hash}:{group}:{rank}"
    return key if is_key(key) else None


def is_key(key: str) -> bool:
    """Whether ``key`` is spelled as a block's key."""
    match = _KEY.fullmatch(key)
    return match is not None and int(match[4]) <= MAX_INDEX and int(match[5]) <= MAX_INDEX


def rank_key(key: str, rank: int) -> str:
    """The key of the same block's part on another rank."""
    return f"{key[: key.rindex(':') + 1]}{rank}"


def tenant_prefix(tenant: str) -> str:
    return f"{KEY_PREFIX}{check_tenant(tenant)}:"


def namespace_prefix(tenant: str, namespace: str) -> str:
    """Prefix of all keys in a tenant's namespace; ``namespace``: its 32 hex digits."""
    return f"{tenant_prefix(tenant)}{namespace}:"


def tenant_of(key: str) -> str:
    """The tenant of a key or announcement; empty if it names none."""
    start, _, rest = key.partition(":")
    tenant, colon, _ = rest.partition(":")
    return tenant if f"{start}:" == KEY_PREFIX and colon else ""


def parse_facts_key(key: str) -> tuple[str, str] | None:
    """(tenant, namespace hex) of a namespace's facts key; None for any other key."""
    match = _FACTS_KEY.fullmatch(key)
    return (match[1], match[2]) if match else None


def worker_key(tenant: str, name: str, dp_rank: int) -> str:
    """The announcement key of a rank: ``kvpool:TENANT:worker:RANK:NAME``. Errors: ``ConfigError``."""
    return f"{workers_prefix(tenant)}{_index('dp_rank', dp_rank)}:{check_worker_name(name)}"


def workers_prefix(tenant: str) -> str:
    return tenant_prefix(tenant) + "worker:"


def parse_worker_key(key: str) -> tuple[str, str, int] | None:
    """(tenant, name, data-parallel rank) of a ``worker_key``; None for any other key."""
    match = _WORKER_KEY.fullmatch(key)
    if match is None or int(match[2]) > MAX_INDEX:
        return None
    return match[1], match[3], int(match[2])


def request_key(worker_key: str) -> str:
    """The key for requests of all blocks of a rank, beside its record so that one read returns both."""
    return worker_key + _ASKED


def is_request_key(key: str) -> bool:
    return key.endswith(_ASKED) and parse_worker_key(key.removesuffix(_ASKED)) is not None


def traffic_key(tenant: str, engine: str) -> str:
    """The key of an engine's traffic: ``kvpool:TENANT:traffic:ENGINE``. ``engine``: 16 hex digits."""
    return f"{traffic_prefix(tenant)}{engine}"


def traffic_prefix(tenant: str) -> str:
    return tenant_prefix(tenant) + "traffic:"


def keeper_key(tenant: str, engine: str) -> str:
    """The key that counts an engine among those that keep prefixes: ``kvpool:TENANT:keeper:ENGINE``, 16 hex digits."""
    return f"{keepers_prefix(tenant)}{engine}"


def keepers_prefix(tenant: str) -> str:
    return tenant_prefix(tenant) + "keeper:"


def quota_keys(tenant: str) -> tuple[str, str]:
    """The keys of a tenant's quota, and of the bytes that it holds: ``kvpool-quota:TENANT``, and ``:held`` behind."""
    return f"{QUOTA_PREFIX}{check_tenant(tenant)}", f"{QUOTA_PREFIX}{tenant}:held"


def writer_name(start: str) -> bytes:
    """16 bytes that name who computes: 8 of a digest of this host's name, 8 of ``start``, a text of this start.

    It proves nothing: whoever may write may name any writer.
    """
    return _short_digest(socket.gethostname()) + _short_digest(start)


def is_writer_of(host: str, writer: bytes) -> bool:
    """Whether ``writer`` is a name of some start of an engine of this host, or pretends to be."""
    return writer.startswith(_short_digest(host))


def _short_digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:8]


def is_engine_key(key: str) -> bool:
    """Whether it is of an engine's traffic, or counts one that keeps prefixes."""
    return _ENGINE_KEY.fullmatch(key) is not None


def parse_tenant(key: str) -> str | None:
    """The tenant of a kvpool key; None for any other key."""
    match = _ANY_KEY.match(key)
    return match[1] if match else None


@dataclass(frozen=True, eq=False)
class Namespace:
    """A tenant, and the facts under which its cached bytes mean the same to every worker.

    ``facts``: flat, names to str, int or bool (64-bit integers, text up to 4,096 characters, up to 4,096
    facts). Subclasses of str count by their characters alone. Namespaces are equal when tenant and
    fingerprint are. The fingerprint is the first 16 bytes of SHA-256 over the facts as JSON: keys sorted by
    code point, no spaces, UTF-8, only ``"``, ``\\`` and control characters escaped.

    ``record_version``: of the records under these keys, which becomes a fact; None: as ``facts`` say it, of a namespace
    that somebody else named.

    Errors: ``ConfigError`` that names the tenant or the fact.
    """

    tenant: str
    facts: Mapping[str, Fact]
    record_version: InitVar[int | None] = RECORD_VERSION
    fingerprint: bytes = field(init=False, repr=False)
    _prefix: str = field(init=False, repr=False)

    def __post_init__(self, record_version: int | None) -> None:
        check_tenant(self.tenant)
        facts = _checked_facts(self.facts, record_version)
        canonical = json.dumps(facts, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        try:
            encoded = canonical.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"a fact holds text that is not Unicode: {error.reason}") from error
        fingerprint = hashlib.sha256(encoded).digest()[:FINGERPRINT_NBYTES]
        object.__setattr__(self, "facts", MappingProxyType(facts))
        object.__setattr__(self, "fingerprint", fingerprint)
        object.__setattr__(self, "_prefix", f"{tenant_prefix(self.tenant)}{fingerprint.hex()}:")

    @property
    def hex(self) -> str:
        """The fingerprint as 32 lowercase hex digits, as in keys."""
        return self.fingerprint.hex()

    @property
    def facts_key(self) -> str:
        """The pool key of the readable facts."""
        return f"{self._prefix[:-1]}{FACTS_SUFFIX}"

    def key(self, block_hash: bytes, group: int, rank: int) -> str:
        """The key of one block; see ``keys``."""
        return self.keys((block_hash,), group, rank)[0]

    def keys(self, block_hashes: Sequence[bytes], group: int, rank: int) -> list[str]:
        """A key per block hash, in order; about 0.15 microseconds each.

        ``block_hashes``: digests of 8 to 64 bytes. ``group``, ``rank``: 0 to 65535. Errors: ``ConfigError``.
        """
        prefix, suffix = self._prefix, f":{_index('group', group)}:{_index('rank', rank)}"
        if not block_hashes:
            return []
        if min(map(len, block_hashes)) < MIN_HASH_NBYTES or max(map(len, block_hashes)) > MAX_HASH_NBYTES:
            raise ConfigError(f"a block hash is {MIN_HASH_NBYTES} to {MAX_HASH_NBYTES} bytes long")
        return [prefix + block_hash.hex() + suffix for block_hash in block_hashes]

    def __reduce__(self) -> tuple[type[Namespace], tuple[str, dict[str, Fact], None]]:
        """vLLM sends it between an engine's processes: a view of facts cannot travel."""
        return Namespace, (self.tenant, dict(self.facts), None)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Namespace):
            return NotImplemented
        return self._prefix == other._prefix

    def __hash__(self) -> int:
        return hash(self._prefix)


def differing_facts(
    ours: Mapping[str, Fact], theirs: Mapping[str, Fact]
) -> list[tuple[str, Fact | None, Fact | None]]:
    """The facts that differ, by name: (name, ours, theirs); None where a side lacks it.

    ``True`` and ``1`` differ, as in the fingerprint.
    """
    differing: list[tuple[str, Fact | None, Fact | None]] = []
    for name in sorted(ours.keys() | theirs.keys()):
        our, their = ours.get(name), theirs.get(name)
        if our != their or type(our) is not type(their):
            differing.append((name, our, their))
    return differing


@dataclass(frozen=True)
class GroupLayout:
    """The memory layout of one block of one KV-cache group, layer by layer.

    ``block_tokens``: tokens stored under one key: one or several of the worker's blocks. ``payload_nbytes``:
    its bytes over all layers. ``layers``: number of layers, in payload order. ``shapes`` and ``strides``: per
    layer, of one of the worker's blocks, outermost dimension first; strides in elements. ``attention``:
    ``"full"``, ``"sliding_window:1024"``, ``"mla"``, ...: it decides which tokens a block serves. Errors:
    ``ConfigError`` that names the field.
    """

    block_tokens: int
    layers: int
    payload_nbytes: int
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    attention: str = "full"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shapes", tuple(tuple(map(int, shape)) for shape in self.shapes))
        object.__setattr__(self, "strides", tuple(tuple(map(int, stride)) for stride in self.strides))
        for name in ("block_tokens", "layers", "payload_nbytes"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"layout: {name} is a positive whole number, not {value!r}")
        if len(self.shapes) != self.layers or len(self.strides) != self.layers:
            raise ConfigError(
                f"layout: {self.layers} layers need as many shapes and strides, "
                f"not {len(self.shapes)} and {len(self.strides)}"
            )
        for shape, stride in zip(self.shapes, self.strides, strict=True):
            if len(shape) != len(stride) or not shape or min(shape) < 1:
                raise ConfigError(f"layout: shape {shape} and strides {stride} do not describe one block")
        if not self.attention:
            raise ConfigError("layout: attention is empty")


@dataclass(frozen=True)
class Layout:
    """The facts of a worker's KV memory that change the meaning of bytes under a key.

    ``kv_dtype``: element type, such as ``"bfloat16"`` or ``"fp8_e4m3"``. ``groups``: a layout per KV-cache
    group, in the engine's order; None: the pool has nothing of it. Errors: ``ConfigError``.
    """

    kv_dtype: str
    groups: tuple[GroupLayout | None, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        if not self.kv_dtype:
            raise ConfigError("layout: kv_dtype is empty")
        if not 1 <= len(self.groups) <= MAX_INDEX + 1:
            raise ConfigError("layout: there is no KV-cache group")

    def facts(self) -> dict[str, Fact]:
        """The layout as flat facts of a ``Namespace``, such as ``{"group0.block_tokens": 32}``.

        Equal neighbouring layers are merged: ``group0.shapes`` is ``"30*2x32x8x128,2*2x32x4x128"``.
        """
        facts: dict[str, Fact] = {"kv_dtype": self.kv_dtype, "groups": len(self.groups)}
        for index, group in enumerate(self.groups):
            if group is None:
                continue
            prefix = f"group{index}."
            facts[prefix + "block_tokens"] = group.block_tokens
            facts[prefix + "layers"] = group.layers
            facts[prefix + "payload_nbytes"] = group.payload_nbytes
            facts[prefix + "shapes"] = _run_lengths(group.shapes)
            facts[prefix + "strides"] = _run_lengths(group.strides)
            facts[prefix + "attention"] = group.attention
        return facts


def _run_lengths(rows: Iterable[tuple[int, ...]]) -> str:
    runs: list[tuple[int, str]] = []
    for row in rows:
        text = "x".join(map(str, row))
        if runs and runs[-1][1] == text:
            runs[-1] = (runs[-1][0] + 1, text)
        else:
            runs.append((1, text))
    return ",".join(f"{count}*{text}" for count, text in runs)


def _index(name: str, value: int) -> int:
    if type(value) is not int or not 0 <= value <= MAX_INDEX:
        raise ConfigError(f"{name} is a whole number from 0 to {MAX_INDEX}, not {value!r}")
    return value


def _checked_facts(given: Mapping[str, Fact], record_version: int | None) -> dict[str, Fact]:
    facts = dict(given)
    if given and record_version is not None:
        facts[RECORD_FACT] = record_version
    if not 1 <= len(facts) <= MAX_FACTS:
        raise ConfigError(f"a namespace has 1 to {MAX_FACTS} facts, not {len(facts)}")
    plain: dict[str, Fact] = {}
    for name, value in facts.items():
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_FACT_CHARS:
            raise ConfigError(f"a fact's name is text of 1 to {MAX_FACT_CHARS} characters, not {name!r:.80}")
        if isinstance(value, str):
            value = str.__str__(value)  # its characters, whatever a subclass overrides
            if len(value) > MAX_FACT_CHARS:
                raise ConfigError(
                    f"fact {name!r}: text is at most {MAX_FACT_CHARS} characters, not {len(value)}"
                )
        elif type(value) is int:
            if not -(1 << 63) <= value < 1 << 63:
                raise ConfigError(f"fact {name!r}: {value} does not fit in 64 bits")
        elif type(value) is not bool:
            raise ConfigError(f"fact {name!r} is a str, int or bool, not {type(value).__name__}")
        plain[str.__str__(name)] = value
    return plain
