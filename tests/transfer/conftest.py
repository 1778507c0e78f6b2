"""What tests marked ``gpu`` run on, which is part of their names, and an engine there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvpool.store import Store
from tests.support.devices import DEVICE, Engine
from tests.support.memory_store import MemoryStore


@pytest.fixture(params=[DEVICE], ids=str)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the KV cache of the test lies."""
    where: torch.device = request.param
    return where


@pytest.fixture
def store() -> Iterator[Store]:
    with MemoryStore() as store:
        yield store


@pytest.fixture
def engine(store: Store, device: torch.device) -> Iterator[Engine]:
    engine = Engine(store, device)
    yield engine
    engine.mover.close()
