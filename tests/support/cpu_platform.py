"""The CPU platform of the engines of these tests, which load it as a plugin of vLLM's. For tests only.

It differs from vLLM's in two points:

- An engine's processes are forked, which is vLLM's own default for accelerators, and not spawned, which is what its CPU
  platform sets. Each spawned one imports vLLM again; so an engine starts in 9 s and not in 20. The demo's engines are
  spawned.
- MLA keeps its prefix cache. On a processor without AMX, and with the backend ``CPU_MLA``, vLLM turns it off, because
  a prefill there cannot begin in the middle of a prompt. One token can: that is a decode step, whose kernel reads the
  cache. So a prompt of whole blocks and one token is served from a prefix cache, and from a pool, by vLLM's own
  kernels; any other hit would end the engine, or be computed wrong. With ``max_num_batched_tokens`` of 1 all steps are
  such, and any hit is served.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class TestCpuPlatform(CpuPlatform):
    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        wanted = vllm_config.cache_config.enable_prefix_caching
        step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        super().check_and_update_config(vllm_config)
        vllm_config.cache_config.enable_prefix_caching = wanted
        if step_tokens == 1:
            vllm_config.scheduler_config.max_num_batched_tokens = 1
            vllm_config.scheduler_config.enable_chunked_prefill = True
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


def platform() -> str:
    return f"{__name__}.{TestCpuPlatform.__name__}"
