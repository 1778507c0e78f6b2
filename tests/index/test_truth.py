"""Rules of the index that a user would check first, through everything: publishers, the feed, gRPC, a client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvpool import BlockHasher, IndexClient
from kvpool.index import Row, Worker
from kvpool.index.fleet import Fleet
from kvpool.index.follow import subscriber as feed_module
from kvpool.index.follow.subscriber import Subscriber
from kvpool.key.hashing import seed_id
from tests.support.deadlines import eventually
from tests.support.feeds import Misbehaving, misbehaving
from tests.support.fleets import serving
from tests.support.wire import batch, cleared, removed, stored

pytestmark = pytest.mark.usefixtures("grpc_started")

WITHIN_S = 60.0
BLOCK = 16
TOKENS = list(range(1000, 1000 + 8 * BLOCK))
HASHER = BlockHasher(BLOCK)
HELLO = batch(at_s=0.5)  # batch 0 of everybody: a row of sequence 0 may also be one before the first


@dataclass
class Rig:
    client: IndexClient
    parts: ExitStack

    def worker(self, name: str, ranks: int = 1, **fields: Any) -> list[Misbehaving]:
        """A worker that is followed; the publishers of its ranks."""
        publishers = [self.parts.enter_context(misbehaving()) for _ in range(ranks)]
        for publisher in publishers:
            publisher.publish(HELLO)
        self.register(name, publishers, **fields)
        return publishers

    def register(self, name: str, publishers: list[Misbehaving], **fields: Any) -> bool:
        known = tuple(replace(one.publisher, dp_rank=rank) for rank, one in enumerate(publishers))
        return self.client.register(Worker(name, "m", BLOCK, seed_id(None), known, **fields))

    def rows(self, tokens: list[int] = TOKENS, **hashed: Any) -> dict[tuple[str, int], Row]:
        answer = self.client.lookup("m", token_ids=tokens, **hashed)
        return {(row.worker, row.dp_rank): row for row in answer}

    def knows(self, number: int, worker: str, rank: int = 0) -> Row:
        """The row of a rank when it is true as of its batch ``number``."""
        found: list[Row] = []

        def there() -> bool:
            found[:] = [self.rows()[worker, rank]]
            return not found[0].stale and found[0].sequence == number

        assert eventually(there, within_s=WITHIN_S), found
        return found[0]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(feed_module, "PROBE_S", 0.1)
    monkeypatch.setattr(feed_module, "ANSWER_S", 0.3)
    fleet = Fleet()
    with ExitStack() as parts:
        served = parts.enter_context(serving(fleet, feed=Subscriber()))
        parts.callback(served.fleet.close)
        client = parts.enter_context(IndexClient(served.target, timeout_s=WITHIN_S))
        yield Rig(client, parts)


IMAGE = [("image-1", 3 * BLOCK + 2, 10)]
CONTENT: dict[str, dict[str, Any]] = {
    "plain": {},
    "salted": {"cache_salt": "a"},
    "salted otherwise": {"cache_salt": "b"},
    "adapter": {"lora": ("l", "/models/l")},
    "adapter of another path": {"lora": ("l", "/models/other")},
    "image": {"multimodal": IMAGE},
    "another image": {"multimodal": [("image-2", *IMAGE[0][1:])]},
    "the image elsewhere": {"multimodal": [("image-1", 3 * BLOCK + 3, 10)]},
}  # fmt: skip
BEFORE_THE_IMAGE = 3


def test_what_is_hashed_with_it_tells_prompts_apart(rig: Rig) -> None:
    """The same tokens with another salt, adapter or image are another prompt."""
    for name, hashed in CONTENT.items():
        (publisher,) = rig.worker(name)
        publisher.publish(batch(stored(HASHER.hashes(TOKENS, **hashed), token_ids=TOKENS)))
    for name in CONTENT:
        rig.knows(1, name)
    images = {"plain", "image", "another image", "the image elsewhere"}
    for asked, hashed in CONTENT.items():
        for (told, _), row in rig.rows(**hashed).items():
            alike = BEFORE_THE_IMAGE if {asked, told} <= images else 0
            assert row.device_blocks == (8 if asked == told else alike), (asked, told)


def test_tiers_of_one_worker_and_what_a_clear_leaves(rig: Rig) -> None:
    pool = "a" * 32
    (publisher,) = rig.worker("w", namespace=pool)
    hashes = HASHER.hashes(TOKENS)
    publisher.publish(
        batch(
            stored(hashes[:3]),
            stored(hashes[3:5], medium="CPU", block_size=0),  # without parent and tokens
            stored(hashes[5:6], medium="DISK"),
            stored(hashes[:7], medium="STORAGE"),
        )
    )
    row = rig.knows(1, "w")
    assert (row.device_blocks, row.local_blocks, row.pool_blocks, row.prompt_blocks) == (3, 6, 7, 8)
    publisher.publish(batch(removed(hashes[4:5], medium="CPU")))
    row = rig.knows(2, "w")
    assert (row.device_blocks, row.local_blocks) == (3, 4)
    publisher.publish(batch(cleared()))
    row = rig.knows(3, "w")
    assert (row.device_blocks, row.local_blocks, row.pool_blocks) == (0, 0, 7)


def test_ranks_of_one_worker_are_told_apart(rig: Rig) -> None:
    publishers = rig.worker("w", ranks=3)
    hashes = HASHER.hashes(TOKENS)
    for rank, publisher in enumerate(publishers):
        publisher.publish(batch(stored(hashes[: rank + 1]), dp_rank=rank))
    assert [rig.knows(1, "w", rank).device_blocks for rank in range(3)] == [1, 2, 3]
    publishers[1].publish(batch(cleared(), dp_rank=1))
    assert rig.knows(2, "w", 1).device_blocks == 0
    assert [rig.knows(1, "w", rank).device_blocks for rank in (0, 2)] == [1, 3]


def test_copies_holes_and_what_fills_them(rig: Rig) -> None:
    (publisher,) = rig.worker("w")
    hashes = HASHER.hashes(TOKENS)
    publisher.publish(batch(stored(hashes), stored(hashes[7:], parent=hashes[6])))
    publisher.publish(batch(removed(hashes[7:])))
    assert rig.knows(2, "w").device_blocks == 8, "there were two copies of the last block"
    publisher.publish(batch(removed(hashes[2:3])))
    assert rig.knows(3, "w").device_blocks == 2
    publisher.publish(batch(stored(hashes[2:3], parent=hashes[1])))
    assert rig.knows(4, "w").device_blocks == 8
    publisher.publish(batch(stored(hashes), stored(hashes)))  # reports of reused blocks
    publisher.publish(batch(removed(hashes[::-1])))
    assert rig.knows(6, "w").device_blocks == 0


def test_a_batch_that_comes_twice_or_late_is_one_batch(rig: Rig) -> None:
    (publisher,) = rig.worker("w")
    hashes = HASHER.hashes(TOKENS)
    told = [HELLO]
    told += [batch(stored(hashes[n : n + 1], parent=hashes[n - 1] if n else None), at_s=n) for n in range(6)]
    for number in (1, 2, 3):
        publisher.publish(told[number])
    rig.knows(3, "w")
    for number in (4, 5, 6):
        publisher.publish(told[number], lost=True)
    for number in (6, 4, 5, 5, 2, 6):
        publisher.send(b"", number.to_bytes(8, "big"), told[number])
    assert rig.knows(6, "w").device_blocks == 6
    publisher.publish(batch(removed(hashes[4:5]), at_s=9))
    assert rig.knows(7, "w").device_blocks == 4, "the block was stored once, however often that was told"
    (status,) = rig.client.workers()
    assert (status.publishers[0].batches, status.publishers[0].resets) == (8, 0)


def test_the_same_number_and_events_at_another_time_are_another_life(rig: Rig) -> None:
    """An engine that was started anew and has done the same again: nothing but the batch's time says so."""
    (publisher,) = rig.worker("w")
    hashes = HASHER.hashes(TOKENS)
    publisher.publish(batch(stored(hashes[:4]), at_s=1))
    publisher.publish(batch(stored(hashes[4:], parent=hashes[3]), at_s=2))
    assert rig.knows(2, "w").device_blocks == 8
    publisher.close()
    with misbehaving(publisher.ports) as again:
        again.publish(HELLO)
        again.publish(batch(stored(hashes[:4]), at_s=11))

        def only_the_new() -> bool:
            row = rig.rows()["w", 0]
            return not row.stale and (row.sequence, row.device_blocks) == (1, 4)

        assert eventually(only_the_new, within_s=WITHIN_S)
        assert rig.client.workers()[0].publishers[0].resets == 1


