"""Tiny models with random weights, written to a folder, for the demo, the tests and the benchmarks.

Over 400 lines because each kind takes some lines, and this runs as a script that imports nothing beside it.

Attention is sharp and logits are far apart (normal with deviation 1/sqrt(fan-in), query projections times 3).
So outputs depend on every byte of the KV cache, and a corrupted block shows.

Runs in its own process with torch and transformers, without vLLM's seconds of imports.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

Kind = Literal[
    "llama", "qwen3", "gemma3", "gemma3n", "gemma4", "deepseek", "gpt_oss", "lfm2", "granite4", "qwen3_next", "llama4",
    "eagle", "eagle3", "llava", "qwen2_vl", "qwen2_audio",
]  # fmt: skip
DRAFTS = ("eagle", "eagle3")
HYBRIDS = ("lfm2", "granite4", "qwen3_next", "llama4")

VOCABULARY = 8192
FIRST_WORD = 10  # lower ids have a meaning in some models
QUERY_GAIN = 3.0
MAX_TOKENS = 8192


def write_tiny_model(
    folder: Path,
    kind: Kind = "llama",
    *,
    width: int = 512,
    layers: int = 8,
    seed: int = 0,
    window: int = 512,
    said_words: int = VOCABULARY,
    vision: Mapping[str, int] | None = None,
) -> None:
    """Write configuration, weights (bfloat16) and a word-level tokenizer into the new ``folder``.

    ``llama``, ``qwen3``: full attention, 8 heads, 4 KV heads. ``gemma3``: five layers with a sliding window of
    ``window`` tokens per layer with full attention. ``gemma3n``, ``gemma4``: two such layers, and the last three of the
    ``layers`` use the caches of those before them. ``deepseek``: MLA with latent vectors of 512 + 64
    elements, the only size of vLLM's CPU kernels, without experts. ``gpt_oss``: a sliding window in every
    other layer, attention sinks, four experts, two per token. ``lfm2``: short convolutions but for every
    fourth layer, with full attention. ``granite4``: Mamba-2 likewise. ``qwen3_next``: gated delta nets likewise, four
    experts, and a layer that drafts (MTP). ``llama4``: attention in chunks of ``window`` tokens likewise, two
    experts. ``eagle``, ``eagle3``: layers that draft for a ``llama`` of this ``width``. ``llava``: a ``llama`` that
    sees images of ``SIDE`` by ``SIDE`` pixels, 64 tokens each; ``vision`` replaces some of ``VISION``. ``qwen2_vl``: a
    ``qwen2`` that sees images and clips; ``qwen2_audio``: one that hears. ``width`` is a multiple of 256. Of the
    vocabulary only the last ``said_words`` are ever said, by kinds that are no ``qwen2``. About 64 MB at the defaults.
    """
    import torch
    import transformers

    torch.manual_seed(seed)
    if kind == "llava":
        _write_llava(folder, width, layers, said_words, **{**VISION, **(vision or {})})
        return
    if kind == "qwen2_vl":
        _write_qwen2_vl(folder, width, layers)
        return
    if kind == "qwen2_audio":
        _write_qwen2_audio(folder, width, layers)
        return
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": width * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": width // 8,
        "max_position_embeddings": MAX_TOKENS,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }
    model: Any
    if kind == "llama" or kind in DRAFTS:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common))
    elif kind == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**common))
    elif kind == "deepseek":
        common |= {"num_key_value_heads": 8, "first_k_dense_replace": layers, "q_lora_rank": None}
        common |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
        deepseek = transformers.DeepseekV2Config(**common)
        model = transformers.DeepseekV2ForCausalLM(deepseek)
    elif kind == "gpt_oss":
        moe = transformers.GptOssConfig(
            **common, sliding_window=window, num_local_experts=4, num_experts_per_tok=2
        )
        model = transformers.GptOssForCausalLM(moe)
    elif kind in HYBRIDS:
        model = _hybrid(kind, common, layers, window)
    elif kind in ("gemma3n", "gemma4"):
        model = _gemma_of_shared_caches(kind, common, layers, window)
    else:
        kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)]
        config = transformers.Gemma3TextConfig(**common, sliding_window=window, layer_types=kinds)
        model = transformers.Gemma3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _draw(name, parameter)
            if name == "lm_head.weight":
                parameter[:-said_words] = 0.0
    folder.mkdir(parents=True, exist_ok=True)
    model = model.to(torch.bfloat16)
    if kind in DRAFTS:
        _write_drafts(folder, kind, model)
    else:
        model.save_pretrained(folder)
    if kind == "qwen3_next":
        _add_drafts(folder, model)
    _write_tokenizer(folder)


def _draw(name: str, parameter: Any) -> None:
    """Random values of a parameter; a norm keeps its neutral start."""
    if "sinks" in name:
        parameter.normal_()  # as large as other weights of a softmax
    elif name.endswith("A_log"):
        parameter.uniform_(0.02, 0.2).log_()  # a state remembers long
    elif name.endswith("dt_bias"):
        parameter.uniform_(-3.0, -1.0)
    if parameter.dim() > 1:
        gain = QUERY_GAIN if "q_proj" in name or "in_proj_qkv" in name else 1.0
        parameter.normal_(0.0, gain * parameter.shape[-1] ** -0.5)


def _write_drafts(folder: Path, kind: Kind, model: Any) -> None:
    """The layers, and the projection of the target's states (EAGLE: and of a token) to their input."""
    import torch
    from safetensors.torch import save_file

    def drawn(name: str, rows: int, columns: int) -> Any:
        weights = torch.empty(rows, columns)
        _draw(name, weights)
        return weights.to(torch.bfloat16)

    width = model.config.hidden_size
    tensors = {
        name.removeprefix("model."): tensor.clone()
        for name, tensor in model.state_dict().items()
        if name.startswith("model.layers.")
    }
    first = "layers.0."
    if kind == "eagle":
        del tensors[f"{first}input_layernorm.weight"]
        tensors["fc.weight"] = drawn("fc", width, 2 * width)
    else:  # three states of the target; the first layer has a token beside them
        tensors["fc.weight"] = drawn("fc", width, 3 * width)
        tensors[f"{first}hidden_norm.weight"] = tensors[f"{first}input_layernorm.weight"].clone()
        for name in ("q_proj", "k_proj", "v_proj"):
            weights = f"{first}self_attn.{name}.weight"
            tensors[weights] = drawn(name, len(tensors[weights]), 2 * width)
        for name in ("lm_head.weight", "model.norm.weight"):
            tensors[name.removeprefix("model.")] = model.state_dict()[name].clone()
    save_file(tensors, folder / "model.safetensors")
    model.config.save_pretrained(folder)
    _set(folder, architectures=["LlamaForCausalLM"], eagle_aux_hidden_state_layer_ids=[1, 2, 3])


