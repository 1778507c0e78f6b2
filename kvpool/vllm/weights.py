"""The weights of an engine, and its requests' LoRA adapters: digests of their files.

A digest is equal on every node and under every path. A loader of other sources than a checkpoint's files
needs ``model_id``.

vLLM's block hashes contain only an adapter's name and path. So the pool's hashes also include the digest of
the adapter's files (``pool_hash``). A thread checks the files per request, by sizes and times if these are
unchanged. An adapter whose files ever differ from the first seen, or from those that a worker loaded
(``adapter_loads``), runs without the pool until a restart: the engine may hold blocks of either under one hash.

Threads: of weights, any. The scheduler's thread calls the rest, reads checks and ``_known``, and sets ``changed``;
a reader thread, alive while checks wait, writes ``_known``, and a check's fields before its
``done``. ``_lock`` guards ``_waiting`` and ``_reading``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import numpy
from vllm import envs
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.logger import init_logger

from kvpool.config import PoolConfig
from kvpool.errors import ConfigError, EngineRefused, NoThread
from kvpool.key.checkpoint import LOADED_SUFFIXES, WEIGHTS_SUFFIXES, CheckpointDigest, checkpoint_digest
from kvpool.key.key import Fact
from kvpool.text import counted
from kvpool.threads import start_thread
from kvpool.vllm import internals, support
from kvpool.vllm.plan import AdapterFiles

logger = init_logger("vllm.kvpool")


_SUFFIXES = LOADED_SUFFIXES | {
    "hf": LOADED_SUFFIXES["auto"],
    "runai_streamer": LOADED_SUFFIXES["safetensors"],
}
# Settings of ``model_loader_extra_config`` that change how files are read, not which.
_HARMLESS = frozenset((
    "enable_multithread_load", "num_threads", "enable_weights_track", "concurrency", "memory_limit", "distributed",
))  # fmt: skip
# A model class with one of these attributes loads from more places than the top of its folder.
_ELSEWHERE = frozenset(("secondary_weights", "allow_patterns_overrides"))
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOTS = "snapshots"  # in a cache of the hub: models--ORG--NAME/snapshots/COMMIT


class Weights(NamedTuple):
    """``facts``: identify the weights. ``source``: their origin and the cost of the digest, for the log."""

    facts: dict[str, Fact]
    source: str


def weights_of(config: VllmConfig, settings: PoolConfig) -> Weights:
    """The facts of the weights that an engine of this configuration has loaded.

    Reads files, for at most ``checkpoint.TIMEOUT_S``. Errors: ``ConfigError``, ``NoThread``, a sentence that
    says what to do.
    """
    load_format = str(config.load_config.load_format)
    if settings.model_id is not None:
        # Dummy weights match no checkpoint, whatever their name.
        word = "dummy model_id" if load_format == "dummy" else "model_id"
        return Weights(
            {"weights": f"{word} {settings.model_id}"},
            f'by model_id "{settings.model_id}", no file was looked at',
        )
    facts, source = _checkpoint(config.model_config, config.load_config)
    drafts = support.drafts_with_layers(config)
    if drafts is not None and drafts.draft_model_config.model != config.model_config.model:
        loads = drafts.draft_load_config or config.load_config
        of_drafts, where = _checkpoint(drafts.draft_model_config, loads)
        facts |= {f"drafts_{name}": value for name, value in of_drafts.items()}
        source += f"; drafts: {where}"
    return Weights(facts, source)


def _checkpoint(model: ModelConfig, load: LoadConfig) -> Weights:
    """The facts of a checkpoint's files."""
    reason = next(_untold(model, load), None)
    if reason is not None:
        raise EngineRefused(
            f"{reason}, so the weights cannot be identified; set model_id to a name that stands for exactly "
            "these weights"
        )
    path = _path(model, load)
    started = time.monotonic()
    digest = checkpoint_digest(path, suffixes=_SUFFIXES[str(load.load_format)])
    took_s = time.monotonic() - started
    facts: dict[str, Fact] = {"weights": digest.hex}
    if commit := snapshot_commit(path):
        facts["revision"] = commit
    return Weights(facts, _described(path, digest, took_s))


