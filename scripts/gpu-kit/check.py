"""Real vLLM engines on one pool: the second must take every full block of a prompt from it and say the same.

    PYTHONPATH=. python scripts/gpu-kit/check.py [CASE...] [--hybrids] [--small] [--max-seconds S] [--python-only]

The case "extension" only calls vLLM's compiled code. Each other one is two engines, one after the other. Where the pool
is files, the records of one prompt are changed in between, under a right checksum: then the second engine must say
something else, or the check would see no fault at all. With a draft the second engine must accept as many of its tokens
as the first. With a near pool it is asked twice: its own near one is empty, so that the far one answers, and then not.
These two and models with states are the cases of --hybrids. One line of JSON a case; the exit status is 0 when all are
as they must be. --small: those that a CPU engine runs, too. --python-only: the one that runs without vLLM's compiled
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

from demo.engine_process import EngineProcess, connector_config, small_engine, write_model
from demo.tiny_model import DRAFTS, HYBRIDS
from tests.support.engines import call, corrupt, prompt, records

PROMPTS = ((1, 2049), (2, 3333), (3, 500))  # (seed, tokens); the records of the last are changed
HYBRID_PROMPTS = ((1, 4353), (2, 3333), (3, 4353))  # vLLM makes a block of attention as large as a state
LONGEST_TOKENS = 4608
NEAR_NBYTES = 4 << 30
GENERATED_TOKENS = 16
DRAFTED_TOKENS = 64
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
    """``options``: of ``vllm.LLM``. In bfloat16 vLLM picks FlashAttention 3.

    ``pool``: "file", "valkey", or "near", a directory of the host before a server. ``drafts``: the kind of a model that
    drafts for it; empty: none.
    """

    name: str
    model: str
    pool: str
    options: dict[str, Any]
    drafts: str = ""


CASES = (
    Case("llama-fp32-triton", "llama", "file", {"dtype": "float32", **TRITON}),
    Case("llama-bf16-fa3", "llama", "valkey", {"dtype": "bfloat16"}),
    Case("llama-bf16-fa3-graphs", "llama", "file", {"dtype": "bfloat16", **GRAPHS}),
    Case("deepseek-mla-bf16", "deepseek", "file", {"dtype": "bfloat16", "block_size": 64}),
    Case("gemma3-bf16", "gemma3", "file", {"dtype": "bfloat16"}),
    Case("llama-fp8kv-triton", "llama", "file", {"dtype": "bfloat16", "kv_cache_dtype": "fp8", **TRITON}),
    Case("llama-bf16-triton-graphs", "llama", "valkey", {"dtype": "bfloat16", **TRITON, **GRAPHS}),
)
FURTHER = (
    Case("llama-near-far", "llama", "near", {"dtype": "bfloat16"}),
    Case("llama-eagle-bf16", "llama", "file", {"dtype": "bfloat16"}, "eagle"),
    Case("lfm2-convolutions-bf16", "lfm2", "file", {"dtype": "bfloat16"}),
    Case("qwen3-next-delta-nets-bf16", "qwen3_next", "file", {"dtype": "bfloat16"}),
    Case("granite4-mamba2-bf16", "granite4", "file", {"dtype": "bfloat16"}),
)
_ON_CPU = {"dtype": "float32", "block_size": 128}  # vLLM's CPU kernels reject 16
SMALL = (
    Case("small", "llama", "file", _ON_CPU),
    Case("small-near-far", "llama", "near", _ON_CPU),
    Case("small-eagle", "llama", "file", _ON_CPU, "eagle"),
    Case("small-lfm2", "lfm2", "file", _ON_CPU),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cases",
        nargs="*",
        metavar="CASE",
        help=f"{EXTENSION}, {', '.join(case.name for case in (*CASES, *FURTHER, *SMALL))}",
    )
    parser.add_argument(
        "--hybrids", action="store_true", help="models with states, one with a draft, a near pool"
    )
    parser.add_argument("--small", action="store_true", help="those that any platform runs")
    parser.add_argument("--python-only", action="store_true", help="the first case without compiled code")
    parser.add_argument(
        "--max-seconds", type=float, default=500, metavar="S", help="no case begins later (500)"
    )
    asked = parser.parse_args()
    names = asked.cases
    if asked.python_only:
        wanted = [CASES[0]._replace(options={**CASES[0].options, **PYTHON_ONLY})]
    elif names:
        wanted = [case for case in (*CASES, *FURTHER, *SMALL) if case.name in names]
    elif asked.small:
        wanted = [case for case in SMALL if (case is not SMALL[0]) == asked.hybrids]
    elif asked.hybrids:
        wanted = [*FURTHER]
    else:
        names, wanted = [EXTENSION], [*CASES]
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
    hybrid = case.model in HYBRIDS
    prompts = [prompt(seed, tokens) for seed, tokens in (HYBRID_PROMPTS if hybrid else PROMPTS)]
    block_tokens = case.options.get("block_size", 16)
    with pool_of(case, folder) as pools:
        first_options, second_options = (
            {
                **small_engine(
                    model_of(case.model, folder, models),
                    block_tokens=block_tokens,
                    longest_tokens=LONGEST_TOKENS,
                    kv_cache_nbytes=KV_CACHE_NBYTES,
                ),
                "kv_transfer_config": connector_config("", {"cost_gate": False, "tenant": case.name, "pool": pool}),
                **case.options,
                **drafting(case, folder, models),
            }
            for pool in pools
        )  # fmt: skip
        with started(f"{case.name}-first", folder, first_options) as (engine, started_s):
            for tokens in prompts:
                engine.generate(tokens, GENERATED_TOKENS)  # triggers first-use compilation and stores
            # Like the pool's hit, the engine's own computes only the last block, by the same kernels.
            first = [answer(engine, tokens, case) for tokens in prompts]
            if not stores_ended(engine, STORES_END_S):
                raise RuntimeError(f"nothing was stored within {STORES_END_S:.0f} s")
        if changed := case.pool == "file":
            for record in all_records(Path(pools[0].removeprefix("file://")), prompts[-1], block_tokens):
                corrupt(record, keep_checksum=False)
        seconds = []
        with started(f"{case.name}-second", folder, second_options) as (engine, _):
            engine.generate(prompt(9, 300), 4)  # compiles
            for _ in range(2 if case.pool == "near" else 1):
                seconds.append([answer(engine, tokens, case) for tokens in prompts])
                call(engine, "reset_prefix_cache")
            counts = engine.ask({"do": "metrics"})
            hits = [counts.get(f"kvpool_near_far_hits_total/{pool}", 0.0) for pool in ("near", "far")]
    wanted, full = [True, True, not changed], [one["cached_tokens"] for one in first]
    if not hybrid and not case.drafts:  # known beforehand
        assert full == [(len(tokens) - 1) // block_tokens * block_tokens for tokens in prompts], full
    same = [
        [one["tokens"] == other["tokens"] for one, other in zip(first, two, strict=True)] for two in seconds
    ]
    taken = [[one["pool_tokens"] for one in two] for two in seconds]
    accepted = [[one["accepted"] for one in two[:2]] for two in (first, *seconds)]
    good = all(one == wanted for one in same) and all(one == full for one in taken) and min(full) > 0
    good &= case.pool != "near" or min(hits) > 0
    good &= not case.drafts or (min(accepted[0]) > 0 and all(one == accepted[0] for one in accepted))
    return good, {
        "same": same,
        "changed": [False, False, changed],
        "taken_tokens": taken,
        "full_tokens": full,
        "near_and_far_hits": hits,
        "accepted_tokens": accepted,
        "started_s": started_s,
        "first_token_local_ms": [round(1e3 * one["first_token_s"], 1) for one in first],
        "first_token_pool_ms": [[round(1e3 * one["first_token_s"], 1) for one in two] for two in seconds],
    }


def answer(engine: EngineProcess, tokens: list[int], case: Case) -> dict[str, Any]:
    """``accepted``: tokens of drafts; 0 without. A tiny model accepts few, so such an answer is long."""
    before = accepted_tokens(engine)
    said = engine.generate(tokens, DRAFTED_TOKENS if case.drafts else GENERATED_TOKENS)
    return {**said, "accepted": accepted_tokens(engine) - before}


def accepted_tokens(engine: EngineProcess) -> float:
    return float(engine.ask({"do": "metrics"}).get("vllm:spec_decode_num_accepted_tokens_total", 0.0))


def model_of(kind: str, folder: Path, models: dict[str, Path]) -> Path:
    """Written once."""
    if kind not in models:
        shape: dict[str, Any] = {"width": 512, "layers": 12 if kind == "gemma3" else 4}
        if kind in HYBRIDS:
            shape = {"width": 256, "layers": 4}
        if kind.startswith("drafted") or kind in DRAFTS:
            shape = {
                "width": 256,
                "layers": 1 if kind in DRAFTS else 4,
                "said_words": 16,
                "seed": int(kind in DRAFTS),
            }
        models[kind] = write_model(folder / kind, kind=kind.removeprefix("drafted-"), **shape)
    return models[kind]


def drafting(case: Case, folder: Path, models: dict[str, Path]) -> dict[str, Any]:
    """Options of the draft, and of the model for which it is made."""
    if not case.drafts:
        return {}
    drafts = {
        "method": case.drafts,
        "model": str(model_of(case.drafts, folder, models)),
        "num_speculative_tokens": 3,
    }
    return {"model": str(model_of(f"drafted-{case.model}", folder, models)), "speculative_config": drafts}


def all_records(pool: Path, tokens: list[int], block_tokens: int) -> list[Path]:
    """Of a prompt, in blocks of whatever size the engine gave them."""
    sizes = range(block_tokens, LONGEST_TOKENS, block_tokens)
    return next(found for size in sizes if (found := records(pool, tokens, size)))


@contextlib.contextmanager
def pool_of(case: Case, folder: Path) -> Iterator[tuple[Any, Any]]:
    """The pools of both engines, which are one, or have a far one in common."""
    if case.pool == "file":
        yield (f"file://{folder}/{case.name}-pool",) * 2
        return
    with valkey(folder / f"{case.name}-servers", shards=1) as url:
        if case.pool == "valkey":
            yield url, url
            return
        one, two = (f"file://{folder}/{case.name}-{host}?capacity={NEAR_NBYTES}" for host in ("one", "two"))
        yield [one, url], [two, url]


if __name__ == "__main__":
    sys.exit(main())