def _add_drafts(folder: Path, model: Any) -> None:
    """MTP: a layer with full attention, and the projection of a token and the model's last state to its input."""
    import torch
    from safetensors.torch import load_file, save_file

    width = model.config.hidden_size
    last = f"model.layers.{model.config.num_hidden_layers - 1}."
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.startswith(last)]:
        weights = tensors[name].clone()
        _draw(name, weights)
        tensors[name.replace(last, "mtp.layers.0.")] = weights
    tensors["mtp.fc.weight"] = torch.empty(width, 2 * width, dtype=torch.bfloat16)
    _draw("fc", tensors["mtp.fc.weight"])
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        tensors[f"mtp.{name}.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _set(folder, num_nextn_predict_layers=1)


def _set(folder: Path, **settings: Any) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))


def _gemma_of_shared_caches(kind: Kind, common: dict[str, Any], layers: int, window: int) -> Any:
    """A model of which every third layer has full attention, and the last three no caches of their own."""
    import transformers

    own = common | {
        "sliding_window": window,
        "layer_types": ["full_attention" if i % 3 == 2 else "sliding_attention" for i in range(layers)],
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCABULARY,
    }
    if kind == "gemma4":
        own["global_head_dim"] = 2 * common["head_dim"]
        gemma4 = transformers.Gemma4TextConfig(**own)
        return transformers.Gemma4ForCausalLM(gemma4)
    own |= {
        "intermediate_size": [common["intermediate_size"]] * layers,
        "altup_num_inputs": 2,
        "tie_word_embeddings": True,
        "laurel_rank": 8,
    }
    gemma3n = transformers.Gemma3nTextConfig(**own, activation_sparsity_pattern=[0.0] * layers)
    return transformers.Gemma3nForCausalLM(gemma3n)


SIDE, PATCH = 112, 14  # pixels
VISION = {"side": SIDE, "vision_width": 128, "vision_layers": 3}
IMAGE = "<image>"  # stands for an image in a prompt


