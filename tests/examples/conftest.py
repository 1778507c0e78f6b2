"""Fixtures of the index for the examples that ask one."""

from tests.index.conftest import grpc_started

__all__ = ["grpc_started"]
