"""A fleet at rest: what is frozen comes back as it was, nothing damaged is believed, nobody is credited unproved.

Over 400 lines because each damage to a snapshot is tried on the same one.
"""

from __future__ import annotations

import json
import random
import struct
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgpack
import pytest

from kvpool import PrefixIndex, SnapshotRefused, Worker, _native
from kvpool.discovery.worker import Position
from kvpool.index import Publisher
from kvpool.index.fleet import workers
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.sequence import batch_digest
from kvpool.index.fleet.snapshot import PartitionState, Snapshot, pack, unpack
from kvpool.index.fleet.workers import RESTORED_LEASE_S
from tests.support.fleets import Clock, a_worker, say
from tests.support.media import ENCODER, OTHER_ENCODER, follow_outputs
from tests.support.wire import batch, packed64, removed, stored

NAMESPACE = "a" * 32
HEADER_NBYTES = 32
GOLDEN = Path(__file__).parents[2] / "golden" / "snapshots.json"


def taken(fleet: Fleet, life: str = "") -> bytes:
    return b"".join(pack(Snapshot(1000.0, life, fleet.snapshot())))


def restored(
    packed: bytes,
    *,
    age_s: float = 0.0,
    flags: tuple[str, ...] = (),
    life: str | None = "",
    clock: Any = None,
) -> tuple[Fleet, dict[str, dict[int, Position]]]:
    fleet = Fleet(clock=clock or time.monotonic)
    followed: dict[str, dict[int, Position]] = {}
    feed = Mock(is_alive=True)
    feed.follow = lambda worker, ranks: followed.update(
        {worker.id: {rank.publisher.dp_rank: rank.position for rank in ranks if rank.position}}
    )
    fleet.feed = feed
    fleet.restore(unpack(packed), age_s=age_s, flags=flags, life=life)
    return fleet, followed


def rows(fleet: Fleet, prompt: list[int], model: str = "m") -> list[tuple[Any, ...]]:
    answer = fleet.lookup(model, hashes64=packed64(prompt))
    return [
        (
            row.worker,
            row.dp_rank,
            row.device_blocks,
            row.local_blocks,
            row.pool_blocks,
            row.sequence,
            row.stale,
        )
        for row in answer
    ]


def a_fleet(clock: Clock) -> Fleet:
    fleet = Fleet(clock=clock)
    fleet.add(a_worker("a", ranks=2, namespace=NAMESPACE, incarnation="1"), "pool")
    fleet.add(a_worker("b"), "flag")
    fleet.add(a_worker("c", model="n", block_tokens=32), "call", 100.0)
    say(fleet, "default/a", 0, 7, batch(stored([1, 2, 3]), stored([1, 2], medium="STORAGE")))
    say(fleet, "default/a", 0, 8, batch(stored([3, 4], parent=2), dp_rank=0))  # 3 twice
    say(fleet, "default/a", 1, 2, batch(stored([1], medium="CPU"), dp_rank=1))
    say(fleet, "default/b", 0, 0, batch(stored([1, 2])))
    say(fleet, "default/c", 0, 5, batch(stored([1])))
    return fleet


