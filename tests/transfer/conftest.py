"""What tests marked ``gpu`` run on is part of their names."""

from __future__ import annotations

import pytest
import torch

from tests.transfer.on_device import DEVICE


@pytest.fixture(params=[DEVICE], ids=str)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the KV cache of the test lies."""
    where: torch.device = request.param
    return where
