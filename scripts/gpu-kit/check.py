"""Real vLLM engines on one pool: the second must take every full block of a prompt from it and say the same.

    PYTHONPATH=. python scripts/gpu-kit/check.py [CASE...] [--small] [--max-seconds S] [--python-only]

The case "extension" only calls vLLM's compiled code. Each other one is two engines, one after the other. Where the pool
is files, the records of one prompt are changed in between, under a right checksum: then the second engine must say
something else, or the check would see no fault at all. One line of JSON a case; the exit status is 0 when all are as
they must be. --small: one case that a CPU engine runs, too. --python-only: the one that runs without vLLM's compiled
extension (without_extension.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from engines import Cases, started, stores_ended, valkey

from demo.engine_process import connector_config, small_engine, write_model
from tests.e2e.harness import corrupt, prompt, records

PROMPTS = ((1, 2049), (2, 3333), (3, 500))  # (seed, tokens); the records of the last are changed
LONGEST_TOKENS = 4608
GENERATED_TOKENS = 16
KV_CACHE_NBYTES = 512 << 20
STORES_END_S = 20.0
TRITON = {"attention_backend": "TRITON_ATTN"}
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}
# Blanked libraries (blank_fatbin.py) run where this does.
EXTENSION = "extension"
EXTENSION_TIMEOUT_S = 120
CALL_EXTENSION = """
import json, torch
from vllm import _custom_ops
given = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
out = torch.empty(64, 256, device="cuda", dtype=torch.bfloat16)
torch.ops._C.silu_and_mul(out, given)
wanted = torch.nn.functional.silu(given[:, :256].float()) * given[:, 256:].float()
view = torch.ops._C.get_cuda_view_from_cpu_tensor(torch.arange(8).pin_memory())
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
print(json.dumps({
    "error_of_silu": (out.float() - wanted).abs().max().item(), "sum_of_host_memory": view.sum().item(),
    "flash_attention": get_flash_attn_version(), "capability": torch.cuda.get_device_capability(),
}))
"""
PYTHON_ONLY = {
    "compilation_config": {"custom_ops": ["none"]},
    "kernel_config": {"ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}},
}


class Case(NamedTuple):
    """``options``: of ``vllm.LLM``. In bfloat16 vLLM picks FlashAttention 3."""

    name: str
    model: str
    pool: str
    options: dict[str, Any]


CASES = (
    Case("llama-fp32-triton", "llama", "file", {"dtype": "float32", **TRITON}),
    Case("llama-bf16-fa3", "llama", "valkey", {"dtype": "bfloat16"}),
    Case("llama-bf16-fa3-graphs", "llama", "file", {"dtype": "bfloat16", **GRAPHS}),
    Case("deepseek-mla-bf16", "deepseek", "file", {"dtype": "bfloat16", "block_size": 64}),
    Case("gemma3-bf16", "gemma3", "file", {"dtype": "bfloat16"}),
    Case("llama-fp8kv-triton", "llama", "file", {"dtype": "bfloat16", "kv_cache_dtype": "fp8", **TRITON}),
    Case("llama-bf16-triton-graphs", "llama", "valkey", {"dtype": "bfloat16", **TRITON, **GRAPHS}),
)
SMALL = Case("small", "llama", "file", {"dtype": "float32", "block_size": 32})  # vLLM's CPU kernels reject 16


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"{EXTENSION}, {', '.join(case.name for case in CASES)}"
    )
    parser.add_argument("--small", action="store_true", help="one case, for any platform")
    parser.add_argument("--python-only", action="store_true", help="the first case without compiled code")
    parser.add_argument(
        "--max-seconds", type=float, default=500, metavar="S", help="no case begins later (500)"
    )
    asked = parser.parse_args()
    names = asked.cases or [EXTENSION, *(case.name for case in CASES)]
    wanted = [case for case in CASES if case.name in names]
    if asked.small:
        names, wanted = [], [SMALL]
    elif asked.python_only:
        names, wanted = [], [CASES[0]._replace(options={**CASES[0].options, **PYTHON_ONLY})]
    with tempfile.TemporaryDirectory(prefix="kvpool-gpu-check-") as scratch:
        folder, models = Path(scratch), dict[str, Path]()
        cases = Cases(folder, asked.max_seconds)
        if EXTENSION in names:
            cases.run(EXTENSION, extension)
        for case in wanted:
            cases.run(case.name, partial(outcome, case, folder, models))
    return 0 if cases.good else 1


def extension() -> tuple[bool, dict[str, Any]]:
    """Whether vLLM's compiled code computes correctly on this device."""
    command = [sys.executable, "-c", CALL_EXTENSION]
    run = subprocess.run(command, capture_output=True, text=True, timeout=EXTENSION_TIMEOUT_S, check=False)
    if run.returncode:
        return False, {"error": (run.stderr.strip().splitlines() or ["it said nothing"])[-1]}
    found = json.loads(run.stdout.splitlines()[-1])
    return found["error_of_silu"] < 0.1 and found["sum_of_host_memory"] == 28, found


