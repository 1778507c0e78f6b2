"""``kvpool index`` and ``kvpool lookup`` as a user meets them: real processes, a real publisher, one line per error.

Over 400 lines because all are of one command, and share what starts it.
"""

from __future__ import annotations

import base64
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest

from kvpool import BlockHasher, ConfigError, IndexClient, Worker, open_store
from kvpool.cli.index_options import parse_worker
from kvpool.cli.lookup import read_numbers, run_lookup
from kvpool.cli.options import IndexConnection
from kvpool.cli.settings import LookupOptions
from kvpool.index import Publisher
from kvpool.index.fleet.fleet import Fleet
from kvpool.key.hashing import seed_id
from tests.support.announced_workers import announced
from tests.support.command_line import kvpool, kvpool_process, refused
from tests.support.credentials import DOCUMENTED, Authority, url_of
from tests.support.deadlines import ends_within, eventually
from tests.support.feeds import misbehaving
from tests.support.fleets import a_worker, say, serving
from tests.support.http_client import figures, get, post
from tests.support.index_process import held_blocks, running
from tests.support.servers import running as running_server
from tests.support.wire import batch, packed64, stored

TOKENS = list(range(100, 180))


def test_it_may_open_as_many_files_as_its_process_may() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
    try:
        with running() as index:
            assert resource.prlimit(index.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("grpc_started")
def test_from_a_publisher_to_a_table() -> None:
    with misbehaving() as publisher:
        publisher.publish(batch(stored(BlockHasher(16).hashes(TOKENS)[:3])))
        worker = publisher.flag("w-1", address="http://h:8000")
        with running("--worker", worker, "--metrics", "127.0.0.1:0", "--http", "127.0.0.1:0") as index:
            shown = re.fullmatch(
                r"index listens on \S+, 1 worker by --worker, pool none, metrics on port ([0-9]+), "
                r"HTTP on port ([0-9]+) \(status page http://127\.0\.0\.1:\2/status\)",
                index.ready,
            )
            assert shown is not None
            options = ["--index", index.target, "--model", "m"]

            def ask(*more: str, given: Any = TOKENS) -> list[dict[str, Any]]:
                asked = ["lookup", *options, "--token-ids", "-", "--json", *more]
                return json.loads(kvpool(*asked, stdin=json.dumps(given)).stdout)["rows"]

            with IndexClient(index.target, 60) as client:
                assert eventually(lambda: client.lookup("m", token_ids=TOKENS).stale == (False,))
            (row,) = ask("--worker", "w-1")
            assert row.pop("staleness_ms") < 60_000
            assert row == {
                "worker": "w-1", "dp_rank": 0, "address": "http://h:8000", "block_tokens": 16, "prompt_blocks": 5,
                "device_blocks": 3, "local_blocks": 3, "pool_blocks": 0, "sequence": 0, "stale": False,
                "loadable_blocks": 3, "pool_media": 0,
            }  # fmt: skip
            assert ask("--worker", "nobody") == []
            assert ask("--cache-salt", "s")[0]["device_blocks"] == 0
            assert ask("--lora-name", "n", "--lora-path", "/n")[0]["device_blocks"] == 0

            table = kvpool("lookup", *options, "--token-ids", "-", stdin=" ".join(map(str, TOKENS))).stdout
            assert re.search(r"w-1 +█{12}·{8} +3 +3 +0 +0 +[0-9.]+ s", table), table
            plain = kvpool_process(
                "lookup", *options, "--token-ids", "-", input=",".join(map(str, TOKENS)),
                env={**os.environ, "PYTHONIOENCODING": "ascii"},
            ).stdout  # fmt: skip
            assert re.search(r"w-1 +\|#{12}\.{8} +\| +3 \| +3 ", plain), plain

            short = kvpool("lookup", *options, "--token-ids", "-", stdin="1 2 3").stdout
            assert short.startswith("a prompt shorter than a block, of "), short
            line = refused("lookup", "--index", index.target, "--model", "mm", "--token-ids", "-", stdin="1")
            assert line == 'kvpool: unknown model "mm"; did you mean "m"?'
            ended = kvpool("lookup", "--index", index.target, "--model", "x", "--token-ids", "-", stdin="1")
            assert (ended.returncode, ended.stderr) == (1, 'kvpool: unknown model "x"; known are m\n')

            counted = figures(f"http://127.0.0.1:{shown[1]}/metrics")
            assert {
                "kvpool_index_workers": "1.0",
                "kvpool_index_stale_ranks": "0.0",
                "kvpool_index_blocks": "3.0",
                "kvpool_index_batches_total": "1.0",
                'kvpool_index_tier_blocks{tier="device"}': "3.0",
                'kvpool_index_refused_requests_total{status="NOT_FOUND"}': "2.0",
                'kvpool_index_lookups_total{result="unknown"}': "2.0",
            }.items() <= counted.items()
            assert float(counted['kvpool_index_matched_ratio_sum{where="device"}']) > 0
            assert 'kvpool_index_staleness_seconds{rank="0",tenant="default",worker="w-1"}' in counted
            assert float(counted["kvpool_index_lookup_seconds_count"]) >= 6

            packed = base64.b64encode(array("I", TOKENS).tobytes()).decode()
            asked = {"scope": {"model": "m"}, "token_ids": packed}
            reply = post(f"http://127.0.0.1:{shown[2]}", asked, "/v1/lookup")
            assert json.loads(reply.body)["device_blocks"] == [3]
            top = json.loads(kvpool("top", "--index", index.target, "--once", "--json").stdout)
            assert (top["ranks"][0]["worker"], top["ranks"][0]["device_blocks"]) == ("w-1", 3)
            assert top["index"]["device_blocks"] >= 3  # that were asked about

            line = refused("index", "--listen", index.target)
            assert line.startswith(f"kvpool: cannot listen on {index.target}: Address already in use")
            metrics = f"127.0.0.1:{shown[1]}"
            taken = f"127.0.0.1:{shown[2]}"
            line = refused("index", "--listen", "127.0.0.1:0", "--http", taken)
            assert line.startswith(f"kvpool: cannot serve HTTP on {taken}: Address already in use")
            line = refused("index", "--listen", "127.0.0.1:0", "--metrics", metrics)
            assert line.startswith(f"kvpool: cannot show metrics on {metrics}: Address already in use")

            code, lines = index.stop()
            assert code == 0
            assert lines[0] == 'INFO worker default/w-1 joins: model "m", 1 rank, by flag'
            assert "INFO worker default/w-1 rank 0 is followed" in lines


@pytest.mark.usefixtures("grpc_started")
@pytest.mark.parametrize(("flags", "blocks"), [([], 0), (["--no-reuse-reports"], 3)])
def test_windows_are_known_where_nobody_asks_for_reports(flags: list[str], blocks: int) -> None:
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 33, "group_idx": 1}
    told = stored([1, 2, 3, 4], group_idx=0), stored([1, 2, 3, 4], **window)
    with misbehaving() as publisher:
        publisher.publish(batch(*told))
        with running("--worker", publisher.flag(), *flags) as index, IndexClient(index.target, 60) as client:
            assert eventually(
                lambda: client.lookup("m", hashes64=packed64([1, 2, 3, 4])).device_blocks == (4,)
            )
            assert client.lookup("m", hashes64=packed64([1, 2, 3])).device_blocks == (blocks,)


