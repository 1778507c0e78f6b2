"""Run vLLM's CUDA path with kvpool where there is no GPU: the tokens of a prompt, first computed, then from the pool.

    scripts/gpu-kit/dry-run KIT PYTHON     compiles the stub of the driver and runs this

The platform says CUDA (a stub of NVML, driver_stub.c) and tensors lie in main memory; Triton's kernels are interpreted.
The scheduler, the V2 model runner, the backend TRITON_ATTN and the connector are the real ones. Compiled code for a GPU
cannot run so: custom operations are off and IR operations native, and no stream or event ever waits. So this shows that
the kit is whole and that the connector fits this runner; it shows nothing of a device.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch

PROMPT_TOKENS, BLOCK_TOKENS = 80, 16
FREE_NBYTES, TOTAL_NBYTES = 8 << 30, 16 << 30
HOPPER = types.SimpleNamespace(
    multi_processor_count=132, total_memory=80 << 30, major=9, minor=0, name="H100", warp_size=32,
    shared_memory_per_block_optin=232448, L2_cache_size=50 << 20,
)  # fmt: skip
MAKERS = ("empty", "zeros", "ones", "full", "empty_strided", "tensor", "arange", "empty_like", "zeros_like")


class Event:
    """Of a stream that is always finished."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class Stream:
    cuda_stream = stream_id = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cpu")

    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> Event:
        return Event()

    def query(self) -> bool:
        return True


def always(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


def not_pinned(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*arguments: Any, **more: Any) -> Any:
        more.pop("pin_memory", None)
        return make(*arguments, **more)

    return made


def without_driver() -> None:
    only, cuda, accelerator = Stream(), torch.cuda, torch.accelerator
    answers: dict[Any, dict[str, Any]] = {
        cuda: {
            "current_stream": only, "default_stream": only, "set_stream": None, "synchronize": None, "set_device": None,
            "empty_cache": None, "current_device": 0, "get_device_capability": (9, 0), "manual_seed_all": None,
            "is_current_stream_capturing": False, "get_device_properties": HOPPER, "reset_peak_memory_stats": None,
            "mem_get_info": (FREE_NBYTES, TOTAL_NBYTES),
        },
        accelerator: {
            "set_device_index": None, "synchronize": None, "empty_cache": None, "set_stream": None,
            "current_stream": only, "reset_peak_memory_stats": None, "device_count": 1, "current_device_index": 0,
            "memory_stats": {},
            "get_memory_info": (FREE_NBYTES, TOTAL_NBYTES), "memory_reserved": 0, "memory_allocated": 0,
            "max_memory_allocated": 0, "current_accelerator": torch.device("cuda"),
        },
        torch.Tensor: {"record_stream": None, "is_pinned": True},
    }  # fmt: skip
    for where, named in answers.items():
        for name, answer in named.items():
            setattr(where, name, always(answer))
    cuda.stream = lambda _: contextlib.nullcontext()
    torch.Tensor.pin_memory = lambda tensor, *_: tensor
    torch.Event = cuda.Event = Event
    torch.Stream = cuda.Stream = Stream
    for name in MAKERS:
        setattr(torch, name, not_pinned(getattr(torch, name)))


def in_main_memory() -> None:
    """Keep the tensors of vLLM's CUDA platform in main memory."""
    import vllm.platforms.cuda as platform
    import vllm.utils.torch_utils as views
    import vllm.v1.worker.gpu.buffer_utils as buffers
    from vllm.platforms import current_platform

    assert current_platform.is_cuda(), "the stub of the driver is not on LD_LIBRARY_PATH"
    for one in (platform.CudaPlatformBase, platform.NvmlCudaPlatform):
        one.device_type, one.dispatch_key, one.dist_backend = "cpu", "CPU", "gloo"
    for name, answer in {"set_device": None, "num_compute_units": 132, "get_current_memory_usage": 0}.items():
        setattr(platform.CudaPlatformBase, name, always(answer))
    for module in (views, buffers):
        module.get_accelerator_view_from_cpu_tensor = lambda tensor: tensor


without_driver()
in_main_memory()

from vllm.v1.worker import gpu_worker  # noqa: E402


class Worker(gpu_worker.Worker):
    """vLLM's GPU worker, without device queries."""

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        gpu_worker.init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, "gloo"
        )
        gpu_worker.set_random_seed(self.model_config.seed)
        self._init_workspace_and_model_runner()

    def determine_available_memory(self) -> int:
        return int(self.cache_config.kv_cache_memory_bytes)

    def _scoped_allocator_max_split(self, **_: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def main() -> int:
    from check import PYTHON_ONLY, TRITON
    from vllm import LLM, SamplingParams

    from demo.engine_process import connector_config, small_engine
    from demo.tiny_model import write_tiny_model

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with tempfile.TemporaryDirectory(prefix="kvpool-gpu-dry-run-") as scratch:
        folder = Path(scratch)
        write_tiny_model(folder / "model", kind="llama", width=256, layers=2)
        options = small_engine(
            folder / "model", block_tokens=BLOCK_TOKENS, longest_tokens=256, kv_cache_nbytes=8 << 20
        )
        transfer = connector_config(f"file://{folder}/pool", {"cost_gate": False})
        worker = "dry_run.Worker"
        engine = LLM(
            **options, **TRITON, **PYTHON_ONLY, max_num_seqs=2, worker_cls=worker, kv_transfer_config=transfer
        )
        words = [((at * 37) % 8000) + 10 for at in range(PROMPT_TOKENS)]
        greedy = SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True)
        answers = []
        for _ in range(2):
            (answer,) = engine.generate([{"prompt_token_ids": words}], greedy)
            answers.append((list(answer.outputs[0].token_ids), answer.num_cached_tokens))
            print(*answers[-1], flush=True)
            once = SamplingParams(max_tokens=1, detokenize=False)
            engine.generate([{"prompt_token_ids": words[:3]}], once)  # its step ends stores
            engine.reset_prefix_cache()
    (first, cached), (again, loaded) = answers
    full = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    good = first == again and cached == 0 and loaded == full
    print("the same tokens from the pool" if good else f"wrong: {full} tokens should come from the pool")
    return 0 if good else 1


if __name__ == "__main__":
    from dry_run import main as run  # vLLM finds the worker by this name, in this one module

    sys.exit(run())