def model_name(model: ModelConfig, model_id: str | None) -> str:
    """The model's display name, independent of its files' location. It is no fact."""
    served = model.served_model_name
    name = served[0] if isinstance(served, list) else served
    if model_id or (name and name != model.model):
        return model_id or str(name)
    path = Path(model.model)
    if not path.exists():
        return str(model.model)
    path = path.absolute()
    of_hub = path.parents[1].name if path.parent.name == _SNAPSHOTS else ""
    return of_hub.removeprefix("models--").replace("--", "/") or path.name


def snapshot_commit(path: Path) -> str:
    """The commit of a path in a hub's cache; empty anywhere else."""
    path = path.absolute()
    folder = path if path.is_dir() else path.parent
    return folder.name if folder.parent.name == _SNAPSHOTS and _COMMIT.fullmatch(folder.name) else ""


def _untold(model: ModelConfig, load: LoadConfig) -> Iterator[str]:
    """Reasons why the checkpoint's files do not identify the engine's weights; empty if they do."""
    load_format = str(load.load_format)
    if load_format == "dummy":
        yield "--load-format dummy fills the weights with random numbers"
    elif load_format not in _SUFFIXES:
        yield f"--load-format {load_format} loads weights from something else than the files of a checkpoint"
    elif not (internals.loader_module(load_format) or "").startswith("vllm."):
        yield f"--load-format {load_format} is a plugin's loader here"
    if model.model_weights:
        yield "the weights come from object storage"
    extra = load.model_loader_extra_config
    strange = sorted(set(extra) - _HARMLESS) if isinstance(extra, dict) else [type(extra).__name__]
    if strange:
        yield f"--model-loader-extra-config has {strange[0]}, which says what is loaded"
    if envs.VLLM_USE_MODELSCOPE and not Path(model.model).exists():
        yield "the weights come from ModelScope"
    if model.trust_remote_code and _code_is_elsewhere(model):
        yield "--trust-remote-code runs code that lies not beside the weights"
    model_class = internals.model_class(model)
    if _loads_from_elsewhere(model_class):
        yield f"the model {model_class.__name__} loads weights from more places than its checkpoint"


def _code_is_elsewhere(model: ModelConfig) -> bool:
    named = getattr(model.hf_config, "auto_map", None) or {}
    classes = [
        one for value in named.values() for one in (value if isinstance(value, (list, tuple)) else [value])
    ]
    return bool(named) and (model.code_revision is not None or any("--" in str(one) for one in classes))


def _loads_from_elsewhere(model_class: type) -> bool:
    for one in model_class.__mro__:
        made = getattr(one.__dict__.get("__init__"), "__code__", None)
        names: set[str] = {*vars(one), *(made.co_names if made is not None else ())}
        if names & _ELSEWHERE and one.__module__ != "torch.nn.modules.module":
            return True
    return False


def _path(model: ModelConfig, load: LoadConfig) -> Path:
    """The weights' folder or file. Reads caches, asks no hub."""
    path = Path(model.model)
    if path.exists():
        return path
    # A branch moves; the engine loaded the commit to which vLLM resolved it.
    revision: Any = getattr(model.revision, "resolved", None) or model.revision
    try:
        folder = huggingface_hub.snapshot_download(
            model.model,
            revision=None if revision is None else str(revision),
            cache_dir=load.download_dir,
            local_files_only=True,
            ignore_patterns=["*"],  # vLLM fetches only needed files, so a snapshot is seldom whole
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f'the files of "{model.model}" are in no cache of the hub that this process can read '
            f"({str(error).splitlines()[0]}); give --download-dir or HF_HUB_CACHE to all of the engine's processes, "
            "or set model_id to a name that stands for exactly these weights"
        ) from error
    return Path(folder)


