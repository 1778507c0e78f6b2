from __future__ import annotations

import pytest

from tests.support.conformance import EvictionConformance, OpenStore, StoreConformance
from tests.support.memory_store import MemoryStore


class TestMemoryStore(EvictionConformance, StoreConformance):
    @pytest.fixture
    def open_one(self) -> OpenStore:
        return MemoryStore