def _write_llava(
    folder: Path,
    width: int,
    layers: int,
    said_words: int,
    *,
    side: int,
    vision_width: int,
    vision_layers: int,
) -> None:
    """CLIP and Llama, with a processor that needs no torchvision."""
    import torch
    import transformers

    tokenizer = _tokenizer_of(folder, (IMAGE,))
    image = tokenizer.convert_tokens_to_ids(IMAGE)
    sees = transformers.CLIPVisionConfig(
        hidden_size=vision_width, intermediate_size=2 * vision_width, num_hidden_layers=vision_layers,
        num_attention_heads=4, image_size=side, patch_size=PATCH, projection_dim=vision_width,
    )  # fmt: skip
    says = transformers.LlamaConfig(
        vocab_size=VOCABULARY + 64, hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, head_dim=width // 8, max_position_embeddings=MAX_TOKENS,
        bos_token_id=0, eos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=sees, text_config=says, image_token_index=image, vision_feature_select_strategy="default",
        vision_feature_layer=-2, image_seq_length=(side // PATCH) ** 2,
    )  # fmt: skip
    model: Any = transformers.LlavaForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _draw(name, parameter)
            if name.endswith("lm_head.weight"):
                parameter[: VOCABULARY - said_words] = 0.0
                parameter[VOCABULARY:] = 0.0
            elif "multi_modal_projector.linear_2" in name:
                parameter *= 4.0  # an image weighs as much as words
    model.to(torch.bfloat16).save_pretrained(folder)
    _rename(folder, r"^vision_tower\.(?!vision_model\.)", "vision_tower.vision_model.")
    template = (
        "{% for m in messages %}{{ m['role'] }} {% if m['content'] is string %}{{ m['content'] }} {% else %}"
        "{% for c in m['content'] %}{% if c['type'] == 'image' %}<image> {% else %}{{ c['text'] }} {% endif %}"
        "{% endfor %}{% endif %}{% endfor %}assistant "
    )
    transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessorPil(
            size={"shortest_edge": side}, crop_size={"height": side, "width": side}
        ),
        tokenizer=tokenizer, patch_size=PATCH, vision_feature_select_strategy="default", image_token=IMAGE,
        num_additional_image_tokens=1, chat_template=template,
    ).save_pretrained(folder)  # fmt: skip


# The words behind the others, in their order.
VIDEO_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
AUDIO_MARKS = ("<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>")


