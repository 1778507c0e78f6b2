"""The scheduler's half on a store of which a test ends each batch."""

from __future__ import annotations

import pytest

from tests.support.encoder import Encoders
from tests.support.scripted_store import ScriptedStore


@pytest.fixture
def store() -> ScriptedStore:
    return ScriptedStore()


@pytest.fixture
def encoders(store: ScriptedStore) -> Encoders:
    return Encoders(store)
