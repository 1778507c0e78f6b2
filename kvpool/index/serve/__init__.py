"""How the index is asked: gRPC, HTTP, metrics."""
