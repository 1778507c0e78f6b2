"""Settings from the vLLM dict, ``KVPOOL_*`` in the environment, and a TOML file, in this order of precedence.

``KVPOOL_CONFIG`` names the file. Beside this only ``kvpool.environment`` reads the environment.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvpool.environment import (
    CONFIG_VARIABLE,
    ENVIRONMENT_PREFIX,
    INDEX_TOKEN_VARIABLE,
    hash_seed,
    read_toml,
)
from kvpool.errors import ConfigError
from kvpool.key.key import check_tenant, check_worker_name
from kvpool.text import joined_urls, nearest, parse_nbytes, printable, redact, unknown

__all__ = ["EncoderConfig", "HiCacheConfig", "PoolConfig", "TierConfig", "hash_seed", "redact"]

_TYPO_LIKENESS = 0.8  # Kubernetes' KVPOOL_PORT of a service named kvpool is 0.5 like KVPOOL_POOL
_HOST_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}")
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,19}")

_Model = TypeVar("_Model", bound="_Settings")


def _nbytes(value: object) -> object:
    return parse_nbytes(value) if isinstance(value, str) else value


Nbytes = Annotated[int, BeforeValidator(_nbytes)]
# For engines that do not report these themselves.
ModelId = Annotated[
    str,
    Field(
        min_length=1,
        max_length=1024,
        description="names exactly these weights and how the engine computes with them: revision, quantization, "
        "overrides, context length where RoPE depends on it, attention backend; engines of one name share",
    ),
]
# Two URLs are one text, as in the environment.
PoolURLs = Annotated[str, BeforeValidator(joined_urls)]
ModelPath = Annotated[
    str | None,
    Field(
        min_length=1,
        max_length=4096,
        description="folder of the checkpoint that the engine serves, where the engine does not tell it; is digested",
    ),
]
WeightsNeverChange = Annotated[
    bool,
    Field(
        description="keep sharing after the caches were reset: this engine keeps the weights it started with"
    ),
]
KeepShare = Annotated[
    float,
    Field(ge=0, le=0.5, description="share of the pool that may hold what requests ask to keep; 0: none"),
]
PrefetchShare = Annotated[
    float,
    Field(
        ge=0,
        le=1,
        description="share of a near pool, each engine's own, for what waiting requests are expected to load; 0: none",
    ),
]


class _Settings(BaseModel):
    """Settings of every use of a pool; strict, frozen, validated.

    Make it with ``load``. Every field is also an environment variable, such as ``KVPOOL_POOL``. The pool's
    URL may hold a password: ``repr`` and ``str`` redact it.
    """

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True,
        protected_namespaces=(), validate_default=True,
    )  # fmt: skip
    PLACE: ClassVar[str] = "kv_connector_extra_config"
    # Names of settings beside these, which a file of both has.
    BESIDE: ClassVar[Collection[str]] = ()
    # Settings of earlier versions, each with its refusal.
    REMOVED: ClassVar[Mapping[str, str]] = {"budget_s": "write lookup_timeout_s instead"}

    pool: PoolURLs = Field(
        min_length=1,
        max_length=8193,
        description="URL of the store, such as file:///dir or valkey://host:6379; two, near and far, in a list or with "
        "a space between them",
    )
    tenant: str = Field("default", description="keys of different tenants never meet")
    lookup_timeout_s: float = Field(
        0.5, gt=0, le=60,
        description="longest that the existence check, or a load that makes no progress, may delay a request",
    )  # fmt: skip
    max_load_s: float = Field(10.0, gt=0, le=600, description="longest that one load may take in all")
    threads: int | None = Field(
        None, ge=1, le=64, description="native threads that move bytes; unset: what the URL says, or 2"
    )

    start_without_pool: bool = Field(
        False, description="start although the pool's server does not answer, and share from its return on"
    )

    @field_validator("pool")
    @classmethod
    def _pool_is_a_url(cls, pool: str) -> str:
        scheme, separator, _ = pool.partition("://")
        if not scheme or not separator:
            raise ValueError("write a store URL such as file:///dir or valkey://host:6379")
        return pool

    @field_validator("tenant")
    @classmethod
    def _tenant_fits_a_key(cls, tenant: str) -> str:
        return check_tenant(tenant)

    def __repr_args__(self) -> Any:
        for name, value in super().__repr_args__():
            yield name, redact(value) if name == "pool" else value

    @classmethod
    def load(
        cls: type[_Model], mapping: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
    ) -> _Model:
        """Read the settings from ``mapping``, then ``environ``, then the TOML file named by
        ``KVPOOL_CONFIG``.

        ``mapping``: vLLM's ``kv_connector_extra_config``; strict types, as in JSON. ``environ``: None: the
        process's. The file has the fields at its top level. Blocks to read a small file. Errors:
        ``ConfigError``, one line that names the setting and its source.
        """
        environ = os.environ if environ is None else environ
        fields = cls.model_fields
        path = environ.get(CONFIG_VARIABLE)
        merged: dict[str, Any] = {}
        spelled: dict[str, str] = {}

        def merge(source: Mapping[str, Any], spell: Callable[[str], str], where: str = "") -> None:
            for given, value in source.items():
                if given in cls.REMOVED:
                    raise ConfigError(f"{spell(given)} is no setting any more: {cls.REMOVED[given]}")
                if given not in fields:
                    raise ConfigError(where + unknown("setting", str(given), fields))
                merged[given], spelled[given] = value, spell(given)
                cls._check({given: value}, spelled, alone=given)  # a later source may hide it

        if path:
            file = read_toml(path, CONFIG_VARIABLE)
            own = {name: file[name] for name in file if name in fields or name not in cls.BESIDE}
            merge(own, lambda name: f'{path}: setting "{name}"', f"{path}: ")
        merge(_from_environment(environ, fields, cls.REMOVED), lambda name: ENVIRONMENT_PREFIX + name.upper())
        merge(mapping or {}, lambda name: f'setting "{name}"')
        cls._check(merged, spelled)
        return cls(**merged)

    @classmethod
    def _check(cls, values: Mapping[str, Any], spelled: Mapping[str, str], alone: str = "") -> None:
        """Refuse a wrong value of ``values``; ``alone``: whatever is wrong with others than this one."""
        try:
            cls(**values)
        except ValidationError as error:
            wrong = [one for one in error.errors(include_input=True) if alone in ("", one["loc"][0])]
            if wrong:
                # Without the cause: pydantic's text has many lines and may hold the password.
                raise ConfigError(_one_line(wrong, spelled, cls)) from None


class PoolConfig(_Settings):
    """Settings of the connector: ``kv_connector_extra_config``."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        **_Settings.REMOVED,
        "store_after_requests": "write min_requests_to_store instead",
        "weights_digest": "remove it, or name weights that differ in single bytes by model_id",
        "weights_digest_timeout_s": "remove it, or set model_id where 60 s are too short to sample the checkpoint",
        "weights_never_change": "remove it: the weights in memory say themselves whether they have changed",
    }

    model_id: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="stands for the weights in place of the digest of their files: engines of one name share",
    )
    staging_nbytes: Nbytes | None = Field(
        None, ge=1 << 20, le=1 << 40,
        description="memory between device and store, such as 512MiB; unset: two steps and a third more, up to 2 GiB",
    )  # fmt: skip
    max_store_nbytes_per_s: Nbytes = Field(
        0, ge=0, le=1 << 50, description="cap on what this worker writes to the pool; 0: none; accepts 500MB"
    )
    store_policy: Literal["write_through", "write_back"] = Field(
        "write_through",
        description="store blocks in the step that computes them, or only those that the engine is about to evict",
    )
    min_requests_to_store: int = Field(
        1, ge=1, le=255, description="store a block when so many requests of this engine have had it"
    )
    blocks_per_record: int = Field(
        1, ge=1, le=64, description="how many blocks of the engine the pool keeps as one record"
    )
    share_across_tp: int | None = Field(
        None, ge=2, le=64,
        description="cut each block by heads into so many parts, which engines of every tensor-parallel size that "
        "divides it share; unset: only engines of one size share",
    )  # fmt: skip
    keep_share: KeepShare = 0.1
    audit_share: float = Field(
        1 / 256,
        ge=0,
        le=1,
        description="share of hits whose last block is computed and compared with the pool's, at most one a second; "
        "0: none, 1: all, without that limit",
    )
    audit_keep: str | None = Field(
        None,
        description="directory for blocks that audits find wrong, for a bug report",
    )
    prefetch_share: PrefetchShare = 0.25
    store_decode: bool = Field(True, description="store generated tokens, or only prompts")
    cost_gate: bool = Field(
        True, description="do not load what is expected, by measured rates, to be computed sooner"
    )
    advertise_host: str | None = Field(
        None,
        description="host by which indexes and routers reach this worker; unset: the one that faces the pool",
    )
    http_port: int | None = Field(
        None, ge=1, le=65535, description="port of the engine's own HTTP server; unset: its --port, or 8000"
    )
    worker: str | None = Field(
        None, description="name of this worker in the index; unset: host and port of its events"
    )
    lease_s: float = Field(
        10.0, ge=3, le=3600, description="how long after its end a worker that was killed is still announced"
    )

    @field_validator("advertise_host")
    @classmethod
    def _host_fits_an_address(cls, host: str | None) -> str | None:
        if host is not None and not _is_reachable(host):
            raise ValueError("write the host name or IP address by which others reach this worker")
        return host

    @field_validator("blocks_per_record")
    @classmethod
    def _records_are_stored_whole(cls, blocks: int, info: ValidationInfo) -> int:
        # The engine evicts blocks one by one, so a record's blocks never leave together.
        if blocks > 1 and info.data.get("store_policy") == "write_back":
            raise ValueError('"store_policy" "write_back" stores blocks one by one; set one of the two back')
        return blocks

    @field_validator("worker")
    @classmethod
    def _worker_fits_a_key(cls, worker: str | None) -> str | None:
        return worker if worker is None else check_worker_name(worker)


