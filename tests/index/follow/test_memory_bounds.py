"""What an index process takes at most while it is attacked: the peak of its resident memory, beside --max-memory."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from kvpool import IndexClient
from kvpool.discovery.worker import Publisher
from kvpool.index import Worker
from kvpool.index.answer import WorkerStatus
from kvpool.key.hashing import seed_id
from tests.support.deadlines import eventually
from tests.support.feeds import frames, misbehaving, raw_publisher
from tests.support.index_process import peak_nbytes, running
from tests.support.wire import batch, packed64, stored

WITHIN_S = 60.0
MiB = 1 << 20
PYTHON_NBYTES = 64 * MiB  # of code that is loaded on the way, and of what the interpreter keeps

pytestmark = pytest.mark.usefixtures("grpc_started")


def a_worker(name: str, *publishers: Publisher, tenant: str = "default") -> Worker:
    return Worker(name, "m", 16, seed_id(None), publishers, tenant=tenant, incarnation="1")


def statuses(client: IndexClient) -> dict[str, WorkerStatus]:
    return {status.worker.name: status for status in client.workers(timeout_s=WITHIN_S)}


def test_ranks_that_say_nothing_take_little_and_no_more_than_there_is(tmp_path: Path) -> None:
    ranks = tuple(Publisher(rank, "") for rank in range(1024))
    with (
        running("--max-memory", "256MiB", log=tmp_path / "log") as index,
        IndexClient(index.target, timeout_s=WITHIN_S) as client,
    ):
        client.workers()
        before = peak_nbytes(index)
        for number in range(4):
            client.register(a_worker(f"w-{number}", *ranks))
        assert peak_nbytes(index) - before < 32 * MiB + PYTHON_NBYTES
        with pytest.raises(Exception, match="no memory is left for 1024 more ranks of tenant default"):
            client.register(a_worker("w-4", *ranks))
        client.register(a_worker("w", ranks[0], tenant="other"))
        client.remove("w-0")
        client.register(a_worker("w-4", *ranks))


def test_a_message_of_many_frames_is_not_taken(tmp_path: Path) -> None:
    """Each frame is legal; libzmq took 702 MiB."""
    with (
        misbehaving() as publisher,
        raw_publisher(frames(*[58 * MiB] * 12)) as hostile,
        raw_publisher(frames(*[20 * MiB] * 12)) as other,
        running("--max-memory", "256MiB", log=tmp_path / "log") as index,
        IndexClient(index.target, timeout_s=WITHIN_S) as client,
    ):
        client.workers()
        before = peak_nbytes(index)
        client.register(a_worker("hostile", hostile))
        client.register(a_worker("other", other))
        publisher.publish(batch(stored([1, 2])))
        client.register(a_worker("w", publisher.publisher))
        assert eventually(
            lambda: all(
                "no room for a message" in statuses(client)[name].publishers[0].problem
                for name in ("hostile", "other")
            )
        )
        assert eventually(
            lambda: client.lookup("m", hashes64=packed64([1, 2]), workers=["w"]).device_blocks[0] == 2
        )
        assert peak_nbytes(index) - before < 64 * MiB + PYTHON_NBYTES


def test_twelve_ranks_with_large_batches_while_a_lease_ends(tmp_path: Path) -> None:
    large = batch(
        stored([1, 2], token_ids=[1 << 20] * 32), *[stored([3], token_ids=[1 << 20] * 16)] * 180_000
    )
    assert 30 * MiB < len(large) < 40 * MiB
    with ExitStack() as opened:
        publishers = [opened.enter_context(misbehaving()) for _ in range(12)]
        index = opened.enter_context(running("--max-memory", "512MiB", log=tmp_path / "log"))
        client = opened.enter_context(IndexClient(index.target, timeout_s=WITHIN_S))
        client.register(a_worker("leased", Publisher(0, ""), tenant="other"), lease_s=1)
        before = peak_nbytes(index)
        for number, publisher in enumerate(publishers):
            publisher.publish(large)
            client.register(a_worker(f"w-{number}", publisher.publisher))
        assert eventually(lambda: "leased" not in statuses(client))

        def followed() -> bool:
            rows = client.lookup("m", hashes64=packed64([1, 2]))
            return len(rows) == 12 and all(row.device_blocks == 2 and not row.stale for row in rows)

        assert eventually(followed)
        assert index.process.poll() is None
        assert peak_nbytes(index) - before < 128 * MiB + PYTHON_NBYTES