def test_another_incarnation_holds_nothing_of_the_one_before(rig: Rig) -> None:
    (publisher,) = rig.worker("w", incarnation="1")
    publisher.publish(batch(stored(HASHER.hashes(TOKENS))))
    assert rig.knows(1, "w").device_blocks == 8
    publisher.close()
    with misbehaving(publisher.ports) as again:
        assert rig.register("w", [again], incarnation="2") is True
        row = rig.rows()["w", 0]
        assert row.device_blocks == 0, "at once"
        again.publish(HELLO)
        again.publish(batch(stored(HASHER.hashes(TOKENS)[:2]), at_s=9))
        assert rig.knows(1, "w").device_blocks == 2


def test_a_gap_that_nothing_closes_clears_and_says_so(rig: Rig) -> None:
    (publisher,) = rig.worker("w")
    hashes = HASHER.hashes(TOKENS)
    publisher.publish(batch(stored(hashes[:2])))
    rig.knows(1, "w")
    publisher.mute = True
    for number in range(1, 5):
        publisher.publish(batch(removed(hashes[:1]), at_s=number), lost=True)
    publisher.publish(batch(stored(hashes[:1]), at_s=9))

    def stale() -> bool:
        row = rig.rows()["w", 0]
        return row.stale and (row.sequence, row.device_blocks) == (1, 0)

    assert eventually(stale, within_s=WITHIN_S)
    publisher.forget(6)
    publisher.mute = False
    assert rig.knows(6, "w").device_blocks == 1, "of what was told before nothing is left"
    (status,) = rig.client.workers()
    assert status.publishers[0].resets == 1