def _described(path: Path, digest: CheckpointDigest, took_s: float) -> str:
    return (
        f"{digest.hex}, of {counted(digest.files, 'file')} with {digest.nbytes / 1e6:,.1f} MB in {path}; "
        f"read {digest.read_nbytes / 1e6:,.1f} MB in {took_s * 1e3:,.0f} ms"
    )


TAG_NBYTES = 16
DIGEST_TIMEOUT_S = 10.0
RETRY_S = 30.0  # pause before unreadable files are tried again
MAX_WAITING = 1024  # checks; beyond it requests skip the pool
MAX_ADAPTERS = 4096
MAX_ENTRIES = 4096  # of one adapter's folder
_OF_ADAPTERS = (*WEIGHTS_SUFFIXES, ".json")
_HASH64_NBYTES = 8  # the end of a hash, by which an index knows a block


@dataclass
class AdapterCheck:
    """A check of a request's adapter. ``tag``: the last known until ``done``; None: no pool (``cause``)."""

    number: int
    name: str
    path: str
    form: str  # how to read its tensors
    tag: bytes | None = None
    files: AdapterFiles | None = None  # that the tag is of; with ``done``
    done: bool = False
    cause: str = "late"


@dataclass
class _Files:
    seen: bytes = b""  # the state of the files
    digest: str = ""
    changed: bool = False
    failed_at: float | None = None


class Adapters:
    """Checks the adapters of an engine. ``settings``: further inputs to an adapter's weights."""

    def __init__(
        self,
        settings: str = "",
        clock: Callable[[], float] = time.monotonic,
        timeout_s: float = DIGEST_TIMEOUT_S,
    ) -> None:
        self._settings, self._clock, self._timeout_s = settings, clock, timeout_s
        self._known: dict[tuple[str, str], _Files] = {}
        self._lock = threading.Lock()
        self._waiting: deque[AdapterCheck] = deque()
        self._reading = False

    def check(self, lora_request: Any) -> AdapterCheck:
        """Start to identify an adapter. Does not block."""
        check = AdapterCheck(
            int(lora_request.lora_int_id),
            str(lora_request.lora_name),
            str(lora_request.lora_path),
            str(getattr(lora_request, "is_3d_lora_weight", False)),
        )
        known = self._known.get((check.name, check.path))
        if known is not None and known.digest and not known.changed:
            check.tag = self._tag(known.digest, check)
        with self._lock:
            if len(self._waiting) >= MAX_WAITING:
                check.tag, check.done = None, True
                return check
            self._waiting.append(check)
            start, self._reading = not self._reading, True
        if start:
            self._start()
        return check

    def _start(self) -> None:
        try:
            start_thread(threading.Thread(target=self._read, name="kvpool-adapters", daemon=True))
        except NoThread as error:  # never reaches the engine
            logger.warning("kvpool: adapters go without the pool: %s", error)
            while (check := self._next()) is not None:
                check.tag, check.cause, check.done = None, "unreadable", True

    def other_files(self, name: str, path: str) -> None:
        """A worker has loaded an adapter of other files than its digest is of."""
        known = self._known.get((name, path))
        if known is not None and not known.changed:
            self._change(known, name, path)

    @staticmethod
    def _change(known: _Files, name: str, path: str) -> None:
        known.changed = True
        logger.warning(
            "kvpool: adapter %s goes without the pool until this engine restarts, for the files in %s are not those "
            "that it was loaded of, or were just written: give an adapter whose weights have changed another path",
            name,
            path,
        )

    def close(self) -> None:
        """Drop waiting checks; the thread ends after its present read."""
        with self._lock:
            self._waiting.clear()

    def _next(self) -> AdapterCheck | None:
        with self._lock:
            self._reading = bool(self._waiting)
            return self._waiting.popleft() if self._waiting else None

    def _read(self) -> None:
        while (check := self._next()) is not None:
            try:
                check.tag, check.cause = self._looked(check)
            except Exception as error:  # never reaches the engine
                logger.warning("kvpool: adapter %s: %s: %s", check.name, type(error).__name__, error)
                check.tag, check.cause = None, "unreadable"
            check.done = True

    def _looked(self, check: AdapterCheck) -> tuple[bytes | None, str]:
        """(tag, why it is None)."""
        key = (check.name, check.path)
        if key not in self._known and len(self._known) >= MAX_ADAPTERS:
            return None, "too_many"
        known = self._known.setdefault(key, _Files())
        if known.changed:
            return None, "changed"
        if known.failed_at is not None and self._clock() < known.failed_at + RETRY_S:
            return None, "unreadable"
        path = Path(check.path).expanduser()
        try:
            seen, _ = files_state(path)
            digest = known.digest
            if seen != known.seen:
                digest = checkpoint_digest(path, timeout_s=self._timeout_s).hex
                if files_state(path)[0] != seen:
                    raise ConfigError(f"{path} was written while it was read")
        except (ConfigError, NoThread, OSError) as error:
            if known.failed_at is None:
                logger.warning(
                    "kvpool: adapter %s goes without the pool, for its files cannot be looked at: %s",
                    check.name,
                    error,
                )
            known.failed_at = self._clock()
            return None, "unreadable"
        if known.digest and digest != known.digest:
            self._change(known, check.name, check.path)
            return None, "changed"
        known.seen, known.digest, known.failed_at = seen, digest, None
        check.files = AdapterFiles(check.number, check.name, check.path, seen)
        return self._tag(digest, check), ""

    def _tag(self, digest: str, check: AdapterCheck) -> bytes:
        return hashlib.sha256(json.dumps([digest, self._settings, check.form]).encode()).digest()[:TAG_NBYTES]