def test_what_is_frozen_comes_back_and_is_credited_when_it_is_proved() -> None:
    clock = Clock()
    fleet = a_fleet(clock)
    again, followed = restored(taken(fleet, "life"), flags=("default/b",), life="life", clock=clock)
    assert followed == {
        "default/a": {
            0: Position(8, batch_digest(batch(stored([3, 4], parent=2), dp_rank=0))),
            1: Position(2, batch_digest(batch(stored([1], medium="CPU"), dp_rank=1))),
        },
        "default/b": {0: Position(0, batch_digest(batch(stored([1, 2]))))},
        "default/c": {0: Position(5, batch_digest(batch(stored([1]))))},
    }
    assert rows(again, [1, 2, 3, 4]) == [
        ("a", 0, 0, 0, 2, 8, True), ("a", 1, 0, 0, 2, 2, True), ("b", 0, 0, 0, 0, 0, True),
    ]  # fmt: skip
    assert again.joining == 4
    for worker_id, positions in followed.items():
        for dp_rank in positions:
            again.rank(worker_id, dp_rank).heard()
    assert again.joining == 0
    assert rows(again, [1, 2, 3, 4]) == rows(fleet, [1, 2, 3, 4])
    assert rows(again, [1], "n") == rows(fleet, [1], "n") == [("c", 0, 1, 1, 0, 5, False)]
    for one in (fleet, again):  # and it goes on as the other does: copies are counted
        say(one, "default/a", 0, 9, batch(removed([3])))
        assert rows(one, [1, 2, 3, 4])[0] == ("a", 0, 4, 4, 2, 9, False)
        say(one, "default/a", 0, 10, batch(removed([3])))
        assert rows(one, [1, 2, 3, 4])[0] == ("a", 0, 2, 2, 2, 10, False)
    here, there = ([(one.digest, one.blocks) for status in each.workers() for one in status.publishers]
                   for each in (fleet, again))  # fmt: skip
    assert here == there
    assert all(digest and blocks for digest, blocks in here)


def test_what_comes_back_is_dropped_when_its_publisher_is_another() -> None:
    again, _ = restored(taken(a_fleet(Clock())), flags=("default/b",))
    again.rank("default/b", 0).reset("its publisher was started anew")
    again.rank("default/b", 0).heard()
    assert rows(again, [1, 2])[2] == ("b", 0, 0, 0, 0, 0, False)
    assert again.add(a_worker("a", ranks=2, namespace=NAMESPACE, incarnation="2"), "pool") == "replaced"
    again.rank("default/a", 0).heard()
    assert rows(again, [1, 2])[0] == ("a", 0, 0, 0, 0, 0, False)
    assert again.add(a_worker("c", model="n", block_tokens=32), "call") == "renewed"


def test_who_comes_back_and_for_how_long() -> None:
    clock = Clock()
    packed = taken(a_fleet(clock))

    def leases(**options: Any) -> dict[str, float]:
        fleet, followed = restored(packed, clock=clock, **options)
        statuses = {status.worker.id: status.lease_left_ms / 1000 for status in fleet.workers()}
        assert followed.keys() == statuses.keys()
        return statuses

    assert leases() == {"default/a": RESTORED_LEASE_S, "default/c": 100.0}
    assert leases(flags=("default/b",), life=None, age_s=30) == {"default/b": 0, "default/c": 70.0}
    assert leases(age_s=100) == {"default/a": RESTORED_LEASE_S}
    assert leases(age_s=100, life=None) == {}


def test_workers_whose_table_is_empty_come_back() -> None:
    fleet = Fleet()
    for place, name in enumerate("ab"):
        fleet.add(a_worker(name, port=6000 + 10 * place), "call")
    back, _ = restored(taken(fleet))
    assert sorted(worker.name for worker in back.followed()) == ["a", "b"]


def test_the_names_of_a_worker_come_back() -> None:
    fleet = Fleet()
    fleet.add(a_worker("a", names=("gpt-4", "x")), "call")
    fleet.add(a_worker("b", port=6000), "call")
    back, _ = restored(taken(fleet))
    assert {worker.name: worker.names for worker in back.followed()} == {"a": ("gpt-4", "x"), "b": ()}
    assert [row.worker for row in back.lookup("x", hashes64=packed64([1]))] == ["a"]


def test_whose_outputs_of_encoders_a_worker_loads_comes_back() -> None:
    """The outputs themselves are found again by the first round."""
    fleet = Fleet()
    fleet.add(a_worker("a", media_namespaces=(ENCODER.hex, OTHER_ENCODER.hex)), "call")
    fleet.add(a_worker("b", names=("x",), port=6000), "call")
    follow_outputs(fleet, ["one"])
    asked = {"hashes64": packed64([1]), "multimodal": [("one", 0, 9)]}
    assert fleet.lookup("m", **asked).pool_media == (1, 0)
    back, _ = restored(taken(fleet))
    assert {worker.name: worker.media_namespaces for worker in back.followed()} == {
        "a": (ENCODER.hex, OTHER_ENCODER.hex),
        "b": (),
    }
    assert (back.lookup("m", **asked).pool_media, back.totals().pool_media) == ((0, 0), 0)
    follow_outputs(back, ["one"])
    assert back.lookup("m", **asked).pool_media == (1, 0)


