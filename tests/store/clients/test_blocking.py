"""What stores with a blocking client promise beyond the kit: deadlines, cancellation, and connections in doubt."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvpool import _native, open_store
from kvpool.errors import ConfigError, NoThread, StoreUnavailable
from kvpool.store.clients import batch_queue, executor
from kvpool.store.store import Store
from tests.support.conformance import MIB, key, keys, payload
from tests.support.deadlines import MARGIN_S, ends_within, eventually, raises
from tests.support.misbehaving import Peer, misbehaving, says, to
from tests.support.servers import CLIENTS, Server, running, with_client


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running("valkey-server", tmp_path) as server:
        yield server


@pytest.fixture(params=["redis", "glide"])
def store(request: pytest.FixtureRequest, server: Server) -> Iterator[Store]:
    with open_store(f"{server.url}?client={request.param}&connections=1") as store:
        yield store


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a frozen server holds up lasts until it goes on, however slow the machine is."""
    monkeypatch.setattr(executor, "MAX_CALL_S", 60.0)


@contextlib.contextmanager
def frozen(server: Server) -> Iterator[None]:
    server.stop()
    try:
        yield
    finally:
        server.go_on()


def test_a_batch_that_no_thread_has_taken_ends_at_its_deadline(server: Server, store: Store) -> None:
    with frozen(server):
        first = store.submit_get([key(1)], [bytearray(10)], timeout_s=60)  # holds the only thread
        waiting = bytearray(10)
        with ends_within(0.2), pytest.raises(StoreUnavailable, match=r"no answer within 0\.2 s"):
            store.get_many_into([key(2)], [waiting], timeout_s=0.2)
        waiting.extend(b"!")  # nobody holds it any more
        assert not first.done()
    assert eventually(first.done)
    assert store.contains_many([key(1)]) == [False]


def test_a_batch_that_no_thread_has_taken_is_cancelled_at_once(server: Server, store: Store) -> None:
    with frozen(server):
        first = store.submit_get([key(1)], [bytearray(10)], timeout_s=60)
        assert eventually(lambda: store.counters()["queued"] == 0)
        source = bytearray(10)
        second = store.submit_put([key(2)], [source], timeout_s=60)
        assert store.counters()["queued"] == 1
        second.cancel()
        assert second.done()
        source.extend(b"!")
        with pytest.raises(StoreUnavailable, match="cancelled"):
            second.wait()
        assert store.counters()["queued"] == 0
        first.cancel()
    assert eventually(first.done)


def test_close_does_not_wait_for_a_deadline_that_is_far_away(
    server: Server, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "MAX_CALL_S", 1.0)
    with frozen(server):
        source = bytearray(4 * MIB)
        transfer = store.submit_put(
            keys(4), [memoryview(source)[n * MIB : (n + 1) * MIB] for n in range(4)], timeout_s=600
        )
        assert eventually(lambda: store.counters()["queued"] < 4)
        with ends_within(1.0 + MARGIN_S):
            store.close()
        assert transfer.done()
        source.extend(b"!")
        with pytest.raises(StoreUnavailable):
            transfer.wait()


def test_a_queue_that_is_full_says_so(server: Server, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_queue, "MAX_QUEUED_KEYS", 10)
    with frozen(server):
        first = store.submit_contains([key(1)], timeout_s=60)
        assert eventually(lambda: store.counters()["queued"] == 0)
        second = store.submit_contains(keys(8), timeout_s=60)
        with pytest.raises(StoreUnavailable, match="queue full: 8 keys are waiting, at most 10 may"):
            store.submit_contains(keys(3))
        second.cancel()
    assert eventually(first.done)
    assert store.contains_many(keys(3)) == [False] * 3


def test_a_fork_is_told_to_open_its_own(store: Store) -> None:
    assert store.put_many([key(1)], [b"x"]) == [True]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork() with threads, from Python 3.12
        child = os.fork()
    if not child:
        code = 1
        try:
            store.contains_many([key(1)])
        except StoreUnavailable as error:
            store.close()
            code = 0 if "open one in this process" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.contains_many([key(1)]) == [True]


