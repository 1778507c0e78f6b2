"""Parts of records by heads: the same bytes, keys and facts at each tensor-parallel size; and what is not cut."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpool.errors import EngineRefused
from kvpool.key.key import Fact
from kvpool.vllm.engine import internals, parts
from kvpool.vllm.engine.identity import engine_facts
from kvpool.vllm.engine.parts import cut, shared_groups, strides_alone
from kvpool.vllm.engine.support import groups_of
from kvpool.vllm.geometry import Group
from tests.support.block_copies import content
from tests.support.heads import (
    BLOCKS,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    LAYOUTS,
    SIZES,
    TOKENS,
    model_cache,
    of_rank,
    spec_of,
)
from tests.support.specs import CHUNKED, FULL, LATENT, RING, STATE, WEIGHTS, WINDOW, cache_of, differing

pytestmark = [pytest.mark.vllm, pytest.mark.allow_leaks("vLLM keeps helpers of its own for a process")]


@pytest.fixture
def sharing(engine_config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function: the groups and facts of an engine of some size; a part may be as small as it likes."""
    monkeypatch.setattr(parts, "MIN_PART_NBYTES", 1)

    def make(
        ranks: int = 1,
        *specs: Any,
        layers: list[list[torch.Tensor]] | None = None,
        wanted: int = HEADS,
        blocks_per_record: int = 1,
        **changes: Any,
    ) -> tuple[list[Group], dict[str, Fact]]:
        config = engine_config()
        config.parallel_config.tensor_parallel_size = ranks
        for name, value in changes.items():
            section, _, field = name.partition("__")
            setattr(getattr(config, section), field, value)
        cache = cache_of(*(specs or (spec_of(ranks),)))
        views = layers or [of_rank(model_cache(), ranks, 0)]
        groups = groups_of(cache, blocks_per_record, ranks)
        shared = shared_groups(config, cache, groups, views, wanted)
        return shared, engine_facts(config, cache, WEIGHTS, views, blocks_per_record, shared)

    return make


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("wanted", [2, 4])
def test_the_parts_of_all_sizes_and_layouts_have_the_same_bytes(layout: str, wanted: int) -> None:
    """Under the same numbers: each head is where the model has it."""
    model = model_cache()
    count = HEADS // wanted
    expected = {
        number: [
            content([layer[:, number * count : (number + 1) * count] for layer in model], block)
            for block in (1, 5)
        ]
        for number in range(wanted)
    }
    for ranks in (size for size in SIZES if wanted % size == 0):
        group = Group(TOKENS, parts=wanted // ranks)
        found: dict[int, list[bytes]] = {}
        for rank in range(ranks):
            views = cut(of_rank(model, ranks, rank, layout), group.parts)
            found |= {
                number: [content(of_part, block) for block in (1, 5)]
                for number, of_part in zip(group.own_parts(rank), views, strict=True)
            }
        assert found == expected, f"{ranks} ranks"
        assert list(found) == list(group.all_parts(ranks))


def test_the_numbers_of_parts_are_in_the_order_of_ranks() -> None:
    assert [list(Group(16, parts=2).own_parts(rank)) for rank in range(2)] == [[0, 1], [2, 3]]
    assert [list(Group(16).own_parts(rank)) for rank in range(2)] == [[0], [1]]
    assert [list(Group(16, latent=True, copies=2).own_parts(rank)) for rank in range(4)] == [
        [0],
        [0],
        [1],
        [1],
    ]
    assert len(Group(16, parts=2).all_parts(4)) == 8
    assert len(Group(16, latent=True, copies=4).all_parts(4)) == 1


def test_engines_of_all_sizes_have_the_same_facts(sharing: Any) -> None:
    found = [sharing(ranks)[1] for ranks in SIZES]
    assert found[0] == found[1] == found[2]
    facts = found[0]
    assert "tensor_parallel" not in facts
    part_nbytes = LAYERS * TOKENS * 2 * HEAD_SIZE * 2
    assert {name: facts[f"group0.{name}"] for name in ("parts", "shapes", "strides", "payload_nbytes")} == {
        "parts": 4, "shapes": "2*1x32x64", "strides": "2*0x64x1", "payload_nbytes": part_nbytes,
    }  # fmt: skip
    assert [[group.parts for group in sharing(ranks)[0]] for ranks in SIZES] == [[4], [2], [1]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_other_heads_of_a_rank_are_no_fact(sharing: Any, layout: str) -> None:
    model = model_cache()
    found = [sharing(ranks, layers=[of_rank(model, ranks, 0, layout)], wanted=2)[1] for ranks in (1, 2)]
    assert found[0] == found[1]
    order = "2*64x128x1" if layout == "BNHC" else "2*2048x64x1"
    assert found[0]["group0.strides"] == order, "the order in memory is one"


def test_what_engines_that_share_must_have_alike_is_a_fact(sharing: Any) -> None:
    facts = sharing()[1]
    assert differing(facts, sharing(wanted=2)[1]) == {
        "group0.parts", "group0.shapes", "group0.strides", "group0.payload_nbytes",
    }  # fmt: skip
    twice = sharing(2, spec_of(1), layers=[of_rank(model_cache(), 1, 0)])[1]
    assert "group0.shapes" in differing(facts, twice), "ranks that have all heads are not those of a whole"
    assert differing(facts, sharing(blocks_per_record=2)[1]) == {
        "blocks_per_record", "group0.block_tokens", "group0.payload_nbytes",
    }  # fmt: skip


def test_without_the_setting_sizes_are_kept_apart(engine_config: Any) -> None:
    facts = []
    for ranks in (1, 2):
        config = engine_config()
        config.parallel_config.tensor_parallel_size = ranks
        facts.append(engine_facts(config, cache_of(FULL), WEIGHTS, [of_rank(model_cache(), 1, 0)]))
    assert differing(*facts) == {"tensor_parallel"}


def test_what_each_rank_has_as_a_whole_is_one_part(sharing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latent vectors, and states that vLLM says are the same on all ranks; rings are not in the pool."""
    monkeypatch.setattr(parts, "current_platform", SimpleNamespace(device_type="cuda"))
    latents = [torch.zeros(BLOCKS, 1, TOKENS, 576, dtype=torch.bfloat16)]
    states = [torch.zeros(BLOCKS, 3, 64), torch.zeros(BLOCKS, 4, 16, 16)]
    whole = dataclasses.replace(STATE, tp_replicated=True)
    found = [
        sharing(
            ranks,
            LATENT,
            whole,
            RING,
            spec_of(ranks),
            layers=[latents, states, [], of_rank(model_cache(), ranks, 0)],
        )
        for ranks in SIZES
    ]
    assert found[0][1] == found[1][1] == found[2][1]
    facts = found[0][1]
    assert [facts.get(f"group{index}.parts") for index in range(4)] == [1, 1, None, 4]
    assert [len(group.all_parts(4)) for group in found[2][0] if not group.scratch] == [1, 1, 4]


def test_windows_and_chunks_are_cut_too(sharing: Any) -> None:
    layers = [[torch.zeros(BLOCKS, HEADS // 2, tokens, 64, dtype=torch.bfloat16)] for tokens in (64, 32)]
    specs = [dataclasses.replace(spec, num_kv_heads=HEADS // 2) for spec in (WINDOW, CHUNKED)]
    groups, _ = sharing(2, *specs, layers=layers)
    assert [group.parts for group in groups] == [2, 2]


def test_blocks_of_a_kernel_inside_of_the_engines_are_cut_at_the_heads(sharing: Any) -> None:
    layers = [[torch.zeros(BLOCKS, 2, HEADS // ranks, 16, 64, dtype=torch.bfloat16)] for ranks in (1, 2)]
    found = [sharing(ranks, layers=[views])[1] for ranks, views in zip((1, 2), layers, strict=True)]
    assert found[0] == found[1]
    assert found[0]["group0.shapes"] == "1*2x1x16x64"


SMALL_HEADS = [[torch.zeros(BLOCKS, HEADS, TOKENS, 32, dtype=torch.bfloat16)]]
INTERLEAVED = [[torch.zeros(BLOCKS, HEADS, 64, TOKENS, dtype=torch.bfloat16).transpose(2, 3)]]
SPLIT = [[torch.zeros(BLOCKS, 2, TOKENS, HEADS, HEAD_SIZE, dtype=torch.bfloat16)]]
HALVES = [[torch.zeros(2, BLOCKS, TOKENS, HEADS, HEAD_SIZE, dtype=torch.bfloat16).transpose(0, 1)]]


@pytest.mark.parametrize(
    ("arguments", "changes", "says"),
    [
        ((2,), {"wanted": 3}, "3 is no multiple of --tensor-parallel-size 2; set it to"),
        ((1,), {"parallel_config__pipeline_parallel_size": 2}, "stages are not cut; set --pipeline-parallel-size"),
        ((1,), {"wanted": 8}, "a rank has 4 KV heads in KV-cache group 0, which are not 8 equal parts; set"),
        ((1,), {"wanted": 3}, "a rank has 4 KV heads in KV-cache group 0, which are not 3 equal parts"),
        ((8, spec_of(4)), {"wanted": 8}, "the model has 4 KV heads, so several of 8 ranks have the same"),
        ((1,), {"model_config__quantization": "fp8"}, r"weights are quantized \(fp8\) when they are loaded"),
        ((1, spec_of(1, num_head_slots=2)), {}, "does not say how heads lie in KV-cache group 0"),
        ((1, spec_of(1, state_content_bytes=128)), {}, "does not say how heads lie in KV-cache group 0"),
        ((1, spec_of(1, tokens_per_state=2)), {}, "does not say how heads lie in KV-cache group 0"),
        ((1,), {"layers": SMALL_HEADS}, r"lies in memory as \(4, 32, 32\) by .* not known to be head by head"),
        ((1,), {"layers": INTERLEAVED}, r"lies in memory as \(4, 32, 64\) by \(2048, 1, 32\)"),
        ((1,), {"layers": SPLIT}, r"lies in memory as \(2, 32, 4, 32\)"),
        ((1,), {"layers": HALVES}, r"lies in memory as \(2, 32, 4, 32\)"),
        ((1, STATE), {"layers": [[torch.zeros(BLOCKS, 3, 64)]]}, "each rank has states of its own in KV-cache group 0"),
        (
            (1, dataclasses.replace(LATENT, max_tp_shards=None)),
            {"layers": [[torch.zeros(BLOCKS, 1, 32, 576)]]},
            "each rank has latent vectors of its own in KV-cache group 0",
        ),
        (
            (1, LATENT),
            {"layers": [[torch.zeros(BLOCKS, 1, 32, 576)]]},
            "vLLM's CPU kernels compute other latent vectors",
        ),
    ],
)  # fmt: skip
def test_what_may_differ_between_sizes_is_not_cut(
    sharing: Any, arguments: tuple[Any, ...], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(EngineRefused, match=says):
        sharing(*arguments, **changes)


def test_a_checkpoint_that_is_quantized_is_cut_and_what_is_quantized_once_more_is_not(
    sharing: Any, engine_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_config = engine_config().model_config.hf_config
    told = type(hf_config)(**{**hf_config.to_dict(), "quantization_config": {"quant_method": "fp8"}})
    changes = {"model_config__quantization": "fp8", "model_config__hf_config": told}
    assert sharing(**changes)[0][0].parts == 4
    with pytest.raises(EngineRefused, match="when they are loaded"):
        sharing(**changes, model_config__quantization_config={"linear": {"weight": "fp8"}})


def test_a_model_class_from_elsewhere_and_layers_of_drafts_are_not_cut(
    sharing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(internals, "model_class", lambda model: Group)
        with pytest.raises(EngineRefused, match="class is not vLLM's own"):
            sharing()
    with monkeypatch.context() as patch:
        patch.setattr("kvpool.vllm.engine.support.drafts_with_layers", lambda config: config)
        with pytest.raises(EngineRefused, match="layers of drafts"):
            sharing()


@pytest.mark.parametrize("ranks", SIZES)
def test_a_part_of_less_than_64_kib_is_not_made_at_any_size(
    sharing: Any, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Else engines of one size would cut, and those of another one not."""
    part_nbytes = LAYERS * TOKENS * 2 * HEAD_SIZE * 2
    monkeypatch.setattr(parts, "MIN_PART_NBYTES", part_nbytes)
    sharing(ranks)
    monkeypatch.setattr(parts, "MIN_PART_NBYTES", part_nbytes + 1)
    with pytest.raises(EngineRefused) as refused:
        sharing(ranks)
    assert str(refused.value) == (
        "each of 4 parts of a record of KV-cache group 0 would have 8KiB, less than 8193; set blocks_per_record to 2 "
        "or more, a larger --block-size, or a lower share_across_tp"
    )
    sharing(ranks, blocks_per_record=2)


def test_the_line_is_64_kib() -> None:
    assert parts.MIN_PART_NBYTES == 64 << 10


def test_strides_alone_have_no_gaps_and_keep_the_order() -> None:
    view = torch.zeros(5, 4, 8, 6)
    assert strides_alone(view) == (48, 6, 1)
    assert strides_alone(view[:, 1:3, :, :]) == (48, 6, 1)
    assert strides_alone(view.transpose(1, 2)) == (6, 48, 1)
    assert strides_alone(view[:, 1:2]) == (0, 6, 1)
    assert strides_alone(view.transpose(1, 2)[:, :, 1:2]) == (6, 0, 1)
    assert strides_alone(view.transpose(2, 3)) == (48, 1, 6)