def pool_hash(block_hash: bytes, tag: bytes) -> bytes:
    """The hash in the key of an adapter's block; an index knows its last 8 bytes, which stay the engine's."""
    width = len(block_hash)
    return (int.from_bytes(block_hash, "big") ^ _mask(tag, width)).to_bytes(width, "big")


def pool_hashes(block_hashes: bytes, hash_nbytes: int, tag: bytes) -> bytes:
    """``pool_hash`` of each of the packed ``block_hashes``; a millisecond per 60,000."""
    mask = numpy.frombuffer(_mask(tag, hash_nbytes).to_bytes(hash_nbytes, "big"), numpy.uint8)
    return (numpy.frombuffer(block_hashes, numpy.uint8).reshape(-1, hash_nbytes) ^ mask).tobytes()


@functools.lru_cache(maxsize=MAX_ADAPTERS)
def _mask(tag: bytes, width: int) -> int:
    """The mask for the replaced bytes, as random as the hash itself."""
    spread = hashlib.sha256(tag).digest() * 2
    return int.from_bytes(spread[: width - _HASH64_NBYTES] + bytes(_HASH64_NBYTES), "big")


def files_state(path: Path) -> tuple[bytes, int]:
    """A digest of the names, sizes and times of an adapter's files, and when the last changed, in ns of its clock.

    A write, or another file in its place, changes it, unless it comes within a tick of that clock. Other files in the
    folder do not count. Errors: ``ConfigError``, ``OSError``.
    """
    files = [path]
    if path.is_dir():
        with os.scandir(path) as entries:
            names = [entry.name for _, entry in zip(range(MAX_ENTRIES + 1), entries, strict=False)]
        if len(names) > MAX_ENTRIES:
            raise ConfigError(
                f"{path} has more than {MAX_ENTRIES} files; give the adapter a folder of its own"
            )
        files = [path / name for name in sorted(names) if name.endswith(_OF_ADAPTERS)]
    found = [(file.name, file.stat()) for file in files]
    said = [[name, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns] for name, one in found]
    return hashlib.sha256(json.dumps(said).encode()).digest(), max(
        (one.st_ctime_ns for _, one in found), default=0
    )
