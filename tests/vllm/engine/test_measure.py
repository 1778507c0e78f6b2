"""The measure of weights in memory: equal where they are, other where a sample is, and cheap."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvpool.vllm.engine import measure
from kvpool.vllm.engine.measure import LOOKED_AT, WeightsMeasure

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda whole: whole,
    "columns": lambda whole: whole.T,
    "stacked": lambda whole: whole.view(4, 64, 384).permute(2, 0, 1),
    "a slice": lambda whole: whole[:, 3:200],
    "every other": lambda whole: whole[::2],
}
DENSE = ("rows", "columns", "stacked")


def whole() -> torch.Tensor:
    return torch.arange(256 * 384, dtype=torch.float32).reshape(256, 384)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_that_fills_its_memory_is_sampled_in_one_copy(layout: str) -> None:
    """Looking up places takes ten times as long."""
    assert measure._is_dense(LAYOUTS[layout](whole())) == (layout in DENSE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_each_layout_a_change_is_found_at_its_start_and_all_over(layout: str) -> None:
    model = LAYOUTS[layout](whole() + 1)
    one = WeightsMeasure(lambda: [("weight", model)])
    before = one.take()
    assert WeightsMeasure(lambda: [("weight", LAYOUTS[layout](whole() + 1))]).take() == before
    first = (0,) * model.ndim
    model[first] *= 2
    assert one.take() != before
    model[first] /= 2
    assert one.take() == before
    model *= 2
    assert one.take() != before


def test_a_look_finds_what_changed_in_the_part_that_it_comes_to_and_a_rotation_sees_all() -> None:
    model = {f"layer{number}": whole() for number in range(2 * LOOKED_AT + 1)}
    one = WeightsMeasure(lambda: iter(model.items()))
    one.take()
    assert [one.look() for _ in range(6)] == [None, None, True] * 2
    model[f"layer{LOOKED_AT}"][0, 0] = -1
    assert [one.look(), one.look()] == [None, False]
    one.take()
    del model["layer0"]
    assert [one.look() for _ in range(3)] == [None, None, False], "one is missing"
