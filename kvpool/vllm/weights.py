"""Which weights an engine has loaded: a digest of their files, or ``model_id`` where there are none.

The digest is the same on every node and for every path under which the files are mounted. A loader that reads something
else than the files of a checkpoint, or more than them, is refused without ``model_id``.

Threads: any; nothing here is kept.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
from vllm import envs
from vllm.config import ModelConfig, VllmConfig

from kvpool.config import PoolConfig
from kvpool.errors import ConfigError, EngineRefused
from kvpool.key.checkpoint import CheckpointDigest, checkpoint_digest
from kvpool.key.key import Fact
from kvpool.text import counted
from kvpool.vllm import internals

# What vLLM's loaders read from the folder: the first of these that exists, and no other.
_CHECKPOINT = (".safetensors", ".bin", ".pt")
_SUFFIXES = {
    "auto": _CHECKPOINT,
    "hf": _CHECKPOINT,
    "bitsandbytes": _CHECKPOINT,
    "safetensors": (".safetensors",),
    "fastsafetensors": (".safetensors",),
    "instanttensor": (".safetensors",),
    "mistral": (".safetensors",),
    "runai_streamer": (".safetensors",),
    "sharded_state": (".safetensors",),
    "pt": (".pt",),
    "gguf": (".gguf",),
}
# Settings of ``model_loader_extra_config`` that say how files are read, not which.
_HARMLESS = frozenset(
    (
        "enable_multithread_load",
        "num_threads",
        "enable_weights_track",
        "concurrency",
        "memory_limit",
        "distributed",
    )
)
# A model class that uses one of these names loads from more places than the top of its folder.
_ELSEWHERE = frozenset(("secondary_weights", "allow_patterns_overrides"))
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOTS = "snapshots"  # in a cache of the hub: models--ORG--NAME/snapshots/COMMIT


class Weights(NamedTuple):
    """``facts``: what stands for the weights. ``source``: where they were found, and what that took, for the log."""

    facts: dict[str, Fact]
    source: str


def weights_of(config: VllmConfig, settings: PoolConfig) -> Weights:
    """The facts of the weights that an engine of this configuration has loaded: call it when it has.

    Blocking: reads files, for at most ``checkpoint.TIMEOUT_S``.
    Errors: ``ConfigError``, one sentence that says what to do.
    """
    load_format = str(config.load_config.load_format)
    if settings.model_id is not None:
        # Dummy weights are like those of no checkpoint, whatever they are called.
        word = "dummy model_id" if load_format == "dummy" else "model_id"
        return Weights(
            {"weights": f"{word} {settings.model_id}"},
            f'by model_id "{settings.model_id}", no file was looked at',
        )
    reason = next(_untold(config), None)
    if reason is not None:
        raise EngineRefused(
            f"{reason}, so the weights cannot be identified; set model_id to a name that stands for exactly "
            "these weights"
        )
    path = _path(config)
    started = time.monotonic()
    digest = checkpoint_digest(path, suffixes=_SUFFIXES[load_format])
    took_s = time.monotonic() - started
    facts: dict[str, Fact] = {"weights": digest.hex}
    if commit := snapshot_commit(path):
        facts["revision"] = commit
    return Weights(facts, _described(path, digest, took_s))


def model_name(model: ModelConfig, model_id: str | None) -> str:
    """The model's name for people, which does not depend on where its files lie. It is no fact."""
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
    """The commit of a folder, or of a file, in a cache of the hub; empty anywhere else."""
    path = path.absolute()
    folder = path if path.is_dir() else path.parent
    return folder.name if folder.parent.name == _SNAPSHOTS and _COMMIT.fullmatch(folder.name) else ""


def _untold(config: VllmConfig) -> Iterator[str]:
    """Why the files of the checkpoint do not say which weights the engine has; nothing where they do."""
    model, load = config.model_config, config.load_config
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


def _path(config: VllmConfig) -> Path:
    """The folder or file that the weights were loaded from. Looks into caches and asks no hub."""
    model = config.model_config
    path = Path(model.model)
    if path.exists():
        return path
    # A branch moves; what this engine has loaded is the commit to which vLLM resolved it.
    revision: Any = getattr(model.revision, "resolved", None) or model.revision
    try:
        folder = huggingface_hub.snapshot_download(
            model.model,
            revision=None if revision is None else str(revision),
            cache_dir=config.load_config.download_dir,
            local_files_only=True,
            ignore_patterns=["*"],  # vLLM fetches what it needs, so a snapshot is seldom whole
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
