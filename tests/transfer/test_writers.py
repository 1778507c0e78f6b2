"""Many writers of one key: one transfer for all that write at once through one store, one a process else."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from kvpool import open_store
from kvpool.metrics import Counters
from kvpool.store import Batch
from kvpool.transfer import BlockCopier, KVCacheMover
from kvpool.transfer.kv_cache import Block
from tests.support.conformance import key, payload
from tests.support.deadlines import eventually
from tests.support.misbehaving import Peer, misbehaving
from tests.support.servers import running

WRITERS = 64
PROCESSES = 4


class Held:
    """A harm that answers puts when it is let go; everything else at once."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __call__(self, peer: Peer, words: Sequence[bytes], good: bytes) -> None:
        if words[0] == b"HSET":
            self.go.wait(60)
        peer.send(good)


def test_writers_of_one_key_through_one_store_are_one_transfer() -> None:
    value = payload(1, 300_000)
    with misbehaving() as server, open_store(f"{server.url}?connections=4") as store:
        held, looked_at_rights = Held(), server.heard(b"HSET")
        server.misbehave(held)
        transfers: list[Batch] = []

        def put() -> None:
            transfers.append(store.submit_put([key(1)], [bytearray(value)], timeout_s=60))

        threads = [threading.Thread(target=put) for _ in range(WRITERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert eventually(lambda: store.counters()["queued"] == 0)
        assert not any(transfer.done() for transfer in transfers)
        held.go.set()
        assert [transfer.wait() for transfer in transfers] == [[True]] * WRITERS
        assert server.heard(b"HSET") - looked_at_rights == 1
        assert server.holds(key(1), value)
        assert store.counters()["joined_puts"] == WRITERS - 1
        assert store.counters()["put_nbytes"] == len(value)


def test_a_writer_that_gives_up_is_no_answer_for_the_next() -> None:
    value = payload(1, 300_000)
    with misbehaving() as server, open_store(f"{server.url}?connections=2") as store:
        held, looked_at_rights = Held(), server.heard(b"HSET")
        server.misbehave(held)
        first = store.submit_put([key(1)], [bytearray(value)], timeout_s=60)
        assert eventually(lambda: server.heard(b"HSET") - looked_at_rights == 1)
        second = store.submit_put([key(1)], [bytearray(value)], timeout_s=60)
        assert eventually(lambda: store.counters()["queued"] == 0)
        first.cancel()
        assert eventually(first.done)
        assert not second.done()
        held.go.set()
        assert second.wait() == [True]
        assert server.heard(b"HSET") - looked_at_rights == 2
        assert server.holds(key(1), value)


def test_transfer_engines_of_one_store_send_a_block_once() -> None:
    """One of them asks, and hears that the block is not there; the others wait for its put."""
    cache = [torch.arange(4 * 1000, dtype=torch.int32).reshape(4, 1000)]
    with misbehaving() as server, open_store(f"{server.url}?connections=4") as store:
        held, looked_at_rights = Held(), server.heard(b"HSET")
        server.misbehave(held)
        engines = [
            KVCacheMover(
                store,
                [BlockCopier(cache)],
                staging_nbytes=16_000,
                max_store_nbytes_per_s=0,
                counters=Counters(),
            )
            for _ in range(WRITERS)
        ]
        for tag, engine in enumerate(engines):
            engine.stage([Block(key(1), 0, (2,))], [tag])
        assert eventually(lambda: server.heard(b"HSET") - looked_at_rights == 1)
        for engine in engines:
            assert engine.poll().stored == []
        assert eventually(lambda: store.counters()["queued"] == 0)
        held.go.set()
        for tag, engine in enumerate(engines):
            stored: list[tuple[int, bool]] = []
            assert eventually(
                lambda engine=engine, stored=stored: stored.extend(engine.poll().stored) or not engine.busy
            )
            assert stored == [(tag, True)]
            engine.close()
        assert server.heard(b"HSET") - looked_at_rights == 1
        counters = store.counters()
        assert (counters["puts"], counters["present_puts"]) == (1, WRITERS - 1)
        target = bytearray(4000)
        assert store.get_many_into([key(1)], [target]) == [True]
        assert target == cache[0][2].numpy().tobytes()


_PROCESS = """
import sys, threading
from kvpool import open_store
url, key, writers = sys.argv[1], sys.argv[2], int(sys.argv[3])
value = bytes(range(256)) * 65536
with open_store(url) as store:
    print("ready", flush=True)
    sys.stdin.readline()
    transfers = [store.submit_put([key], [value], timeout_s=60) for _ in range(writers)]
    kept = [transfer.wait() for transfer in transfers]
    assert kept == [[True]] * writers, kept
    print(writers - store.counters()["joined_puts"], flush=True)
"""


def test_processes_that_write_one_key_at_once_send_it_about_once_each(tmp_path: Path) -> None:
    """Between processes there is only the question whether it is there; who asks later sends nothing."""
    with running("valkey-server", tmp_path) as server:
        command = [sys.executable, "-c", _PROCESS, server.url, key(1), str(WRITERS)]
        processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(PROCESSES)
        ]
        try:
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            sent = 0
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
            for process in processes:
                out, _ = process.communicate(timeout=60)
                assert process.returncode == 0
                # Its writers are as quick as the server at most: those that come when one has ended begin another.
                assert 1 <= int(out) <= WRITERS // 4
                sent += int(out)
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        assert server.client.info("commandstats")["cmdstat_hset"]["calls"] == sent
        with open_store(server.url) as store:
            target = bytearray(16 << 20)
            assert store.get_many_into([key(1)], [target]) == [True]
            assert target == bytes(range(256)) * 65536
