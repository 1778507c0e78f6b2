"""The index's services: gRPC, HTTP, metrics."""
