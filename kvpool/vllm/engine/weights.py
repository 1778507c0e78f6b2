"""The weights of an engine: digests of their files.

A digest is equal on every node and under every path. A loader of other sources than a checkpoint's files
needs ``model_id``. A checkpoint whose files changed after its worker began is not identified.

Threads: any.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
from vllm import envs
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.logger import init_logger

from kvpool.config import EncoderConfig, PoolConfig
from kvpool.errors import ConfigError, EngineRefused
from kvpool.key.checkpoint import (
    AUTO_PATTERNS_OF_VLLM,
    LOADED_PATTERNS,
    CheckpointDigest,
    checkpoint_digest,
    refuse_later_changes,
)
from kvpool.key.key import Fact
from kvpool.text import counted
from kvpool.vllm.engine import internals, support

logger = init_logger("vllm.kvpool")


PATTERNS = LOADED_PATTERNS | {
    "auto": AUTO_PATTERNS_OF_VLLM,
    "hf": LOADED_PATTERNS["auto"],
    "runai_streamer": LOADED_PATTERNS["safetensors"],
}
# Settings of ``model_loader_extra_config`` that change how files are read, not which.
_HARMLESS = frozenset((
    "enable_multithread_load", "num_threads", "enable_weights_track", "concurrency", "memory_limit", "distributed",
))  # fmt: skip
# A model class with one of these attributes loads from more places than the top of its folder.
_ELSEWHERE = frozenset(("secondary_weights", "allow_patterns_overrides"))
_COMMIT = re.compile(r"[0-9a-f]{40}")
NEVER = 1 << 63  # ns
_SNAPSHOTS = "snapshots"  # in a cache of the hub: models--ORG--NAME/snapshots/COMMIT


class Weights(NamedTuple):
    """``facts``: identify the weights. ``source``: their origin and the cost of the digest, for the log."""

    facts: dict[str, Fact]
    source: str


def weights_of(
    config: VllmConfig, settings: PoolConfig | EncoderConfig, loads_since_ns: int = NEVER
) -> Weights:
    """The facts of the weights that an engine of this configuration has loaded, none of it before ``loads_since_ns``.

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
    facts, source = _checkpoint(config.model_config, config.load_config, loads_since_ns)
    drafts = support.drafts_with_layers(config)
    if drafts is not None:
        model, loads = drafts.draft_model_config, drafts.draft_load_config or config.load_config
        if not _reads_the_same(model, loads, config):
            of_drafts, where = _checkpoint(model, loads, loads_since_ns)
            facts |= {f"drafts_{name}": value for name, value in of_drafts.items()}
            source += f"; drafts: {where}"
    return Weights(facts, source)


def _reads_the_same(drafts: ModelConfig, loads: LoadConfig, config: VllmConfig) -> bool:
    """Whether drafts are loaded of the model's own files."""
    if drafts.model != config.model_config.model or loads.load_format != config.load_config.load_format:
        return False
    return _path(drafts, loads) == _path(config.model_config, config.load_config)


def _checkpoint(model: ModelConfig, load: LoadConfig, loads_since_ns: int) -> Weights:
    """The facts of a checkpoint's files."""
    reason = next(_untold(model, load), None)
    if reason is not None:
        raise EngineRefused(
            f"{reason}, so the weights cannot be identified; set model_id to a name that stands for exactly "
            "these weights"
        )
    path = _path(model, load)
    started = time.monotonic()
    digest = checkpoint_digest(path, patterns=PATTERNS[str(load.load_format)])
    took_s = time.monotonic() - started
    facts: dict[str, Fact] = {"weights": digest.hex}
    if commit := snapshot_commit(path):  # its files never change, and may have come while it was loaded
        facts["revision"] = commit
    else:
        refuse_later_changes(path, loads_since_ns, patterns=PATTERNS[str(load.load_format)])
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
    elif load_format not in PATTERNS:
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