def outcome(case: Case, folder: Path, models: dict[str, Path]) -> tuple[bool, dict[str, Any]]:
    """Whether both engines answer as required, and figures."""
    if case.model not in models:
        shape = {"width": 512, "layers": 12 if case.model == "gemma3" else 4}
        models[case.model] = write_model(folder / case.model, kind=case.model, **shape)
    block_tokens = case.options.get("block_size", 16)
    prompts = [prompt(seed, tokens) for seed, tokens in PROMPTS]
    with pool_of(case, folder) as pool:
        options = {
            **small_engine(
                models[case.model],
                block_tokens=block_tokens,
                longest_tokens=LONGEST_TOKENS,
                kv_cache_nbytes=KV_CACHE_NBYTES,
            ),
            "kv_transfer_config": connector_config(pool, {"cost_gate": False, "tenant": case.name}),
            **case.options,
        }
        full = [(len(tokens) - 1) // block_tokens * block_tokens for tokens in prompts]
        with started(f"{case.name}-first", folder, options) as (engine, started_s):
            for tokens in prompts:
                engine.generate(tokens, GENERATED_TOKENS)  # triggers first-use compilation and stores
            # Like the pool's hit, the engine's own computes only the last block, by the same kernels.
            first = [engine.generate(tokens, GENERATED_TOKENS) for tokens in prompts]
            if not stores_ended(engine, STORES_END_S):
                raise RuntimeError(f"nothing was stored within {STORES_END_S:.0f} s")
        if changed := case.pool == "file":
            for record in records(Path(pool.removeprefix("file://")), prompts[-1], block_tokens):
                corrupt(record, keep_checksum=False)
        with started(f"{case.name}-second", folder, options) as (engine, _):
            engine.generate(prompt(9, 300), 4)  # compiles
            second = [engine.generate(tokens, GENERATED_TOKENS) for tokens in prompts]
    same = [one["tokens"] == other["tokens"] for one, other in zip(first, second, strict=True)]
    taken = [answer["pool_tokens"] for answer in second]
    return same == [True, True, not changed] and taken == full, {
        "same": same,
        "changed": [False, False, changed],
        "taken_tokens": taken,
        "full_tokens": full,
        "started_s": started_s,
        "first_token_local_ms": [round(1e3 * answer["first_token_s"], 1) for answer in first],
        "first_token_pool_ms": [round(1e3 * answer["first_token_s"], 1) for answer in second],
    }


@contextlib.contextmanager
def pool_of(case: Case, folder: Path) -> Iterator[str]:
    if case.pool == "file":
        yield f"file://{folder}/{case.name}-pool"
    else:
        with valkey(folder / f"{case.name}-servers", shards=1) as url:
            yield url


if __name__ == "__main__":
    sys.exit(main())
