"""``kvpool size --model``: what a model's config.json says of its KV cache, as a user meets it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.cli.model import KVCache, kv_cache_of
from tests.support.command_line import kvpool, refused
from tests.support.model_configs import CONFIGS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
LLAMA = CONFIGS["meta-llama/Llama-3.1-8B-Instruct"]
LLAMAS = KVCache(32, 0, 0, "K and V of 8 heads of 128", 8, (131072, 65536))
MINIMAX = {
    "num_hidden_layers": 80, "num_key_value_heads": 8, "head_dim": 128, "attn_type_list": ([0] * 7 + [1]) * 10,
}  # fmt: skip
KIMI_LINEAR = {
    "model_type": "kimi_linear", "num_hidden_layers": 27, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27]},
}  # fmt: skip


def written(folder: Path, config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def asked(folder: Path, config: Any) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(
        kvpool("size", "--model", str(written(folder, config)), "--json").stdout
    )
    return answer


def test_the_table_says_bytes_tokens_and_network(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", LLAMA)
    for source in (folder, folder / "config.json"):
        ended = kvpool("size", "--model", str(source), env={**os.environ, "COLUMNS": "200"})
        assert (ended.returncode, ended.stderr) == (0, "")
        first, head, _, plain, fp8, *notes = ended.stdout.splitlines()
        assert first == f"{source}: K and V of 8 heads of 128, in 32 layers"
        assert head.split("  ")[-1] == "10 Gbit/s bring"
        assert " ".join(plain.split()) == "16 bits 131,072 bytes 8,192 tokens 1.05 Gbit/s 9,536 tokens/s"
        assert " ".join(fp8.split()) == "fp8 65,536 bytes 16,384 tokens 0.52 Gbit/s 19,073 tokens/s"
        assert "N tokens/s need N / 1,000 times that network" in notes[-1]
        assert "beyond 8 tensor-parallel ranks" in notes[0]


def test_a_window_of_layers_that_the_file_does_not_name_is_told(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", CONFIGS["google/gemma-3-27b-it"])
    assert "layers may have a window or chunks: all is" in kvpool("size", "--model", str(folder)).stdout
    assert asked(folder, CONFIGS["google/gemma-3-27b-it"])["window_layers"] is None
    assert "a window" not in kvpool("size", "--model", str(written(tmp_path / "model", LLAMA))).stdout


def test_json_has_the_figures(tmp_path: Path) -> None:
    assert asked(tmp_path / "model", CONFIGS["deepseek-ai/DeepSeek-V3.1"]) == {
        "model": f"{tmp_path}/model", "layers": 61, "window_layers": 0, "state_layers": 0,
        "row": "a vector of 512 + 64", "heads": 0,
        "caches": [
            {"cache": "16 bits", "token_nbytes": 70272, "tokens_of_a_gib": 15279,
             "gbit_per_s_for_1000_tokens_per_s": 0.562176, "tokens_per_s_by_10_gbit_per_s": 17788},
            {"cache": "fp8", "token_nbytes": 35136, "tokens_of_a_gib": 30559,
             "gbit_per_s_for_1000_tokens_per_s": 0.281088, "tokens_per_s_by_10_gbit_per_s": 35576},
        ],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CONFIGS["Qwen/Qwen3.6-27B"], KVCache(16, 0, 48, "K and V of 4 heads of 256", 4, (65536, 32768))),
        (CONFIGS["openai/gpt-oss-20b"], KVCache(24, 12, 0, "K and V of 8 heads of 64", 8, (49152, 24576))),
        # An indexer's keys: 128 bytes and a scale; vectors in FP8 are the 656 bytes of fp8_ds_mla.
        (
            CONFIGS["deepseek-ai/DeepSeek-V3.2"],
            KVCache(
                61, 0, 0, "a vector of 512 + 64 and a key of 128", 0, (61 * (1152 + 132), 61 * (656 + 132))
            ),
        ),
        (
            {
                "num_hidden_layers": 6,
                "hybrid_override_pattern": "M-M*E*",
                "num_key_value_heads": 2,
                "head_dim": 128,
            },
            KVCache(2, 0, 2, "K and V of 2 heads of 128", 2, (2048, 1024)),
        ),
        (
            {**LLAMA, "num_kv_shared_layers": 12},
            KVCache(20, 0, 0, "K and V of 8 heads of 128", 8, (81920, 40960)),
        ),
        (
            {**LLAMA, "v_head_dim": 64},
            KVCache(32, 0, 0, "K and V of 8 heads of 128 and 64", 8, (98304, 49152)),
        ),
        (MINIMAX, KVCache(10, 0, 70, "K and V of 8 heads of 128", 8, (40960, 20480))),
        (
            {**MINIMAX, "attn_type_list": [1] * 80},
            KVCache(80, 0, 0, "K and V of 8 heads of 128", 8, (327680, 163840)),
        ),
        (KIMI_LINEAR, KVCache(7, 0, 20, "a vector of 512 + 64", 0, (8064, 4032))),
        # Ring 2.5: one layer in eight has attention.
        (
            {"num_hidden_layers": 80, "layer_group_size": 8, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
            KVCache(10, 0, 70, "a vector of 512 + 64", 0, (11520, 5760)),
        ),
        # vLLM keeps no latent vectors of it: 40 heads of 64 + 32, and V as wide as K.
        (
            {
                "model_type": "minicpm3",
                "num_hidden_layers": 62,
                "num_attention_heads": 40,
                "num_key_value_heads": 40,
                "kv_lora_rank": 256,
                "qk_nope_head_dim": 64,
                "qk_rope_head_dim": 32,
                "v_head_dim": 64,
            },
            KVCache(62, 0, 0, "K and V of 40 heads of 96", 40, (952320, 476160)),
        ),
        (
            {
                **LLAMA,
                "model_type": "granitemoehybrid",
                "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 2) * 4,
            },
            KVCache(4, 0, 28, "K and V of 8 heads of 128", 8, (16384, 8192)),
        ),
        (
            {"thinker_config": {"text_config": {**LLAMA, "head_dim": 64}}},
            KVCache(32, 0, 0, "K and V of 8 heads of 64", 8, (65536, 32768)),
        ),
        ({**LLAMA, "compression_config": {"format": "float-quantized"}}, LLAMAS),
        # A window, and no word of its layers.
        ({**LLAMA, "sliding_window": 4096}, LLAMAS._replace(window_layers=None)),
        ({**LLAMA, "attention_chunk_size": 8192}, LLAMAS._replace(window_layers=None)),
        ({**LLAMA, "sliding_window": 4096, "use_sliding_window": False}, LLAMAS),
    ],
)
def test_each_kind_of_layer_is_counted_as_it_is_kept(config: dict[str, Any], expected: KVCache) -> None:
    assert kv_cache_of(config) == expected


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ([], "is no object"),
        ({}, "does not say num_hidden_layers"),
        ({**LLAMA, "num_key_value_heads": None}, "does not say num_key_value_heads: write it into a copy"),
        ({**LLAMA, "num_key_value_heads": [8, 4]}, "does not say num_key_value_heads"),
        ({**LLAMA, "model_type": "gemma3_text"}, "does not say head_dim"),
        ({**LLAMA, "compress_ratios": [0, 4]}, "has compress_ratios: what its layers keep differs"),
        ({**LLAMA, "is_encoder_decoder": True}, "has is_encoder_decoder: what its layers keep differs"),
        ({"is_encoder_decoder": True, "text_config": LLAMA}, "has is_encoder_decoder: what its layers"),
        ({**LLAMA, "loop_num": 2}, "has loop_num: what its layers keep differs"),
        # LongCat: each of them has attention twice.
        ({"num_layers": 28, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, "has num_layers: what its layers"),
        ({**LLAMA, "hidden_size": 1}, "does not say head_dim"),
        ({**LLAMA, "mamba_d_state": 16}, "does not say which layers have attention and which a state"),
        ({**LLAMA, "layer_types": ["hybrid"] * 32}, "has layers of a kind that this does not know, 'hybrid'"),
        ({**LLAMA, "layer_types": ["attention"]}, "has 32 layers, and kinds of another number"),
        ({**LLAMA, "layer_types": ["mamba"] * 32}, "has layers with states alone"),
    ],
)
def test_what_the_file_does_not_tell_is_refused_in_a_sentence(config: Any, says: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "model", config)
    assert f"kvpool: --model {folder}: {folder}/config.json {says}" in refused("size", "--model", str(folder))


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert refused("size", "--model", str(tmp_path)).endswith("config.json is no JSON")
    for none in (f"{tmp_path}/none/none.json", "none"):
        line = refused("size", "--model", none)
        assert line.startswith(
            f"kvpool: --model {none}: {none}: No such file or directory; write a folder with config.json"
        )
    line = refused("size", "--model", "x" * 300)
    assert "File name too long; write a folder with config.json" in line
    (tmp_path / "empty").mkdir()
    assert "empty/config.json: No such file or directory" in refused("size", "--model", f"{tmp_path}/empty")
    line = refused("size", "--model", str(tmp_path), "--token-bytes", "1KiB")
    assert line == "kvpool: --model says what a token takes: leave --token-bytes out"


def test_a_name_is_asked_for_at_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "cache", LLAMA)

    def fetched(name: str, file: str) -> str:
        if name != "org/model":
            raise OSError("404 Client Error.\n\nRepository Not Found")
        return f"{folder}/{file}"

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=fetched))  # type: ignore[arg-type]
    assert kvpool("size", "--model", "org/model").stdout.startswith("org/model: K and V of 8 heads")
    path = "write the path of a config.json, or of its folder"
    assert refused("size", "--model", "org/none") == (
        f"kvpool: --model org/none: no config.json of the hub: 404 Client Error.; else {path}"
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # type: ignore[arg-type]
    assert refused("size", "--model", "org/model") == (
        "kvpool: --model org/model: no such folder, and no package huggingface_hub to ask the hub: install it, or "
        + path
    )


def test_a_trace_is_shown_in_bytes_of_the_model(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", LLAMA)
    (tmp_path / "trace").write_text("[0, 1024, 5, [[0, 2]]]\n[1, 1024, 5, [[0, 2]]]\n")
    shown = kvpool("size", "--trace", f"{tmp_path}/trace", "--model", str(folder)).stdout
    assert shown.splitlines()[-1].split() == ["100%", "50.0%", "2", "1,024", "128.0", "MiB"]


def test_the_page_has_the_figures_of_the_command(tmp_path: Path) -> None:
    rows = []
    for model, config in CONFIGS.items():
        found = asked(tmp_path / model, config)
        plain, fp8 = found["caches"]
        rows.append(
            f"| {model} | {found['layers']} | {found['row']} | {plain['token_nbytes']:,} | {fp8['token_nbytes']:,} | "
            f"{plain['tokens_of_a_gib']:,} | {plain['gbit_per_s_for_1000_tokens_per_s']:.2f} | "
            f"{plain['tokens_per_s_by_10_gbit_per_s']:,} |"
        )
    lines = PAGE.read_text().splitlines()
    start = lines.index("|---|---|---|---|---|---|---|---|") + 1
    assert lines[start : start + len(rows)] == rows
