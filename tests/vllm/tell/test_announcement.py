"""What an engine says of itself, from real configurations of vLLM."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Container
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.config import PoolConfig, hash_seed
from kvpool.discovery.facts import keep_facts
from kvpool.discovery.worker import Publisher, check_worker
from kvpool.discovery.worker_record import pack_worker
from kvpool.errors import StoreUnavailable
from kvpool.key.hashing import seed_id
from kvpool.key.key import Namespace
from kvpool.store import Store, open_store
from kvpool.vllm.tell import announcement
from kvpool.vllm.tell.announcement import EngineAnnouncer
from tests.support.deadlines import eventually
from tests.support.servers import Server, started

pytestmark = [pytest.mark.vllm]

NAMESPACE = "cd" * 16
EVENTS = {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}


@pytest.fixture(scope="module")
def base(engine_config: Any) -> Any:
    return engine_config(served_model_name=["tiny", "second"])


Described = Callable[..., Any]


@pytest.fixture
def described(base: Any, monkeypatch: pytest.MonkeyPatch) -> Described:
    """What an engine says whose configuration differs so from ``base``; ``more``: of its parallelism."""
    from vllm.config.kv_events import KVEventsConfig

    from kvpool.vllm.tell import announcement

    def describe(events: dict[str, Any] | None, **more: Any) -> Any:
        settings = PoolConfig(pool=more.pop("pool", "file:///unused"), **more.pop("settings", {}))
        monkeypatch.setattr(base, "kv_events_config", None if events is None else KVEventsConfig(**events))
        for name, value in more.items():
            monkeypatch.setattr(base.parallel_config, name, value)
        return announcement.describe(base, SimpleNamespace(), settings, NAMESPACE)

    monkeypatch.setattr(announcement.internals, "block_sizes", lambda config, cache: (256, 128))
    return describe


def test_what_is_announced(described: Described) -> None:
    told = described(EVENTS, settings={"tenant": "t", "advertise_host": "10.0.0.7"})
    assert told.problems == ()
    worker = told.worker
    assert worker.id == "t/10.0.0.7:5557"
    assert (worker.model, worker.block_tokens, worker.hash_algorithm) == ("tiny", 128, "sha256_cbor")
    assert (worker.hash_seed_id, worker.namespace) == (seed_id(hash_seed()), NAMESPACE)
    assert worker.address == "http://10.0.0.7:8000"
    assert worker.publishers == (Publisher(0, "tcp://10.0.0.7:5557", "tcp://10.0.0.7:5657"),)
    assert pack_worker(worker, 10.0)
    again = described(EVENTS, settings={"tenant": "t", "advertise_host": "10.0.0.7"})
    assert again.worker.incarnation != worker.incarnation


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("vllm serve model", ()),
        ("vllm serve model --served-model-name tiny", ()),
        ("vllm serve model --served-model-name tiny gpt-4 org/x --port 8001 other", ("gpt-4", "org/x")),
        ("vllm serve model --served_model_name tiny gpt-4 tiny gpt-4", ("gpt-4",)),
        ("vllm serve model --served-model-name old --served-model-name tiny new", ("new",)),
        ("vllm serve model --served-model-name=tiny", ()),
        ("vllm serve model --served-model-name another name", ()),
        ("vllm serve model --served-model-name", ()),
        ("vllm serve m --served-model-name tiny \ud800 b\x07 c", ("c",)),
        (f"x --served-model-name tiny {' '.join(map(str, range(99)))}", tuple(map(str, range(64)))),
        (
            f"x --served-model-name tiny {' '.join(str(one) * 1000 for one in range(10))}",
            tuple(str(one) * 1000 for one in range(8)),
        ),
    ],
)
def test_all_served_names_of_the_command_are_announced(
    described: Described, monkeypatch: pytest.MonkeyPatch, command: str, names: tuple[str, ...]
) -> None:
    monkeypatch.setattr("sys.argv", command.split(" "))
    worker = described(EVENTS).worker
    assert (worker.model, worker.names) == ("tiny", names)
    assert pack_worker(check_worker(worker), 10.0)


def test_settings_name_the_worker_and_its_address(described: Described) -> None:
    settings = {"advertise_host": "fd00::7", "http_port": 8001, "worker": "blue"}
    worker = described(EVENTS, settings=settings).worker
    assert (worker.name, worker.address) == ("blue", "http://[fd00::7]:8001")
    assert worker.publishers == (Publisher(0, "tcp://[fd00::7]:5557", "tcp://[fd00::7]:5657"),)
    check_worker(worker)


@pytest.mark.parametrize(
    ("command", "port"),
    [
        ("vllm serve model", 8000),
        ("vllm serve model --port 8001 --host ::", 8001),
        ("api_server.py --port=8002 --model m", 8002),
        ("vllm serve model --port 8001 --port 8002", 8002),
        ("vllm serve model --port", 8000),
        ("vllm serve model --port many --data-parallel-rpc-port 9", 8000),
        ("vllm serve model --port 0 --port=99999", 8000),
    ],
)
def test_the_port_is_that_of_the_command(
    described: Described, monkeypatch: pytest.MonkeyPatch, command: str, port: int
) -> None:
    monkeypatch.setattr("sys.argv", command.split())
    worker = described(None).worker
    assert (worker.name, worker.address) == (f"127.0.0.1:{port}", f"http://127.0.0.1:{port}")
    assert described(None, settings={"http_port": 7}).worker.address == "http://127.0.0.1:7"


@pytest.mark.parametrize("option", ["--ssl-certfile c.pem", "--ssl-certfile=c.pem", "--ssl_certfile c.pem"])
def test_a_command_with_a_certificate_serves_https(
    described: Described, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr("sys.argv", ["vllm", "serve", "model", *option.split(), "--ssl-keyfile", "k.pem"])
    worker = described(None, settings={"http_port": 443}).worker
    assert (worker.name, worker.address) == ("127.0.0.1:443", "https://127.0.0.1:443")


def test_the_host_is_the_one_that_faces_the_pool(described: Described) -> None:
    from kvpool.vllm.tell.announcement import local_host

    assert described(EVENTS).worker.name == "127.0.0.1:5557"
    assert described(EVENTS, pool="valkey://127.0.0.1:6379").worker.name == "127.0.0.1:5557"
    assert local_host("valkey://localhost:1") in ("127.0.0.1", "::1")
    assert local_host("valkey://name.invalid:1") == "127.0.0.1"
    assert local_host("valkey://a..b:1") == "127.0.0.1"
    assert local_host("valkey+unix:///socket") == "127.0.0.1"


def test_an_address_of_the_pool_without_a_route_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the IPv6 address of a name is, on a host that has IPv4 alone."""
    monkeypatch.setattr(announcement, "LOOPBACK", "without a route")
    routed = [
        (socket.AF_INET, socket.SOCK_DGRAM, 0, "", (one, 1)) for one in ("255.255.255.255", "127.0.0.1")
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: routed)
    assert announcement.local_host("valkey://two.test:1") == "127.0.0.1"


