"""A directory on a disk that hangs, is filled by others, or loses power."""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool import open_store
from kvpool.errors import StoreUnavailable
from kvpool.store import Store
from tests.support.conformance import MIB, key, keys, payload
from tests.support.deadlines import ends_within, eventually
from tests.support.disks import Disk, mounted
from tests.support.file_user import REPOSITORY
from tests.support.soak import SEARCH_S

NBYTES = 300_000
NUMBERS = 600
WRITER = """
import random, sys
from kvpool import open_store
from tests.support.conformance import key, payload
chance = random.Random(int(sys.argv[2]))
with open_store(sys.argv[1]) as store:
    print("begun", flush=True)
    while True:
        numbers = [chance.randrange({numbers}) for _ in range(16)]
        store.put_many([key(n) for n in numbers], [payload(n, {nbytes}) for n in numbers])
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with mounted(tmp_path) as disk:
        yield disk


def test_a_disk_that_hangs_costs_each_call_its_time_and_no_more(disk: Disk) -> None:
    with open_store(f"file://{disk.place}/pool?capacity=128MiB") as store:
        assert all(store.put_many(keys(8), [payload(number, MIB) for number in range(8)]))
        targets = [bytearray(MIB) for _ in range(8)]
        calls: list[Callable[[], object]] = [
            lambda: store.put_many(keys(12)[8:], [bytes(MIB)] * 4, timeout_s=0.5),
            lambda: store.get_many_into(keys(8), targets, timeout_s=0.5),
            lambda: store.contains_many(keys(8), timeout_s=0.5),
        ]
        with disk.hanging():
            for call in calls:
                with (
                    ends_within(5),
                    pytest.raises(StoreUnavailable, match=r"does not answer|no answer within 0\.5 s"),
                ):
                    call()
        assert eventually(lambda: _comes_back(store, targets))
        assert targets == [payload(number, MIB) for number in range(8)]
        assert store.put_many(keys(13)[12:], [bytes(MIB)]) == [True]


def _comes_back(store: Store, targets: list[bytearray]) -> bool:
    try:
        return store.get_many_into(keys(8), targets, timeout_s=1) == [True] * 8
    except StoreUnavailable:
        return False


def test_a_disk_that_others_fill_takes_less(disk: Disk) -> None:
    with open_store(f"file://{disk.place}/pool?capacity=1GiB") as store:
        for number in range(300):  # more than the disk has, in all
            assert store.put_many([key(number)], [payload(number, MIB)]) == [True]
        evicted = store.counters()["evicted"]
        assert evicted > 0
        with (disk.place / "other").open("wb", buffering=0) as other, contextlib.suppress(OSError):
            while other.write(bytes(MIB)):  # until nothing is left
                pass
        for number in range(300, 320):
            store.put_many([key(number)], [payload(number, MIB)])
        found = store.counters()
        assert found["evicted"] > evicted
        assert found["faults"] == found["damaged"] == 0
        assert shutil.disk_usage(disk.place).free > 10 * MIB, "what a pool leaves to others is free again"
        last = [number for number in range(310, 320) if store.contains_many([key(number)])[0]]
        assert last
        targets = [bytearray(MIB) for _ in last]
        assert all(store.get_many_into([key(number) for number in last], targets))
        assert targets == [payload(number, MIB) for number in last]


def test_power_that_is_lost_leaves_no_wrong_byte(disk: Disk, tmp_path: Path) -> None:
    """Names and bytes reach a disk in any order: a name may be back over the bytes of another record."""
    url = f"file://{disk.place}/pool?capacity=100MiB"
    program = WRITER.format(numbers=NUMBERS, nbytes=NBYTES)
    chance, end, hits = random.Random(), time.monotonic() + SEARCH_S, 0
    for round_number in range(1_000):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", program, url, str(2 * round_number + number)],
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            for number in range(2)
        ]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"begun\n"
        time.sleep(chance.uniform(0.5, 2))
        disk.lose_power()
        for writer in writers:
            writer.kill()
            writer.communicate()
        assert eventually(disk.unmount)
        disk.mount()
        with open_store(url) as store:
            for number in range(NUMBERS):
                target = bytearray(NBYTES)
                if store.get_many_into([key(number)], [target])[0]:
                    hits += 1
                    assert target == payload(number, NBYTES)
            assert store.put_many(keys(4), [payload(number, NBYTES) for number in range(4)]) == [True] * 4
        if time.monotonic() > end and round_number >= 1:
            break
    assert hits > 0
