"""What kvpool knows of vLLM and of the engine: its identity, its hashes, its adapters, and vLLM's own internals."""
