"""What libraries open once for the whole process, before anything is counted."""

from __future__ import annotations

import glide_sync
import pytest


@pytest.fixture(scope="session", autouse=True)
def glide_runtime() -> None:
    """From its first client on, GLIDE keeps a pair of sockets."""
    where = [glide_sync.NodeAddress("127.0.0.1", 1)]
    glide_sync.GlideClient.create(glide_sync.GlideClientConfiguration(where, lazy_connect=True)).close()
