from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kvpool
from kvpool import errors


def test_one_tree() -> None:
    found = [value for value in vars(errors).values() if isinstance(value, type)]
    assert len(found) >= 5
    assert all(issubclass(error, errors.KVPoolError) for error in found)
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.EngineRefused, errors.ConfigError)
    assert issubclass(errors.StoreClosed, errors.StoreUnavailable)
    assert not issubclass(errors.StoreUnavailable, errors.ConfigError)


def test_public_names() -> None:
    for name in kvpool.__all__:
        assert getattr(kvpool, name) is not None
        assert name in dir(kvpool)
    assert {"BlockHasher", "Layout", "Namespace", "PrefixIndex", "Store", "open_store", "KVPoolError"} <= set(
        kvpool.__all__
    )
    with pytest.raises(AttributeError, match="no attribute 'RouterClient'"):
        kvpool.RouterClient  # type: ignore[attr-defined]  # noqa: B018


def test_import_is_light(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "import kvpool\n"
        "heavy = {'torch', 'vllm', 'grpc', 'pydantic', 'redis', 'numpy', 'asyncio'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "kvpool.open_store(f'file://{sys.argv[1]}/pool').close()\n"
        "kvpool.BlockHasher(16).hashes(list(range(16)))\n"
        "heavy = {'torch', 'vllm', 'grpc', 'pydantic', 'redis', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    subprocess.run(command, check=True)
