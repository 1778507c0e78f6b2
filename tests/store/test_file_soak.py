"""Many processes on one file store for SEARCH_S seconds, killed at any moment, while records are damaged.

Whatever happens, a hit is byte for byte what was put, the capacity holds, and the store goes on.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.store import open_store
from tests.support.deadlines import eventually
from tests.support.soak import SEARCH_S

CAPACITY_NBYTES = 24 << 20
USERS = 3
# While we add up, each of a user's two threads may move one record, which we then meet in both places.
SEEN_TWICE_NBYTES = USERS * 2 * 300_064

USER = """
import random, sys
from kvpool.key.key import Namespace
from kvpool.store import open_store

url, seed = sys.argv[1], int(sys.argv[2])
draw = random.Random(seed)
namespace = Namespace("soak", {"model": "soak"})

def value(number):  # of one key, the same in every process
    own = random.Random(number)
    return own.randbytes(own.choice([1, 4096, 65536, 300_000]))

with open_store(url) as store:
    while True:
        numbers = [draw.randrange(400) for _ in range(draw.randrange(1, 9))]
        keys = namespace.keys([number.to_bytes(32, "big") for number in numbers], 0, 0)
        values = [value(number) for number in numbers]
        work = draw.random()
        if work < 0.45:
            store.put_many(keys, values, timeout_s=60)
        elif work < 0.95:
            buffers = [bytearray(len(each)) for each in values]
            found = store.get_many_into(keys, buffers, timeout_s=60)
            for number, hit, buffer, each in zip(numbers, found, buffers, values):
                if hit and buffer != each:
                    sys.exit(f"key {number}: a hit with other bytes")
        else:
            store.delete_many(keys, timeout_s=60)
        print(len(keys), flush=True)
"""


@pytest.mark.soak
@pytest.mark.timeout(SEARCH_S + 120)
def test_killed_users_and_damaged_records_never_give_a_wrong_byte(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    url = f"file://{pool}?capacity={CAPACITY_NBYTES}"
    draw = random.Random(1)
    users: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", USER, url, str(draw.randrange(1 << 30))]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    end = time.monotonic() + SEARCH_S
    users = [start() for _ in range(USERS)]
    batches = kills = damages = 0
    try:
        while time.monotonic() < end or not min(batches, kills, damages):
            for index, user in enumerate(users):
                assert user.stdout is not None
                assert user.stderr is not None
                for _ in range(draw.randrange(1, 60)):
                    if not user.stdout.readline():
                        raise AssertionError(f"a user ended by itself: {user.stderr.read().decode()}")
                    batches += 1
                if draw.random() < 0.3:
                    user.kill()
                    _end(user)
                    users[index] = start()
                    kills += 1
            damages += _damage(pool, draw)
            assert _held_nbytes(pool) <= CAPACITY_NBYTES + SEEN_TWICE_NBYTES
    finally:
        for user in users:
            user.kill()
            _end(user)
    print(f"{batches} batches, {kills} kills, {damages} damaged records")
    with open_store(url):  # opening takes away what the killed ones left behind
        assert eventually(lambda: not list((pool / "tmp").iterdir()))


def _end(user: subprocess.Popen[bytes]) -> None:
    user.wait()
    for pipe in (user.stdout, user.stderr):
        assert pipe is not None
        pipe.close()


def _damage(pool: Path, draw: random.Random) -> int:
    """Turn one byte of a record that is there now."""
    records = list(_files(pool / "blocks"))
    if not records:
        return 0
    try:
        with draw.choice(records).open("r+b") as file:
            at = draw.randrange(os.fstat(file.fileno()).st_size)
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ (1 << draw.randrange(8))]))
    except OSError:  # evicted in between
        return 0
    return 1


def _held_nbytes(pool: Path) -> int:
    held = 0
    for folder in ("blocks", "tmp"):
        for path in _files(pool / folder):
            try:
                held += path.stat().st_size if path.is_file() else 0
            except FileNotFoundError:
                continue
    return held


def _files(folder: Path) -> Iterator[Path]:
    """Those below a folder of which others take folders away."""
    for parent, _, names in os.walk(folder):
        yield from (Path(parent) / name for name in names)
