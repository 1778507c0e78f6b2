"""What ``kvpool vllm`` adds for a model with an encoder, and which model has one: by its config.json on this host."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpool.cli.model import MAX_FILE_NBYTES
from kvpool.errors import ConfigError
from kvpool.files import read_file

ENCODER = "--ec-transfer-config"
_CONNECTOR = "KVPoolECConnector"
# What the models of vLLM call the configurations of their encoders.
_ENCODERS = (
    "audio_config", "audio_encoder_config", "encoder_config", "sound_config", "vision_config",
    "visual_tokenizer_config", "vit_config",
)  # fmt: skip
_NESTED = ("thinker_config",)  # has them beside the language model's


def completed(encoder: dict[str, Any]) -> dict[str, Any]:
    """Fill in what the configuration lacks, if it is ours. Errors: ``ConfigError``."""
    if encoder.setdefault("ec_connector", _CONNECTOR) != _CONNECTOR:
        return encoder
    encoder.setdefault("ec_connector_module_path", "kvpool.vllm")
    encoder.setdefault("ec_role", "ec_both")
    if not isinstance(encoder.setdefault("ec_connector_extra_config", {}), dict):
        raise ConfigError(f"{ENCODER}: ec_connector_extra_config is an object of JSON")
    return encoder


def is_ours(encoder: Mapping[str, Any]) -> bool:
    return encoder.get("ec_connector") == _CONNECTOR


def has_encoder(model: str, revision: str | None = None, cache: str | None = None) -> bool | None:
    """``model``: a folder, or a name on the hub, of which only the ``cache`` is read (None: the usual one).

    No: also of encoder-decoder models, whose outputs stay inside of a request. None: not known. Blocks for a file.
    """
    try:
        path = Path(model) / "config.json" if Path(model).is_dir() else _in_cache(model, revision, cache)
        config = json.loads(read_file(path, MAX_FILE_NBYTES)) if path else None
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict):
        return None
    return not config.get("is_encoder_decoder") and _names_one(config)


def _names_one(config: Mapping[str, Any]) -> bool:
    inside = (config[name] for name in _NESTED if isinstance(config.get(name), dict))
    return any(isinstance(config.get(name), dict) for name in _ENCODERS) or any(map(_names_one, inside))


def _in_cache(model: str, revision: str | None, cache: str | None) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ModuleNotFoundError:
        return None
    try:
        found = try_to_load_from_cache(model, "config.json", cache_dir=cache, revision=revision)
    except ValueError:  # no name of the hub's: vLLM says so
        return None
    return Path(found) if isinstance(found, str | os.PathLike) else None
