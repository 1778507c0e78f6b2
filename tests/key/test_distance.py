"""How far payloads are from each other, against torch."""

from __future__ import annotations

import math
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpool import _native
from kvpool.transfer.audit import NUMBERS

ELEMENTS = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
Pairs = list[tuple[float, float]]


def payload(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def expected(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[float, float]:
    one, other = ours.double(), theirs.double()
    return float(((other - one) ** 2).sum()), float((one**2).sum())


def tensors(element: str, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    dtype: torch.dtype = getattr(torch, element)
    ours = torch.randn(count, generator=random)
    return ours.to(dtype), (ours + 0.1 * torch.randn(count, generator=random)).to(dtype)


def test_all_elements_that_are_compared_are_known() -> None:
    assert sorted(NUMBERS) == sorted(ELEMENTS)
    for element in NUMBERS:
        dtype: torch.dtype = getattr(torch, element)
        assert _native.distances(bytes(8), bytes(8), [(element, 8)]) == [(0.0, 0.0)]
        if dtype.itemsize > 1:
            with pytest.raises(ValueError, match="inside of an element"):
                _native.distances(bytes(3), bytes(3), [(element, 3)])


@pytest.mark.parametrize("element", ELEMENTS)
@given(count=st.integers(1, 300), seed=st.integers(0, 1 << 20))
def test_sums_are_those_of_torch(element: str, count: int, seed: int) -> None:
    ours, theirs = tensors(element, count, seed)
    one, other = payload(ours), payload(theirs)
    ((difference, norm),) = _native.distances(one, other, [(element, len(one))])
    wanted = expected(ours, theirs)
    assert difference == pytest.approx(wanted[0], rel=1e-9)
    assert norm == pytest.approx(wanted[1], rel=1e-9)


@pytest.mark.parametrize("element", ["float8_e4m3fn", "float8_e5m2"])
def test_all_of_fp8_is_read_as_torch_reads_it(element: str) -> None:
    for byte in range(256):
        one = torch.tensor([byte], dtype=torch.uint8)
        value = float(one.view(getattr(torch, element)).double())
        ((difference, _),) = _native.distances(bytes(1), bytes([byte]), [(element, 1)])
        assert difference == (value**2 if math.isfinite(value) else math.inf)


def test_pieces_of_several_elements_repeat_and_each_has_its_own_sums() -> None:
    layers = [tensors("float32", 3, 1), tensors("bfloat16", 5, 2), tensors("float8_e4m3fn", 7, 3)]
    more = [tensors("float32", 3, 4), tensors("bfloat16", 5, 5), tensors("float8_e4m3fn", 7, 6)]
    ours = b"".join(payload(one) for one, _ in [*layers, *more])
    theirs = b"".join(payload(other) for _, other in [*layers, *more])
    pieces = [("float32", 12), ("bfloat16", 10), ("float8_e4m3fn", 7)]
    found = _native.distances(ours, theirs, pieces)
    for (difference, norm), first, second in zip(found, layers, more, strict=True):
        sums = [sum(both) for both in zip(expected(*first), expected(*second), strict=True)]
        assert [difference, norm] == pytest.approx(sums, rel=1e-9)


def test_a_difference_is_of_its_piece_alone() -> None:
    ours = torch.ones(12)
    theirs = ours.clone()
    theirs[5] = 3.0
    pieces = [("float32", 16)] * 3
    assert _native.distances(payload(ours), payload(theirs), pieces) == [(0.0, 4.0), (4.0, 4.0), (0.0, 4.0)]


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_on_one_side_is_infinitely_far(strange: float) -> None:
    number, none = payload(torch.tensor([1.0, 1.0])), payload(torch.tensor([1.0, strange]))
    pieces = [("float32", 8)]
    for ours, theirs in ((number, none), (none, number)):
        ((difference, norm),) = _native.distances(ours, theirs, pieces)
        assert difference == math.inf
        assert not math.isnan(norm)
    assert _native.distances(none, none, pieces) == [(0.0, 1.0)]


def test_any_buffer_is_read() -> None:
    memory = bytearray(payload(torch.ones(4)))
    assert _native.distances(memory, memoryview(memory), [("float32", 16)]) == [(0.0, 4.0)]


@pytest.mark.parametrize(
    ("ours", "theirs", "pieces", "why"),
    [
        (8, 4, [("float32", 4)], "same length"),
        (8, 8, [("float32", 12)], "pieces fill"),
        (12, 12, [("float32", 8)], "pieces fill"),
        (8, 8, [("float32", 8), ("float32", 8)], "pieces fill"),
        (8, 8, [("float32", 6)], "inside of an element"),
        (8, 8, [("bfloat16", 3), ("bfloat16", 5)], "inside of an element"),
        (8, 8, [("uint8", 8)], "uint8"),
        (8, 8, [("float32", 4), ("", 4)], "no numbers"),
        (8, 8, [], "pieces fill"),
        (8, 8, [("float32", 0)], "pieces fill"),
        (0, 0, [], "pieces fill"),
        (0, 0, [("float32", 4)], "pieces fill"),
        (8, 8, [("float32", 1 << 63), ("float32", (1 << 63) + 8)], "pieces fill"),
    ],
)
def test_payloads_that_pieces_do_not_fill_are_refused(
    ours: int, theirs: int, pieces: list[tuple[str, int]], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        _native.distances(bytes(ours), bytes(theirs), pieces)


@pytest.mark.parametrize("pieces", [[("float32", -4)], [(b"float32", 4)], [("float32",)], None])
def test_pieces_of_another_kind_are_refused(pieces: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        _native.distances(bytes(4), bytes(4), pieces)  # type: ignore[arg-type]


def test_other_threads_run_meanwhile() -> None:
    ours = bytes(64 << 20)
    began, ended = threading.Event(), threading.Event()

    def compare() -> None:
        began.set()
        for _ in range(4):
            _native.distances(ours, ours, [("float32", 1 << 20)])
        ended.set()

    thread = threading.Thread(target=compare)
    turns = 0
    thread.start()
    began.wait()
    while not ended.is_set():
        turns += 1
        time.sleep(0.001)
    thread.join()
    assert turns > 10, "of a thread that needs the GIL for each"