class EncoderConfig(_Settings):
    """Settings of the encoders' connector: ``ec_connector_extra_config``."""

    PLACE: ClassVar[str] = "ec_connector_extra_config"
    BESIDE: ClassVar[Collection[str]] = frozenset(PoolConfig.model_fields)

    model_id: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="stands for the weights in place of the digest of their files: engines of one name share",
    )
    staging_nbytes: Nbytes = Field(
        1 << 30, ge=1 << 20, le=1 << 40,
        description="host memory for outputs on their way from the pool, and as much for those on their way to it",
    )  # fmt: skip
    audit_share: float = Field(
        1 / 256,
        ge=0,
        le=1,
        description="share of the outputs in the pool that are computed all the same and compared, at most one a "
        "second; 0: none, 1: all, without that limit",
    )
    keep_share: KeepShare = 0.1
    prefetch_share: PrefetchShare = 0.25


class TierConfig(_Settings):
    """Settings of the tier ``KVPoolTier``: its entry in ``secondary_tiers``, without type and module_path."""

    PLACE: ClassVar[str] = "the tier's entry in secondary_tiers"

    # vLLM's tier interface reports little of this.
    model_id: ModelId
    model_path: ModelPath = None
    weights_never_change: WeightsNeverChange = False


class HiCacheConfig(_Settings):
    """Settings of SGLang's HiCache: ``--hicache-storage-backend-extra-config``, without SGLang's own keys."""

    PLACE: ClassVar[str] = "--hicache-storage-backend-extra-config"
    REMOVED: ClassVar[Mapping[str, str]] = {
        **_Settings.REMOVED,
        **dict.fromkeys(
            ("fault_miss_ratio", "fault_delay_s", "fault_corrupt_ratio"),
            "remove it, and stop the pool's server to see this server go on without it",
        ),
    }

    # Required where the weights' files cannot be found, see ``kvpool.sglang.served``.
    model_id: ModelId | None = None
    model_path: ModelPath = None
    weights_never_change: WeightsNeverChange = False
    kv_dtype: str | None = Field(
        None, min_length=1, max_length=64,
        description="what --kv-cache-dtype is, such as fp8_e4m3; needed where the host memory is bare bytes",
    )  # fmt: skip


