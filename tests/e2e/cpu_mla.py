"""A CPU platform on which MLA keeps its prefix cache; engines load it as a plugin of vLLM's. For tests only.

On a processor without AMX vLLM 0.32 turns prefix caching off for MLA, because its prefill there cannot begin in the
middle of a prompt. One token can: that is a decode step, whose kernel reads the cache. So a prompt of whole blocks and
one token is served from a prefix cache, and from a pool, by vLLM's own kernels; any other hit would end the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CachingCpuPlatform(CpuPlatform):
    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        wanted = vllm_config.cache_config.enable_prefix_caching
        super().check_and_update_config(vllm_config)
        vllm_config.cache_config.enable_prefix_caching = wanted


def platform() -> str:
    return f"{__name__}.{CachingCpuPlatform.__name__}"