@pytest.mark.usefixtures("grpc_started")
def test_hashes_and_the_seed_of_the_index() -> None:
    with misbehaving() as publisher:
        publisher.publish(batch(stored([7, 0xFFEEDDCCBBAA9988, 9])))
        with (
            running("--worker", publisher.flag(), PYTHONHASHSEED="7") as index,
            IndexClient(index.target, 60) as client,
        ):
            assert client.workers()[0].worker.hash_seed_id == seed_id("7")
            assert eventually(lambda: client.lookup("m", hashes64=bytes(8)).stale == (False,))
            for text in ("7 0xffeeddccbbaa9988", "[7, 18441921395520346504]", '["7",\n"0xFFEEDDCCBBAA9988"]'):
                asked = ["lookup", "--index", index.target, "--model", "m", "--hashes", "-", "--json"]
                assert json.loads(kvpool(*asked, stdin=text).stdout)["rows"][0]["device_blocks"] == 2
            code, _ = index.stop(signal.SIGINT)
            assert code == 0


def told_servers(client: IndexClient) -> tuple[int, int]:
    index = client.status().index
    return index.pool_servers, index.pool_servers_away


@pytest.mark.usefixtures("grpc_started")
def test_an_index_starts_without_its_pool_and_follows_it_when_it_comes(tmp_path: Path) -> None:
    with running_server("valkey-server", tmp_path, "--requirepass", "pass-word") as server:
        server.kill()
        url = f"valkey://:pass-word@127.0.0.1:{server.port}"
        with running("--pool", url, "--warm-up", "1") as index, IndexClient(index.target, 60) as client:
            assert client.workers() == [], "it answers"
            assert told_servers(client) == (1, 1)
            shown = kvpool("top", "--index", index.target, "--once").stdout
            assert "1 of 1 server of the pool cannot be reached by the index: " in shown
            server.start()
            with open_store(url) as store:
                worker = Worker(
                    "w", "m", 16, seed_id(None), (Publisher(0, "tcp://127.0.0.1:1"),), incarnation="1"
                )
                with announced(store, worker, 5.0):
                    assert eventually(lambda: len(client.workers()) == 1)
                    assert eventually(lambda: told_servers(client) == (1, 0))
                    shown = kvpool("top", "--index", index.target, "--once").stdout
                    assert "of the pool cannot be reached" not in shown
            code, lines = index.stop()
            assert code == 0
            assert sum("starts without its pool" in line for line in lines) == 1
            assert sum("the pool is reached" in line for line in lines) == 1
            assert not any("pass-word" in line for line in lines)


