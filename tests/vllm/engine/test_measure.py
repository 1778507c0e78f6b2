"""The measure of weights in memory: what it tells apart, what it copies, and when its watch finds a change."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvpool.transfer.device import Device
from kvpool.vllm.engine import measure
from kvpool.vllm.engine.measure import LOOKED_AT, PIECE_NBYTES, PIECES, UnsureKeys, WeightsMeasure
from tests.support.scheduler import planted

pytestmark = [pytest.mark.vllm]

Model = dict[str, torch.Tensor]
SMALL, LARGE = 16, 512  # elements of a side: taken whole, and by samples
DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.bool, torch.float64,
)  # fmt: skip


def shown(model: Model) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    return lambda: iter(list(model.items()))


def taken(**model: torch.Tensor) -> str:
    return WeightsMeasure(shown(model)).take()


def numbers(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("side", [SMALL, LARGE])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_content_of_every_type_has_one_measure_and_other_content_another(
    dtype: torch.dtype, side: int
) -> None:
    one = taken(w=numbers(dtype, side, side))
    assert one == taken(w=numbers(dtype, side, side))
    assert len(one) == 32
    assert int(one, 16)
    assert one != taken(w=numbers(dtype, side, side, seed=1))


@pytest.mark.parametrize("side", [SMALL, LARGE])
def test_names_shapes_and_types_are_measured_and_the_order_of_names_is_not(side: int) -> None:
    w, other = numbers(torch.int32, side, side), numbers(torch.int32, side)
    measures = [
        taken(w=w),
        taken(v=w),
        taken(w=w.flatten()),
        taken(w=w.view(torch.float32)),
        taken(w=w[None]),
        taken(w=w, v=other),
        taken(w=other, v=w),
        taken(),
    ]
    assert len(set(measures)) == len(measures)
    assert taken(w=w, v=other) == taken(v=other, w=w)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_of_one_element_and_of_none_there_is_a_measure(dtype: torch.dtype) -> None:
    one, other = (taken(scale=torch.tensor(value).to(dtype)) for value in (1, 2))
    assert one != other
    assert one != taken(scale=torch.tensor([1]).to(dtype))
    assert taken(scale=torch.empty(0, dtype=dtype)) not in (one, taken())


def views(side: int) -> dict[str, torch.Tensor]:
    """Several ways to lie in memory, of other content each."""
    whole = numbers(torch.int32, 2 * side, 2 * side)
    return {
        "dense": whole[:side].contiguous(),
        "transposed": whole.t(),
        "a part of rows": whole[:, 3 : side + 3],
        "every other": whole[::2, ::2],
        "expanded": whole[:1].expand(side, -1),
        "of three": whole.view(2, side, 2 * side).permute(2, 0, 1),
    }


@pytest.mark.parametrize("side", [SMALL, LARGE])
@pytest.mark.parametrize("how", views(1))
def test_however_a_tensor_lies_in_memory_its_content_is_measured(how: str, side: int) -> None:
    tensor = views(side)[how]
    one = taken(w=tensor)
    assert one == taken(w=views(side)[how])
    if how in ("dense", "a part of rows", "every other"):
        assert one == taken(w=tensor.contiguous()), "what lies between does not count"
    base = tensor if tensor._base is None else tensor._base
    base += 1
    assert one != taken(w=tensor)


@pytest.mark.parametrize("how", views(1))
def test_what_fills_its_memory_is_taken_at_once(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking up places takes five times as long."""
    monkeypatch.setattr(torch, "unravel_index", planted)
    tensor = views(LARGE)[how]
    if how in ("dense", "transposed", "of three"):
        taken(w=tensor)
    else:
        with pytest.raises(ZeroDivisionError):
            taken(w=tensor)


@pytest.mark.parametrize("side", [SMALL, LARGE])
def test_what_is_turned_where_it_lies_is_other_weights(side: int) -> None:
    """The bytes are the same, and stand for others."""
    w = numbers(torch.float32, side, side)
    assert taken(w=w) != taken(w=w.t())


@pytest.mark.parametrize("shape", [(4096,), (1, 4096), (4096, 1), (64, 1, 64)])
def test_a_dimension_of_one_has_no_place_in_memory(shape: tuple[int, ...]) -> None:
    dense = numbers(torch.float32, *shape)
    odd = dense.as_strided(
        shape, [7 if size == 1 else stride for size, stride in zip(shape, dense.stride(), strict=True)]
    )
    assert taken(w=dense) == taken(w=odd)


