"""What one prompt may cost: it is refused before others would have to wait for it."""

from __future__ import annotations

import pytest

from kvpool import ConfigError, KVPoolError, PrefixIndex
from kvpool.index.fleet import Fleet
from tests.index.fleets import a_worker, say
from tests.index.wire import batch, packed64, stored

BLOCKS = list(range(1, 4097))


@pytest.mark.parametrize("circle", [[1], [1, 2], [1, 2, 3], [*range(1, 100)], [2, *range(500, 700)]])
def test_hashes_that_go_in_circles_are_refused(circle: list[int]) -> None:
    fleet = Fleet()
    for place in range(40):
        fleet.add(a_worker(f"w{place}", port=5000 + place), "flag")
        say(fleet, f"default/w{place}", 0, 0, batch(stored([1, 2] if place % 2 else [1])))
    prompt = packed64((circle * 1000)[:1000])
    with pytest.raises(
        ConfigError, match="a prompt's block hashes are all different: that of block"
    ) as caught:
        fleet.lookup("m", hashes64=prompt)
    assert "\n" not in str(caught.value)
    for ask in (fleet.ask, fleet.lookup_tiers):
        with pytest.raises(ConfigError, match="comes again"):
            ask("m", hashes64=prompt)
    assert fleet.lookup("m", hashes64=packed64(BLOCKS)).device_blocks[:2] == (1, 2)


def test_a_match_that_others_would_wait_for_too_long_is_refused() -> None:
    """A worker that holds every other block changes the set at each; windows are looked for at each change."""
    index = PrefixIndex(reuse_reports=False, block_tokens=16)
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 33}
    both = batch(stored(BLOCKS, group_idx=0), stored(BLOCKS, group_idx=1, **window))
    for place in range(600):
        index.apply(f"w{place}", both)
    assert len(index.match(packed64(BLOCKS))) == 600
    index.apply("half", batch(stored(BLOCKS[::2])))
    with pytest.raises(KVPoolError, match="name candidates, or ask for a shorter part of it") as caught:
        index.match(packed64(BLOCKS))
    assert not isinstance(caught.value, ConfigError), "the request is well-formed: it is a limit"
    assert len(index.match(packed64(BLOCKS[:100]))) == 601
    (row,) = index.match(packed64(BLOCKS), workers=["w7"])
    assert row.device_blocks == 4096
