"""A CPU worker with pipeline stages; engines load it by ``worker_cls``. For tests only.

A stage behind the first one receives into buffers that vLLM makes when it runs the model for the first time, before
there are requests. The CPU worker of vLLM 0.32 leaves that out where nothing is compiled (``enforce_eager``) and the
memory for the KV cache is given, and the first step ends the engine by an assertion.
"""

from __future__ import annotations

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker


class PipelineCpuWorker(CPUWorker):
    def determine_available_memory(self) -> int:
        runner = self.model_runner
        if not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
        return int(super().determine_available_memory())