@pytest.mark.usefixtures("grpc_started")
def test_workers_that_are_confined_to_their_tenant_are_followed_by_its_name(tmp_path: Path) -> None:
    """The user of the index is confined, too; both have the rights that docs/how-to/valkey.md names."""
    key = f"kvpool:team:{'a' * 32}:{1:064x}:0:0"
    with running_server("valkey-server", tmp_path) as server, misbehaving() as publisher:
        of_worker = url_of(server, keys="kvpool:team:*")
        server.client.acl_setuser(
            "index", enabled=True, passwords=["+p"], keys=["kvpool:team:*"], channels=["__redis__:invalidate"],
            commands=[*DOCUMENTED, "+scan", "+client|id", "+client|tracking", "+subscribe"],
        )  # fmt: skip
        of_index = of_worker.replace("worker:", "index:")
        told = {"incarnation": "1", "namespace": "a" * 32, "tenant": "team"}
        worker = Worker("w", "m", 16, seed_id(None), (publisher.publisher,), **told)
        publisher.publish(batch(stored([1, 2])))
        with (
            open_store(of_worker) as store,
            running("--pool", of_index, "--tenant", "team") as index,
            IndexClient(index.target, 60) as client,
        ):
            assert store.put_many([key], [b"block"]) == [True]
            with announced(store, worker, 5.0):
                assert eventually(lambda: held_blocks(client, [1, 2], "team") == [(2, 1, False)])
            assert eventually(lambda: client.workers(tenant="team") == [])
            assert index.stop()[0] == 0


def test_who_announces_itself_in_the_pool_is_followed(tmp_path: Path) -> None:
    """From the record in a real server to an answer, and to its end; what is in the pool counts, not what is said."""
    with (
        running_server("valkey-server", tmp_path, "--requirepass", "pass-word") as server,
        misbehaving() as publisher,
    ):
        url = f"valkey://:pass-word@127.0.0.1:{server.port}"
        publisher.publish(batch(stored([1, 2]), stored([1, 2, 4], medium="STORAGE"), dp_rank=3))
        worker = Worker(
            "w", "m", 16, seed_id(None), (publisher.publisher,), incarnation="1", namespace="a" * 32
        )
        with (
            open_store(url) as store,
            running("--pool", url, "--metrics", "127.0.0.1:0") as index,
            IndexClient(index.target, 60) as client,
        ):
            ready, _, metrics = index.ready.partition(", metrics on port ")
            assert ready == f"index listens on {index.target}, pool valkey://:***@127.0.0.1:{server.port}"
            store.announce(f"kvpool:default:{'a' * 32}:facts", b"facts", lease_s=60)  # as the connector does
            keys = [f"kvpool:default:{'a' * 32}:{number:064x}:0:0" for number in (1, 2, 3)]
            assert all(store.put_many(keys, [b"block"] * 3))
            with announced(store, worker, 5.0):
                assert eventually(lambda: held_blocks(client, [1, 2, 3, 4]) == [(2, 3, False)])
                assert [row.dp_rank for row in client.lookup("m", hashes64=packed64([1]))] == [3]
                assert store.delete_many([keys[1]]) == 1
                assert eventually(lambda: held_blocks(client, [1, 2, 3, 4]) == [(2, 1, False)])
                counted = figures(f"http://127.0.0.1:{metrics}/metrics")
                assert float(counted["kvpool_index_pool_removed_total"]) >= 1
                assert float(counted["kvpool_index_pool_max_staleness_seconds"]) >= 10
                assert counted["kvpool_index_pool_notifications_down"] == "0.0"
                (status,) = client.workers()
                assert (status.source, status.worker) == ("pool", worker)
                assert status.lease_left_ms > 0
            assert eventually(lambda: client.workers() == [])
            code, lines = index.stop()
            assert code == 0
            # On a busy machine it is late at times, and says so.
            assert [line for line in lines if " is stale: " not in line][:1] + lines[-1:] == [
                'INFO worker default/w joins: model "m", 1 rank, by pool',
                "INFO worker default/w is gone",
            ]
            assert "INFO worker default/w rank 3 is followed" in lines


