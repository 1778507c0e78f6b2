"""What the tests of the command line share with those of the index."""

from __future__ import annotations

from tests.index.conftest import grpc_started

__all__ = ["grpc_started"]
