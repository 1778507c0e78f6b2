"""``kvpool doctor`` on real servers and directories: what it finds, and what it says to change."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool import IndexClient, Namespace, open_store
from kvpool.cli.engine_process import free_ports
from kvpool.cli.index_process import IndexProcess
from kvpool.hashing import seed_id
from kvpool.index.registry import Announcer
from kvpool.index.worker import Publisher, Worker
from kvpool.stores.facts import announce_facts
from tests.cli.test_app import kvpool, refused
from tests.conftest import eventually
from tests.index.publisher import misbehaving
from tests.stores.servers import Server, running

GOOD = (
    "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru", "--client-output-buffer-limit", "normal 64mb 32mb 30",
    "--maxmemory-clients", "25%", "--notify-keyspace-events", "Ee", "--lazyfree-lazy-eviction", "yes",
)  # fmt: skip


def examined(*arguments: str) -> tuple[int, list[dict[str, str]]]:
    ended = kvpool("doctor", *arguments, "--json")
    report: dict[str, Any] = json.loads(ended.stdout)
    assert report["ok"] is (ended.returncode == 0)
    return ended.returncode, report["findings"]


def sentences(findings: list[dict[str, str]], level: str) -> str:
    return "\n".join(f"{one['says']} -> {one['change']}" for one in findings if one["level"] == level)


@pytest.fixture(params=["redis-server", "valkey-server"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    with running(request.param, tmp_path, *GOOD) as server:
        yield server


def test_a_well_kept_server_has_nothing_to_change(server: Server) -> None:
    code, findings = examined("--pool", server.url)
    assert code == 0
    assert {one["level"] for one in findings if one["about"] != "workers"} == {"ok"}, findings
    assert server.client.dbsize() == 0, "the block that was tried is gone again"


@pytest.mark.parametrize(
    ("setting", "value", "level", "says"),
    [
        ("maxmemory", "0", "problem", "maxmemory is 0"),
        ("maxmemory-policy", "noeviction", "problem", "maxmemory-policy is noeviction"),
        ("maxmemory-policy", "volatile-ttl", "note", "maxmemory-policy is volatile-ttl"),
        ("client-output-buffer-limit", "normal 0 0 0", "note", "client-output-buffer-limit"),
        ("maxmemory-clients", "0", "note", "maxmemory-clients"),
        ("notify-keyspace-events", "", "note", "notify-keyspace-events"),
        ("appendonly", "yes", "note", "appendonly"),
        ("lazyfree-lazy-eviction", "no", "note", "lazyfree-lazy-eviction"),
    ],
)
def test_each_setting_is_judged(server: Server, setting: str, value: str, level: str, says: str) -> None:
    server.client.config_set(setting, value)
    code, findings = examined("--pool", server.url)
    assert says in sentences(findings, level)
    assert code == (1 if level == "problem" else 0)
    others = {one["level"] for one in findings if one["about"] != "workers" and setting not in one["says"]}
    assert others == {"ok"}


def test_a_server_without_config_is_judged_by_info(server: Server) -> None:
    server.client.execute_command("ACL", "SETUSER", "default", "-config")
    code, findings = examined("--pool", server.url)
    assert code == 0
    assert "CONFIG is not allowed" in sentences(findings, "note")
    server.client.execute_command("ACL", "SETUSER", "default", "+config")
    server.client.config_set("maxmemory", "0")
    server.client.execute_command("ACL", "SETUSER", "default", "-config")
    code, findings = examined("--pool", server.url)
    assert code == 1
    assert "maxmemory is 0" in sentences(findings, "problem")


def test_a_server_without_info_says_so(server: Server) -> None:
    server.client.execute_command("ACL", "SETUSER", "default", "-info", "-config")
    code, findings = examined("--pool", server.url)
    assert code == 0
    assert "INFO is not allowed" in sentences(findings, "note")


def test_a_user_without_the_keys_is_told_which(server: Server) -> None:
    server.client.execute_command("ACL", "SETUSER", "worker", "on", ">pass-word", "~other:*", "+@all")
    code, findings = examined("--pool", f"valkey://worker:pass-word@127.0.0.1:{server.port}")
    assert code == 1
    text = sentences(findings, "problem")
    assert "NOPERM" in text
    assert "kvpool:default:*" in text
    assert "pass-word" not in json.dumps(findings)


@pytest.mark.parametrize("url", ["valkey://127.0.0.1:1", "valkey://nowhere.invalid:6379"])
def test_no_server_is_a_problem_in_one_sentence(url: str) -> None:
    code, findings = examined("--pool", url)
    assert code == 1
    (only,) = findings
    assert only["says"].startswith(url)


def test_a_wrong_password_is_a_problem_and_not_shown(server: Server) -> None:
    server.client.config_set("requirepass", "right-word")
    code, findings = examined("--pool", f"valkey://:wrong-word@127.0.0.1:{server.port}")
    assert code == 1
    assert "correct user, password" in sentences(findings, "problem")
    assert "wrong-word" not in json.dumps(findings)


def test_a_replica_is_a_problem(tmp_path: Path, server: Server) -> None:
    folder = tmp_path / "replica"
    folder.mkdir()
    with running(server.name, folder, *GOOD) as replica:
        replica.client.replicaof("127.0.0.1", server.port)
        code, findings = examined("--pool", replica.url)
    assert code == 1
    assert "replica" in sentences(findings, "problem")


def test_a_directory(tmp_path: Path) -> None:
    code, findings = examined("--pool", f"file://{tmp_path}/pool?capacity=16MiB")
    assert code == 0
    assert "capacity 16MiB" in sentences(findings, "ok")
    code, findings = examined("--pool", f"file://{tmp_path}/pool?capacity=1000TiB")
    assert code == 1
    assert "smaller ?capacity=" in sentences(findings, "problem")


def test_namespaces_that_differ_are_told_apart(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool"
    facts = {"model": "m", "hash_algorithm": "sha256_cbor", "tensor_parallel": 1}
    with open_store(url) as store:
        announce_facts(store, Namespace("default", facts), "m")
        _, findings = examined("--pool", url)
        assert "share one namespace" in sentences(findings, "ok")
        announce_facts(store, Namespace("default", facts | {"tensor_parallel": 2}), "m")
        announce_facts(store, Namespace("other", facts | {"tensor_parallel": 4}), "m")
    _, findings = examined("--pool", url)
    text = sentences(findings, "note")
    assert "tensor_parallel is" in text
    assert "4" not in text.partition("tensor_parallel is")[2].partition(" ->")[0]


def test_the_table_names_what_to_change(tmp_path: Path) -> None:
    with running("valkey-server", tmp_path) as server:
        ended = kvpool("doctor", "--pool", server.url)
    assert ended.returncode == 1
    assert "problem" in ended.stdout
    assert "-> CONFIG SET maxmemory" in ended.stdout
    assert "To be changed: 1" in ended.stdout


def test_wrong_use_is_one_clear_line() -> None:
    assert "--pool URL" in refused("doctor")
    assert "three slashes" in refused("doctor", "--pool", "file://x")
    assert "tenant" in refused("doctor", "--pool", "memory://", "--tenant", "a:b")


def worker(name: str, publisher: Publisher, **more: Any) -> Worker:
    fields: dict[str, Any] = {"model": "m", "block_tokens": 16, "hash_seed_id": seed_id(None)}
    return Worker(name=name, publishers=(publisher,), incarnation=name, **{**fields, **more})


@contextlib.contextmanager
def announced(url: str, *workers: Worker) -> Iterator[None]:
    """These announce themselves in the pool for as long as the block runs."""
    with open_store(url) as store, contextlib.ExitStack() as announcers:
        for one in workers:
            announcers.callback(Announcer(store, one).close)
        assert eventually(lambda: len(store.announcements("kvpool:default:worker:")) == len(workers))
        yield


def test_a_pool_without_workers_says_so(tmp_path: Path) -> None:
    _, findings = examined("--pool", f"file://{tmp_path}/pool")
    assert "none of tenant default announces itself" in sentences(findings, "note")


def test_workers_in_the_pool_are_judged(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool"
    with misbehaving() as good, misbehaving(replay=False) as no_replay:
        silent = Publisher(0, f"tcp://127.0.0.1:{free_ports(1)[0]}", "tcp://127.0.0.1:1")
        with announced(
            url,
            worker("good", good.publisher),
            worker("no-replay", no_replay.publisher),
            worker("silent", silent),
            worker("coarse", good.publisher, block_tokens=32),
        ):
            code, findings = examined("--pool", url)
    assert code == 1
    assert "worker good of model m: blocks of 16 tokens, sha256_cbor" in sentences(findings, "ok")
    assert "worker no-replay has no replay endpoint" in sentences(findings, "note")
    problems = sentences(findings, "problem")
    assert "worker silent announces its events at" in problems
    assert "advertise_host" in problems
    assert "hash in different ways" in problems
    assert "the same block size" in problems


def test_a_worker_without_events_is_named(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool"
    with announced(url, worker("mute", Publisher(0, ""))):
        code, findings = examined("--pool", url)
    assert code == 1
    problems = sentences(findings, "problem")
    assert "worker mute publishes no KV events" in problems
    assert "--kv-events-config" in problems


def test_an_index_and_its_workers_are_judged(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool"
    with (
        misbehaving() as good,
        IndexProcess(tmp_path, url) as index,
        IndexClient(index.address) as client,
        announced(url, worker("good", good.publisher)),
    ):
        assert eventually(
            lambda: any(not p.stale for w in client.workers() for p in w.publishers), within_s=20
        )
        code, findings = examined("--pool", url, "--index", index.address)
        assert code == 0, findings
        assert "it follows 1 workers with 1 ranks" in sentences(findings, "ok")
        client.register(worker("lost", Publisher(0, "tcp://127.0.0.1:1", "tcp://127.0.0.1:1"), model="n"))
        client.register(worker("salted", good.publisher, model="s", hash_seed_id="0" * 16))
        code, findings = examined("--index", index.address)
    assert code == 1
    problems = sentences(findings, "problem")
    assert "rank 0 of worker lost is stale" in problems
    assert "PYTHONHASHSEED" in problems


def test_a_worker_that_the_index_does_not_know_is_named(tmp_path: Path) -> None:
    here, elsewhere = f"file://{tmp_path}/pool", f"file://{tmp_path}/other"
    with (
        misbehaving() as good,
        IndexProcess(tmp_path, elsewhere) as index,
        announced(here, worker("good", good.publisher)),
    ):
        code, findings = examined("--pool", here, "--index", index.address)
    assert code == 1
    assert "worker good of tenant default is in the pool and not in the index" in sentences(
        findings, "problem"
    )
    assert "it knows no worker" in sentences(findings, "note")


def test_an_index_that_is_none_is_a_problem_in_one_sentence(server: Server) -> None:
    code, findings = examined("--index", "127.0.0.1:1")
    assert code == 1
    assert len(findings) == 1
    code, findings = examined("--index", f"127.0.0.1:{server.port}")
    assert code == 1
    (only,) = findings
    assert "\n" not in only["says"]


def test_looking_at_a_full_directory_evicts_nothing(tmp_path: Path) -> None:
    """The URL's own capacity is that of whoever writes there."""
    keys = Namespace("default", {"model": "m"}).keys([bytes([i]) * 32 for i in range(8)], 0, 0)
    with open_store(f"file://{tmp_path}/pool?capacity=16MiB") as store:
        assert all(store.put_many(keys, [bytes(1 << 20)] * 8))
        examined("--pool", f"file://{tmp_path}/pool?capacity=2MiB")
        assert all(store.contains_many(keys))
