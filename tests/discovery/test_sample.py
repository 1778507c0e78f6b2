"""The sample of an engine's requests: how its rate follows the load, what a document has, what a reader takes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpool.discovery import sample
from kvpool.discovery.sample import Sample, Sampler, SampleWindow, largest, unpack_sample
from kvpool.discovery.traffic import MAX_DOCUMENT_NBYTES, WINDOWS, Seen, pack_traffic

EPOCH_S = 1e9
DRAW = np.random.default_rng(5)


def numbers(count: int) -> sample.Numbers:
    return DRAW.integers(0, 1 << 64, count, dtype=np.uint64)


def read(window: SampleWindow, sampler: Sampler, now_s: float, known: tuple[int, int] = (0, 0)) -> Any:
    part = window.pack(sampler.take(), now_s, EPOCH_S + now_s)
    assert part is not None
    assert len(pack_traffic({name: Seen() for name in WINDOWS}, part)) <= MAX_DOCUMENT_NBYTES
    return unpack_sample(part, known)


def test_a_quiet_engine_samples_all() -> None:
    sampler, window = Sampler(0.0), SampleWindow()
    asked = [numbers(count) for count in (3, 5, 2)]
    for at, prompt in enumerate(asked):
        sampler.add(prompt, float(at))
    found, known = read(window, sampler, 4.0)
    assert found.shift == 0
    assert (found.at_s - EPOCH_S).tolist() == [0.0, 1.0, 2.0]
    assert (found.requests.tolist(), found.blocks.tolist(), found.sampled.tolist()) == (
        [1] * 3,
        [3, 5, 2],
        [3, 5, 2],
    )
    assert found.numbers.tolist() == np.concatenate(asked).tolist()
    assert known == (3, 10)


def test_a_reader_takes_each_request_once() -> None:
    sampler, window = Sampler(0.0), SampleWindow()
    sampler.add(numbers(3), 1.0)
    first, known = read(window, sampler, 2.0)
    again, same = unpack_sample(window.pack([], 3.0, EPOCH_S), known)
    assert (len(first.sampled), len(again.sampled), same) == (1, 0, known)
    sampler.add(numbers(4), 4.0)
    later, known = read(window, sampler, 5.0, known)
    assert (later.requests.tolist(), later.blocks.tolist(), known) == ([1], [4], (2, 7))


def test_requests_leave_the_document_with_age_and_are_not_counted_by_who_missed_them() -> None:
    sampler, window = Sampler(0.0), SampleWindow()
    sampler.add(numbers(3), 1.0)
    read(window, sampler, 2.0)
    sampler.add(numbers(4), 2.0 + sample.KEEP_S)
    found, known = read(window, sampler, 2.0 + sample.KEEP_S)
    assert (found.requests.tolist(), found.blocks.tolist(), known) == ([1], [4], (2, 7))
    assert window.pack([], 100.0 + sample.KEEP_S, EPOCH_S) is None


def test_the_rate_falls_with_the_load_and_rises_again() -> None:
    sampler, window = Sampler(0.0), SampleWindow()
    for request in range(300):
        sampler.add(numbers(1000), request / 100)
    found, known = read(window, sampler, 3.0)
    assert 5 <= found.shift <= 9
    assert (found.numbers <= largest(found.shift)).all()
    assert len(found.numbers) == pytest.approx(300_000 / 2**found.shift, rel=0.2)
    assert (int(found.requests.sum()), int(found.blocks.sum()), known[0]) == (known[0], known[1], 300)
    for interval in range(1, 12):
        sampler.add(numbers(10), interval * sample.INTERVAL_S + 1)
    sampler.take()
    sampler.add(numbers(10), 500.0)
    (last,) = sampler.take()
    assert last.shift == 0


@pytest.mark.parametrize(("requests", "blocks"), [(20_000, 1), (20, 100_000), (2000, 700)])
def test_a_document_is_bounded_whatever_comes(requests: int, blocks: int) -> None:
    sampler, window = Sampler(0.0), SampleWindow()
    for request in range(requests):
        sampler.add(numbers(blocks), request * 40 / requests)
        assert len(sampler._new) <= sample.MAX_HELD
    found, _ = read(window, sampler, 40.0)
    assert 0 < len(found.sampled) <= sample.MAX_REQUESTS
    assert 0 < len(found.numbers) <= sample.MAX_BLOCKS


def test_what_nobody_takes_is_bounded() -> None:
    sampler = Sampler(0.0)
    for request in range(sample.MAX_HELD + 500):
        sampler.add(numbers(1), float(request))
    taken = sampler.take()
    assert len(taken) == sample.MAX_HELD
    assert taken[-1].requests == sample.MAX_HELD + 500


def test_a_request_whose_blocks_all_left_the_sample_is_counted_once() -> None:
    """It had one when it was read first, then the rate fell."""
    sampler, window = Sampler(0.0), SampleWindow()
    sampler.add(np.array([1], np.uint64), 1.0)
    sampler.add(np.array([largest(0)]), 1.0)
    _, known = read(window, sampler, 2.0)
    sampler.add(np.array([largest(0)] * 5, np.uint64), 2.0)
    sampler._shift = 3
    sampler.add(np.array([7, largest(0)], np.uint64), 3.0)
    found, known = read(window, sampler, 4.0, known)
    assert (found.shift, found.requests.tolist(), found.blocks.tolist()) == (3, [2], [7])
    assert known == (4, 9)


GOOD: dict[str, Any] = {
    "written_s": EPOCH_S, "shift": 4, "first": [5, 100], "ages_ms": np.array([9, 8], "<u4").tobytes(),
    "requests": np.array([1, 3], "<u4").tobytes(), "blocks": np.array([10, 30], "<u4").tobytes(),
    "sampled": np.array([1, 2], "<u2").tobytes(), "numbers": np.array([1, 2, 3], "<u8").tobytes(),
}  # fmt: skip


@pytest.mark.parametrize(
    "spoilt",
    [
        {"written_s": -1.0}, {"written_s": float("nan")}, {"written_s": 1}, {"written_s": None},
        {"shift": 33}, {"shift": -1}, {"shift": True}, {"shift": "4"}, {"first": [5]}, {"first": [5, 1 << 60]},
        {"first": [-1, 5]}, {"first": 7}, {"ages_ms": b"123"}, {"ages_ms": "text"}, {"ages_ms": bytes(4)},
        {"requests": np.array([1, 1], "<u4").tobytes()}, {"requests": np.array([3, 1], "<u4").tobytes()},
        {"requests": bytes(8)}, {"blocks": np.array([10, 11], "<u4").tobytes()}, {"blocks": bytes(8)},
        {"sampled": np.array([1, 3], "<u2").tobytes()}, {"sampled": None}, {"numbers": bytes(16)},
        {"numbers": np.array([1, 2, 1 << 63], "<u8").tobytes()}, {"numbers": bytes(8 * (sample.MAX_BLOCKS + 1))},
        {"numbers": 5}, {"numbers": b""},
        {name: bytes(4 * (sample.MAX_REQUESTS + 1)) for name in ("ages_ms", "requests", "blocks")},
    ],
    ids=str,
)  # fmt: skip
def test_a_part_that_makes_no_sense_is_refused(spoilt: dict[str, Any]) -> None:
    found, known = unpack_sample(GOOD, (0, 0))
    assert (found.requests.tolist(), found.blocks.tolist(), known) == ([1, 2], [10, 20], (8, 130))
    with pytest.raises((ValueError, TypeError, KeyError)):
        unpack_sample(GOOD | spoilt, (0, 0))


@pytest.mark.parametrize("part", [7, "text", [], {}, [1, 2], {"shift": 1}, b"bytes"])
def test_what_is_no_part_is_refused(part: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        unpack_sample(part, (0, 0))


def test_counts_that_go_back_are_never_negative() -> None:
    found, _ = unpack_sample(GOOD, (6, 1 << 40))
    assert isinstance(found, Sample)
    assert (found.requests.tolist(), found.blocks.tolist()) == ([2], [2])
