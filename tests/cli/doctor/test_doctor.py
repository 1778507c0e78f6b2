"""``kvpool doctor`` on real servers and directories: what it finds, and what it says to change.

Over 400 lines because each finding of the doctor is one test on the same servers.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from demo.engine_process import free_ports
from demo.index_process import IndexProcess
from kvpool import IndexClient, Namespace, open_store
from kvpool.cli.doctor.disk import look_at_disk
from kvpool.cli.doctor.rules import DISK, RANK, SETTINGS, TMPFS, WANTED, Finding, judge
from kvpool.cli.doctor.server import CONGESTION_CONTROL, _cores, host_findings, server_findings
from kvpool.cli.doctor.subjects import Disk, Rank
from kvpool.discovery.facts import announce_facts
from kvpool.discovery.quota import write_held, write_quota
from kvpool.discovery.worker import Publisher
from kvpool.errors import StoreUnavailable
from kvpool.index.fleet.rank import ASLEEP, UNHASHED
from kvpool.key.key import quota_keys
from kvpool.store.file_system import FileSystem
from kvpool.store.url import StoreURL
from tests.support.command_line import kvpool, refused
from tests.support.conformance import keys
from tests.support.deadlines import eventually
from tests.support.doctor import NOBODY, announced, examined, sentences, worker
from tests.support.feeds import misbehaving
from tests.support.file_user import record_files
from tests.support.servers import NEWER, SERVERS, Server, running
from tests.support.wire import batch, stored

CONF = Path(__file__).parents[3] / "deploy" / "valkey.conf"
# What the file has for its container only, and what the test's own server has to have otherwise.
OURS_ALONE = {"bind", "protected-mode"}
GOOD = ("--include", str(CONF), "--bind", "127.0.0.1")


def about_the_server(findings: list[dict[str, str]]) -> list[dict[str, str]]:
    """What is to be changed about it. ``host`` and ``workers`` are as this machine and the test have them."""
    return [one for one in findings if one["about"] in ("pool", "server") and one["level"] != "ok"]


def to_change(server: Server) -> list[Finding]:
    """The same, asked without a process of its own."""
    return [one for one in server_findings(StoreURL.parse(server.url)) if one.level != "ok"]


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    with running(request.param, tmp_path, *GOOD) as server:
        yield server


def test_the_file_says_what_the_doctor_wants() -> None:
    lines = [
        line.split(" ", 1) for line in CONF.read_text().splitlines() if line and not line.startswith("#")
    ]
    assert len(dict(lines)) == len(lines), "no setting twice"
    said = {name: value for name, value in lines if name not in OURS_ALONE}
    assert said == WANTED


@pytest.mark.parametrize("server", [*SERVERS, *NEWER], indirect=True)
def test_a_server_with_our_file_has_nothing_to_change(server: Server) -> None:
    code, findings = examined("--pool", server.url)
    assert code == 0
    assert about_the_server(findings) == []
    assert server.client.dbsize() == 0, "the block that was tried is gone again"


WRONG = [
    ("maxmemory", "0", "fail", "maxmemory is 0"),
    ("maxmemory", str(1 << 50), "fail", "maxmemory is more than the memory of its host"),
    ("maxmemory-policy", "noeviction", "fail", "maxmemory-policy is noeviction"),
    ("maxmemory-policy", "volatile-ttl", "fail", "maxmemory-policy is volatile-ttl"),
    ("maxmemory-policy", "volatile-random", "fail", "maxmemory-policy is volatile-random"),
    ("maxmemory-policy", "allkeys-random", "fail", "maxmemory-policy is allkeys-random"),
    ("save", "3600 1", "warn", "save is on"),
    ("appendonly", "yes", "warn", "appendonly is on"),
    ("client-output-buffer-limit", "normal 0 0 0", "warn", "client-output-buffer-limit has none"),
    ("client-output-buffer-limit", "normal 4mb 0 0", "fail", "client-output-buffer-limit ends connections"),
    ("maxmemory-clients", "0", "warn", "maxmemory-clients is 0"),
    ("maxmemory-clients", "1%", "fail", "maxmemory-clients allows 10.2 MiB"),
    ("maxmemory-clients", "20mb", "fail", "maxmemory-clients allows 20 MiB"),
    ("proto-max-bulk-len", "2mb", "fail", "proto-max-bulk-len is 2 MiB"),
    ("client-query-buffer-limit", "2mb", "fail", "client-query-buffer-limit is 2 MiB"),
    ("lazyfree-lazy-user-flush", "no", "warn", "lazyfree-lazy-user-flush"),
    ("hash-max-listpack-value", "1048576", "warn", "hash-max-listpack-value is 1048576"),
    ("timeout", "300", "warn", "timeout is 300"),
    ("tcp-keepalive", "0", "warn", "tcp-keepalive is 0"),
]


def test_each_rule_has_a_wrong_value_here() -> None:
    assert {name for name, *_ in WRONG} == WANTED.keys() == SETTINGS.keys() - {"io-threads"}


@pytest.mark.parametrize(("setting", "value", "level", "says"), WRONG)
def test_each_setting_is_judged(server: Server, setting: str, value: str, level: str, says: str) -> None:
    """Exactly one finding, whose change makes it go."""
    server.client.config_set(setting, value)
    (only,) = to_change(server)
    assert only.level == level
    assert only.says.startswith(says)
    command = shlex.split(only.change.partition(",")[0])
    assert command[:3] == ["CONFIG", "SET", setting]
    server.client.config_set(*command[2:])
    assert to_change(server) == []


def test_io_threads_are_too_many_where_they_outnumber_the_cores_of_their_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running("valkey-server", tmp_path, *GOOD, "--io-threads", "4") as server:
        monkeypatch.setattr(os, "cpu_count", lambda: 4)
        assert to_change(server) == []
        monkeypatch.setattr(os, "cpu_count", lambda: 3)
        (only,) = to_change(server)
    assert only.level == "warn"
    assert only.says.startswith("io-threads is 4, and this host has 3 cores")
    assert only.change.startswith("write io-threads 2, or fewer")


@pytest.mark.parametrize("host", ["10.0.0.7", "valkey.example", "[2001:db8::7]"])
def test_the_cores_of_another_host_are_not_guessed(host: str) -> None:
    assert _cores(StoreURL.parse(f"valkey://{host}:6379")) == 0


def test_a_server_without_config_is_judged_by_info(server: Server) -> None:
    """As managed ones are: what could not be judged is named, with what it should be."""
    server.client.execute_command("ACL", "SETUSER", "default", "-config")
    code, findings = examined("--pool", server.url)
    assert code == 0
    (only,) = about_the_server(findings)
    assert only["says"].startswith("CONFIG is not allowed")
    judged = {"maxmemory", "maxmemory-policy", "appendonly"}
    for name, value in WANTED.items():
        assert (f"{name} {value}" in only["change"]) == (name not in judged)
    server.client.execute_command("ACL", "SETUSER", "default", "+config")
    for setting, value in (("maxmemory", "0"), ("maxmemory-policy", "noeviction"), ("appendonly", "yes")):
        server.client.config_set(setting, value)
    server.client.execute_command("ACL", "SETUSER", "default", "-config")
    code, findings = examined("--pool", server.url)
    assert code == 1
    problems = sentences(findings, "fail")
    assert "maxmemory is 0" in problems
    assert "where the server is configured, set maxmemory 1gb" in problems
    assert "maxmemory-policy is noeviction" in problems
    assert "appendonly is on" in sentences(findings, "warn")


def test_connections_that_were_ended_for_their_memory_are_told(server: Server) -> None:
    server.client.config_set("maxmemory-clients", "2mb")
    namespace = Namespace("default", {"model": "m"})
    with open_store(server.url) as store, pytest.raises(StoreUnavailable):
        store.put_many(namespace.keys([bytes([i]) * 32 for i in range(8)], 0, 0), [bytes(4 << 20)] * 8)
    server.client.config_set("maxmemory-clients", "20%")
    _, findings = examined("--pool", server.url)
    (only,) = about_the_server(findings)
    assert "connections because all clients together held more than maxmemory-clients" in only["says"]


@pytest.mark.parametrize(
    ("name", "noted"), [("bbr", True), ("bbr3", True), ("cubic", False), ("reno", False)]
)
def test_this_hosts_congestion_control_is_judged(tmp_path: Path, name: str, noted: bool) -> None:
    setting = tmp_path / "tcp_congestion_control"
    setting.write_text(f"{name}\n")
    found = list(host_findings(setting))
    assert bool(found) == noted
    for finding in found:
        assert f"on this host uses {name}" in finding.says
        assert "net.ipv4.tcp_congestion_control=cubic" in finding.change
    assert list(host_findings(tmp_path / "not shown")) == []


def test_the_doctor_looks_at_the_host_of_a_network_only(server: Server) -> None:
    bbr = CONGESTION_CONTROL.read_text().startswith("bbr")
    _, findings = examined("--pool", server.url)
    assert any(one["about"] == "host" for one in findings) == bbr
    _, findings = examined("--pool", f"valkey+unix://{server.socket_path}")
    assert not any(one["about"] == "host" for one in findings)


def test_a_user_whom_the_server_does_not_tell_of_changes(server: Server) -> None:
    server.client.execute_command("ACL", "SETUSER", "default", "-client|tracking")
    (only,) = to_change(server)
    assert only.level == "warn"
    assert "does not tell this user which keys change" in only.says
    assert (
        only.change
        == "for the user of an index, allow +client|id +client|tracking +subscribe &__redis__:invalidate"
    )
    server.client.execute_command("ACL", "SETUSER", "default", "+client|tracking")
    assert to_change(server) == []


@pytest.mark.parametrize(("command", "level"), [("touch", "warn"), ("pttl", "warn"), ("hset", "fail")])
def test_a_right_that_is_missing_is_named(server: Server, command: str, level: str) -> None:
    server.client.execute_command("ACL", "SETUSER", "default", f"-{command}")
    (about,) = [one for one in to_change(server) if f"refuses {command.upper()} " in one.says]
    assert about.level == level
    assert about.change == f"allow +{command} to this user"


def test_a_server_without_info_says_so(server: Server) -> None:
    server.client.execute_command("ACL", "SETUSER", "default", "-info", "-config")
    code, findings = examined("--pool", server.url)
    assert code == 0
    assert "INFO is not allowed" in sentences(findings, "warn")


def test_a_user_without_the_keys_is_told_which(server: Server) -> None:
    server.client.execute_command("ACL", "SETUSER", "worker", "on", ">pass-word", "~other:*", "+@all")
    code, findings = examined("--pool", f"valkey://worker:pass-word@127.0.0.1:{server.port}")
    assert code == 1
    text = sentences(findings, "fail")
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
    assert "correct user, password" in sentences(findings, "fail")
    assert "wrong-word" not in json.dumps(findings)


def test_a_replica_is_a_problem(tmp_path: Path, server: Server) -> None:
    folder = tmp_path / "replica"
    folder.mkdir()
    with running(server.name, folder, *GOOD) as replica:
        replica.client.replicaof("127.0.0.1", server.port)
        code, findings = examined("--pool", replica.url)
    assert code == 1
    assert "replica" in sentences(findings, "fail")


@pytest.mark.parametrize("kind", ["missing", "empty", "foreign"])
def test_a_directory_that_is_no_pool_is_a_problem_and_stays_as_it_is(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "pool"
    if kind != "missing":
        (place if kind == "empty" else place / "tmp").mkdir(parents=True)
    if kind == "foreign":
        (place / "tmp" / "thesis.txt").write_text("years of work")
        (place / "usage").write_text("how to use it")
    before = sorted(tmp_path.rglob("*"))
    code, findings = examined("--pool", f"file://{place}")
    assert code == 1
    says = {"missing": "no such directory", "empty": "no pool yet", "foreign": "it is not empty"}
    assert says[kind] in sentences(findings, "fail")
    assert sorted(tmp_path.rglob("*")) == before
    ended = kvpool("doctor", "--pool", f"file://{place}")
    assert ended.returncode == 1
    assert "Everything works" not in ended.stdout


def test_looking_at_a_pool_writes_nothing(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    open_store(f"file://{pool}").close()
    (pool / "tmp" / "1.2.3.4").write_text("left by a dead writer")
    (pool / "usage").unlink()

    def state() -> list[tuple[str, int]]:
        return sorted((str(path), path.stat().st_mtime_ns) for path in [pool, *pool.rglob("*")])

    before = state()
    code, findings = examined("--pool", f"file://{pool}")
    assert code == 0
    assert f"{pool} is a pool" in sentences(findings, "ok")
    assert state() == before
    line = refused("purge", "--pool", f"file://{pool}", "--tenant", "t", "--yes")
    assert "it is empty" in line
    assert state() == before


def test_a_directory(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool"
    open_store(f"{url}?capacity=16MiB").close()
    for spelled in (url, f"{url}?capacity=16MiB"):
        code, findings = examined("--pool", spelled)
        assert code == 0
        assert "capacity 16MiB" in sentences(findings, "ok")
        assert "its capacity" not in sentences(findings, "warn")
    kvpool("capacity", "1000TiB", "--pool", url)
    code, findings = examined("--pool", url)
    assert code == 1
    assert "SIZE makes it smaller" in sentences(findings, "fail")


@pytest.mark.parametrize("of_url", ["8MiB", "64MiB"])
def test_a_url_with_another_capacity_than_the_pools_is_told(tmp_path: Path, of_url: str) -> None:
    url = f"file://{tmp_path}/pool"
    open_store(f"{url}?capacity=42MiB").close()
    for pool in (f"{url}?capacity={of_url}", f"{url}?capacity={of_url} file://{tmp_path}/pool-far"):
        _, findings = examined("--pool", pool)
        says = sentences(findings, "warn")
        assert f"its capacity is 42MiB for all its processes, and not the {of_url} of this URL" in says
        assert f"kvpool capacity --pool {url} {of_url}" in says
        assert "capacity 42MiB" in sentences(findings, "ok"), "the pool's, and not the URL's"


def test_a_pool_of_an_older_kvpool_has_no_capacity_of_its_own(tmp_path: Path) -> None:
    open_store(f"file://{tmp_path}/pool?capacity=16MiB").close()
    (tmp_path / "pool" / "capacity").unlink()
    code, findings = examined("--pool", f"file://{tmp_path}/pool?capacity=16MiB")
    assert code == 0
    assert "no capacity stands in it: each process has its URL's" in sentences(findings, "warn")


def test_a_near_pool_is_examined_before_the_far_one(tmp_path: Path) -> None:
    open_store(f"file://{tmp_path}/near?capacity=16MiB").close()
    open_store(f"file://{tmp_path}/far?capacity=32MiB").close()
    code, findings = examined(
        "--pool", f"file://{tmp_path}/near?capacity=16MiB file://{tmp_path}/far?capacity=32MiB"
    )
    assert code == 0
    about = {one["about"]: one["says"] for one in findings if "capacity" in one["says"]}
    assert "16MiB" in about["near pool"]
    assert "32MiB" in about["pool"]
    code, findings = examined("--pool", f"file://{tmp_path}/none file://{tmp_path}/far?capacity=32MiB")
    assert code == 1
    assert [one["about"] for one in findings if one["level"] == "fail"] == ["near pool"]


@pytest.mark.parametrize(
    ("mounts", "says"),
    [
        ("/dev/vda / ext4 rw 0 0\ntmpfs /mem tmpfs rw,size=1g 0 0", "mounted with huge=never"),
        ("tmpfs /mem tmpfs rw,huge=never,size=1g 0 0", "mounted with huge=never"),
        ("tmpfs /mem tmpfs rw,size=1g,huge=advise 0 0", "mounted with huge=advise"),
        ("tmpfs /mem tmpfs rw,huge=always 0 0", "takes 2 MiB of memory"),
        ("tmpfs /mem tmpfs rw,huge=within_size 0 0", None),
        ("tmpfs /mem tmpfs rw 0 0\ntmpfs /mem tmpfs rw,huge=within_size 0 0", None),  # one over the other
        ("tmpfs /mem tmpfs rw,huge=within_size 0 0\ntmpfs /mem/p tmpfs rw 0 0", None),
    ],
)
def test_the_file_system_of_a_directory_is_judged(tmp_path: Path, mounts: str, says: str | None) -> None:
    (tmp_path / "mounts").write_text(f"{mounts}\n")
    system = FileSystem.of("/mem/p q/pool", tmp_path / "mounts")
    found = list(judge("pool", TMPFS, system, first=True))
    assert [says in finding.says for finding in found] == ([] if says is None else [True])
    for finding in found:
        assert finding.change.startswith("mount -o remount,huge=within_size /mem ")


@pytest.mark.parametrize(
    ("disk", "level", "says"),
    [
        (Disk("/nvme", "ext4", True, None), "ok", "or by kvpool bench store --pool URL"),
        (
            Disk("/nvme", "xfs", True, 2.514, "2.0 MiB"),
            "ok",
            "/nvme (xfs) reads records of 2.0 MiB at 2.51 GB/s, one after the other, past the page cache",
        ),
        (
            Disk("/hdd", "ext4", True, 0.12, "64.0 KiB"),
            "warn",
            "reads records of 64.0 KiB at 0.12 GB/s, one after",
        ),
        (Disk("/odd", "fuse.odd", False, None), "warn", "reads nothing past the page cache"),
        (Disk("/net", "nfs4", True, 5.0), "warn", "/net is nfs4, which comes over a network"),
    ],
)
def test_the_disk_of_a_directory_is_judged(disk: Disk, level: str, says: str) -> None:
    (finding,) = judge("pool", DISK, disk, first=True)
    assert finding.level == level
    assert says in finding.says


def test_how_fast_a_disk_reads_is_measured_on_its_records(tmp_path: Path) -> None:
    system = FileSystem("/", "ext4", "never", 0, 0, 0)
    assert look_at_disk(tmp_path / "none", system).read_gbs is None
    with open_store(f"file://{tmp_path}/pool") as store:
        store.put_many(keys(8), [bytes(1 << 20)] * 8)
    found = look_at_disk(tmp_path / "pool", system)
    if FileSystem.of(str(tmp_path)).kind == "tmpfs" and not found.direct:
        pytest.skip("temporary files lie in memory")
    assert found.direct
    assert found.read_gbs is not None
    assert found.read_gbs > 0
    assert found.record == "1.0 MiB"
    # What nobody can read says nothing of the file system.
    for record in record_files(tmp_path / "pool"):
        record.unlink()
        record.symlink_to("elsewhere")
    assert look_at_disk(tmp_path / "pool", system) == Disk("/", "ext4", True, None)


def test_the_file_system_of_a_link_is_the_one_that_it_leads_to(tmp_path: Path) -> None:
    """Named by doctor and by a store that lacks room: both ask one function."""
    real = tmp_path / "of\tmemory"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    escaped = str(real).replace("\t", "\\011")
    (tmp_path / "mounts").write_text(
        f"/dev/vda / ext4 rw 0 0\ntmpfs {escaped} tmpfs rw,huge=within_size 0 0\n"
    )
    system = FileSystem.of(f"{tmp_path}/link/pool", tmp_path / "mounts")
    assert (system.place, system.kind, system.huge) == (str(real), "tmpfs", "within_size")
    unknown = FileSystem.of(f"{tmp_path}/link/pool", tmp_path / "no mounts")
    assert (unknown.place, unknown.kind) == ("/", "")


@pytest.mark.parametrize("name", [b"caf\xe9", "a\u2028b".encode(), b"a\rb"])
def test_a_mount_with_an_odd_name_hides_no_other(tmp_path: Path, name: bytes) -> None:
    (tmp_path / "mounts").write_bytes(
        b"/dev/vda / ext4 rw 0 0\n/dev/vdb /srv/%b xfs rw 0 0\ntmpfs /mem tmpfs rw 0 0\n" % name
    )
    for place, kind in ((f"/srv/{os.fsdecode(name)}", "xfs"), ("/mem", "tmpfs")):
        system = FileSystem.of(f"{place}/pool", tmp_path / "mounts")
        assert (system.place, system.kind) == (place, kind)


def test_namespaces_that_differ_are_told_apart(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool"
    facts = {"model": "m", "hash_algorithm": "sha256_cbor", "tensor_parallel": 1}
    with open_store(url) as store:
        announce_facts(store, Namespace("default", facts), "m")
        _, findings = examined("--pool", url)
        assert "have one namespace" in sentences(findings, "ok")
        announce_facts(store, Namespace("default", facts | {"tensor_parallel": 2}), "m")
        announce_facts(store, Namespace("other", facts | {"tensor_parallel": 4}), "m")
    _, findings = examined("--pool", url)
    text = sentences(findings, "warn")
    assert "tensor_parallel is" in text
    assert "4" not in text.partition("tensor_parallel is")[2].partition(" ->")[0]


def test_weights_that_differ_are_named(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool"
    digests = ["3fa9" * 8, "77c0" * 8]
    with open_store(url) as store:
        for digest in digests:
            announce_facts(store, Namespace("default", {"engine": "vllm", "weights": digest}), "m")
    _, findings = examined("--pool", url)
    text = sentences(findings, "warn")
    assert 'model "m" has workers that do not share' in text
    assert any(
        f'weights is "{one}" here and "{other}" there' in text for one, other in (digests, digests[::-1])
    )


def test_of_a_past_set_up_it_is_said_that_nobody_is_there(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool"
    past, now = (Namespace("default", {"dtype": dtype}) for dtype in ("float16", "bfloat16"))
    with open_store(url) as store:
        for namespace in (past, now):
            announce_facts(store, namespace, "m")
    with announced(url, worker("w", Publisher(0, ""), namespace=now.hex)):
        _, findings = examined("--pool", url)
    assert (
        f"in namespace {now.hex[:8]} (here) do not share {past.hex[:8]} (there), which has no announced worker: "
        'dtype is "bfloat16" here and "float16" there'
    ) in sentences(findings, "ok")
    assert "do not share" not in sentences(findings, "warn")


def test_of_updated_weights_only_those_that_workers_hold_differ(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool"
    files, first, second = (
        Namespace("default", {"engine": "vllm", **held})
        for held in ({"weights": "of files"}, {"weights_in_memory": "1st"}, {"weights_in_memory": "2nd"})
    )
    with open_store(url) as store:
        for namespace in (files, first, second):
            announce_facts(store, namespace, "m")
        _, findings = examined("--pool", url)
        assert f"have one namespace, {files.hex[:8]}" in sentences(findings, "ok"), "nobody was updated"
    updated, not_yet = (
        worker(name, Publisher(0, ""), namespace=held.hex) for name, held in (("a", second), ("b", files))
    )
    with announced(url, updated):
        _, findings = examined("--pool", url)
        assert f"have one namespace, {second.hex[:8]}" in sentences(findings, "ok")
    with announced(url, updated, not_yet, *(replace(not_yet, name=name) for name in "cde")):
        _, findings = examined("--pool", url)
    text = sentences(findings, "warn")
    assert re.search(f"{second.hex[:8]} .(here|there): a.", text), "who was updated"
    assert re.search(f"{files.hex[:8]} .(here|there): b, c, d and 1 more.", text), "who was not"
    assert "weights_in_memory is" in text
    assert "(an update of the running engine)" in text
    assert "1st" not in text


def test_the_table_names_what_to_change(tmp_path: Path) -> None:
    with running("valkey-server", tmp_path) as server:
        ended = kvpool("doctor", "--pool", server.url)
    assert ended.returncode == 1
    assert re.search(r"^FAIL +server +maxmemory is 0", ended.stdout, re.MULTILINE), ended.stdout
    assert "-> CONFIG SET maxmemory" in ended.stdout
    assert re.search(r"^FAIL +workers +no worker of tenant default has announced", ended.stdout, re.MULTILINE)
    assert re.search(r"^3 FAIL, [0-9]+ WARN, [0-9]+ OK\.$", ended.stdout, re.MULTILINE)
    assert "Not examined, since not named: --index, --front, --picker." in ended.stdout.splitlines()


def test_wrong_use_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.cli.options.DEFAULT_DIRECTORY", f"{tmp_path}/none")  # this host may have one
    assert "--pool URL" in refused("doctor")
    assert "three slashes" in refused("doctor", "--pool", "file://x")
    assert "tenant" in refused("doctor", "--pool", "file:///pool", "--tenant", "a:b")


def test_a_pool_without_workers_says_so(tmp_path: Path) -> None:
    open_store(f"file://{tmp_path}/pool").close()
    ended = kvpool("doctor", "--pool", f"file://{tmp_path}/pool", "--json")
    report = json.loads(ended.stdout)
    assert (ended.returncode, report["ok"]) == (1, False)
    assert NOBODY in sentences(report["findings"], "fail")
    assert report["not_examined"] == ["index", "front", "picker"]


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
    assert 'worker good of model "m": blocks of 16 tokens, sha256_cbor' in sentences(findings, "ok")
    assert "worker no-replay has no replay endpoint" in sentences(findings, "warn")
    problems = sentences(findings, "fail")
    assert "worker silent answers nowhere: not where its events are (tcp://127.0.0.1:" in problems
    assert "advertise_host" in problems
    assert "hash in different ways" in problems
    assert "the same block size" in problems


def test_a_worker_without_events_is_named(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool"
    with announced(url, worker("mute", Publisher(0, ""))), IndexProcess(tmp_path, url) as index:
        with IndexClient(index.address, 60) as client:
            assert eventually(lambda: bool(client.workers()))
        code, findings = examined("--pool", url, "--index", index.address)
        alone = sentences(examined("--index", index.address)[1], "warn")
    said = sentences(findings, "warn")
    assert said.count("worker mute publishes no KV events") == 1, "of the pool and the index, once"
    assert "--kv-events-config" in said
    assert code == 0, "it shares all the same"
    assert "worker mute publishes no KV events" in alone


def test_an_index_and_its_workers_are_judged(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool"
    with (
        misbehaving() as good,
        misbehaving() as late,
        IndexProcess(tmp_path, url) as index,
        IndexClient(index.address, 60) as client,
        announced(url, worker("good", good.publisher)),
    ):

        def followed(count: int) -> bool:
            return sum(not p.stale for w in client.workers() for p in w.publishers) == count

        assert eventually(lambda: followed(1))
        code, findings = examined("--pool", url, "--index", index.address)
        assert code == 0, findings
        assert "it follows 1 worker with 1 rank" in sentences(findings, "ok")
        for block in range(3):
            late.publish(batch(stored([block]), dp_rank=3))
        late.forget(2)
        client.register(worker("late", late.publisher, model="l"))
        assert eventually(lambda: followed(2))
        client.register(worker("lost", Publisher(0, "tcp://127.0.0.1:1", "tcp://127.0.0.1:1"), model="n"))
        client.register(worker("salted", good.publisher, model="s", hash_seed_id="0" * 16))
        client.register(worker("beside", good.publisher, hash_seed_id="0" * 16))  # of the model of good
        code, findings = examined("--index", index.address)
    assert code == 1
    notes = sentences(findings, "warn")
    assert "rank 3 of worker late: incomplete for " in notes
    assert "its first 2 batches were not heard" in notes
    problems = sentences(findings, "fail")
    assert "worker lost answers nowhere" in problems
    assert "worker lost is stale" not in problems, "one finding"
    assert "PYTHONHASHSEED" in problems
    assert re.search(f"rank 3 of worker beside.*: {UNHASHED}", problems), problems


def test_a_worker_that_no_prompt_can_match_is_a_problem(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool"
    with (
        misbehaving() as publisher,
        IndexProcess(tmp_path, url) as index,
        announced(url, worker("draft", publisher.publisher)),
    ):
        publisher.publish(batch(stored([1], lookahead_token_ids=[[5]]), dp_rank=3))

        def told() -> tuple[int, list[dict[str, str]]]:
            return examined("--index", index.address)

        assert eventually(lambda: "EAGLE" in sentences(told()[1], "fail"))
        code, findings = told()
    assert code == 1
    (found,) = [one for one in findings if "EAGLE" in one["says"]]
    assert found["says"].startswith("rank 3 of worker draft: its hashes cover tokens behind their blocks")
    assert "disable_lookahead_block_hashes" in found["change"]


@pytest.mark.parametrize(("problem", "level"), [(ASLEEP, "warn"), ("no answer from tcp://w:5557", "fail")])
def test_an_engine_that_sleeps_is_no_fault(problem: str, level: str) -> None:
    rank = Rank("w", 0, problem, stale=True, resets=0, events="tcp://w:5557")
    (finding,) = judge("index", RANK, rank, first=True)
    assert finding.level == level
    assert f"rank 0 of worker w is {problem if level == 'warn' else 'stale: ' + problem}" in finding.says


def test_a_worker_that_the_index_does_not_know_is_named(tmp_path: Path) -> None:
    here, elsewhere = f"file://{tmp_path}/pool", f"file://{tmp_path}/other"
    with (
        misbehaving() as good,
        IndexProcess(tmp_path, elsewhere) as index,
        announced(here, worker("good", good.publisher)),
    ):
        code, findings = examined("--pool", here, "--index", index.address)
    assert code == 1
    assert "worker good of tenant default is in the pool and not in the index" in sentences(findings, "fail")
    assert "it follows no worker" in sentences(findings, "fail")


def test_an_index_that_is_none_is_a_problem_in_one_sentence(server: Server) -> None:
    for target, says, change in (
        (
            "127.0.0.1:1",
            "nothing listens there",
            "start it: kvpool index --listen 127.0.0.1:1 --pool URL; or correct --index",
        ),
        ("nowhere.invalid:1", "the name of its host is not known", "correct --index"),
    ):
        code, findings = examined("--index", target)
        assert code == 1
        (only,) = findings
        assert (only["says"], only["change"]) == (f"no index answers on {target}: {says}", change)
    code, findings = examined("--index", f"127.0.0.1:{server.port}")
    assert code == 1
    (only,) = findings
    assert "\n" not in only["says"]


def test_looking_at_a_full_directory_evicts_nothing(tmp_path: Path) -> None:
    keys = Namespace("default", {"model": "m"}).keys([bytes([i]) * 32 for i in range(8)], 0, 0)
    with open_store(f"file://{tmp_path}/pool?capacity=16MiB") as store:
        assert all(store.put_many(keys, [bytes(1 << 20)] * 8))
        examined("--pool", f"file://{tmp_path}/pool?capacity=2MiB")
        assert all(store.contains_many(keys))


QUOTAS = [
    ((None, 500), None, None),
    ((2 << 30, None), "warn", "tenant default has a quota of 2.0 GiB, and no index counts what it holds"),
    (
        (1 << 30, 3 << 29),
        "warn",
        "tenant default holds 1.5 GiB of a quota of 1.0 GiB: its workers store nothing new",
    ),
    ((1 << 30, 1 << 20), "ok", "tenant default holds 1.0 MiB of a quota of 1.0 GiB"),
    ((b"garbage", 5), "warn", "the quota of tenant default makes no sense"),
]


@pytest.mark.parametrize(("documents", "level", "says"), QUOTAS)
def test_a_quota_is_examined(
    tmp_path: Path, documents: tuple[int | bytes | None, int | None], level: str | None, says: str | None
) -> None:
    quota, held = documents
    with open_store(f"file://{tmp_path}/pool?capacity=1MiB") as store:
        if isinstance(quota, bytes):
            store.announce(quota_keys("default")[0], quota, lease_s=60)
        else:
            write_quota(store, "default", quota)
        if held is not None:
            write_held(store, "default", held, 60)
    _, findings = examined("--pool", f"file://{tmp_path}/pool?capacity=1MiB")
    found = [(one["level"], one["says"]) for one in findings if one["about"] == "quota"]
    if level is None:
        assert found == []
        return
    ((found_level, found_says),) = found
    assert (found_level, found_says[: len(says or "")]) == (level, says)


def test_a_user_that_may_not_read_its_quota_is_told_so(server: Server) -> None:
    rights = ["on", ">p", "~kvpool:*", "+@all"]
    server.client.execute_command("ACL", "SETUSER", "old", *rights)
    _, findings = examined("--pool", server.url.replace("://", "://old:p@"))
    ((level, change),) = [(one["level"], one["change"]) for one in findings if one["about"] == "quota"]
    assert level == "warn"
    assert change.startswith("allow this user to read kvpool-quota:default:*")
    assert not any("announcements cannot be read" in one["says"] for one in findings)