def test_an_index_ends_in_time_with_clients_and_no_publisher() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:  # accepts, and never speaks
        worker = f"w=tcp://127.0.0.1:{held.getsockname()[1]},model=m,block=16"
        with running("--worker", worker) as index:
            host, port = index.target.split(":")
            with socket.create_connection((host, int(port)), timeout=60):
                with ends_within(20):
                    code, lines = index.stop()
                assert code == 0
                assert lines[0] == 'INFO worker default/w joins: model "m", 1 rank, by flag'
                # On a busy machine it runs for as long as a handshake may take.
                assert all(" is stale: no answer from tcp://127.0.0.1:" in line for line in lines[1:])


# ---- what a table says


@pytest.mark.usefixtures("grpc_started")
def test_a_table_of_many_workers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = Fleet()
    for number in range(256):
        fleet.add(a_worker(f"worker-{number:03}"), "flag")
        if number % 2:
            held = list(range(1, 2 + number % 10))
            say(fleet, f"default/worker-{number:03}", 0, number, batch(stored(held)))
    with serving(fleet) as served:

        def lines(
            columns: int, most: int, workers: list[str] | None = None, as_json: bool = False
        ) -> list[str]:
            monkeypatch.setenv("COLUMNS", str(columns))
            options = LookupOptions(
                model="m", hashes="1 2 3 4 5 6 7 8 9 10", worker=workers or [], timeout=60, most=most,
                as_json=as_json,
            )  # fmt: skip
            run_lookup(options, IndexConnection(served.target))
            return [line.strip() for line in capsys.readouterr().out.splitlines()]

        def rows(shown: list[str]) -> list[str]:
            return [line for line in shown if line.startswith("worker-")]

        shown = lines(100, 40)
        assert len(rows(shown)) == 40
        assert re.fullmatch(r"worker-009 +█{20} +10 +10 +0 +9 +[0-9.]+ s +ok", rows(shown)[0])
        left = "and 216 more: 88 of them have blocks of it, 128 are stale; --most 0 shows all"
        assert shown[-1] == left
        assert any(line.startswith("worker-000 ") and line.endswith(" stale") for line in rows(lines(100, 0)))
        assert len(rows(lines(100, 0))) == 256
        (one,) = rows(lines(100, 40, ["worker-009"]))
        assert one.startswith("worker-009 ")
        some = lines(100, 3, [f"worker-{number:03}" for number in range(64)])
        assert some[-1].startswith("and 61 more: 29 of them have blocks of it, 32 are stale")
        assert len(json.loads(lines(100, 3, as_json=True)[0])["rows"]) == 256
        for columns in (40, 54, 60, 76):
            narrow = lines(columns, 2)
            assert max(map(len, narrow)) <= columns
            assert re.match(r"worker-009 [ █]* +10 +10 +0 .*ok$", rows(narrow)[0]), narrow