def test_the_pool_comes_back_while_it_is_the_same_one() -> None:
    fleet = a_fleet(Clock())
    for life, then, blocks in [("x", "x", 2), ("x", "y", 0), ("", "", 0), ("x", "", 0), ("", "x", 0)]:
        again, _ = restored(taken(fleet, life), life=then)
        assert rows(again, [1, 2])[0][4] == blocks
        say(again, "default/a", 0, 9, batch(stored([1], medium="STORAGE")))
        assert rows(again, [1, 2])[0][4] == max(1, blocks)


def test_a_rank_without_proof_begins_with_nothing() -> None:
    """No replay endpoint, forgotten, or never heard: there is nothing by which its publisher could be known again."""
    fleet = Fleet()
    fleet.add(a_worker("mute", publishers=(Publisher(0, "tcp://127.0.0.1:1"),)), "call")
    fleet.add(a_worker("reset"), "call")
    fleet.add(a_worker("new"), "call")
    say(fleet, "default/mute", 0, 4, batch(stored([1])))
    say(fleet, "default/reset", 0, 4, batch(stored([1])))
    fleet.rank("default/reset", 0).reset("batch 5: malformed")
    again, followed = restored(taken(fleet))
    assert followed == {"default/mute": {}, "default/reset": {}, "default/new": {}}
    for worker_id in followed:
        again.rank(worker_id, 0).heard()
    assert rows(again, [1]) == [(name, 0, 0, 0, 0, 0, False) for name in ("mute", "new", "reset")]
    say(again, "default/mute", 0, 5, batch(stored([1])))
    assert rows(again, [1])[0] == ("mute", 0, 1, 1, 0, 5, False)


def test_a_start_of_now_never_gets_the_blocks_of_one_before() -> None:
    """Holders have numbers; those of what stays away are not given again."""
    fleet = Fleet()
    for number in range(4):
        fleet.add(a_worker(f"w{number}"), "flag")
        say(fleet, f"default/w{number}", 0, 1, batch(stored([number])))
    packed = taken(fleet)
    for flags in [(), ("default/w0",), ("default/w3",), ("default/w1", "default/w2")]:
        again, _ = restored(packed, flags=flags)
        for number in range(4, 10):
            again.add(a_worker(f"w{number}"), "flag")
            again.rank(f"default/w{number}", 0).heard()
        assert not any(row[2] for number in range(10) for row in rows(again, [number]))
        assert again.totals().blocks == len(flags)


def test_an_older_or_smaller_index_keeps_to_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = taken(a_fleet(Clock()))
    monkeypatch.setattr(workers, "MAX_WORKERS", 1)
    fleet = Fleet()
    with pytest.raises(SnapshotRefused, match="follows 1 workers already"):
        fleet.restore(unpack(packed), age_s=0, flags=("default/b",), life="")
    assert fleet.workers() == []
    assert fleet.add(a_worker("x"), "flag") == "new"