def test_a_fork_dials_nothing(server: Server, store: Store) -> None:
    """GLIDE makes its clients again in each child, also those that never connected."""
    server.client.acl_setuser("few", enabled=True, passwords=["+p"], keys=["*"], commands=["+ping"])
    with pytest.raises(ConfigError, match="GLIDE needs"):
        open_store(f"valkey://few:p@127.0.0.1:{server.port}?client=glide")
    assert store.put_many([key(1)], [b"x"]) == [True]
    dialled = server.info("total_connections_received")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork() with threads, from Python 3.12
        child = os.fork()
    if not child:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert server.info("total_connections_received") == dialled
    assert store.contains_many([key(1)]) == [True]


def test_a_key_of_another_type_costs_no_put_beside_it(server: Server, store: Store) -> None:
    """EXEC's reply holds its error."""
    server.client.set(key(1), "a text")
    put = store.submit_put(keys(3), [b"value"] * 3)
    with pytest.raises(StoreUnavailable, match="WRONGTYPE Operation against a key"):
        put.wait()
    assert list(put.statuses()) == [_native.OK, _native.REFUSED, _native.OK]
    assert store.counters()["disconnections"] == 0


def test_values_beside_a_fault_are_progress() -> None:
    """Of a node that is away each slice has some keys: what the others send keeps a long batch alive."""
    queue = batch_queue.BatchQueue()
    views = [memoryview(bytearray(8)) for _ in range(2)]
    batch = queue.submit(batch_queue.QueuedBatch(queue, _native.GET, keys(2), views, 1.0, 60.0))
    assert queue.take() == (batch, 0, 2)
    queue.put_down(batch, 0, [_native.OK, _native.FAULT], "a node is away")
    moved_s = queue.moved_s
    assert moved_s > 0
    batch = queue.submit(batch_queue.QueuedBatch(queue, _native.GET, keys(2), views, 1.0, 60.0))
    assert queue.take() == (batch, 0, 2)
    queue.put_down(batch, 0, [_native.FAULT] * 2, "all are away")
    assert queue.moved_s == moved_s


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("host", ["a..b", f"{'x' * 64}.test"])
def test_a_name_that_no_resolver_takes_is_told(client: str, host: str) -> None:
    with pytest.raises(StoreUnavailable, match=f"cannot connect: .*{host}"):
        open_store(with_client(f"valkey://{host}:6379", client))


# ---------------------------------------------------------------------- a server that misbehaves


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("there", [0, 1, 63, 64, 65, 129, 150])
def test_presence_of_many_keys_takes_few_commands(server: Server, client: str, there: int) -> None:
    with open_store(f"{server.url}?client={client}&connections=1") as store:
        if there:
            assert all(store.put_many(keys(there), [b"x"] * there))
        before = server.info("total_commands_processed")
        assert store.contains_many(keys(150)) == [True] * there + [False] * (150 - there)
        assert store.submit_touch(keys(150)).wait() == [True] * there + [False] * (150 - there)
        assert server.info("total_commands_processed") - before < 150 + 80


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    "words",
    [b"CROSSSLOT Keys in request don't hash to the same slot", b"NOPERM No permissions to access a key"],
)
def test_keys_that_may_not_share_a_command_are_asked_for_one_by_one(client: str, words: bytes) -> None:
    refused: list[bytes] = []

    def refuse(peer: Peer, asked: Sequence[bytes], good: bytes) -> None:
        if asked[0] in (b"EXISTS", b"TOUCH") and len(asked) > 2:
            refused.append(asked[0])
            good = b"-" + words + b"\r\n"
        peer.send(good)

    with misbehaving() as server, open_store(f"{server.url}?client={client}&connections=1") as store:
        assert store.put_many(keys(2), [b"x"] * 2) == [True] * 2
        server.misbehave(refuse)
        for _ in range(3):
            assert store.contains_many(keys(100)) == [True] * 2 + [False] * 98
            assert store.submit_touch(keys(100)).wait() == [True] * 2 + [False] * 98
        assert 0 < len(refused) <= 4


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    ("words", "reconnects"),
    [(b"BUSY Valkey is busy running a script", False), (b"NOPERM No permissions to access a key", True)],
)
def test_keys_share_a_command_again(client: str, words: bytes, reconnects: bool) -> None:
    """After a fault that passes; and after rights that may have changed, which a new connection finds out."""
    asked: list[int] = []
    good, hangs_up = True, False

    def answer(peer: Peer, command: Sequence[bytes], reply: bytes) -> None:
        if hangs_up:
            peer.hang_up()
        if command[0] == b"EXISTS" and len(command) > 2:
            asked.append(len(command))
            if not good:
                reply = b"-" + words + b"\r\n"
        peer.send(reply)

    with misbehaving() as server, open_store(f"{server.url}?client={client}&connections=1") as store:
        server.misbehave(answer)
        good = False
        assert store.contains_many(keys(40)) == [False] * 40
        good, hangs_up = True, reconnects
        if reconnects:
            with contextlib.suppress(StoreUnavailable):
                store.contains_many(keys(40))
            hangs_up = False
        asked.clear()
        assert eventually(
            lambda: not raises(StoreUnavailable, lambda: store.contains_many(keys(40))) and asked == [41],
            within_s=MARGIN_S,
        )


