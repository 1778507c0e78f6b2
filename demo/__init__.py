"""Two real vLLM CPU engines on one pool, and the processes that tests and benchmarks run too. In no wheel."""