def test_batches_that_come_meanwhile_are_in_it_as_a_whole_or_not_at_all() -> None:
    """The rows of a snapshot are exactly those of the position that it names, rank by rank."""
    fleet = Fleet()
    draw = random.Random(3)
    payloads = [
        batch((stored if draw.random() < 0.6 else removed)([draw.randrange(12) for _ in range(3)]), at_s=at)
        for at in range(6000)
    ]
    truths: list[Any] = []
    plain = PrefixIndex()
    for payload in payloads:
        plain.apply("w", payload)
        truths.append(plain.content("w"))
    for name in "abc":
        fleet.add(a_worker(name), "call")

    def publish(name: str) -> None:
        for number, payload in enumerate(payloads):
            say(fleet, f"default/{name}", 0, number, payload)

    threads = [threading.Thread(target=publish, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    met = set()
    while any(thread.is_alive() for thread in threads):
        again, followed = restored(taken(fleet))
        for status in again.workers():
            (one,) = status.publishers
            if followed[status.worker.id]:
                assert (one.digest, one.blocks) == truths[one.sequence], one
                met.add(one.sequence)
    for thread in threads:
        thread.join()
    assert len(met) > 1


# ---- bytes


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text()), ids=lambda case: case["name"])
def test_golden_snapshots(case: dict[str, Any]) -> None:
    """What an earlier version has left on a disk is read by every later one, or refused by its number."""
    fleet, followed = restored(bytes.fromhex(case["hex"]), life="run")
    ((worker_id, positions),) = followed.items()
    assert [list(position) for position in positions.values()] == case["positions"]
    for dp_rank in positions:
        fleet.rank(worker_id, dp_rank).heard()
    answer = fleet.lookup("m", hashes64=packed64(case["prompt"]))
    assert [list(answer.device_blocks), list(answer.local_blocks), list(answer.pool_blocks)] == [
        case["device"], case["local"], case["pool"],
    ]  # fmt: skip
    assert list(fleet.lookup("m", hashes64=packed64(case["alone"])).local_blocks) == case["alone_local"]
    for number in range(case["copies"]):
        assert fleet.lookup("m", hashes64=packed64([case["copied"]])).device_blocks[0] == 1
        say(fleet, worker_id, 0, 42 + number, batch(removed([case["copied"]])))
    assert fleet.lookup("m", hashes64=packed64([case["copied"]])).device_blocks[0] == 0
    # Who had told only a part is asked for the rest, and nobody else.
    assert fleet.incomplete() == [(worker_id, rank) for rank, why in enumerate(case["lacking"]) if why]
    again = unpack(taken(fleet, "run"))
    assert [rank.incomplete_reason for rank in again.partitions[0].workers[0].ranks] == case["lacking"]
    assert (
        unpack(bytes.fromhex(case["hex"])).partitions[0].workers[0].worker
        == again.partitions[0].workers[0].worker
    )


def test_a_byte_that_is_changed_missing_or_too_many_is_noticed() -> None:
    packed = taken(a_fleet(Clock()))
    rng = random.Random(1)
    places = [*range(HEADER_NBYTES + 8), *(rng.randrange(len(packed)) for _ in range(300)), len(packed) - 1]
    for at in places:
        changed = bytearray(packed)
        changed[at] ^= 1 << rng.randrange(8)
        with pytest.raises(SnapshotRefused):
            restored(bytes(changed))
        with pytest.raises(SnapshotRefused):
            restored(packed[:at])
    with pytest.raises(SnapshotRefused):
        restored(packed + b"\0")


def test_versions_and_other_files_are_named() -> None:
    packed = taken(a_fleet(Clock()))
    with pytest.raises(SnapshotRefused, match="is of version 2, and this index reads version 1"):
        unpack(packed[:8] + struct.pack("<I", 2) + packed[12:])
    with pytest.raises(SnapshotRefused, match="this is no snapshot of an index"):
        unpack(b"#!/bin/sh\n" * 10)
    with pytest.raises(SnapshotRefused, match="this is no snapshot of an index"):
        unpack(b"")


# ---- a writer that lies, with the right checksum


def sealed(head: Any, images: bytes = b"") -> bytes:
    packed = msgpack.packb(head)
    unproved = struct.pack("<8sIIQQ", b"KVPINDEX", 1, 0, len(packed), 0)
    checksum = _native.checksum(unproved + packed)
    return struct.pack("<8sIIQQ", b"KVPINDEX", 1, 0, len(packed), checksum) + packed + images


def unsealed(packed: bytes) -> tuple[Any, bytes]:
    (nbytes,) = struct.unpack_from("<Q", packed, 16)
    return msgpack.unpackb(packed[HEADER_NBYTES : HEADER_NBYTES + nbytes]), packed[HEADER_NBYTES + nbytes :]


