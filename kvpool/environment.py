"""Variables and TOML files that commands read, too: without pydantic, whose import takes as long as a command."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from kvpool.errors import ConfigError
from kvpool.files import read_file

ENVIRONMENT_PREFIX = "KVPOOL_"
CONFIG_VARIABLE = "KVPOOL_CONFIG"
HASH_SEED_VARIABLE = "PYTHONHASHSEED"
INDEX_TOKEN_VARIABLE = "KVPOOL_INDEX_TOKEN"  # noqa: S105 - a name
MAX_CONFIG_FILE_NBYTES = 1 << 20


def hash_seed(environ: Mapping[str, str] | None = None) -> str | None:
    """The seed of vLLM's block hashes: ``PYTHONHASHSEED`` as text, or None when unset."""
    return (os.environ if environ is None else environ).get(HASH_SEED_VARIABLE)


def index_token(environ: Mapping[str, str] | None = None) -> str:
    """The secret bearer token for an index: ``KVPOOL_INDEX_TOKEN``; empty when unset."""
    return (os.environ if environ is None else environ).get(INDEX_TOKEN_VARIABLE, "")


def read_toml(path: str, named_by: str) -> dict[str, Any]:
    """Parse the TOML file at ``path``, as named by an option or a variable. Errors: ``ConfigError``."""
    tomllib = _toml_reader(path)
    try:
        raw = read_file(path, MAX_CONFIG_FILE_NBYTES)
    except OSError as error:
        raise ConfigError(f"{named_by}={path}: {error.strerror}") from error
    try:
        settings: dict[str, Any] = tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, UnicodeDecodeError
        raise ConfigError(f"{path}: not TOML: {str(error).splitlines()[0]}") from None
    return settings


def _toml_reader(path: str) -> ModuleType:
    for name in ("tomllib", "tomli"):  # standard library from Python 3.11
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ConfigError(
        f"{path}: reading TOML needs Python 3.11 or the package tomli: install tomli, "
        f"or set the settings in {ENVIRONMENT_PREFIX}* variables"
    )
