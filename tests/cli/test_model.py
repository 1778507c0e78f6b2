"""``kvpool size --model``: what a model's config.json says of its KV cache, as a user meets it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool._native import record_server_nbytes
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


def asked(folder: Path, config: Any, *options: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(
        kvpool("size", "--model", str(written(folder, config)), "--json", *options).stdout
    )
    return answer


def test_the_table_says_bytes_tokens_and_network(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", LLAMA)
    for source in (folder, folder / "config.json"):
        ended = kvpool("size", "--model", str(source), env={**os.environ, "COLUMNS": "200"})
        assert (ended.returncode, ended.stderr) == (0, "")
        first, head, _, plain, fp8, *notes = ended.stdout.splitlines()
        assert first == f"{source}: K and V of 8 heads of 128, in 32 layers"
        assert head.split()[-4:] == ["a", "server", "link", "disk"]
        assert " ".join(plain.split()) == (
            "16 bits 131,072 bytes 8,192 tokens 2,097,152 bytes 1.000 times 1.05 Gbit/s 0.131 GB/s"
        )
        assert " ".join(fp8.split()) == (
            "fp8 65,536 bytes 16,384 tokens 1,048,576 bytes 1.000 times 0.52 Gbit/s 0.066 GB/s"
        )
        assert "slower ones an engine that prefills 1,000 tokens/s (--prefill) is faster" in notes[0]
        assert "beyond 8 tensor-parallel ranks" in notes[1]
        assert notes[2] == "a record: a block's 32 layers for 16 tokens (--block-tokens)"


def test_a_window_of_layers_that_the_file_does_not_name_is_told(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", CONFIGS["google/gemma-3-27b-it"])
    assert "layers may have a window or chunks: all is" in kvpool("size", "--model", str(folder)).stdout
    assert asked(folder, CONFIGS["google/gemma-3-27b-it"])["window_layers"] is None
    assert "a window" not in kvpool("size", "--model", str(written(tmp_path / "model", LLAMA))).stdout


def test_json_has_the_figures(tmp_path: Path) -> None:
    assert asked(tmp_path / "model", CONFIGS["deepseek-ai/DeepSeek-V3.1"]) == {
        "model": f"{tmp_path}/model", "layers": 61, "window_layers": 0, "state_layers": 0,
        "row": "a vector of 512 + 64", "heads": 0, "ranks": 1, "block_tokens": 16, "prefill_tokens_per_s": 1000,
        "item_token_nbytes": 0,
        "caches": [
            {"cache": "16 bits", "token_nbytes": 70272, "tokens_of_a_gib": 15279, "record_nbytes": 1124352,
             "record_server_nbytes": 1130496, "link_gbit_per_s": 0.562176, "disk_gb_per_s": 0.070272},
            {"cache": "fp8", "token_nbytes": 35136, "tokens_of_a_gib": 30559, "record_nbytes": 562176,
             "record_server_nbytes": 565248, "link_gbit_per_s": 0.281088, "disk_gb_per_s": 0.035136},
        ],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model", "options", "of_token", "of_record"),
    [
        # A rank has its heads of all layers; beyond one rank a head, copies. MLA has one record for all ranks.
        ("meta-llama/Llama-3.1-8B-Instruct", ("--tp", "4"), 131072, 131072 * 16 // 4),
        (
            "meta-llama/Llama-3.1-8B-Instruct",
            ("--tp", "16", "--block-tokens", "32"),
            262144,
            131072 * 32 // 8,
        ),
        ("deepseek-ai/DeepSeek-V3.1", ("--tp", "8", "--block-tokens", "64"), 70272, 70272 * 64),
        ("openai/gpt-oss-20b", (), 49152, 49152 * 16 // 2),  # two groups, of 12 layers each
        ("Qwen/Qwen3.6-27B", (), 65536, None),  # blocks as long as its states
        ("Qwen/Qwen3.6-27B", ("--block-tokens", "784"), 65536, 65536 * 784),
        ("google/gemma-3-27b-it", (), 507904, None),  # does not say which layers have a window
    ],
)
def test_a_record_is_that_of_a_block_a_group_and_a_rank(
    model: str, options: tuple[str, ...], of_token: int, of_record: int | None, tmp_path: Path
) -> None:
    (found,) = asked(tmp_path, CONFIGS[model], *options, "--dtype", "bfloat16")["caches"]
    assert (found["token_nbytes"], found["record_nbytes"]) == (of_token, of_record)
    shown = kvpool("size", "--model", str(tmp_path), *options).stdout
    assert ("a record: a " in shown) == bool(of_record)


@pytest.mark.parametrize(
    ("layers", "windows", "states", "of_record"),
    [(62, 52, 0, 10), (25, 12, 0, 13), (5, 4, 0, 1), (8, 0, 9, 8), (40, 0, 4, 4), (7, 7, 0, 7)],
)
def test_vllm_groups_layers_by_the_fewest_of_a_kind(
    layers: int, windows: int, states: int, of_record: int
) -> None:
    cache = KVCache(layers, windows, states, "", 8, (layers, layers))
    assert cache.record_layers() == of_record


def test_a_server_takes_the_size_classes_of_the_fields() -> None:
    """Within what a server's key takes of what was measured: 1.166 of DeepSeek-V3 in one field, now 1.006."""
    for nbytes, measured in ((65536, 1.0065), (1124352, 1.0058), (1376256, 1.0003), (160 << 20, 1.0)):
        assert abs(measured * nbytes - record_server_nbytes(nbytes)) < 450 + nbytes * 1e-4
    assert (record_server_nbytes(1), record_server_nbytes(5)) == (96, 112)