def llama_70b(ranks: int) -> Model:
    """Of a rank of 16, or any other number, without memory."""
    hidden, layers, heads, kv_heads, head, inner, words = 8192, 80, 64, 8, 128, 28672, 128256
    of_layer = {
        "self_attn.qkv_proj.weight": ((heads // ranks + 2 * max(1, kv_heads // ranks)) * head, hidden),
        "self_attn.o_proj.weight": (hidden, heads * head // ranks),
        "mlp.gate_up_proj.weight": (2 * inner // ranks, hidden),
        "mlp.down_proj.weight": (hidden, inner // ranks),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        # Of an FP8 checkpoint; scales of the KV cache are of each layer, too.
        **{f"{name}.weight_scale": (hidden, 1) for name in ("qkv", "o", "gate_up", "down")},
        **{f"attn.{name}_scale": () for name in ("q", "k", "v", "prob")},
    }
    shapes = {f"layers.{layer}.{name}": shape for layer in range(layers) for name, shape in of_layer.items()}
    shapes |= {"embed_tokens.weight": (words // ranks, hidden), "lm_head.weight": (words // ranks, hidden)}
    return {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}


def test_of_70_billion_parameters_on_16_ranks_at_most_8_mib_are_copied() -> None:
    model = llama_70b(16)
    assert 16 * sum(tensor.numel() for tensor in model.values()) > 70e9
    _, sizes, packed = measure._sampled(model.items())
    assert max(sizes) == PIECES * PIECE_NBYTES
    assert 1 << 20 < packed.nbytes <= 8 << 20
    assert sum(sizes) == packed.nbytes


def rows(count: int) -> Model:
    return {f"w{index}": numbers(torch.float32, 70 + index, seed=index) for index in range(count)}


@pytest.mark.parametrize("count", [1, 64, 65])
def test_a_change_of_each_tensor_alone_is_measured(count: int) -> None:
    model = rows(count)
    one = taken(**model)
    for tensor in model.values():
        tensor[-1] += 1
        assert taken(**model) != one
        tensor[-1] -= 1
    assert taken(**model) == one


def test_an_update_of_one_element_in_a_hundred_is_found_in_a_large_tensor() -> None:
    tensor = torch.zeros(1000, 1000)
    one = taken(w=tensor)
    tensor.flatten()[::100] = 1
    assert taken(w=tensor) != one
    tensor.zero_()
    for row in (0, 999):
        tensor[row] = 1
        assert taken(w=tensor) != one, "from its beginning to its end"
        tensor.zero_()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("side", [SMALL, LARGE])
def test_what_is_no_number_is_noticed(dtype: torch.dtype, side: int) -> None:
    model = {
        "ints": torch.tensor([-1]),
        "eighths": torch.full((3,), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn),
    }
    model |= {"odd": numbers(torch.float16, 3), "w": numbers(dtype, side, side)}
    measured = WeightsMeasure(shown(model))
    measured.take()
    assert not measured.has_nan()
    model["w"].fill_(float("inf"))
    measured.take()
    assert not measured.has_nan()
    model["w"].fill_(float("nan"))
    assert not measured.has_nan(), "as of the last measure"
    one = measured.take()
    assert measured.has_nan()
    assert measured.take() == one


# The watch.


def rotation(count: int) -> int:
    """Looks until a whole one has ended."""
    return count // LOOKED_AT + 1


def looked(measured: WeightsMeasure, looks: int) -> list[bool | None]:
    return [measured.look() for _ in range(looks)]


@pytest.mark.parametrize("count", [0, 1, LOOKED_AT - 1, LOOKED_AT, LOOKED_AT + 1, 3 * LOOKED_AT])
def test_the_watch_says_when_it_has_been_through_all(count: int) -> None:
    measured = WeightsMeasure(shown(rows(count)))
    measured.take()
    whole = [None] * (rotation(count) - 1) + [True]
    assert looked(measured, 3 * rotation(count)) == 3 * whole


@pytest.mark.parametrize("count", [1, LOOKED_AT, LOOKED_AT + 3])
def test_a_silent_change_of_any_tensor_is_found_within_two_rotations(count: int) -> None:
    for at, changed in itertools.product(range(rotation(count)), range(count)):
        model = rows(count)
        measured = WeightsMeasure(shown(model))
        measured.take()
        looked(measured, at)
        model[f"w{changed}"][0] += 1
        told = looked(measured, 2 * rotation(count))
        assert False in told
        assert True not in told[rotation(count) :]
        measured.take()
        assert False not in looked(measured, 2 * rotation(count)), "it is measured anew"


def removed(model: Model) -> None:
    del model["w8"]


def added(model: Model) -> None:
    model["new"] = torch.zeros(1)


def replaced(model: Model) -> None:
    model["w8"] = model["w8"] + 1


def renamed(model: Model) -> None:
    model["v8"] = model.pop("w8")


def of_another_shape(model: Model) -> None:
    model["w8"] = model["w8"][None]


def swapped(model: Model) -> None:
    model["w1"], model["w8"] = model["w8"], model["w1"]


@pytest.mark.parametrize("change", [removed, added, replaced, renamed, of_another_shape, swapped])
@pytest.mark.parametrize("count", [LOOKED_AT + 1, LOOKED_AT + 2])
@pytest.mark.parametrize("at", [0, 1])
def test_a_tensor_that_comes_or_goes_is_found(change: Callable[[Model], None], at: int, count: int) -> None:
    model = rows(count)
    measured = WeightsMeasure(shown(model))
    one = measured.take()
    looked(measured, at)
    change(model)
    told = looked(measured, 2 * rotation(len(model)))
    assert told.index(False) < 2 * rotation(len(model))
    assert measured.take() != one


def test_what_is_replaced_by_its_like_is_the_same() -> None:
    model = rows(LOOKED_AT + 2)
    measured = WeightsMeasure(shown(model))
    one = measured.take()
    model |= {name: tensor.clone() for name, tensor in model.items()}
    assert looked(measured, rotation(len(model))) == [None, True]
    assert measured.take() == one


def test_a_model_that_cannot_be_read_in_the_middle_is_read_from_its_beginning_again() -> None:
    model, broken = rows(LOOKED_AT + 2), [False]

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for index, one in enumerate(list(model.items())):
            if broken[0] and index > LOOKED_AT:
                raise RuntimeError("it is being built anew")
            yield one

    measured = WeightsMeasure(tensors)
    one = measured.take()
    assert measured.look() is None
    broken[0] = True
    for do in (measured.look, measured.take):
        with pytest.raises(RuntimeError, match="built anew"):
            do()
    broken[0] = False
    assert looked(measured, 2) != [None, True], "it has no whole measure"
    assert measured.take() == one
    assert looked(measured, 2) == [None, True]


class Late(Device):
    """Its copies end when they are told to."""

    def __init__(self) -> None:
        self.ready = False
        self.marks = 0

    def mark(self) -> Any:
        self.marks += 1
        return self

    def query(self) -> bool:
        return self.ready


def test_what_is_copied_late_is_compared_later_and_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    late, model = Late(), rows(LOOKED_AT)
    monkeypatch.setattr(measure, "device_of", lambda device: late)
    measured = WeightsMeasure(shown(model))
    measured.take()
    assert looked(measured, 3) == [None, None, None]
    assert late.marks == 1, "one copy is under way"
    model["w0"][0] += 1
    late.ready = True
    assert looked(measured, 2) == [None, True], "as it was when it was copied"
    late.ready = False
    assert measured.look() is None
    late.ready = True
    assert measured.look() is False
    late.ready = False
    measured.look()
    measured.take()
    late.ready = True
    assert looked(measured, 2) == [None, True], "what was on its way at a measure is not compared with it"


# What was stored of weights that nobody is sure of.


def test_keys_of_two_rotations_are_unsure() -> None:
    unsure = UnsureKeys()
    for number in range(4):
        unsure.stored([f"{number}a", f"{number}b"])
        unsure.rotate()
    unsure.stored(["4a"])
    assert not unsure.condemned
    assert unsure.take() == []
    unsure.condemn()
    assert unsure.condemned
    unsure.stored(["5a"])
    unsure.condemn()
    assert unsure.take() == ["3a", "3b", "4a", "5a"]
    assert not unsure.condemned
    unsure.condemn()
    assert not unsure.condemned


def test_a_measure_makes_keys_sure_but_not_those_that_are_condemned() -> None:
    unsure = UnsureKeys()
    unsure.stored(["a"])
    unsure.condemn()
    unsure.stored(["b"])
    unsure.rotate()
    unsure.stored(["c"])
    unsure.clear()
    unsure.condemn()
    assert unsure.take() == ["a"]


def test_of_many_keys_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MAX_UNSURE", 3)
    unsure = UnsureKeys()
    unsure.stored("abcde")
    unsure.rotate()
    unsure.stored("fg")
    unsure.stored("hi")
    unsure.condemn()
    assert unsure.take() == list("cdeghi")
