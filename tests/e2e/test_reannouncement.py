"""An index that came too late, or lost batches for good, learns all that a real engine holds, while it runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from demo.engine_process import free_ports
from kvpool import BlockHasher, open_store
from kvpool.index.answer import Row
from kvpool.vllm.tell.events import INTERVAL_S
from tests.support.deadlines import eventually
from tests.support.engines import BLOCK_TOKENS, PROMPTS, WITHIN_S, Index, options_of, passing, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(1800)]

KEPT_BATCHES = 2
OTHERS = [prompt(900 + i, 1100) for i in range(4)]
HASHER = BlockHasher(BLOCK_TOKENS)


class Subscriber:
    """Hears every batch from the first one on, and counts copies by the engine's own events alone.

    What the engine tells again is not counted but compared: it must be what its own events have come to.
    """

    def __init__(self, port: int) -> None:
        self.copies: Counter[int] = Counter()
        self.sequence = -1
        self.evicted = self.most_copies = 0
        self.told: list[int] = []  # the batches with a telling
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.set_hwm(0)
        self._events.setsockopt(zmq.RECONNECT_IVL, 20)
        self._events.subscribe(b"")
        self._joined = self._events.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._events.connect(f"tcp://127.0.0.1:{port}")

    def close(self) -> None:
        self._events.disable_monitor()
        self._context.destroy(linger=0)

    def is_joined(self) -> bool:
        return self._joined.poll(0) != 0

    def drain(self) -> None:
        while self._events.poll(200):
            _, number, payload = self._events.recv_multipart()
            self.sequence += 1
            assert int.from_bytes(number, "big") == self.sequence, "subscribed before the first one"
            events = msgpack.unpackb(payload)[1]
            again = [at for at, event in enumerate(events) if event["type"] == "AllBlocksCleared"]
            for event in events[: again[0] if again else None]:
                self._add(event)
            if again:
                assert events[again[0]]["medium"] == "GPU"
                self.told.append(self.sequence)
                self._compare(events[again[0] + 1 :])

    def leading(self, tokens: list[int]) -> int:
        held = [self.copies[int.from_bytes(one[-8:], "big")] > 0 for one in HASHER.hashes(tokens)]
        return (*held, False).index(False)

    def _add(self, event: dict[str, Any]) -> None:
        if event["medium"] != "GPU":
            return
        stored = event["type"] == "BlockStored"
        for one in event["block_hashes"]:
            self.copies[one] += 1 if stored else -1
            self.evicted += not stored
            self.most_copies = max(self.most_copies, self.copies[one])

    def _compare(self, held: list[dict[str, Any]]) -> None:
        assert {event["type"] for event in held} == {"BlockStored"}
        assert {event["medium"] for event in held} == {"GPU"}
        assert Counter(one for event in held for one in event["block_hashes"]) == +self.copies


def assert_true(index: Index, model: str, worker: str, subscriber: Subscriber) -> None:
    """Each answer is what the engine's own events say, as of the batch that the answer names."""
    compared: list[tuple[Row, int]] = []

    def of_one_batch() -> bool:
        subscriber.drain()
        compared[:] = [
            (index.row(model, tokens, worker), subscriber.leading(tokens)) for tokens in (*PROMPTS, *OTHERS)
        ]
        return all(not row.stale and row.sequence == subscriber.sequence for row, _ in compared)

    assert eventually(of_one_batch, within_s=WITHIN_S), compared
    for row, leading in compared:
        assert row.device_blocks == row.local_blocks == leading


def test_an_index_that_came_too_late_is_told_all(llama: Path, tmp_path: Path) -> None:
    model, pool, ports = str(llama), f"file://{tmp_path}/pool", free_ports(2)
    name = f"127.0.0.1:{ports[0]}"
    options = options_of(llama, pool, ports)
    options["kv_events_config"]["buffer_steps"] = KEPT_BATCHES
    subscriber = Subscriber(ports[0])
    try:
        with open_store(pool) as store, passing("late", tmp_path, options) as engine:
            assert eventually(subscriber.is_joined)
            for tokens in (*PROMPTS, PROMPTS[7], PROMPTS[6][: 4 * BLOCK_TOKENS]):
                engine.generate(tokens, 2)

            def heard_all() -> bool:
                subscriber.drain()
                return subscriber.leading(PROMPTS[7]) == whole and subscriber.most_copies > 1

            whole = len(PROMPTS[7]) // BLOCK_TOKENS
            assert eventually(heard_all), "several copies of the last block of a prompt that is cached whole"
            assert subscriber.evicted > 10, "the cache was too small for all"
            index = Index(store)
            try:
                assert eventually(lambda: index.knows(name), within_s=WITHIN_S)
                assert index.row(model, PROMPTS[7], name).device_blocks < whole, "it has missed most"
                ((worker_id, dp_rank),) = index.fleet.incomplete()

                def answered() -> bool:
                    engine.generate(prompt(999, BLOCK_TOKENS // 2), 1)  # an idle engine tells nothing
                    return not index.fleet.incomplete()

                assert eventually(answered, within_s=WITHIN_S), index.fleet.workers()
                (status,) = index.fleet.workers()
                assert (worker_id, dp_rank) == (status.worker.id, 0)
                assert (status.publishers[0].problem, status.publishers[0].resets) == ("", 0)
                assert_true(index, model, name, subscriber)
                assert len(subscriber.told) == 1

                for tokens in (*OTHERS, PROMPTS[0], OTHERS[0]):
                    engine.generate(tokens, 2)
                assert_true(index, model, name, subscriber)

                # As after a gap that nothing closes: it asks again, and is answered when it may be.
                index.fleet.rank(worker_id, dp_rank).reset("planted")
                assert eventually(answered, within_s=INTERVAL_S + WITHIN_S)
                assert_true(index, model, name, subscriber)
                assert len(subscriber.told) == 2, "once for each loss"
            finally:
                index.close()
    finally:
        subscriber.close()
