"""Both clients against real servers: answers, every kind of trouble as one line, and nothing left behind.

Over 400 lines because the two clients pass one list of tests.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

import kvpool
from kvpool import AsyncIndexClient, BlockHasher, ConfigError, IndexClient, IndexUnavailable, UnknownModel
from kvpool.discovery.quota import Standing
from kvpool.index import (
    EngineAudits,
    FleetStatus,
    HitCurve,
    IndexStatus,
    Lookup,
    Pick,
    Publisher,
    PublisherStatus,
    Row,
    Worker,
    WorkerStatus,
)
from kvpool.index.client import channel
from kvpool.index.client.calls import lookup_call, register_call
from kvpool.index.client.channel import error_of
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.prompt import Prompt
from kvpool.index.protocol.messages import (
    decode_curve,
    decode_lookup,
    decode_prompt,
    decode_route,
    decode_status,
    decode_worker,
    encode_audits,
    encode_curve,
    encode_index_status,
    encode_lookup,
    encode_quota,
    encode_worker_status,
)
from kvpool.key.hashing import seed_id
from kvpool.v1 import index_pb2 as pb
from tests.support.calls import PATIENT_S, by_either, grpc_server
from tests.support.deadlines import eventually
from tests.support.fleets import Served, a_worker, say, serving
from tests.support.proxy import Harm, Proxy, Way
from tests.support.wire import batch, packed64, stored

pytestmark = pytest.mark.usefixtures("grpc_started")


@pytest.fixture
def served() -> Iterator[Served]:
    fleet = Fleet()
    fleet.add(a_worker("a", ranks=2), "flag")
    tokens = list(range(64))
    say(fleet, "default/a", 0, 7, batch(stored(BlockHasher(16).hashes(tokens)[:3])))
    salted = BlockHasher(16).hashes(tokens, lora=("l", "/l"), cache_salt="s", multimodal=[("i", 3, 20)])
    say(fleet, "default/a", 1, 8, batch(stored(salted), dp_rank=1))
    with serving(fleet) as running:
        yield running


# ---- answers


def test_a_client_takes_no_package_of_the_index() -> None:
    """With kvpool[client] alone none could be made: a codec of both sides imported msgspec."""
    code = (
        "import sys\n"
        "for name in ('msgspec', 'aiohttp', 'anyio', 'prometheus_client', 'uvloop'): sys.modules[name] = None\n"
        "import kvpool\n"
        "kvpool.IndexClient('127.0.0.1:1').close(), kvpool.AsyncIndexClient, kvpool.BlockHasher\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    "tokens",
    [
        list(range(64)), tuple(range(64)), range(64), np.arange(64), np.arange(64, dtype=np.uint32),
        np.arange(64, dtype=np.int16), memoryview(np.arange(64, dtype=np.uint64)),
    ],
)  # fmt: skip
def test_tokens_of_any_kind(served: Served, tokens: Any) -> None:
    for answer in by_either(served.target, "lookup", "m", token_ids=tokens):
        assert [row._replace(staleness_ms=0) for row in answer] == [
            Row("a", 0, "http://a:8000", 16, 4, 3, 3, 0, 7, 0, False, 3),
            Row("a", 1, "http://a:8000", 16, 4, 0, 0, 0, 8, 0, False, 0),
        ]


def test_what_enters_the_hash(served: Served) -> None:
    options = {"lora": ("l", "/l"), "cache_salt": "s", "multimodal": [("i", 3, 20)]}
    for answer in by_either(served.target, "lookup", "m", token_ids=list(range(64)), **options):
        assert answer.device_blocks == (0, 4)


def test_hashes_and_candidates(served: Served) -> None:
    served.fleet.add(a_worker("b", tenant="t"), "flag")
    hashes = BlockHasher(16).hashes64(list(range(64)))
    for given_ in (hashes, bytearray(hashes), memoryview(hashes), np.frombuffer(hashes, dtype=np.uint64)):
        for answer in by_either(served.target, "lookup", "m", hashes64=given_):
            assert answer.device_blocks == (3, 0)
    for answer in by_either(served.target, "lookup", "m", hashes64=hashes, workers=["nobody"]):
        assert list(answer) == []
        assert answer == Lookup()
    for answer in by_either(served.target, "lookup", "m", hashes64=hashes, tenant="t"):
        assert answer.workers == ("b",)


def test_register_list_remove(served: Served) -> None:
    worker = a_worker(
        "b", ranks=2, namespace="a" * 32, incarnation="1", hash_seed_id=seed_id("7"), tenant="t"
    )
    assert by_either(served.target, "register", worker, 60.0) == [False, False]
    for (status,) in by_either(served.target, "workers", tenant="t"):
        assert status.worker == worker
        assert (status.source, status.lease_left_ms > 0) == ("call", True)
        assert [one.dp_rank for one in status.publishers] == [0, 1]
    assert [len(found) for found in by_either(served.target, "workers", model="m")] == [2, 2]
    assert by_either(served.target, "remove", "b", tenant="t") == [True, False]
    with IndexClient(served.target, PATIENT_S) as client:
        assert client.register(a_worker("c", incarnation="1")) is False
        assert client.register(a_worker("c", incarnation="2")) is True
        assert client.workers()[1].lease_left_ms == 0
        client.register(a_worker("d", hash_seed_id=""))
        assert client.workers()[2].worker.hash_seed_id == seed_id(None)


def test_the_blocking_client_is_made_of_the_asynchronous_one() -> None:
    root = Path(__file__).parents[3]
    made = subprocess.check_output([sys.executable, root / "scripts/sync-client", "--print"], text=True)
    assert (root / "kvpool/index/client/client.py").read_text() == made, "run scripts/sync-client"


def test_the_removed_name_of_a_limit_is_refused(served: Served) -> None:
    with IndexClient(served.target, PATIENT_S) as client, pytest.raises(ConfigError, match="limit="):
        client.route("m", token_ids=[1], most=1)  # type: ignore[call-arg]


def test_many_threads_share_a_client(served: Served) -> None:
    with IndexClient(served.target, PATIENT_S) as client, futures.ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: client.lookup("m", token_ids=list(range(64))), range(200)))
    assert {answer.device_blocks for answer in answers} == {(3, 0)}


# ---- trouble


@pytest.mark.parametrize(
    ("what", "arguments", "options", "error", "says"),
    [
        ("lookup", ["mm"], {"hashes64": bytes(8)}, UnknownModel, 'unknown model "mm"; did you mean "m"?'),
        ("lookup", ["m"], {"token_ids": [1], "hashes64": bytes(8)}, ConfigError, "only once"),
        ("lookup", ["m"], {"token_ids": [-1]}, ConfigError, "whole numbers from 0 to 4294967295"),
        ("lookup", ["m"], {"token_ids": [1 << 32]}, ConfigError, "whole numbers from 0 to 4294967295"),
        ("lookup", ["m"], {"token_ids": np.array([1 << 32])}, ConfigError, "whole numbers"),
        ("lookup", ["m"], {"token_ids": [1.5]}, ConfigError, "whole numbers"),
        ("lookup", ["m"], {"token_ids": "text"}, ConfigError, "whole numbers"),
        ("lookup", ["m"], {"token_ids": b"1234"}, ConfigError, "ints of 16, 32 or 64 bits"),
        ("lookup", ["m"], {"token_ids": np.array([[1]])}, ConfigError, "ints of 16, 32 or 64 bits"),
        ("lookup", ["m"], {"token_ids": 5}, ConfigError, "sequence of ints"),
        ("lookup", ["m"], {"token_ids": range(9 << 20)}, ConfigError, "too long"),
        ("lookup", ["m"], {"hashes64": b"123"}, ConfigError, "8 bytes a block"),
        ("lookup", ["m"], {"hashes64": [1, 2]}, ConfigError, "what BlockHasher.hashes64 returns"),
        ("lookup", ["m"], {"hashes64": bytes((32 << 20) + 8)}, ConfigError, "at most"),
        ("lookup", [7], {"hashes64": bytes(8)}, ConfigError, "cannot be sent to an index"),
        ("lookup", ["m"], {"hashes64": bytes(8), "workers": []}, ConfigError, "workers is empty"),
        ("lookup", ["m"], {"hashes64": bytes(8), "workers": "ab"}, ConfigError, "list of names"),
        ("lookup", ["m"], {"token_ids": [1], "lora": "name"}, ConfigError, "(name, path)"),
        ("lookup", ["m"], {"token_ids": [1], "lora": (1, 2)}, ConfigError, "cannot be sent"),
        ("lookup", ["m"], {"token_ids": [1], "multimodal": [("i", -1, 2)]}, ConfigError, "cannot be sent"),
        ("lookup", ["m"], {"token_ids": [1], "multimodal": [("i", 5, 1), ("i", 3, 1)]}, ConfigError, "sort them"),
        ("register", [a_worker(block_tokens=0)], {}, ConfigError, "the engine's --block-size"),
        ("register", [a_worker(block_tokens=-1)], {}, ConfigError, "cannot be sent"),
        ("register", [a_worker(), 0], {}, ConfigError, "a lease"),
        ("register", [a_worker(), 1e9], {}, ConfigError, "a lease"),
        ("remove", [""], {}, ConfigError, "a worker's name"),
        ("workers", [], {"tenant": 5}, ConfigError, "cannot be sent"),
    ],
)  # fmt: skip
def test_wrong_use(
    served: Served, what: str, arguments: list[Any], options: Any, error: type, says: str
) -> None:
    with pytest.raises(kvpool.KVPoolError) as caught:
        by_either(served.target, what, *arguments, **options)
    assert type(caught.value) is error
    assert says in str(caught.value)


@pytest.mark.parametrize("client", [IndexClient, AsyncIndexClient])
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["here"], "write HOST:PORT"),
        (["127.0.0.1"], "write HOST:PORT"),
        (["http://127.0.0.1:50051"], "write HOST:PORT"),
        (["127.0.0.1:0"], "port 0 is for listening"),
        ([5], "write HOST:PORT"),
        (["127.0.0.1:1", 0], "timeout_s is more than 0"),
        (["127.0.0.1:1", float("nan")], "timeout_s is more than 0"),
        (["127.0.0.1:1", float("inf")], "at most 3600 seconds"),
        (["127.0.0.1:1", "1"], "timeout_s is more than 0"),
    ],
)
def test_where_no_client_can_be(client: Any, arguments: list[Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        client(*arguments)
    assert says in str(caught.value)


@contextmanager
def listening(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A TCP server that does ``answer`` with each connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        done = threading.Event()
        held: list[socket.socket] = []

        def serve() -> None:
            while not done.is_set():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                held.append(connection)
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            done.set()
            thread.join(60)
            for connection in held:
                connection.close()


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        target = f"127.0.0.1:{gone.getsockname()[1]}"
    with pytest.raises(IndexUnavailable) as caught:
        by_either(target, "workers")
    assert (
        f"no index answers on {target}: nothing listens there; start one: kvpool index --listen {target}"
        in str(caught.value)
    )


def test_a_connection_that_died_silently_is_replaced(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its times at a tenth."""
    options = tuple(
        (name, value // 10 if "ping" in name or "keepalive" in name else value)
        for name, value in channel.OPTIONS
    )
    monkeypatch.setattr(channel, "OPTIONS", options)
    with (
        closing(Proxy(int(served.target.rpartition(":")[2]))) as proxy,
        IndexClient(f"127.0.0.1:{proxy.port}", PATIENT_S) as client,
    ):
        assert client.workers()
        proxy.arm(Way.ANSWERED, 1, Harm.SILENCE)
        with pytest.raises(IndexUnavailable):
            client.workers(timeout_s=0.5)
        assert proxy.harmed == 1

        def answers() -> bool:
            with suppress(IndexUnavailable):
                return bool(client.workers(timeout_s=2))
            return False

        assert eventually(answers)


def test_what_listens_says_nothing() -> None:
    with listening(lambda _: None) as target:
        with pytest.raises(IndexUnavailable, match=f"the index at {target} did not answer within 0.2 s"):
            by_either(target, "lookup", "m", hashes64=bytes(8), timeout_s=0.2)
        with (
            IndexClient(target, PATIENT_S) as client,
            pytest.raises(IndexUnavailable, match=r"within 0\.1 s"),
        ):
            client.workers(timeout_s=0.1)


@pytest.mark.parametrize(
    "says",
    [b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", b"-ERR unknown command\r\n", b"\0" * 100],
)
def test_what_listens_is_no_grpc(says: bytes) -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(says)
        connection.shutdown(socket.SHUT_WR)

    with listening(answer) as target, pytest.raises(IndexUnavailable) as caught:
        by_either(target, "workers", timeout_s=10)
    assert target in str(caught.value)
    assert "does not speak gRPC" in str(caught.value) or "no index answers" in str(caught.value)


ONE_AND_TWO = pb.LookupResponse(worker=["a"], dp_rank=[0, 1]).SerializeToString()


@pytest.mark.parametrize(
    ("handle", "says"),
    [
        (None, "what listens on {} is no kvpool index"),
        (lambda *_: ONE_AND_TWO, "columns differ in length"),
        (lambda *_: b"\xff\xff", "{}"),
    ],
    ids=["another server", "no table", "no message"],
)
def test_a_server_that_is_no_index(handle: Any, says: str) -> None:
    with grpc_server(handle) as target, pytest.raises(IndexUnavailable) as caught:
        by_either(target, "lookup", "m", hashes64=bytes(8))
    assert says.format(target) in str(caught.value)


def test_a_closed_client_says_so(served: Served) -> None:
    client = IndexClient(served.target)
    client.close()
    client.close()
    with pytest.raises(IndexUnavailable, match="was closed"):
        client.workers()

    async def ask() -> None:
        closed = AsyncIndexClient(served.target)
        await closed.close()
        await closed.close()
        await closed.workers()

    with pytest.raises(IndexUnavailable, match="was closed"):
        asyncio.run(ask())


def test_closing_ends_a_call_under_way() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hang(*_: Any) -> bytes:
        entered.set()
        go_on.wait(60)
        return b""

    with grpc_server(hang) as target, futures.ThreadPoolExecutor(1) as thread:
        try:
            client = IndexClient(target, PATIENT_S)
            call = thread.submit(client.workers)
            assert entered.wait(60)
            client.close()
            with pytest.raises(IndexUnavailable, match="was closed"):
                call.result(60)
        finally:
            go_on.set()


def test_a_proxy_in_the_environment_is_not_asked(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert len(by_either(served.target, "workers")) == 2


def test_no_text_of_an_error_is_lost_or_long() -> None:
    class Failed(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.DATA_LOSS

        def details(self) -> str:
            return "line one\nline two " + "x" * 5000

    text = str(error_of("h:1", 1.0, Failed()))
    assert text.startswith("the index at h:1 failed (DATA_LOSS): line one line two xxx")
    assert len(text) < 400


# ---- what is imported


def run(code: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_what_is_missing_is_named() -> None:
    code = """
import sys
sys.modules[MISSING] = None
import kvpool
kvpool.PrefixIndex, kvpool.Worker
for name in ("IndexClient", "AsyncIndexClient"):
    try:
        getattr(kvpool, name)
    except kvpool.ConfigError as error:
        print(error)
"""
    for missing in ("grpc", "google.protobuf"):
        lines = run(code.replace("MISSING", repr(missing))).splitlines()
        package = missing.partition(".")[0]
        says = "install kvpool with its extra client, in a checkout: pip install '.[client]'"
        assert lines == [f"the package {package} is not installed: {says}"] * 2


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = """
import sys, kvpool
kvpool.PrefixIndex, kvpool.Worker, kvpool.Publisher, kvpool.IndexUnavailable
print([name for name in ("grpc", "google.protobuf", "zmq", "prometheus_client", "torch") if name in sys.modules])
kvpool.IndexClient("127.0.0.1:1").close()
print([name for name in ("zmq", "prometheus_client", "torch", "redis", "pydantic") if name in sys.modules])
"""
    assert run(code).splitlines() == ["[]", "[]"]


def test_a_preview_reserves_nothing_and_takes_no_turn(served: Served) -> None:
    with IndexClient(served.target, PATIENT_S) as client:
        asked: dict[str, Any] = {"hashes64": packed64([1]), "reserve_s": 60.0}
        looks = [client.route("m", preview=True, **asked) for _ in range(3)]
        assert [look.reservation for look in looks] == [""] * 3
        assert [look.picks[0].row.dp_rank for look in looks] == [looks[0].picks[0].row.dp_rank] * 3
        assert client.status().index.placements == 0
        placed = client.route("m", **asked)
        assert placed.picks[0].row[:2] == looks[0].picks[0].row[:2], "what was shown"
        assert placed.reservation
        assert client.status().index.placements == 1


# ---- the codec


U32, U64 = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SOME = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
ROWS = st.builds(Row, TEXT, U32, TEXT, U32, U32, U32, U32, U32, U64, U32, st.booleans(), U32, U32)
PUBLISHERS = st.lists(st.builds(Publisher, U32, TEXT, TEXT), max_size=3).map(tuple)
WORKERS = st.builds(
    Worker, name=TEXT, model=TEXT, block_tokens=U32, hash_seed_id=SOME, publishers=PUBLISHERS, tenant=SOME,
    hash_algorithm=SOME, address=TEXT, incarnation=TEXT, namespace=TEXT, names=st.lists(TEXT, max_size=3).map(tuple),
    media_namespaces=st.lists(TEXT, max_size=3).map(tuple),
)  # fmt: skip
STATUSES = st.builds(
    WorkerStatus, worker=WORKERS, source=TEXT, lease_left_ms=U32,
    publishers=st.lists(
        st.builds(PublisherStatus, U32, U64, U64, U64, U64, U64, U32, st.booleans(), TEXT, U64, U64, U64), max_size=3
    ).map(tuple),
)  # fmt: skip
INDEX = st.builds(IndexStatus, *[U64] * 9, TEXT)


def sent(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


@given(st.lists(ROWS, max_size=5))
def test_lookups_travel(rows: list[Row]) -> None:
    lookup = Lookup.of(rows)
    assert list(lookup) == rows
    assert decode_lookup(sent(encode_lookup(lookup))) == lookup


@given(st.lists(ROWS, min_size=1, max_size=5))
def test_an_earlier_index_says_nothing_of_media(rows: list[Row]) -> None:
    """Nor does it know what an item costs; and of what a later one says, an earlier client loses nothing else."""
    lookup = Lookup.of(rows)
    reply = encode_lookup(lookup)
    reply.ClearField("pool_media")
    assert list(decode_lookup(sent(reply))) == [row._replace(pool_media=0) for row in rows]
    columns: dict[str, Any] = {name: [1] * len(rows) for name in Pick._fields[1:-3]}
    ranking = decode_route(sent(pb.RouteResponse(rows=reply, **columns)))
    assert [(pick.row.worker, pick.encode_cost, pick.move_cost) for pick in ranking.picks] == [
        (row.worker, 0, 0) for row in rows
    ]


@given(WORKERS)
def test_workers_travel(worker: Worker) -> None:
    request = sent(register_call(worker, None).request)
    assert decode_worker(request.worker, "default") == worker
    assert request.lease_ms == 0


QUOTAS = st.dictionaries(
    TEXT, st.builds(Standing, U64, st.none() | U64, st.just(True), st.just(False)), max_size=3
)


NAMES = st.lists(TEXT, max_size=3).map(tuple)
AUDITS = st.builds(EngineAudits, TEXT, TEXT, TEXT, U64, U64, U64, TEXT, NAMES, NAMES, st.floats(0, 1e12))


@given(INDEX, st.lists(STATUSES, max_size=3), QUOTAS, st.lists(AUDITS, max_size=3))
def test_statuses_travel(
    index: IndexStatus,
    statuses: list[WorkerStatus],
    standings: dict[str, Standing],
    audits: list[EngineAudits],
) -> None:
    status = FleetStatus(index, tuple(statuses), standings, tuple(audits))
    workers = [encode_worker_status(one) for one in statuses]
    quotas = [encode_quota(*one) for one in standings.items()]
    told = pb.ListWorkersResponse(
        index=encode_index_status(index),
        workers=workers,
        quotas=quotas,
        audits=[encode_audits(one) for one in audits],
    )
    assert decode_status(sent(told)) == status


@given(st.lists(st.tuples(U64, st.floats(0, 1)), max_size=5), U64, st.floats(0, 1))
def test_curves_travel(points: list[tuple[int, float]], count: int, share: float) -> None:
    sizes, rates = (tuple(column) for column in zip(*points, strict=True)) if points else ((), ())
    curve = HitCurve(sizes, rates, count, count, share, 1.5e9, 16.5, count, 1.25)
    assert decode_curve(sent(encode_curve(curve))) == curve


def test_a_curve_with_columns_of_two_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match="it has 2 sizes and 1 hit rates"):
        decode_curve(pb.HitCurveResponse(sizes=[1, 2], hit_rates=[0.5]))


def test_an_index_of_an_earlier_version_says_nothing_of_itself() -> None:
    assert decode_status(pb.ListWorkersResponse()) == FleetStatus(IndexStatus(), ())


@given(
    st.lists(U32, max_size=40), st.none() | st.tuples(SOME, TEXT), st.none() | SOME,
    st.lists(st.tuples(TEXT, U32, U32), max_size=3), st.none() | st.lists(TEXT, min_size=1, max_size=3), SOME,
)  # fmt: skip
def test_questions_travel(
    tokens: list[int],
    lora: tuple[str, str] | None,
    salt: str | None,
    items: list[tuple[str, int, int]],
    workers: list[str] | None,
    tenant: str,
) -> None:
    prompt = Prompt(
        "m", token_ids=tokens, tenant=tenant, lora=lora, cache_salt=salt, multimodal=items, workers=workers
    )
    received = decode_prompt(sent(lookup_call(prompt).request))
    assert prompt.nbytes == received.nbytes == 4 * len(tokens)
    assert replace(received, token_ids=list(received.token_ids or ())) == prompt


@given(st.binary(max_size=200))
def test_noise_is_refused_or_read(noise: bytes) -> None:
    """Whatever parses is judged by an error of ours, or answered."""
    fleet = Fleet()
    fleet.add(a_worker(), "flag")
    try:
        request = pb.LookupRequest.FromString(noise)
    except DecodeError:
        return
    try:
        prompt = decode_prompt(request)
        if prompt.text is not None or prompt.chat is not None:
            return  # for a tokenizer
        fleet.lookup(prompt)
    except kvpool.KVPoolError as error:
        lines = str(error).splitlines()
        assert len(lines) == 1