def test_a_data_parallel_rank_has_the_ports_that_vllm_gives_it(described: Described) -> None:
    one = described(EVENTS, data_parallel_index=2).worker
    assert one.publishers == (Publisher(2, "tcp://127.0.0.1:5559", "tcp://127.0.0.1:5659"),)
    assert one.name == "127.0.0.1:5557", "one worker with the other ranks"
    own = described(EVENTS, data_parallel_index=2, data_parallel_external_lb=True).worker
    assert own.name == "127.0.0.1:5559", "each rank has an HTTP address of its own"


@pytest.mark.parametrize(
    ("endpoint", "events", "name"),
    [
        ("tcp://[::]:5557", "tcp://host:5557", "host:5557"),
        ("tcp://[fd00::1]:5557", "tcp://[fd00::1]:5557", "host:5557"),
        ("ipc:///run/kv/events-1", "ipc:///run/kv/events-1", "host:run-kv-events-1"),
    ],
)
def test_where_an_endpoint_is_found(described: Described, endpoint: str, events: str, name: str) -> None:
    told = described({**EVENTS, "endpoint": endpoint}, settings={"advertise_host": "host"})
    assert (told.worker.publishers[0].events, told.worker.name) == (events, name)
    assert pack_worker(told.worker, 10.0)


@pytest.mark.parametrize(
    ("replay", "found"),
    [
        ("tcp://0.0.0.0:5657", "tcp://host:5657"),
        ("tcp://127.0.0.1:5657", "tcp://127.0.0.1:5657"),
        ("tcp://eth0:5657", "tcp://host:5657"),
    ],
)
def test_a_replay_endpoint_always_listens(described: Described, replay: str, found: str) -> None:
    told = described({**EVENTS, "replay_endpoint": replay}, settings={"advertise_host": "host"})
    assert (told.worker.publishers[0].replay, told.problems) == (found, ())