def test_the_link_and_the_disk_follow_the_prefill(tmp_path: Path) -> None:
    (found,) = asked(tmp_path, LLAMA, "--prefill", "5000", "--dtype", "fp8")["caches"]
    assert found["cache"] == "fp8"
    assert found["link_gbit_per_s"] == pytest.approx(65536 * 5000 * 8 / 1e9)
    assert found["disk_gb_per_s"] == pytest.approx(65536 * 5000 / 1e9)


def test_what_fits_no_model_is_refused_in_a_sentence(tmp_path: Path) -> None:
    model = ("size", "--model", str(written(tmp_path, LLAMA)))
    assert refused(*model, "--tp", "3") == (
        "kvpool: --tp 3: 8 KV heads are not shared out evenly to so many ranks"
    )
    huge = written(tmp_path / "huge", {**LLAMA, "head_dim": 1 << 30, "num_key_value_heads": 1 << 30})
    assert refused("size", "--model", str(huge)).endswith(": a record of 16 tokens would be too large")
    assert "--price is of pools of several sizes: add --trace" in refused(*model, "--price", "1")
    assert "--tenant is of an index's requests" in refused(*model, "--tenant", "a")
    for options in (("--tp", "2"), ("--dtype", "fp8"), ("--prefill", "5")):
        assert refused("size", *options) == "kvpool: --dtype, --tp and --prefill are for a --model"


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
    of_fp8 = kvpool("size", "--trace", f"{tmp_path}/trace", "--model", str(folder), "--dtype", "fp8").stdout
    assert of_fp8.splitlines()[-1].split()[-2:] == ["64.0", "MiB"]


def test_the_page_has_the_figures_of_the_command(tmp_path: Path) -> None:
    rows = []
    for model, config in CONFIGS.items():
        found = asked(tmp_path / model, config)
        plain, fp8 = found["caches"]
        rows.append(
            f"| {model} | {found['layers']} | {found['row']} | {plain['token_nbytes']:,} | {fp8['token_nbytes']:,} | "
            f"{plain['tokens_of_a_gib']:,} | {plain['link_gbit_per_s']:.2f} | "
            f"{format(plain['record_nbytes'], ',') if plain['record_nbytes'] else '-'} |"
        )
    lines = PAGE.read_text().splitlines()
    start = lines.index("|---|---|---|---|---|---|---|---|") + 1
    assert lines[start : start + len(rows)] == rows


def test_outputs_of_encoders_are_told(tmp_path: Path) -> None:
    seeing = {"model_type": "llava", "text_config": LLAMA, "vision_config": {"hidden_size": 1024}}
    said = asked(tmp_path / "model", seeing)
    assert said["item_token_nbytes"] == 2 * LLAMA["hidden_size"] == 8192
    deep = seeing | {"vision_config": {"deepstack_visual_indexes": [8, 16, 24]}}
    assert asked(tmp_path / "deep", deep)["item_token_nbytes"] == 4 * 8192
    assert asked(tmp_path / "plain", LLAMA)["item_token_nbytes"] == 0
    table = kvpool("size", "--model", str(tmp_path / "model"), env={**os.environ, "COLUMNS": "200"}).stdout
    assert "an image or sound: its encoder's output, 8,192 bytes a token, in 16 bits" in table