def test_an_evicted_value_has_no_room() -> None:
    """The server kept it, and it was gone when it was told how long to keep it."""
    with misbehaving() as server, open_store(f"{server.url}?client=redis") as store:
        server.misbehave(to(b"EXEC", lambda words, good: b"*2\r\n:2\r\n:0\r\n"))
        assert store.put_many([key(1)], [b"x"]) == [False]
        assert store.counters()["no_room"] == 1
        assert store.counters()["puts"] == 0


@pytest.mark.parametrize(
    ("reason", "no_room"), [(b"OOM command not allowed", 1), (b"READONLY it is a replica", 0)]
)
def test_an_aborted_transaction_says_why(reason: bytes, no_room: int) -> None:
    """As a server does that fills up, or loses its role, between MULTI and EXEC."""
    words = b"-EXECABORT Transaction discarded because of: " + reason + b"\r\n"
    with misbehaving() as server, open_store(f"{server.url}?client=redis") as store:
        server.misbehave(to(b"EXEC", lambda *_: words))
        with contextlib.suppress(StoreUnavailable):
            assert store.put_many([key(1)], [b"x"]) == [False]
        assert store.counters()["no_room"] == no_room


def test_a_surplus_reply_is_not_taken_for_the_next_one() -> None:
    with misbehaving() as server, open_store(f"{server.url}?client=redis&connections=1") as store:
        # The surplus says that the next key is there; it is not.
        server.misbehave(to(b"EXISTS", lambda words, good: good + b":1\r\n"))
        for number in range(5):
            threading.Event().wait(0.05)  # so that the surplus is there
            assert store.contains_many([key(number)]) == [False]
        assert store.counters()["disconnections"] == 4


@pytest.mark.parametrize(
    "reply", [b"$1\r\n1\r\n", b"*0\r\n", b":2\r\n", b":-1\r\n", b"?\r\n", b":x\r\n", b"$-1\r\n"]
)
@pytest.mark.parametrize("verb", ["put", "get", "contains", "delete"])
def test_a_reply_that_does_not_fit_is_a_fault_and_costs_the_connection(reply: bytes, verb: str) -> None:
    value = payload(1, 1000)
    with misbehaving() as server, open_store(f"{server.url}?client=redis&connections=1") as store:
        server.misbehave(says(reply))
        calls: dict[str, Callable[[], object]] = {
            "put": lambda: store.put_many([key(1)], [value]),
            "get": lambda: store.get_many_into([key(1)], [bytearray(1000)]),
            "contains": lambda: store.contains_many([key(1)]),
            "delete": lambda: store.delete_many([key(1)]),
        }
        with pytest.raises(StoreUnavailable):
            calls[verb]()
        assert store.counters()["disconnections"] == 1
        assert store.counters()["faults"] == 1


@pytest.mark.parametrize("client", ["redis", "glide"])
def test_a_store_whose_threads_cannot_start_leaves_no_connection(
    client: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(f"kvpool-{client}"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(NoThread, match="no thread could be started") as caught:
        open_store(f"{server.url}?client={client}")
    assert eventually(lambda: not [one for one in server.client.client_list() if "values" in one["name"]])
    assert caught.tb, "it kept what the constructor had"
