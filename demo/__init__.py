"""Two real vLLM CPU engines on one pool, with processes also used by tests and benchmarks. In no wheel."""