@pytest.mark.usefixtures("grpc_started")
def test_tls_and_tokens_from_the_command_line(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server, client = authority.issue("server", names=("127.0.0.1",)), authority.issue("client")
    files = ("tokens.toml", "router.token", "other.token", "nowhere")
    tokens, router, other, nowhere = (str(tmp_path / name) for name in files)
    made = kvpool("token", "router", "--right", "read", "--token-file", router)
    made_other = kvpool("token", "other", "--right", "publish", "--tenant", "*", "--token-file", other)
    Path(tokens).write_text(made.stdout + made_other.stdout)
    secrets = [Path(name).read_text().strip() for name in (router, other)]
    assert Path(router).stat().st_mode & 0o777 == 0o600
    assert "name a new file" in refused("token", "router", "--token-file", router)
    secured = [f"--tls-cert={server.cert}", f"--tls-key={server.key}", f"--tls-client-ca={authority.ca}"]
    worker = "w=tcp://127.0.0.1:1,model=m,block=16"
    # Nobody is heard from, and this may take longer than the index waits for that.
    with running("--worker", worker, "--tokens", tokens, "--warm-up", "300", *secured) as index:
        trusting = [f"--tls-ca={authority.ca}", f"--tls-cert={client.cert}", f"--tls-key={client.key}"]
        asked = ["lookup", "--index", index.target, "--model", "m", "--hashes", "-"]
        given = {"env": {**os.environ, "KVPOOL_INDEX_TOKEN": secrets[0]}}
        for found in (
            kvpool(*asked, "--json", *trusting, "--token-file", router, stdin="1"),
            kvpool(*asked, "--json", *trusting, stdin="1", **given),
        ):
            assert [row["worker"] for row in json.loads(found.stdout)["rows"]] == ["w"]
        doctor = kvpool("doctor", "--index", index.target, *trusting, "--token-file", router).stdout
        assert f"{index.target} answers: it follows 1 worker with 1 rank" in " ".join(doctor.split())
        doctor = kvpool("doctor", "--index", index.target, *trusting).stdout
        assert "give a token with the right to read: --token-file" in " ".join(doctor.split())
        for arguments, says in [
            ([*trusting], "does not let this client in: this index asks for a token"),
            ([*trusting, "--token-file", other], 'this token does not have the right "read"'),
            ([*trusting, "--token-file", router, "--tenant", "x"], "this token is not for tenant 'x'"),
            (
                [*trusting, "--token-file", str(server.cert)],
                "a token is 1 to 1024 printable ASCII characters",
            ),
            ([*trusting, "--token-file", nowhere], f"--token-file {nowhere}: No such file or directory"),
            (["--token-file", router], "If the index serves TLS, name its authority with --tls-ca"),
            ([trusting[0], "--token-file", router], "add --tls-cert and --tls-key"),
            (["--tls-ca", nowhere], f"--tls-ca {nowhere}: No such file"),
        ]:
            line = refused(*asked, *arguments, stdin="1")
            assert says in line, line
        code, lines = index.stop()
        assert code == 0
        assert lines[0] == 'INFO worker default/w joins: model "m", 1 rank, by flag'
        assert not [line for line in lines[1:] if "worker default/w rank 0 is stale" not in line]
        assert not any(secret in "\n".join(lines) for secret in secrets)


@pytest.mark.usefixtures("grpc_started")
def test_after_sigterm_health_says_no_and_calls_are_answered_until_a_second_one() -> None:
    with running("--http", "127.0.0.1:0", "--drain", "600") as index, IndexClient(index.target, 60) as client:
        page = f"http://127.0.0.1:{index.http_port}/health"
        assert eventually(lambda: get(page).status == 200)
        index.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: get(page).status == 503)
        assert client.workers() == []
        code, lines = index.stop()
        assert code == 0
        assert lines == [
            "WARNING neither --pool nor --worker is given: no worker is known, and none is until one registers",
            "INFO not serving any more; calls are answered for another 600 s",
        ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_that_still_waits_for_a_silent_peer_ends_at_once(number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(240)
        peer = f"127.0.0.1:{silent.getsockname()[1]}"
        command = [str(Path(sys.executable).parent / "kvpool"), "index", "--listen", "127.0.0.1:0"]
        with subprocess.Popen([*command, "--bootstrap", peer], stdout=subprocess.PIPE) as process:
            asked, _ = silent.accept()
            with asked:
                process.send_signal(number)
                said, _ = process.communicate(timeout=60)
            assert process.returncode == 0
            assert not said  # whoever waits for its peer serves behind it


def test_an_index_that_others_reach_without_a_token_says_so() -> None:
    command = [str(Path(sys.executable).parent / "kvpool"), "index", "--listen", "0.0.0.0:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], 60)[0]
        finally:
            process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"every client that reaches 0.0.0.0:0 may ask about every tenant" in errors


# ---- wrong use


WORKER = "w=tcp://h:5557,model=m,block=16"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--listen", "a..b:0"], "cannot listen on a..b:0: it is no host's name"),
        (["--max-blocks", "0"], "--max-blocks"),
        (["--pool-keys-per-s", "0"], "--pool-keys-per-s"),
        (["--worker", "w"], '--worker "w": write NAME=tcp://HOST:PORT,model=MODEL,block=TOKENS'),
        (["--worker", "w=h:1,model=m,block=1"], "write NAME=tcp://HOST:PORT"),
        (["--worker", "=tcp://h:1,model=m,block=1"], "write NAME="),
        (["--worker", "w=tcp://h:1,block=16"], "model is missing"),
        (["--worker", "w=tcp://h:1,model=m"], "block is missing: the tokens of a block, which are the engine's"),
        (["--worker", WORKER + ",replya=tcp://h:2"], 'unknown field "replya"; did you mean "replay"?'),
        (["--worker", WORKER + ",block=32"], "block is given twice"),
        (["--worker", WORKER + ",tenant="], "tenant has no value"),
        (["--worker", WORKER + ",ranks=x"], "ranks is a whole number, not 'x'"),
        (["--worker", "w=tcp://h:65535,model=m,block=16,ranks=2"], "write tcp://HOST:PORT, not 'tcp://h:65536'"),
        (["--worker", "w=ipc:///tmp/x,model=m,block=16,ranks=2"], "only tcp://HOST:PORT goes up by rank"),
        (["--worker", WORKER + ",hash=md5"], "unknown hash algorithm"),
        (["--worker", WORKER, "--worker", WORKER], "two workers of one tenant have the same name"),
        (["--max-memory", "0"], "a memory budget is 1 to"),
        (["--tokens", "HERE/x"], "--tokens=HERE/x: No such file"),
        (["--tls-cert", "HERE/x"], "--tls-cert and --tls-key go together"),
        (["--tls-client-ca", "HERE/x"], "--tls-client-ca needs --tls-cert and --tls-key"),
        (["--pool", "memory://"], "write file:///dev/shm/kvpool"),
        (["--pool", "valkey://127.0.0.1:1", "--tenant", "a:b"], "tenant"),
        (["--snapshot", "HERE/x/y"], "--snapshot HERE/x/y: name a file in a folder that is there"),
        (["--snapshot-every", "0"], "--snapshot-every"),
        (["--bootstrap", "h:0"], "port 0 is for listening"),
        (["--tokenizer=m"], '--tokenizer "m": write MODEL=FOLDER, once for each model'),
        (["--tokenizer=m="], '--tokenizer "m=": write MODEL=FOLDER, once for each model'),
        (["--tokenizer=m=HERE/x"], "--tokenizer: no tokenizer for m in HERE/x: "),
        (["--route-cost=pol=1"], '--route-cost "pol=1": unknown coefficient "pol"; did you mean "pool"?'),
        (["--route-cost=pool"], '--route-cost "pool": write NAME=NUMBER'),
        (["--route-cost=pool=-1"], "--route-cost: the coefficient pool is a number from 0 to 1e+06, not -1"),
    ],
)  # fmt: skip
def test_wrong_use_of_index(arguments: list[str], says: str, tmp_path: Path) -> None:
    """HERE: a folder with nothing in it."""
    if "--listen" not in arguments:
        arguments = ["--listen", "127.0.0.1:0", *arguments]
    line = refused("index", *(one.replace("HERE", str(tmp_path)) for one in arguments))
    assert says.replace("HERE", str(tmp_path)) in line
    assert "pass-word" not in line


@pytest.mark.parametrize(
    ("arguments", "given", "says"),
    [
        ([], "", "give the prompt as --text WORDS, --token-ids, --hashes or --chat"),
        (["--token-ids", "-", "--hashes", "-"], "", "and only once"),
        (["--token-ids", "@HERE/x"], "", "--token-ids @HERE/x: No such file or directory"),
        (["--text", "@HERE"], "", "--text @HERE: Is a directory"),
        (["--text", "x" * 5000, "--index", "127.0.0.1:1"], "", "no index answers on 127.0.0.1:1"),
        (["--token-ids", "[1, 2.5]"], "", "--token-ids, item 2: '2.5' is no token id"),
        (["--token-ids", "1 x"], "", "--token-ids, line 1, column 3: 'x' is no token id"),
        (["--token-ids", "HERE/x"], "", "is no token id: write whole numbers from 0 to 4294967295, or @FILE"),
        (["--chat", "hello"], "", "--chat, line 1, column 1: Expecting value"),
        (["--token-ids", "@-"], "1 x", "standard input, line 1, column 3: 'x' is no token id"),
        (["--token-ids", "-"], "", "standard input holds no token id"),
        (["--token-ids", "-"], "1, 2\n3 four", "standard input, line 2, column 3: 'four' is no token id"),
        (["--token-ids", "-"], "1 0x2", "column 3: '0x2' is no token id"),
        (["--token-ids", "-"], "4294967296", "is no token id: write whole numbers from 0 to 4294967295"),
        (["--token-ids", "-"], "-1", "'-1' is no token id"),
        (["--token-ids", "-"], "[1, 2", "standard input, line 1, column 6: Expecting"),
        (["--token-ids", "-"], "[1, 2.5]", "standard input, item 2: '2.5' is no token id"),
        (["--token-ids", "-"], "[1, true]", "item 2: 'True' is no token id"),
        (["--token-ids", "-"], "[" * 100_000, "standard input"),
        (["--hashes", "-"], "deadbeef", "or hexadecimal with 0x in front"),
        (["--hashes", "-"], "18446744073709551616", "is no block hash"),
        (["--hashes", "-", "--cache-salt", "s"], "1", "in the hashes already"),
        (["--token-ids", "-", "--lora-name", "s"], "1", "--lora-name and --lora-path go together"),
        (["--token-ids", "-", "--timeout", "0"], "1", "--timeout"),
        (["--token-ids", "-", "--tenant", "a/b", "--index", "127.0.0.1:1"], "1", "no index answers on 127.0.0.1:1"),
    ],
)  # fmt: skip
def test_wrong_use_of_lookup(arguments: list[str], given: str, says: str, tmp_path: Path) -> None:
    """HERE: a folder with nothing in it."""
    here = [one.replace("HERE", str(tmp_path)) for one in arguments]
    assert says.replace("HERE", str(tmp_path)) in refused("lookup", "--model", "m", *here, stdin=given)


def test_what_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_bytes(b"1 2 \xff")
    with pytest.raises(ConfigError, match="byte 5: this is not text"):
        read_numbers(f"@{tmp_path}/tokens", "--token-ids", "token id", 9)


@pytest.mark.parametrize("option", ["--text", "--token-ids", "--hashes", "--chat"])
def test_the_name_of_a_file_is_no_prompt(option: str, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("1")
    assert refused("lookup", "--model", "m", option, f"{tmp_path}/prompt") == (
        f"kvpool: {option} {tmp_path}/prompt names a file: write {option} @{tmp_path}/prompt for what is in it, or "
        f"send these very words by standard input with {option} -"
    )


def test_a_worker_with_everything() -> None:
    worker = parse_worker(
        "a=tcp://10.0.0.7:5557,model=org/m,block=32,replay=tcp://10.0.0.7:5600,tenant=t,hash=xxhash_cbor,"
        "address=http://10.0.0.7:8000,ranks=3", seed_id("1"),
    )  # fmt: skip
    assert (worker.id, worker.model, worker.block_tokens) == ("t/a", "org/m", 32)
    assert (worker.hash_algorithm, worker.hash_seed_id) == ("xxhash_cbor", seed_id("1"))
    assert worker.address == "http://10.0.0.7:8000"
    assert worker.publishers == tuple(
        Publisher(rank, f"tcp://10.0.0.7:{5557 + rank}", f"tcp://10.0.0.7:{5600 + rank}") for rank in range(3)
    )


@pytest.mark.vllm
def test_ranks_go_up_as_in_vllm() -> None:
    from vllm.distributed.kv_events import ZmqEventPublisher

    worker = parse_worker(WORKER + ",ranks=5,replay=tcp://h:9000", seed_id(None))
    for publisher in worker.publishers:
        rank = publisher.dp_rank
        assert publisher.events == ZmqEventPublisher.offset_endpoint_port("tcp://h:5557", rank)
        assert publisher.replay == ZmqEventPublisher.offset_endpoint_port("tcp://h:9000", rank)