def _is_reachable(host: str) -> bool:
    """Whether ``host`` can address a single host: a name, or an IP address other than the wildcard."""
    try:
        return not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return _HOST_NAME.fullmatch(host) is not None


def _from_environment(
    environ: Mapping[str, str], fields: Mapping[str, FieldInfo], removed: Mapping[str, str]
) -> dict[str, Any]:
    """Values of ``KVPOOL_*``. A near miss of a field is an error; others are ignored: Kubernetes sets some."""
    values: dict[str, Any] = {}
    others = [one.removeprefix(ENVIRONMENT_PREFIX).lower() for one in (CONFIG_VARIABLE, INDEX_TOKEN_VARIABLE)]
    for variable in sorted(environ):
        if not variable.upper().startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable[len(ENVIRONMENT_PREFIX) :].lower()
        if name in removed:
            values[name] = environ[variable]
        elif name in fields and variable == variable.upper():
            values[name] = _from_text(environ[variable], fields[name].annotation)
        elif variable in (CONFIG_VARIABLE, INDEX_TOKEN_VARIABLE):
            continue
        elif (match := nearest(name, [*fields, *others], likeness=_TYPO_LIKENESS)) is not None:
            wanted = ENVIRONMENT_PREFIX + match.upper()
            raise ConfigError(f'unknown variable "{variable}"; did you mean "{wanted}"?')
    return values


def _from_text(text: str, annotation: Any) -> str | int | float:
    """The number or boolean in a variable, for such a field; the field validates any other text."""
    if annotation is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    if annotation in (int, int | None, Nbytes | None) and _WHOLE_NUMBER.fullmatch(text):
        return int(text)
    if annotation is float:
        try:
            return float(text)
        except ValueError:
            return text
    return text


def _one_line(errors: list[ErrorDetails], spelled: Mapping[str, str], settings: type[_Settings]) -> str:
    """The first error in a sentence, without the value where that may be a secret."""
    error = errors[0]
    name = str(error["loc"][0])
    if error["type"] == "missing":
        return (
            f'setting "{name}" is missing: set "{name}" in {settings.PLACE} or {ENVIRONMENT_PREFIX}{name.upper()} in '
            f"the environment; {settings.model_fields[name].description}"
        )
    cause = error.get("ctx", {}).get("error")
    problem = str(cause) if cause is not None else error["msg"].removeprefix("Input ")
    got = "" if name == "pool" or cause is not None else f", got {printable(repr(error['input'])):.80}"
    return f"{spelled[name]}: {printable(problem)}{got}"
