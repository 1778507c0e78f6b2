"""Llama-3-8B's shape on one GPU: first token cold, from the engine's own cache and from the pool; time between tokens.

    PYTHONPATH=. python scripts/gpu-kit/latency.py [ENGINE...] [--small] [--max-seconds S]

The configuration is Llama-3-8B's (32 layers, 32 heads, 8 KV heads of 128, bfloat16: 128 KiB of KV a token, 16 GB of
weights), the weights are vLLM's dummy ones: so arithmetic and bytes are the model's, and no file is needed. Engines,
one after the other: "off" has no connector, "valkey" a pool on eight shards, "files" one in /dev/shm, "offload" is
vLLM's own CPU offloading; where it is named, "near" has a pool in /dev/shm before those shards. Each is asked prompts
of 2,048, 8,192 and 32,768 tokens: cold; again, which its own cache answers; and once more after that cache was reset,
when the pool (or main memory) answers. 64 tokens follow each first one: of a cold prompt while its blocks are stored.
One line of JSON an engine, medians in ms; the exit status is 0 when every prompt was found where it had to be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from engines import Cases, started, stores_ended, valkey

from demo.engine_process import connector_config
from kvpool.cli.bench_store import benched_pool
from tests.support.engines import prompt

ENGINES = ("off", "valkey", "files", "offload")
NEAR = "near"
STEP_TOKENS = 8192
STORES_END_S = 30.0
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 128256,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 65536, "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
TINY = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 8192,
}  # fmt: skip


class Plan(NamedTuple):
    """``rounds`` prompts of each length; the first of each length warms up and does not count."""

    config: dict[str, Any]
    block_tokens: int
    lengths: tuple[int, ...]
    rounds: int
    after_tokens: int
    shards: int
    cache_nbytes: int
    pool_nbytes: int
    options: dict[str, Any]


FULL = Plan(
    LLAMA_3_8B, 16, (2048, 8192, 32768), 4, 64, 8, 12 << 30, 32 << 30,
    {
        "dtype": "bfloat16", "enforce_eager": False,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1]},
    },
)  # fmt: skip
SMALL = Plan(
    LLAMA_3_8B | TINY, 32, (256, 512), 2, 4, 2, 64 << 20, 1 << 30, {"dtype": "float32", "enforce_eager": True}
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"{', '.join(ENGINES)} (all), {NEAR}")
    parser.add_argument(
        "--small", action="store_true", help="a tiny model and short prompts, for any platform"
    )
    parser.add_argument(
        "--max-seconds", type=float, default=500, metavar="S", help="no engine starts later (500)"
    )
    asked = parser.parse_args()
    plan = SMALL if asked.small else FULL
    with tempfile.TemporaryDirectory(prefix="kvpool-gpu-latency-") as scratch:
        folder = Path(scratch)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(plan.config))
        cases = Cases(folder, asked.max_seconds)
        for name in (*ENGINES, NEAR):
            if name in (asked.engines or ENGINES):
                cases.run(name, partial(outcome, name, plan, folder))
    return 0 if cases.good else 1


def outcome(name: str, plan: Plan, folder: Path) -> tuple[bool, dict[str, Any]]:
    """Whether each prompt came from its intended source, and medians."""
    longest = max(plan.lengths) + plan.after_tokens + plan.block_tokens
    options = {
        "model": str(folder / "model"), "load_format": "dummy", "skip_tokenizer_init": True,
        "disable_log_stats": False, "block_size": plan.block_tokens, "max_model_len": longest,
        "max_num_batched_tokens": STEP_TOKENS, "max_num_seqs": 4, "kv_cache_memory_bytes": plan.cache_nbytes,
        "prefix_caching_hash_algo": "sha256_cbor", **plan.options,
    }  # fmt: skip
    with connector(name, plan, folder) as transfer:
        if transfer is not None:
            options["kv_transfer_config"] = transfer
        with started(name, folder, options) as (engine, started_s):
            engine.generate(prompt(1, plan.block_tokens), 4)
            lengths = [length_figures(engine, plan, length, name) for length in plan.lengths]
    return all(one.pop("found") for one in lengths), {"started_s": started_s, "lengths": lengths}


@contextlib.contextmanager
def connector(name: str, plan: Plan, folder: Path) -> Iterator[dict[str, Any] | None]:
    """An engine's ``kv_transfer_config``, while its pool runs."""
    # Without the gate every hit is loaded, even if slower than a recompute, because loads are the subject.
    settings = {"cost_gate": False, "model_id": "dummy-llama-3-8b", "threads": 4}
    if name == "off":
        yield None
    elif name == "offload":
        extra = {"cpu_bytes_to_use": plan.pool_nbytes}
        yield {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    elif name == "files":
        with benched_pool(None, plan.pool_nbytes // 2) as (url, _):
            yield connector_config(url, settings)
    elif name == NEAR:
        with (
            benched_pool(None, plan.pool_nbytes // 2) as (near, _),
            valkey(folder / "servers", plan.shards) as far,
        ):
            yield connector_config("", settings | {"pool": [near, far]})
    else:
        with valkey(folder / "servers", plan.shards) as url:
            yield connector_config(url, settings)


def length_figures(engine: Any, plan: Plan, tokens: int, name: str) -> dict[str, Any]:
    """Medians of one length: ms to the first token, and between later tokens."""
    ways: dict[str, list[dict[str, Any]]] = {"cold": [], "local": []}
    if name != "off":
        ways["pool"] = []
    for round_ in range(plan.rounds):
        words = prompt(1000 * tokens + round_, tokens)
        for way, answers in ways.items():
            if way == "pool":
                end_stores(engine, name)
                engine.ask({"do": "call", "method": "reset_prefix_cache", "arguments": [], "more": {}})
            answers.append(engine.generate(words, 1 + plan.after_tokens))
    full = (tokens - 1) // plan.block_tokens * plan.block_tokens
    found = all(answer["cached_tokens"] == full for answer in ways["local"])
    found &= all(answer["pool_tokens"] == full for answer in ways.get("pool", ()))
    same = [[answer["tokens"] for answer in answers] for answers in ways.values()]
    return {
        "tokens": tokens, "found": found,
        "pool_tokens": [answer["pool_tokens"] for answer in ways.get("pool", ())],
        "same_tokens": all(one == same[0] for one in same),
        "first_token_ms": {way: median_ms(answers, first_s) for way, answers in ways.items()},
        "between_tokens_ms": {way: median_ms(answers, partial(between_s, plan)) for way, answers in ways.items()},
    }  # fmt: skip


def first_s(answer: dict[str, Any]) -> float:
    return float(answer["first_token_s"])


def between_s(plan: Plan, answer: dict[str, Any]) -> float:
    return float(answer["finished_s"] - answer["first_token_s"]) / plan.after_tokens


def median_ms(answers: list[dict[str, Any]], seconds_of: Callable[[dict[str, Any]], float]) -> float:
    return round(1e3 * statistics.median(seconds_of(answer) for answer in answers[1:]), 3)


def end_stores(engine: Any, name: str) -> None:
    """Wait until the count of stored blocks stands still; vLLM's offloading lacks kvpool's counter."""
    if name == "offload":
        time.sleep(1.0)
        return
    if not stores_ended(engine, STORES_END_S):
        raise RuntimeError(f"stores did not end within {STORES_END_S:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