WORKER, RANKS = ("partitions", 0, "workers", 0), ("partitions", 0, "workers", 0, 11)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((), None), ((), []), (("life",), 5), (("written_at_s",), "x"), (("partitions",), 7), (("partitions", 0), {}),
        (("partitions", 0, "image_nbytes"), -1), (("partitions", 0, "image_nbytes"), 1.5),
        (("partitions", 0, "image_nbytes"), 0), (("partitions", 0, "namespaces"), [5]),
        ((*WORKER, 0), "a/b"), ((*WORKER, 1), ""), ((*WORKER, 1), 7), ((*WORKER, 2), None), ((*WORKER, 3), "md5"),
        ((*WORKER, 7), "zz"), ((*WORKER, 8), 0), ((*WORKER, 9), "god"), ((*WORKER, 10), "1"), (WORKER, []),
        ((*RANKS, 0, 0), "x"), ((*RANKS, 0, 0), 1), ((*RANKS, 0, 1), "http://x"), ((*RANKS, 0, 2), ""), (RANKS, []),
        ((*RANKS, 0, 3), "pool/" + NAMESPACE), ((*RANKS, 0, 3), "rank/1"), ((*RANKS, 0, 3), "rank/-1"),
        ((*RANKS, 0, 4), [1]), ((*RANKS, 0, 4), [-1, 1]), ((*RANKS, 0, 4), [1, 0]), ((*RANKS, 0, 4), [1.5, 1]),
        ((*RANKS, 0, 4), [True, 1]), ((*RANKS, 0, 5), None),
    ],
)  # fmt: skip
def test_a_head_that_makes_no_sense_is_refused(place: tuple[Any, ...], value: Any) -> None:
    head, images = unsealed(taken(a_fleet(Clock())))
    if place:
        inner = head
        for step in place[:-1]:
            inner = inner[step]
        inner[place[-1]] = value
    else:
        head = value
    fleet = Fleet()
    with pytest.raises(SnapshotRefused) as caught:
        fleet.restore(unpack(sealed(head, images)), age_s=0, flags=("default/b",), life="")
    assert "\n" not in str(caught.value)
    assert fleet.workers() == []


def test_a_worker_that_is_there_twice_is_refused() -> None:
    head, images = unsealed(taken(a_fleet(Clock())))
    head["partitions"][0]["workers"] *= 2
    with pytest.raises(SnapshotRefused, match="is there twice"):
        restored(sealed(head, images))
    empty = PrefixIndex().image().pack()
    mixed = [one["workers"][0] for one in unsealed(taken(a_fleet(Clock())))[0]["partitions"]]
    for worker in mixed:
        worker[11] = [[*rank[:4], None, ""] for rank in worker[11]]
    head = {**head, "partitions": [{"image_nbytes": len(empty), "namespaces": [], "workers": mixed}]}
    with pytest.raises(SnapshotRefused, match="do not belong together"):
        restored(sealed(head, empty))


def test_names_in_an_image_that_are_no_text_are_refused() -> None:
    index = PrefixIndex()
    index.apply("rank/0", batch(stored([1])))
    packed = bytearray(index.image().pack())
    at = packed.index(b"rank/0")
    packed[at] = 0xFF
    packed[24:32] = bytes(8)
    packed[24:32] = struct.pack("<Q", _native.checksum(bytes(packed)))
    with pytest.raises(SnapshotRefused, match="its names are no text"):
        PrefixIndex.of_image(packed)
    with pytest.raises(SnapshotRefused):
        Fleet().restore(Snapshot(0.0, "", (PartitionState((), (), packed),)), age_s=0, flags=(), life="")


def test_a_worker_of_every_kind_is_packed() -> None:
    publishers = (Publisher(3, "ipc:///x", "ipc:///y"),)
    worker = Worker("w", "org/m", 16, "0" * 16, publishers, "t", "xxhash_cbor", "http://w", "i", NAMESPACE)
    fleet = Fleet(clock=Clock())
    fleet.add(worker, "pool", 60)
    fleet.rank("t/w", 3).apply((1 << 64) - 2, batch(stored([1])))
    ((partition,), state) = (unpack(taken(fleet)).partitions, fleet.snapshot()[0].workers[0])
    assert partition.workers == (state,)
    assert state.worker == worker
    assert state.ranks[0].position == Position((1 << 64) - 2, batch_digest(batch(stored([1]))))