def _write_qwen2_vl(folder: Path, width: int, layers: int) -> None:
    """The settings of its processor are written by hand: its class imports torchvision."""
    import transformers

    tokenizer = _tokenizer_of(folder, VIDEO_MARKS)
    start, end, image, video = map(tokenizer.convert_tokens_to_ids, VIDEO_MARKS)
    sees = {
        "depth": 2, "embed_dim": 64, "hidden_size": width, "num_heads": 4, "mlp_ratio": 2, "patch_size": PATCH,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    half = width // 8  # of a head
    sections = [half // 4, half * 3 // 8, half * 3 // 8]  # time, height, width
    says = _qwen2(width, layers) | {
        "rope_parameters": {"rope_type": "default", "mrope_section": sections, "rope_theta": 10000.0}
    }
    config = transformers.Qwen2VLConfig(
        text_config=says, vision_config=sees, image_token_id=image, video_token_id=video, vision_start_token_id=start,
        vision_end_token_id=end, tie_word_embeddings=False,
    )  # fmt: skip
    model: Any = transformers.Qwen2VLForConditionalGeneration(config)
    _save_drawn(folder, model)
    tokenizer.save_pretrained(folder)
    patches: dict[str, Any] = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2}
    patches |= {"size": {"shortest_edge": SIDE * SIDE // 4, "longest_edge": SIDE * SIDE}}
    processor = {
        "processor_class": "Qwen2VLProcessor",
        "image_processor": {"image_processor_type": "Qwen2VLImageProcessor", **patches},
        "video_processor": {
            "video_processor_type": "Qwen2VLVideoProcessor",
            "do_sample_frames": False,
            **patches,
        },
    }
    (folder / "processor_config.json").write_text(json.dumps(processor))


def _write_qwen2_audio(folder: Path, width: int, layers: int) -> None:
    import transformers

    tokenizer = _tokenizer_of(folder, AUDIO_MARKS)
    hears = {
        "num_mel_bins": 128, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 128, "d_model": 64,
        "max_source_positions": 1500,
    }  # fmt: skip
    config = transformers.Qwen2AudioConfig(
        audio_config=hears,
        text_config={"model_type": "qwen2", **_qwen2(width, layers)},
        audio_token_index=tokenizer.convert_tokens_to_ids(AUDIO_MARKS[-1]),
    )
    model: Any = transformers.Qwen2AudioForConditionalGeneration(config)
    _save_drawn(folder, model)
    _rename(folder, r"^language_model\.model\.model\.", "language_model.model.")
    hearing = transformers.WhisperFeatureExtractor(feature_size=128)
    transformers.Qwen2AudioProcessor(hearing, tokenizer, chat_template="").save_pretrained(folder)


def _save_drawn(folder: Path, model: Any) -> None:
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _draw(name, parameter)
    model.to(torch.bfloat16).save_pretrained(folder)


def _qwen2(width: int, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY + 64, "hidden_size": width, "intermediate_size": 2 * width,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": MAX_TOKENS, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip


def _tokenizer_of(folder: Path, marks: Sequence[str]) -> Any:
    """The one of all, in the new ``folder``, and ``marks`` as the words behind its own."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    return tokenizer


def _rename(folder: Path, pattern: str, by: str) -> None:
    """Weights have the names that vLLM reads."""
    from safetensors.torch import load_file, save_file

    read = load_file(folder / "model.safetensors")
    weights = {re.sub(pattern, by, name): tensor for name, tensor in read.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _hybrid(kind: Kind, common: dict[str, Any], layers: int, window: int) -> Any:
    """A model of which every fourth layer has full attention."""
    import transformers

    def layer_types(other: str) -> list[str]:
        return ["full_attention" if i % 4 == 3 else other for i in range(layers)]

    if kind == "lfm2":
        own: dict[str, Any] = {name: value for name, value in common.items() if name != "head_dim"}
        # As vLLM reads them.
        own |= {"conv_dim": common["hidden_size"], "conv_dim_out": common["hidden_size"]}
        own |= {"block_dim": common["hidden_size"], "block_ff_dim": common["intermediate_size"]}
        lfm2 = transformers.Lfm2Config(
            **own, layer_types=layer_types("conv"), conv_L_cache=3, block_auto_adjust_ff_dim=False
        )
        return transformers.Lfm2ForCausalLM(lfm2)
    if kind == "granite4":
        granite = transformers.GraniteMoeHybridConfig(
            **{name: value for name, value in common.items() if name != "head_dim"},
            layer_types=["attention" if i % 4 == 3 else "mamba" for i in range(layers)], position_embedding_type="nope",
            num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=common["intermediate_size"],
            mamba_n_heads=8, mamba_d_head=common["hidden_size"] // 4, mamba_d_state=32, mamba_n_groups=1,
            mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=64, attention_multiplier=common["head_dim"] ** -0.5,
        )  # fmt: skip
        return transformers.GraniteMoeHybridForCausalLM(granite)
    if kind == "qwen3_next":
        # The sizes of heads are those of vLLM's CPU kernels.
        common |= {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
        common |= {"partial_rotary_factor": 0.5}
        qwen = transformers.Qwen3NextConfig(
            **common, layer_types=layer_types("linear_attention"), linear_num_key_heads=2,
            linear_num_value_heads=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64,
            norm_topk_prob=True,
        )  # fmt: skip
        return transformers.Qwen3NextForCausalLM(qwen)
    llama4 = transformers.Llama4TextConfig(
        **common, layer_types=layer_types("chunked_attention"), attention_chunk_size=window, use_qk_norm=True,
        no_rope_layers=[int(i % 4 != 3) for i in range(layers)], num_local_experts=2, num_experts_per_tok=1,
        intermediate_size_mlp=common["intermediate_size"], interleave_moe_layer_step=2,
    )  # fmt: skip
    return transformers.Llama4ForCausalLM(llama4)


def _write_tokenizer(folder: Path) -> None:
    import tokenizers

    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w2"))  # noqa: S106
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "w0",
        "eos_token": "w1",
        "model_max_length": MAX_TOKENS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser("tiny_model.py", description="Write a model of random weights.")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "options", type=json.loads, nargs="?", default={}, help="arguments of write_tiny_model, as JSON"
    )
    given = parser.parse_args()
    write_tiny_model(given.folder, **given.options)
