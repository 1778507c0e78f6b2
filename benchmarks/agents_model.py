"""``EngineModel``: what computing and moving take a worker of ``python -m benchmarks agents``, by arithmetic. Pure.

A worker is two H100 SXM (tensor parallel) with Qwen3-Coder-30B-A3B in FP8 and a KV cache in BF16. The model card and
``config.json`` give its layers, heads and parameters; NVIDIA's data sheet gives 989 TFLOPS (BF16, dense), 3.35 TB/s and
80 GB a GPU. Assumed are the shares of them that are reached (0.4 and 0.7), and 5 GB/s (40 Gbit/s) between a worker and
a pool whose shards keep up with all workers.

A near pool is on a tmpfs with large pages, whose records of 2 MiB a thread of the file store reads with 8.8 GB/s and
writes with 7.1 (``benchmarks/journal.md``): the four threads of a worker's two ranks reach 28. The host of H100s in
NVIDIA's and Intel's data sheets has 614 GB/s (16 channels of DDR5-4800). A byte passes there three times: it is read,
written to staging, and read by the GPU. So eight workers that move at once have 614 * 0.8 / 3 / 8 = 20 GB/s each, and
each is taken to have no more alone.
"""

from __future__ import annotations

from dataclasses import dataclass

GPUS = 2
FLOPS = GPUS * 989e12 * 0.4
READ_NBYTES_S = GPUS * 3.35e12 * 0.7
LINK_NBYTES_S = 5e9  # each way
NEAR_NBYTES_S = 20e9  # each way
SLOW_NBYTES_S = 8e6  # between a worker and a slow pool

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 48, 32, 4, 128
PARAMETERS, ACTIVE_PARAMETERS = 30.5e9, 3.3e9  # a byte each
TOKEN_NBYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * 2  # of the KV cache

CACHE_NBYTES = 100_000_000_000  # 0.9 of 160 GB, less the parameters and what a step needs
MAX_RUNNING = 256
STEP_TOKENS = 8192  # computed in a step at most
STEP_S = 0.003  # of a step, beside all else


@dataclass(frozen=True)
class EngineModel:
    """``cache_nbytes``: of KV cache. ``block_tokens``: of a block. ``slowness``: times as long takes computing."""

    cache_nbytes: int = CACHE_NBYTES
    block_tokens: int = 64
    slowness: float = 1.0

    @property
    def block_nbytes(self) -> int:
        return self.block_tokens * TOKEN_NBYTES

    @property
    def blocks(self) -> int:
        return self.cache_nbytes // self.block_nbytes

    def blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def compute_s(self, cached: int, tokens: int) -> float:
        """To compute ``tokens`` behind ``cached`` ones: matrices, and attention to all before."""
        attended = cached * tokens + tokens * tokens / 2
        flops = 2 * ACTIVE_PARAMETERS * tokens + 4 * LAYERS * QUERY_HEADS * HEAD_DIM * attended
        return (flops / FLOPS + self.steps_of(tokens) * STEP_S) * self.slowness

    def decode_s(self, requests: int, tokens: int) -> float:
        """A step for so many requests with so many tokens in all: it reads parameters and their KV cache."""
        read = min(PARAMETERS, ACTIVE_PARAMETERS * requests) + TOKEN_NBYTES * tokens
        return (STEP_S + read / READ_NBYTES_S) * self.slowness

    def steps_of(self, tokens: int) -> int:
        return -(-tokens // STEP_TOKENS)

    def move_s(self, blocks: int, nbytes_s: float = LINK_NBYTES_S) -> float:
        return blocks * self.block_nbytes / nbytes_s