@pytest.mark.parametrize("replay", [None, "tcp://*:0", "inproc://x"])
def test_without_a_replay_endpoint_it_is_announced_and_said(described: Described, replay: str | None) -> None:
    told = described({**EVENTS, "replay_endpoint": replay})
    assert told.worker.publishers == (Publisher(0, "tcp://127.0.0.1:5557"),)
    assert 'add "replay_endpoint":"tcp://*:PORT"' in told.problems[0]


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        (None, "add --kv-events-config"),
        ({"enable_kv_cache_events": False}, "add --kv-events-config"),
        ({**EVENTS, "publisher": "null"}, "add --kv-events-config"),
        ({**EVENTS, "endpoint": "tcp://127.0.0.1:5557"}, "connects to one; write tcp://*:PORT"),
        ({**EVENTS, "endpoint": "tcp://0.0.0.0:5557"}, "connects to one; write tcp://*:PORT"),
        ({**EVENTS, "endpoint": "tcp://*:0"}, "others cannot reach the endpoint tcp://*:0"),
        ({**EVENTS, "endpoint": "inproc://x"}, "others cannot reach the endpoint inproc://x"),
    ],
)
def test_what_no_index_could_follow_is_announced_as_such(
    described: Described, events: dict[str, Any] | None, problem: str
) -> None:
    told = described(events)
    assert told.worker.publishers == (Publisher(0, ""),)
    assert told.worker.name == "127.0.0.1:8000"
    assert pack_worker(told.worker, 10.0)
    (sentence,) = told.problems
    assert sentence.startswith(
        "indexes and routers will not see what this worker holds (the pool works all the same"
    )
    assert problem in sentence
    assert told.events_off == ("add --kv-events-config" in problem)


def test_an_endpoint_that_the_engine_refuses_is_its_own_matter(described: Described) -> None:
    told = described({**EVENTS, "endpoint": "ipc:///x"}, data_parallel_index=1)
    assert told.worker.publishers == (Publisher(1, ""),)
    assert "Invalid endpoint" in told.problems[0]


def test_facts_that_a_pool_does_not_take_yet_are_announced_when_it_comes(tmp_path: Path) -> None:
    server = Server("valkey-server", tmp_path)
    config = PoolConfig.load({"pool": server.url, "start_without_pool": True}, {})
    namespace = Namespace(config.tenant, {"weights": "w"})
    with open_store(config.pool, must_answer=not config.start_without_pool) as store:
        announcer = EngineAnnouncer(config, "m", None)
        announcer.enter(store, namespace)
        with started(server):
            assert eventually(lambda: namespace.facts_key in announced(store, namespace))
            announcer.close(store)


def test_facts_that_a_server_evicts_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcement, "KEEP_EVERY_S", 0.05)
    config = PoolConfig.load({"pool": f"file://{tmp_path}/pool"}, {})
    one, other = (Namespace(config.tenant, {"weights": name}) for name in "vw")
    with open_store(config.pool) as store:
        announcer = EngineAnnouncer(config, "m", None)
        for namespace in (one, other):
            announcer.enter(store, namespace)
            assert eventually(lambda of=namespace: of.facts_key in announced(store, of))
            store.withdraw(namespace.facts_key)  # says nothing, as an eviction
            assert eventually(lambda of=namespace: of.facts_key in announced(store, of))
        announcer.close(store)


def test_what_keeps_an_engine_from_sharing_is_said_once_a_namespace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = PoolConfig.load({"pool": f"file://{tmp_path}/pool"}, {})
    one, other = (Namespace(config.tenant, {"dtype": name}) for name in "vw")
    with open_store(config.pool) as store:
        keep_facts(store, other, "m")
        announcer = EngineAnnouncer(config, "m", None)
        for namespace in (one, one, one, other):  # after calls that have changed nothing, and one that has
            store.withdraw(namespace.facts_key)
            announcer.enter(store, namespace)
            assert eventually(lambda of=namespace: of.facts_key in announced(store, of))
        announcer.close(store)
    said = [line for line in caplog.messages if "cannot share" in line]
    assert len(said) == len(set(said)) == 2, "of either"


def test_an_engine_that_can_start_no_thread_runs_unannounced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = PoolConfig.load({"pool": f"file://{tmp_path}/pool"}, {})
    namespace = Namespace(config.tenant, {"weights": "w"})

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with open_store(config.pool) as store:
        announcer = EngineAnnouncer(config, "m", None)
        with monkeypatch.context() as without_threads:
            without_threads.setattr(threading.Thread, "start", refuse)
            announcer.enter(store, namespace)
        announcer.enter(store, namespace)
        assert eventually(lambda: namespace.facts_key in announced(store, namespace))
        announcer.close(store)


def announced(store: Store, namespace: Namespace) -> Container[str]:
    try:
        return store.announcements(namespace.facts_key)
    except StoreUnavailable:
        return ()
