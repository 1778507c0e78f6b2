"""Two indexes, two honest tenants with 64 workers, every attacker at once, a pool that dies: answers stay true.

The attackers (``tests.support.attackers``) run at the lowest priority: they stand for other hosts, which take no time
of the index's processors. For a long soak (``SOAK_S=600``): the slowest thousandth of a short one says nothing.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from kvpool import IndexClient, open_store
from kvpool.discovery.announcer import Announcer
from kvpool.index import Worker
from kvpool.key.hashing import seed_id
from tests.support.attackers import Attackers
from tests.support.credentials import write_tokens
from tests.support.deadlines import eventually
from tests.support.index_process import peak_nbytes
from tests.support.index_process import running as running_index
from tests.support.oracle import PROMPTS, Source, telling
from tests.support.servers import running as running_server
from tests.support.soak import LONG_SOAK, SOAK_S
from tests.support.wire import packed64

WORKERS = 32  # of each tenant
HONEST = ("announced", "called")  # tenants: by how their workers become known
LATEST_MS = 250.0
MEMORY_MiB, MARGIN_MiB = 512, 128
POOL_DOWN_S, POOL_UP_S = 5.0, 25.0
CALL_S = 60.0

pytestmark = [pytest.mark.soak, LONG_SOAK, pytest.mark.timeout(SOAK_S + 300)]


class Fleet:
    """The honest workers of both tenants, and what they have told."""

    def __init__(self) -> None:
        self.sources = {
            (tenant, f"{tenant}-{number}"): Source(f"{tenant}-{number}", 0)
            for tenant in HONEST
            for number in range(WORKERS)
        }

    def worker(self, tenant: str, name: str) -> Worker:
        publisher = replace(self.sources[tenant, name].publisher.publisher, dp_rank=0)
        return Worker(name, "m", 16, seed_id(None), (publisher,), tenant=tenant, incarnation="1")

    def tell(self, chance: random.Random) -> None:
        for source in chance.sample(sorted(self.sources.values(), key=lambda one: one.worker), 8):
            source.tell(
                telling(chance, hybrid=False), fate=chance.choice(["heard", "heard", "heard", "lost"])
            )

    def judge(self, replica: int, client: IndexClient) -> int:
        """Every row that is not stale is exactly what was held after the batch that it names; how many were."""
        credited = 0
        for tenant in HONEST:
            for prompt in PROMPTS:
                for row in client.lookup("m", tenant=tenant, hashes64=packed64(prompt)):
                    self.sources[tenant, row.worker].check(replica, row, prompt)
                    credited += not row.stale
        return credited


def test_answers_stay_true_and_in_time_whatever_others_do(tmp_path: Path) -> None:
    tokens = write_tokens(
        tmp_path / "tokens.toml",
        router=(["read", "publish", "admin"], ["*"]), evil=(["read", "publish"], ["evil"]),
    )  # fmt: skip
    fleet, chance = Fleet(), random.Random(7)
    with ExitStack() as parts:
        for source in fleet.sources.values():
            parts.callback(source.publisher.close)
        server = parts.enter_context(running_server("valkey-server", tmp_path))
        indexes = [
            parts.enter_context(
                running_index(
                    "--pool", server.url, "--tokens", str(tmp_path / "tokens.toml"), "--http", "127.0.0.1:0",
                    "--max-memory", f"{MEMORY_MiB}MiB", log=tmp_path / f"log {number}",
                )
            )
            for number in range(2)
        ]  # fmt: skip
        clients = [
            parts.enter_context(IndexClient(index.target, timeout_s=CALL_S, token=tokens["router"]))
            for index in indexes
        ]
        store = parts.enter_context(open_store(server.url))
        for tenant, name in fleet.sources:
            worker = fleet.worker(tenant, name)
            if tenant == "announced":
                parts.callback(Announcer(store, worker, say=lambda text: None).close)
            else:
                for client in clients:
                    client.register(worker)
        for client in clients:
            assert eventually(lambda client=client: len(client.workers()) == 2 * WORKERS)  # type: ignore[misc]
        victim = fleet.worker("called", "called-0").publishers[0]
        before = [peak_nbytes(index) >> 20 for index in indexes]

        attackers = subprocess.Popen(
            ["nice", "-n", "39", sys.executable, "-m", "tests.support.attackers"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={
                **os.environ,
                "TARGETS": " ".join(index.target for index in indexes),
                "HTTP": " ".join(f"127.0.0.1:{index.http_port}" for index in indexes),
                "EVIL": tokens["evil"],
                "POOL": server.url,
                "VICTIM": f"{victim.events} {victim.replay}",
            },
        )  # fmt: skip
        askers = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.asker", index.target, tenant, str(SOAK_S)],
                stdout=subprocess.PIPE, text=True,
                env={**os.environ, "KVPOOL_INDEX_TOKEN": tokens["router"]},
            )
            for index, tenant in zip(indexes, HONEST, strict=True)
        ]  # fmt: skip
        try:
            credited, judged = 0, 0
            ends_s, pool_at_s, pool_is_up = time.monotonic() + SOAK_S, time.monotonic() + POOL_UP_S, True
            while time.monotonic() < ends_s:
                fleet.tell(chance)
                for replica, client in enumerate(clients):
                    credited += fleet.judge(replica, client)
                    judged += len(fleet.sources) * len(PROMPTS)
                if time.monotonic() >= pool_at_s:
                    server.kill() if pool_is_up else server.start()
                    pool_is_up = not pool_is_up
                    pool_at_s = time.monotonic() + (POOL_UP_S if pool_is_up else POOL_DOWN_S)
                time.sleep(0.2)
            told = [json.loads(asker.communicate(timeout=60)[0]) for asker in askers]
            begun, _ = attackers.communicate("", timeout=60)
        finally:
            for process in (attackers, *askers):
                process.kill()
                process.communicate()
        after = [peak_nbytes(index) >> 20 for index in indexes]
        print(json.dumps({"askers": told, "credited": credited / judged, "VmHWM MiB": [before, after]}))
        assert set(begun.split()) == {attack.__name__ for attack in Attackers([], [], "", "", []).all()}
        assert credited > judged / 2, "most of what is held is credited meanwhile"
        for one in told:
            assert one["failures"] == 0, one
            assert one["p99.9"] <= LATEST_MS, one
        assert max(after) <= MEMORY_MiB + MARGIN_MiB
        if not pool_is_up:
            server.start()
